//! The hash of a trace: fast, and the same in every build on every machine.
//!
//! ```
//! use kvferry_sim::hash::TraceHasher;
//! use std::hash::Hasher;
//!
//! let of = |words: &[&str]| {
//!     let mut hasher = TraceHasher::new(1);
//!     words.iter().for_each(|word| hasher.add(word));
//!     hasher.finish()
//! };
//! assert_eq!(of(&["post", "land"]), of(&["post", "land"]));
//! assert_ne!(of(&["post", "land"]), of(&["land", "post"]));
//! ```

use std::hash::{Hash, Hasher};

const PRIMES: [u64; 2] = [0xa076_1d64_78bd_642f, 0xe703_7ed1_a0b4_28db];

/// Multiplies to 128 bits and folds, as in wyhash (Wang Yi); the constants are its own.
#[inline]
const fn fold(a: u64, b: u64) -> u64 {
    let product = a as u128 * b as u128;
    product as u64 ^ (product >> 64) as u64
}

/// A 64-bit hash of whatever implements [`Hash`]. Numbers count as 64 bits and byte strings as
/// little-endian words, so the platform does not matter as long as it is little-endian.
#[derive(Clone, Copy, Debug)]
pub struct TraceHasher(u64);

impl TraceHasher {
    /// Starts with a seed.
    pub const fn new(seed: u64) -> TraceHasher {
        TraceHasher(fold(seed ^ PRIMES[0], PRIMES[1]) ^ seed)
    }

    pub fn add<T: Hash + ?Sized>(&mut self, value: &T) {
        value.hash(self);
    }

    #[inline]
    fn word(&mut self, word: u64) {
        // Adding keeps a zero state or word from swallowing what came before.
        self.0 = fold(self.0 ^ PRIMES[0], word ^ PRIMES[1]).wrapping_add(self.0.rotate_left(23));
    }
}

impl Hasher for TraceHasher {
    fn finish(&self) -> u64 {
        fold(self.0 ^ PRIMES[1], PRIMES[0])
    }

    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.word(u64::from_le_bytes(*word));
        }
        if !rest.is_empty() {
            let mut word = [0; 8];
            word[..rest.len()].copy_from_slice(rest);
            self.word(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, number: u8) {
        self.word(u64::from(number));
    }

    fn write_u16(&mut self, number: u16) {
        self.word(u64::from(number));
    }

    fn write_u32(&mut self, number: u32) {
        self.word(u64::from(number));
    }

    fn write_u64(&mut self, number: u64) {
        self.word(number);
    }

    fn write_usize(&mut self, number: usize) {
        self.word(number as u64);
    }

    fn write_isize(&mut self, number: isize) {
        self.word(number as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hash<T: Hash>(seed: u64, value: &T) -> u64 {
        let mut hasher = TraceHasher::new(seed);
        hasher.add(value);
        hasher.finish()
    }

    #[test]
    fn is_pinned() {
        assert_eq!(hash(7, &("kv", Some(3u16), [1u64, 2])), 133_206_479_435_459_163);
    }

    proptest! {
        #[test]
        fn every_word_and_its_place_count(
            words in prop::collection::vec(any::<u64>(), 2..40),
            at in any::<prop::sample::Index>(),
            bit in 0..64,
        ) {
            let at = at.index(words.len());
            let mut changed = words.clone();
            changed[at] ^= 1u64 << bit;
            prop_assert_ne!(hash(1, &words), hash(1, &changed));
            prop_assert_ne!(hash(1, &words), hash(2, &words));
            changed = words.clone();
            changed.swap(0, at);
            prop_assert!(changed == words || hash(1, &words) != hash(1, &changed));
        }
    }
}
