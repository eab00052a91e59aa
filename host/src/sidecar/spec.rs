//! What a serving engine is, as its connector tells its host.

use super::settings::{ConnectorSettings, TransferPlacement};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::layout::{Geometry, GroupKind, HeadSlots, KvGroup, LayerLayout};
use kvferry_engine::core::message::{Mode, Role};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// An engine core: one per DP rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServingEngine {
    pub role: Role,
    /// Model name, equal on both sides of a transfer.
    pub model: Arc<str>,
    pub tp: u16,
    /// DP rank and number of DP ranks.
    pub dp: (u16, u16),
    /// KV heads of the whole model; 1 if `latent`.
    pub kv_heads: u16,
    /// Multi-head latent attention.
    pub latent: bool,
    /// Only whole blocks have a meaning, see [`Geometry::packed`].
    pub packed: bool,
    /// KV cache groups.
    pub groups: Vec<LayerGroup>,
    /// What the user set.
    #[serde(default)]
    pub settings: ConnectorSettings,
    /// The incarnation before this one, if there was one: that of a host which has ended.
    #[serde(default, rename = "last_life")]
    pub last_incarnation: Option<Incarnation>,
}

/// Layers that share a block table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerGroup {
    /// Tokens of a sliding window; all of a prompt without one.
    pub window: Option<u32>,
    pub block_tokens: u32,
    /// Names of its layers.
    pub layers: Vec<Arc<str>>,
}

/// A worker: one per TP rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServingWorker {
    pub rank: u16,
    pub pid: u32,
    /// Memory that has its KV.
    pub regions: Vec<WorkerRegion>,
    pub tensors: Vec<KvTensor>,
    /// What computes the attention, as vLLM names it, for MoRIIO peers.
    #[serde(default)]
    pub attention: Option<Arc<str>>,
}

/// A range of a worker's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerRegion {
    /// First byte, in the worker's address space.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Descriptor, in the worker, of the memory file that is mapped there; its offset 0 is `base`.
    pub file: Option<i32>,
    /// The GPU whose memory it is, by its number in the worker; none for host memory.
    #[serde(default)]
    pub device: Option<u32>,
}

/// The KV of one layer: `[B, H, N, C]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvTensor {
    /// Name of the layer.
    pub layer: Arc<str>,
    /// Address of the first element.
    pub start: u64,
    /// Sizes of the dimensions.
    pub shape: Vec<u64>,
    /// Their strides in elements.
    pub stride: Vec<u64>,
    /// Bytes per element.
    pub element: u32,
}

impl ServingEngine {
    /// Who moves the bytes.
    pub fn mode(&self) -> Mode {
        if self.settings.read_mode { Mode::Pull } else { Mode::Push }
    }

    /// True if the transfer actors are in the workers.
    pub fn runs_in_workers(&self) -> bool {
        self.settings.transfer() == TransferPlacement::Worker
    }

    /// Names of all layers in the order in which peers number them.
    pub fn layer_names(&self) -> Vec<Arc<str>> {
        numbered_layers(self.groups.iter().flat_map(|group| group.layers.clone()))
    }

    /// What peers are told of the KV cache.
    ///
    /// # Errors
    /// Layers that cannot be numbered.
    pub fn geometry(&self) -> Result<Geometry, String> {
        let names = self.layer_names();
        let layers = u16::try_from(names.len()).map_err(|_| format!("{} layers", names.len()))?;
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("layer {} is in two KV cache groups", twice[0]));
        }
        let place = |name: &Arc<str>| names.iter().position(|known| known == name);
        let group = |group: &LayerGroup| {
            let mut layers: Vec<u16> =
                group.layers.iter().filter_map(place).map(|at| at as u16).collect();
            layers.sort_unstable();
            let kind = match group.window {
                Some(tokens) => GroupKind::Window { tokens },
                None => GroupKind::Full,
            };
            KvGroup { kind, block_tokens: group.block_tokens, layers }
        };
        Ok(Geometry {
            model: self.model.clone(),
            tp: self.tp,
            kv_heads: self.kv_heads,
            latent: self.latent,
            packed: self.packed,
            layers,
            groups: self.groups.iter().map(group).collect(),
        })
    }

    /// Where the layers lie in a worker's regions.
    ///
    /// # Errors
    /// A layer without a tensor, or a tensor that is none of a KV cache or outside of all regions.
    pub fn layers(&self, worker: &ServingWorker) -> Result<Vec<LayerLayout>, String> {
        let heads = u32::from((self.kv_heads / self.tp.max(1)).max(1));
        let layer = |name: Arc<str>| {
            let tensor = worker.tensors.iter().find(|tensor| tensor.layer == name);
            let tensor = tensor
                .ok_or_else(|| format!("rank {} registered no KV of layer {name}", worker.rank))?;
            tensor.layout(heads, &worker.regions).map_err(|why| format!("KV of {name}: {why}"))
        };
        self.layer_names().into_iter().map(layer).collect()
    }
}

