//! Whether KV can be moved between two engines.

use super::geometry::{Geometry, GroupKind, HeadSlots, KvGroup, LayerLayout, RankLayout};
use super::overlap::{ByteExtent, end, is_nested};
use crate::core::ids::TP_MAX;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// Largest number of layers of a model.
pub(crate) const LAYERS_MAX: u16 = 512;
/// Largest number of KV cache groups of a model.
pub(crate) const GROUPS_MAX: usize = 64;
/// Longest model name in bytes.
pub(crate) const MODEL_NAME_MAX: usize = 256;

/// Why two engines do not fit; carried in the refusal of a hello.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Mismatch(pub Arc<str>);

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Mismatch {}

/// A mismatch with this text.
pub(crate) fn refuse<T>(text: fmt::Arguments<'_>) -> Result<T, Mismatch> {
    Err(Mismatch(text.to_string().into()))
}

/// Refuses two values that have to be equal.
pub(super) fn equal<T: PartialEq + fmt::Debug>(
    what: &str,
    source: T,
    receiver: T,
) -> Result<(), Mismatch> {
    match source == receiver {
        true => Ok(()),
        false => refuse(format_args!("{what}: source has {source:?}, receiver has {receiver:?}")),
    }
}

/// Refuses what [`super::route::Route`] could not map, so that planning never fails later. The
/// arguments may be anything that a peer sends; time and memory are bounded by their size and by
/// 512 layers.
///
/// # Errors
/// Names the first property that does not fit, with both values.
pub fn check(
    source: (&Geometry, &[RankLayout]),
    receiver: (&Geometry, &[RankLayout]),
) -> Result<(), Mismatch> {
    check_shapes(source.0, receiver.0)?;
    whole_blocks(source.0, receiver.0)?;
    all_ranks("source", source.0, source.1)?;
    all_ranks("receiver", receiver.0, receiver.1)?;
    same_layers(source.0, &source.1[0].layers, &receiver.1[0].layers)
}

/// The part of [`check`] that needs no ranks.
pub(super) fn check_shapes(source: &Geometry, receiver: &Geometry) -> Result<(), Mismatch> {
    geometry("source", source)?;
    geometry("receiver", receiver)?;
    same_model(source, receiver)
}

/// [`check`] with one rank of the local engine, which knows no others.
pub(super) fn check_rank(
    local: (&Geometry, &RankLayout),
    remote: (&Geometry, &[RankLayout]),
) -> Result<(), Mismatch> {
    geometry("local", local.0)?;
    geometry("remote", remote.0)?;
    same_model(local.0, remote.0)?;
    ranks("local", local.0, std::slice::from_ref(local.1))?;
    all_ranks("remote", remote.0, remote.1)?;
    same_layers(local.0, &local.1.layers, &remote.1[0].layers)
}

/// Refuses a geometry that cannot be, whatever the peer has.
fn geometry(side: &str, at: &Geometry) -> Result<(), Mismatch> {
    if at.model.len() > MODEL_NAME_MAX {
        let len = at.model.len();
        return refuse(format_args!("{side} model: {len} bytes, at most {MODEL_NAME_MAX}"));
    }
    if !(1..=TP_MAX).contains(&at.tp) {
        return refuse(format_args!("{side} tensor parallel size: {}, not 1..={TP_MAX}", at.tp));
    }
    if !(1..=LAYERS_MAX).contains(&at.layers) {
        return refuse(format_args!("{side} layers: {}, not 1..={LAYERS_MAX}", at.layers));
    }
    if at.latent && at.kv_heads != 1 {
        return refuse(format_args!("{side} KV heads: {} of a latent model, not 1", at.kv_heads));
    }
    if at.kv_heads == 0 || !(at.kv_heads.is_multiple_of(at.tp) || at.tp.is_multiple_of(at.kv_heads))
    {
        return refuse(format_args!(
            "{side} KV heads: {} do not divide over {} ranks, nor the other way round",
            at.kv_heads, at.tp
        ));
    }
    groups(side, at)
}

