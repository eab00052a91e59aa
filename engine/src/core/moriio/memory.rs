//! Where KV lies, in the words of MoRIIO's handshake and in ours.

use super::MoriioConfig;
use super::handshake::RankReplies;
use crate::core::dialect::moriio::descriptor::MoriMemoryDesc;
use crate::core::dialect::moriio::handshake::{
    AgentMetadata, CacheLayouts, LayerMemory, LayerRegions,
};
use crate::core::layout::check::refuse;
use crate::core::layout::{
    self, Geometry, GroupKind, HeadSlots, LayerLayout, Mismatch, RankLayout,
};
use crate::core::message::{Mode, Role};
use crate::fabric::{Address, RegionDesc};
use crate::text::printable;
use std::sync::Arc;

/// Characters that are kept of why a peer gives no memory.
const WHY_MAX: usize = 256;

/// Bytes of one block of a layer, if they lie together.
fn block_bytes(layer: &LayerLayout) -> Option<u64> {
    let [_, connections, tokens, elements] = layer.shape.map(u64::from);
    let bytes = connections.checked_mul(tokens)?.checked_mul(elements)?;
    // Heads and tokens may be in either order.
    let dense = |outer: (u64, u64), inner: (u64, u64)| {
        (inner.0 == 1 || inner.1 == elements) && (outer.0 == 1 || outer.1 == elements * inner.0)
    };
    let (head, token) = ((connections, layer.stride[1]), (tokens, layer.stride[2]));
    (dense(head, token) || dense(token, head))
        .then(|| bytes.checked_mul(u64::from(layer.element)))?
}

/// What a rank answers to a handshake.
///
/// # Errors
/// Memory that MoRIIO has no words for: blocks in several pieces, or descriptors of a data plane
/// that are not MoRI's.
pub(super) fn replies(
    config: &MoriioConfig,
    geometry: &Geometry,
    rank: &RankLayout,
) -> Result<RankReplies, Mismatch> {
    let mut starts = Vec::with_capacity(rank.regions.len());
    for (region, _) in &rank.regions {
        match MoriMemoryDesc::decode(&region.0) {
            Ok((_, desc)) => starts.push(desc.data),
            Err(error) => return refuse(format_args!("region that is not MoRI's: {error}")),
        }
    }
    let first = rank.layers.first();
    let Some((first, block)) = first.and_then(|layer| Some((layer, block_bytes(layer)?))) else {
        return refuse(format_args!("no layer, or blocks that are not in one piece"));
    };
    if config.layer_names.len() != rank.layers.len() {
        let (names, layers) = (config.layer_names.len(), rank.layers.len());
        return refuse(format_args!("{names} layer names for {layers} layers"));
    }
    let base = |layer: &LayerLayout| starts[usize::from(layer.region)] + layer.base;
    let metadata = AgentMetadata {
        engine_id: config.address.engine().0,
        engine: rank.address.0.clone(),
        base_addrs: rank.layers.iter().map(base).collect(),
        num_blocks: i64::from(first.shape[0]),
        block_len: block as i64,
        attn_backend: config.attn_backend.clone(),
        layouts: layouts(config, geometry, rank),
        native: !config.settings.only,
    };
    let named = rank.layers.iter().zip(&config.layer_names);
    let layers = named.map(|(layer, name)| {
        let region = rank.regions[usize::from(layer.region)].0.0.clone();
        LayerRegions { name: name.clone(), regions: vec![region] }
    });
    Ok((metadata, LayerMemory(layers.collect())))
}

