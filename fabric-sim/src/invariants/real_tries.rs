//! I16: a flow fails because of its operations only after all their tries, and `Busy` is no try.

use super::state::{OpExtent, TrackedOp};
use super::{CheckContext, Invariant};
use crate::observation::{Observation, ObservationKind, SimRankId};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::FlowId;
use kvferry_engine::core::message::{FlowState, TransferReport};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{Completion, Landed, Refused};
use kvferry_scenarios::run::{InstanceSettings, Run};
use std::collections::{BTreeMap, BTreeSet};

/// What failed on a rank.
#[derive(Debug, Default)]
struct RankFailures {
    /// Work that failed, and how often in a row.
    of: Vec<(OpExtent, u32)>,
    /// Submits that found their session gone; each was a try of some work.
    gone: u32,
    /// A peer was given up as a whole, and is not fenced.
    peer: bool,
}

impl RankFailures {
    /// How often work failed in a row, or the whole that it is a part of: what is tried again may
    /// be cut into smaller operations.
    fn of(&self, work: &OpExtent) -> u32 {
        let whole = |(whole, count): &(OpExtent, u32)| whole.may_have(work).then_some(*count);
        self.of.iter().filter_map(whole).max().unwrap_or(0)
    }
}

/// A flow that fails by itself needs a piece of work that failed as often as it may be tried. Each
/// such row excuses one flow, a peer that is given up excuses all.
#[derive(Debug, Default)]
pub(super) struct RealTries {
    tries: u32,
    ranks: BTreeMap<SimRankId, RankFailures>,
    /// Flows that said that they will fail.
    failing: BTreeSet<(SimRankId, FlowId)>,
    /// Flows that failed in this instant without excuse; their peer may be given up next.
    doubtful: Vec<(Nanos, SimRankId, FlowId, u32)>,
}

impl RealTries {
    pub(super) fn new(run: &Run) -> RealTries {
        let retries = |one: &InstanceSettings| one.protocol.transfer.retries_max;
        let retries = run.instances.iter().map(retries).min();
        RealTries { tries: 1 + retries.unwrap_or(0), ..RealTries::default() }
    }

    fn completed(&mut self, now: CheckContext<'_>, from: SimRankId, op: u64, outcome: &Completion) {
        let failed = matches!(outcome, Completion::Failed { landed, .. } if *landed != Landed::All);
        if !failed && !self.ranks.contains_key(&from) {
            return;
        }
        let Some(work) = now.state.op(from, op).map(TrackedOp::work) else { return };
        let failures = self.ranks.entry(from).or_default();
        let count = failures.of(&work) + 1;
        failures.of.retain(|(other, _)| work != *other);
        if failed {
            failures.of.push((work, count));
        }
    }

    fn failed(&mut self, now: Nanos, from: SimRankId, flow: FlowId) {
        let failures = self.ranks.entry(from).or_default();
        let worst = failures.of.iter().enumerate().max_by_key(|(_, (_, count))| *count);
        let (worst, count) = worst.map_or((None, 0), |(at, (_, count))| (Some(at), *count));
        if failures.peer {
            return;
        }
        if count + failures.gone < self.tries {
            return self.doubtful.push((now, from, flow, count));
        }
        // Which work found its session gone is not known, and the worst may be of another flow that
        // fails by it yet: those tries excuse this flow, and the row stays.
        let missing = self.tries.saturating_sub(count);
        failures.gone -= missing;
        if let Some(worst) = worst
            && missing == 0
        {
            failures.of.swap_remove(worst);
        }
    }

    /// Reports what was not excused in its own instant.
    fn settle(&mut self, now: CheckContext<'_>) {
        let tries = self.tries;
        self.doubtful.retain(|(at, from, flow, count)| {
            if *at < now.at {
                CheckContext { at: *at, ..now }.report(|| {
                    let rank = now.rank(*from);
                    format!(
                        "flow {flow} of {rank} failed, but no operation of that rank \
                         failed {tries} times in a row, at most {count} times"
                    )
                });
            }
            *at >= now.at
        });
    }
}