/// Refuses groups that do not hold every layer once.
fn groups(side: &str, at: &Geometry) -> Result<(), Mismatch> {
    if at.groups.len() > GROUPS_MAX {
        return refuse(format_args!("{side} groups: {}, at most {GROUPS_MAX}", at.groups.len()));
    }
    let mut held = vec![false; usize::from(at.layers)];
    for (index, group) in at.groups.iter().enumerate() {
        if group.block_tokens == 0 && group.kind != GroupKind::State {
            return refuse(format_args!("{side} group {index}: 0 tokens per block"));
        }
        if group.kind == (GroupKind::Window { tokens: 0 }) {
            return refuse(format_args!("{side} group {index}: window of 0 tokens"));
        }
        if group.layers.is_empty() {
            return refuse(format_args!("{side} group {index}: 0 layers"));
        }
        if let Some(pair) = group.layers.windows(2).find(|pair| pair[0] >= pair[1]) {
            return refuse(format_args!(
                "{side} group {index}: layer {} after {}, not ascending",
                pair[1], pair[0]
            ));
        }
        for layer in &group.layers {
            match held.get_mut(usize::from(*layer)) {
                Some(held) if !*held => *held = true,
                Some(_) => return refuse(format_args!("{side} layer {layer}: in two groups")),
                None => {
                    let layers = at.layers;
                    return refuse(format_args!(
                        "{side} group {index}: layer {layer} of a model with {layers}"
                    ));
                }
            }
        }
    }
    match held.iter().position(|held| !held) {
        Some(layer) => refuse(format_args!("{side} layer {layer}: in no group")),
        None => Ok(()),
    }
}

/// Refuses two geometries of different models.
fn same_model(source: &Geometry, receiver: &Geometry) -> Result<(), Mismatch> {
    equal("model", &source.model, &receiver.model)?;
    equal("layers", source.layers, receiver.layers)?;
    equal("latent attention", source.latent, receiver.latent)?;
    equal("KV heads", source.kv_heads, receiver.kv_heads)?;
    equal("packed blocks", source.packed, receiver.packed)?;
    equal("number of groups", source.groups.len(), receiver.groups.len())?;
    for (index, (one, other)) in source.groups.iter().zip(&receiver.groups).enumerate() {
        equal(&format!("kind of group {index}"), one.kind, other.kind)?;
        same_members(index, one, other)?;
        let (small, large) =
            (one.block_tokens.min(other.block_tokens), one.block_tokens.max(other.block_tokens));
        if one.kind == GroupKind::State {
            let what = format!("tensor parallel size, with states in group {index}");
            equal(&what, source.tp, receiver.tp)?;
        } else if source.packed {
            let what = format!("block size of group {index}, with packed blocks");
            equal(&what, one.block_tokens, other.block_tokens)?;
        } else if large % small != 0 {
            return refuse(format_args!(
                "block size of group {index}: source has {} tokens, receiver has {}, and neither \
                 divides the other",
                one.block_tokens, other.block_tokens
            ));
        }
    }
    Ok(())
}

/// Refuses windows whose first block the receiver cannot fill: the source may have freed a part of it,
/// and engines share whole blocks with later prompts.
fn whole_blocks(source: &Geometry, receiver: &Geometry) -> Result<(), Mismatch> {
    for (index, (from, to)) in source.groups.iter().zip(&receiver.groups).enumerate() {
        let is_window = matches!(from.kind, GroupKind::Window { .. });
        if is_window && from.block_tokens < to.block_tokens && !planted!("half-blocks-of-windows") {
            return refuse(format_args!(
                "block size of group {index}: the source frees blocks of {} tokens outside its sliding \
                 window, the receiver needs whole blocks of {}; give the receiver blocks that are \
                 not larger",
                from.block_tokens, to.block_tokens
            ));
        }
    }
    Ok(())
}

