//! Random pairs of engines with real bytes, and the oracle that moves single elements.

use kvferry_engine::core::layout::*;
use kvferry_engine::fabric::{Address, RegionDesc};

/// Small numbers that stand for choices; smaller ones mean simpler cases, so shrinking works.
pub(crate) struct CaseDraw<'a> {
    values: &'a [u16],
}

impl<'a> CaseDraw<'a> {
    pub(crate) fn new(values: &'a [u16]) -> CaseDraw<'a> {
        CaseDraw { values }
    }

    /// A number below `end`; 0 when the choices are used up.
    pub(crate) fn below(&mut self, end: u32) -> u32 {
        let Some((first, rest)) = self.values.split_first() else { return 0 };
        self.values = rest;
        u32::from(*first) % end
    }

    pub(crate) fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u32) as usize]
    }

    pub(crate) fn chance(&mut self) -> bool {
        self.below(2) == 1
    }

    /// `count` different numbers below `end`, mostly with runs.
    fn ids(&mut self, count: usize, end: u32) -> Vec<u32> {
        let mut free: Vec<u32> = (0..end).collect();
        let mut at = 0;
        (0..count)
            .map(|_| {
                if self.below(3) == 1 {
                    at = self.below(free.len() as u32) as usize;
                }
                at %= free.len();
                free.remove(at)
            })
            .collect()
    }
}

/// One engine: what it says of itself and the bytes of `[rank][region]`.
#[derive(Clone, Debug)]
pub(crate) struct CaseSide {
    pub(crate) geometry: Geometry,
    pub(crate) ranks: Vec<RankLayout>,
    pub(crate) memory: Vec<Vec<Vec<u8>>>,
}

impl CaseSide {
    pub(crate) fn view(&self) -> (&Geometry, &[RankLayout]) {
        (&self.geometry, &self.ranks)
    }

    /// Head slots and index of (first head, V half) of head `head` (counted on the rank).
    fn element(&self, layer: &LayerLayout, head: u32, v: bool, c: u32) -> (u32, u32) {
        match layer.slots {
            HeadSlots::Fused => (head, c + if v { layer.shape[3] / 2 } else { 0 }),
            HeadSlots::Split => (head + if v { layer.shape[1] / 2 } else { 0 }, c),
        }
    }

    /// What one rank knows of its engine.
    pub(crate) fn rank(&self, rank: u16) -> (&Geometry, &RankLayout) {
        let layout = self.ranks.iter().find(|layout| layout.rank == rank);
        (&self.geometry, layout.expect("a rank of the engine"))
    }

    /// Byte offset of element `[block, slot, row, c]`.
    pub(crate) fn offset(layer: &LayerLayout, at: [u32; 4]) -> usize {
        let elements: u64 = at.iter().zip(layer.stride).map(|(i, s)| u64::from(*i) * s).sum();
        (layer.base + elements * u64::from(layer.element)) as usize
    }

    /// KV heads of a rank, as numbered in the model.
    fn heads(&self, rank: u16) -> std::ops::Range<u32> {
        let (k, tp, rank) =
            (u32::from(self.geometry.kv_heads), u32::from(self.geometry.tp), u32::from(rank));
        if self.geometry.latent {
            0..1
        } else if tp <= k {
            rank * (k / tp)..(rank + 1) * (k / tp)
        } else {
            rank * k / tp..rank * k / tp + 1
        }
    }

    /// Writes what tokens `tokens` of a request have to hold, element by element.
    fn fill(&mut self, group: usize, blocks: &BlockList, tokens: std::ops::Range<u32>) {
        let model = self.geometry.groups[group].clone();
        for rank in 0..self.geometry.tp {
            for layer in &model.layers {
                let at = self.ranks[usize::from(rank)].layers[usize::from(*layer)].clone();
                if model.kind == GroupKind::State {
                    self.fill_state(rank, *layer, &at, blocks.ids[0]);
                    continue;
                }
                let halves: &[bool] = if self.geometry.latent { &[false] } else { &[false, true] };
                let wide = at.slots == HeadSlots::Fused && !self.geometry.latent;
                let width = if wide { at.shape[3] / 2 } else { at.shape[3] };
                let first = self.heads(rank).start;
                for token in tokens.clone() {
                    let Some(block) = blocks.get(token / model.block_tokens) else { continue };
                    let row = token % model.block_tokens;
                    for (head, v, c) in self.heads(rank).flat_map(|head| {
                        halves.iter().flat_map(move |v| (0..width).map(move |c| (head, *v, c)))
                    }) {
                        let (slot, c_at) = self.element(&at, head - first, v, c);
                        let to = CaseSide::offset(&at, [block, slot, row, c_at]);
                        let key = [u32::from(*layer), head, u32::from(v), token, c];
                        self.put(rank, &at, to, key);
                    }
                }
            }
        }
    }

