//! L1: every request ends within the stated bound after the last fault.

use super::payload_waits::PayloadWaits;
use super::state::freed;
use super::{CheckContext, Invariant, LivenessBounds};
use crate::observation::{
    Observation, ObservationKind, PayloadSight, ReceiverOutcome, SimProcessId,
};
use kvferry_engine::core::dialect::native::Frame;
use kvferry_engine::core::ids::{ClientId, LegId, TransferKey};
use kvferry_engine::core::message::{DecodeHook, Message, Mode, PrefillAnswer};
use kvferry_engine::core::payload::PayloadFailure;
use kvferry_engine::core::router::LegEvent;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::Completion;
use kvferry_scenarios::Run;
use kvferry_scenarios::lists::FaultKind;
use std::collections::{BTreeMap, BTreeSet};

/// A request without an answer.
#[derive(Clone, Copy, Debug)]
struct OpenRequest {
    asked: Nanos,
    /// Legs that have not ended.
    legs: u32,
}

impl OpenRequest {
    fn report(self, now: CheckContext<'_>, client: ClientId) {
        let (asked, legs) = (self.asked.as_secs_f64(), self.legs);
        now.report(|| {
            format!("client {client} of {asked:.6} s has no answer, {legs} legs are open")
        });
    }
}

/// Who may be reading prompts, or is still to say that it does not.
#[derive(Debug, Default)]
struct HeldSources {
    readers: BTreeMap<TransferKey, BTreeSet<SimProcessId>>,
    /// Instances could not reach each other for a while: what a reader gave up then it releases
    /// when both meet again, which may be never.
    cut: bool,
    /// A router died, and decode legs that it had not sent with it.
    is_orphaned: bool,
}

impl HeldSources {
    fn decode_hook(&mut self, who: SimProcessId, hook: &DecodeHook) {
        if let DecodeHook::Arrived { leg, .. } = hook {
            self.readers.entry(leg.key.clone()).or_default().insert(who);
        }
    }

    fn prefill_answer(&mut self, now: CheckContext<'_>, who: SimProcessId, answer: &PrefillAnswer) {
        let Some(request) = freed(answer) else { return };
        // A leg that was dispatched twice has a second prompt with the same readers.
        let mut others =
            now.state.prompts().filter(|((at, other), _)| *at != who || other != request);
        if let Some(prompt) = now.state.prompt(who, request)
            && !others.any(|(_, other)| other.key == prompt.key)
        {
            self.readers.remove(&prompt.key);
        }
    }

    /// True if blocks are kept for a reader that is dead, or cut off for good from who keeps them,
    /// or may have given up while it was: it releases nothing, and nothing but time keeps it out.
    /// In push it is so for a request that has ended, as its decode had the prompt cached and died
    /// before it could say so; `open` has the others. A prompt whose decode leg a router took with it when it died
    /// has no reader.
    fn wait_for_lease(
        &self,
        now: CheckContext<'_>,
        open: &BTreeMap<ClientId, OpenRequest>,
    ) -> bool {
        let legs = open.keys().filter_map(|client| now.state.client(*client));
        let wanted: BTreeSet<_> = legs.flat_map(|it| &it.legs).map(|leg| &leg.key).collect();
        let held = now.state.prompts().filter(|((who, _), _)| now.state.acts(*who));
        held.into_iter().any(|((who, _), prompt)| {
            let lost = |reader: &SimProcessId| {
                let pair = BTreeSet::from([who.instance, reader.instance]);
                let is_gone = !now.state.acts(*reader);
                match prompt.mode {
                    Mode::Pull => self.cut || is_gone || now.state.is_broken(&pair),
                    Mode::Push => is_gone && !wanted.contains(&prompt.key),
                }
            };
            match self.readers.get(&prompt.key) {
                Some(readers) => readers.iter().any(lost),
                None => self.is_orphaned && !wanted.contains(&prompt.key),
            }
        })
    }
}

/// Queues and long prompts take their time, so the bound (silence of a peer + fence + 1 s) counts
/// from the last fault or from the last thing that went forward anywhere, whichever is later. On
/// top comes what a request may have to wait for by design: without a leg, for the pause before it
/// is tried again and for an instance; for the lease of a reader that is gone for good, or
/// that a router which died did not name;
/// for a prompt that ended so long ago that its name is forgotten; for an instance that drains and
/// stands still. The file's own bound, `expect.within`, counts from the start.
#[derive(Debug, Default)]
pub(super) struct EveryRequestEnds {
    limits: LivenessBounds,
    open: BTreeMap<ClientId, OpenRequest>,
    sources: HeldSources,
    payloads: PayloadWaits,
    legs: BTreeMap<LegId, ClientId>,
    progress: Nanos,
}

impl EveryRequestEnds {
    pub(super) fn new(limits: LivenessBounds, run: &Run) -> EveryRequestEnds {
        let payloads = PayloadWaits::new(run);
        EveryRequestEnds { limits, payloads, ..EveryRequestEnds::default() }
    }

    fn payload(&mut self, now: CheckContext<'_>, host: SimProcessId, sight: &PayloadSight<'_>) {
        let late = match *sight {
            PayloadSight::Overdue { stream, receiver, .. } => {
                self.payloads.overdue(now, (stream, receiver))
            }
            PayloadSight::Ended {
                stream,
                receiver,
                outcome: ReceiverOutcome::Missing(PayloadFailure::PeerGone(_)),
                ..
            } => self.payloads.told_late(now, (stream, receiver), self.limits),
            _ => None,
        };
        if let Some(text) = late {
            now.report(|| text);
        }
        self.payloads.follow(now.at, host, sight);
    }

