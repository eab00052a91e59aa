//! Identifiers of the protocol, and the roles and modes that its parties have. Names of the outside
//! world are strings, names of our own are counters within one incarnation.
//!
//! ```
//! use kvferry_engine::core::ids::{Incarnation, RankSet};
//!
//! // Later than the last one, whatever the wall clock says.
//! assert_eq!(Incarnation::begin(5_000, None), Incarnation(5_000));
//! assert_eq!(Incarnation::begin(4_000, Some(Incarnation(5_000))), Incarnation(5_001));
//! let mut done = RankSet::only(0);
//! done.insert(1);
//! assert!(done.covers(RankSet::first(2)) && !done.covers(RankSet::first(3)));
//! ```

use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Arc<str>);

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                $name(text.into())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                $name(text.into())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

pub(crate) use {number_id, text_id};

text_id!(
    /// Names one hand-over of KV between two engines; made by the router, opaque, the only
    /// correlation between the prefill and the decode leg.
    TransferId
);
text_id!(
    /// A request as one engine names it; differs between the two engines of a transfer.
    RequestId
);
text_id!(
    /// The configured name of an engine core (one per DP rank).
    EngineId
);

number_id!(
    /// One incarnation of a process. A restarted peer has a larger one and is a new peer.
    Incarnation(u64)
);

impl Incarnation {
    /// The latest incarnation that a record is believed to name. Incarnations are counted in
    /// microseconds since 1970, which get there after 36,000 years: what is beyond is damaged.
    pub const LATEST: Incarnation = Incarnation(1 << 60);

    /// The incarnation that begins when the wall clock shows `clock_us`, in microseconds since
    /// 1970, if `last` is the latest that is known of: a later one, though the clock went back.
    /// What is not remembered anywhere cannot count; peers and routers then take an incarnation
    /// that seems to be before the last one as soon as that one is over.
    ///
    /// ```
    /// # use kvferry_engine::core::ids::Incarnation;
    /// let first = Incarnation::begin(1_700_000_000_000_000, None);
    /// assert!(Incarnation::begin(1_600_000_000_000_000, Some(first)) > first);
    /// ```
    pub fn begin(clock_us: u64, last: Option<Incarnation>) -> Incarnation {
        let after = last.filter(|last| *last <= Incarnation::LATEST).map_or(1, |last| last.0 + 1);
        Incarnation(clock_us.min(Incarnation::LATEST.0).max(after))
    }
}

number_id!(
    /// One try of a decode to receive a transfer; grows, and is not used twice in an incarnation.
    Attempt(u32)
);
number_id!(
    /// One step (forward pass) of an engine; grows by one per step.
    StepId(u64)
);
number_id!(
    /// A KV block of one engine; index into the pool, equal on all TP ranks.
    BlockId(u32)
);
number_id!(
    /// A peer engine as its own core numbers it; never on the wire.
    ConnectionId(u32)
);
number_id!(
    /// The source side of one prefilled prompt on one engine; new after a recompute.
    SourceId(u64)
);
number_id!(
    /// One attempt to move one prompt's KV from a source to a receiver, as the initiating engine
    /// numbers it; the same on all its TP ranks.
    FlowId(u64)
);
number_id!(
    /// A client request as the router's front end numbers it.
    ClientId(u64)
);
number_id!(
    /// One HTTP leg of a client request as the router numbers it; never reused.
    LegId(u64)
);

impl ConnectionId {
    /// Set in the slots of peers that speak MoRIIO.
    pub(crate) const MORIIO: u32 = 1 << 31;

    /// True if the peer speaks MoRIIO.
    pub const fn is_moriio(self) -> bool {
        self.0 & Self::MORIIO != 0
    }
}

/// What an engine core does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Computes the KV of prompts.
    Prefill,
    Decode,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        })
    }
}

/// Who moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Mode {
    /// Prefill writes each layer into decode's blocks (MoRIIO's WRITE).
    Push,
    /// Decode reads from prefill's blocks (MoRIIO's READ).
    Pull,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Push => "push",
            Mode::Pull => "pull",
        })
    }
}

