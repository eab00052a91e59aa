//! What goes into and comes out of the router.

use super::admission::ListedInstances;
use super::load::ServerLoad;
use crate::core::command::ControlCommand;
use crate::core::dialect::moriio::address::ZmqAddress;
use crate::core::error::Failure;
use crate::core::ids::{ClientId, EngineId, Incarnation, LegId, number_id};
use crate::core::layout::Mismatch;
use crate::core::message::{
    DecodeLeg, FailedLeg, FinishReason, PrefillLeg, Registration, Role, ServedModels,
};
use crate::core::time::Nanos;
use crate::fabric::{ControlEvent, Endpoint, LinkId};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

number_id!(
    /// One incarnation of one instance that is asked whether it answers; never reused.
    ProbeId(u64)
);

/// What can happen to the router.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RouterInput {
    /// A frame or link event of the discovery channel.
    Control(ControlEvent),
    /// What who speaks on a link of the discovery channel has proven, as the shell has checked it:
    /// the core knows no secrets.
    Proof { link: LinkId, proof: RegistrationProof },
    /// A registration that did not come as a frame, e.g. of a static instance.
    Register(Registration),
    /// The instances that the operator names, all of them. To be repeated, as registrations are: who
    /// is not in it any more drains.
    Static(Arc<[StaticInstance]>),
    /// A client sent a request.
    Request(ClientRequest),
    /// A client went away: cancel its legs, answer nothing.
    Gone { client: ClientId },
    /// News of a leg. Legs that ended are ignored.
    Leg { leg: LegId, event: LegEvent },
    /// Whether an instance answered a probe. Of instances that left it is ignored.
    Probed {
        probe: ProbeId,
        /// True if legs may be sent there.
        answers: bool,
        /// The models that it lists, if they were wanted and could be read.
        #[serde(default)]
        models: Option<Arc<ServedModels>>,
    },
    /// Take no new requests; finish those there are.
    Drain,
    /// A deadline may be due.
    Tick,
    /// Let the instances go, so that they register with another router; serve on with what they said
    /// last.
    Release,
    /// What a server said of its load. It is not believed for long, and of who left it is ignored.
    Load {
        /// Where it takes legs.
        http: Endpoint,
        load: ServerLoad,
    },
}

/// An instance that the operator names, and that says nothing of itself. Its legs have the form of
/// vLLM's NixlConnector: what the prefill answers is the leg of the decode, word for word.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StaticInstance {
    pub role: Role,
    /// Where it takes legs.
    pub http: Endpoint,
}

/// How an instance is spoken to about KV: two with one of these in common can be paired, and two
/// that have neither, which are static.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Dialects {
    pub native: bool,
    pub moriio: bool,
}

impl Dialects {
    /// True of a [`StaticInstance`].
    pub fn is_static(self) -> bool {
        !self.native && !self.moriio
    }

    /// True if KV can go between the two.
    pub fn meet(self, other: Dialects) -> bool {
        self.native && other.native
            || self.moriio && other.moriio
            || self.is_static() && other.is_static()
    }
}

/// What a proof says of registrations.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RegistrationProof {
    /// Those that follow on the link are signed by who knows the fleet's secret.
    Signed,
    /// One was signed by somebody else, or changed on its way, and was dropped; why.
    Wrong(Arc<str>),
}

/// What a client wants.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ClientRequest {
    /// Who asks; unique.
    pub client: ClientId,
    /// Prompts of the request, usually one.
    pub prompts: Vec<RoutedPrompt>,
    /// Samples per prompt (`n`), at least 1.
    pub samples: u32,
    /// Tokens to generate per sample, at least 1.
    pub output: u32,
    /// The model that it is for; none takes any.
    #[serde(default)]
    pub model: Option<Arc<str>>,
    /// Engines that alone may serve it; none takes any.
    #[serde(default)]
    pub engines: Option<Arc<[EngineId]>>,
}

/// A prompt as the router sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RoutedPrompt {
    pub tokens: u32,
    /// One hash per leading full run of `prefix_tokens` tokens; equal hashes are equal prefixes.
    pub prefix: Arc<[u64]>,
}

/// What the shell reports of a leg that was dispatched.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LegEvent {
    /// A decode leg produced its first token: from here on it cannot be retried unseen.
    FirstToken,
    /// The leg ended well. For a prefill leg: its KV is computed.
    Done {
        reason: FinishReason,
        /// Why a decode computed the prompt itself, if it did: the KV did not come.
        recomputed: Option<Failure>,
    },
    /// A prefill leg ended well, and its answer is what a decode that reads by MoRIIO needs. With
    /// `Done` instead, such a decode computes the prompt itself.
    Prefilled {
        /// `kv_transfer_params` of the answer, a JSON object.
        params: Arc<str>,
    },
    /// The leg ended badly.
    Failed(LegFailure),
}

