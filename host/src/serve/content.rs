//! The KV of an instance without a model: a function of the token ids.

use engine::core::layout::{BlockList, Geometry, HeadSlots, LayerLayout};
use scenarios::decide::mix;
use scenarios::engine::PromptContent;
use sha2::{Digest, Sha256};
use std::ops::Range;

/// What the prompt with these token ids says, token by token.
pub fn prompt(tokens: &[u32]) -> PromptContent {
    let chain = |hash: &mut u64, token: &u32| {
        *hash = mix(*hash, u64::from(*token));
        Some(*hash)
    };
    let prefix: Vec<u64> = tokens.iter().scan(0, chain).collect();
    let count = u32::try_from(tokens.len()).expect("a body of bounded size");
    PromptContent { tokens: count, prefix: prefix.into(), prefix_tokens: 1, tail: 0 }
}

/// The KV memory of one rank: its bytes and where the layers lie in them.
#[derive(Debug)]
pub(super) struct Kv {
    base: *mut u8,
    bytes: usize,
    layers: Vec<LayerLayout>,
    groups: Vec<Vec<u16>>,
    block_tokens: Vec<u32>,
}

// SAFETY: the memory belongs to this value; what peers do to it at the same time is what the
// protocol orders, and bytes have no invalid values.
unsafe impl Send for Kv {}

impl Kv {
    /// The memory at `base`, one region.
    ///
    /// # Safety
    /// `bytes` bytes from `base` on are mapped, readable and writable, as long as this lives.
    pub(super) unsafe fn new(
        base: *mut u8,
        bytes: usize,
        geometry: &Geometry,
        layers: Vec<LayerLayout>,
    ) -> Kv {
        Kv {
            base,
            bytes,
            layers,
            groups: geometry.groups.iter().map(|group| group.layers.clone()).collect(),
            block_tokens: geometry.groups.iter().map(|group| group.block_tokens).collect(),
        }
    }

    fn row(&mut self, start: u64, len: usize) -> &mut [u8] {
        let start = usize::try_from(start).expect("offsets of mapped memory");
        assert!(start.checked_add(len).is_some_and(|end| end <= self.bytes), "row out of memory");
        // SAFETY: the range is inside the memory, see `new`.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(start), len) }
    }

    /// Writes what a step computed: tokens `range` of all layers of `layer`'s group.
    pub(super) fn compute(
        &mut self,
        layer: u16,
        content: &PromptContent,
        range: Range<u32>,
        blocks: &[BlockList],
    ) {
        let Some(group) = self.groups.iter().position(|layers| layers.contains(&layer)) else {
            return;
        };
        let layout = self.layers[usize::from(layer)].clone();
        for token in range {
            let stamp = mix(content.stamp(token), u64::from(layer));
            for (start, len, label) in self.rows(&layout, group, token, blocks) {
                fill(self.row(start, len), mix(stamp, label));
            }
        }
    }

    /// SHA-256 over the KV of tokens `..tokens` as it is in memory: layer by layer, token by token,
    /// head by head, K and then V.
    pub(super) fn digest(&mut self, tokens: u32, blocks: &[BlockList]) -> String {
        let mut hash = Sha256::new();
        for layer in 0..self.layers.len() as u16 {
            let Some(group) = self.groups.iter().position(|layers| layers.contains(&layer)) else {
                continue;
            };
            let layout = self.layers[usize::from(layer)].clone();
            for token in 0..tokens {
                let mut rows = self.rows(&layout, group, token, blocks);
                rows.sort_by_key(|(_, _, label)| *label);
                for (start, len, _) in rows {
                    hash.update(&*self.row(start, len));
                }
            }
        }
        hex(&hash.finalize())
    }

    /// The same of what a prefill would have computed.
    pub(super) fn expected(&self, content: &PromptContent) -> String {
        let mut hash = Sha256::new();
        let mut bytes = Vec::new();
        for (number, layout) in self.layers.iter().enumerate() {
            let half = half(layout);
            bytes.resize(half, 0);
            for token in 0..content.tokens {
                let stamp = mix(content.stamp(token), number as u64);
                for label in 0..2 * heads(layout) {
                    fill(&mut bytes, mix(stamp, label));
                    hash.update(&bytes);
                }
            }
        }
        hex(&hash.finalize())
    }

