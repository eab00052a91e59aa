//! What an instance is told on the command line.

use crate::instance::limits::limits_given;
use crate::instance::{FabricArg, Overrides, ProtocolLimits, TrustSettings};
use crate::process::logs::LogArgs;
use crate::process::{CommandError, address};
use crate::spans::SpanArgs;
use clap::Args;
use clap::builder::{NonEmptyStringValueParser, PossibleValuesParser, TypedValueParser};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::ids::TP_MAX;
use kvferry_engine::core::layout::GroupKind;
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::verify::Verify;
use kvferry_fabric_host::PeerTrust;
use kvferry_scenarios::cost::StepCost;
use kvferry_scenarios::run::{
    AllocationOrder, EngineSettings, FabricLimits, InstanceSettings, LoadFailurePolicy,
    MemoryLayout, ModelGeometry, ModelGroup, ProtocolSettings,
};
use kvferry_trust::{SecretFile, insecure_of_environment};
use std::path::PathBuf;

const ROLES: [(&str, Role); 2] = [("prefill", Role::Prefill), ("decode", Role::Decode)];

const MODES: [(&str, Mode); 2] = [("push", Mode::Push), ("pull", Mode::Pull)];

const ON_FAILURE: [(&str, LoadFailurePolicy); 2] =
    [("fail", LoadFailurePolicy::Fail), ("recompute", LoadFailurePolicy::Recompute)];

const LAYOUTS: [(&str, MemoryLayout); 4] = [
    ("block", MemoryLayout::Block),
    ("layer", MemoryLayout::Layer),
    ("head-split", MemoryLayout::HeadSplit),
    ("token", MemoryLayout::Token),
];

/// One of some words, each with what it stands for.
fn one_of<T>(known: &'static [(&'static str, T)]) -> impl TypedValueParser<Value = T>
where
    T: Clone + Send + Sync + 'static,
{
    let words = PossibleValuesParser::new(known.iter().map(|(word, _)| *word));
    words.map(move |given| {
        let found = known.iter().find(|(word, _)| *word == given);
        found.expect("it is one of them").1.clone()
    })
}

