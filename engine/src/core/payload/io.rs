//! What the payload core takes and wants: inputs and effects.

use super::note::{DirectoryCall, DirectoryNews};
use crate::core::error::Failure;
use crate::core::ids::{EngineId, number_id};
use crate::core::message::{DecodeAnswer, DecodeHook, PrefillAnswer, PrefillHook};
use crate::core::time::Nanos;
use crate::fabric::Endpoint;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

number_id!(
    /// A process that puts and gets payloads, as its host numbers it; not used again.
    PayloadClient(u32)
);
number_id!(
    /// A range of the pool that somebody owns; not used again.
    SlotId(u64)
);
number_id!(
    /// The hand-over of one payload to one receiver; not used again.
    ClaimId(u64)
);

/// All that one stage of a deployment sends another for one request. Its parts are of any length
/// and content.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PayloadStream {
    /// The stage that puts.
    pub from: Arc<str>,
    /// The stage that gets.
    pub to: Arc<str>,
    /// The request, as the stages name it; or the whole key, of what comes in no chunks.
    pub request: Arc<str>,
}

impl PayloadStream {
    pub fn new(from: &str, to: &str, request: &str) -> PayloadStream {
        PayloadStream { from: from.into(), to: to.into(), request: request.into() }
    }

    /// The key of one of its chunks.
    pub fn chunk(&self, index: u64) -> PayloadKey {
        PayloadKey { stream: self.clone(), chunk: Some(index) }
    }

    /// Bytes of its names.
    pub fn text_len(&self) -> usize {
        self.from.len() + self.to.len() + self.request.len()
    }

    /// The key of what comes whole.
    pub fn whole(&self) -> PayloadKey {
        PayloadKey { stream: self.clone(), chunk: None }
    }
}

impl fmt::Display for PayloadStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} from stage {} to {}", self.request, self.from, self.to)
    }
}

/// The name of a payload within a deployment.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PayloadKey {
    pub stream: PayloadStream,
    /// Which chunk of the stream it is, from 0; none if it is not one of several.
    pub chunk: Option<u64>,
}

impl PayloadKey {
    /// Bytes of its names.
    pub fn text_len(&self) -> usize {
        self.stream.text_len()
    }
}

impl fmt::Display for PayloadKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.chunk {
            Some(chunk) => write!(f, "chunk {chunk} of {}", self.stream),
            None => self.stream.fmt(f),
        }
    }
}

/// Most bytes of the names in a key that a client gives.
pub const KEY_BYTES_MAX: usize = 64 << 10;

/// Why a payload does not come, or is not taken.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PayloadFailure {
    /// The stream is over and has no such chunk.
    Ended,
    /// Its producer will not put it, for this reason.
    GivenUp(Arc<str>),
    /// The process that was to put it is gone.
    ProducerGone,
    /// The host that was to put it, which is named, is gone or out of reach.
    PeerGone(Arc<str>),
    /// It is on another host, and its bytes could not be moved, for this reason.
    NotMoved(Arc<str>),
    /// As many as were to have it have it.
    Taken,
    /// Nobody asked for it in time, or not for so long that what became of it is forgotten.
    Expired,
    /// It was cleaned up.
    CleanedUp,
    /// Another process of its stage has begun a stream with the same name.
    Superseded,
    /// There was no room in the pool for it in time.
    PoolFull {
        /// Bytes asked for.
        bytes: u64,
        /// Bytes in no slot.
        free: u64,
        /// The longest slot that there was room for.
        largest: u64,
        /// Bytes that one stage may have.
        share: u64,
    },
    /// It is longer than the pool.
    TooLong {
        /// Bytes asked for.
        bytes: u64,
        /// Bytes of the pool.
        pool: u64,
    },
    /// A table is full, which is named.
    Overload(Arc<str>),
    /// The host ends.
    Closed,
    /// What a host of a later version calls by this name.
    Unknown(Arc<str>),
}

