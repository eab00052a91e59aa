//! L1: every request ends within the stated bound after the last fault.

use super::{CheckContext, Invariant, LivenessBounds, ViolationLog};
use crate::observation::{Observation, ObservationKind, SimProcessId};
use kvferry_engine::core::ids::{ClientId, LegId, RequestId, TransferKey};
use kvferry_engine::core::message::{DecodeHook, Mode, PrefillAnswer, PrefillHook};
use kvferry_engine::core::router::LegEvent;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::Completion;
use kvferry_scenarios::lists::{FaultKind, InvariantId};
use std::collections::{BTreeMap, BTreeSet};

/// A request without an answer.
#[derive(Clone, Copy, Debug)]
struct OpenRequest {
    asked: Nanos,
    /// Legs that have not ended.
    legs: u32,
}

/// Prompts to be pulled that hold blocks, and who may be reading them.
#[derive(Debug, Default)]
struct PullSources {
    keys: BTreeMap<(SimProcessId, RequestId), TransferKey>,
    readers: BTreeMap<TransferKey, BTreeSet<SimProcessId>>,
    /// Instances could not reach each other for a while: what a reader gave up then it releases
    /// when both meet again, which may be never.
    cut: bool,
}

impl PullSources {
    fn prefill_hook(&mut self, who: SimProcessId, hook: &PrefillHook) {
        if let PrefillHook::Arrived { request, leg, .. } = hook
            && leg.mode == Mode::Pull
        {
            self.keys.insert((who, request.clone()), leg.key.clone());
        }
    }

    fn decode_hook(&mut self, who: SimProcessId, hook: &DecodeHook) {
        if let DecodeHook::Arrived { leg, .. } = hook
            && leg.mode == Mode::Pull
        {
            self.readers.entry(leg.key.clone()).or_default().insert(who);
        }
    }

    fn prefill_answer(&mut self, who: SimProcessId, answer: &PrefillAnswer) {
        let (PrefillAnswer::SourceFree { request, .. } | PrefillAnswer::Rejected { request, .. }) =
            answer
        else {
            return;
        };
        // A leg that was dispatched twice has a second prompt with the same readers.
        if let Some(key) = self.keys.remove(&(who, request.clone()))
            && !self.keys.values().any(|other| *other == key)
        {
            self.readers.remove(&key);
        }
    }

    /// True if blocks are kept for a reader that is dead, or cut off for good from who keeps them,
    /// or may have given up while it was: it releases nothing, and nothing but time keeps it out.
    fn wait_for_lease(&self, now: CheckContext<'_>) -> bool {
        let held = self.keys.iter().filter(|((who, _), _)| now.state.acts(*who));
        held.filter_map(|((who, _), key)| self.readers.get(key).map(|readers| (who, readers))).any(
            |(who, readers)| {
                let lost = |reader: &SimProcessId| {
                    let pair = BTreeSet::from([who.instance, reader.instance]);
                    self.cut || !now.state.acts(*reader) || now.state.is_broken(&pair)
                };
                readers.iter().any(lost)
            },
        )
    }
}

/// Queues and long prompts take their time, so the bound (silence of a peer + fence + 1 s) counts
/// from the last fault or from the last thing that went forward anywhere, whichever is later. On
/// top comes what a request may have to wait for by design: without a leg, for the pause before it
/// is tried again and for an instance; in pull, for the lease of a reader that is gone for good;
/// for a prompt that ended so long ago that its name is forgotten; for an instance that drains and
/// stands still. The file's own bound, `expect.within`, counts from the start.
#[derive(Debug)]
pub(super) struct EveryRequestEnds {
    limits: LivenessBounds,
    open: BTreeMap<ClientId, OpenRequest>,
    sources: PullSources,
    legs: BTreeMap<LegId, ClientId>,
    progress: Nanos,
    /// The run was late once.
    late: bool,
}

impl EveryRequestEnds {
    pub(super) fn new(limits: LivenessBounds) -> EveryRequestEnds {
        EveryRequestEnds {
            limits,
            open: BTreeMap::new(),
            sources: PullSources::default(),
            legs: BTreeMap::new(),
            progress: Nanos::ZERO,
            late: false,
        }
    }

