//! I11: the same scenario and seed give the same trace, twice, and through core loop and actors
//! alike. I13: shifting every wall clock changes no effect.
//!
//! The cores are told the time and have no clock; that the shells hand in none of their own is seen
//! by running with another offset.

use super::{Invariant, Violation};
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::lists::InvariantId;

/// Takes two runs to see, so it is checked by [`compare_traces`] and [`compare_clocks`].
#[derive(Debug)]
pub(super) struct SameTrace;

impl Invariant for SameTrace {}

/// Compares two runs of one scenario and seed by what identifies their traces: hash and number of
/// events. `what` says how the runs differ, e.g. `a second run` or `actors`.
pub fn compare_traces(what: &str, first: (u64, u64), second: (u64, u64)) -> Option<Violation> {
    differ(InvariantId::Deterministic, what, first, second)
}

/// Compares a run with one whose wall clocks are shifted, by hash and number of events.
pub fn compare_clocks(first: (u64, u64), shifted: (u64, u64)) -> Option<Violation> {
    differ(InvariantId::NoWallClock, "a run with shifted wall clocks", first, shifted)
}

/// The violation of `id` if the traces differ.
fn differ(
    id: InvariantId,
    what: &str,
    (hash, events): (u64, u64),
    (other, others): (u64, u64),
) -> Option<Violation> {
    let same = hash == other && events == others;
    (!same).then(|| Violation {
        id,
        at: Nanos::ZERO,
        text: format!(
            "{what} gave trace {other:016x} of {others} events instead of {hash:016x} of {events}"
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_that_differ_are_reported() {
        assert_eq!(compare_traces("a second run", (7, 3), (7, 3)), None);
        let text = |second| compare_traces("a second run", (7, 3), second).map(|v| v.text);
        assert!(text((8, 3)).is_some_and(|text| text.contains("0000000000000008 of 3")));
        assert!(text((7, 4)).is_some());
    }

    #[test]
    fn a_trace_that_follows_the_wall_clock_is_reported() {
        assert_eq!(compare_clocks((7, 3), (7, 3)), None);
        let found = compare_clocks((7, 3), (9, 3)).map(|violation| violation.id);
        assert_eq!(found, Some(InvariantId::NoWallClock));
    }
}