/// Why a leg failed, as seen by an HTTP client.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LegFailure {
    /// Connection refused, cut, or timed out.
    Connection,
    /// The instance is full (429, 503). This is no fault of the instance or the request.
    Busy {
        /// Time after which it asks for the next attempt (`Retry-After`), if it named one.
        retry_after: Option<Nanos>,
    },
    /// The instance failed the request (5xx).
    Instance(Failure),
    /// The instance answered with this HTTP status, or with what is no answer to the request; says
    /// more about the instance than about the request only if it happens again and again.
    Answer(u16),
    /// The request itself is wrong (4xx); no other instance will take it.
    Request(Arc<str>),
    /// The router gave the leg up, because its instance is no longer there.
    Left(LeaveReason),
}

/// Why an instance is no longer there for a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LeaveReason {
    /// It does not register any more.
    Silent,
    /// A later incarnation has its place.
    Replaced,
    /// It drained, or has another role, and its time for what it had is over.
    Drained,
}

impl fmt::Display for LeaveReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LeaveReason::Silent => "the instance no longer registers with the router",
            LeaveReason::Replaced => "the instance, or its host, began anew",
            LeaveReason::Drained => "the instance drained before the request had ended",
        })
    }
}

impl LegFailure {
    /// True if every instance would fail the request in the same way.
    pub(super) fn is_final(&self) -> bool {
        match self {
            LegFailure::Request(_) => true,
            LegFailure::Instance(failure) => failure.is_of_request(),
            LegFailure::Connection
            | LegFailure::Busy { .. }
            | LegFailure::Answer(_)
            | LegFailure::Left(_) => false,
        }
    }
}

impl fmt::Display for LegFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LegFailure::Connection => f.write_str("connection failed"),
            LegFailure::Busy { .. } => f.write_str("instance busy"),
            LegFailure::Instance(failure) => write!(f, "{failure}"),
            LegFailure::Answer(status) => write!(f, "instance answered with status {status}"),
            LegFailure::Request(why) => write!(f, "bad request: {why}"),
            LegFailure::Left(why) => write!(f, "{why}"),
        }
    }
}

/// What the router wants done.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RouterEffect {
    /// Call the control plane.
    Control(ControlCommand),
    /// Send a leg to an instance.
    Dispatch {
        leg: LegId,
        client: ClientId,
        /// To which engine core.
        engine: EngineId,
        /// Where it takes legs.
        http: Endpoint,
        /// The two instances between which KV goes; of a prefill leg for several samples the
        /// decode of the first, and of a decode leg [alone](DecodeLeg::is_alone) that decode twice.
        pair: Box<InstancePair>,
        /// What to ask for.
        body: LegBody,
        /// Part of the prompt whose KV the instance probably has.
        expected: PrefixEstimate,
    },
    /// Ask an instance whether it answers; told by [`RouterInput::Probed`].
    Probe {
        probe: ProbeId,
        /// Where it takes legs.
        http: Endpoint,
        /// True if it is to show that it answers at all, which it has not before.
        is_unproven: bool,
        /// True if it is to show that its server goes on.
        is_doubted: bool,
        /// True if the models that it lists are wanted.
        wants_models: bool,
    },
    /// Close the connection of a leg that has not ended; no event of it is wanted any more.
    CancelLeg { leg: LegId },
    /// The client's answer; exactly one per request whose client did not go away.
    Answer {
        client: ClientId,
        /// How its request ended.
        answer: ClientAnswer,
    },
    /// A decode has said why legs of its went without their KV, each once. The legs may have ended, or
    /// may be of other routers.
    LegCauses {
        /// The decode.
        engine: EngineId,
        failed: Vec<FailedLeg>,
    },
    /// Ask a server for its load; told by [`RouterInput::Load`], or not at all.
    AskLoad {
        /// Where it takes legs.
        http: Endpoint,
    },
}

impl From<ControlCommand> for RouterEffect {
    fn from(command: ControlCommand) -> Self {
        RouterEffect::Control(command)
    }
}

/// Leading part of a prompt whose KV an instance probably has in its prefix cache, as it was given prompts
/// that begin alike. The simulator compares it with what is hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PrefixEstimate {
    /// The life of the instance in which it was given them.
    pub incarnation: Incarnation,
    /// Tokens of that part.
    pub tokens: u32,
}

/// The two instances of a transfer.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct InstancePair {
    /// Where KV comes from.
    pub prefill: PairMember,
    pub decode: PairMember,
}

