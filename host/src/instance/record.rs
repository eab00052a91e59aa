//! What a host knows of a transfer: the same for its metrics, the connector and the trace.

use kvferry_engine::core::ids::{EngineId, RequestId, TransferKey};
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::time::Nanos;
use opentelemetry::trace::SpanContext;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// How a transfer ended on the side of this engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TransferOutcome {
    /// All of it is where it belongs.
    Done,
    /// Nothing had to be moved: the decode had it, or another copy of the request was served.
    Local,
    /// It did not get there.
    Failed {
        /// The kind of the failure, for metrics.
        cause: Arc<str>,
        /// The failure, for people.
        why: String,
    },
}

impl TransferOutcome {
    /// The name of the kind, for tables and metrics.
    pub const fn name(&self) -> &'static str {
        match self {
            TransferOutcome::Done => "done",
            TransferOutcome::Local => "local",
            TransferOutcome::Failed { .. } => "failed",
        }
    }
}

/// What a decode and its prefill speak with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpokenDialect {
    Native,
    Moriio,
}

impl SpokenDialect {
    /// Its name, for metrics.
    pub const fn name(self) -> &'static str {
        match self {
            SpokenDialect::Native => "native",
            SpokenDialect::Moriio => "moriio",
        }
    }
}

/// A request with a leg, from its arrival until nothing more is to be said of it. Points in time
/// count from the start of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferRecord {
    /// The request, as the engine names it.
    pub request: RequestId,
    /// The transfer; none if the leg could not be read.
    pub transfer: Option<TransferKey>,
    /// The other engine, as far as it is known.
    pub peer: Option<EngineId>,
    /// When the engine told of the request.
    pub arrived: Nanos,
    /// When the transfer began. Where bytes are moved from here: when the first rank was given the
    /// job. At a decode that is written to: when the prefill was told the blocks. At a prefill that
    /// is read from it is not known.
    pub begun: Option<Nanos>,
    /// When the last byte of it was moved, as far as this side knows.
    pub moved: Option<Nanos>,
    /// At a prefill: when the prompt was computed, or given up.
    pub finished: Option<Nanos>,
    /// When it ended, and how; none while it is under way.
    pub ended: Option<(Nanos, TransferOutcome)>,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Of those, at a decode, how many had their KV before.
    pub computed: u32,
    /// KV blocks of the request, of all groups.
    pub blocks: u32,
    /// Bytes that all ranks moved; none where others do that.
    pub bytes: Option<u64>,
    /// At a decode: what its leg has it speak.
    #[serde(default)]
    pub dialect: Option<SpokenDialect>,
    /// The span that it is part of, if its request named one.
    #[serde(skip)]
    pub(crate) parent: Option<SpanContext>,
}

impl TransferRecord {
    /// From the arrival until the transfer began.
    pub fn queued(&self) -> Option<Nanos> {
        self.begun.map(|begun| begun - self.arrived)
    }

    /// How long the transfer took, if it went well.
    pub fn duration(&self) -> Option<Nanos> {
        let (begun, moved) = (self.begun?, self.moved?);
        matches!(self.ended, Some((_, TransferOutcome::Done))).then_some(moved - begun)
    }
}

/// What the connector is told of a transfer that ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferSummary {
    pub outcome: TransferOutcome,
    pub queued: Option<Nanos>,
    pub duration: Option<Nanos>,
    /// Bytes that the planes of all ranks moved since the last transfer ended, by path. Several
    /// transfers at a time share them: they are for sums.
    pub bytes: Vec<(Arc<str>, u64)>,
    /// At a decode: what was spoken.
    #[serde(default)]
    pub dialect: Option<SpokenDialect>,
}

/// The last transfers of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferTrace {
    /// The version of the host's program.
    pub program: String,
    /// The engine and what it does; none if the host has no engine yet.
    pub engine: Option<(EngineId, Role, Mode)>,
    /// The process of the host.
    pub pid: u32,
    /// When the host started, in microseconds since 1970.
    pub started_unix_us: u64,
    /// When the trace was taken.
    pub now: Nanos,
    /// By their arrival. Those that ended are as many as the host keeps.
    pub records: Vec<TransferRecord>,
}