impl Invariant for RealTries {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Completed, Refused, Report, Crashed]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        if !self.doubtful.is_empty() {
            self.settle(now);
        }
        match seen {
            Observation::Completed { from, op, outcome } => {
                self.completed(now, *from, op.0, outcome);
            }
            Observation::Refused { from, why: Refused::Gone, .. } => {
                self.ranks.entry(*from).or_default().gone += 1;
            }
            Observation::Report { from, report } => match report {
                TransferReport::Flow { flow, state: FlowState::Failing(Failure::Fabric(_)) } => {
                    self.failing.insert((*from, *flow));
                    self.failed(now.at, *from, *flow);
                }
                TransferReport::Flow { flow, state: FlowState::Failed(failure) } => {
                    let told = self.failing.remove(&(*from, *flow));
                    if matches!(failure, Failure::Fabric(_)) && !told {
                        self.failed(now.at, *from, *flow);
                    }
                }
                TransferReport::PeerFailed { .. } => {
                    self.ranks.entry(*from).or_default().peer = true;
                    self.doubtful.retain(|(_, rank, ..)| rank != from);
                }
                TransferReport::Fenced { .. } => self.ranks.entry(*from).or_default().peer = false,
                _ => {}
            },
            Observation::Crashed { who } => self.ranks.retain(|rank, _| rank.who != *who),
            _ => {}
        }
    }

    fn finish(&mut self, now: CheckContext<'_>, _at_rest: bool) {
        let later = CheckContext { at: now.at + Nanos(1), ..now };
        self.settle(later);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{D0, InvariantBench, InvariantId, P0, done, failed, rank};
    use kvferry_engine::fabric::{FabricError, OpId};

    fn fails(bench: &mut InvariantBench, flow: u64) {
        let state = FlowState::Failing(Failure::Fabric(FabricError::AckTimeout));
        let report = &TransferReport::Flow { flow: FlowId(flow), state };
        bench.see(Observation::Report { from: rank(P0), report });
    }

    fn tried(outcomes: &[bool]) -> InvariantBench {
        let mut bench = InvariantBench::new(InvariantId::RealTries);
        for (op, well) in (1..).zip(outcomes) {
            bench.write(P0, D0, op, &[4]);
            let outcome = if *well { done() } else { failed(Landed::Unknown) };
            bench.complete(P0, op, &outcome);
        }
        bench
    }

    #[test]
    fn a_flow_may_fail_after_four_failures_in_a_row() {
        let mut bench = tried(&[false; 4]);
        fails(&mut bench, 1);
        bench.finish();
        bench.holds();
        // What excused one flow excuses no other.
        let mut bench = tried(&[false; 4]);
        fails(&mut bench, 1);
        fails(&mut bench, 2);
        bench.finish();
        bench.fails("flow 2 of p0 rank 0 failed");
    }

    #[test]
    fn what_is_cut_anew_keeps_the_tries_of_the_whole() {
        for (first, second, holds) in [([4, 5], [5, 5], true), ([4, 5], [6, 6], false)] {
            let mut bench = InvariantBench::new(InvariantId::RealTries);
            for (op, blocks) in (1..).zip([&first[..], &first, &first, &second[1..]]) {
                bench.write(P0, D0, op, blocks);
                bench.complete(P0, op, &failed(Landed::Unknown));
            }
            fails(&mut bench, 1);
            bench.finish();
            bench.judges(holds, "at most 3 times");
        }
    }

    #[test]
    fn a_try_that_found_its_session_gone_leaves_another_flow_its_excuse() {
        for fourth in [true, false] {
            let mut bench = InvariantBench::new(InvariantId::RealTries);
            for (op, block) in (1..).zip([4, 4, 4, 5, 5, 5]) {
                bench.write(P0, D0, op, &[block]);
                bench.complete(P0, op, &failed(Landed::Unknown));
            }
            // Of block 4.
            let why = &Refused::Gone;
            bench.see(Observation::Refused { from: rank(P0), op: OpId(7), why });
            fails(&mut bench, 1);
            if fourth {
                bench.write(P0, D0, 8, &[5]);
                bench.complete(P0, 8, &failed(Landed::Unknown));
            }
            fails(&mut bench, 2);
            bench.finish();
            bench.judges(fourth, "flow 2 of p0 rank 0 failed");
        }
    }

    #[test]
    fn less_is_no_reason_nor_is_busy() {
        for outcomes in [&[false; 3][..], &[false, false, false, true, false]] {
            let mut bench = tried(outcomes);
            let why = &Refused::Busy;
            bench.see(Observation::Refused { from: rank(P0), op: OpId(9), why });
            fails(&mut bench, 1);
            bench.finish();
            bench.fails("no operation of that rank failed 4 times in a row");
        }
    }

    #[test]
    fn a_peer_that_is_given_up_takes_its_flows_along() {
        let mut bench = tried(&[false]);
        // The same instant.
        let now = bench.now;
        fails(&mut bench, 1);
        bench.now = now;
        let failure = Failure::Fabric(FabricError::QueuePair);
        let peer = kvferry_engine::core::ids::ConnectionId(1);
        let report = &TransferReport::PeerFailed { peer, failure };
        bench.see(Observation::Report { from: rank(P0), report });
        fails(&mut bench, 2);
        bench.finish();
        bench.holds();
    }
}
