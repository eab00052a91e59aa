//! I5: each request ends exactly once per role, each accepted operation completes exactly once,
//! each block list is given back exactly once.

use super::{CheckContext, Invariant};
use crate::observation::{Observation, ObservationKind, SimProcessId, SimRankId};
use kvferry_engine::core::ids::{ClientId, LegId, RequestId};
use kvferry_engine::core::message::{DecodeAnswer, DecodeHook, PrefillAnswer, PrefillHook};
use kvferry_engine::core::router::LegEvent;
use std::collections::{BTreeMap, BTreeSet};

/// What an engine still has to be told about a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PendingAnswers {
    finished: bool,
    /// Preemptions without an answer.
    preempted: u32,
    /// Blocks wait to be loaded.
    allocated: bool,
    /// The request is over but for preemptions that crossed with its rejection.
    rejected: bool,
}

/// Follows clients, legs, the answers that cores owe their engines, and operations.
#[derive(Debug, Default)]
pub(super) struct OneOutcome {
    clients: BTreeSet<ClientId>,
    ended_legs: BTreeSet<LegId>,
    pending: BTreeMap<(SimProcessId, RequestId), PendingAnswers>,
}

impl OneOutcome {
    /// A core owes more about a request that it knows.
    fn owes(
        &mut self,
        who: SimProcessId,
        request: &RequestId,
        more: impl FnOnce(&mut PendingAnswers),
    ) {
        self.pending.entry((who, request.clone())).and_modify(more);
    }

    fn prefill_hook(&mut self, who: SimProcessId, hook: &PrefillHook) {
        match hook {
            PrefillHook::Arrived { request, .. } => {
                self.pending.insert((who, request.clone()), PendingAnswers::default());
            }
            PrefillHook::Finished { request, .. } => {
                self.owes(who, request, |owed| owed.finished = true);
            }
            PrefillHook::Preempted { request } => {
                // The engine waits for the answer to one that crossed with a rejection, too.
                let crossed = PendingAnswers { rejected: true, ..PendingAnswers::default() };
                self.pending.entry((who, request.clone())).or_insert(crossed).preempted += 1;
            }
            PrefillHook::Scheduled { .. } => {}
        }
    }

    fn decode_hook(&mut self, who: SimProcessId, hook: &DecodeHook) {
        match hook {
            DecodeHook::Arrived { request, .. } => {
                self.pending.insert((who, request.clone()), PendingAnswers::default());
            }
            DecodeHook::Allocated { request, .. } => {
                self.owes(who, request, |owed| owed.allocated = true);
            }
            DecodeHook::Finished { request, .. } => {
                let key = (who, request.clone());
                if self.pending.get(&key).is_some_and(|owed| !owed.allocated) {
                    self.pending.remove(&key);
                }
            }
        }
    }

    /// Takes an answer off the books; says what is wrong with it.
    fn prefill_answer(
        &mut self,
        who: SimProcessId,
        answer: &PrefillAnswer,
    ) -> Option<&'static str> {
        let (PrefillAnswer::SourceFree { request, .. }
        | PrefillAnswer::PreemptionSafe { request }
        | PrefillAnswer::Rejected { request, .. }) = answer;
        let key = (who, request.clone());
        let Some(owed) = self.pending.get_mut(&key) else {
            return Some("an answer for a request that is not owed one");
        };
        match answer {
            PrefillAnswer::PreemptionSafe { .. } if owed.preempted == 0 => {
                Some("one preemption answered twice, or none")
            }
            PrefillAnswer::PreemptionSafe { .. } => {
                owed.preempted -= 1;
                if owed.rejected && owed.preempted == 0 {
                    self.pending.remove(&key);
                }
                None
            }
            PrefillAnswer::SourceFree { .. } if !owed.finished => {
                Some("blocks freed before the request finished")
            }
            _ => {
                self.pending.remove(&key);
                None
            }
        }
    }

    fn decode_answer(&mut self, who: SimProcessId, answer: &DecodeAnswer) -> Option<&'static str> {
        if !answer.is_last() {
            return None;
        }
        let owed = self.pending.remove(&(who, answer.request().clone()));
        match (owed, answer) {
            // The engine may have ended the request while the refusal was on its way.
            (None, DecodeAnswer::Rejected { .. }) => None,
            (None, _) => Some("an answer for a request that is not owed one"),
            (Some(owed), DecodeAnswer::Loaded { .. } | DecodeAnswer::LoadFailed { .. })
                if !owed.allocated =>
            {
                Some("a load answered before its blocks were allocated")
            }
            _ => None,
        }
    }

    fn completed(&self, now: CheckContext<'_>, from: SimRankId, op: u64) -> Option<&'static str> {
        match now.state.op(from, op) {
            Some(op) if op.completed => Some("an operation completed twice"),
            Some(_) => None,
            None => Some("an operation completed that is not in flight"),
        }
    }
}