    fn end_leg(&mut self, leg: LegId) {
        if let Some(open) = self.legs.remove(&leg).and_then(|client| self.open.get_mut(&client)) {
            open.legs = open.legs.saturating_sub(1);
        }
    }

    fn check(&mut self, now: CheckContext<'_>, found: &mut ViolationLog) {
        if self.open.is_empty() {
            return;
        }
        let late = self.limits.within.is_some_and(|within| now.at > within);
        if late && !std::mem::replace(&mut self.late, true) {
            let count = self.open.len();
            found.report(self.id(), now.at, || {
                format!("{count} requests have not ended within the time that the file gives")
            });
        }
        let still =
            now.state.healed.map(|healed| healed.max(self.progress).max(now.state.last_fault));
        let Some(still) = still else { return };
        let id = self.id();
        let limits = self.limits;
        let lease = if self.sources.wait_for_lease(now) { limits.lease } else { Nanos::ZERO };
        let held = lease.max(limits.orphan).max(limits.drain);
        self.open.retain(|client, open| {
            let wait = if open.legs == 0 { limits.wait + limits.breaker } else { held };
            let hangs = now.at > still + limits.end() + wait;
            if hangs {
                found.report(id, now.at, || {
                    let (asked, legs) = (open.asked.as_secs_f64(), open.legs);
                    format!("client {client} of {asked:.6} s has no answer, {legs} legs are open")
                });
            }
            !hangs
        });
    }
}

impl Invariant for EveryRequestEnds {
    fn id(&self) -> InvariantId {
        InvariantId::EveryRequestEnds
    }

    fn wants(&self) -> &'static [ObservationKind] {
        &[
            ObservationKind::Faulted,
            ObservationKind::Asked,
            ObservationKind::Answered,
            ObservationKind::ClientGone,
            ObservationKind::Dispatched,
            ObservationKind::Leg,
            ObservationKind::LegClosed,
            ObservationKind::DecodeHook,
            ObservationKind::DecodeAnswer,
            ObservationKind::PrefillHook,
            ObservationKind::PrefillAnswer,
            ObservationKind::Stepped,
            ObservationKind::Completed,
        ]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>, found: &mut ViolationLog) {
        if let Observation::Faulted { kind, .. } = seen {
            use FaultKind::{HalfOpen, OneWayPermanent, Partition, Pause};
            self.sources.cut |= matches!(kind, HalfOpen | OneWayPermanent | Partition | Pause);
            return;
        }
        self.check_if_still(now, found);
        if matches!(seen, Observation::Completed { outcome: Completion::Failed { .. }, .. }) {
            return;
        }
        self.progress = now.at;
        match seen {
            Observation::Asked { client } => {
                self.open.insert(*client, OpenRequest { asked: now.at, legs: 0 });
            }
            Observation::Answered { client, .. } | Observation::ClientGone { client } => {
                self.open.remove(client);
            }
            Observation::Dispatched { leg, client, .. } => {
                self.legs.insert(*leg, *client);
                self.open.entry(*client).and_modify(|open| open.legs += 1);
            }
            Observation::Leg {
                leg, event: LegEvent::Done { .. } | LegEvent::Failed(_), ..
            } => {
                self.end_leg(*leg);
            }
            Observation::LegClosed { leg } => self.end_leg(*leg),
            Observation::PrefillHook { who, hook } => self.sources.prefill_hook(*who, hook),
            Observation::DecodeHook { who, hook } => self.sources.decode_hook(*who, hook),
            Observation::PrefillAnswer { who, answer } => {
                self.sources.prefill_answer(*who, answer);
            }
            _ => {}
        }
    }

    fn audit(&mut self, now: CheckContext<'_>, found: &mut ViolationLog) {
        self.check(now, found);
    }

    fn finish(&mut self, now: CheckContext<'_>, _at_rest: bool, found: &mut ViolationLog) {
        for (client, open) in std::mem::take(&mut self.open) {
            found.report(self.id(), now.at, || {
                let (asked, legs) = (open.asked.as_secs_f64(), open.legs);
                format!("client {client} of {asked:.6} s has no answer, {legs} legs are open")
            });
        }
    }
}

