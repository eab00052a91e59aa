//! The KV cache of an instance: geometry and where each layer lies.

use crate::run::{InstanceSettings, MemoryLayout, ModelGeometry};
use kvferry_engine::core::layout::{Geometry, GroupKind, HeadSlots, KvGroup, LayerLayout};
use kvferry_engine::core::payload::pool::PAGE;
use kvferry_engine::core::payload::{pool_geometry, pool_layout};

/// The KV memory of a rank, equal on all ranks of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankMemory {
    /// Bytes of each region to register.
    pub regions: Vec<u64>,
    /// One entry per layer.
    pub layers: Vec<LayerLayout>,
}

/// Blocks that a tensor has: the pool and block 0, the null block that is never handed out.
pub const fn tensor_blocks(instance: &InstanceSettings) -> u32 {
    instance.blocks + 1
}

/// What an instance serving the model, or the core of a host, tells its peers about its KV cache.
pub fn geometry(model: &ModelGeometry, instance: &InstanceSettings) -> Geometry {
    if instance.is_pool {
        return pool_geometry();
    }
    let group = |group: &crate::run::ModelGroup| KvGroup {
        kind: group.kind,
        block_tokens: instance.block_tokens,
        layers: group.layers.clone(),
    };
    Geometry {
        model: model.name.as_str().into(),
        tp: instance.tp,
        kv_heads: model.kv_heads,
        latent: model.latent,
        packed: false,
        layers: model.layers,
        groups: model.groups.iter().map(group).collect(),
    }
}

/// Where the KV of each rank lies. Tensors follow one another in one region, so that one operation
/// can move several layers; with [`MemoryLayout::Layer`] each group has a region.
pub fn rank_memory(model: &ModelGeometry, instance: &InstanceSettings) -> RankMemory {
    if instance.is_pool {
        let bytes = u64::from(instance.blocks) * PAGE;
        return RankMemory { regions: vec![bytes], layers: vec![pool_layout(bytes)] };
    }
    let blocks = tensor_blocks(instance);
    let mut regions = Vec::new();
    let mut layers = vec![None; usize::from(model.layers)];
    for group in &model.groups {
        let interleaved = instance.layout == MemoryLayout::Layer;
        if regions.is_empty() || interleaved {
            regions.push(0);
        }
        let region = regions.len() as u16 - 1;
        let end: &mut u64 = &mut regions[usize::from(region)];
        let tensor = tensor(model, instance, group.kind);
        let bytes = tensor.block_elements() * u64::from(model.element);
        let period = if interleaved { group.layers.len() as u64 } else { 1 };
        for (nth, layer) in group.layers.iter().enumerate() {
            let base = *end + if interleaved { nth as u64 * bytes } else { 0 };
            let mut stride = tensor.stride();
            stride[0] *= period;
            layers[usize::from(*layer)] = Some(LayerLayout {
                region,
                base,
                shape: [blocks, tensor.slots, tensor.tokens, tensor.elements],
                stride,
                element: model.element,
                slots: tensor.halves,
            });
            if !interleaved {
                *end += bytes * u64::from(blocks);
            }
        }
        if interleaved {
            *end += bytes * u64::from(blocks) * period;
        }
    }
    let layers = layers.into_iter().map(|layer| layer.expect("every layer is in a group"));
    RankMemory { regions, layers: layers.collect() }
}

/// `[H, N, C]` of one layer and the order of its axes.
struct TensorAxes {
    slots: u32,
    tokens: u32,
    elements: u32,
    halves: HeadSlots,
    token_major: bool,
}

fn tensor(model: &ModelGeometry, instance: &InstanceSettings, kind: GroupKind) -> TensorAxes {
    let heads = u32::from(model.heads_per_rank(instance.tp));
    if kind == GroupKind::State {
        let elements = model.state_bytes / model.element;
        let halves = HeadSlots::Fused;
        return TensorAxes { slots: heads, tokens: 1, elements, halves, token_major: false };
    }
    let split = instance.layout == MemoryLayout::HeadSplit && !model.latent;
    let elements = model.head_bytes / model.element;
    TensorAxes {
        slots: if split { 2 * heads } else { heads },
        tokens: instance.block_tokens,
        elements: if split { elements / 2 } else { elements },
        halves: if split { HeadSlots::Split } else { HeadSlots::Fused },
        token_major: instance.layout == MemoryLayout::Token,
    }
}

