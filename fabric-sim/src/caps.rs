//! What simulated data planes can do.

use engine::fabric::{Caps, FenceScope, Placement};

/// What all data planes can do.
pub(crate) fn caps(placement: Placement) -> Caps {
    Caps {
        read: true,
        write: true,
        operations_max: 1024,
        slices_max: 65_536,
        placement,
        fence: FenceScope::Peer,
    }
}
