//! A run: a scenario with every value drawn. Plain data for the simulator and for recordings.
//!
//! ```
//! let text = "about = 'one prompt'\nseed = 1\n[workload]\nmode = 'push'\nrequests = 1\n";
//! let scenario = kvferry_scenarios::parse("one.toml", text, ".".as_ref(), None)?;
//! let run = scenario.draw(7)?;
//! assert_eq!((run.seed, run.requests.len()), (7, 1));
//! # Ok::<(), kvferry_scenarios::ScenarioError>(())
//! ```

mod payloads;

pub use payloads::*;

use crate::cost::StepCost;
use crate::lists::{FaultKind, InvariantId};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::channel::ChannelConfig;
use kvferry_engine::core::config::CoreSettings;
use kvferry_engine::core::layout::GroupKind;
use kvferry_engine::core::message::{Mode, Role, ServedModels};
use kvferry_engine::core::router::RouterConfig;
use kvferry_engine::core::transfer::TransferSettings;
use kvferry_engine::core::verify::Verify;
use kvferry_faults::section;
pub use kvferry_faults::{
    DrawnFault, DurationRange, FaultPlace, FaultTrigger, MemoryLayout, PartitionDirection,
    RaceOrder, RestartGeometry,
};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Name of the scenario: its path as given.
    pub name: String,
    pub about: String,
    /// Seed of all decisions, see [`crate::decide`].
    pub seed: u64,
    /// The model that all instances serve.
    pub model: ModelGeometry,
    pub served: Served,
    /// Engine cores, prefill before decode, in file order; one per DP rank. Or the cores of the hosts.
    pub instances: Vec<InstanceSettings>,
    /// Hosts with pools; none where requests are served.
    pub hosts: Vec<PayloadHostSettings>,
    pub network: NetworkSettings,
    pub router: RouterSettings,
    /// The stand-in serving engines.
    pub engine: EngineSettings,
    /// What the simulator keeps of block contents.
    pub memory: MemoryFidelity,
    /// How much of the KV all instances verify.
    #[serde(default)]
    pub verify: Verify,
    /// Who moves the bytes, unless an instance says otherwise.
    pub mode: Mode,
    /// Tokens per entry of [`WorkloadPrompt::prefix`].
    pub prefix_tokens: u32,
    /// Client requests by arrival.
    pub requests: Vec<WorkloadRequest>,
    /// What stages put and get, by the tables of the file.
    pub streams: Vec<WorkloadStream>,
    /// Faults that the simulator injects.
    pub faults: Vec<InjectedFault>,
    /// Faults that drawing has already worked into pools, settings and requests.
    pub shaped: Vec<FaultKind>,
    /// What the end of the safety phase does to faults.
    pub liveness: LivenessMode,
    /// The simulator sends requests of its own when the faults of the run are over.
    #[serde(default = "default_probes")]
    pub probes: bool,
    /// What must come out.
    pub expect: Expect,
}

/// Value that recordings without it mean.
const fn default_probes() -> bool {
    true
}

impl Run {
    /// Most tokens of a sample, prompt and output together.
    pub fn longest(&self) -> Option<u64> {
        let samples = self.requests.iter().flat_map(|request| {
            let output = u64::from(request.output);
            request.prompts.iter().map(move |prompt| u64::from(prompt.tokens) + output)
        });
        samples.max()
    }

    /// Blocks that a sample of `tokens` tokens takes in the pool of any group of an instance.
    pub fn blocks_for(&self, instance: &InstanceSettings, tokens: u64) -> u64 {
        tokens.div_ceil(u64::from(instance.block_tokens)).max(1)
    }

    /// The engine cores that a name of a fault means: an instance, or all DP ranks of a host.
    pub fn named(&self, name: &str) -> impl Iterator<Item = usize> {
        let hit = move |(at, one): (usize, &InstanceSettings)| {
            (one.name == name || one.host == name).then_some(at)
        };
        self.instances.iter().enumerate().filter_map(hit)
    }
}

/// KV geometry of the model, independent of TP and block size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelGeometry {
    pub name: String,
    /// Attention and state layers.
    pub layers: u16,
    /// KV heads of the whole model; 1 with `latent`.
    pub kv_heads: u16,
    /// Multi-head latent attention.
    pub latent: bool,
    /// Bytes of K and V together (or of the latent) of one token in one head of one layer.
    pub head_bytes: u32,
    /// Bytes per element.
    pub element: u32,
    /// Bytes of one request's recurrent state in one head of one state layer.
    pub state_bytes: u32,
    /// Layer groups; every layer is in exactly one.
    pub groups: Vec<ModelGroup>,
}