impl TensorAxes {
    fn block_elements(&self) -> u64 {
        u64::from(self.slots) * u64::from(self.tokens) * u64::from(self.elements)
    }

    fn stride(&self) -> [u64; 4] {
        let [slots, tokens, row] = [self.slots, self.tokens, self.elements].map(u64::from);
        let (slot, token) = if self.token_major { (row, row * slots) } else { (row * tokens, row) };
        [row * slots * tokens, slot, token, 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::StepCost;
    use crate::run::{FabricLimits, ModelGroup, ProtocolSettings};
    use kvferry_engine::core::Nanos;
    use kvferry_engine::core::layout::{RankLayout, check};
    use kvferry_engine::core::message::{Mode, Role};
    use kvferry_engine::fabric::{Address, RegionDesc};

    const LAYOUTS: [MemoryLayout; 4] =
        [MemoryLayout::Block, MemoryLayout::Layer, MemoryLayout::HeadSplit, MemoryLayout::Token];

    fn model() -> ModelGeometry {
        ModelGeometry {
            name: "m".into(),
            layers: 5,
            kv_heads: 4,
            latent: false,
            head_bytes: 64,
            element: 2,
            state_bytes: 96,
            groups: vec![
                ModelGroup { kind: GroupKind::Full, layers: vec![0, 2] },
                ModelGroup { kind: GroupKind::Window { tokens: 32 }, layers: vec![1, 3] },
                ModelGroup { kind: GroupKind::State, layers: vec![4] },
            ],
        }
    }

    fn instance(layout: MemoryLayout, tp: u16, block_tokens: u32) -> InstanceSettings {
        InstanceSettings {
            name: "i".into(),
            host: "i".into(),
            node: "n".into(),
            role: Role::Prefill,
            is_pool: false,
            tp,
            dp_rank: 0,
            dp_size: 1,
            blocks: 7,
            block_tokens,
            layout,
            mode: Mode::Push,
            prefix_cache: true,
            cost: StepCost {
                step: Nanos(1),
                weights: Nanos(1),
                token_fs: 0,
                pair_fs: 0,
                context_fs: 0,
            },
            protocol: ProtocolSettings::default(),
            fabric: FabricLimits::default(),
            models: None,
        }
    }

    fn side(model: &ModelGeometry, instance: &InstanceSettings) -> (Geometry, Vec<RankLayout>) {
        let memory = rank_memory(model, instance);
        let rank = |rank| RankLayout {
            rank,
            address: Address([0][..].into()),
            regions: memory.regions.iter().map(|len| (RegionDesc([0][..].into()), *len)).collect(),
            layers: memory.layers.clone(),
        };
        (geometry(model, instance), (0..instance.tp).map(rank).collect())
    }

    #[test]
    fn every_layout_passes_the_check_against_every_other() {
        let model = model();
        for one in LAYOUTS {
            for other in LAYOUTS {
                let source = side(&model, &instance(one, 2, 32));
                let sink = side(&model, &instance(other, 2, 16));
                let fits = check((&source.0, &source.1), (&sink.0, &sink.1));
                assert_eq!(fits, Ok(()), "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn regions_end_with_their_last_element() {
        let model = model();
        for layout in LAYOUTS {
            let memory = rank_memory(&model, &instance(layout, 1, 16));
            for (index, len) in memory.regions.iter().enumerate() {
                let end = |layer: &LayerLayout| {
                    let far = layer.shape.iter().zip(layer.stride);
                    let last: u64 = far.map(|(count, by)| u64::from(count - 1) * by).sum();
                    layer.base + (last + 1) * u64::from(layer.element)
                };
                let inside =
                    memory.layers.iter().filter(|layer| usize::from(layer.region) == index);
                assert_eq!(inside.map(end).max(), Some(*len), "{layout:?} region {index}");
            }
        }
    }
}
