//! What goes into and comes out of the stand-in engine.

use super::content::PromptContent;
use kvferry_engine::core::ids::{LegId, RequestId, StepId};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{DecodeAnswer, DecodeHook, PrefillAnswer, PrefillHook};
use kvferry_engine::core::router::{LegBody, LegEvent};
use kvferry_engine::core::time::Nanos;
use serde::{Deserialize, Serialize};

/// What can happen to an engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EngineInput {
    Leg {
        /// The leg; never seen before by this engine.
        leg: LegId,
        /// The id that the caller sent (`X-Request-Id`), equal on both legs. The engine makes its
        /// own from it.
        request: RequestId,
        prompt: PromptContent,
        /// What to do with it.
        body: LegBody,
        /// The first generated token is a stop token: the leg ends with it, as `Stop`.
        stop: bool,
    },
    /// The caller closed the connection of a leg. A leg that ended is ignored.
    CancelLeg { leg: LegId },
    /// The prefill core answers.
    Prefill(PrefillAnswer),
    /// The decode core answers.
    Decode(DecodeAnswer),
    /// The step of the last [`EngineEffect::Step`] is over.
    StepDone { step: StepId },
    /// Fault hook: preempt the request that was admitted last, at the end of the running step.
    /// Nothing happens if no request is running.
    PreemptOne,
}

/// What an engine wants done, and what it lets its shell know.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EngineEffect {
    /// Tell the prefill core.
    Prefill(PrefillHook),
    /// Tell the decode core.
    Decode(DecodeHook),
    /// Run a step. At most one runs at a time.
    Step(StepPlan),
    /// Tell the caller of a leg. After `Done` or `Failed`, or a cancel, nothing follows for it.
    Leg { leg: LegId, event: LegEvent },
    /// Observation: blocks got a new owner, who may write them from now on. Those that it shares
    /// as prefix hits are not listed.
    Taken {
        request: RequestId,
        /// Block ids per group.
        blocks: Vec<Vec<u32>>,
    },
    /// Observation: blocks went back to the pool, to be handed out again at any time. Those that
    /// others share are not listed.
    Freed {
        request: RequestId,
        /// Block ids per group.
        blocks: Vec<Vec<u32>>,
    },
    /// Observation: from now on the request reads the KV of tokens `..tokens`, which it did not
    /// compute itself (transferred, or prefix hits).
    Use {
        request: RequestId,
        /// What the KV must be.
        content: PromptContent,
        tokens: u32,
        /// The token that is computed from it.
        next: u32,
        /// Blocks per group; a sliding window lists those that it still sees.
        blocks: Vec<BlockList>,
    },
    /// The core broke its promises: an answer that nobody waits for. vLLM would end here; this
    /// engine ignores the answer.
    Fault(String),
}

impl From<PrefillHook> for EngineEffect {
    fn from(hook: PrefillHook) -> Self {
        EngineEffect::Prefill(hook)
    }
}

impl From<DecodeHook> for EngineEffect {
    fn from(hook: DecodeHook) -> Self {
        EngineEffect::Decode(hook)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StepPlan {
    pub step: StepId,
    /// How long it takes.
    pub duration: Nanos,
    /// Parts of prompts that it computes, and so writes.
    pub computes: Vec<ComputeChunk>,
    /// Blocks taken for generated tokens, which it begins to write.
    pub grown: Vec<BlockGrowth>,
    /// Requests for which it computes one generated token; their writes lie behind the prompt.
    pub decoding: u32,
    /// Tokens of KV that those requests read.
    pub context: u64,
}

impl StepPlan {
    /// When `done` of `layers` layers are complete, counted from the start of the step.
    pub fn layers_after(&self, done: u16, layers: u16) -> Nanos {
        self.duration.scale(u64::from(done), u64::from(layers.max(1)))
    }
}

/// Tokens of one request that a step computes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ComputeChunk {
    pub request: RequestId,
    /// What the KV will be: [`PromptContent::stamp`] per token.
    pub content: PromptContent,
    /// First token.
    pub from: u32,
    /// One past the last token; behind the prompt if generated tokens are computed again.
    pub to: u32,
    /// The blocks that hold the tokens, per group; of a state group the one block. Nobody else
    /// writes them.
    pub blocks: Vec<BlockList>,
}

/// A block taken for generated tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockGrowth {
    pub request: RequestId,
    pub group: u16,
    /// Logical index of the block.
    pub logical: u32,
    pub block: u32,
}

/// How the blocks of a pool are used. The null block is not counted:
/// `free + cached + held + quarantined == total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PoolGauges {
    pub total: u32,
    /// Unused and without content.
    pub free: u32,
    /// Unused, with the content of a prefix until they are handed out.
    pub cached: u32,
    /// Owned or shared by requests.
    pub held: u32,
    /// Of no use to a request, but a transfer may still read or write them.
    pub quarantined: u32,
}