/// How the blocks of a rank lie, in the words of vLLM 0.33.0.
fn layouts(config: &MoriioConfig, geometry: &Geometry, rank: &RankLayout) -> CacheLayouts {
    let mut told = CacheLayouts::default();
    for (index, (layer, name)) in rank.layers.iter().zip(&config.layer_names).enumerate() {
        let Some(group) = geometry.group_of(index as u16).map(|group| &geometry.groups[group])
        else {
            continue;
        };
        if group.kind == GroupKind::State {
            continue;
        }
        told.block_sizes.push((name.clone(), i64::from(group.block_tokens)));
        if geometry.latent {
            continue;
        }
        let [_, slots, tokens, elements] = layer.shape.map(i64::from);
        let element = i64::from(layer.element);
        let [block, head, token] = [0, 1, 2].map(|axis| layer.stride[axis] as i64 * element);
        let numbers = match layer.slots {
            HeadSlots::Fused => vec![slots, tokens, elements * element, block, head, token, 0],
            HeadSlots::Split => {
                vec![slots / 2, tokens, elements * element, block, head, token, 0, slots / 2 * head]
            }
        };
        told.heads.push((name.clone(), numbers));
    }
    told
}

/// What an engine answers that has no words for its memory, or none for such peers: that it speaks
/// the native dialect.
pub(super) fn native_only(config: &MoriioConfig) -> (AgentMetadata, LayerMemory) {
    let metadata = AgentMetadata {
        engine_id: config.address.engine().0,
        // Where a peer looks for an address, which tells people why there is none.
        engine: config.closed.as_deref().unwrap_or_default().as_bytes().into(),
        base_addrs: Vec::new(),
        num_blocks: 0,
        block_len: 0,
        attn_backend: config.attn_backend.clone(),
        layouts: CacheLayouts::default(),
        native: !config.settings.only,
    };
    (metadata, LayerMemory::default())
}

/// The geometry and the ranks of a peer, from what each of its ranks answered. What MoRIIO does not
/// say (the order of heads before 0.33.0, the model) is taken to be as here.
///
/// # Errors
/// What cannot be: other layers, other blocks, ranges outside their regions, or ranks between which
/// the peer does not move KV.
pub(super) fn peer(
    config: &MoriioConfig,
    (role, mode): (Role, Mode),
    own: (&Geometry, &[RankLayout]),
    replies: &[RankReplies],
) -> Result<(Geometry, Vec<RankLayout>), Mismatch> {
    let (geometry, [first, ..]) = own else {
        return refuse(format_args!("this engine has no rank"));
    };
    for (metadata, memory) in replies {
        if metadata.native && memory.0.is_empty() {
            let why = String::from_utf8_lossy(&metadata.engine);
            let why = printable(&why, WHY_MAX);
            return match why.is_empty() {
                true => refuse(format_args!("the peer has no words of MoRIIO for its memory")),
                false => refuse(format_args!("the peer says: {why}")),
            };
        }
    }
    let tp = replies.len() as u16;
    let is_of_0_33 = replies.iter().all(|(metadata, _)| metadata.is_of_0_33());
    let knows_writers = is_of_0_33 || planted!("writers-that-nobody-counts-are-taken");
    if (role, mode) == (Role::Decode, Mode::Push) && tp != geometry.tp && !knows_writers {
        // Each of its ranks writes to the rank of the same number and counts nobody else.
        let own = geometry.tp;
        return refuse(format_args!(
            "a prefill of vLLM 0.32.0 writes between equal TP sizes only, it has {tp} and this \
             decode {own}: give both the same, or read (read_mode true)"
        ));
    }
    let there = Geometry { tp, ..geometry.clone() };
    let ranks = replies.iter().zip(0..);
    let ranks = ranks
        .map(|(replies, rank)| rank_layout(config, (geometry, first), (&there, rank), replies))
        .collect::<Result<Vec<_>, Mismatch>>()?;
    if (role, mode) == (Role::Decode, Mode::Push) && !is_of_0_33 {
        ranks.iter().try_for_each(|rank| same_distances(config, first, rank))?;
    }
    let theirs = (&there, &ranks[..]);
    match role {
        Role::Prefill => layout::check(own, theirs)?,
        Role::Decode => layout::check(theirs, own)?,
    }
    Ok((there, ranks))
}

