//! I7: no frame, notification or completion changes a transfer of another request, peer, rank or
//! incarnation, and no leg goes to an instance that is not there for it.

use super::leg_recipients::LegRecipients;
use super::{CheckContext, Invariant};
use crate::observation::{Observation, ObservationKind, ObservedLanding, SimRankId};
use kvferry_engine::core::message::DecodeHook;
use kvferry_scenarios::run::Run;
use std::collections::BTreeSet;

/// Bytes may come only from the prefill that was asked, and not from a peer that is fenced. A core
/// may answer only for requests that it knows in this incarnation.
#[derive(Debug, Default)]
pub(super) struct RightRecipient {
    /// Who is kept out of whose memory.
    fenced: BTreeSet<(SimRankId, SimRankId)>,
    legs: LegRecipients,
}

impl RightRecipient {
    pub(super) fn new(run: &Run) -> RightRecipient {
        RightRecipient { legs: LegRecipients::new(run), ..RightRecipient::default() }
    }

    fn landed(&self, now: CheckContext<'_>, seen: &ObservedLanding<'_>) {
        let state = now.state;
        let (from, target) = (seen.from, seen.target);
        let stray = |why: &str| {
            let (sender, receiver) = (now.rank(from), now.rank(target));
            format!("operation {} of {sender} landed at {receiver}, {why}", seen.op)
        };
        // The memory of an incarnation that ended is nobody's.
        if !state.is_current(target.who) {
            return;
        }
        if from != target && !self.fenced.is_empty() && self.fenced.contains(&(target, from)) {
            return now.report(|| stray("which has fenced it"));
        }
        for at in seen.written {
            let block = state.block(target.who.instance, *at);
            let Some(load) = state.load_of(&block) else { continue };
            if load.writer.is_none_or(|writer| writer == from.who.instance) {
                continue;
            }
            let asked = load.peer.map_or("nobody", |peer| state.name(peer.instance));
            let request = &load.request;
            return now
                .report(|| stray(&format!("in {at} of request {request}, which asked {asked}")));
        }
    }
}

impl Invariant for RightRecipient {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[
            Landed,
            Fenced,
            Started,
            DecodeHook,
            DecodeAnswer,
            Faulted,
            FrameSent,
            FrameArrived,
            Dispatched,
            Leg,
            LegClosed,
        ]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        match seen {
            Observation::Landed(landing) => self.landed(now, landing),
            // A live peer may connect again under a new pass, with operations of its own.
            Observation::Fenced { at, peer, .. } if !now.state.is_current(peer.who) => {
                self.fenced.insert((*at, *peer));
            }
            Observation::Started { who, .. } => {
                self.fenced.retain(|(at, _)| at.who.instance != who.instance);
            }
            Observation::DecodeHook { who, hook } => {
                let (DecodeHook::Arrived { request, .. }
                | DecodeHook::Allocated { request, .. }
                | DecodeHook::Finished { request, .. }) = hook;
                self.check_incarnation(now, *who, request, "told of");
            }
            Observation::DecodeAnswer { who, answer } => {
                self.check_incarnation(now, *who, answer.request(), "answers for");
            }
            _ => self.legs.observe(now, seen),
        }
    }
}

impl RightRecipient {
    fn check_incarnation(
        &self,
        now: CheckContext<'_>,
        who: crate::observation::SimProcessId,
        request: &kvferry_engine::core::ids::RequestId,
        what: &str,
    ) {
        if !now.state.is_current(who) {
            let name = now.name(who.instance);
            now.report(|| {
                format!(
                    "incarnation {} of {name} {what} request {request} after it ended",
                    who.incarnation
                )
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::invariants::testing::{D0, InvariantBench, InvariantId, P0, P1};
    use crate::observation::SimProcessId;

    fn bench() -> InvariantBench {
        let mut bench = InvariantBench::new(InvariantId::RightRecipient);
        bench.allocated(D0, "r", 32, &[4, 5]);
        bench.announced(D0, P0, "r");
        bench
    }

    #[test]
    fn only_the_prefill_that_was_asked_may_write() {
        let mut bench = bench();
        bench.write(P0, D0, 1, &[4]);
        bench.land(P0, D0, 1, &[4]);
        bench.holds();
        bench.write(P1, D0, 1, &[5]);
        bench.land(P1, D0, 1, &[5]);
        bench.fails("block 5 of request r, which asked p0");
    }

    #[test]
    fn a_core_answers_in_its_own_incarnation_only() {
        let mut bench = bench();
        bench.loaded(D0, "r");
        bench.crash(D0);
        bench.start(SimProcessId { incarnation: 1, ..D0 });
        bench.holds();
        bench.loaded(D0, "r");
        bench.fails("incarnation 0 of d0 answers for request r after it ended");
    }

    #[test]
    fn a_fenced_incarnation_lands_nothing() {
        let mut bench = bench();
        bench.write(P0, D0, 1, &[4]);
        bench.crash(P0);
        bench.land(P0, D0, 1, &[4]);
        bench.holds();
        bench.fence(D0, P0);
        bench.land(P0, D0, 1, &[4]);
        bench.fails("which has fenced it");
    }
}