impl PayloadFailure {
    /// A name for metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            PayloadFailure::Ended => "ended",
            PayloadFailure::GivenUp(_) => "given-up",
            PayloadFailure::ProducerGone => "producer-gone",
            PayloadFailure::PeerGone(_) => "peer-gone",
            PayloadFailure::NotMoved(_) => "not-moved",
            PayloadFailure::Taken => "taken",
            PayloadFailure::Expired => "expired",
            PayloadFailure::CleanedUp => "cleaned-up",
            PayloadFailure::Superseded => "superseded",
            PayloadFailure::PoolFull { .. } => "pool-full",
            PayloadFailure::TooLong { .. } => "too-long",
            PayloadFailure::Overload(_) => "overload",
            PayloadFailure::Closed => "closed",
            PayloadFailure::Unknown(_) => "unknown",
        }
    }
}

impl fmt::Display for PayloadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PayloadFailure::Ended => f.write_str("the stream has ended before it"),
            PayloadFailure::GivenUp(why) => write!(f, "its producer gave it up: {why}"),
            PayloadFailure::ProducerGone => f.write_str("the process that was to put it is gone"),
            PayloadFailure::PeerGone(host) => {
                write!(f, "the host {host} is gone, or is none of those that are known here")
            }
            PayloadFailure::NotMoved(why) => {
                write!(f, "its bytes could not be moved from the host that has it: {why}")
            }
            PayloadFailure::Taken => f.write_str("another receiver has it"),
            PayloadFailure::Expired => f.write_str("nobody took it in time"),
            PayloadFailure::CleanedUp => f.write_str("it was cleaned up"),
            PayloadFailure::Superseded => {
                f.write_str("another process of the stage puts a later request with the same id")
            }
            PayloadFailure::PoolFull { bytes, free, largest, share } => write!(
                f,
                "no room for {bytes} B in the pool, where {free} B are free, {largest} B at most in \
                 one piece, and a stage may have {share} B: release what was got, or give a larger pool"
            ),
            PayloadFailure::TooLong { bytes, pool } => {
                write!(f, "{bytes} B are more than the pool has, {pool} B: give a larger one")
            }
            PayloadFailure::Overload(what) => write!(f, "too many {what}"),
            PayloadFailure::Closed => f.write_str("the host ends"),
            PayloadFailure::Unknown(name) => {
                write!(f, "the other host says {name}, which this version does not know")
            }
        }
    }
}

impl std::error::Error for PayloadFailure {}

/// What a client tells.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PayloadHook {
    /// A process of a stage begins. Those of other deployments do not meet it.
    Joined { deployment: Arc<str>, stage: Arc<str> },
    /// The process is gone, and does not touch the pool any more.
    Left,
    /// It wants to write so many bytes. One [`PayloadAnswer::Reserved`] or
    /// [`PayloadAnswer::NotReserved`] follows, after `wait` at the latest.
    Reserve {
        /// Chosen by the client; it uses it once at a time.
        ticket: u64,
        bytes: u64,
        wait: Nanos,
    },
    /// A reserved slot is written; from now on it is only read.
    Put {
        slot: SlotId,
        key: PayloadKey,
        /// Receivers that get it, each once; at least 1.
        receivers: u32,
        /// True if it is a chunk of the stream that its key names. The first one begins the stream
        /// anew; all others belong to the process that put the first one. One
        /// [`PayloadAnswer::Stored`] follows.
        is_chunk: bool,
    },
    /// A reserved slot is not needed.
    Return { slot: SlotId },
    /// Hand it over when it is there. One [`PayloadAnswer::Arrived`] or
    /// [`PayloadAnswer::Missing`] follows, unless it is abandoned before.
    Want {
        key: PayloadKey,
        /// The process that will put it, if that is known: with it goes what it has not put.
        producer: Option<PayloadClient>,
    },
    /// As [`PayloadHook::Want`], of what a process of one other host puts: it comes from there or not
    /// at all.
    WantFrom {
        key: PayloadKey,
        /// One of [`PayloadInput::Hosts`].
        host: EngineId,
    },
    /// It is not wanted any more. What arrived for it and was not taken is for others. One
    /// [`PayloadAnswer::Abandoned`] follows.
    Abandon { key: PayloadKey },
    /// What arrived was given to the stage: it does not go to anybody else.
    Take { claim: ClaimId },
    /// Nobody reads what was taken any more.
    Release { claim: ClaimId },
    /// This payload will not be put, for this reason. The next one with its key may be.
    GiveUp {
        key: PayloadKey,
        /// As of [`PayloadHook::Put`].
        is_chunk: bool,
        failure: Arc<str>,
    },
    /// Nobody will get this payload if it is there and was not taken.
    Drop { key: PayloadKey },
    /// No further chunk of the stream will be put. Without a failure, whoever waits for one learns
    /// that the stream has ended.
    End {
        stream: PayloadStream,
        failure: Option<Arc<str>>,
        /// True if it holds for the stream that this client puts, and not for a later one with its
        /// name that another process has begun.
        is_own: bool,
    },
    /// Nobody will get the chunks that are there of the stream and were not taken.
    CleanUp {
        stream: PayloadStream,
        /// True if it holds for the stream that this client puts or has taken chunks of, and not for a
        /// later one with its name.
        is_own: bool,
    },
}

