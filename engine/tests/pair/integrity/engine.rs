//! An engine whose KV cache has bytes, and where each element of it lies.

use crate::windows::Table;
use crate::world::{PlaneBytes, RankId};
use kvferry_engine::core::layout::{
    BlockList, Geometry, GroupKind, HeadSlots, KvGroup, LayerLayout,
};
use kvferry_engine::core::message::Role;
use std::collections::BTreeSet;

/// Blocks of each group, more than a prompt has.
pub(super) const POOL: u32 = 41;
/// Bytes of K and V of one head and token, in elements of two bytes.
pub(super) const ROW: u32 = 8;
const ELEMENT: u32 = 2;
/// Slots and rows of a state.
const STATE: [u32; 2] = [2, 3];

/// How the blocks of the layers of a group lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KvPlacement {
    /// Layer behind layer, and in a block head behind head.
    Apart,
    /// Block `n` of all layers before block `n + 1` of any.
    Interleaved,
    /// Layer behind layer, and in a block token behind token.
    TokensFirst,
    /// Block by block, K of all heads before V.
    Split,
    /// All blocks of a head before those of the next, K of all heads before V.
    HeadsApart,
}

impl KvPlacement {
    pub(super) const ALL: [KvPlacement; 5] = [
        KvPlacement::Apart,
        KvPlacement::Interleaved,
        KvPlacement::TokensFirst,
        KvPlacement::Split,
        KvPlacement::HeadsApart,
    ];

    fn is_split(self) -> bool {
        matches!(self, KvPlacement::Split | KvPlacement::HeadsApart)
    }
}

/// A group of layers: its kind, and tokens per block of the prefill and of the decode.
#[derive(Clone, Debug)]
pub(super) struct GroupCase {
    pub(super) kind: GroupKind,
    pub(super) sizes: [u32; 2],
    pub(super) layers: Vec<u16>,
}

/// What both engines of a case have in common.
#[derive(Clone, Debug)]
pub(super) struct ModelCase {
    pub(super) heads: u16,
    pub(super) latent: bool,
    pub(super) packed: bool,
    pub(super) groups: Vec<GroupCase>,
}

/// An element row: K and V of a token and a head in a layer, or a row of a state's slot, which
/// counts as a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KvRow {
    pub(super) layer: u16,
    pub(super) head: u16,
    pub(super) token: u32,
}

#[derive(Clone, Debug)]
pub(super) struct KvEngine {
    pub(super) role: Role,
    pub(super) geometry: Geometry,
    pub(super) layers: Vec<LayerLayout>,
    /// What the memory of each rank has without KV.
    noise: Vec<Vec<u8>>,
}

