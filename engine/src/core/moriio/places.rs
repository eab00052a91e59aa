//! Places of the KV of a peer that speaks MoRIIO, row by row, in every arrangement that it may have.

use super::handshake::RankReplies;
use super::memory::peer;
use super::{MoriioConfig, MoriioSettings};
use crate::core::dialect::moriio::address::ZmqAddress;
use crate::core::dialect::moriio::descriptor::{DescLayout, MoriMemoryDesc};
use crate::core::dialect::moriio::handshake::{
    AgentMetadata, CacheLayouts, LayerMemory, LayerRegions,
};
use crate::core::layout::{Geometry, GroupKind, HeadSlots, KvGroup, LayerLayout, RankLayout};
use crate::core::message::{Mode, Role};
use crate::fabric::{Address, RegionDesc};
use std::sync::Arc;

const TOKENS: u32 = 3;
const ELEMENT: u32 = 2;
const ROW: u32 = 4;
const HEADS: u16 = 4;
/// Address of the first byte of a peer's cache.
const CACHE: u64 = 0x7000_0000;

/// Arrangement of layers beside one another.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Arrangement {
    Apart,
    /// The last layer first, with gaps.
    Backwards,
    /// Block `n` of all layers before block `n + 1` of any.
    Interleaved,
    /// The same, the last layer first in each block.
    InterleavedBackwards,
}

/// One side of a pairing.
#[derive(Clone, Copy, Debug)]
struct PlacesCase {
    arrangement: Arrangement,
    /// Heads lie in a token, not tokens in a head.
    tokens_first: bool,
    slots: HeadSlots,
    tp: u16,
    blocks: u32,
    /// One region for all layers, or one for each.
    one_region: bool,
}

/// Layers of each group; groups share the tensors of their layers.
fn groups(layers: u16, count: u16) -> Vec<KvGroup> {
    let group = |at: u16| KvGroup {
        kind: if at == 0 { GroupKind::Full } else { GroupKind::Window { tokens: 6 } },
        ..KvGroup::full(TOKENS, at * layers..(at + 1) * layers)
    };
    (0..count).map(group).collect()
}

impl PlacesCase {
    fn geometry(&self, groups: &[KvGroup]) -> Geometry {
        Geometry { tp: self.tp, ..Geometry::new("places", HEADS, groups.to_vec()) }
    }

    /// Layers of a rank, as offsets from the first byte of its cache.
    fn layers(&self, groups: &[KvGroup]) -> Vec<LayerLayout> {
        let heads = u32::from(HEADS / self.tp);
        let (slots, row) = match self.slots {
            HeadSlots::Fused => (heads, ROW),
            HeadSlots::Split => (2 * heads, ROW / 2),
        };
        let first = LayerLayout {
            slots: self.slots,
            ..LayerLayout::contiguous(0, [self.blocks, slots, TOKENS, row], ELEMENT)
        };
        let [block, head, token] = match (self.tokens_first, [slots, TOKENS, row].map(u64::from)) {
            (false, [slots, tokens, row]) => [slots * tokens * row, tokens * row, row],
            (true, [slots, tokens, row]) => [slots * tokens * row, row, slots * row],
        };
        let (bytes, each) = (block * u64::from(ELEMENT), groups[0].layers.len() as u64);
        let layer = |at: u64| {
            let back = each - 1 - at;
            let (base, times) = match self.arrangement {
                Arrangement::Apart => (at * bytes * u64::from(self.blocks), 1),
                Arrangement::Backwards => (back * (bytes * u64::from(self.blocks) + 64), 1),
                Arrangement::Interleaved => (at * bytes, each),
                Arrangement::InterleavedBackwards => (back * bytes, each),
            };
            LayerLayout { base, stride: [block * times, head, token, 1], ..first.clone() }
        };
        groups.iter().flat_map(|_| (0..each).map(layer)).collect()
    }

    /// A rank of ours.
    fn rank(&self, rank: u16, groups: &[KvGroup]) -> RankLayout {
        let desc = MoriMemoryDesc { size: 1 << 20, loc: 1, ..MoriMemoryDesc::default() };
        RankLayout {
            rank,
            address: Address([rank as u8].into()),
            regions: vec![(RegionDesc(desc.encode(DescLayout::V1_2_2).into()), 1 << 20)],
            layers: self.layers(groups),
        }
    }

    /// Answers of a rank. The layers come in another order than they are numbered in.
    fn replies(&self, rank: u16, groups: &[KvGroup], is_of_0_33: bool) -> RankReplies {
        let layers = self.layers(groups);
        let cache = CACHE + (u64::from(rank) << 24);
        let mut told = CacheLayouts::default();
        let (mut base_addrs, mut memory) = (Vec::new(), Vec::new());
        for (at, layer) in layers.iter().enumerate().rev() {
            let name: Arc<str> = format!("l.{at}").into();
            let begin = if self.one_region { cache } else { cache + layer.base };
            let size = (1 << 20) - (begin - cache);
            let desc = MoriMemoryDesc { data: begin, size, loc: 1, ..MoriMemoryDesc::default() };
            let regions = vec![desc.encode(DescLayout::V1_2_2).into()];
            base_addrs.push(cache + layer.base);
            memory.push(LayerRegions { name: name.clone(), regions });
            if is_of_0_33 {
                told.block_sizes.push((name.clone(), TOKENS.into()));
                told.heads.push((name, numbers(layer)));
            }
        }
        let bytes = layers[0].shape[1] * TOKENS * layers[0].shape[3] * ELEMENT;
        let metadata = AgentMetadata {
            engine_id: "h:1".into(),
            engine: [rank as u8].into(),
            base_addrs,
            num_blocks: self.blocks.into(),
            block_len: bytes.into(),
            attn_backend: "".into(),
            layouts: told,
            native: false,
        };
        (metadata, LayerMemory(memory))
    }
}