/// Refuses groups with different layers.
fn same_members(index: usize, one: &KvGroup, other: &KvGroup) -> Result<(), Mismatch> {
    equal(&format!("layers in group {index}"), one.layers.len(), other.layers.len())?;
    match one.layers.iter().zip(&other.layers).find(|(one, other)| one != other) {
        Some((one, other)) => equal(&format!("layers in group {index}"), *one, *other),
        None => Ok(()),
    }
}

/// Refuses rank layouts of which one is missing, or that [`ranks`] refuses.
fn all_ranks(side: &str, at: &Geometry, layouts: &[RankLayout]) -> Result<(), Mismatch> {
    if layouts.len() != usize::from(at.tp) {
        let count = layouts.len();
        return refuse(format_args!("{side} ranks: {count} layouts for {} ranks", at.tp));
    }
    ranks(side, at, layouts)
}

/// Refuses rank layouts that differ in more than place, or do not hold what the geometry says.
fn ranks(side: &str, at: &Geometry, ranks: &[RankLayout]) -> Result<(), Mismatch> {
    let mut seen = vec![false; usize::from(at.tp)];
    for rank in ranks {
        match seen.get_mut(usize::from(rank.rank)) {
            Some(seen) if !*seen => *seen = true,
            Some(_) => return refuse(format_args!("{side} rank {}: two layouts", rank.rank)),
            None => return refuse(format_args!("{side} rank {}: of {}", rank.rank, at.tp)),
        }
        let place = format!("{side} rank {}", rank.rank);
        if rank.layers.len() != usize::from(at.layers) {
            let count = rank.layers.len();
            return refuse(format_args!("{place}: {count} layer layouts for {}", at.layers));
        }
        if let Some(region) = rank.regions.iter().position(|(_, bytes)| *bytes == 0) {
            return refuse(format_args!("{place} region {region}: 0 bytes"));
        }
        for (index, (layer, first)) in rank.layers.iter().zip(&ranks[0].layers).enumerate() {
            let place = || format!("{place} layer {index}");
            fits_region(&place, layer, &rank.regions)?;
            let same = |layer: &LayerLayout| (layer.shape, layer.element, layer.slots);
            if same(layer) != same(first) {
                let (one, other) = (same(layer), same(first));
                let rank = ranks[0].rank;
                return refuse(format_args!("{}: {one:?}, but {other:?} on rank {rank}", place()));
            }
        }
        apart(&place, at, rank)?;
    }
    ranks[0].layers.iter().enumerate().try_for_each(|(index, layer)| {
        holds_heads(&format!("{side} layer {index}"), at, index as u16, layer)
    })?;
    same_pools(side, at, &ranks[0])
}

/// Refuses a tensor with nothing in it, with elements that share bytes, or outside its region.
fn fits_region(
    place: &dyn Fn() -> String,
    layer: &LayerLayout,
    regions: &[(crate::fabric::RegionDesc, u64)],
) -> Result<(), Mismatch> {
    if layer.shape.contains(&0) || layer.element == 0 {
        let (shape, element) = (layer.shape, layer.element);
        return refuse(format_args!("{}: shape {shape:?} of {element} byte elements", place()));
    }
    if layer.stride[3] != 1 {
        return refuse(format_args!("{}: last stride is {}, not 1", place(), layer.stride[3]));
    }
    let Some((_, bytes)) = regions.get(usize::from(layer.region)) else {
        let (region, count) = (layer.region, regions.len());
        return refuse(format_args!("{}: in region {region} of {count}", place()));
    };
    match end(layer) {
        Some(end) if end <= *bytes => {}
        Some(end) => {
            return refuse(format_args!("{}: ends at {end} of {bytes} bytes", place()));
        }
        None => return refuse(format_args!("{}: ends beyond 2^64 of {bytes} bytes", place())),
    }
    match is_nested(layer) {
        true => Ok(()),
        false => refuse(format_args!(
            "{}: strides {:?} let parts of shape {:?} overlap",
            place(),
            layer.stride,
            layer.shape
        )),
    }
}