/// Arguments of `serve`.
#[derive(Clone, Debug, Args)]
pub(crate) struct ServeArgs {
    /// What the instance does
    #[arg(long, value_parser = one_of(&ROLES))]
    pub(crate) role: Option<Role>,
    /// Direction of transfers: push (the prefill writes; MoRIIO's WRITE) or pull (the decode reads;
    /// READ)
    #[arg(long, value_parser = one_of(&MODES))]
    pub(crate) mode: Option<Mode>,
    /// What moves the bytes
    #[arg(long, default_value = "host")]
    pub(crate) fabric: FabricArg,
    /// Discovery address of the router to register with
    #[arg(long, value_name = "HOST:PORT", value_parser = address::dialled)]
    pub(crate) proxy: Option<String>,
    /// Host or address to listen at and to tell others
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// Port for legs; 0 for a free one
    #[arg(long, default_value_t = 0)]
    pub(crate) http_port: u16,
    /// Bytes of memory for the bodies of all requests together
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20)]
    pub(crate) bodies_max: usize,
    /// Port for handshakes; 0 for a free one
    #[arg(long, default_value_t = 0)]
    pub(crate) handshake_port: u16,
    /// Port for notices of MoRIIO peers; 0 for a free one
    #[arg(long, default_value_t = 0)]
    pub(crate) notify_port: u16,
    /// Take model, KV cache and cost of an instance from this scenario file
    #[arg(long, value_name = "FILE", requires = "instance")]
    pub(crate) scenario: Option<PathBuf>,
    /// Request trace in place of the one that the scenario names
    #[arg(long, value_name = "FILE.jsonl", requires = "scenario")]
    pub(crate) workload_trace: Option<PathBuf>,
    /// Name of the instance in the scenario
    #[arg(long, value_name = "NAME")]
    pub(crate) instance: Option<String>,
    /// Seed of the scenario
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Name of the model; equal on both sides
    #[arg(long, default_value = "kvferry-tiny")]
    pub(crate) model: String,
    /// TP ranks; where there are peers that speak MoRIIO each takes the next port of both kinds
    #[arg(long, default_value_t = 1)]
    pub(crate) tp: u16,
    /// Names that it takes requests for, and registers with; without it, any
    #[arg(long, value_name = "NAME", num_args = 1.., value_parser = NonEmptyStringValueParser::new())]
    pub(crate) served_model_name: Vec<String>,
    /// Layers of the model
    #[arg(long, default_value_t = 4)]
    pub(crate) layers: u16,
    /// KV heads of the model
    #[arg(long, default_value_t = 4)]
    pub(crate) kv_heads: u16,
    /// Bytes of K and V of one token in one head of one layer
    #[arg(long, default_value_t = 512)]
    pub(crate) head_bytes: u32,
    /// Bytes per KV element
    #[arg(long, default_value_t = 4)]
    pub(crate) element: u32,
    /// Tokens per KV block
    #[arg(long, default_value_t = 32)]
    pub(crate) block_tokens: u32,
    /// KV blocks
    #[arg(long, default_value_t = 512)]
    pub(crate) blocks: u32,
    /// How a block lies in memory; MoRIIO peers need `block` or `token`
    #[arg(long, default_value = "block", value_parser = one_of(&LAYOUTS))]
    pub(crate) layout: MemoryLayout,
    /// Name of layer N, with {} for N; by it MoRIIO peers find its memory
    #[arg(long, default_value = "model.layers.{}.self_attn.attn")]
    pub(crate) layer_name: String,
    /// What a decode does with a prompt whose KV did not arrive
    #[arg(long, default_value = "fail", value_parser = one_of(&ON_FAILURE))]
    pub(crate) on_load_failure: LoadFailurePolicy,
    /// Times and limits of the protocol, with commas between: protocol.lease_ms=20000
    #[arg(long, value_name = "TABLE.KEY=VALUE", value_parser = limits_given,
        conflicts_with = "scenario")]
    pub(crate) set: Option<Overrides>,
    /// Folder in which lives are noted where --handshake-port is given, so that a restarted
    /// instance is known as such though the clock went back; kvferry in $XDG_STATE_HOME or
    /// ~/.local/state by default
    #[arg(long, value_name = "FOLDER")]
    pub(crate) state: Option<PathBuf>,
    /// File of the fleet's secret, which peers have to prove that they know;
    /// $KVFERRY_SECRET_FILE by default
    #[arg(long, value_name = "FILE")]
    pub(crate) secret_file: Option<PathBuf>,
    /// Encrypt KV between hosts, which both sides have to; needs a secret
    #[arg(long)]
    pub(crate) encrypt: bool,
    /// Listen where others reach the instance though there is no secret, so that whoever does is
    /// believed; $KVFERRY_INSECURE_NETWORK by default
    #[arg(long)]
    pub(crate) insecure_network: bool,
    /// Whether there are peers that speak MoRIIO, which can prove nothing; if not given there are,
    /// unless others are to prove a secret at --host
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true")]
    pub(crate) moriio_peers: Option<bool>,
    /// Verify KV by digests before it is used, all of it or a sample; both sides have to
    #[arg(long, default_value = "off", value_parser = one_of(&Verify::NAMES),
        conflicts_with = "moriio_only")]
    pub(crate) verify: Verify,
    /// Speak MoRIIO and nothing else, as vLLM's own connector does.
    #[arg(long)]
    pub(crate) moriio_only: bool,
    #[command(flatten)]
    pub(crate) logs: LogArgs,
    #[command(flatten)]
    pub(crate) spans: SpanArgs,
    /// Put KV into private memory, which peers reach by cross-memory attach, in place of a memory
    /// file that they map
    #[arg(long)]
    pub(crate) private_memory: bool,
}

/// An instance as it is to be.
#[derive(Clone, Debug)]
pub(super) struct ServePlan {
    pub(super) model: ModelGeometry,
    pub(super) instance: InstanceSettings,
    pub(super) engine: EngineSettings,
    /// Times and limits of the protocol.
    pub(super) limits: ProtocolLimits,
}

impl ServeArgs {
    /// Who is answered.
    ///
    /// # Errors
    /// A variable that cannot be.
    pub(super) fn trust(&self) -> Result<TrustSettings, CommandError> {
        let insecure = insecure_of_environment().map_err(CommandError::Input)?;
        let peers = PeerTrust {
            secret_file: self.secret_file.clone().or_else(SecretFile::of_environment),
            insecure_network: self.insecure_network || insecure,
            encrypt: self.encrypt,
            ..PeerTrust::default()
        };
        Ok(TrustSettings { peers, moriio_peers: self.moriio_peers, verify: self.verify })
    }