    fn end_leg(&mut self, leg: LegId) {
        if let Some(open) = self.legs.remove(&leg).and_then(|client| self.open.get_mut(&client)) {
            open.legs = open.legs.saturating_sub(1);
        }
    }

    fn check(&mut self, now: CheckContext<'_>) {
        if self.open.is_empty() {
            return;
        }
        if self.limits.within.is_some_and(|within| now.at > within) {
            let count = self.open.len();
            now.report_once("late", || {
                format!("{count} requests have not ended within the time that the file gives")
            });
        }
        let still =
            now.state.healed.map(|healed| healed.max(self.progress).max(now.state.last_fault));
        let Some(still) = still else { return };
        let limits = self.limits;
        let lease =
            if self.sources.wait_for_lease(now, &self.open) { limits.lease } else { Nanos::ZERO };
        let held = lease.max(limits.orphan).max(limits.drain);
        self.open.retain(|client, open| {
            let wait = if open.legs == 0 { limits.wait + limits.breaker } else { held };
            let hangs = now.at > still + limits.end() + wait;
            if hangs {
                open.report(now, *client);
            }
            !hangs
        });
    }
}

impl Invariant for EveryRequestEnds {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[
            Faulted,
            Asked,
            Answered,
            ClientGone,
            Dispatched,
            Leg,
            LegClosed,
            DecodeHook,
            DecodeAnswer,
            PrefillHook,
            PrefillAnswer,
            Stepped,
            Completed,
            FrameArrived,
            Payload,
        ]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        if let Observation::Faulted { kind, .. } = seen {
            use FaultKind::{HalfOpen, OneWayPermanent, Partition, Pause, RouterRestart};
            self.sources.cut |= matches!(kind, HalfOpen | OneWayPermanent | Partition | Pause);
            self.sources.is_orphaned |= *kind == RouterRestart;
            return;
        }
        if let Observation::Payload { host, sight } = seen {
            return self.payload(now, *host, sight);
        }
        if let Observation::FrameArrived { from, to, frame } = seen {
            if matches!(frame, Frame::Data { message: Message::Payload { .. }, .. }) {
                self.payloads.note(now.at, *from, *to);
            }
            return;
        }
        self.check_if_still(now);
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
            Observation::DecodeHook { who, hook } => self.sources.decode_hook(*who, hook),
            Observation::PrefillAnswer { who, answer } => {
                self.sources.prefill_answer(now, *who, answer);
            }
            _ => {}
        }
    }

    fn audit(&mut self, now: CheckContext<'_>) {
        self.check(now);
    }

    fn finish(&mut self, now: CheckContext<'_>, _at_rest: bool) {
        for (client, open) in std::mem::take(&mut self.open) {
            open.report(now, client);
        }
        for (stream, receiver, host) in self.payloads.open() {
            let name = now.name(host.instance);
            now.report(|| format!("receiver {receiver} at {name} of stream {stream} has no end"));
        }
    }
}

impl EveryRequestEnds {
    /// Looks closely only after a pause that is long enough for something to hang.
    fn check_if_still(&mut self, now: CheckContext<'_>) {
        if now.at > self.progress + self.limits.end() {
            self.check(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{
        D0, HASH, InvariantBench, InvariantId, P0, decode_body, decode_leg, finished_answer,
        prefill_leg, request,
    };
    use kvferry_engine::core::message::{DecodeLeg, PrefillHook};

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

    fn prompt_arrives(bench: &mut InvariantBench, id: &str, mode: Mode) {
        let leg = prefill_leg("s", mode);
        let hook =
            &PrefillHook::Arrived { request: request(id), leg, tokens: 16, prompt_hash: HASH };
        bench.see(Observation::PrefillHook { who: P0, hook });
    }

    /// A prompt of P0 is pulled by D0 in another incarnation than the one that D0 has now, or the
    /// same.
    fn granted(lost: bool) -> InvariantBench {
        granted_in(bench(), Mode::Pull, lost)
    }

    fn granted_in(mut bench: InvariantBench, mode: Mode, lost: bool) -> InvariantBench {
        prompt_arrives(&mut bench, "s", mode);
        let leg = DecodeLeg { mode, ..decode_leg("s") };
        let hook =
            &DecodeHook::Arrived { request: request("s"), leg, tokens: 16, prompt_hash: HASH };
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
    fn pushed_prompt_is_waited_for_if_its_request_has_ended_and_its_decode_is_gone() {
        for (ended, lost) in [(true, true), (true, false), (false, true)] {
            let mut bench = bench();
            bench.asked(2);
            bench.dispatched(2, 6, D0, &decode_body("s"));
            let mut bench = granted_in(bench, Mode::Push, lost);
            bench.now = Nanos::ZERO;
            bench.answered(if ended { 2 } else { 1 }, &finished_answer(false));
            bench.now = Nanos::from_secs(20);
            bench.see(Observation::Stepped { who: P0 });
            bench.judges(ended && lost, "has no answer, 1 legs are open");
        }
    }

    #[test]
    fn a_prompt_without_a_reader_is_waited_for_if_a_router_died() {
        for (kind, held) in [(FaultKind::RouterRestart, true), (FaultKind::Crash, false)] {
            let mut bench = bench();
            prompt_arrives(&mut bench, "s", Mode::Pull);
            bench.see(Observation::Faulted { kind, from: None, to: None });
            bench.now = bench.now + Nanos::from_secs(20);
            bench.see(Observation::Stepped { who: P0 });
            bench.judges(held, "client 1 of 0.000000 s has no answer");
        }
    }

    #[test]
    fn a_second_copy_of_a_prompt_that_goes_leaves_the_lease_of_the_first() {
        let mut bench = granted(true);
        prompt_arrives(&mut bench, "copy", Mode::Pull);
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