impl PayloadHook {
    /// Bytes of the names in it.
    pub fn text_len(&self) -> usize {
        match self {
            PayloadHook::Put { key, .. }
            | PayloadHook::Want { key, .. }
            | PayloadHook::WantFrom { key, .. }
            | PayloadHook::Abandon { key }
            | PayloadHook::GiveUp { key, .. }
            | PayloadHook::Drop { key } => key.text_len(),
            PayloadHook::End { stream, .. } | PayloadHook::CleanUp { stream, .. } => {
                stream.text_len()
            }
            PayloadHook::Joined { .. }
            | PayloadHook::Left
            | PayloadHook::Reserve { .. }
            | PayloadHook::Return { .. }
            | PayloadHook::Take { .. }
            | PayloadHook::Release { .. } => 0,
        }
    }
}

/// Whether the failure of a payload may be that of an earlier request with the same id, so that the
/// payload may still be put for the request whose receiver has asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FormerUse {
    /// It is not: the receiver waited when it failed, or the payload is a later chunk of a stream.
    #[default]
    No,
    /// The payload failed before it was asked for, and no receiver is known to have learned that.
    Perhaps,
    /// A receiver of the earlier request took the payload, or learned that it does not come.
    Yes,
}

/// What a client is told.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PayloadAnswer {
    Reserved {
        ticket: u64,
        slot: SlotId,
        /// Where it begins in the pool, in bytes.
        offset: u64,
    },
    NotReserved {
        ticket: u64,
        failure: PayloadFailure,
    },
    /// A slot that was put belongs to the host. Without a failure, whoever asks from now on gets the
    /// payload; with one nobody does: the stream was cleaned up, or its name is another one's.
    Stored {
        slot: SlotId,
        failure: Option<PayloadFailure>,
    },
    /// A payload that is wanted is not there yet.
    Waits {
        key: PayloadKey,
    },
    /// A payload is there for this client, until it abandons or releases it.
    Arrived {
        key: PayloadKey,
        claim: ClaimId,
        /// Where it begins in the pool, in bytes.
        offset: u64,
        bytes: u64,
        /// Counts the payloads that were put; of two with one key the later has the larger number.
        generation: u64,
    },
    /// A payload that was wanted does not come.
    Missing {
        key: PayloadKey,
        failure: PayloadFailure,
        former: FormerUse,
    },
    /// What was answered about the key before this is for nobody.
    Abandoned {
        key: PayloadKey,
    },
}

