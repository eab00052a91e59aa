//! What an engine needs of a plane beside moving bytes.

use kvferry_engine::fabric::{DataPlane, SessionId};
use kvferry_fabric_host::{HostPlane, SessionPaths};

/// A data plane whose address and regions are MoRI's descriptors.
pub trait CompatPlane: DataPlane {
    /// How the bytes of an open session go, where the plane has more than one way.
    fn paths(&self, session: SessionId) -> Option<SessionPaths>;
}

impl CompatPlane for HostPlane {
    fn paths(&self, session: SessionId) -> Option<SessionPaths> {
        HostPlane::paths(self, session)
    }
}