/// Layers that share one block table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelGroup {
    /// What its blocks hold.
    pub kind: GroupKind,
    pub layers: Vec<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceSettings {
    /// Unique name; with `dp_size` > 1 the host's name, a dot and the DP rank.
    pub name: String,
    /// The instance as the file names it; shared by its DP ranks.
    pub host: String,
    /// Machine it stands on; instances of one node use the link inside the node.
    pub node: String,
    pub role: Role,
    /// It is a core of a host, and its KV is the pool.
    pub is_pool: bool,
    pub tp: u16,
    /// DP rank of this engine core.
    pub dp_rank: u16,
    /// DP ranks of its host.
    pub dp_size: u16,
    /// Blocks of the pool of each KV cache group, without the null block.
    pub blocks: u32,
    pub block_tokens: u32,
    /// Where its KV lies.
    pub layout: MemoryLayout,
    /// Who moves the bytes.
    pub mode: Mode,
    /// Keeps finished blocks for prefix hits.
    pub prefix_cache: bool,
    /// Time of a step.
    pub cost: StepCost,
    /// Times and limits of the protocol.
    pub protocol: ProtocolSettings,
    /// Limits of the data planes of its ranks that the file sets.
    pub fabric: FabricLimits,
    /// The models that it registers with; none if it says nothing.
    #[serde(default)]
    pub models: Option<Arc<ServedModels>>,
}

impl InstanceSettings {
    /// True if requests for this model may go to it; none is any.
    pub fn serves(&self, model: Option<&str>) -> bool {
        let (Some(model), Some(own)) = (model, &self.models) else { return true };
        own.has(model)
    }

    /// The same in the other role; a core of a host stays what it is.
    pub fn switched(&self) -> InstanceSettings {
        let role = match self.role {
            role if self.is_pool => role,
            Role::Prefill => Role::Decode,
            Role::Decode => Role::Prefill,
        };
        InstanceSettings { role, ..self.clone() }
    }
}

/// Links between instances. Bandwidths in bytes per second and direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkSettings {
    /// One-way latency of an operation between nodes.
    pub latency: DurationRange,
    /// Bandwidth of the NIC of each TP rank, shared by its transfers.
    pub bandwidth: u64,
    /// One-way latency of an operation inside a node.
    pub node_latency: DurationRange,
    /// Bandwidth of each TP rank inside a node.
    pub node_bandwidth: u64,
    /// One-way latency of a control frame or a leg.
    pub control_latency: DurationRange,
}

/// The router and its surroundings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouterSettings {
    /// Settings of the router core; `prefix_tokens` equals [`Run::prefix_tokens`].
    pub config: RouterConfig,
    /// Time between registrations of an instance.
    pub heartbeat: Nanos,
    /// Engines add a suffix that differs for every leg to the request ids they use.
    pub ids_differ: bool,
}

/// Times and limits of the protocol.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtocolSettings {
    /// Of its prefill or decode core.
    pub core: CoreSettings,
    /// Of the channels between its core and others.
    pub channel: ChannelConfig,
    /// Of its transfer actors.
    pub transfer: TransferSettings,
    /// A fence is answered within; part of the bounds of L1 and L5.
    pub fence: Nanos,
}

impl Default for ProtocolSettings {
    fn default() -> ProtocolSettings {
        ProtocolSettings {
            core: CoreSettings::default(),
            channel: ChannelConfig::default(),
            transfer: TransferSettings::default(),
            fence: Nanos::from_secs(2),
        }
    }
}

/// Limits of a simulated data plane; `None` is the default of the simulator, which for credits of
/// ranges and bytes is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricLimits {
    /// Operations in flight of a rank.
    pub operations_max: Option<u32>,
    /// The same to one peer.
    pub operations_per_peer: Option<u32>,
    /// Ranges of one operation.
    pub slices_max: Option<u32>,
    /// Ranges in flight of a rank.
    pub ranges_max: Option<u32>,
    /// The same to one peer.
    pub ranges_per_peer: Option<u32>,
    /// Bytes in flight of a rank.
    pub bytes_max: Option<u64>,
    /// The same to one peer.
    pub bytes_per_peer: Option<u64>,
}

/// Settings of the stand-in serving engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineSettings {
    /// Tokens computed per step at most (`max_num_batched_tokens`).
    pub chunk: u32,
    /// Requests running at once at most (`max_num_seqs`).
    pub max_running: u32,
    /// Requests waiting at an engine at most; more are answered `Busy`.
    pub max_waiting: u32,
    /// What decode does when a load fails (`kv_load_failure_policy`).
    pub load_failure: LoadFailurePolicy,
    /// Which free block is handed out next.
    pub allocator: AllocationOrder,
    /// Percent of a decode's blocks that loads may have before their prefills are ready: they do not
    /// wait where all the others are free.
    pub early_percent: u32,
}

impl Default for EngineSettings {
    fn default() -> EngineSettings {
        EngineSettings {
            chunk: 2048,
            max_running: 256,
            max_waiting: 1 << 16,
            load_failure: LoadFailurePolicy::Recompute,
            allocator: AllocationOrder::Fifo,
            early_percent: 0,
        }
    }
}

/// What decode does with a request whose KV did not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum LoadFailurePolicy {
    /// Compute the prompt itself.
    Recompute,
    Fail,
}

/// Order in which free blocks are handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum AllocationOrder {
    /// The block that is free for the longest time.
    Fifo,
    /// The block that was freed last.
    Lifo,
}

/// Layers that one cell can tell apart.
pub const CELL_LAYERS_MAX: u16 = 96;

