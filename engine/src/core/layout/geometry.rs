//! What the KV cache of one engine looks like.

use crate::fabric::{Address, RegionDesc};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The KV cache of one engine over all its TP ranks, without addresses.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Geometry {
    /// Model name and revision; must be equal on both sides of a transfer.
    pub model: Arc<str>,
    /// Number of TP ranks, 1 to [`crate::core::ids::TP_MAX`].
    pub tp: u16,
    /// KV heads of the whole model. Rank r of T holds heads `r*K/T..(r+1)*K/T` if `T <= K`; with
    /// `T > K` each head is replicated on `T/K` neighbouring ranks. 1 with `latent`.
    pub kv_heads: u16,
    /// Multi-head latent attention: one latent head, the same on every rank.
    pub latent: bool,
    /// Number of attention or state layers.
    pub layers: u16,
    /// KV cache groups; every layer is in exactly one.
    pub groups: Vec<Group>,
}

/// Layers that share one block table.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Group {
    /// What a block holds.
    pub kind: GroupKind,
    /// Tokens per block (for `State`: ignored, one block is one request's state).
    pub block_tokens: u32,
    /// Its layers, ascending.
    pub layers: Vec<u16>,
}

/// What the blocks of a group hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GroupKind {
    /// Every token of the prompt.
    Full,
    /// The last `tokens` tokens only.
    Window {
        /// Window size in tokens.
        tokens: u32,
    },
    /// A recurrent state: one block per request, final only with the last token.
    State,
}

/// Where the KV of one rank lies.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RankLayout {
    /// TP rank.
    pub rank: u16,
    /// Its data plane.
    pub address: Address,
    /// Registered regions and their sizes in bytes.
    pub regions: Vec<(RegionDesc, u64)>,
    /// One entry per layer.
    pub layers: Vec<LayerLayout>,
}

/// One layer's tensor `[B, H, N, C]` on one rank: B blocks, H head slots, N tokens per block,
/// C elements per token and slot.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayerLayout {
    /// Index into [`RankLayout::regions`].
    pub region: u16,
    /// Byte offset of element `[0, 0, 0, 0]` in the region.
    pub base: u64,
    /// `[B, H, N, C]`.
    pub shape: [u32; 4],
    /// Strides in elements; the last is 1.
    pub stride: [u64; 4],
    /// Bytes per element.
    pub element: u32,
    /// How K and V of a head lie.
    pub slots: HeadSlots,
}

/// How K and V of a KV head are laid out in the H and C dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum HeadSlots {
    /// One slot per head, K and V of it (or the latent, or a state) concatenated in C.
    Fused,
    /// K heads in slots `0..h`, V heads in slots `h..2h`.
    Split,
}

/// The blocks of one request in one group: logical blocks `first..first + ids.len()`.
///
/// A sliding window has dropped the blocks before `first`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BlockList {
    /// Logical index of the first listed block.
    pub first: u32,
    /// Block ids, one per logical block.
    pub ids: Vec<u32>,
}

impl BlockList {
    /// Blocks from logical block 0 on.
    pub fn new(ids: Vec<u32>) -> BlockList {
        BlockList { first: 0, ids }
    }

    /// The id of a logical block, if listed.
    pub fn get(&self, logical: u32) -> Option<u32> {
        self.ids.get(logical.checked_sub(self.first)? as usize).copied()
    }
}
