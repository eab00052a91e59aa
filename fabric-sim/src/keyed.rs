//! Randomness without a stream: each draw is a function of what it is for, so that one draw more
//! or less changes no other.

/// Draws keyed by (seed, kind, actor, n).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keyed {
    seed: u64,
}

/// The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits.
#[inline]
pub const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Hash of two words.
#[inline]
pub const fn mix2(a: u64, b: u64) -> u64 {
    mix(mix(a.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ b)
}

impl Keyed {
    /// Draws of one seed.
    pub const fn new(seed: u64) -> Keyed {
        Keyed { seed }
    }

    /// 64 uniform bits.
    #[inline]
    pub const fn draw(&self, kind: u64, actor: u64, n: u64) -> u64 {
        mix2(mix2(mix2(self.seed, kind), actor), n)
    }

    /// A uniform number below `bound`; 0 for 0.
    #[inline]
    pub const fn below(&self, kind: u64, actor: u64, n: u64, bound: u64) -> u64 {
        ((self.draw(kind, actor, n) as u128 * bound as u128) >> 64) as u64
    }
}

/// An inclusive range of whole numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Between {
    /// Smallest.
    pub least: u64,
    /// Largest.
    pub most: u64,
}

impl Between {
    /// Always the same.
    pub const fn exactly(value: u64) -> Between {
        Between { least: value, most: value }
    }

    /// Both ends included.
    pub const fn new(least: u64, most: u64) -> Between {
        assert!(least <= most);
        Between { least, most }
    }

    /// The member that 64 uniform bits stand for.
    #[inline]
    pub const fn pick(&self, bits: u64) -> u64 {
        let span = (self.most - self.least) as u128 + 1;
        self.least + ((bits as u128 * span) >> 64) as u64
    }
}
