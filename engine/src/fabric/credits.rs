//! How much a plane takes at a time.

use serde::{Deserialize, Serialize};

/// Work that a data plane holds at a time. A batch that would go beyond it is
/// [`Refused::Busy`](super::Refused::Busy).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credits {
    /// Operations that have not completed.
    pub operations: u32,
    /// Byte ranges of these operations.
    pub ranges: u64,
    /// Bytes of these operations.
    pub bytes: u64,
}

impl Credits {
    /// No limit.
    pub const UNLIMITED: Credits =
        Credits { operations: u32::MAX, ranges: u64::MAX, bytes: u64::MAX };

    /// A limit of operations alone.
    pub const fn of_operations(operations: u32) -> Credits {
        Credits { operations, ..Credits::UNLIMITED }
    }

    /// The lesser of both, one by one.
    pub const fn at_most(&self, other: &Credits) -> Credits {
        const fn less(a: u64, b: u64) -> u64 {
            if a < b { a } else { b }
        }
        Credits {
            operations: less(self.operations as u64, other.operations as u64) as u32,
            ranges: less(self.ranges, other.ranges),
            bytes: less(self.bytes, other.bytes),
        }
    }

    /// True if `more` fits beside what is `used`.
    pub const fn fits(&self, used: &Credits, more: &Credits) -> bool {
        used.operations.saturating_add(more.operations) <= self.operations
            && used.ranges.saturating_add(more.ranges) <= self.ranges
            && used.bytes.saturating_add(more.bytes) <= self.bytes
    }

    /// Counts an operation that was taken.
    pub fn add(&mut self, more: &Credits) {
        self.operations += more.operations;
        self.ranges += more.ranges;
        self.bytes += more.bytes;
    }

    /// Counts an operation that has ended.
    pub fn remove(&mut self, less: &Credits) {
        self.operations -= less.operations;
        self.ranges -= less.ranges;
        self.bytes -= less.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn credits() -> impl Strategy<Value = Credits> {
        let number = || prop_oneof![0..9_u64, Just(u64::MAX)];
        (prop_oneof![0..9_u32, Just(u32::MAX)], number(), number())
            .prop_map(|(operations, ranges, bytes)| Credits { operations, ranges, bytes })
    }

    /// Each number of some credits, without an end.
    fn numbers(credits: &Credits) -> [u128; 3] {
        [credits.operations.into(), credits.ranges.into(), credits.bytes.into()]
    }

    proptest! {
        #[test]
        fn credits_fit_if_each_sum_is_within_its_limit(
            limit in credits(),
            used in credits(),
            more in credits(),
        ) {
            let [most, sum] = [&limit, &used].map(numbers);
            let more_of = numbers(&more);
            let is_within = |at: usize| {
                // A limit that is the largest number is none.
                let end = if at == 0 { u32::MAX.into() } else { u64::MAX.into() };
                most[at] == end || sum[at] + more_of[at] <= most[at]
            };
            prop_assert_eq!(limit.fits(&used, &more), (0..3).all(is_within));
            prop_assert!(Credits::UNLIMITED.fits(&used, &more));
        }

        #[test]
        fn least_of_two_limits_is_that_of_each_number(one in credits(), other in credits()) {
            let [a, b] = [&one, &other].map(numbers);
            let least = numbers(&one.at_most(&other));
            prop_assert_eq!(least, [0, 1, 2].map(|at: usize| a[at].min(b[at])));
        }

        #[test]
        fn operations_that_ended_leave_nothing(used in 0..9_u32, ranges in 0..9_u64, bytes: u32) {
            let mut sum = Credits { operations: used, ranges, bytes: 1 };
            let (before, one) = (sum, Credits { operations: 1, ranges, bytes: bytes.into() });
            sum.add(&one);
            prop_assert_eq!(numbers(&sum)[2], 1 + u128::from(bytes));
            sum.remove(&one);
            prop_assert_eq!(sum, before);
        }
    }
}
