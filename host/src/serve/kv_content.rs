//! The KV of an instance without a model: a function of the token ids.

use kvferry_engine::core::layout::{BlockList, Geometry, GroupKind, HeadSlots, LayerLayout};
use kvferry_scenarios::decide::mix;
use kvferry_scenarios::engine::{PromptContent, write_words};
use sha2::{Digest, Sha256};
use std::ops::Range;

/// What the prompt with these token ids says, token by token.
pub(crate) fn prompt(tokens: &[u32]) -> PromptContent {
    let chain = |hash: &mut u64, token: &u32| {
        *hash = mix(*hash, u64::from(*token));
        Some(*hash)
    };
    let prefix: Vec<u64> = tokens.iter().scan(0, chain).collect();
    let count = u32::try_from(tokens.len()).expect("a body of bounded size");
    PromptContent { tokens: count, prefix: prefix.into(), prefix_tokens: 1, tail: 0 }
}

/// Token ids of a prompt of a scenario; equal prefixes have equal ids.
pub(crate) fn prompt_ids(
    prompt: &kvferry_scenarios::run::WorkloadPrompt,
    prefix_tokens: u32,
) -> Vec<u32> {
    let content = PromptContent::new(prompt, prefix_tokens);
    (0..prompt.tokens).map(|token| (content.stamp(token) >> 40) as u32).collect()
}

/// The KV memory of an instance, all its TP ranks.
#[derive(Debug)]
pub(super) struct InstanceKv {
    geometry: Geometry,
    ranks: Vec<RankKv>,
}

/// One rank's memory: its bytes and where the layers lie in them.
#[derive(Debug)]
pub(super) struct RankKv {
    base: *mut u8,
    bytes: usize,
    layers: Vec<LayerLayout>,
}

// SAFETY: The address is used by `read` and `write` alone, to copy bytes, from whichever thread.
unsafe impl Send for RankKv {}

impl RankKv {
    /// The memory at `base`, one region.
    ///
    /// # Safety
    /// `bytes` bytes from `base` on are mapped, readable and writable, as long as this lives, and
    /// nobody has a reference to them.
    pub(super) unsafe fn new(base: *mut u8, bytes: usize, layers: Vec<LayerLayout>) -> RankKv {
        RankKv { base, bytes, layers }
    }

    /// The first byte of a row.
    fn row(&self, start: u64, len: usize) -> *mut u8 {
        let start = usize::try_from(start).expect("offsets of mapped memory");
        assert!(start.checked_add(len).is_some_and(|end| end <= self.bytes), "row out of memory");
        // SAFETY: It is inside the memory.
        unsafe { self.base.add(start) }
    }

    /// Copies a row out of the memory, which peers may write meanwhile.
    fn read(&self, start: u64, into: &mut [u8]) {
        let row = self.row(start, into.len());
        // SAFETY: The row is inside the memory, see `new`, and is no part of a buffer of Rust's. It
        // is not referred to: whatever bytes come are bytes.
        unsafe { std::ptr::copy_nonoverlapping(row, into.as_mut_ptr(), into.len()) }
    }

    /// Copies a row into the memory, which peers may read meanwhile.
    fn write(&mut self, start: u64, bytes: &[u8]) {
        let row = self.row(start, bytes.len());
        // SAFETY: As for `read`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), row, bytes.len()) }
    }
}

/// Where one token of one layer lies.
#[derive(Clone, Copy)]
struct TokenLocation {
    layer: u16,
    block: u32,
    token: u32,
}

impl InstanceKv {
    pub(super) fn new(geometry: Geometry, ranks: Vec<RankKv>) -> InstanceKv {
        InstanceKv { geometry, ranks }
    }

    fn place(&self, layer: u16, token: u32, blocks: &[BlockList]) -> Option<TokenLocation> {
        let group = self.geometry.group_of(layer)?;
        let size = self.geometry.groups[group].block_tokens.max(1);
        let block = blocks.get(group)?.get(token / size)?;
        Some(TokenLocation { layer, block, token: token % size })
    }

