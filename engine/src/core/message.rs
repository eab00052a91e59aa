//! The typed messages of the protocol, independent of their bytes: between peers ([`Message`]),
//! with the router ([`Registration`] and the legs), with the serving engine ([`PrefillHook`],
//! [`DecodeHook`] and their answers), and with the transfer actors ([`TransferJob`],
//! [`TransferReport`]).
//!
//! ```
//! use kvferry_engine::core::ids::TransferKey;
//! use kvferry_engine::core::message::{DecodeLeg, Mode, PrefillLeg};
//!
//! // The two legs of a request, as a router sends them: the key is what they share.
//! let key = TransferKey { id: "t".into(), prompt: 0 };
//! let to_prefill = PrefillLeg::new(key.clone(), Mode::Push);
//! let to_decode = DecodeLeg::new(key, Mode::Push, "prefill-0".into(), "tcp://10.0.0.1:6301".into());
//! assert_eq!(to_prefill.key, to_decode.key);
//! assert_eq!((to_prefill.siblings, to_decode.sibling), (1, 0));
//! ```

pub use super::ids::{Mode, Role};
pub use super::registration::{
    FAILED_LEG_ID_MAX, FAILED_LEGS_MAX, FailedLeg, MODEL_NAME_MAX, MODELS_MAX, Registration,
    RouterEvent, ServedModels, TROUBLES_MAX, UnreachablePrefill,
};

use super::dialect::moriio::params::MoriioRemote;
use super::error::Failure;
use super::ids::*;
use super::layout::{BlockList, Geometry, RankLayout};
use super::payload::PayloadNote;
use super::prompt_hash::PromptHash;
use super::time::Nanos;
use super::verify::{DigestPlan, KvDigest, Verify};
use crate::fabric::Endpoint;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// One attempt of one receiver to get the KV of one prompt. The receiver (decode) makes it; every
/// message about it carries it, and a message with an older attempt changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AttemptTag {
    pub key: TransferKey,
    /// Which of the samples of the prompt (`n > 1`) receives it, else 0.
    pub sibling: u32,
    pub attempt: Attempt,
}

impl fmt::Display for AttemptTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}#{}", self.key, self.sibling, self.attempt)
    }
}

/// A message between a prefill and a decode core, delivered reliably and in order by a
/// [`super::channel::Channel`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Message {
    /// Decode to prefill, push: this prompt is wanted; say so when its computation begins, so that
    /// no destination blocks wait for a prompt that itself waits for blocks.
    Ask {
        tag: AttemptTag,
        /// Tokens of the prompt.
        tokens: u32,
        /// Hash of the prompt; a prefill that has another prompt answers with
        /// [`Failure::PromptMismatch`].
        prompt_hash: PromptHash,
    },
    /// Prefill to decode: the prompt is being computed. Push: announce blocks. Pull, when the last
    /// step computes: get blocks, the grant follows.
    Begun { tag: AttemptTag },
    /// Decode to prefill, push: write into these blocks.
    Announce {
        tag: AttemptTag,
        /// Tokens of the prompt.
        tokens: u32,
        /// First token wanted; decode has the KV of the ones before.
        from: u32,
        /// Destination blocks per group.
        blocks: Vec<BlockList>,
        /// Amount of KV that the prefill digests. As all fields for verification, it is sent only
        /// to peers that have [`super::channel::capability::VERIFY`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        verify: Option<Verify>,
    },
    /// Decode to prefill, pull: tell me the blocks and hold them.
    Pull {
        tag: AttemptTag,
        /// Tokens of the prompt.
        tokens: u32,
        /// Same as in [`Message::Ask`].
        prompt_hash: PromptHash,
        /// As in [`Message::Announce`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        verify: Option<Verify>,
    },
    /// Prefill to decode, pull: read these blocks while the lease lasts. The reader counts the
    /// lease from when it sent its `Pull` or `Renew`.
    Grant {
        tag: AttemptTag,
        /// Tokens of the prompt.
        tokens: u32,
        /// Source blocks per group.
        blocks: Vec<BlockList>,
        /// Length of the lease.
        lease: Nanos,
        /// Of the source blocks, if it was asked for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        digest: Option<Box<KvDigest>>,
    },
    /// Decode to prefill, pull: still reading.
    Renew {
        tag: AttemptTag,
        /// Counts the renewals of the attempt.
        count: u32,
    },
    /// Prefill to decode, pull: the lease runs anew.
    Renewed {
        tag: AttemptTag,
        /// The renewal that is answered.
        count: u32,
        /// Length of the lease.
        lease: Nanos,
    },
    /// Prefill to decode, push: these prefill ranks have written everything.
    Delivered {
        tag: AttemptTag,
        /// Prefill ranks that are complete.
        ranks: RankSet,
        /// Tokens of the prompt.
        tokens: u32,
        /// Of what was to be written, if it was asked for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        digest: Option<Box<KvDigest>>,
    },
    /// Decode to prefill: these decode ranks need the source no more, or have what they need.
    Release {
        tag: AttemptTag,
        /// Decode ranks that are done.
        ranks: RankSet,
    },
    /// Decode to prefill: stop writing, I want my blocks back. Answered by `Ended` with `quiet`.
    Cancel { tag: AttemptTag },
    /// Prefill to decode: the attempt ended without success.
    Ended {
        tag: AttemptTag,
        failure: Failure,
        /// True if no byte of the attempt can land any more. Otherwise a second `Ended` follows.
        quiet: bool,
    },
    /// Between the payload cores behind a decode and a prefill, which hand it on unread. Only to
    /// peers that have [`super::channel::capability::PAYLOADS`].
    Payload { note: PayloadNote },
}

