//! How requests end, and how they are preempted.

use super::io::EngineEffect;
use super::machine::{EngineOutbox, SimEngine};
use super::request::{DeferredEnd, SimRequestPhase};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::message::{DecodeHook, FinishReason, PrefillHook, Role};
use kvferry_engine::core::router::{LegEvent, LegFailure};

impl SimEngine {
    /// Everything was generated: tells the core and the caller.
    pub(super) fn finish(&mut self, slot: u32, out: &mut EngineOutbox) {
        let request = self.requests.get_mut(slot);
        let (leg, reason) = (request.leg, request.reason);
        let recomputed = request.failure.take();
        self.over(slot, reason, out);
        out.push(EngineEffect::Leg { leg, event: LegEvent::Done { reason, recomputed } });
    }

    /// The caller gave up.
    pub(super) fn abort(&mut self, slot: u32, out: &mut EngineOutbox) {
        self.over(slot, FinishReason::Aborted, out);
    }

    /// The engine cannot serve the request.
    pub(super) fn fail(&mut self, slot: u32, failure: Failure, out: &mut EngineOutbox) {
        let leg = self.requests.get(slot).leg;
        self.over(slot, FinishReason::Error, out);
        let event = LegEvent::Failed(LegFailure::Instance(failure));
        out.push(EngineEffect::Leg { leg, event });
    }

    /// The core cannot serve a prefill request; it knows nothing of it any more.
    pub(super) fn reject(&mut self, slot: u32, failure: Failure, out: &mut EngineOutbox) {
        let leg = self.requests.get(slot).leg;
        if self.legs.contains_key(&leg) {
            self.leave(slot);
            let event = LegEvent::Failed(LegFailure::Instance(failure));
            out.push(EngineEffect::Leg { leg, event });
        }
        self.forget(slot, out);
    }

    pub(super) fn execute(&mut self, slot: u32, out: &mut EngineOutbox) {
        match self.requests.get_mut(slot).verdict.take() {
            Some(DeferredEnd::Rejected(failure)) => self.reject(slot, failure, out),
            Some(DeferredEnd::Cancelled) | None => self.abort(slot, out),
        }
    }

    /// Ends a leg and takes its request out of all queues.
    fn leave(&mut self, slot: u32) {
        let request = self.requests.get_mut(slot);
        self.legs.remove(&request.leg);
        match request.phase {
            SimRequestPhase::Waiting => drop(self.waiting.remove(&request.order)),
            SimRequestPhase::Ready => drop(self.ready.remove(&request.order)),
            SimRequestPhase::Running => self.running.retain(|runner| runner.slot != slot),
            SimRequestPhase::Asked
            | SimRequestPhase::Remote
            | SimRequestPhase::Preempted
            | SimRequestPhase::Ended => {}
        }
        request.phase = SimRequestPhase::Ended;
    }

    /// Ends a leg and tells the core. The request stays as long as the core owes an answer: a
    /// prefill's blocks are held for readers, those of a decode that waits are quarantined.
    fn over(&mut self, slot: u32, reason: FinishReason, out: &mut EngineOutbox) {
        let waits = self.requests.get(slot).phase == SimRequestPhase::Remote;
        self.leave(slot);
        let request = self.requests.get_mut(slot);
        let id = request.id.clone();
        match self.config.role {
            Role::Prefill => {
                out.push(PrefillHook::Finished { request: id, reason });
            }
            Role::Decode => {
                out.push(DecodeHook::Finished { request: id, reason });
                if waits {
                    self.groups.quarantine(&request.tables);
                    request.parked = std::mem::take(&mut request.tables);
                } else {
                    self.forget(slot, out);
                }
            }
        }
    }

    /// Nobody is interested in an ended request any more.
    pub(super) fn forget(&mut self, slot: u32, out: &mut EngineOutbox) {
        let request = self.requests.get_mut(slot);
        let (tables, parked) =
            (std::mem::take(&mut request.tables), std::mem::take(&mut request.parked));
        let freed = self.groups.free(tables);
        self.freed(slot, freed, out);
        let freed = self.groups.end_quarantine(parked);
        self.freed(slot, freed, out);
        let request = self.requests.remove(slot);
        self.ids.remove(&request.id);
    }

    /// Takes the blocks of the request that was admitted last, which no step computes.
    pub(super) fn preempt_last(&mut self, out: &mut EngineOutbox) {
        let Some(runner) = self.running.pop() else { return };
        self.front -= 1;
        self.blocked = None;
        let request = self.requests.get_mut(runner.slot);
        request.known = runner.known;
        request.order = self.front;
        let tables = std::mem::take(&mut request.tables);
        match self.config.role {
            Role::Prefill => {
                request.phase = SimRequestPhase::Preempted;
                request.safe_due = true;
                self.groups.quarantine(&tables);
                request.parked = tables;
                out.push(PrefillHook::Preempted { request: request.id.clone() });
            }
            Role::Decode => {
                request.phase = SimRequestPhase::Waiting;
                self.waiting.insert(self.front, runner.slot);
                let freed = self.groups.free(tables);
                self.freed(runner.slot, freed, out);
            }
        }
    }

    /// Nothing reads the blocks of a preempted request any more.
    pub(super) fn preemption_safe(&mut self, slot: u32, out: &mut EngineOutbox) {
        let request = self.requests.get_mut(slot);
        request.safe_due = false;
        let parked = std::mem::take(&mut request.parked);
        if request.phase == SimRequestPhase::Preempted {
            request.phase = SimRequestPhase::Waiting;
            self.waiting.insert(request.order, slot);
            self.blocked = None;
        }
        let freed = self.groups.end_quarantine(parked);
        self.freed(slot, freed, out);
    }
}
