//! What an instance is made of, whichever program holds its machines: `kvferry host` and the
//! stand-in server share it. Its planes and what they count, where it listens, its incarnations,
//! the times and limits of the protocol, and what it tells routers.

mod fabric_args;
mod failure_notice;
pub(crate) mod incarnations;
mod legs;
pub mod limits;
mod listeners;
mod meters;
mod offers;
mod plane;
pub mod record;
mod setup;
mod transfer_log;
mod transfer_spans;
mod trust;

pub(crate) use fabric_args::{BackendArg, FabricArg, mori_settings};
pub(crate) use failure_notice::{FailureNotice, ReportedFailure, find_failure};
pub(crate) use legs::InstanceIdentity;
pub use legs::answered_leg;
pub use limits::{Overrides, ProtocolLimits};
pub(crate) use listeners::{ControlListeners, ListenAddresses, remedy};
pub use meters::{BackendCounts, PATHS, PlaneCounters};
pub(crate) use meters::{
    CounterSource, CutCollector, FAILURES_REMEMBERED, InputCollector, PlaneCollector, PlaneMeter,
    metrics_answer, metrics_page, metrics_text,
};
pub(crate) use offers::SealedLeg;
pub use offers::{AnsweredLeg, PrefillOffer};
pub use plane::PlaneConfig;
pub(crate) use plane::StartedPlane;
pub(crate) use setup::{RankSetup, log_refusal, log_router, log_violation};
pub(crate) use transfer_log::{KEPT, TransferLog};
pub(crate) use trust::{InstanceTrust, TrustSettings};
