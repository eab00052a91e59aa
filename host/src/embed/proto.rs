//! What the connector in a serving engine and its host tell each other over the local socket:
//! frames of a length (four bytes, big-endian) and a value of [`ToHost`] or [`FromHost`] in
//! MessagePack.

use super::rank::RankPlan;
use super::record::{Ended, Trace};
use super::spec::{Engine, Worker};
use crate::meters::Counters;
use engine::core::dialect::moriio::address::ZmqAddress;
use engine::core::ids::{Incarnation, RequestId, StepId};
use engine::core::message::{DecodeAnswer, DecodeHook, Job, PrefillAnswer, PrefillHook, Report};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The version of these messages; both sides have to speak the same one.
pub const VERSION: u16 = 5;

/// Longest frame in bytes.
pub const FRAME_MAX: usize = 64 << 20;

/// The first message of a connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`] of who speaks.
    pub version: u16,
    /// Who that is.
    pub who: Who,
}

/// A part of a serving engine, or who looks on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Who {
    /// Its scheduler; one per engine.
    Scheduler(Box<Engine>),
    /// One of its workers.
    Worker(Box<Worker>),
    /// The transfer actor in one of its workers, where they are there.
    Transfer {
        /// The worker's rank.
        rank: u16,
        /// Descriptor, in the worker, of the pipe that gets its last words.
        words: Option<i32>,
    },
    /// Somebody else, who is told the last transfers.
    Observer,
}

/// What a connector tells.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToHost {
    /// Scheduler: a request with transfer parameters arrived (`on_new_request`).
    Arrived {
        /// The request, as the engine names it.
        request: RequestId,
        /// Its `kv_transfer_params`, a JSON object.
        params: Arc<str>,
        /// Tokens of its prompt.
        tokens: u32,
    },
    /// Scheduler of a prefill: anything else of a request that arrived.
    Prefill(PrefillHook),
    /// Scheduler of a decode: the same.
    Decode(DecodeHook),
    /// Worker of a prefill: the first `layers` layers of a step are computed.
    Layers {
        /// The step.
        step: StepId,
        /// How many.
        layers: u16,
    },
    /// Transfer actor: for the core.
    Report {
        /// What it says.
        report: Report,
        /// What its data plane did so far.
        moved: Counters,
    },
    /// Transfer actor: what its data plane did so far; when it changed, at most once per second.
    Moved(Counters),
    /// Transfer actor: it cannot begin.
    Unable {
        /// What it lacks and what to do.
        why: String,
    },
}

/// What a host tells.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FromHost {
    /// To all: the engine is served. Hooks before it are lost.
    Ready {
        /// Where peers find the engine.
        address: ZmqAddress,
        /// Milliseconds for which a finished prefill's blocks may be read by others though the host
        /// has ended; 0 where nobody does.
        lease_ms: u64,
        /// The life of this host's actors.
        life: Incarnation,
    },
    /// To all: it is not, and why; the connection ends.
    Refused {
        /// What is wrong and what to do.
        why: String,
    },
    /// To a scheduler: the request is served as if it had no transfer parameters, or not at all.
    Unusable {
        /// The request.
        request: RequestId,
        /// What is wrong with its parameters.
        why: String,
    },
    /// To a transfer actor, before any job: what it is.
    Begin(Box<RankPlan>),
    /// To all transfer actors.
    Job(Job),
    /// To the scheduler of a prefill; that blocks may be reused, to its workers.
    Prefill(PrefillAnswer),
    /// To the scheduler of a decode.
    Decode(DecodeAnswer),
    /// To a scheduler, before the answer that ends it: a transfer ended.
    Ended(Ended),
    /// To a scheduler, when they change, at most once per second: KV blocks that the host keeps from
    /// reuse.
    Kept {
        /// Of a prefill, for its transfers.
        held: u32,
        /// Of a decode, because bytes of a failed transfer may still land.
        quarantined: u32,
    },
    /// To an observer, whose connection then ends.
    Trace(Box<Trace>),
}
