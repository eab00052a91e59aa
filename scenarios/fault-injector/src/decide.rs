//! Keyed randomness: every decision is a function of its name, so that removing one decision
//! changes no other.
//!
//! ```
//! use kvferry_faults::decide::{chance, decide, kind, within};
//!
//! let drawn = decide(1, kind("net.latency"), 3, 0);
//! assert_eq!(drawn, decide(1, kind("net.latency"), 3, 0));
//! assert!((10..=20).contains(&within(drawn, 10, 20)));
//! assert!(chance(drawn, 1_000_000) && !chance(drawn, 0));
//! ```

/// A uniform 64-bit number for decision `n` of `actor` in matters of `kind`.
///
/// Each word is folded into the state with one round of splitmix64 (Steele, Lea, Flood: "Fast
/// splittable pseudorandom number generators", 2014), whose finaliser is a bijection with full
/// avalanche. Make `kind` with [`kind`].
pub const fn decide(seed: u64, kind: u64, actor: u64, n: u64) -> u64 {
    mix(mix(mix(seed, kind), actor), n)
}

/// Folds one word into a hash; for either argument fixed it is a bijection of the other.
pub const fn mix(state: u64, word: u64) -> u64 {
    let mut z = (state ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The number of a decision kind, or of an actor known by name (FNV-1a).
pub const fn kind(name: &str) -> u64 {
    let bytes = name.as_bytes();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut at = 0;
    while at < bytes.len() {
        hash = (hash ^ bytes[at] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        at += 1;
    }
    hash
}

/// Maps a uniform number to `0..bound`; 0 if `bound` is 0. The bias is below `bound / 2^64`.
pub const fn below(uniform: u64, bound: u64) -> u64 {
    ((uniform as u128 * bound as u128) >> 64) as u64
}

/// Maps a uniform number to `min..=max`.
pub const fn within(uniform: u64, min: u64, max: u64) -> u64 {
    assert!(min <= max);
    let count = max as u128 - min as u128 + 1;
    min + ((uniform as u128 * count) >> 64) as u64
}

/// True with a probability of `ppm` in a million.
pub const fn chance(uniform: u64, ppm: u32) -> bool {
    below(uniform, 1_000_000) < ppm as u64
}

/// Names one decision; [`DecisionKey::get`] makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecisionKey {
    /// Seed of the run.
    pub seed: u64,
    /// What is decided, see [`kind`].
    pub kind: u64,
    pub actor: u64,
    /// The how many-th time.
    pub n: u64,
}

impl DecisionKey {
    /// Decision 0 of actor 0.
    pub const fn new(seed: u64, name: &str) -> DecisionKey {
        DecisionKey { seed, kind: kind(name), actor: 0, n: 0 }
    }

    /// The same decision for another actor.
    pub const fn actor(self, actor: u64) -> DecisionKey {
        DecisionKey { actor, ..self }
    }

    /// The same decision another time.
    pub const fn nth(self, n: u64) -> DecisionKey {
        DecisionKey { n, ..self }
    }

    /// The same decision about a named part of the matter.
    pub const fn part(self, name: &str) -> DecisionKey {
        DecisionKey { kind: mix(self.kind, kind(name)), ..self }
    }

    pub const fn get(&self) -> u64 {
        decide(self.seed, self.kind, self.actor, self.n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_stay_the_same() {
        // Recordings and seeds in bug reports depend on them.
        assert_eq!(kind("wire.loss"), 16_810_927_942_421_374_645);
        assert_eq!(decide(1, 2, 3, 4), 91_520_252_847_180_482);
    }

    #[test]
    fn each_of_the_four_words_matters() {
        let base = decide(1, 2, 3, 4);
        for other in
            [decide(2, 2, 3, 4), decide(1, 3, 3, 4), decide(1, 2, 4, 4), decide(1, 2, 3, 5)]
        {
            // Half of the bits differ, give or take.
            assert!((12..=52).contains(&(base ^ other).count_ones()));
        }
    }

    #[test]
    fn probabilities_are_met() {
        for ppm in [0, 1_000, 250_000, 999_000, 1_000_000] {
            let hits = (0..100_000).filter(|n| chance(decide(7, kind("test"), 0, *n), ppm)).count();
            let expected = ppm as usize / 10;
            assert!(hits.abs_diff(expected) <= 500, "{hits} of {expected} at {ppm}");
        }
    }

    #[test]
    fn ranges_reach_their_ends() {
        assert_eq!(within(0, 3, 9), 3);
        assert_eq!(within(u64::MAX, 3, 9), 9);
        assert_eq!(within(u64::MAX, 0, u64::MAX), u64::MAX);
        assert_eq!(within(5, 4, 4), 4);
        assert_eq!(below(u64::MAX, 0), 0);
    }
}