/// A byte that depends on all numbers.
pub(super) fn drawn(numbers: [u32; 5]) -> u8 {
    let mix = |hash: u64, number: u32| {
        let hash = (hash ^ u64::from(number)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash ^ hash >> 29
    };
    (numbers.into_iter().fold(0x9e37_79b9_7f4a_7c15, mix) >> 11) as u8
}

impl KvEngine {
    pub(super) fn new(role: Role, model: &ModelCase, tp: u16, placement: KvPlacement) -> KvEngine {
        let side = usize::from(role == Role::Decode);
        let group = |case: &GroupCase| KvGroup {
            kind: case.kind,
            block_tokens: if case.kind == GroupKind::State { 0 } else { case.sizes[side] },
            layers: case.layers.clone(),
        };
        let groups = model.groups.iter().map(group).collect();
        let (latent, packed) = (model.latent, model.packed);
        let geometry =
            Geometry { tp, latent, packed, ..Geometry::new("bytes", model.heads, groups) };
        let mut engine =
            KvEngine { role, layers: vec![], noise: vec![], geometry: geometry.clone() };
        let mut layers: Vec<Option<LayerLayout>> = vec![None; usize::from(geometry.layers)];
        let mut base = 64;
        for group in &geometry.groups {
            let count = group.layers.len() as u64;
            let (first, apart, block) = engine.layout(group, placement);
            for (at, layer) in (0..).zip(&group.layers) {
                let base =
                    base + at * if placement == KvPlacement::Interleaved { block } else { apart };
                layers[usize::from(*layer)] = Some(LayerLayout { base, ..first.clone() });
            }
            base += count * apart + 32;
        }
        engine.layers = layers.into_iter().flatten().collect();
        let noise = |rank: u16| {
            (0..base as u32).map(|at| drawn([at, rank.into(), role as u32, 7, 7])).collect()
        };
        engine.noise = (0..tp).map(noise).collect();
        engine
    }

    /// The first layer of a group; bytes of a layer, and of a block of it.
    fn layout(&self, group: &KvGroup, placement: KvPlacement) -> (LayerLayout, u64, u64) {
        let heads = u32::from(self.rank_heads());
        let is_state = group.kind == GroupKind::State;
        let is_split = placement.is_split() && !is_state && !self.geometry.latent;
        let [_, slots, rows, width] = match (is_state, is_split) {
            (true, _) => [POOL, STATE[0], STATE[1], ROW / ELEMENT],
            (false, true) => [POOL, 2 * heads, group.block_tokens, ROW / ELEMENT / 2],
            (false, false) => [POOL, heads, group.block_tokens, ROW / ELEMENT],
        };
        let shape = [POOL, slots, rows, width];
        let mut layer = LayerLayout::contiguous(0, shape, ELEMENT);
        let [slots, rows, width] = [slots, rows, width].map(u64::from);
        let block = slots * rows * width;
        layer.stride = match placement {
            KvPlacement::TokensFirst if !is_state => [block, width, slots * width, 1],
            KvPlacement::HeadsApart => [rows * width, u64::from(POOL) * rows * width, width, 1],
            KvPlacement::Interleaved => {
                let [_, slot, row, one] = layer.stride;
                [block * group.layers.len() as u64, slot, row, one]
            }
            _ => layer.stride,
        };
        if is_split {
            layer.slots = HeadSlots::Split;
        }
        let block = block * u64::from(ELEMENT);
        (layer, block * u64::from(POOL), block)
    }

    fn rank_heads(&self) -> u16 {
        (self.geometry.kv_heads / self.geometry.tp).max(1)
    }

    /// KV heads of a rank.
    fn heads(&self, rank: u16) -> std::ops::Range<u16> {
        let (heads, tp) = (self.geometry.kv_heads, self.geometry.tp);
        match (self.geometry.latent, tp <= heads) {
            (true, _) => 0..1,
            (false, true) => rank * (heads / tp)..(rank + 1) * (heads / tp),
            (false, false) => rank / (tp / heads)..rank / (tp / heads) + 1,
        }
    }

    /// Heads that a layer has on a rank; slots of a state, numbered over all ranks.
    pub(super) fn heads_of(&self, layer: u16, rank: u16) -> std::ops::Range<u16> {
        let slots = STATE[0] as u16;
        match self.group(layer).1.kind {
            GroupKind::State => rank * slots..(rank + 1) * slots,
            _ => self.heads(rank),
        }
    }

    /// Rows of a state, or tokens of a block.
    pub(super) fn rows_of(&self, layer: u16) -> u32 {
        self.layers[usize::from(layer)].shape[2]
    }

    pub(super) fn group(&self, layer: u16) -> (usize, &KvGroup) {
        let group = self.geometry.group_of(layer).expect("a layer of the model");
        (group, &self.geometry.groups[group])
    }

    pub(super) fn tables(&self) -> Vec<Table> {
        let first = 11 + 8 * self.role as u32;
        let kind = |group: &KvGroup| match group.kind {
            GroupKind::Full => (0, group.block_tokens, vec![]),
            GroupKind::Window { tokens } => (tokens, group.block_tokens, vec![]),
            GroupKind::State => (0, u32::MAX, vec![first]),
        };
        let table = |(window, size, ids)| Table { window, size, ids, pool: POOL, first };
        self.geometry.groups.iter().map(kind).map(table).collect()
    }

    /// Offset of byte `byte` of a row in the memory of a rank that has its head, if its token is in a
    /// block.
    pub(super) fn at(&self, tables: &[Table], row: KvRow, rank: u16, byte: u32) -> Option<usize> {
        let KvRow { layer, head, token } = row;
        let (block, in_block) = tables[self.group(layer).0].place(token)?;
        Some(self.offset(
            layer,
            [block, u32::from(head - self.heads_of(layer, rank).start), in_block],
            byte,
        ))
    }

    fn offset(&self, layer: u16, [block, slot, row]: [u32; 3], byte: u32) -> usize {
        let layer = &self.layers[usize::from(layer)];
        let (slot, byte) = match layer.slots {
            HeadSlots::Fused => (slot, byte),
            HeadSlots::Split => (slot + byte / (ROW / 2) * layer.shape[1] / 2, byte % (ROW / 2)),
        };
        let places = [block, slot, row].into_iter().zip(layer.stride);
        let elements: u64 = places.map(|(at, stride)| u64::from(at) * stride).sum();
        (layer.base + elements * u64::from(layer.element)) as usize + byte as usize
    }

    pub(super) fn ranks(&self) -> impl Iterator<Item = u16> + use<> {
        0..self.geometry.tp
    }

    pub(super) fn id(&self, rank: u16) -> RankId {
        (self.role, rank)
    }

    /// Gives all ranks memory without KV.
    pub(super) fn scrub(&self, bytes: &mut PlaneBytes) {
        for rank in self.ranks() {
            bytes.memory.insert(self.id(rank), self.noise[usize::from(rank)].clone());
        }
    }

    /// Writes the KV of some tokens, of each layer as far as they are in blocks.
    pub(super) fn compute(
        &self,
        bytes: &mut PlaneBytes,
        tables: &[Table],
        tokens: std::ops::Range<u32>,
    ) {
        for row in self.all_rows(tokens) {
            for (rank, at) in self.places(tables, row) {
                for (byte, at) in (0..).zip(at) {
                    bytes.memory.get_mut(&rank).expect("scrubbed")[at] = value(row, byte);
                }
            }
        }
    }

    /// All rows of some tokens; of a state those it has, whatever the tokens are.
    pub(super) fn all_rows(&self, tokens: std::ops::Range<u32>) -> Vec<KvRow> {
        let mut rows = Vec::new();
        for layer in 0..self.geometry.layers {
            let is_state = self.group(layer).1.kind == GroupKind::State;
            let tokens = if is_state { 0..STATE[1] } else { tokens.clone() };
            let mut heads: Vec<u16> =
                self.ranks().flat_map(|rank| self.heads_of(layer, rank)).collect();
            heads.dedup();
            let rows_of = |token| heads.iter().map(move |head| KvRow { layer, head: *head, token });
            rows.extend(tokens.flat_map(rows_of));
        }
        rows
    }

    /// Where each copy of a row lies: a rank, and the offsets of its bytes.
    pub(super) fn places(&self, tables: &[Table], row: KvRow) -> Vec<(RankId, Vec<usize>)> {
        let has = |rank: &u16| self.heads_of(row.layer, *rank).contains(&row.head);
        let of_rank = |rank: u16| {
            let at =
                (0..ROW).map(|byte| self.at(tables, row, rank, byte)).collect::<Option<_>>()?;
            Some((self.id(rank), at))
        };
        self.ranks().filter(has).filter_map(of_rank).collect()
    }

    /// What the memory of each rank is where nothing was written but these tokens.
    pub(super) fn assert_nothing_else(
        &self,
        bytes: &PlaneBytes,
        tables: &[Table],
        written: impl Fn(KvRow) -> bool,
    ) {
        let end = tables.iter().map(|table| table.ids.len() as u32 * table.size.min(1 << 10)).max();
        let rows = self.all_rows(0..end.unwrap_or(0)).into_iter().filter(|row| written(*row));
        let mut may_differ: BTreeSet<(RankId, usize)> = BTreeSet::new();
        for (rank, at) in rows.flat_map(|row| self.places(tables, row)) {
            may_differ.extend(at.into_iter().map(|at| (rank, at)));
        }
        for rank in self.ranks() {
            let memory = bytes.memory[&self.id(rank)].iter().zip(&self.noise[usize::from(rank)]);
            for (at, (found, noise)) in memory.enumerate() {
                let is_kept = found == noise || may_differ.contains(&(self.id(rank), at));
                assert!(is_kept, "byte {at} of rank {rank} was written");
            }
        }
    }

    /// Blocks as the connector lists them.
    pub(super) fn listed(tables: &[Table]) -> Vec<BlockList> {
        tables.iter().map(|table| Table::listed((0, table.ids.clone()))).collect()
    }
}

/// Byte of a row of the prompt.
pub(super) fn value(row: KvRow, byte: u32) -> u8 {
    drawn([row.layer.into(), row.head.into(), row.token, byte, 1])
}