impl Message {
    /// The attempt that the message is about, if it is about one.
    pub fn tag(&self) -> Option<&AttemptTag> {
        match self {
            Message::Payload { .. } => None,
            Message::Ask { tag, .. }
            | Message::Begun { tag }
            | Message::Announce { tag, .. }
            | Message::Pull { tag, .. }
            | Message::Grant { tag, .. }
            | Message::Renew { tag, .. }
            | Message::Renewed { tag, .. }
            | Message::Delivered { tag, .. }
            | Message::Release { tag, .. }
            | Message::Cancel { tag }
            | Message::Ended { tag, .. } => Some(tag),
        }
    }
}

/// What two engines tell each other before anything else.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Hello {
    /// Newest protocol version spoken.
    pub version: u16,
    /// Oldest protocol version spoken.
    pub version_min: u16,
    pub engine: EngineId,
    pub incarnation: Incarnation,
    /// Names the connection between the two incarnations; chosen by who dials, larger than any
    /// before, repeated by who answers. The same number after a reconnect resumes it.
    pub session: u64,
    /// Who is expected to listen; a different engine refuses.
    pub expects: EngineId,
    /// What the speaker does.
    pub role: Role,
    /// Bit set of optional abilities, see [`super::channel::capability`].
    pub capabilities: u32,
    pub geometry: Geometry,
    /// Hash of `geometry`; a difference between the two is a damaged hello.
    pub fingerprint: u64,
    pub ranks: Vec<RankLayout>,
}

/// What a leg says of a peer that speaks MoRIIO.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MoriioLeg {
    /// Who that is. None at a prefill that is read from: its decode comes by itself.
    pub peer: Option<MoriioRemote>,
    /// Pull, at a decode: what to read, per group; the prefill's answer to its leg.
    pub blocks: Vec<BlockList>,
    /// At a decode: the peer is not asked whether it speaks the native dialect, because the leg
    /// does not prove that a member of the fleet named it.
    // Left out if false, so that the hash of a trace, which covers its legs, stays the same.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only: bool,
}

/// What the prefill leg of a request carries beside the prompt.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PrefillLeg {
    pub key: TransferKey,
    /// How many samples will fetch it (`n`), at least 1.
    pub siblings: u32,
    /// Who moves the bytes.
    pub mode: Mode,
    /// The incarnation of the prefill that it was sent to, if the router knows; another one rejects
    /// it, because decode will not ask that one.
    #[serde(rename = "life")]
    pub incarnation: Option<Incarnation>,
    /// The decode, if it speaks MoRIIO.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moriio: Option<Arc<MoriioLeg>>,
}

