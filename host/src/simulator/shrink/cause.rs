//! Causes of failed runs, told so that two runs can be compared.

use crate::simulator::outcome::RunOutcome;
use kvferry_sim::world::RunVerdict;

/// Cause of a failed run: the invariant that it broke first, and what was said of it without numbers,
/// times and ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FailureCause(String);

impl FailureCause {
    /// The cause of a run that came out otherwise than its file expects.
    pub(super) fn of(outcome: &RunOutcome) -> Option<FailureCause> {
        if outcome.exit == RunVerdict::Held {
            return None;
        }
        let told = outcome.violations.first().map_or(outcome.verdict.name(), String::as_str);
        let (id, text) = parts(told);
        Some(FailureCause(format!("{id}: {}", normalised(text))))
    }

    /// True if counts or times are others than the file expects.
    pub(super) fn is_of_expectation(&self) -> bool {
        self.0.starts_with("expected otherwise")
    }

    /// The invariant, or what else went wrong.
    pub(super) fn id(&self) -> &str {
        self.0.split_once(": ").map_or(&self.0, |(id, _)| id)
    }
}

/// The invariant of a violation and what it says, without its time; of other texts what stands
/// before and behind the first colon.
fn parts(told: &str) -> (&str, &str) {
    let (id, text) = told.split_once(": ").unwrap_or((told, ""));
    (id.split_once(" at ").map_or(id, |(id, _)| id), text)
}

/// A text with `#` in place of each word that has a digit in it, and of several such words with
/// nothing but signs between them.
fn normalised(text: &str) -> String {
    let is_of_word = |c: char| c.is_alphanumeric() || "-_.".contains(c);
    let mut made = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let end = rest.find(|c| is_of_word(c) != is_of_word(first)).unwrap_or(rest.len());
        let (piece, behind) = rest.split_at(end);
        let has_digit = piece.contains(|c: char| c.is_ascii_digit());
        made.push_str(if has_digit { "#" } else { piece });
        rest = behind;
    }
    for pair in ["#, #", "#/#", "#:#", "#+#", "# #"] {
        while made.contains(pair) {
            made = made.replace(pair, "#");
        }
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(told: &str) -> FailureCause {
        let outcome = RunOutcome {
            exit: RunVerdict::Correctness,
            violations: vec![told.into()],
            ..RunOutcome::default()
        };
        FailureCause::of(&outcome).expect("it failed")
    }

    #[test]
    fn numbers_times_and_ids_make_no_other_cause() {
        let one = failed("I2-no-early-reuse at 0.012 s: p0 rank 1 wrote block 7 of c3-9f0a/0");
        let other = failed("I2-no-early-reuse at 3.100 s: d1.0 rank 0 wrote block 31 of c0-77/2");
        assert_eq!(one, other);
        assert_eq!(one.id(), "I2-no-early-reuse");
        assert_eq!(
            failed("L1-every-request-ends at 1 s: open: [c1, c2]"),
            failed("L1-every-request-ends at 2 s: open: [c1]")
        );
    }

    #[test]
    fn another_invariant_or_another_text_is_another_cause() {
        let one = failed("I2-no-early-reuse at 0.012 s: p0 wrote block 7");
        assert_ne!(one, failed("I1-no-foreign-bytes at 0.012 s: p0 wrote block 7"));
        assert_ne!(one, failed("I2-no-early-reuse at 0.012 s: p0 read block 7"));
        assert_ne!(one, failed("panic: no block 7 at engine/src/core/a.rs:3:1"));
    }

    #[test]
    fn a_run_that_held_has_no_cause() {
        assert_eq!(FailureCause::of(&RunOutcome::default()), None);
    }
}