/// A layer in the words of vLLM 0.33.0.
fn numbers(layer: &LayerLayout) -> Vec<i64> {
    let element = i64::from(layer.element);
    let [block, head, token] = [0, 1, 2].map(|axis| layer.stride[axis] as i64 * element);
    let [_, slots, tokens, row] = layer.shape.map(i64::from);
    let heads = if layer.slots == HeadSlots::Split { slots / 2 } else { slots };
    let mut numbers = vec![heads, tokens, row * element, block, head, token, 0];
    if layer.slots == HeadSlots::Split {
        numbers.push(heads * head);
    }
    numbers
}

/// Addresses of all rows of a layer: by block, slot and token.
fn rows(layer: &LayerLayout, region: u64) -> Vec<u64> {
    let [blocks, slots, tokens, _] = layer.shape.map(u64::from);
    let [block, slot, token, _] = layer.stride;
    let at = |b: u64, s: u64, t: u64| b * block + s * slot + t * token;
    let all =
        (0..blocks).flat_map(|b| (0..slots).flat_map(move |s| (0..tokens).map(move |t| (b, s, t))));
    all.map(|(b, s, t)| region + layer.base + at(b, s, t) * u64::from(layer.element)).collect()
}

fn config(layers: u16) -> MoriioConfig {
    MoriioConfig {
        address: ZmqAddress::parse("host:127.0.0.1,handshake:1,notify:2").expect("an address"),
        layer_names: (0..layers).map(|layer| format!("l.{layer}").into()).collect(),
        attn_backend: "".into(),
        settings: MoriioSettings::default(),
        closed: None,
    }
}

/// Pairs two sides, and compares where each row of the peer lies with where it is taken to be.
fn assert_places(own: PlacesCase, theirs: PlacesCase, is_of_0_33: bool) {
    for (layers, count) in [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (3, 2)] {
        let groups = groups(layers, count);
        let (geometry, config) = (own.geometry(&groups), config(layers * count));
        let ranks: Vec<RankLayout> = (0..own.tp).map(|rank| own.rank(rank, &groups)).collect();
        let replies: Vec<RankReplies> =
            (0..theirs.tp).map(|rank| theirs.replies(rank, &groups, is_of_0_33)).collect();
        for side in [(Role::Prefill, Mode::Push), (Role::Decode, Mode::Pull)] {
            let what = format!("{side:?}, {layers} layers of {count} groups: {own:?}, {theirs:?}");
            let found = peer(&config, side, (&geometry, &ranks), &replies);
            let (_, found) = found.unwrap_or_else(|why| panic!("{what}: {why}"));
            for (rank, found) in (0..).zip(&found) {
                let truth = theirs.layers(&groups);
                for (at, (found_layer, truth)) in found.layers.iter().zip(&truth).enumerate() {
                    let region = &found.regions[usize::from(found_layer.region)].0;
                    let (_, desc) = MoriMemoryDesc::decode(&region.0).expect("as it was told");
                    let is = rows(truth, CACHE + (rank << 24));
                    assert_eq!(rows(found_layer, desc.data), is, "layer {at} of {rank}: {what}");
                    assert_eq!(found_layer.shape, truth.shape, "{what}");
                }
            }
        }
    }
}

const ARRANGEMENTS: [Arrangement; 4] = [
    Arrangement::Apart,
    Arrangement::Backwards,
    Arrangement::Interleaved,
    Arrangement::InterleavedBackwards,
];

/// All sides with these ranks and blocks.
fn cases(tp: u16, blocks: u32) -> Vec<PlacesCase> {
    let mut cases = Vec::new();
    for arrangement in ARRANGEMENTS {
        for slots in [HeadSlots::Fused, HeadSlots::Split] {
            for (tokens_first, one_region) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                cases.push(PlacesCase { arrangement, tokens_first, slots, tp, blocks, one_region });
            }
        }
    }
    cases
}

#[test]
fn each_row_of_a_peer_is_where_it_is_taken_to_be() {
    for (tp, blocks) in [([1, 1], 2), ([1, 2], 5), ([2, 1], 5), ([4, 2], 7)] {
        for own in cases(tp[0], 4) {
            for theirs in cases(tp[1], blocks) {
                assert_places(own, theirs, true);
                // A peer of 0.32.0 does not say how its heads lie.
                if (own.tokens_first, own.slots) == (theirs.tokens_first, theirs.slots) {
                    assert_places(own, theirs, false);
                }
            }
        }
    }
}