/// What the simulator keeps of block contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MemoryFidelity {
    /// Every byte.
    Bytes,
    /// One 16-byte cell per (block, rank).
    Cells,
}

/// What becomes of faults when the safety phase ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum LivenessMode {
    /// Transient faults end, permanent ones stay.
    Heal,
    /// A drawn core is healed of everything, whatever lasts elsewhere becomes permanent.
    Core,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkloadRequest {
    pub arrival: Nanos,
    /// Its prompts, at least one.
    pub prompts: Vec<WorkloadPrompt>,
    /// Samples per prompt, at least 1.
    pub samples: u32,
    /// Tokens to generate per sample, at least 1.
    pub output: u32,
    /// The client goes away this long after `arrival`, if it has no answer by then.
    pub abort: Option<Nanos>,
    /// The first token of prefill is a stop token: prefill ends with `Stop`, and decode with its
    /// first token.
    pub stop: bool,
    /// The model that it names; none if it names none.
    #[serde(default)]
    pub model: Option<Arc<str>>,
    /// Word from which decode engines render other tokens of the same number; `None` if both sides
    /// render a prompt alike.
    #[serde(default)]
    pub decode_rendering: Option<u64>,
}

/// What a prompt contains, by hashes instead of tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WorkloadPrompt {
    pub tokens: u32,
    /// One hash per leading full run of [`Run::prefix_tokens`] tokens; equal hashes at one index
    /// mean equal prompts up to the end of that run.
    pub prefix: Arc<[u64]>,
    /// Names what follows those runs; equal only for equal prompts.
    pub tail: u64,
}

/// A fault that the simulator injects.
pub type InjectedFault = DrawnFault<InstanceSettings>;

impl FaultPlace for InstanceSettings {
    fn name(&self) -> &str {
        &self.name
    }

    fn host(&self) -> &str {
        &self.host
    }

    fn role(&self) -> Role {
        self.role
    }

    fn tp(&self) -> u16 {
        self.tp
    }

    fn restarted(&self, geometry: RestartGeometry) -> InstanceSettings {
        if self.is_pool {
            return self.clone();
        }
        InstanceSettings {
            tp: geometry.tp.unwrap_or(self.tp),
            blocks: geometry.blocks.unwrap_or(self.blocks),
            block_tokens: geometry.block_tokens.unwrap_or(self.block_tokens),
            layout: geometry.layout.unwrap_or(self.layout),
            ..self.clone()
        }
    }
}

section! {
    /// What must come out of a run.
    #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Expect checked by Expect::check {
        /// Invariants that are checked; all if the file names none.
        pub hold: Vec<InvariantId> = InvariantId::ALL.to_vec();
        /// Exit code of the run.
        pub exit: u8 = 0_u8;
        /// Requests by how they end.
        pub requests: ExpectedRequests;
        /// Receivers of streams by how they end.
        pub receivers: ExpectedReceivers;
        /// Operations of all data planes.
        pub operations: ExpectedOperations;
        /// First tokens that come in time.
        pub first_tokens: Vec<FirstTokenDeadline>;
        /// Virtual time by which the run is at rest.
        pub within: Option<Nanos>;
    }
}

section! {
    /// Bounds of the number of requests that end in a way.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub struct ExpectedRequests {
        /// Answered well.
        pub finished: Option<CountBounds>;
        /// Answered with an error.
        pub failed: Option<CountBounds>;
        /// Caller gone.
        pub unknown: Option<CountBounds>;
        /// Of the finished: prompts computed by decode.
        pub recomputed: Option<CountBounds>;
    }
}

section! {
    /// Bounds of the number of receivers that end in a way.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub struct ExpectedReceivers {
        /// With every chunk, and the end of the stream.
        pub finished: Option<CountBounds>;
        /// Told that something does not come.
        pub failed: Option<CountBounds>;
        /// Gone away, or their host was.
        pub gone: Option<CountBounds>;
    }
}

section! {
    /// Bounds of numbers of operations, while the workload lasts.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub struct ExpectedOperations {
        /// Accepted by a plane.
        pub posted: Option<CountBounds>;
        /// Answered `Busy`: planned for nothing.
        pub refused: Option<CountBounds>;
        pub failed: Option<CountBounds>;
    }
}

/// What is wrong with a deadline that lacks a key.
const DEADLINE: (&str, &str) = (
    "a first token without `request` or `within`",
    "give the number of the request, from 0, and a duration",
);

section! {
    /// A request and how soon its first token comes.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    pub struct FirstTokenDeadline {
        /// Which, by arrival from 0.
        pub request: u32, else DEADLINE;
        /// At most this long after its arrival.
        pub within: Nanos, else DEADLINE;
    }
}

/// From `min` to `max`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountBounds {
    pub min: u64,
    pub max: u64,
}

impl CountBounds {
    /// True if `count` is inside.
    pub const fn contains(&self, count: u64) -> bool {
        self.min <= count && count <= self.max
    }
}

impl fmt::Display for CountBounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CountBounds { min, max } = self;
        if min == max { write!(f, "{min}") } else { write!(f, "{min} to {max}") }
    }
}