/// Refuses layers of one group that share bytes. Layers of different groups may: they have
/// different blocks. Layers of different shape or strides are not compared.
fn apart(place: &str, at: &Geometry, rank: &RankLayout) -> Result<(), Mismatch> {
    for group in &at.groups {
        let layer = |index: u16| &rank.layers[usize::from(index)];
        let mut order = group.layers.clone();
        order.sort_unstable_by_key(|index| (layer(*index).region, layer(*index).base));
        for (rank, one) in order.iter().enumerate() {
            let first = layer(*one);
            let (footprint, end) = (ByteExtent::new(first), end(first));
            for other in &order[rank + 1..] {
                let second = layer(*other);
                if second.region != first.region || end <= Some(second.base) {
                    break;
                }
                let same = |layer: &LayerLayout| (layer.shape, layer.stride, layer.element);
                if same(first) == same(second) && footprint.meets(second.base - first.base) {
                    return refuse(format_args!("{place}: layers {one} and {other} overlap"));
                }
            }
        }
    }
    Ok(())
}

/// Refuses a shape that does not hold the heads and tokens of the geometry.
fn holds_heads(
    place: &str,
    at: &Geometry,
    index: u16,
    layer: &LayerLayout,
) -> Result<(), Mismatch> {
    let group = at.group_of(index).map(|group| &at.groups[group]).expect("in a group");
    let [_, slots, rows, _] = layer.shape;
    let one_slot = group.kind == GroupKind::State || at.latent;
    if one_slot && layer.slots == HeadSlots::Split {
        return refuse(format_args!("{place}: a latent or a state has no K and V to split"));
    }
    if group.kind == GroupKind::State {
        return Ok(());
    }
    if rows != group.block_tokens {
        let tokens = group.block_tokens;
        return refuse(format_args!("{place}: {rows} tokens per block, its group has {tokens}"));
    }
    let heads = u32::from(at.rank_heads());
    let expected = match layer.slots {
        HeadSlots::Fused => heads,
        HeadSlots::Split => 2 * heads,
    };
    if slots != expected {
        let kind = layer.slots;
        return refuse(format_args!(
            "{place}: {slots} head slots, not {expected} for {heads} heads ({kind:?})"
        ));
    }
    Ok(())
}

/// Refuses groups whose layers have different numbers of blocks.
fn same_pools(side: &str, at: &Geometry, rank: &RankLayout) -> Result<(), Mismatch> {
    let blocks = |layer: u16| rank.layers[usize::from(layer)].shape[0];
    for group in &at.groups {
        let first = group.layers[0];
        if let Some(other) = group.layers.iter().find(|other| blocks(**other) != blocks(first)) {
            let (one, two) = (blocks(first), blocks(*other));
            return refuse(format_args!(
                "{side} blocks: {one} in layer {first}, {two} in layer {other} of the same group"
            ));
        }
    }
    Ok(())
}

/// Refuses layers whose rows differ between the two sides.
fn same_layers(
    at: &Geometry,
    source: &[LayerLayout],
    receiver: &[LayerLayout],
) -> Result<(), Mismatch> {
    for (index, (one, other)) in source.iter().zip(receiver).enumerate() {
        equal(&format!("element size of layer {index}"), one.element, other.element)?;
        let what = format!("elements per token and head of layer {index}");
        equal(&what, one.row_elements(), other.row_elements())?;
        let group = at.group_of(index as u16).map(|group| at.groups[group].kind);
        if group == Some(GroupKind::State) {
            let shape = |layer: &LayerLayout| [layer.shape[1], layer.shape[2]];
            equal(&format!("state shape of layer {index}"), shape(one), shape(other))?;
        }
    }
    Ok(())
}
