//! Settings of one stand-in engine.

use crate::cost::StepCost;
use crate::geometry::tensor_blocks;
use crate::run::{
    AllocationOrder, EngineSettings, InstanceSettings, LoadFailurePolicy, ModelGeometry, ModelGroup,
};
use kvferry_engine::core::layout::GroupKind;
use kvferry_engine::core::machine::Gauges;
use kvferry_engine::core::message::Role;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Settings of one engine core.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineConfig {
    /// Which legs it takes.
    pub role: Role,
    /// Number of TP ranks; blocks are the same on all of them.
    pub tp: u16,
    /// Layers of the model, reported one by one during a step.
    pub layers: u16,
    /// KV cache groups, in the order of the engine's geometry.
    pub groups: Vec<GroupConfig>,
    /// Tokens computed in one step, at most (`max_num_batched_tokens`).
    pub max_batched_tokens: u32,
    /// Requests in one step, at most (`max_num_seqs`).
    pub max_running: u32,
    /// Requests not running, at most; more are answered `Busy`.
    pub max_waiting: u32,
    /// True to reuse blocks of equal prefixes.
    pub prefix_cache: bool,
    /// Which free block is handed out next.
    pub allocator: AllocationOrder,
    /// What happens to a decode request whose KV did not arrive.
    pub load_failure: LoadFailurePolicy,
    /// Some: request ids get a suffix of 8 hex digits that differs for every leg and seed, as vLLM
    /// does. None: only if the id is in use.
    pub id_seed: Option<u64>,
    /// How long a step takes.
    pub cost: StepCost,
    /// Decode: percent of the blocks that loads may have before their prefills are ready.
    #[serde(default)]
    pub early_percent: u32,
}

/// One KV cache group: layers that share a block table, with a pool of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupConfig {
    /// What a block holds.
    pub kind: GroupKind,
    /// Tokens per block; ignored for [`GroupKind::State`].
    pub block_tokens: u32,
    /// Blocks of the pool, the null block 0 included, which is never handed out.
    pub blocks: u32,
}

/// Why an [`EngineConfig`] describes no engine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EngineConfigError {
    /// There is no KV cache group.
    NoGroups,
    /// A group has no block beside the null block.
    NoBlocks {
        /// Index of the group.
        group: usize,
        blocks: u32,
    },
    /// A group has blocks without tokens.
    NoBlockTokens {
        /// Index of the group.
        group: usize,
    },
    /// A sliding window is empty.
    NoWindow {
        /// Index of the group.
        group: usize,
    },
    /// A limit is zero, so no request could ever run.
    ZeroLimit {
        /// Name of the setting.
        name: &'static str,
    },
}

impl fmt::Display for EngineConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EngineConfigError::NoGroups => f.write_str("the engine has no KV cache group"),
            EngineConfigError::NoBlocks { group, blocks } => write!(
                f,
                "KV cache group {group} has {blocks} blocks; block 0 is never used, so at least 2 \
                 are needed"
            ),
            EngineConfigError::NoBlockTokens { group } => {
                write!(f, "KV cache group {group} has 0 tokens per block; at least 1 is needed")
            }
            EngineConfigError::NoWindow { group } => {
                write!(f, "KV cache group {group} has a window of 0 tokens; at least 1 is needed")
            }
            EngineConfigError::ZeroLimit { name } => {
                write!(f, "{name} is 0, so no request could run; at least 1 is needed")
            }
        }
    }
}

impl std::error::Error for EngineConfigError {}

impl EngineConfig {
    /// Settings of an engine that serves the model as this instance.
    pub fn new(
        model: &ModelGeometry,
        instance: &InstanceSettings,
        settings: &EngineSettings,
        id_seed: Option<u64>,
    ) -> EngineConfig {
        let group = |group: &ModelGroup| GroupConfig {
            kind: group.kind,
            block_tokens: instance.block_tokens,
            blocks: tensor_blocks(instance),
        };
        EngineConfig {
            role: instance.role,
            tp: instance.tp,
            layers: model.layers,
            groups: model.groups.iter().map(group).collect(),
            max_batched_tokens: settings.chunk,
            max_running: settings.max_running,
            max_waiting: settings.max_waiting,
            prefix_cache: instance.prefix_cache,
            allocator: settings.allocator,
            load_failure: settings.load_failure,
            id_seed,
            cost: instance.cost,
            early_percent: settings.early_percent,
        }
    }

    /// Blocks that can be handed out, all groups together.
    pub fn blocks(&self) -> u32 {
        self.groups.iter().map(|group| group.blocks - 1).sum()
    }

    /// What the gauges of the engine stay within. A preempted request waits whatever the queue.
    pub fn limits(&self) -> Gauges {
        let requests = self.max_waiting.saturating_add(self.max_running);
        Gauges {
            transfers: requests,
            queued: requests,
            held: self.blocks(),
            quarantined: self.blocks(),
            ..Gauges::default()
        }
    }

    /// Checks that requests can run at all.
    ///
    /// # Errors
    /// The first setting with which none could.
    pub fn check(&self) -> Result<(), EngineConfigError> {
        if self.groups.is_empty() {
            return Err(EngineConfigError::NoGroups);
        }
        for (group, config) in self.groups.iter().enumerate() {
            if config.blocks < 2 {
                return Err(EngineConfigError::NoBlocks { group, blocks: config.blocks });
            }
            if config.block_tokens == 0 && config.kind != GroupKind::State {
                return Err(EngineConfigError::NoBlockTokens { group });
            }
            if config.kind == (GroupKind::Window { tokens: 0 }) {
                return Err(EngineConfigError::NoWindow { group });
            }
        }
        let limits = [
            ("max_batched_tokens", self.max_batched_tokens),
            ("max_running", self.max_running),
            ("max_waiting", self.max_waiting),
            ("layers", u32::from(self.layers)),
        ];
        match limits.iter().find(|(_, limit)| *limit == 0) {
            Some((name, _)) => Err(EngineConfigError::ZeroLimit { name }),
            None => Ok(()),
        }
    }
}
