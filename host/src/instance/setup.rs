//! What the machines of an instance are started with.

use kvferry_engine::actors::LocalPlanes;
use kvferry_engine::core::config::CoreConfig;
use kvferry_engine::core::error::{Failure, PeerViolation};
use kvferry_engine::core::ids::EngineId;
use kvferry_engine::core::instance::{Instance, InstanceInput};
use kvferry_engine::core::layout::LayerLayout;
use kvferry_engine::core::message::RouterEvent;
use kvferry_engine::core::transfer::{TransferConfig, TransferSettings};
use kvferry_engine::fabric::{DataPlane, Memory};

/// A TP rank that is to be started.
pub(crate) struct RankSetup {
    plane: Box<dyn DataPlane>,
    transfer: TransferConfig,
}

impl RankSetup {
    /// A rank over its plane: where its KV lies, and its times and limits.
    pub(crate) fn new(
        core: &CoreConfig,
        rank: u16,
        plane: Box<dyn DataPlane>,
        (memory, layers): (Vec<Memory>, Vec<LayerLayout>),
        settings: TransferSettings,
    ) -> RankSetup {
        let caps = plane.caps();
        let transfer = TransferConfig {
            rank,
            role: core.role,
            mode: core.mode,
            geometry: core.geometry.clone(),
            address: plane.address(),
            caps,
            memory,
            layers,
            settings,
        };
        RankSetup { plane, transfer }
    }

    /// Adds its machine and its plane to those of a process; the machine's first input.
    pub(crate) fn join(self, instance: &mut Instance, planes: &mut LocalPlanes) -> InstanceInput {
        let rank = self.transfer.rank;
        instance.add_rank(self.transfer);
        planes.add_rank(rank, self.plane);
        InstanceInput::Start(rank)
    }
}

/// Logs that a peer was not let in, and why.
pub(crate) fn log_refusal(peer: &EngineId, failure: &Failure) {
    tracing::warn!(peer = %peer, why = %failure, "refused a hello");
}

/// Logs a frame that was dropped.
pub(crate) fn log_violation(violation: &PeerViolation) {
    tracing::warn!(
        peer = &*violation.peer,
        frame = &*violation.frame,
        rule = &*violation.rule,
        "dropped a frame"
    );
}

/// Logs what becomes of the registrations.
pub(crate) fn log_router(said: &RouterEvent) {
    match said {
        RouterEvent::Registered { router } => {
            tracing::info!(router = %router, "registered with the router; it does not acknowledge");
        }
        RouterEvent::Silent { router } => {
            tracing::warn!(router = %router,
                "the router does not answer; no requests come from it, and it is tried again");
        }
    }
}
