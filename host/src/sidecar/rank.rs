//! What a transfer actor is started with, in its host or in its worker.

use super::fault_injector::with_faults;
use crate::instance::{PlaneConfig, PlaneMeter, RankSetup, StartedPlane};
use kvferry_engine::core::config::CoreConfig;
use kvferry_engine::core::layout::LayerLayout;
use kvferry_engine::core::transfer::TransferSettings;
use kvferry_engine::fabric::Memory;
use kvferry_fabric_mori::DeviceEvents;
use serde::{Deserialize, Serialize};

/// A rank that is to be served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPlan {
    /// The core that it works for.
    pub core: CoreConfig,
    /// TP rank.
    pub rank: u16,
    /// Address that its data plane listens at.
    pub host: String,
    /// Settings of its data plane.
    pub plane: PlaneConfig,
    /// Its KV, as the process reaches it that the actor is in.
    pub memory: Vec<Memory>,
    /// Where its layers lie in that.
    pub layers: Vec<LayerLayout>,
    /// Times and limits of its transfer actor, see
    /// [`Limits::operations`](crate::instance::ProtocolLimits).
    #[serde(default)]
    pub operations: TransferSettings,
}

/// An actor to be started, and what tells of its plane.
pub(super) struct SidecarRank {
    pub(super) parts: RankSetup,
    pub(super) meter: PlaneMeter,
    pub(super) events: Option<DeviceEvents>,
}

impl RankPlan {
    /// Makes its data plane, and gives it to the actor.
    ///
    /// # Errors
    /// What the plane cannot have, and why.
    pub(super) fn parts(self) -> Result<SidecarRank, String> {
        let StartedPlane { plane, meter, events } =
            self.plane.start(&self.core, self.rank, &self.host)?;
        let plane = with_faults(plane)?;
        if !self.core.verify.is_off() && !plane.digests() {
            return Err(format!(
                "verify = {}: what moves the bytes of rank {} cannot digest its memory; leave `verify` \
                 out",
                self.core.verify, self.rank
            ));
        }
        let kv = (self.memory, self.layers);
        let parts = RankSetup { rank: self.rank, plane, kv, settings: self.operations };
        Ok(SidecarRank { parts, meter, events })
    }
}
