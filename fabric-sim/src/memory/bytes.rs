//! Real buffers with content that tells what it is.

use super::shape::{LayerShape, MemoryShape};
use super::{BlockTokens, ContentMismatch, MismatchKind, OpSlice, sides};
use kvferry_scenarios::decide::mix;
use kvferry_scenarios::engine::{WORD_STEP, write_words};
use std::ops::Range;

/// Seed of the words of one K or V row.
#[inline]
fn row_seed(base: u64, label: u32, position: u32) -> u64 {
    mix(base, u64::from(label) << 32 | u64::from(position))
}

/// Calls `each(half of a row, its seed)` for the K and V parts of the row with `label`.
fn halves(layer: &LayerShape, base: u64, label: u32, position: u32) -> [(Range<usize>, u64); 2] {
    let row = layer.row as usize;
    let middle = if layer.fused { row / 2 } else { row };
    [
        (0..middle, row_seed(base, label, position)),
        (middle..row, row_seed(base, label + 1, position)),
    ]
}

#[inline]
fn same_words(bytes: &[u8], seed: u64) -> bool {
    let mut word = seed;
    let mut same = true;
    let (words, rest) = bytes.as_chunks::<8>();
    for found in words {
        same &= u64::from_le_bytes(*found) == word;
        word = word.wrapping_add(WORD_STEP);
    }
    same && (rest.is_empty() || *rest == word.to_le_bytes()[..rest.len()])
}

/// Overwrites tokens with what the engine computed.
pub(super) fn fill(
    shape: &MemoryShape,
    data: &mut [Vec<u8>],
    at: &BlockTokens,
    layers: Range<u16>,
    stamp: u64,
) {
    for number in shape.groups[at.group].iter().filter(|number| layers.contains(number)) {
        let layer = &shape.layers[*number as usize];
        let buffer = &mut data[layer.segment as usize];
        let base = mix(stamp, u64::from(*number));
        for slot in 0..layer.slots {
            let label = layer.label(slot);
            for token in at.tokens.clone() {
                let start = layer.row_at(at.block, slot, token);
                for (part, seed) in halves(layer, base, label, at.first + token) {
                    write_words(&mut buffer[start + part.start..start + part.end], seed);
                }
            }
        }
    }
}

/// Compares tokens with what the engine would have computed.
pub(super) fn check(
    shape: &MemoryShape,
    data: &[Vec<u8>],
    at: &BlockTokens,
    stamp: u64,
) -> Result<(), ContentMismatch> {
    for number in &shape.groups[at.group] {
        let layer = &shape.layers[*number as usize];
        let buffer = &data[layer.segment as usize];
        let base = mix(stamp, u64::from(*number));
        for slot in 0..layer.slots {
            let label = layer.label(slot);
            for token in at.tokens.clone() {
                let (start, position) = (layer.row_at(at.block, slot, token), at.first + token);
                let same = halves(layer, base, label, position).into_iter().all(|(part, seed)| {
                    same_words(&buffer[start + part.start..start + part.end], seed)
                });
                if !same {
                    let (at, layer, found) = (at.clone(), *number, MismatchKind::Foreign);
                    return Err(ContentMismatch { at, layer, position, found });
                }
            }
        }
    }
    Ok(())
}

/// Copies slices within one buffer.
pub(super) fn land_within(
    bytes: &mut [u8],
    (from, to): (u64, u64),
    local_is_source: bool,
    slices: &[OpSlice],
) {
    for slice in slices {
        let (read, write) = sides(slice, local_is_source);
        let read = (from + read) as usize;
        bytes.copy_within(read..read + slice.len as usize, (to + write) as usize);
    }
}