    /// The K and V rows of a token: first byte, length, and `2 * head` for K, one more for V.
    fn rows(
        &self,
        layout: &LayerLayout,
        group: usize,
        token: u32,
        blocks: &[BlockList],
    ) -> Vec<(u64, usize, u64)> {
        let size = self.block_tokens[group].max(1);
        let Some(block) = blocks.get(group).and_then(|list| list.get(token / size)) else {
            return Vec::new();
        };
        let element = u64::from(layout.element);
        let at = |slot: u64| {
            let index = [u64::from(block), slot, u64::from(token % size)];
            let offset: u64 = index.iter().zip(layout.stride).map(|(at, stride)| at * stride).sum();
            layout.base + offset * element
        };
        let half = half(layout);
        let heads = heads(layout);
        let place = |head: u64, v: u64| match layout.slots {
            HeadSlots::Fused => at(head) + v * half as u64,
            HeadSlots::Split => at(head + v * heads),
        };
        (0..2 * heads).map(|label| (place(label / 2, label % 2), half, label)).collect()
    }
}

/// KV heads of a layer.
fn heads(layout: &LayerLayout) -> u64 {
    match layout.slots {
        HeadSlots::Fused => u64::from(layout.shape[1]),
        HeadSlots::Split => u64::from(layout.shape[1] / 2),
    }
}

/// Bytes of K, or V, of one head and token.
fn half(layout: &LayerLayout) -> usize {
    let row = layout.shape[3] as usize * layout.element as usize;
    match layout.slots {
        HeadSlots::Fused => row / 2,
        HeadSlots::Split => row,
    }
}

/// Distance between neighbouring words; odd, so that no two words of a row are equal.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

fn fill(bytes: &mut [u8], seed: u64) {
    let mut word = seed;
    for place in bytes.chunks_mut(8) {
        place.copy_from_slice(&word.to_le_bytes()[..place.len()]);
        word = word.wrapping_add(STEP);
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::core::layout::{Group, GroupKind};

    fn geometry(block_tokens: u32) -> Geometry {
        let group = Group { kind: GroupKind::Full, block_tokens, layers: vec![0] };
        let groups = vec![group];
        Geometry { model: "m".into(), tp: 1, kv_heads: 2, latent: false, layers: 1, groups }
    }

    fn layout(slots: HeadSlots, block_tokens: u32) -> LayerLayout {
        let (shape, stride) = match slots {
            HeadSlots::Fused => ([4, 2, block_tokens, 8], [16, 8, 16, 1]),
            HeadSlots::Split => ([4, 4, block_tokens, 4], [16, 4, 16, 1]),
        };
        let stride = [stride[0] * u64::from(block_tokens), stride[1], stride[2], 1];
        LayerLayout { region: 0, base: 0, shape, stride, element: 2, slots }
    }

    fn digest(slots: HeadSlots, block_tokens: u32, ids: &[u32], blocks: Vec<u32>) -> [String; 2] {
        let content = prompt(ids);
        let mut memory = vec![0_u8; 4096];
        let layers = vec![layout(slots, block_tokens)];
        // SAFETY: the vector outlives the value.
        let mut kv =
            unsafe { Kv::new(memory.as_mut_ptr(), memory.len(), &geometry(block_tokens), layers) };
        let blocks = [BlockList::new(blocks)];
        kv.compute(0, &content, 0..content.tokens, &blocks);
        [kv.digest(content.tokens, &blocks), kv.expected(&content)]
    }

    #[test]
    fn a_digest_depends_on_the_tokens_and_not_on_where_they_lie() {
        let [fused, expected] = digest(HeadSlots::Fused, 4, &[1, 2, 3, 4, 5], vec![3, 1]);
        assert_eq!(fused, expected);
        assert_eq!(digest(HeadSlots::Fused, 4, &[1, 2, 3, 4, 5], vec![0, 2])[0], expected);
        assert_eq!(digest(HeadSlots::Split, 4, &[1, 2, 3, 4, 5], vec![0, 2])[0], expected);
        assert_eq!(digest(HeadSlots::Fused, 8, &[1, 2, 3, 4, 5], vec![2])[0], expected);
        assert_ne!(digest(HeadSlots::Fused, 4, &[1, 2, 3, 4, 6], vec![0, 2])[0], expected);
        assert_ne!(digest(HeadSlots::Fused, 4, &[2, 1, 3, 4, 5], vec![0, 2])[0], expected);
    }
}
