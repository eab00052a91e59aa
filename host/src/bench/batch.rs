//! Where the ranges of a batch lie.

use serde::{Deserialize, Serialize};

/// A batch, and the memory that it is in: both sides are cut into slots of one size. A batch takes
/// local slots that follow each other, and remote ones that do not, as no plane is to move
/// neighbours in one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BatchShape {
    /// Bytes of a range.
    pub(super) size: u64,
    pub(super) batch: u32,
    /// Slots of either memory.
    slots: u64,
}

/// The ranges of one batch as planes take them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct BatchRanges {
    pub(super) local: Vec<u64>,
    pub(super) remote: Vec<u64>,
    pub(super) len: Vec<u64>,
}

impl BatchShape {
    /// None if `memory` bytes have no room for one batch.
    pub(super) fn new(size: u64, batch: u32, memory: u64) -> Option<BatchShape> {
        let slots = memory.checked_div(size)?;
        (batch > 0 && slots >= batch.into()).then_some(BatchShape { size, batch, slots })
    }

    /// Whether all of it is inside `memory` bytes: a peer may say anything.
    pub(super) fn is_inside(&self, memory: u64) -> bool {
        let fits = self.slots.checked_mul(self.size).is_some_and(|bytes| bytes <= memory);
        fits && self.size > 0 && self.batch > 0 && self.slots >= self.batch.into()
    }

    /// Bytes of a batch.
    pub(super) fn bytes(&self) -> u64 {
        self.size * u64::from(self.batch)
    }

    /// Batches that have no byte in common.
    pub(super) fn apart(&self) -> u64 {
        self.slots / u64::from(self.batch)
    }

    /// One of the batches that are [`apart`](Self::apart).
    pub(super) fn ranges(&self, nth: u64) -> BatchRanges {
        let first = nth % self.apart() * u64::from(self.batch);
        let step = step(self.slots);
        let slots = first..first + u64::from(self.batch);
        let remote = |slot: u64| {
            let at = u128::from(self.slots / 2) + u128::from(slot) * u128::from(step);
            (at % u128::from(self.slots)) as u64 * self.size
        };
        BatchRanges {
            local: slots.clone().map(|slot| slot * self.size).collect(),
            remote: slots.map(remote).collect(),
            len: vec![self.size; self.batch as usize],
        }
    }
}

/// A step by which one comes to all slots, in no neighbourly order: near the golden section, and
/// prime to their number.
fn step(slots: u64) -> u64 {
    let near = (slots as f64 * 0.618) as u64;
    (near.max(2)..slots).find(|step| gcd(*step, slots) == 1).unwrap_or(1)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn ranges_are_inside_disjoint_and_no_neighbours() {
        for (size, batch, memory) in
            [(1, 1, 1), (7, 2, 14), (8, 3, 31), (8, 4, 32), (1, 6, 6), (64, 128, 1 << 20)]
        {
            let shape = BatchShape::new(size, batch, memory).expect("there is room");
            assert!(shape.is_inside(memory), "{shape:?}");
            let mut taken = [BTreeSet::new(), BTreeSet::new()];
            for nth in 0..shape.apart() {
                let BatchRanges { local, remote, len } = shape.ranges(nth);
                assert_eq!((local.len(), remote.len()), (batch as usize, len.len()));
                assert!(len.iter().all(|len| *len == size));
                for (ranges, taken) in [&local, &remote].into_iter().zip(&mut taken) {
                    for at in ranges {
                        assert!(at.is_multiple_of(size) && at + size <= memory, "{shape:?} {at}");
                        assert!(taken.insert(*at), "{shape:?}: {at} is taken twice");
                    }
                }
                let mut sides: Vec<_> = local.into_iter().zip(remote).collect();
                sides.sort_unstable();
                let goes_on = |pair: &[(u64, u64)]| pair[1].1 == pair[0].1 + size;
                assert!(!sides.windows(2).any(goes_on), "{shape:?}: neighbours");
            }
        }
    }

    #[test]
    fn what_has_no_room_is_no_shape() {
        assert_eq!(BatchShape::new(8, 2, 15), None);
        assert_eq!(BatchShape::new(0, 1, 15), None);
        assert_eq!(BatchShape::new(1, 0, 15), None);
        let far = BatchShape { size: 8, batch: 2, slots: u64::MAX };
        assert!(!far.is_inside(u64::MAX));
        assert!(!BatchShape { size: 8, batch: 3, slots: 2 }.is_inside(64));
        assert!(!BatchShape { size: 0, batch: 1, slots: 2 }.is_inside(64));
    }
}
