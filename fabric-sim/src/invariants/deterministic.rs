//! I11: the same scenario and seed give the same trace, twice, and through core loop and actors
//! alike.

use super::{Invariant, Violation};
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::lists::InvariantId;

/// Takes two runs to see, so it is checked by [`compare`].
#[derive(Debug)]
pub(super) struct DeterministicTrace;

impl Invariant for DeterministicTrace {
    fn id(&self) -> InvariantId {
        InvariantId::Deterministic
    }
}

/// Compares two runs of one scenario and seed by what identifies their traces: hash and number of
/// events. `what` says how the runs differ, e.g. `a second run` or `actors`.
pub fn compare(what: &str, first: (u64, u64), second: (u64, u64)) -> Option<Violation> {
    differ(InvariantId::Deterministic, what, first, second)
}

/// The violation of `id` if the traces differ.
pub(super) fn differ(
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
        assert_eq!(compare("a second run", (7, 3), (7, 3)), None);
        let text = |second| compare("a second run", (7, 3), second).map(|v| v.text);
        assert!(text((8, 3)).is_some_and(|text| text.contains("0000000000000008 of 3")));
        assert!(text((7, 4)).is_some());
    }
}