    /// What the arguments, or the scenario that they name, ask for.
    ///
    /// # Errors
    /// Arguments that are missing or describe no instance.
    pub(super) fn plan(&self) -> Result<ServePlan, CommandError> {
        let input = |text: String| CommandError::Input(text);
        if let Some(path) = &self.scenario {
            let trace = self.workload_trace.as_deref();
            let run = kvferry_scenarios::load_with_trace(path, trace)?.draw(self.seed)?;
            let name = self.instance.as_deref().unwrap_or_default();
            let instance = run.instances.iter().find(|instance| instance.name == name);
            let Some(instance) = instance.cloned() else {
                let names: Vec<&str> =
                    run.instances.iter().map(|instance| &*instance.name).collect();
                let (file, names) = (path.display(), names.join(", "));
                return Err(input(format!("{file} has no instance {name:?}, only {names}")));
            };
            let limits = ProtocolLimits {
                protocol: instance.protocol.core.clone(),
                channel: instance.protocol.channel.clone(),
                operations: instance.protocol.transfer.clone(),
            };
            return Ok(ServePlan { model: run.model, instance, engine: run.engine, limits });
        }
        let missing = |what: &str| input(format!("{what} is missing"));
        let role = self.role.ok_or_else(|| missing("--role prefill or --role decode"))?;
        let mode = self.mode.ok_or_else(|| missing("--mode push or --mode pull"))?;
        let counts = [
            ("--tp", u32::from(self.tp)),
            ("--layers", u32::from(self.layers)),
            ("--kv-heads", u32::from(self.kv_heads)),
            ("--element", self.element),
            ("--block-tokens", self.block_tokens),
            ("--blocks", self.blocks),
        ];
        if let Some((name, _)) = counts.iter().find(|(_, count)| *count == 0) {
            return Err(input(format!("{name} is 0; at least 1 is needed")));
        }
        let (tp, heads) = (self.tp, self.kv_heads);
        if !(heads.is_multiple_of(tp) || tp.is_multiple_of(heads)) || tp > TP_MAX {
            let text = format!("--tp {tp} with --kv-heads {heads}: neither divides the other");
            return Err(input(text));
        }
        let row = 2 * self.element;
        if self.head_bytes == 0 || !self.head_bytes.is_multiple_of(row) {
            let bytes = self.head_bytes;
            return Err(input(format!("--head-bytes {bytes} is no multiple of {row}, K and V")));
        }
        let group = ModelGroup { kind: GroupKind::Full, layers: (0..self.layers).collect() };
        let model = ModelGeometry {
            name: self.model.clone(),
            layers: self.layers,
            kv_heads: self.kv_heads,
            latent: false,
            head_bytes: self.head_bytes,
            element: self.element,
            state_bytes: 0,
            groups: vec![group],
        };
        let instance = self.instance_of(role, mode);
        let limits = self.set.clone().unwrap_or_default().limits();
        let limits = limits.map_err(|why| input(format!("--set: {why}")))?;
        Ok(ServePlan { model, instance, engine: self.engine(), limits })
    }

    /// Limits as of vLLM's defaults.
    fn engine(&self) -> EngineSettings {
        EngineSettings {
            chunk: 2_048,
            max_running: 256,
            max_waiting: 4_096,
            load_failure: self.on_load_failure,
            allocator: AllocationOrder::Fifo,
            early_percent: 12,
        }
    }

    fn instance_of(&self, role: Role, mode: Mode) -> InstanceSettings {
        InstanceSettings {
            name: role.to_string(),
            host: role.to_string(),
            node: "here".into(),
            role,
            is_pool: false,
            tp: self.tp,
            dp_rank: 0,
            dp_size: 1,
            blocks: self.blocks,
            block_tokens: self.block_tokens,
            layout: self.layout,
            mode,
            prefix_cache: false,
            cost: StepCost {
                step: Nanos::ZERO,
                weights: Nanos::ZERO,
                token_fs: 0,
                pair_fs: 0,
                context_fs: 0,
            },
            protocol: ProtocolSettings::default(),
            fabric: FabricLimits::default(),
            models: None,
        }
    }
}