impl Invariant for OneOutcome {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[
            Asked,
            Probed,
            Answered,
            ClientGone,
            Leg,
            PrefillHook,
            PrefillAnswer,
            DecodeHook,
            DecodeAnswer,
            Completed,
            EngineFault,
            Crashed,
        ]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        let wrong = match seen {
            Observation::Completed { from, op, .. } => self.completed(now, *from, op.0),
            Observation::Asked { client } | Observation::Probed { client, .. } => {
                (!self.clients.insert(*client)).then_some("a client asked twice")
            }
            Observation::Answered { client, .. } => (!self.clients.remove(client))
                .then_some("a client answered twice, or one that is gone"),
            Observation::ClientGone { client } => {
                self.clients.remove(client);
                return;
            }
            Observation::Leg { leg, event, .. } => {
                let over = match event {
                    LegEvent::FirstToken => self.ended_legs.contains(leg),
                    LegEvent::Done { .. } | LegEvent::Prefilled { .. } | LegEvent::Failed(_) => {
                        !self.ended_legs.insert(*leg)
                    }
                };
                over.then_some("news of a leg that has ended")
            }
            Observation::PrefillHook { who, hook } => {
                return self.prefill_hook(*who, hook);
            }
            Observation::DecodeHook { who, hook } => {
                return self.decode_hook(*who, hook);
            }
            Observation::PrefillAnswer { who, answer } => self.prefill_answer(*who, answer),
            Observation::DecodeAnswer { who, answer } => self.decode_answer(*who, answer),
            Observation::EngineFault { who, text } => {
                return now.report(|| format!("the engine of {}: {text}", now.name(who.instance)));
            }
            Observation::Crashed { who } => {
                return self.pending.retain(|key, _| key.0 != *who);
            }
            _ => return,
        };
        if let Some(wrong) = wrong {
            now.report(|| format!("{wrong}: {seen:?}"));
        }
    }

    fn finish(&mut self, now: CheckContext<'_>, at_rest: bool) {
        let open = self.pending.iter().find(|(key, owed)| {
            now.state.acts(key.0) && (owed.finished || owed.allocated || owed.preempted > 0)
        });
        if let (true, Some(((who, request), owed))) = (at_rest, open) {
            let name = now.name(who.instance);
            now.report(|| format!("request {request} of {name} was never answered: {owed:?}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{
        D0, HASH, InvariantBench, InvariantId, P0, done, finished, finished_answer, prefill_leg,
        request,
    };
    use kvferry_engine::core::error::Failure;
    use kvferry_engine::core::message::{FinishReason, Mode};

    fn bench() -> InvariantBench {
        InvariantBench::new(InvariantId::OneOutcome)
    }

    #[test]
    fn a_request_is_answered_once() {
        let mut bench = bench();
        bench.asked(1);
        bench.answered(1, &finished_answer(false));
        bench.holds();
        bench.answered(1, &finished_answer(false));
        bench.fails("a client answered twice");
    }

    #[test]
    fn a_load_is_answered_once() {
        let mut bench = bench();
        bench.allocated(D0, "r", 16, &[4]);
        bench.load_failed(D0, "r");
        bench.holds();
        bench.loaded(D0, "r");
        bench.fails("not owed one");
    }

    #[test]
    fn an_allocation_without_an_answer_is_seen_at_rest() {
        let mut bench = bench();
        bench.allocated(D0, "r", 16, &[4]);
        bench.holds();
        bench.finish();
        bench.fails("request r of d0 was never answered");
    }

    #[test]
    fn an_operation_completes_once() {
        let mut bench = bench();
        bench.write(P0, D0, 1, &[4]);
        bench.complete(P0, 1, &done());
        bench.holds();
        bench.complete(P0, 1, &done());
        bench.fails("not in flight");
    }

    fn prefill(bench: &mut InvariantBench, hook: PrefillHook) {
        bench.see(Observation::PrefillHook { who: P0, hook: &hook });
    }

    /// A prefill that knows a request.
    fn arrived(mode: Mode) -> InvariantBench {
        let mut bench = bench();
        let leg = prefill_leg("r", mode);
        prefill(
            &mut bench,
            PrefillHook::Arrived { request: request("r"), leg, tokens: 16, prompt_hash: HASH },
        );
        bench
    }

    #[test]
    fn a_source_is_freed_once_and_not_before_the_end() {
        let mut bench = arrived(Mode::Push);
        prefill(&mut bench, PrefillHook::Preempted { request: request("r") });
        let safe = PrefillAnswer::PreemptionSafe { request: request("r") };
        bench.see(Observation::PrefillAnswer { who: P0, answer: &safe });
        let reason = FinishReason::Length;
        let free = PrefillAnswer::SourceFree { request: request("r"), failure: None };
        prefill(&mut bench, PrefillHook::Finished { request: request("r"), reason });
        bench.see(Observation::PrefillAnswer { who: P0, answer: &free });
        bench.finish();
        bench.holds();
        bench.see(Observation::PrefillAnswer { who: P0, answer: &free });
        bench.fails("not owed one");
    }

    /// A prompt that was rejected, and preempted before the engine learned it.
    fn crossed() -> InvariantBench {
        let mut bench = arrived(Mode::Pull);
        let rejected =
            PrefillAnswer::Rejected { request: request("r"), failure: Failure::Cancelled };
        bench.see(Observation::PrefillAnswer { who: P0, answer: &rejected });
        prefill(&mut bench, PrefillHook::Preempted { request: request("r") });
        bench
    }

    #[test]
    fn a_preemption_that_crosses_with_a_rejection_is_answered_once() {
        let safe = PrefillAnswer::PreemptionSafe { request: request("r") };
        let mut bench = crossed();
        bench.see(Observation::PrefillAnswer { who: P0, answer: &safe });
        let reason = FinishReason::Aborted;
        prefill(&mut bench, PrefillHook::Finished { request: request("r"), reason });
        bench.holds();
        bench.see(Observation::PrefillAnswer { who: P0, answer: &safe });
        bench.fails("not owed one");

        let mut bench = crossed();
        bench.finish();
        bench.fails("request r of p0 was never answered");
    }

    #[test]
    fn nothing_follows_the_end_of_a_leg() {
        let mut bench = bench();
        bench.leg(D0, 4, &LegEvent::FirstToken);
        bench.leg(D0, 4, &finished());
        bench.holds();
        bench.leg(D0, 4, &LegEvent::FirstToken);
        bench.fails("a leg that has ended");
    }
}