    fn fill_state(&mut self, rank: u16, layer: u16, at: &LayerLayout, block: u32) {
        let [_, slots, rows, width] = at.shape;
        for slot in 0..slots {
            for row in 0..rows {
                for c in 0..width {
                    let to = CaseSide::offset(at, [block, slot, row, c]);
                    self.put(rank, at, to, [u32::from(layer), u32::from(rank), slot, row, c]);
                }
            }
        }
    }

    /// Writes one element, bytes chosen by its meaning.
    fn put(&mut self, rank: u16, layer: &LayerLayout, to: usize, key: [u32; 5]) {
        let mut hash = 0x9e37_79b9_7f4a_7c15u64;
        for part in key {
            hash = (hash ^ u64::from(part)).wrapping_mul(0xff51_afd7_ed55_8ccd);
            hash ^= hash >> 32;
        }
        let size = layer.element as usize;
        let memory = &mut self.memory[usize::from(rank)][usize::from(layer.region)];
        memory[to..to + size].copy_from_slice(&hash.to_le_bytes()[..size]);
    }
}

/// Blocks of one request in one group on both sides, and the tokens to move.
#[derive(Clone, Debug)]
pub(crate) struct CaseRequest {
    pub(crate) from: u32,
    /// Where to cut the span into two calls; a multiple of the smaller block size.
    pub(crate) mid: u32,
    pub(crate) to: u32,
    pub(crate) source: BlockList,
    pub(crate) receiver: BlockList,
}

/// A source and a receiver that fit, and a request.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) source: CaseSide,
    pub(crate) receiver: CaseSide,
    pub(crate) requests: Vec<CaseRequest>,
}

/// Shape of a group's layers apart from blocks and heads.
struct Content {
    element: u32,
    /// Elements per token and head, K and V together.
    width: u32,
    /// Slots and rows of a state.
    state: [u32; 2],
}

impl Case {
    pub(crate) fn new(draw: &mut CaseDraw<'_>) -> Case {
        #[cfg(feature = "planted")]
        kvferry_engine::planted::plant_from_environment();
        let latent = draw.below(4) == 1;
        let kv_heads = if latent { 1 } else { draw.one_of(&[1, 2, 4, 6, 8]) };
        let sizes: Vec<u16> =
            (1..=8).filter(|tp| kv_heads % tp == 0 || tp % kv_heads == 0).collect();
        let tp = [draw.one_of(&sizes), draw.one_of(&sizes)];
        let layers = 1 + draw.below(4) as u16;
        let mut groups: Vec<KvGroup> = Vec::new();
        for layer in 0..layers {
            if groups.is_empty() || (groups.len() < 3 && draw.below(3) == 1) {
                let kind = match draw.below(5) {
                    3 => GroupKind::Window { tokens: 1 + draw.below(9) },
                    4 => GroupKind::State,
                    _ => GroupKind::Full,
                };
                groups.push(KvGroup { kind, block_tokens: 0, layers: vec![layer] });
            } else {
                let group = draw.below(groups.len() as u32) as usize;
                groups[group].layers.push(layer);
            }
        }
        let contents: Vec<Content> = groups
            .iter()
            .map(|_| Content {
                element: draw.one_of(&[1, 2, 4]),
                width: 2 * (1 + draw.below(3)),
                state: [1 + draw.below(3), 1 + draw.below(3)],
            })
            .collect();
        let mut geometry = Geometry {
            model: "model".into(),
            tp: tp[0],
            kv_heads,
            latent,
            packed: false,
            layers,
            groups,
        };
        let mut other = geometry.clone();
        if !geometry.groups.iter().any(|group| group.kind == GroupKind::State) {
            other.tp = tp[1];
        }
        for (one, two) in geometry.groups.iter_mut().zip(&mut other.groups) {
            let (small, times) = (1 + draw.below(4), 1 + draw.below(3));
            let sizes = [small, small * times];
            // The source's blocks are the larger ones where it frees what a window has passed.
            let is_window = matches!(one.kind, GroupKind::Window { .. });
            let first = if is_window { 1 } else { draw.below(2) as usize };
            (one.block_tokens, two.block_tokens) = (sizes[first], sizes[1 - first]);
        }
        let requests: Vec<(CaseRequest, [u32; 2])> =
            (0..geometry.groups.len()).map(|g| request(draw, &geometry, &other, g)).collect();
        let pools = |side: usize| requests.iter().map(|(_, pools)| pools[side]).collect::<Vec<_>>();
        let mut source = side(draw, geometry, &contents, &pools(0));
        let receiver = side(draw, other, &contents, &pools(1));
        let requests: Vec<CaseRequest> = requests.into_iter().map(|(request, _)| request).collect();
        for (group, request) in requests.iter().enumerate() {
            source.fill(group, &request.source, 0..200);
        }
        Case { source, receiver, requests }
    }