impl KvTensor {
    fn layout(&self, heads: u32, regions: &[WorkerRegion]) -> Result<LayerLayout, String> {
        let narrow = |size: &u64| u32::try_from(*size).ok();
        let shape: Option<Vec<u32>> = self.shape.iter().map(narrow).collect();
        let shape = shape.and_then(|shape| <[u32; 4]>::try_from(shape).ok());
        let stride = <[u64; 4]>::try_from(self.stride.clone()).ok();
        let (Some(shape), Some(stride)) = (shape, stride) else {
            let (shape, stride) = (&self.shape, &self.stride);
            return Err(format!("shape {shape:?}, strides {stride:?}; four dimensions are known"));
        };
        let slots = match shape[1] {
            slots if slots == heads => HeadSlots::Fused,
            slots if slots == 2 * heads => HeadSlots::Split,
            slots => return Err(format!("{slots} head slots for {heads} heads of the rank")),
        };
        let inside = |region: &WorkerRegion| {
            let at = self.start.checked_sub(region.base)?;
            (at < region.len).then_some(at)
        };
        let found = regions.iter().enumerate().find_map(|(n, region)| Some((n, inside(region)?)));
        let Some((region, base)) = found else { return Err("outside of all regions".into()) };
        let region = u16::try_from(region).map_err(|_| format!("in region {region}"))?;
        Ok(LayerLayout { region, base, shape, stride, element: self.element, slots })
    }
}

/// Layers in the order in which peers number them: by the numbers in their names, then by their text.
pub fn numbered_layers(names: impl IntoIterator<Item = Arc<str>>) -> Vec<Arc<str>> {
    let mut names: Vec<_> = names.into_iter().collect();
    names.sort_by_cached_key(|name| (numbers(name), name.clone()));
    names
}

/// The numbers in a text, in their order.
fn numbers(text: &str) -> Vec<u64> {
    let digits = text.split(|c: char| !c.is_ascii_digit());
    digits.filter_map(|digits| digits.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine() -> ServingEngine {
        let group = |window, layers: &[&str]| LayerGroup {
            window,
            block_tokens: 32,
            layers: layers.iter().map(|name| Arc::from(*name)).collect(),
        };
        ServingEngine {
            role: Role::Prefill,
            model: "m".into(),
            tp: 2,
            dp: (0, 1),
            kv_heads: 8,
            latent: false,
            packed: true,
            groups: vec![group(Some(64), &["l.10.a", "l.2.a"]), group(None, &["l.1.a"])],
            settings: ConnectorSettings::default(),
            last_incarnation: None,
        }
    }

    fn tensor(layer: &str, start: u64, slots: u64) -> KvTensor {
        let (shape, stride) = (vec![9, slots, 32, 16], vec![slots * 512, 512, 16, 1]);
        KvTensor { layer: layer.into(), start, shape, stride, element: 2 }
    }

    #[test]
    fn layers_are_numbered_by_the_numbers_in_their_names() {
        let names = engine().layer_names();
        assert_eq!(
            names.iter().map(|name| &**name).collect::<Vec<_>>(),
            ["l.1.a", "l.2.a", "l.10.a"]
        );
        let geometry = engine().geometry().expect("three layers");
        assert_eq!(geometry.groups[0].layers, [1, 2]);
        assert_eq!(geometry.groups[0].kind, GroupKind::Window { tokens: 64 });
        assert_eq!((&*geometry.groups[1].layers, geometry.layers), (&[0][..], 3));
    }

    #[test]
    fn tensors_are_found_in_their_regions() {
        let region = |base| WorkerRegion { base, len: 1 << 20, file: None, device: None };
        let regions = vec![region(0x1000_0000), region(0x2000_0000)];
        let tensors = vec![
            tensor("l.1.a", 0x2000_0040, 4),
            tensor("l.2.a", 0x1000_0000, 8),
            tensor("l.10.a", 0x1008_0000, 4),
        ];
        let mut worker = ServingWorker { rank: 1, pid: 1, regions, tensors, attention: None };
        let layers = engine().layers(&worker).expect("all are there");
        let places: Vec<_> = layers.iter().map(|it| (it.region, it.base, it.slots)).collect();
        let expected = [
            (1, 0x40, HeadSlots::Fused),
            (0, 0, HeadSlots::Split),
            (0, 0x8_0000, HeadSlots::Fused),
        ];
        assert_eq!(places, expected);
        worker.tensors[1].shape[1] = 5;
        let why = engine().layers(&worker).expect_err("5 slots");
        assert!(why.contains("l.2.a") && why.contains("5 head slots for 4 heads"), "{why}");
        worker.tensors[1].start = 7;
        worker.tensors[1].shape[1] = 8;
        assert!(engine().layers(&worker).expect_err("outside").contains("outside of all regions"));
        worker.tensors.truncate(1);
        assert!(engine().layers(&worker).expect_err("no tensor").contains("no KV of layer l.2.a"));
    }
}