impl PrefillLeg {
    /// Of a prompt that one sample fetches from whatever incarnation gets the leg.
    pub fn new(key: TransferKey, mode: Mode) -> PrefillLeg {
        PrefillLeg { key, siblings: 1, mode, incarnation: None, moriio: None }
    }
}

/// What the decode leg of a request carries beside the prompt.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DecodeLeg {
    pub key: TransferKey,
    /// Which sample this is.
    pub sibling: u32,
    /// Who moves the bytes.
    pub mode: Mode,
    /// The engine that has the KV.
    pub prefill: EngineId,
    pub control: Endpoint,
    /// Its incarnation that got the prefill leg, if the router knows; a later one knows nothing of
    /// it.
    #[serde(rename = "life")]
    pub incarnation: Option<Incarnation>,
    /// The prefill, if it speaks MoRIIO.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moriio: Option<Arc<MoriioLeg>>,
}

impl DecodeLeg {
    /// Of the only sample, whose prompt the engine `prefill` has in whatever incarnation.
    pub fn new(key: TransferKey, mode: Mode, prefill: EngineId, control: Endpoint) -> DecodeLeg {
        DecodeLeg { key, sibling: 0, mode, prefill, control, incarnation: None, moriio: None }
    }

    /// Of a request without a prefill: it names nobody who has its KV.
    pub fn alone(id: TransferId, mode: Mode) -> DecodeLeg {
        let key = TransferKey { id, prompt: 0 };
        let moriio = Some(Arc::default());
        DecodeLeg { moriio, ..DecodeLeg::new(key, mode, "nobody".into(), "".into()) }
    }

    /// True if there is no prefill that has its KV.
    pub fn is_alone(&self) -> bool {
        self.control.0.is_empty()
    }
}

/// How a request ended on its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum FinishReason {
    /// Length cap; on a prefill the normal end.
    Length,
    /// Stop token; on a prefill the hand-over happens all the same.
    Stop,
    /// The client or the router gave up.
    Aborted,
    /// The engine failed it.
    Error,
}

/// Part of a prompt that one step computes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Chunk {
    pub request: RequestId,
    /// First token computed in this step; the KV of those before is there (earlier chunks or
    /// prefix hits). An engine whose prefix hits may be blocks that the same step computes for
    /// another request, as vLLM's are, says 0 in the first chunk.
    pub from: u32,
    /// One past the last token computed in this step.
    pub to: u32,
    /// Blocks added in this step, per group; `first` says where they go in the request's list.
    pub blocks: Vec<BlockList>,
}

/// What a prefill engine tells its core; the counterpart of vLLM's scheduler-side hooks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PrefillHook {
    /// A request with a prefill leg arrived (`on_new_request`).
    Arrived {
        request: RequestId,
        leg: PrefillLeg,
        /// Tokens of its prompt.
        tokens: u32,
        /// Hash of its prompt, which goes with every native hand-over.
        prompt_hash: PromptHash,
    },
    /// A step was scheduled (`build_connector_meta`). Lists only requests that have a leg.
    Scheduled { step: StepId, chunks: Vec<Chunk> },
    /// A request with a leg ended (`request_finished_all_groups`). Its blocks stay allocated until
    /// [`PrefillAnswer::SourceFree`], whatever the reason. Once more, with [`FinishReason::Aborted`]:
    /// nobody new comes for its KV.
    Finished { request: RequestId, reason: FinishReason },
    /// The scheduler wants the blocks of an unfinished request (`handle_preemptions`); they must
    /// not be reused before [`PrefillAnswer::PreemptionSafe`]. It will be scheduled again from
    /// token 0 or from what prefix hits leave.
    Preempted { request: RequestId },
}