/// Refuses a writer of 0.32.0 whose blocks lie at other distances: it takes ours to lie as its own.
fn same_distances(
    config: &MoriioConfig,
    own: &RankLayout,
    peer: &RankLayout,
) -> Result<(), Mismatch> {
    let bytes = |layer: &LayerLayout| layer.stride[0] * u64::from(layer.element);
    for ((own, peer), name) in own.layers.iter().zip(&peer.layers).zip(&config.layer_names) {
        let (own, peer) = (bytes(own), bytes(peer));
        if own != peer && !planted!("writers-at-other-distances-are-taken") {
            return refuse(format_args!(
                "a prefill of vLLM 0.32.0 writes where its own blocks would lie, {peer} bytes apart in \
                 layer {name}, and here they are {own} apart: give both caches the same arrangement of \
                 layers, or read (read_mode true)"
            ));
        }
    }
    Ok(())
}

/// Where the KV of one rank of a peer lies.
fn rank_layout(
    config: &MoriioConfig,
    (geometry, own): (&Geometry, &RankLayout),
    (there, rank): (&Geometry, u16),
    (metadata, memory): &RankReplies,
) -> Result<RankLayout, Mismatch> {
    let Ok(blocks) = u32::try_from(metadata.num_blocks) else {
        return refuse(format_args!("{} blocks", metadata.num_blocks));
    };
    let mut regions: Vec<(RegionDesc, u64)> = Vec::new();
    let mut layers = Vec::with_capacity(own.layers.len());
    let bases = sorted(&metadata.base_addrs);
    for (index, (own, name)) in own.layers.iter().zip(&config.layer_names).enumerate() {
        let (at, blob) = named(memory, name)?;
        let Some(base) = metadata.base_addrs.get(at) else {
            return refuse(format_args!("no base address of layer {name}"));
        };
        let desc = match MoriMemoryDesc::decode(blob) {
            Ok((_, desc)) => desc,
            Err(error) => return refuse(format_args!("memory of layer {name}: {error}")),
        };
        let known = regions.iter().position(|(region, _)| region.0 == *blob);
        let region = known.unwrap_or(regions.len());
        if known.is_none() {
            regions.push((RegionDesc(blob.clone()), desc.size));
        }
        let Some(begin) = base.checked_sub(desc.data) else {
            return refuse(format_args!("layer {name} begins before its region"));
        };
        let expected = expected((geometry, index as u16), own, there);
        let mut layer = LayerLayout { region: region as u16, base: begin, ..expected };
        layer.shape[0] = blocks;
        check_block_tokens(name, metadata, &layer)?;
        match metadata.layouts.heads.iter().find(|(told, _)| told == name) {
            Some((_, numbers)) => told_heads(name, numbers, &mut layer)?,
            None => {
                let len = metadata.block_len;
                let Some(bytes) = block_bytes(&layer).filter(|bytes| *bytes as i64 == len) else {
                    return refuse(format_args!(
                        "blocks of {len} bytes, here layer {name} has others"
                    ));
                };
                let stride = block_stride(&bases, *base, bytes, blocks);
                layer.stride[0] = stride / u64::from(own.element).max(1);
            }
        }
        layers.push(layer);
    }
    let address = Address(metadata.engine.clone());
    Ok(RankLayout { rank, address, regions, layers })
}

/// A layer as a rank there has it, if its heads lie as here.
fn expected(
    (geometry, index): (&Geometry, u16),
    own: &LayerLayout,
    there: &Geometry,
) -> LayerLayout {
    let group = geometry.group_of(index).map(|group| geometry.groups[group].kind);
    let mut layer = own.clone();
    if geometry.latent || group == Some(GroupKind::State) {
        return layer;
    }
    let slots = own.shape[1] / u32::from(geometry.rank_heads()) * u32::from(there.rank_heads());
    layer.shape[1] = slots;
    // Tokens of all heads follow one another, or those of one head.
    if own.stride[2] >= own.stride[1] {
        layer.stride[2] = u64::from(slots) * own.stride[1];
    }
    layer
}

