//! Randomness without a stream: each draw is a function of what it is for.
//!
//! ```
//! use kvferry_sim::keyed_rng::{InclusiveRange, KeyedRng};
//!
//! // The second draw of actor 3 is what it is, whoever has drawn before.
//! let rng = KeyedRng::new(7);
//! assert_eq!(rng.draw(1, 3, 2), KeyedRng::new(7).draw(1, 3, 2));
//! let latency = InclusiveRange::new(10, 20).pick(rng.draw(1, 3, 2));
//! assert!((10..=20).contains(&latency));
//! ```

use kvferry_scenarios::decide::{below, decide, within};

/// The draws of one seed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyedRng {
    seed: u64,
}

impl KeyedRng {
    /// Draws of one seed.
    pub const fn new(seed: u64) -> KeyedRng {
        KeyedRng { seed }
    }

    /// 64 uniform bits, see [`decide`].
    #[inline]
    pub const fn draw(&self, kind: u64, actor: u64, n: u64) -> u64 {
        decide(self.seed, kind, actor, n)
    }

    /// A uniform number below `bound`; 0 for 0.
    #[inline]
    pub const fn below(&self, kind: u64, actor: u64, n: u64, bound: u64) -> u64 {
        below(self.draw(kind, actor, n), bound)
    }
}

/// An inclusive range of whole numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InclusiveRange {
    pub least: u64,
    pub most: u64,
}

impl InclusiveRange {
    pub const fn exactly(value: u64) -> InclusiveRange {
        InclusiveRange { least: value, most: value }
    }

    /// Both ends included.
    pub const fn new(least: u64, most: u64) -> InclusiveRange {
        assert!(least <= most);
        InclusiveRange { least, most }
    }

    /// The member that 64 uniform bits stand for.
    #[inline]
    pub const fn pick(&self, bits: u64) -> u64 {
        within(bits, self.least, self.most)
    }
}