/// What a prefill core tells its engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PrefillAnswer {
    /// The request's blocks may be freed (`finished_sending`); exactly once per finished request.
    SourceFree {
        request: RequestId,
        /// None if every receiver got everything.
        failure: Option<Failure>,
    },
    /// The preempted request's blocks may be reused; exactly once per preemption, also of a request
    /// that was rejected meanwhile.
    PreemptionSafe { request: RequestId },
    /// The request cannot be served as a transfer, e.g. a duplicate key; the engine answers the
    /// leg with an error. May cross with other hooks of the request. Nothing else follows for it.
    Rejected { request: RequestId, failure: Failure },
}

/// What a decode engine tells its core; the counterpart of vLLM's scheduler-side hooks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DecodeHook {
    /// A request with a decode leg arrived (`on_new_request`); the core gets in touch with the
    /// prefill.
    Arrived {
        request: RequestId,
        leg: DecodeLeg,
        /// Tokens of its prompt.
        tokens: u32,
        /// Hash as in [`PrefillHook::Arrived`]: of the whole prompt, even if the decode has a part
        /// of its KV.
        prompt_hash: PromptHash,
    },
    /// Blocks were allocated (`update_state_after_alloc`): load tokens `computed..` into them.
    /// Exactly one [`DecodeAnswer::Loaded`] or [`DecodeAnswer::LoadFailed`] follows. Better not
    /// before [`DecodeAnswer::Allocate`]: blocks that wait for a prompt which waits for the blocks
    /// of other prompts, which wait for these blocks, wait in a circle until a timeout.
    Allocated {
        request: RequestId,
        /// Tokens whose KV is there already (prefix hits), all of them or a multiple of the block
        /// size. With all there, the prefill is released and `Loaded` follows at once.
        computed: u32,
        /// Blocks per group, those with prefix hits included.
        blocks: Vec<BlockList>,
    },
    /// The request ended (`request_finished_all_groups`). If it was allocated and not answered,
    /// its blocks stay allocated until the one answer that is due.
    Finished { request: RequestId, reason: FinishReason },
}

/// What a decode core tells its engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DecodeAnswer {
    /// The prefill computes the prompt (push) or has it (pull): now is the time to allocate
    /// blocks. At most once per request; may cross with `Allocated` and `Finished`. Until then
    /// `get_num_new_matched_tokens` answers `None`.
    Allocate { request: RequestId },
    /// All tokens are in the blocks (`finished_recving`).
    Loaded { request: RequestId },
    /// The load ended without success and no byte can land any more (`failed_recving` and
    /// `finished_recving`): the blocks may be reused or recomputed.
    LoadFailed { request: RequestId, failure: Failure },
    /// Before the core heard of an allocation, the transfer became impossible: do not wait for
    /// external tokens, compute the prompt or fail the request. May cross with `Allocated`, and is
    /// then its one answer: nothing was written. Nothing else follows for the request.
    Rejected { request: RequestId, failure: Failure },
}

impl DecodeAnswer {
    /// The request that it is about.
    pub fn request(&self) -> &RequestId {
        match self {
            DecodeAnswer::Allocate { request }
            | DecodeAnswer::Loaded { request }
            | DecodeAnswer::LoadFailed { request, .. }
            | DecodeAnswer::Rejected { request, .. } => request,
        }
    }

    /// True if nothing else follows for the request.
    pub fn is_last(&self) -> bool {
        !matches!(self, DecodeAnswer::Allocate { .. })
    }
}

