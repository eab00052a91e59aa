//! I9: submissions never exceed the credits, and `Busy` is never counted as a failure.

use super::{Found, Invariant, Now};
use crate::observe::{Kind, Observation};
use engine::core::dialect::native::Frame;
use engine::core::error::Failure;
use engine::core::message::{DecodeAnswer, FlowState, Message, PrefillAnswer, Report};
use engine::fabric::{Cause, Outcome, Refused};
use scenarios::lists::InvariantId;

/// Counts operations in flight per data plane and looks at every failure that is told.
#[derive(Debug)]
pub(super) struct Credit;

/// The failure that something tells of.
pub(super) fn failure<'a>(seen: &Observation<'a>) -> Option<&'a Failure> {
    match seen {
        Observation::PrefillAnswer { answer, .. } => match answer {
            PrefillAnswer::SourceFree { failure, .. } => failure.as_ref(),
            PrefillAnswer::Rejected { failure, .. } => Some(failure),
            PrefillAnswer::PreemptionSafe { .. } => None,
        },
        Observation::DecodeAnswer { answer, .. } => match answer {
            DecodeAnswer::LoadFailed { failure, .. } | DecodeAnswer::Rejected { failure, .. } => {
                Some(failure)
            }
            DecodeAnswer::Allocate { .. } | DecodeAnswer::Loaded { .. } => None,
        },
        Observation::Report {
            report:
                Report::Flow { state: FlowState::Failed(failure) | FlowState::Failing(failure), .. }
                | Report::PeerFailed { failure, .. },
            ..
        } => Some(failure),
        Observation::FrameSent {
            frame: Frame::Data { message: Message::Ended { failure, .. }, .. },
            ..
        } => Some(failure),
        _ => None,
    }
}

impl Invariant for Credit {
    fn id(&self) -> InvariantId {
        InvariantId::Credit
    }

    fn wants(&self) -> &'static [Kind] {
        &[
            Kind::Submitted,
            Kind::Completed,
            Kind::PrefillAnswer,
            Kind::DecodeAnswer,
            Kind::Report,
            Kind::FrameSent,
        ]
    }

    fn observe(&mut self, now: Now<'_>, seen: &Observation<'_>, found: &mut Found) {
        match seen {
            Observation::Submitted(seen) => {
                let used = now.state.in_flight(seen.from) + 1;
                if used > seen.credits {
                    found.report(self.id(), now.at, || {
                        let name = now.state.name(seen.from.who.instance);
                        format!(
                            "{name} rank {} has {used} operations in flight with {} credits",
                            seen.from.rank, seen.credits
                        )
                    });
                }
            }
            Observation::Completed { from, op, outcome } => {
                if matches!(outcome, Outcome::Failed { cause: Cause::QueueFull, .. }) {
                    found.report(self.id(), now.at, || {
                        let name = now.state.name(from.who.instance);
                        format!("operation {op} of {name} rank {} overran the queue", from.rank)
                    });
                }
            }
            _ => {
                if failure(seen) == Some(&Failure::Refused(Refused::Busy)) {
                    found.report(self.id(), now.at, || {
                        format!("Busy was told as a failure: {seen:?}")
                    });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{Bench, D0, P0, done};

    #[test]
    fn more_operations_than_credits_are_reported() {
        let mut bench = Bench::new(InvariantId::Credit);
        for op in 1..=3 {
            bench.write(P0, D0, op, &[4]);
        }
        bench.complete(P0, 2, &done());
        bench.write(P0, D0, 4, &[4]);
        bench.holds();
        bench.write(P0, D0, 5, &[4]);
        bench.fails("p0 rank 0 has 4 operations in flight with 3 credits");
    }

    #[test]
    fn busy_is_no_failure() {
        let mut bench = Bench::new(InvariantId::Credit);
        bench.load_failed(D0, "r");
        bench.holds();
        bench.load_failed_by(D0, "s", Failure::Refused(Refused::Busy));
        bench.fails("Busy was told as a failure");
    }
}