/// What one transfer is about: prompt `prompt` of the request that travels as `id`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TransferKey {
    /// The transfer id that both legs carry.
    pub id: TransferId,
    /// Index of the prompt within a request with several prompts, else 0.
    pub prompt: u32,
}

impl fmt::Display for TransferKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.id, self.prompt)
    }
}

/// For identifiers that are made of what they name: 64-bit FNV-1a (<https://datatracker.ietf.org/doc/html/draft-eastlake-fnv>).
pub(super) fn hash(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Largest number of TP ranks of one engine.
pub const TP_MAX: u16 = 64;

/// A set of TP ranks of one engine. Acknowledgements are sets, so a duplicate changes nothing.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct RankSet(pub u64);

impl RankSet {
    pub const EMPTY: RankSet = RankSet(0);

    /// Ranks `0..tp`; `tp` is at most [`TP_MAX`].
    pub const fn first(tp: u16) -> RankSet {
        assert!(tp <= TP_MAX);
        RankSet(if tp == TP_MAX { u64::MAX } else { (1 << tp) - 1 })
    }

    pub const fn only(rank: u16) -> RankSet {
        assert!(rank < TP_MAX);
        RankSet(1 << rank)
    }

    /// Adds a rank; true if it was not there before.
    pub fn insert(&mut self, rank: u16) -> bool {
        let before = self.0;
        self.0 |= Self::only(rank).0;
        self.0 != before
    }

    /// Takes a rank out.
    pub fn remove(&mut self, rank: u16) {
        self.0 &= !Self::only(rank).0;
    }

    /// True if the rank is a member.
    pub const fn contains(self, rank: u16) -> bool {
        rank < TP_MAX && self.0 >> rank & 1 == 1
    }

    /// Ranks in either set.
    pub const fn union(self, other: RankSet) -> RankSet {
        RankSet(self.0 | other.0)
    }

    /// True if every rank of `other` is in `self`.
    pub const fn covers(self, other: RankSet) -> bool {
        self.0 & other.0 == other.0
    }

    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// True if there is no rank.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Members in ascending order.
    pub fn iter(self) -> impl Iterator<Item = u16> {
        (0..TP_MAX).filter(move |rank| self.contains(*rank))
    }
}

/// Appends a number as 32 hexadecimal digits, as `{:032x}` writes it, in less time.
pub fn push_hex(out: &mut String, number: u128) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = [0; 32];
    for (pair, byte) in text.as_chunks_mut::<2>().0.iter_mut().zip(number.to_be_bytes()) {
        *pair = [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]];
    }
    out.push_str(std::str::from_utf8(&text).expect("digits are text"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lives_never_go_back_when_a_clock_does() {
        let incarnation =
            |clock, last: Option<u64>| Incarnation::begin(clock, last.map(Incarnation)).0;
        assert_eq!(incarnation(1_000, None), 1_000);
        assert_eq!(incarnation(1_000, Some(400)), 1_000);
        assert_eq!(incarnation(1_000, Some(1_000)), 1_001);
        assert_eq!(incarnation(1_000, Some(5_000)), 5_001);
        // A clock that was never set, and records that nobody wrote.
        assert_eq!(incarnation(0, None), 1);
        assert_eq!(incarnation(1_000, Some(u64::MAX)), 1_000);
        assert_eq!(incarnation(u64::MAX, None), Incarnation::LATEST.0);
        let last = Incarnation::LATEST;
        assert!(Incarnation::begin(u64::MAX, Some(last)) > last);
    }

    #[test]
    fn numbers_have_32_digits_in_hex() {
        for number in [0, 0xa5, u128::MAX, u128::MAX / 0x1f] {
            let mut text = String::from("x");
            push_hex(&mut text, number);
            assert_eq!(text, format!("x{number:032x}"));
        }
    }
}