    /// What the receiver has to hold after the transfer.
    pub(crate) fn expected(&self) -> CaseSide {
        let mut receiver = self.receiver.clone();
        for (group, request) in self.requests.iter().enumerate() {
            if request.from < request.to {
                let unit = self.unit(group);
                receiver.fill(
                    group,
                    &request.receiver,
                    request.from..request.to.div_ceil(unit) * unit,
                );
            }
        }
        receiver
    }

    /// The smaller block size.
    pub(crate) fn unit(&self, group: usize) -> u32 {
        let tokens = |side: &CaseSide| side.geometry.groups[group].block_tokens;
        tokens(&self.source).min(tokens(&self.receiver))
    }
}

/// A request in a group and the pool sizes of both sides.
fn request(
    draw: &mut CaseDraw<'_>,
    source: &Geometry,
    receiver: &Geometry,
    group: usize,
) -> (CaseRequest, [u32; 2]) {
    let tokens = [source, receiver].map(|side| side.groups[group].block_tokens);
    let kind = source.groups[group].kind;
    let total = 1 + draw.below(20);
    let unit = tokens[0].min(tokens[1]);
    let wanted = kind.handed_over_from(0, total, unit);
    let from = match draw.below(3) {
        0 => wanted,
        1 => wanted.max(draw.below(total + 1) / tokens[1] * tokens[1]),
        _ => wanted.max(draw.below(total + 1)),
    };
    let to = if draw.chance() { total } else { from + draw.below(total - from + 1) };
    let mid = (from + draw.below(total - from + 1)).div_ceil(unit) * unit;
    let mut pools = [0; 2];
    let mut lists = [0, 1].map(|side| {
        let (first, count) = match kind {
            GroupKind::State => (0, 1),
            GroupKind::Full => (0, total.div_ceil(tokens[side])),
            GroupKind::Window { .. } => {
                let first = draw.below(from.min(total - 1) / tokens[side] + 1);
                (first, total.div_ceil(tokens[side]) - first)
            }
        };
        pools[side] = count + draw.below(4);
        BlockList { first, ids: draw.ids(count as usize, pools[side]) }
    });
    let [source, receiver] = [0, 1].map(|side| std::mem::take(&mut lists[side]));
    (CaseRequest { from, mid, to, source, receiver }, pools)
}

