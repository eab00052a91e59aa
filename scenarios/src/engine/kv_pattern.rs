//! Bytes that stand for KV: a sequence of words that its seed tells.

/// Distance between neighbouring words; odd, so that no two words of a row are equal.
pub const WORD_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Fills the bytes with little-endian words from `seed` on; the last one may be cut.
#[inline]
pub fn write_words(bytes: &mut [u8], seed: u64) {
    let mut word = seed;
    let (words, rest) = bytes.as_chunks_mut::<8>();
    for place in words {
        *place = word.to_le_bytes();
        word = word.wrapping_add(WORD_STEP);
    }
    if !rest.is_empty() {
        rest.copy_from_slice(&word.to_le_bytes()[..rest.len()]);
    }
}
