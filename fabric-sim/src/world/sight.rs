//! What a recording keeps beside inputs and effects: what only the world sees.

use crate::hash::TraceHasher;
use crate::observation::{BlockRef, Observation, ObservedLanding, SimRankId};
use kvferry_engine::core::ids::{ClientId, LegId, RequestId};
use kvferry_engine::core::message::Role;
use kvferry_engine::core::time::Nanos;
use serde::{Deserialize, Serialize};
use std::hash::Hasher;

/// An instance and a TP rank of it.
pub type SightedRank = (u16, u16);

/// Something that the world saw. Instances are indices into those of the run, `u16::MAX` is the
/// router; a block is a KV cache group and an id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sight {
    /// An instance started, with so many blocks in the pool of each group.
    Started { instance: u16, name: String, role: Role, tp: u16, blocks: u32 },
    /// An instance lost its state and its memory.
    Crashed { instance: u16 },
    /// A control frame was sent, and may be lost.
    Sent { from: u16, to: u16, frame: u64 },
    /// A control frame arrived, of nobody if it was forged.
    Arrived { from: Option<u16>, to: u16, frame: u64 },
    /// Bytes of an operation that `at` submitted arrived.
    Landed {
        at: SightedRank,
        op: u64,
        source: SightedRank,
        target: SightedRank,
        read: Vec<(u16, u32)>,
        written: Vec<(u16, u32)>,
    },
    /// Blocks got a new owner; ids per group.
    Taken { instance: u16, request: RequestId, blocks: Vec<Vec<u32>> },
    /// Blocks went back to the pool; ids per group.
    Freed { instance: u16, request: RequestId, blocks: Vec<Vec<u32>> },
    /// A request began to use KV that came to a rank, and in what that was wrong.
    Used { at: SightedRank, request: RequestId, tokens: u32, wrong: Option<String> },
    /// A client sent a request.
    Asked { client: ClientId },
    /// A client got its answer, or went away; in words.
    Answered { client: ClientId, answer: String },
    /// An engine made a request of a leg.
    LegTaken { instance: u16, leg: LegId, request: RequestId },
    /// A fault hit, at an instance or between two.
    Fault { kind: String, from: Option<u16>, to: Option<u16> },
    /// Something of payloads, in words.
    Payload { instance: u16, text: String },
    /// A promise was broken.
    Violation { id: String, text: String },
    /// The run is over.
    Ended { verdict: String, unmet: Vec<String>, left: Option<String> },
}

/// Names a control frame by its bytes.
pub fn frame_digest(frame: &[u8]) -> u64 {
    let mut hasher = TraceHasher::new(0);
    hasher.write(frame);
    hasher.finish()
}

fn rank(at: SimRankId) -> SightedRank {
    (at.who.instance, at.rank)
}

/// Blocks of which neighbours may repeat, each once.
fn blocks(list: &[BlockRef]) -> Vec<(u16, u32)> {
    let mut blocks: Vec<_> = list.iter().map(|block| (block.group, block.block)).collect();
    blocks.sort_unstable();
    blocks.dedup();
    blocks
}

impl Sight {
    /// What is kept of an observation, if anything is.
    fn of(seen: &Observation<'_>) -> Option<Sight> {
        Some(match seen {
            Observation::Started { who, spec } => Sight::Started {
                instance: who.instance,
                name: spec.name.clone(),
                role: spec.role,
                tp: spec.tp,
                blocks: spec.blocks,
            },
            Observation::Crashed { who } => Sight::Crashed { instance: who.instance },
            Observation::Landed(landing) => Sight::landing(landing),
            Observation::Taken { who, request, blocks } => Sight::Taken {
                instance: who.instance,
                request: (*request).clone(),
                blocks: blocks.to_vec(),
            },
            Observation::Freed { who, request, blocks } => Sight::Freed {
                instance: who.instance,
                request: (*request).clone(),
                blocks: blocks.to_vec(),
            },
            Observation::Used { at, request, tokens, wrong } => Sight::Used {
                at: rank(*at),
                request: (*request).clone(),
                tokens: *tokens,
                wrong: wrong.map(ToString::to_string),
            },
            Observation::Asked { client } | Observation::Probed { client, .. } => {
                Sight::Asked { client: *client }
            }
            Observation::Answered { client, answer } => {
                Sight::Answered { client: *client, answer: format!("{answer:?}") }
            }
            Observation::ClientGone { client } => {
                Sight::Answered { client: *client, answer: "gone away".into() }
            }
            Observation::LegTaken { who, leg, request } => {
                Sight::LegTaken { instance: who.instance, leg: *leg, request: (*request).clone() }
            }
            Observation::Faulted { kind, from, to } => {
                Sight::Fault { kind: kind.name().into(), from: *from, to: *to }
            }
            Observation::Payload { host, sight } => {
                Sight::Payload { instance: host.instance, text: format!("{sight:?}") }
            }
            _ => return None,
        })
    }

    fn landing(landing: &ObservedLanding<'_>) -> Sight {
        Sight::Landed {
            at: rank(landing.from),
            op: landing.op.0,
            source: rank(landing.source),
            target: rank(landing.target),
            read: blocks(landing.read),
            written: blocks(landing.written),
        }
    }
}

/// Sights that are not in the recording yet.
#[derive(Debug, Default)]
pub(super) struct SightLog(pub(super) Vec<(Nanos, Sight)>);

impl SightLog {
    pub(super) fn observe(&mut self, now: Nanos, seen: &Observation<'_>) {
        self.0.extend(Sight::of(seen).map(|sight| (now, sight)));
    }

    pub(super) fn add(&mut self, now: Nanos, sight: Sight) {
        self.0.push((now, sight));
    }
}