/// An engine with random places for its layers and noise as content.
fn side(
    draw: &mut CaseDraw<'_>,
    geometry: Geometry,
    contents: &[Content],
    pools: &[u32],
) -> CaseSide {
    let heads = u32::from((geometry.kv_heads / geometry.tp).max(1));
    let split: Vec<bool> = geometry
        .groups
        .iter()
        .map(|group| draw.chance() && !geometry.latent && group.kind != GroupKind::State)
        .collect();
    let (mut ranks, mut memory) = (Vec::new(), Vec::new());
    for rank in 0..geometry.tp {
        let mut ends = vec![0u64; 1 + draw.below(3) as usize];
        let mut layers: Vec<Option<LayerLayout>> = vec![None; usize::from(geometry.layers)];
        for (index, group) in geometry.groups.iter().enumerate() {
            let content = &contents[index];
            let split = split[index];
            let shape = match group.kind {
                GroupKind::State => {
                    [pools[index], content.state[0], content.state[1], content.width]
                }
                _ if split => [pools[index], 2 * heads, group.block_tokens, content.width / 2],
                _ => [pools[index], heads, group.block_tokens, content.width],
            };
            let cut = draw.below(group.layers.len() as u32 + 1) as usize;
            for lot in [&group.layers[..cut], &group.layers[cut..]] {
                let region = draw.below(ends.len() as u32) as u16;
                let end = &mut ends[usize::from(region)];
                let slots = if split { HeadSlots::Split } else { HeadSlots::Fused };
                let model = LayerLayout {
                    region,
                    base: *end,
                    shape,
                    stride: [0; 4],
                    element: content.element,
                    slots,
                };
                *end = place(draw, lot, model, &mut layers);
            }
        }
        let noise = |(region, bytes): (usize, &u64)| {
            (0..*bytes + 1).map(|at| (at * 7 + region as u64 * 3 + u64::from(rank)) as u8).collect()
        };
        memory.push(ends.iter().enumerate().map(noise).collect());
        ranks.push(RankLayout {
            rank,
            address: Address([0u8; 0].into()),
            regions: ends.iter().map(|end| (RegionDesc([0u8; 0].into()), end + 1)).collect(),
            layers: layers.into_iter().flatten().collect(),
        });
    }
    CaseSide { geometry, ranks, memory }
}

/// A model of 3 layers, 64 blocks of 4 tokens and 8 elements of 2 bytes per token and head, one
/// layer after the other, without bytes.
pub(crate) fn plain(kv_heads: u16, latent: bool, tp: u16) -> CaseSide {
    #[cfg(feature = "planted")]
    kvferry_engine::planted::plant_from_environment();
    let groups = vec![KvGroup::full(4, [0, 1, 2])];
    let geometry =
        Geometry { model: "model".into(), tp, kv_heads, latent, packed: false, layers: 3, groups };
    let heads = u64::from((kv_heads / tp).max(1));
    let layer = |index: u64| LayerLayout {
        region: 0,
        base: index * 64 * heads * 64,
        shape: [64, heads as u32, 4, 8],
        stride: [heads * 32, 32, 8, 1],
        element: 2,
        slots: HeadSlots::Fused,
    };
    let rank = |rank: u16| RankLayout {
        rank,
        address: Address([0u8; 0].into()),
        regions: vec![(RegionDesc([0u8; 0].into()), 3 * 64 * heads * 64)],
        layers: (0..3).map(layer).collect(),
    };
    CaseSide { geometry, ranks: (0..tp).map(rank).collect(), memory: Vec::new() }
}

/// Places layers of one shape: axes L, B, H, N in any order from the outside, with gaps. Returns
/// the end.
fn place(
    draw: &mut CaseDraw<'_>,
    lot: &[u16],
    model: LayerLayout,
    layers: &mut [Option<LayerLayout>],
) -> u64 {
    let mut order = vec![3, 2, 1, 0];
    if draw.chance() {
        order = (0..4).map(|_| order.remove(draw.below(order.len() as u32) as usize)).collect();
    }
    let gaps = draw.below(3) == 1;
    let gap = |draw: &mut CaseDraw<'_>| if gaps { u64::from(draw.below(3)) } else { 0 };
    let base = model.base + gap(draw);
    let mut extent = u64::from(model.shape[3]);
    let mut stride = [0u64; 4];
    for axis in order {
        extent += gap(draw);
        stride[axis] = extent;
        let entries = if axis == 0 { lot.len() as u64 } else { u64::from(model.shape[axis - 1]) };
        extent *= entries.max(1);
    }
    for (at, layer) in lot.iter().enumerate() {
        layers[usize::from(*layer)] = Some(LayerLayout {
            base: base + at as u64 * stride[0] * u64::from(model.element),
            stride: [stride[1], stride[2], stride[3], 1],
            ..model.clone()
        });
    }
    base + extent * u64::from(model.element)
}
