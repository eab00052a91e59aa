//! Hosts with pools, and what stages put and get there.

use kvferry_engine::core::Nanos;
use kvferry_engine::core::payload::PayloadConfig;
use serde::{Deserialize, Serialize};

/// What a run is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Served {
    /// Requests of clients, by prefill and decode instances.
    Requests,
    /// Payloads between stages, by hosts with pools.
    Payloads,
}

/// A host whose pool has payloads. Of its two cores others pull from one and it pulls with the
/// other; both are in [`super::Run::instances`] and have the pool as their KV.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PayloadHostSettings {
    pub name: String,
    /// Index of its prefill core; its decode core is the next one.
    pub instance: u16,
    pub config: PayloadConfig,
}

/// All that one process puts for others of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkloadStream {
    /// The earlier stream whose id it uses again: it begins when that is over, and its times count
    /// from then. None if its id is its own.
    pub of: Option<u32>,
    /// Index of the host where its producer is.
    pub from: u16,
    /// When the producer begins.
    pub start: Nanos,
    pub chunks: Vec<WorkloadChunk>,
    /// There is one payload, which is no chunk, and no end behind it.
    pub is_whole: bool,
    /// How often each is put, with other content each time; what comes later replaces what nobody took.
    pub puts: u32,
    /// Receivers that each is put for; where there are more, some of them come too late.
    pub copies: u32,
    /// How long the producer waits for room for each.
    pub wait: Nanos,
    /// What the producer does behind the last chunk.
    pub end: WorkloadEnd,
    /// Each gets every chunk.
    pub receivers: Vec<StreamReceiver>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkloadChunk {
    pub bytes: u64,
    /// From the chunk before it to when a slot for it is asked for.
    pub pause: Nanos,
    /// How long it takes to write it.
    pub write: Nanos,
}

/// What the producer of a stream does behind its last chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum WorkloadEnd {
    /// It says that the stream has ended.
    Ends,
    /// It says that what is missing will not come.
    GivesUp,
    /// It is gone without a word.
    Leaves,
    /// It cleans up what nobody took, which nobody gets then.
    CleansUp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamReceiver {
    /// Index of the host where it is.
    pub host: u16,
    /// When it asks for the first chunk.
    pub start: Nanos,
    /// How long it reads each.
    pub reads: Nanos,
    /// It says which host has what it asks for.
    pub is_named: bool,
    /// It goes away this long after it began, and how.
    pub gone: Option<(Nanos, Departure)>,
}

/// How a receiver stops before it has everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Departure {
    /// It says that it wants no more.
    Abandons,
    /// It says so, and that nobody gets the rest.
    CleansUp,
    /// Its process is gone.
    Leaves,
}
