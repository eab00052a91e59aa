//! Digests of registered memory, for who has to know whether bytes are what they were.

use super::{Refused, RegionId};
use crate::core::ids::number_id;
use serde::{Deserialize, Serialize};
use std::fmt;
use twox_hash::XxHash3_64;

number_id!(
    /// One accepted [`super::DataPlane::digest`]; unique within a data plane's life.
    DigestId(u64)
);

/// Parts of a region, each with the seed of its digest. A part is one or more byte ranges in an
/// order that counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DigestParts {
    seed: Vec<u64>,
    /// For each part the number of ranges up to its end.
    end: Vec<u32>,
    /// Offsets into the region.
    from: Vec<u64>,
    /// Lengths in bytes.
    len: Vec<u64>,
}

impl DigestParts {
    /// Begins a part.
    pub fn begin(&mut self, seed: u64) {
        self.seed.push(seed);
        self.end.push(self.len.len() as u32);
    }

    /// Appends a range to the part that was begun last.
    ///
    /// # Panics
    /// If none was begun.
    pub fn push(&mut self, from: u64, len: u64) {
        let first = match self.end.len() {
            0 | 1 => 0,
            count => self.end[count - 2] as usize,
        };
        match self.len.last_mut() {
            Some(last)
                if self.from.len() > first && self.from[self.from.len() - 1] + *last == from =>
            {
                *last += len;
            }
            _ => {
                self.from.push(from);
                self.len.push(len);
                *self.end.last_mut().expect("a part was begun") += 1;
            }
        }
    }

    /// Number of parts.
    pub fn count(&self) -> usize {
        self.seed.len()
    }

    /// True if there is no part.
    pub fn is_empty(&self) -> bool {
        self.seed.is_empty()
    }

    /// The seed of a part.
    pub fn seed(&self, part: usize) -> u64 {
        self.seed[part]
    }

    /// The ranges `(offset, length)` of a part.
    pub fn ranges(&self, part: usize) -> impl Iterator<Item = (u64, u64)> + '_ {
        let first = if part == 0 { 0 } else { self.end[part - 1] as usize };
        let range = first..self.end[part] as usize;
        self.from[range.clone()].iter().copied().zip(self.len[range].iter().copied())
    }
}

/// What a [`super::DataPlane`] is asked to digest.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DigestBatch {
    /// Chosen by the caller, who uses it once on this plane.
    pub id: DigestId,
    /// Where the parts are.
    pub region: RegionId,
    /// One digest is made of each.
    pub parts: DigestParts,
}

impl DigestBatch {
    /// Whether all of it lies in its region, which has `len` bytes.
    ///
    /// # Errors
    /// `Invalid` if it does not.
    pub fn check(&self, len: u64) -> Result<(), Refused> {
        let mut ranges = self.parts.from.iter().zip(&self.parts.len);
        match ranges.all(|(from, some)| from.checked_add(*some).is_some_and(|end| end <= len)) {
            true => Ok(()),
            false => Err(Refused::Invalid("a digest of bytes outside its region".into())),
        }
    }
}

/// The digest of a part: XXH3 (64 bit) with its seed over the bytes of its ranges, one behind the
/// other. A plane for device memory computes the same where its bytes are.
pub fn digest_of(seed: u64, bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot_with_seed(seed, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::RegionId;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_have_the_bytes_that_were_pushed_in_their_order(
            parts in prop::collection::vec(
                (any::<u64>(), prop::collection::vec((0..12_u64, 0..4_u64), 0..8)),
                0..6,
            ),
            end in 0..16_u64,
        ) {
            let mut asked = DigestParts::default();
            for (seed, ranges) in &parts {
                asked.begin(*seed);
                ranges.iter().for_each(|(from, len)| asked.push(*from, *len));
            }
            prop_assert_eq!(asked.count(), parts.len());
            prop_assert_eq!(asked.is_empty(), parts.is_empty());
            let bytes = |(from, len): (u64, u64)| from..from + len;
            for (nth, (seed, ranges)) in parts.iter().enumerate() {
                prop_assert_eq!(asked.seed(nth), *seed);
                let got: Vec<u64> = asked.ranges(nth).flat_map(bytes).collect();
                let expected: Vec<u64> = ranges.iter().copied().flat_map(bytes).collect();
                prop_assert_eq!(got, expected);
            }
            let last = parts.iter().flat_map(|(_, ranges)| ranges).map(|(from, len)| from + len).max();
            let batch = DigestBatch { id: DigestId(1), region: RegionId(1), parts: asked };
            let is_inside = last.is_none_or(|last| last <= end);
            prop_assert_eq!(batch.check(end).is_ok(), is_inside);
            if !is_inside {
                prop_assert!(matches!(batch.check(end), Err(Refused::Invalid(_))));
            }
        }
    }

    #[test]
    fn range_that_wraps_is_outside_its_region() {
        let mut parts = DigestParts::default();
        parts.begin(1);
        parts.push(2, u64::MAX);
        let batch = DigestBatch { id: DigestId(1), region: RegionId(1), parts };
        assert!(matches!(batch.check(u64::MAX), Err(Refused::Invalid(_))));
    }

    #[test]
    #[should_panic(expected = "a part was begun")]
    fn range_without_a_part_panics() {
        DigestParts::default().push(0, 1);
    }
}