/// What a prefill or decode core has one of its transfer actors do. Every rank gets every job.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TransferJob {
    /// A peer said hello: connect to its ranks and open sessions where this rank has a route.
    /// Answered by [`TransferReport::PeerReady`] or [`TransferReport::PeerFailed`].
    Peer {
        /// The peer, as the core numbers it; a connection is not reused within an incarnation.
        peer: ConnectionId,
        geometry: Arc<Geometry>,
        ranks: Arc<Vec<RankLayout>>,
        /// Agreed at the hello, see [`crate::fabric::DataPlane::connect`].
        #[serde(rename = "pass")]
        fence_key: u64,
    },
    /// Keep the peer out and forget it. Its flows fail; answered by [`TransferReport::Fenced`] once
    /// no byte of it can land here and none of ours there.
    Fence { peer: ConnectionId },
    /// Push: a source grows. KV of tokens `..ready` is there; step `step` adds tokens `..to`,
    /// layer by layer (see [`super::transfer::TransferInput::Layers`]).
    Source {
        /// The source; the first mention makes it.
        source: SourceId,
        step: StepId,
        /// Tokens complete before the step.
        ready: u32,
        /// Tokens complete after the step.
        to: u32,
        /// Tokens of the whole prompt; `to == tokens` marks the last chunk.
        tokens: u32,
        /// Added blocks per group.
        blocks: Arc<Vec<BlockList>>,
    },
    /// Forget a source. It has no flows left.
    Forget { source: SourceId },
    /// Push: write `from..` of a source (known or not yet) into a peer's blocks.
    Write {
        /// The flow; answered by one [`TransferReport::Flow`] that is final.
        flow: FlowId,
        source: SourceId,
        peer: ConnectionId,
        /// First token.
        from: u32,
        /// One past the last token.
        tokens: u32,
        /// Destination blocks per group.
        blocks: Arc<Vec<BlockList>>,
        /// The engine's request that it is for; empty if a host of an earlier version gives the
        /// job.
        #[serde(default = "unnamed")]
        request: RequestId,
        /// The engine that receives it, if its name is known.
        #[serde(default)]
        reader: Option<EngineId>,
        /// Digest what is to be written, as soon as it is computed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        verify: Option<DigestPlan>,
    },
    /// Digest `from..tokens` of own blocks, as a peer's ranks exchange them with this one.
    Digest {
        /// Answered by [`FlowState::Digested`] and one report that is final.
        flow: FlowId,
        peer: ConnectionId,
        /// First token.
        from: u32,
        /// One past the last token.
        tokens: u32,
        /// Own blocks per group.
        blocks: Arc<Vec<BlockList>>,
        plan: DigestPlan,
    },
    /// Pull: read `from..tokens` from a peer's blocks.
    Read {
        /// The flow; answered by one [`TransferReport::Flow`] that is final.
        flow: FlowId,
        peer: ConnectionId,
        /// First token.
        from: u32,
        /// One past the last token.
        tokens: u32,
        /// Source blocks per group.
        remote: Arc<Vec<BlockList>>,
        /// Destination blocks per group.
        local: Arc<Vec<BlockList>>,
        /// As in [`TransferJob::Write`].
        #[serde(default = "unnamed")]
        request: RequestId,
    },
    /// Stop a flow: submit nothing more, end it as `Cancelled` when quiet.
    Stop { flow: FlowId },
}

/// The request of a flow of which nobody says whose it is.
fn unnamed() -> RequestId {
    "".into()
}

/// What a transfer actor tells its core.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TransferReport {
    /// The rank's memory is registered. First report, and again after a backend was rebuilt.
    Ready {
        /// Where its KV lies.
        layout: RankLayout,
    },
    /// The rank cannot serve: its memory cannot be registered.
    Unusable { failure: Failure },
    /// All sessions to the peer are open.
    PeerReady { peer: ConnectionId },
    /// The peer cannot be reached or cannot be reached any more; its flows fail.
    PeerFailed { peer: ConnectionId, failure: Failure },
    /// No byte of the peer lands here any more.
    Fenced { peer: ConnectionId },
    /// News of a flow.
    Flow { flow: FlowId, state: FlowState },
}

/// What a transfer actor says of a flow on its rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FlowState {
    /// Not final: bytes moved since the last report; renews leases. At most one per second.
    Moving,
    /// Not final: it will fail; `Failed` follows when quiet.
    Failing(Failure),
    /// Not final: the digest of what the flow is about; ahead of `Done`.
    Digested(Box<KvDigest>),
    /// Final: everything is placed.
    Done {
        /// Bytes that this rank moved.
        bytes: u64,
    },
    /// Final: ended without success, and no byte of it can land any more.
    Failed(Failure),
}
