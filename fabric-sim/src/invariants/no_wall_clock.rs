//! I13: shifting every wall clock changes no effect.

use super::deterministic::differ;
use super::{Invariant, Violation};
use kvferry_scenarios::lists::InvariantId;

/// The cores are told the time and have no clock; that the shells hand in none of their own is
/// seen by running with another offset, see [`compare`].
#[derive(Debug)]
pub(super) struct NoWallClock;

impl Invariant for NoWallClock {
    fn id(&self) -> InvariantId {
        InvariantId::NoWallClock
    }
}

/// Compares a run with one whose wall clocks are shifted, by hash and number of events.
pub fn compare(first: (u64, u64), shifted: (u64, u64)) -> Option<Violation> {
    differ(InvariantId::NoWallClock, "a run with shifted wall clocks", first, shifted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_that_follows_the_wall_clock_is_reported() {
        assert_eq!(compare((7, 3), (7, 3)), None);
        let found = compare((7, 3), (9, 3)).map(|violation| violation.id);
        assert_eq!(found, Some(InvariantId::NoWallClock));
    }
}
