//! One receiver of a prompt.

use crate::core::error::Failure;
use crate::core::ids::{ConnectionId, EngineId, FlowId, Incarnation, RankSet};
use crate::core::message::AttemptTag;
use crate::core::peer_manager::GroupBlocks;
use crate::core::prompt_hash::PromptHash;
use crate::core::verify::Verify;

/// What a receiver asked for.
#[derive(Clone, Debug)]
pub(super) enum ReceiverRequest {
    /// Push: a word when the prompt's computation begins.
    Ask,
    /// Write `from..` into these blocks.
    Push { from: u32, blocks: GroupBlocks },
    /// Tell the blocks.
    Pull,
}

#[derive(Debug)]
pub(super) enum ReceiverState {
    /// For the prefill leg or (pull) its end, or for the receiver's blocks.
    Waiting,
    Writing(FlowId),
    /// The flow stops because of a preemption; another one follows.
    Restarting(FlowId),
    /// The flow stops for good; the receiver has been told why.
    Ending(FlowId, Failure),
    /// Pull: the ranks digest what will be granted.
    Digesting(FlowId),
    /// The receiver reads under a lease.
    Granted {
        released: RankSet,
    },
}

/// The prompt that a receiver asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct WantedPrompt {
    pub(super) tokens: u32,
    /// Hash of the prompt. None in an announcement: after a native `Ask` the hash is known, and a
    /// peer that speaks MoRIIO sends none.
    pub(super) hash: Option<PromptHash>,
    /// Amount of its KV that is digested.
    pub(super) verify: Option<Verify>,
}

#[derive(Debug)]
pub(super) struct Receiver {
    pub(super) connection: ConnectionId,
    /// Who that is; it may speak for the receiver in a later connection, too.
    pub(super) reader: Option<(EngineId, Incarnation)>,
    pub(super) tag: AttemptTag,
    pub(super) prompt: WantedPrompt,
    pub(super) want: ReceiverRequest,
    /// The receiver was told that the prompt (pull: the last of it) is being computed.
    pub(super) begun: bool,
    pub(super) state: ReceiverState,
}

impl Receiver {
    /// True if the receiver has, or may have, blocks for what it waits for.
    pub(super) fn binds_blocks(&self) -> bool {
        match self.state {
            ReceiverState::Waiting => match self.want {
                ReceiverRequest::Ask => false,
                ReceiverRequest::Push { .. } => true,
                ReceiverRequest::Pull => self.begun,
            },
            ReceiverState::Digesting(_) => self.begun,
            ReceiverState::Writing(_) | ReceiverState::Restarting(_) => true,
            ReceiverState::Ending(..) | ReceiverState::Granted { .. } => false,
        }
    }

    /// True if it waits for the prompt, and the prompt's blocks wait for its own.
    pub(super) fn only_asked(&self) -> bool {
        matches!((&self.state, &self.want), (ReceiverState::Waiting, ReceiverRequest::Ask))
    }

    pub(super) fn reads(&self) -> bool {
        matches!(self.state, ReceiverState::Granted { .. })
    }
}