impl InstancePair {
    /// True if both speak the native dialect; else both speak MoRIIO, or both are static.
    pub fn is_native(&self) -> bool {
        self.prefill.native && self.decode.native
    }

    /// True if the operator named both, and they say nothing of themselves.
    pub fn is_static(&self) -> bool {
        self.prefill.dialects().is_static()
    }
}

/// What the other instance of a transfer has to know of one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PairMember {
    /// Where MoRIIO peers find it; none if it does not speak MoRIIO.
    pub zmq: Option<ZmqAddress>,
    /// True if it speaks the native dialect.
    pub native: bool,
    pub dp_rank: u16,
    /// Number of DP ranks.
    pub dp_size: u16,
    /// Number of TP ranks.
    pub tp: u16,
}

impl PairMember {
    /// How it is spoken to.
    pub fn dialects(&self) -> Dialects {
        Dialects { native: self.native, moriio: self.zmq.is_some() }
    }

    /// Its DP rank and their number, as peers that speak MoRIIO are told. Each rank of a native
    /// instance has ports of its own, and is one of one to them.
    pub fn told_dp(&self) -> (u16, u16) {
        if self.native { (0, 1) } else { (self.dp_rank, self.dp_size) }
    }
}

/// The part of a leg that the protocol cares about.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LegBody {
    /// Compute the KV of a prompt (`max_tokens` 1).
    Prefill {
        transfer: PrefillLeg,
        /// Index into the request's prompts.
        prompt: u32,
    },
    Decode {
        /// The hand-over. Its sibling index counts within one dispatch, not over all samples.
        transfer: DecodeLeg,
        /// Index into the request's prompts.
        prompt: u32,
        /// Which of the samples of the prompt it generates; stays the same over retries.
        sample: u32,
        output: u32,
        /// What the prefill answered; only where KV is read by MoRIIO, or between static instances,
        /// and then none if there is nothing to read.
        params: Option<Arc<str>>,
    },
}

impl LegBody {
    /// Who takes it.
    pub fn role(&self) -> Role {
        match self {
            LegBody::Prefill { .. } => Role::Prefill,
            LegBody::Decode { .. } => Role::Decode,
        }
    }
}

/// How a request ended for its client.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ClientAnswer {
    /// All samples of all prompts were generated.
    Finished {
        /// The first reason why a decode computed a prompt itself, if any did.
        recomputed: Option<Failure>,
    },
    /// It failed; names the last cause.
    Failed(LegFailure),
    /// No instance could take it (503), with the reason.
    NoInstance(Unavailable),
    /// Only instances of one role serve the model (404).
    NoRole {
        /// The role without an instance for the model.
        missing: Role,
        /// Models that instances of that role serve, sorted, at most [`NAMED_MODELS_MAX`].
        served: Arc<[Arc<str>]>,
    },
    /// No instance serves the model (404). Those that are served, in order, [`NAMED_MODELS_MAX`] at
    /// most.
    NoModel(Arc<[Arc<str>]>),
    /// There are instances of both roles for the model, but no two that fit (503).
    Misfit(Mismatch),
    /// As many requests are open as the router takes, or wait as may wait (429).
    Overload,
}

/// Reason why no instance could take a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Unavailable {
    /// The router takes no new requests.
    Draining,
    /// No instance is registered.
    Nobody,
    /// No instance of this role is registered.
    NoRole(Role),
    /// No prefill and decode share a transfer mode and a dialect.
    NoCommonMode,
    /// There are pairs, but in each an instance failed lately or has not answered a probe yet.
    NotReady,
    /// All instances of this role have lost their hosts.
    NoHost(Role),
}

/// Models that are named to a client whose model is not served.
pub const NAMED_MODELS_MAX: usize = 32;

/// Which requests may be sent again, beside the tries that each has. Together they bound what
/// retries add to the load while much fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetryShare {
    /// Retries in 10 s, in percent of the requests that came in these, or are open, if those are
    /// more.
    pub percent: u32,
    /// So many per second in addition.
    pub per_second: u32,
}

