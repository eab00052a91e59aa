//! One request of the engine, and the table of all.

use super::content::PromptContent;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{LegId, RequestId};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::FinishReason;

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SimRequestPhase {
    /// Decode: waits for its core to say that blocks are worth having.
    Asked,
    /// Waits for blocks and a place in a step.
    Waiting,
    /// Decode: has its blocks and waits for the KV.
    Remote,
    /// Decode: has its KV and waits for a place in a step.
    Ready,
    /// Part of the steps.
    Running,
    /// Prefill: preempted; may wait again when its blocks are safe.
    Preempted,
    /// Over for its leg; an answer of the core is due.
    Ended,
}

/// What ends a request that a running step computes.
#[derive(Clone, Debug)]
pub(super) enum DeferredEnd {
    Cancelled,
    Rejected(Failure),
}

/// A request from its arrival until nobody is interested in it.
#[derive(Debug)]
pub(super) struct SimRequest {
    pub(super) id: RequestId,
    pub(super) leg: LegId,
    pub(super) content: PromptContent,
    /// Tokens that the leg asked for.
    pub(super) output: u32,
    pub(super) reason: FinishReason,
    pub(super) phase: SimRequestPhase,
    /// Place in the queue it waits in.
    pub(super) order: i64,
    /// Tokens of the prompt plus those generated.
    pub(super) known: u32,
    /// Leading tokens whose blocks came as prefix hits.
    pub(super) shared: u32,
    pub(super) tables: Vec<BlockList>,
    /// Blocks in quarantine until an answer of the core.
    pub(super) parked: Vec<BlockList>,
    /// Decode: the KV is expected from a prefill.
    pub(super) external: bool,
    /// Decode: the core said that blocks are worth having.
    pub(super) blocks_wanted: bool,
    /// Decode: the first token was reported.
    pub(super) streamed: bool,
    /// The core owes a `PreemptionSafe`.
    pub(super) safe_due: bool,
    /// Why the engine computes the prompt although it was to be transferred.
    pub(super) failure: Option<Failure>,
    pub(super) verdict: Option<DeferredEnd>,
}

impl SimRequest {
    /// Tokens known at the end.
    pub(super) fn limit(&self) -> u32 {
        let generated = if self.reason == FinishReason::Stop { 1 } else { self.output };
        self.content.tokens.saturating_add(generated)
    }
}

/// All requests, by a number that is reused.
#[derive(Debug, Default)]
pub(super) struct SimRequests {
    slots: Vec<Option<SimRequest>>,
    vacant: Vec<u32>,
}

impl SimRequests {
    pub(super) fn insert(&mut self, request: SimRequest) -> u32 {
        match self.vacant.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(request);
                slot
            }
            None => {
                self.slots.push(Some(request));
                self.slots.len() as u32 - 1
            }
        }
    }

    pub(super) fn remove(&mut self, slot: u32) -> SimRequest {
        self.vacant.push(slot);
        self.slots[slot as usize].take().expect("the request exists")
    }

    pub(super) fn get(&self, slot: u32) -> &SimRequest {
        self.slots[slot as usize].as_ref().expect("the request exists")
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> &mut SimRequest {
        self.slots[slot as usize].as_mut().expect("the request exists")
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }
}

/// The part of a running request that every step touches; kept apart so that a decode step reads
/// little memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunningRequest {
    pub(super) slot: u32,
    /// Tokens of the prompt.
    pub(super) prompt: u32,
    /// Tokens whose KV is there.
    pub(super) computed: u32,
    pub(super) known: u32,
    pub(super) limit: u32,
    /// Tokens for which it has blocks.
    pub(super) room: u32,
    /// Tokens that the step computes.
    pub(super) planned: u32,
    /// It has a [`DeferredEnd`].
    pub(super) ends_after_step: bool,
}
