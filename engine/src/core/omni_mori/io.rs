//! What goes in and out of the machine.

use crate::core::command::{ControlCommand, DataCommand, DataRefusal};
use crate::core::payload::{ClaimId, PayloadAnswer, PayloadHook, PayloadKey};
use crate::core::time::Nanos;
use crate::fabric::{Address, Caps, ControlEvent, DataEvent, Endpoint, RegionId};
use std::sync::Arc;

/// Bytes of a payload that connectors of MoRI know, within a slot of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForeignPayload {
    /// Where they begin in the pool.
    pub at: u64,
    pub bytes: u64,
    /// True if they are what was put, false if they were serialized.
    pub is_fast_path: bool,
}

/// Bytes of a slot ahead of those that come from a peer: for what says that they do.
pub const PREAMBLE_BYTES: u64 = 64;

/// What can happen to the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OmniMoriInput {
    Start,
    /// The control plane, on which there are links of connectors alone, reports.
    Control(ControlEvent),
    Data(DataEvent),
    /// The data plane did not take a call.
    Refused(DataRefusal),
    /// The answer to [`OmniMoriEffect::Deregister`]: whether no byte can land there any more.
    Deregistered {
        region: RegionId,
        is_done: bool,
    },
    /// The payload core answers, but for what arrived.
    Answer(PayloadAnswer),
    /// A payload arrived, and was looked at.
    Arrived {
        key: PayloadKey,
        claim: ClaimId,
        /// Or why connectors of MoRI cannot have it.
        found: Result<ForeignPayload, Arc<str>>,
    },
    /// Put what a sender has, or will have, under a key.
    Fetch {
        key: PayloadKey,
        sender: Endpoint,
    },
    /// Nobody wants it any more.
    Stop {
        key: PayloadKey,
    },
    /// A deadline may be due.
    Tick,
}

/// Why a pull failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullRefusal {
    /// A name for metrics: `unknown`, `unusable`, `length`, `region`, `descriptor`, `in-use`,
    /// `overload`, `fabric` or `timeout`.
    pub kind: &'static str,
    pub why: Arc<str>,
}

/// For the log and the metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OmniMoriReport {
    /// A receiver pulled so many bytes, or did not.
    Pulled { key: PayloadKey, outcome: Result<u64, PullRefusal> },
    /// So many bytes came from a sender, or did not.
    Fetched { key: PayloadKey, outcome: Result<u64, Arc<str>> },
    /// A payload is there that receivers cannot have.
    Unusable { key: PayloadKey, why: Arc<str> },
    /// A peer broke the protocol.
    Violation { from: Option<Endpoint>, rule: Arc<str> },
    /// The data plane does not take the pool, so nothing can be pulled.
    Unregistered(Arc<str>),
}

/// What the machine wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OmniMoriEffect {
    Control(ControlCommand),
    Data(DataCommand),
    /// Register this part of the pool with the data plane.
    Register {
        region: RegionId,
        at: u64,
        bytes: u64,
    },
    /// Make it unreachable, and say whether that is so.
    Deregister {
        region: RegionId,
    },
    /// Tell the payload core, as its client.
    Hook(PayloadHook),
    /// Write into the pool, [`PREAMBLE_BYTES`] ahead of them, whose bytes these are.
    Preamble(ForeignPayload),
    Report(OmniMoriReport),
}

impl From<ControlCommand> for OmniMoriEffect {
    fn from(command: ControlCommand) -> Self {
        OmniMoriEffect::Control(command)
    }
}

impl From<DataCommand> for OmniMoriEffect {
    fn from(command: DataCommand) -> Self {
        OmniMoriEffect::Data(command)
    }
}

impl From<PayloadHook> for OmniMoriEffect {
    fn from(hook: PayloadHook) -> Self {
        OmniMoriEffect::Hook(hook)
    }
}

impl From<OmniMoriReport> for OmniMoriEffect {
    fn from(report: OmniMoriReport) -> Self {
        OmniMoriEffect::Report(report)
    }
}

/// Times and limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OmniMoriSettings {
    /// Connections of receivers; one more is hung up.
    pub links_max: u32,
    /// Keys that receivers ask for at a time.
    pub offers_max: u32,
    /// How long a key is wanted, or what arrived for it kept, after a receiver last asked for it.
    pub linger: Nanos,
    /// How long a payload is kept for a receiver that may not have heard that it has it.
    pub acked: Nanos,
    /// How long what does not come is not asked for again.
    pub missing: Nanos,
    /// Failures in a row after which a payload is not offered, or fetched, any more.
    pub tries_max: u32,
    /// How long a pull may take, and how much more for each 100 MiB.
    pub pull: (Nanos, Nanos),
    /// Regions of receivers at a time.
    pub sessions_max: u32,
    /// How long a region that is not written is kept open.
    pub session_idle: Nanos,
    /// Bytes of one operation at most.
    pub operation_bytes_max: u64,
    /// Pause after `Busy`.
    pub busy: Nanos,
    /// Payloads that are fetched at a time.
    pub fetches_max: u32,
    /// How long one is fetched that its sender does not have.
    pub fetch: Nanos,
    /// How long the answer to a query is waited for.
    pub query: Nanos,
    /// Pause between the first two queries of a key; doubles,
    pub poll: Nanos,
    /// up to this.
    pub poll_max: Nanos,
    /// Connections to one sender.
    pub links_per_sender: u32,
    /// How long a sender that cannot be reached is tried,
    pub reach: Nanos,
    /// in this interval.
    pub redial: Nanos,
    /// How long a connection is kept that is not used.
    pub link_idle: Nanos,
    /// How long room in the pool is waited for.
    pub room: Nanos,
}

impl Default for OmniMoriSettings {
    fn default() -> Self {
        OmniMoriSettings {
            links_max: 1_024,
            offers_max: 4_096,
            linger: Nanos::from_secs(10),
            acked: Nanos::from_secs(1),
            missing: Nanos::from_secs(1),
            tries_max: 3,
            // As long as a receiver of 0.30.0 waits.
            pull: (Nanos::from_secs(30), Nanos::from_secs(5)),
            sessions_max: 256,
            session_idle: Nanos::from_secs(60),
            operation_bytes_max: 64 << 20,
            busy: Nanos::from_ms(1),
            fetches_max: 4_096,
            // As long as a stage of 0.30.0 waits for its input.
            fetch: Nanos::from_secs(600),
            query: Nanos::from_secs(5),
            poll: Nanos::from_ms(1),
            poll_max: Nanos::from_ms(32),
            links_per_sender: 4,
            reach: Nanos::from_secs(10),
            redial: Nanos::from_ms(100),
            link_idle: Nanos::from_secs(60),
            room: Nanos::from_secs(5),
        }
    }
}

impl OmniMoriSettings {
    /// How long so many bytes may take.
    pub(super) fn pull_time(&self, bytes: u64) -> Nanos {
        let (base, more) = self.pull;
        base + Nanos(more.0.saturating_mul(bytes / (100 << 20)).min(Nanos::from_secs(86_400).0))
    }
}

/// Who the machine is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OmniMoriConfig {
    /// The deployment whose payloads are served.
    pub deployment: Arc<str>,
    /// Where the data plane is reached.
    pub address: Address,
    pub caps: Caps,
    /// Bytes of the pool.
    pub pool: u64,
    pub settings: OmniMoriSettings,
}