/// Takes what a peer says of the heads of a layer.
fn told_heads(name: &str, numbers: &[i64], layer: &mut LayerLayout) -> Result<(), Mismatch> {
    let told = || {
        let numbers = numbers.iter().map(|number| u64::try_from(*number).ok());
        let numbers = numbers.collect::<Option<Vec<u64>>>()?;
        let [heads, tokens, row, block, head, token, planes @ ..] = &numbers[..] else {
            return None;
        };
        let element = u64::from(layer.element).max(1);
        let elements = |bytes: u64| bytes.is_multiple_of(element).then(|| bytes / element);
        let (slots, per_head) = match planes {
            [0] => (HeadSlots::Fused, 1),
            // V of all heads behind K of all heads.
            [0, values] if Some(*values) == heads.checked_mul(*head) => (HeadSlots::Split, 2),
            _ => return None,
        };
        let shape = [heads.checked_mul(per_head)?, *tokens, elements(*row)?];
        let shape = shape.map(|size| u32::try_from(size).ok());
        let stride = [elements(*block)?, elements(*head)?, elements(*token)?, 1];
        Some((slots, [layer.shape[0], shape[0]?, shape[1]?, shape[2]?], stride))
    };
    let Some((slots, shape, stride)) = told() else {
        return refuse(format_args!("layer {name} has heads in a layout of no use: {numbers:?}"));
    };
    (layer.slots, layer.shape, layer.stride) = (slots, shape, stride);
    Ok(())
}

/// Blocks are told by their numbers alone, so both sides have as many tokens in each.
fn check_block_tokens(
    name: &str,
    metadata: &AgentMetadata,
    layer: &LayerLayout,
) -> Result<(), Mismatch> {
    let (told, own) = (&metadata.layouts.block_sizes, i64::from(layer.shape[2]));
    match told.iter().find(|(of, tokens)| **of == *name && *tokens != own) {
        Some((_, tokens)) => refuse(format_args!(
            "layer {name} has {own} tokens per block here and {tokens} there: give both the same \
             --block-size"
        )),
        None => Ok(()),
    }
}

/// Each place once: layers of several groups may share one.
fn sorted(bases: &[u64]) -> Vec<u64> {
    let mut bases = bases.to_vec();
    bases.sort_unstable();
    bases.dedup();
    bases
}

/// Bytes from block to block of the layer at `base`: its blocks follow one another, unless another
/// layer begins between them, as where the blocks of all layers are interleaved.
fn block_stride(sorted: &[u64], base: u64, block: u64, blocks: u32) -> u64 {
    let end = base.saturating_add(block.saturating_mul(u64::from(blocks)));
    let next = sorted.partition_point(|other| *other <= base);
    match sorted.get(next) {
        Some(next) if *next < end => block.saturating_mul(sorted.len() as u64),
        _ => match next.checked_sub(2).and_then(|before| sorted.get(before)) {
            // The last one of interleaved layers: the one before begins less than a layer ahead.
            Some(before) if before.saturating_add(end - base) > base => {
                block.saturating_mul(sorted.len() as u64)
            }
            _ => block,
        },
    }
}

/// Place and memory of the layer of this name.
fn named<'a>(memory: &'a LayerMemory, name: &str) -> Result<(usize, &'a Arc<[u8]>), Mismatch> {
    let found = memory.0.iter().position(|layer| &*layer.name == name);
    let Some(at) = found else { return refuse(format_args!("the peer has no layer {name}")) };
    match &memory.0[at].regions[..] {
        [region] => Ok((at, region)),
        regions => {
            let count = regions.len();
            refuse(format_args!("layer {name} has {count} regions, one is supported"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 4_096;

    #[test]
    fn each_of_interleaved_layers_has_the_stride_of_all() {
        for layers in 2..6_u64 {
            let bases: Vec<u64> = (0..layers).map(|layer| 512 + layer * BLOCK).collect();
            for base in &bases {
                assert_eq!(
                    block_stride(&bases, *base, BLOCK, 8),
                    layers * BLOCK,
                    "{base} of {bases:?}"
                );
            }
        }
    }

    #[test]
    fn blocks_of_layers_that_follow_one_another_do_so_too() {
        for (layers, apart) in [(1, 0), (4, 8 * BLOCK), (4, 9 * BLOCK)] {
            let bases: Vec<u64> = (0..layers).map(|layer| 512 + layer * apart).collect();
            for base in &bases {
                assert_eq!(block_stride(&bases, *base, BLOCK, 8), BLOCK, "{base} of {bases:?}");
            }
        }
    }
}
