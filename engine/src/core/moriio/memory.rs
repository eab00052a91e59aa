//! Where KV lies, in the words of MoRIIO's handshake and in ours.

use super::MoriioConfig;
use crate::core::dialect::moriio::descriptor::MoriMemoryDesc;
use crate::core::dialect::moriio::handshake::{AgentMetadata, LayerMemory, LayerRegions};
use crate::core::layout::check::refuse;
use crate::core::layout::{self, Geometry, LayerLayout, Mismatch, RankLayout};
use crate::core::message::Role;
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
    rank: &RankLayout,
) -> Result<(AgentMetadata, LayerMemory), Mismatch> {
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
        native: true,
    };
    let named = rank.layers.iter().zip(&config.layer_names);
    let layers = named.map(|(layer, name)| {
        let region = rank.regions[usize::from(layer.region)].0.0.clone();
        LayerRegions { name: name.clone(), regions: vec![region] }
    });
    Ok((metadata, LayerMemory(layers.collect())))
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
        native: true,
    };
    (metadata, LayerMemory::default())
}

/// The geometry and the ranks of a peer with one TP rank, from what it answered. What MoRIIO does
/// not say (heads, their order, the model) is taken to be as here.
///
/// # Errors
/// What cannot be: other layers, other blocks, or ranges outside their regions.
pub(super) fn peer(
    config: &MoriioConfig,
    role: Role,
    own: (&Geometry, &[RankLayout]),
    (metadata, memory): &(AgentMetadata, LayerMemory),
) -> Result<(Geometry, Vec<RankLayout>), Mismatch> {
    let (geometry, [rank]) = own else {
        return refuse(format_args!("this engine has more than one rank"));
    };
    if metadata.native && memory.0.is_empty() {
        let why = String::from_utf8_lossy(&metadata.engine);
        let why = printable(&why, WHY_MAX);
        return match why.is_empty() {
            true => refuse(format_args!("the peer has no words of MoRIIO for its memory")),
            false => refuse(format_args!("the peer says: {why}")),
        };
    }
    let Ok(blocks) = u32::try_from(metadata.num_blocks) else {
        return refuse(format_args!("{} blocks", metadata.num_blocks));
    };
    let mut regions: Vec<(RegionDesc, u64)> = Vec::new();
    let mut layers = Vec::with_capacity(rank.layers.len());
    let bases = sorted(&metadata.base_addrs);
    for (own, name) in rank.layers.iter().zip(&config.layer_names) {
        let (at, blob) = named(memory, name)?;
        let Some(base) = metadata.base_addrs.get(at) else {
            return refuse(format_args!("no base address of layer {name}"));
        };
        let desc = match MoriMemoryDesc::decode(blob) {
            Ok((_, desc)) => desc,
            Err(error) => return refuse(format_args!("memory of layer {name}: {error}")),
        };
        let bytes = block_bytes(own).filter(|bytes| *bytes as i64 == metadata.block_len);
        let Some(bytes) = bytes else {
            let len = metadata.block_len;
            return refuse(format_args!("blocks of {len} bytes, here layer {name} has others"));
        };
        let stride = block_stride(&bases, *base, bytes, blocks);
        let Some(base) = base.checked_sub(desc.data) else {
            return refuse(format_args!("layer {name} begins before its region"));
        };
        let known = regions.iter().position(|(region, _)| region.0 == *blob);
        let region = known.unwrap_or(regions.len());
        if known.is_none() {
            regions.push((RegionDesc(blob.clone()), desc.size));
        }
        let element = u64::from(own.element).max(1);
        let [_, connections, tokens, elements] = own.shape;
        layers.push(LayerLayout {
            region: region as u16,
            base,
            shape: [blocks, connections, tokens, elements],
            stride: [stride / element, own.stride[1], own.stride[2], own.stride[3]],
            element: own.element,
            slots: own.slots,
        });
    }
    let address = Address(metadata.engine.clone());
    let theirs = vec![RankLayout { rank: 0, address, regions, layers }];
    let there = (geometry, &theirs[..]);
    match role {
        Role::Prefill => layout::check(own, there)?,
        Role::Decode => layout::check(there, own)?,
    }
    Ok((geometry.clone(), theirs))
}

fn sorted(bases: &[u64]) -> Vec<u64> {
    let mut bases = bases.to_vec();
    bases.sort_unstable();
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