impl EveryRequestEnds {
    /// Looks closely only after a pause that is long enough for something to hang.
    fn check_if_still(&mut self, now: CheckContext<'_>, found: &mut ViolationLog) {
        if now.at > self.progress + self.limits.end() {
            self.check(now, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{
        D0, InvariantBench, P0, decode_body, decode_leg, finished_answer, key, request,
    };
    use kvferry_engine::core::message::{DecodeLeg, PrefillLeg};

    fn bench() -> InvariantBench {
        let mut bench = InvariantBench::new(InvariantId::EveryRequestEnds);
        bench.see(Observation::Healed);
        bench.asked(1);
        bench.dispatched(1, 5, D0, &decode_body("r"));
        bench
    }

    #[test]
    fn requests_that_go_on_are_no_hang() {
        let mut bench = bench();
        for _ in 0..10 {
            bench.now = bench.now + Nanos::from_secs(9);
            bench.see(Observation::Stepped { who: D0 });
        }
        bench.answered(1, &finished_answer(false));
        bench.finish();
        bench.holds();
    }

    #[test]
    fn a_request_that_stands_still_is_a_hang() {
        let mut bench = bench();
        bench.now = bench.now + Nanos::from_secs(11);
        bench.see(Observation::Stepped { who: D0 });
        bench.fails("client 1 of 0.000000 s has no answer, 1 legs are open");
    }

    #[test]
    fn a_request_that_is_open_at_the_end_is_a_hang() {
        let mut bench = bench();
        bench.finish();
        bench.fails("has no answer");
    }

    fn prompt_arrives(bench: &mut InvariantBench, id: &str) {
        let leg = PrefillLeg::new(key("s"), Mode::Pull);
        let hook = &PrefillHook::Arrived { request: request(id), leg, tokens: 16 };
        bench.see(Observation::PrefillHook { who: P0, hook });
    }

    /// A prompt of P0 is pulled by D0 in another incarnation than the one that D0 has now, or the
    /// same.
    fn granted(lost: bool) -> InvariantBench {
        let mut bench = bench();
        prompt_arrives(&mut bench, "s");
        let leg = DecodeLeg { mode: Mode::Pull, ..decode_leg("s") };
        let hook = &DecodeHook::Arrived { request: request("s"), leg, tokens: 16 };
        bench.see(Observation::DecodeHook { who: D0, hook });
        if lost {
            bench.crash(D0);
        }
        bench.now = bench.now + Nanos::from_secs(20);
        bench
    }

    #[test]
    fn only_the_lease_of_a_reader_that_is_gone_is_waited_for() {
        let mut bench = granted(false);
        bench.see(Observation::Stepped { who: P0 });
        bench.fails("client 1 of 0.000000 s has no answer");
        let mut bench = granted(true);
        bench.see(Observation::Stepped { who: P0 });
        bench.holds();
        bench.now = bench.now + Nanos::from_secs(60);
        bench.see(Observation::Stepped { who: P0 });
        bench.fails("client 1 of 0.000000 s has no answer");
        let mut bench = granted(true);
        let answer = &PrefillAnswer::SourceFree { request: request("s"), failure: None };
        bench.see(Observation::PrefillAnswer { who: P0, answer });
        bench.now = bench.now + Nanos::from_secs(20);
        bench.see(Observation::Stepped { who: P0 });
        bench.fails("client 1 of 0.000000 s has no answer");
    }

    #[test]
    fn a_second_copy_of_a_prompt_that_goes_leaves_the_lease_of_the_first() {
        let mut bench = granted(true);
        prompt_arrives(&mut bench, "copy");
        let answer = &PrefillAnswer::SourceFree { request: request("copy"), failure: None };
        bench.see(Observation::PrefillAnswer { who: P0, answer });
        bench.now = bench.now + Nanos::from_secs(20);
        bench.see(Observation::Stepped { who: P0 });
        bench.holds();
    }

    #[test]
    fn waiting_for_an_instance_is_allowed_for_its_own_time() {
        let mut bench = InvariantBench::new(InvariantId::EveryRequestEnds);
        bench.see(Observation::Healed);
        bench.asked(1);
        bench.now = bench.now + Nanos::from_secs(20);
        bench.see(Observation::Stepped { who: D0 });
        bench.holds();
        bench.now = bench.now + Nanos::from_secs(60);
        bench.see(Observation::Stepped { who: D0 });
        bench.fails("0 legs are open");
    }
}