    /// Writes what a step computed: tokens `range` of a layer.
    pub(super) fn compute(
        &mut self,
        layer: u16,
        content: &PromptContent,
        range: Range<u32>,
        blocks: &[BlockList],
    ) {
        for token in range {
            let Some(place) = self.place(layer, token, blocks) else { continue };
            let stamp = mix(content.stamp(token), u64::from(layer));
            let element = self.element();
            let mut bytes = Vec::new();
            for rank in 0..self.ranks.len() {
                for label in labels(&self.geometry, rank) {
                    let (start, len) = self.locate(rank, place, label);
                    bytes.resize(len, 0);
                    fill(&mut bytes, mix(stamp, label), element);
                    self.ranks[rank].write(start, &bytes);
                }
            }
        }
    }

    /// SHA-256 over the KV of tokens `..tokens` as it is in memory: layer by layer, token by token,
    /// head by head, K and then V. Replicas of a head that differ make it another.
    pub(super) fn digest(&self, tokens: u32, blocks: &[BlockList]) -> String {
        let (mut hash, mut bytes) = (Sha256::new(), Vec::new());
        for layer in 0..self.geometry.layers {
            for token in needed(&self.geometry, layer, tokens) {
                let Some(place) = self.place(layer, token, blocks) else { continue };
                let mut seen: Option<u64> = None;
                for rank in 0..self.ranks.len() {
                    for label in labels(&self.geometry, rank) {
                        let (start, len) = self.locate(rank, place, label);
                        if seen.is_some_and(|seen| label <= seen)
                            && self.is_replica(rank, place, label)
                        {
                            continue;
                        }
                        bytes.resize(len, 0);
                        self.ranks[rank].read(start, &mut bytes);
                        hash.update(&bytes);
                        seen = Some(label);
                    }
                }
            }
        }
        hex(&hash.finalize())
    }

    /// True if the rank before has the same bytes of a head that both hold.
    fn is_replica(&self, rank: usize, place: TokenLocation, label: u64) -> bool {
        let row = |rank: usize| {
            let (start, len) = self.locate(rank, place, label);
            let mut bytes = vec![0; len];
            self.ranks[rank].read(start, &mut bytes);
            bytes
        };
        row(rank) == row(rank - 1)
    }

    /// The same of what a prefill would have computed.
    pub(super) fn expected(&self, content: &PromptContent, tokens: u32) -> String {
        let row = (half(&self.ranks[0].layers[0]), self.element());
        expected(&self.geometry, row, content, tokens)
    }

    fn element(&self) -> usize {
        self.ranks[0].layers[0].element as usize
    }

    /// First byte and length of a row: K, or V with an odd label, of head `label / 2`.
    fn locate(&self, rank: usize, place: TokenLocation, label: u64) -> (u64, usize) {
        let layout = &self.ranks[rank].layers[usize::from(place.layer)];
        let (half, heads) = (half(layout), heads(layout));
        let (head, v) = ((label - labels(&self.geometry, rank).start) / 2, label % 2);
        let (slot, offset) = match layout.slots {
            HeadSlots::Fused => (head, v * half as u64),
            HeadSlots::Split => (head + v * heads, 0),
        };
        let index = [u64::from(place.block), slot, u64::from(place.token)];
        let at: u64 = index.iter().zip(layout.stride).map(|(at, stride)| at * stride).sum();
        (layout.base + at * u64::from(layout.element) + offset, half)
    }
}

