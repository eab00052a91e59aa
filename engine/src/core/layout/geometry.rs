//! What the KV cache of one engine looks like.

use crate::core::ids::hash;
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
    pub groups: Vec<KvGroup>,
    /// The attention backend arranges the tokens of a block as it likes, as that of vLLM for CPUs
    /// does: only a whole block of a head has a meaning, and both sides need equal ones.
    #[serde(default)]
    pub packed: bool,
}

impl Geometry {
    /// Of one rank, whose tokens lie in their order; its groups have all layers of the model.
    pub fn new(model: impl Into<Arc<str>>, kv_heads: u16, groups: Vec<KvGroup>) -> Geometry {
        Geometry {
            model: model.into(),
            tp: 1,
            kv_heads,
            latent: false,
            layers: groups.iter().map(|group| group.layers.len() as u16).sum(),
            groups,
            packed: false,
        }
    }

    /// FNV-1a (64 bit) over all fields, little-endian, with lengths and tags in front of what
    /// varies: the same on every machine, see [`crate::core::message::Hello::fingerprint`].
    pub fn fingerprint(&self) -> u64 {
        let mut bytes = (self.model.len() as u64).to_le_bytes().to_vec();
        bytes.extend(self.model.as_bytes());
        let mut number = |number: u64| bytes.extend(number.to_le_bytes());
        for field in [self.tp, self.kv_heads, u16::from(self.latent), self.layers] {
            number(u64::from(field));
        }
        number(self.groups.len() as u64);
        for group in &self.groups {
            let (tag, tokens) = match group.kind {
                GroupKind::Full => (0, 0),
                GroupKind::Window { tokens } => (1, tokens),
                GroupKind::State => (2, 0),
            };
            number(tag);
            number(u64::from(tokens));
            number(u64::from(group.block_tokens));
            number(group.layers.len() as u64);
            group.layers.iter().for_each(|layer| number(u64::from(*layer)));
        }
        // Nothing for most, so that their fingerprints are those of before there was this field.
        if self.packed {
            number(1);
        }
        hash(bytes.into_iter())
    }

    /// The group of a layer, if it is in one.
    pub fn group_of(&self, layer: u16) -> Option<usize> {
        self.groups.iter().position(|group| group.layers.binary_search(&layer).is_ok())
    }

    /// Tokens that a chunk of `group` is aligned down to, so that it fills blocks of both sides:
    /// the larger of the two block sizes, of which the smaller is a divisor. 1 for a `State`
    /// group, which moves once, with the last token.
    ///
    /// # Panics
    /// If one of the geometries has no such group.
    pub fn alignment(&self, peer: &Geometry, group: usize) -> u32 {
        let (own, other) = (&self.groups[group], &peer.groups[group]);
        match own.kind {
            GroupKind::State => 1,
            GroupKind::Full | GroupKind::Window { .. } => own.block_tokens.max(other.block_tokens),
        }
    }

    /// The blocks that an engine still has of a prompt of `tokens` tokens when it is computed: those outside
    /// of sliding windows are freed.
    pub(in crate::core) fn kept(&self, blocks: &[BlockList], tokens: u32) -> Vec<BlockList> {
        let kept = |(list, group): (&BlockList, &KvGroup)| {
            let size = group.block_tokens.max(1);
            let first = (group.kind.handed_over_from(0, tokens, size) / size).max(list.first);
            let gone = (first - list.first) as usize;
            BlockList { first, ids: list.ids.get(gone..).unwrap_or_default().to_vec() }
        };
        blocks.iter().zip(&self.groups).map(kept).collect()
    }

    /// KV heads of one rank. The tensor parallel size is checked already.
    pub(in crate::core) fn rank_heads(&self) -> u16 {
        (self.kv_heads / self.tp).max(1)
    }
}

/// Layers that share one block table.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvGroup {
    /// What a block holds.
    pub kind: GroupKind,
    /// Tokens per block (for `State`: ignored, one block is one request's state).
    pub block_tokens: u32,
    pub layers: Vec<u16>,
}

impl KvGroup {
    /// Layers whose blocks hold `block_tokens` tokens of the prompt.
    pub fn full(block_tokens: u32, layers: impl IntoIterator<Item = u16>) -> KvGroup {
        KvGroup { kind: GroupKind::Full, block_tokens, layers: layers.into_iter().collect() }
    }
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

impl GroupKind {
    /// First token whose KV is read to compute `token`. A window of W tokens ends with `token`.
    pub fn read_from(self, token: u32) -> u32 {
        match self {
            GroupKind::Window { tokens } => token.saturating_add(1).saturating_sub(tokens),
            GroupKind::Full | GroupKind::State => 0,
        }
    }

    /// First token from `from` on that a hand-over of a prompt of `tokens` tokens moves.
    ///
    /// The receiver computes the last token of the prompt again, for its logits. So both engines keep
    /// all blocks that this token reads. `unit` is the smaller of their block sizes: units move from
    /// their first token on, because the receiver shares whole blocks with later prompts.
    pub fn handed_over_from(self, from: u32, tokens: u32, unit: u32) -> u32 {
        let GroupKind::Window { tokens: window } = self else { return from };
        let kind = match planted!("window-is-half") {
            true => GroupKind::Window { tokens: window / 2 },
            false => self,
        };
        let computed = u32::from(!planted!("window-of-the-next-token"));
        let first = kind.read_from(tokens.saturating_sub(computed));
        let over = if planted!("window-begins-inside-a-block") { 0 } else { first % unit.max(1) };
        from.max(first - over)
    }
}

/// Where the KV of one rank lies.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RankLayout {
    /// TP rank.
    pub rank: u16,
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

impl LayerLayout {
    /// A tensor without gaps, `base` bytes into the first region, with one slot per head.
    pub const fn contiguous(base: u64, shape: [u32; 4], element: u32) -> LayerLayout {
        let row = shape[3] as u64;
        let slot = shape[2] as u64 * row;
        let stride = [shape[1] as u64 * slot, slot, row, 1];
        LayerLayout { region: 0, base, shape, stride, element, slots: HeadSlots::Fused }
    }

    /// Bytes from one block, head slot and token to the next; 0 where there is only one.
    /// The layout is checked already, so nothing overflows.
    pub(super) fn byte_strides(&self) -> [u64; 3] {
        [0, 1, 2].map(|axis| match self.shape[axis] {
            1 => 0,
            _ => self.stride[axis] * u64::from(self.element),
        })
    }

    /// Bytes of one token in one head slot.
    pub(super) fn row_bytes(&self) -> u64 {
        u64::from(self.shape[3]) * u64::from(self.element)
    }

    /// Elements of K and V together, per token and head.
    pub(super) fn row_elements(&self) -> u64 {
        match self.slots {
            HeadSlots::Fused => u64::from(self.shape[3]),
            HeadSlots::Split => 2 * u64::from(self.shape[3]),
        }
    }
}
