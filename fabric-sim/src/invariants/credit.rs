//! I9: submissions never exceed the credits, and `Busy` is never counted as a failure.

use super::{CheckContext, Invariant};
use crate::abilities::caps;
use crate::observation::{Observation, ObservationKind, SimProcessId, SimRankId, Submission};
use kvferry_engine::core::dialect::native::Frame;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::message::{
    DecodeAnswer, FlowState, Message, PrefillAnswer, TransferReport,
};
use kvferry_engine::fabric::{Caps, Completion, Credits, FabricError, OpId, Placement, Refused};
use std::collections::BTreeMap;

/// A plane and one of its peers, under the fence key of their connection.
type PlanePair = (SimRankId, SimRankId, u64);

/// Counts what is in flight of each data plane, in all and to each of its peers, and looks at every
/// failure that is told. Ranges are not seen here: what is beyond them is refused, and I18 allows
/// no refusal without a fault.
#[derive(Debug, Default)]
pub(super) struct CreditsRespected {
    /// What the planes of an instance take, by its index.
    caps: BTreeMap<u16, Caps>,
    in_all: BTreeMap<SimRankId, Credits>,
    per_peer: BTreeMap<PlanePair, Credits>,
    operations: BTreeMap<(SimRankId, OpId), (PlanePair, Credits)>,
}

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
                TransferReport::Flow {
                    state: FlowState::Failed(failure) | FlowState::Failing(failure),
                    ..
                }
                | TransferReport::PeerFailed { failure, .. },
            ..
        } => Some(failure),
        Observation::FrameSent {
            frame: Frame::Data { message: Message::Ended { failure, .. }, .. },
            ..
        } => Some(failure),
        _ => None,
    }
}

impl CreditsRespected {
    /// Counts an operation; what it is beyond, if it is.
    fn submitted(&mut self, seen: &Submission<'_>) -> Option<String> {
        let caps = self.caps.get(&seen.from.who.instance)?;
        let more = Credits { operations: 1, ranges: 0, bytes: seen.bytes };
        let pair = (seen.from, seen.peer, seen.fence_key);
        self.operations.insert((seen.from, seen.op), (pair, more));
        let used = self.in_all.entry(seen.from).or_default();
        used.add(&more);
        let in_all = Credits { operations: seen.credits, ..caps.in_all };
        let beyond = |used: &Credits, most: &Credits| {
            let told = |used: u64, what: &str, most: u64| {
                (used > most).then(|| format!("{used} {what} in flight with {most} credits"))
            };
            told(used.operations.into(), "operations", most.operations.into())
                .or_else(|| told(used.bytes, "bytes", most.bytes))
        };
        let in_all = beyond(used, &in_all);
        let used = self.per_peer.entry(pair).or_default();
        used.add(&more);
        in_all.or_else(|| Some(beyond(used, &caps.per_peer)? + " for one peer"))
    }

    fn completed(&mut self, from: SimRankId, op: OpId) {
        let Some((pair, less)) = self.operations.remove(&(from, op)) else { return };
        if let Some(used) = self.in_all.get_mut(&from) {
            used.remove(&less);
        }
        if let Some(used) = self.per_peer.get_mut(&pair) {
            used.remove(&less);
        }
    }

    /// An incarnation is over, with all that its planes had in flight.
    fn crashed(&mut self, who: SimProcessId) {
        self.operations.retain(|(from, _), _| from.who != who);
        self.in_all.retain(|from, _| from.who != who);
        self.per_peer.retain(|(from, ..), _| from.who != who);
    }
}

impl Invariant for CreditsRespected {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Started, Crashed, Submitted, Completed, PrefillAnswer, DecodeAnswer, Report, FrameSent]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        match seen {
            Observation::Started { who, spec } => {
                self.caps.insert(who.instance, caps(Placement::OnCompletion, &spec.fabric));
            }
            Observation::Crashed { who } => self.crashed(*who),
            Observation::Submitted(seen) => {
                if let Some(beyond) = self.submitted(seen) {
                    now.report(|| format!("{} has {beyond}", now.rank(seen.from)));
                }
            }
            Observation::Completed { from, op, outcome } => {
                self.completed(*from, *op);
                if matches!(outcome, Completion::Failed { cause: FabricError::QueueFull, .. }) {
                    let rank = now.rank(*from);
                    now.report(|| format!("operation {op} of {rank} overran the queue"));
                }
            }
            _ => {
                if failure(seen) == Some(&Failure::Refused(Refused::Busy)) {
                    now.report(|| format!("Busy was told as a failure: {seen:?}"));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{BLOCK, D0, D1, InvariantBench, InvariantId, P0, done};
    use kvferry_scenarios::run::FabricLimits;

    #[test]
    fn more_operations_than_credits_are_reported() {
        let mut bench = InvariantBench::new(InvariantId::Credit);
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
    fn what_is_beyond_the_credit_of_bytes_or_of_a_peer_is_reported() {
        let start = |bench: &mut InvariantBench, change: fn(&mut FabricLimits)| {
            bench.start_as(P0, |spec| change(&mut spec.fabric));
        };
        let mut bench = InvariantBench::new(InvariantId::Credit);
        start(&mut bench, |fabric| fabric.bytes_max = Some(3 * BLOCK));
        bench.write(P0, D0, 1, &[4, 5]);
        bench.write(P0, D1, 2, &[6]);
        bench.complete(P0, 1, &done());
        bench.write(P0, D1, 3, &[4, 5]);
        bench.holds();
        bench.write(P0, D0, 4, &[7]);
        bench.fails("p0 rank 0 has 4096 bytes in flight with 3072 credits");
        let mut bench = InvariantBench::new(InvariantId::Credit);
        start(&mut bench, |fabric| fabric.operations_per_peer = Some(1));
        bench.write(P0, D0, 1, &[4]);
        bench.write(P0, D1, 2, &[5]);
        bench.holds();
        bench.write(P0, D1, 3, &[6]);
        bench.fails("p0 rank 0 has 2 operations in flight with 1 credits for one peer");
        let mut bench = InvariantBench::new(InvariantId::Credit);
        start(&mut bench, |fabric| fabric.bytes_per_peer = Some(BLOCK));
        bench.write(P0, D0, 1, &[4]);
        // Of another connection, whose peer is another one to the plane.
        bench.fence_key = 2;
        bench.write(P0, D0, 2, &[5]);
        bench.holds();
        bench.write(P0, D0, 3, &[5]);
        bench.fails("2048 bytes in flight with 1024 credits for one peer");
    }

    #[test]
    fn busy_is_no_failure() {
        let mut bench = InvariantBench::new(InvariantId::Credit);
        bench.load_failed(D0, "r");
        bench.holds();
        bench.load_failed_by(D0, "s", Failure::Refused(Refused::Busy));
        bench.fails("Busy was told as a failure");
    }
}