/// Digest of the KV of tokens `..tokens` of a prompt; `row` and `element` are the bytes of K of one
/// head and token, and of one element of it.
pub(crate) fn expected(
    geometry: &Geometry,
    (row, element): (usize, usize),
    content: &PromptContent,
    tokens: u32,
) -> String {
    let mut hash = Sha256::new();
    let mut bytes = vec![0; row];
    for layer in 0..geometry.layers {
        for token in needed(geometry, layer, tokens) {
            let stamp = mix(content.stamp(token), u64::from(layer));
            for label in 0..2 * u64::from(geometry.kv_heads) {
                fill(&mut bytes, mix(stamp, label), element);
                hash.update(&bytes);
            }
        }
    }
    hex(&hash.finalize())
}

/// Tokens of a prompt whose KV is read in a layer to compute its last token again.
fn needed(geometry: &Geometry, layer: u16, tokens: u32) -> Range<u32> {
    let kind =
        geometry.group_of(layer).map_or(GroupKind::Full, |group| geometry.groups[group].kind);
    kind.read_from(tokens.saturating_sub(1))..tokens
}

/// What a rank holds: `2 * head` for K, one more for V.
fn labels(geometry: &Geometry, rank: usize) -> Range<u64> {
    let (heads, tp, rank) = (u64::from(geometry.kv_heads), u64::from(geometry.tp), rank as u64);
    // A head may be on several neighbouring ranks.
    let first = rank * heads / tp;
    2 * first..2 * (first + (heads / tp).max(1))
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

/// Words of a sequence, with the highest bit of each element's exponent cleared: engines multiply
/// what they mask by zero, which infinities and what is no number survive.
fn fill(bytes: &mut [u8], seed: u64, element: usize) {
    write_words(bytes, seed);
    for high in bytes.iter_mut().skip(element - 1).step_by(element) {
        *high &= !0x40;
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_engine::core::layout::KvGroup;

    fn geometry(block_tokens: u32) -> Geometry {
        let group = KvGroup::full(block_tokens, [0]);
        let groups = vec![group];
        Geometry::new("m", 2, groups)
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
        // SAFETY: The vector outlives the value, and is not looked at.
        let rank = unsafe { RankKv::new(memory.as_mut_ptr(), memory.len(), layers) };
        let mut kv = InstanceKv::new(geometry(block_tokens), vec![rank]);
        let blocks = [BlockList::new(blocks)];
        kv.compute(0, &content, 0..content.tokens, &blocks);
        [kv.digest(content.tokens, &blocks), kv.expected(&content, content.tokens)]
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

    #[test]
    fn ranks_hold_their_heads_and_replicas_have_to_be_equal() {
        let content = prompt(&[7, 8, 9]);
        let blocks = [BlockList::new(vec![1])];
        for tp in [1, 2, 4] {
            let geometry = Geometry { tp, ..geometry(4) };
            let heads = (2 / u32::from(tp)).max(1);
            let stride = [u64::from(heads) * 32, 8, u64::from(heads) * 8, 1];
            let layer =
                LayerLayout { shape: [4, heads, 4, 8], stride, ..layout(HeadSlots::Fused, 4) };
            let mut memory = vec![vec![0_u8; 4096]; usize::from(tp)];
            let rank = |bytes: &mut Vec<u8>| {
                // SAFETY: The vectors outlive the value, and are not looked at.
                unsafe { RankKv::new(bytes.as_mut_ptr(), bytes.len(), vec![layer.clone()]) }
            };
            let mut kv = InstanceKv::new(geometry, memory.iter_mut().map(rank).collect());
            kv.compute(0, &content, 0..3, &blocks);
            assert_eq!(kv.digest(3, &blocks), kv.expected(&content, 3), "tp {tp}");
            let place = kv.place(0, 2, &blocks).expect("a block");
            let (start, len) = kv.locate(usize::from(tp) - 1, place, 3);
            let (last, mut row) = (&mut kv.ranks[usize::from(tp) - 1], vec![0; len]);
            last.read(start, &mut row);
            row[0] ^= 1;
            last.write(start, &row);
            assert_ne!(kv.digest(3, &blocks), kv.expected(&content, 3), "tp {tp}");
        }
    }
}
