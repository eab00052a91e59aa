//! What the machines of an instance are started with.

use kvferry_engine::actors::InstanceBuilder;
use kvferry_engine::core::error::{Failure, PeerViolation};
use kvferry_engine::core::ids::EngineId;
use kvferry_engine::core::layout::LayerLayout;
use kvferry_engine::core::message::RouterEvent;
use kvferry_engine::core::transfer::TransferSettings;
use kvferry_engine::fabric::{DataPlane, Memory};

/// A TP rank that is to be started over its plane: where its KV lies, and its times and limits.
pub(crate) struct RankSetup {
    pub(crate) rank: u16,
    pub(crate) plane: Box<dyn DataPlane>,
    pub(crate) kv: (Vec<Memory>, Vec<LayerLayout>),
    pub(crate) settings: TransferSettings,
}

impl RankSetup {
    /// Adds it to an instance.
    pub(crate) fn add_to(self, instance: InstanceBuilder) -> InstanceBuilder {
        instance.with_rank(self.rank, self.plane, self.kv, self.settings)
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
            tracing::info!(router = %router, "registrations are sent to the router; its /workers lists those that it takes");
        }
        RouterEvent::Silent { router } => {
            tracing::warn!(router = %router,
                "the router does not answer; no requests come from it, and it is tried again");
        }
    }
}