/// Settings of the router; times and limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RouterConfig {
    /// An instance whose registration is not repeated for this long gets no more legs.
    pub expiry: Nanos,
    /// After a connection failure an instance gets no traffic for this long, or until it registers
    /// again; doubles per failure without a success between, up to `breaker_max`. From the second
    /// failure on, registering again does not shorten the time (heartbeats do not show that legs
    /// are served), and then one client tries it before the others.
    pub suspicion: Nanos,
    /// Longest time without traffic.
    pub breaker_max: Nanos,
    /// Time for which an instance stays that has no host, but answers probes: its registration has
    /// expired, or the connection of that has ended. It gets no legs, those that it has go on, and
    /// requests that have no other instance wait for it. Without [`RouterConfig::probe`] it stays until
    /// its registration expires.
    pub host_wait: Nanos,
    /// When a registration is over, legs that stream tokens go on as long as the server answers
    /// probes, and for this long after the last answer; the other legs fail over at once.
    pub stream_grace: Nanos,
    /// Longest time for an instance that registered as draining, or anew in another role, to finish
    /// its legs; it need not register again.
    pub drain_max: Nanos,
    /// Instances that the router let go are kept for this long.
    pub release_max: Nanos,
    /// Instances at a time; further registrations are rejected. As many that left are remembered,
    /// so that old registrations do not revive them.
    pub instances_max: u32,
    /// Legs of one request at a time, prompts times (1 + samples); more are a bad request.
    pub legs_max: u32,
    /// Dispatches per prompt sample beyond the first. Those that failed because an instance had lost
    /// its host do not count, up to as many per request.
    pub retries_max: u32,
    /// Requests waiting for an instance; more are answered `Overload`, or `NoInstance` if there is none.
    pub waiting_max: u32,
    /// Longest wait for an instance.
    pub wait_max: Nanos,
    /// The same for a request that was sent before and failed, if there is no prefill or no decode.
    /// Where those that there are take nothing for a while, it waits for `wait_max` beyond its
    /// pause.
    pub retry_wait_max: Nanos,
    /// Pause before a request is sent again to instances that failed it; doubles per try. It ends
    /// when an instance comes that has not.
    pub retry_pause: Nanos,
    /// An instance that registers by a frame, or is static, gets no legs before it answered a probe;
    /// it is asked again after this long, and so is one that has no host. None or zero: it gets
    /// legs at once.
    pub probe: Option<Nanos>,
    /// Servers are asked for their load this often, beside what is known of their legs. None
    /// or zero: never.
    pub load_period: Option<Nanos>,
    /// An instance that does not say which models it serves is asked for them with the probe, and
    /// again after this long. None: it is not asked.
    pub models_period: Option<Nanos>,
    /// Requests in flight; more wait.
    pub requests_max: u32,
    /// Requests that are open, in flight or waiting; more are answered `Overload`. None: no limit.
    pub open_max: Option<u32>,
    /// Which share of all requests may be sent again; none: as many as fail.
    pub retry_share: Option<RetryShare>,
    /// A prompt of which a decode has to compute fewer tokens goes to that alone, without a prefill.
    pub direct_below: u32,
    /// In-flight tokens by which a prefix hit outweighs load: an instance that has a prefix is
    /// preferred while it is at most `affinity` times the saved tokens busier, in percent.
    pub affinity_percent: u32,
    /// Tokens per entry of [`RoutedPrompt::prefix`].
    pub prefix_tokens: u32,
    /// Remembered prefixes per instance.
    pub prefixes_max: u32,
    /// The instances that may register; none lets all.
    #[serde(skip)]
    pub listed: Option<ListedInstances>,
    /// Places out of `instances_max` that are reserved for instances that sign.
    #[serde(skip)]
    pub signed_min: u32,
    /// No others may register than those that sign.
    #[serde(skip)]
    pub require_signed: bool,
}

impl RouterConfig {
    /// Pause of a request that failed for the `tried`th time.
    pub(super) fn pause(&self, tried: u32) -> Nanos {
        let doubled = 1 << tried.saturating_sub(1).min(16);
        self.retry_pause.scale(doubled, 1).min(self.breaker_max)
    }
}

impl Default for RouterConfig {
    fn default() -> Self {
        RouterConfig {
            expiry: Nanos::from_secs(10),
            suspicion: Nanos::from_ms(500),
            breaker_max: Nanos::from_secs(10),
            host_wait: Nanos::from_secs(30),
            stream_grace: Nanos::from_secs(10),
            drain_max: Nanos::from_secs(600),
            release_max: Nanos::from_secs(600),
            instances_max: 1024,
            legs_max: 4096,
            retries_max: 2,
            waiting_max: 100_000,
            wait_max: Nanos::from_secs(30),
            retry_wait_max: Nanos::from_secs(30),
            retry_pause: Nanos::from_ms(500),
            probe: None,
            load_period: None,
            models_period: None,
            requests_max: 1_000_000,
            open_max: None,
            retry_share: None,
            direct_below: 0,
            affinity_percent: 100,
            prefix_tokens: 512,
            prefixes_max: 65_536,
            listed: None,
            signed_min: 0,
            require_signed: false,
        }
    }
}