impl PayloadAnswer {
    /// True if it says only that the host has taken notice of a hook.
    pub fn is_receipt(&self) -> bool {
        matches!(self, PayloadAnswer::Stored { failure: None, .. } | PayloadAnswer::Waits { .. })
    }
}

/// What can happen to a payload core.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PayloadInput {
    /// A client tells.
    Hook { client: PayloadClient, hook: PayloadHook },
    /// The other hosts that put payloads: all of them, those named before that are still there too.
    Hosts(Vec<PayloadHost>),
    /// The prefill core, from whose pool other hosts pull, tells.
    Prefill(PrefillAnswer),
    /// It tells of hosts that get payloads here.
    PrefillPeer(DirectoryNews),
    /// The decode core, which pulls from other hosts, tells.
    Decode(DecodeAnswer),
    /// It tells of hosts that put payloads.
    DecodePeer(DirectoryNews),
    /// Reserve nothing any more.
    Drain,
    /// A deadline may be due.
    Tick,
}

/// What a payload core wants done.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PayloadEffect {
    /// Tell a client.
    Answer { client: PayloadClient, answer: PayloadAnswer },
    /// Tell the prefill core, whose one group and layer is the pool with a token per page.
    Prefill(PrefillHook),
    /// Have it do something with its peers.
    PrefillPeer(DirectoryCall),
    /// Tell the decode core, which has the same pool.
    Decode(DecodeHook),
    /// Have it do something with its peers.
    DecodePeer(DirectoryCall),
    /// For the log: another host broke the rule, and what it said was dropped.
    PeerMisuse { peer: EngineId, rule: Arc<str> },
    /// For the log: the bytes of a payload did not come from another host.
    FetchFailed { peer: EngineId, failure: Failure },
    /// For the log: a client broke the rule, and what it said was dropped.
    Misuse { client: PayloadClient, rule: Arc<str> },
}

/// Another host that puts payloads.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PayloadHost {
    /// Its prefill core.
    pub engine: EngineId,
    /// Where that listens.
    pub control: Endpoint,
}

/// The pool and the limits of a payload core.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PayloadConfig {
    /// Bytes of the pool.
    pub pool: u64,
    /// How long a payload waits for its receivers; zero: for ever.
    pub hold: Nanos,
    /// How long what another host has waits for room here, before those who want it are told; zero: for
    /// ever. Two hosts that are full of what the other one wants would wait for each other.
    pub room: Nanos,
    /// Slots at a time; more wait as for room.
    pub slots_max: u32,
    /// Processes at a time.
    pub clients_max: u32,
    /// Payloads that one client wants, or has got and not released.
    pub payloads_max: u32,
    /// Other hosts that want or get payloads here, at a time; more wait.
    pub hosts_max: u32,
    /// Payloads that one of them wants, or was offered and has not settled; for more it waits. As many
    /// again that are there for it are offered nevertheless.
    pub host_payloads_max: u32,
    /// Slots that one client waits for at a time.
    pub reservations_max: u32,
    /// Streams whose producer is remembered until they end; of older ones nobody learns that it is
    /// gone, unless it was the last of its stage.
    pub streams_max: u32,
    /// Remembered keys and streams that have ended.
    pub tombstones_max: u32,
}

impl Default for PayloadConfig {
    fn default() -> Self {
        PayloadConfig {
            pool: 1 << 30,
            hold: Nanos::from_secs(300),
            room: Nanos::from_secs(300),
            slots_max: 65_536,
            clients_max: 1_024,
            payloads_max: 65_536,
            hosts_max: 1_024,
            host_payloads_max: 262_144,
            reservations_max: 256,
            streams_max: 65_536,
            tombstones_max: 65_536,
        }
    }
}

impl From<PrefillHook> for PayloadEffect {
    fn from(hook: PrefillHook) -> Self {
        PayloadEffect::Prefill(hook)
    }
}

impl From<DecodeHook> for PayloadEffect {
    fn from(hook: DecodeHook) -> Self {
        PayloadEffect::Decode(hook)
    }
}
