//! A request from its arrival to its one answer.

use super::dispatcher::{LegInFlight, RouterTimer};
use super::io::{
    ClientAnswer, ClientRequest, LeaveReason, LegEvent, LegFailure, RouterEffect, Unavailable,
};
use super::queue::QueueLine;
use super::registry::InstanceId;
use super::requests::{RouterRequest, SampleProgress};
use super::{Router, RouterTurn};
use crate::core::error::Failure;
use crate::core::ids::{ClientId, LegId};
use crate::core::message::FinishReason;
use crate::core::time::Nanos;
use std::sync::Arc;

/// Shortest pause of a request with several samples after one of them was refused as busy.
const BUSY_PAUSE_MIN: Nanos = Nanos::from_ms(20);

impl Router {
    /// Takes a new request in.
    pub(super) fn request(&mut self, request: ClientRequest, turn: &mut RouterTurn<'_>) {
        let client = request.client;
        assert!(!self.requests.contains_key(&client), "client {client} has a request already");
        let open_max = self.dispatcher.config.open_max.map_or(usize::MAX, |max| max as usize);
        let refuse = if self.draining {
            Some(ClientAnswer::NoInstance(Unavailable::Draining))
        } else if self.requests.len() >= open_max {
            self.dispatcher.counters.shed += 1;
            Some(ClientAnswer::Overload)
        } else if let Some(unserved) = self.unserved(turn.now, request.model.as_deref()) {
            Some(unserved)
        } else {
            match RouterRequest::new(request, self.dispatcher.config.legs_max) {
                Ok(request) => {
                    self.budget.came(turn.now);
                    self.requests.insert(client, request);
                    None
                }
                Err(why) => Some(ClientAnswer::Failed(LegFailure::Request(why.into()))),
            }
        };
        if let Some(answer) = refuse {
            turn.push(RouterEffect::Answer { client, answer });
        } else if self.is_next(client) && self.may_start() && self.dispatch(client, turn) {
        } else if self.waits() < self.dispatcher.config.waiting_max as usize {
            self.enqueue(turn.now, client);
        } else if self.dispatcher.has_both(turn.now) {
            self.dispatcher.counters.shed += 1;
            self.finish(client, Some(ClientAnswer::Overload), turn);
        } else {
            let why = self.dispatcher.registry.unavailable(turn.now, None);
            self.finish(client, Some(ClientAnswer::NoInstance(why)), turn);
        }
    }

    /// Returns the answer for a request whose model nothing serves, so that waiting cannot help.
    fn unserved(&mut self, now: Nanos, model: Option<&str>) -> Option<ClientAnswer> {
        let registry = &self.dispatcher.registry;
        let answer = match registry.without_model(now, model) {
            Some(served) => ClientAnswer::NoModel(served),
            // A prompt that a decode computes alone needs no prefill.
            None if self.dispatcher.config.direct_below > 0 => return None,
            None => {
                let (missing, served) = registry.without_role(now, model)?;
                ClientAnswer::NoRole { missing, served }
            }
        };
        self.dispatcher.counters.unknown_models += 1;
        Some(answer)
    }

    /// Where a request waits.
    fn line(&self, client: ClientId) -> QueueLine {
        let Some(work) = self.requests[&client].works.first() else { return QueueLine::default() };
        let model = work.model.as_ref();
        let is_listed = || model.is_some_and(|it| self.dispatcher.registry.lists(it));
        self.waiting.line(model, work.engines.as_ref(), is_listed)
    }

    /// True if nobody waits where a request would.
    fn is_next(&self, client: ClientId) -> bool {
        self.waiting.len() == 0 || self.waiting.is_free(&self.line(client))
    }

    /// Requests that wait for an instance, or before they are sent again.
    pub(super) fn waits(&self) -> usize {
        self.waiting.len() + self.paused.len()
    }

    fn may_start(&self) -> bool {
        self.active < self.dispatcher.config.requests_max
    }

    /// Sends the waiting legs of a request; false if some of them have no instance.
    fn dispatch(&mut self, client: ClientId, turn: &mut RouterTurn<'_>) -> bool {
        let request = self.requests.get_mut(&client).expect("only known requests are sent");
        let (mut id, mut all_sent) = (None, true);
        let are_direct = self.dispatcher.are_direct(turn.now, client, &request.works);
        for (index, work) in request.works.iter_mut().enumerate() {
            if !work.is_waiting() {
                continue;
            }
            let is_sent = match are_direct {
                true => self.dispatcher.dispatch_direct((client, index), work, turn),
                false => self.dispatcher.dispatch(client, index, work, &mut id, turn),
            };
            if !is_sent {
                all_sent = false;
                break;
            }
        }
        let begins =
            !request.started && request.works.iter().any(|work| work.legs().next().is_some());
        if begins {
            request.started = true;
            self.active += 1;
        }
        if all_sent {
            self.unqueue(client);
        }
        all_sent
    }

    fn enqueue(&mut self, now: Nanos, client: ClientId) {
        self.unpause(client);
        if self.requests[&client].ticket.is_some() {
            return;
        }
        let line = self.line(client);
        let request = self.requests.get_mut(&client).expect("only known requests wait");
        let is_new = !request.started || planted!("retries-wait-behind-new-requests");
        let position = (is_new, self.next_ticket);
        self.next_ticket += 1;
        request.ticket = Some((line.clone(), position));
        self.waiting.add(line, position, client);
        let (tried, config) = (request.tried, &self.dispatcher.config);
        let wait = match request.started {
            false => config.wait_max,
            true if !self.dispatcher.has_both(now) => config.retry_wait_max,
            // They take nothing for as long as its own pause, or are tried by another request.
            true => config.wait_max + config.pause(tried),
        };
        let until = request.busy_until.map_or(Nanos::MAX, |until| until.max(now));
        self.dispatcher.timers.arm(RouterTimer::Wait(client), until.min(now + wait));
    }

    fn unpause(&mut self, client: ClientId) {
        if self.paused.remove(&client) {
            self.dispatcher.timers.cancel(&RouterTimer::Retry(client));
        }
    }

    /// A request waits for nothing any more.
    fn unqueue(&mut self, client: ClientId) {
        self.unpause(client);
        let request = self.requests.get_mut(&client).expect("only known requests wait");
        if let Some((line, position)) = request.ticket.take() {
            self.waiting.remove(&line, position);
            self.dispatcher.timers.cancel(&RouterTimer::Wait(client));
        }
    }

    /// Sends waiting requests, oldest first, as long as there are instances for them.
    pub(super) fn pump(&mut self, turn: &mut RouterTurn<'_>) {
        // Each line is looked at for itself, against all instances, but not while none takes legs.
        let needed = self.needed_roles();
        if self.waiting.len() == 0 || !self.dispatcher.registry.any_takes(turn.now, needed) {
            return;
        }
        let mut firsts = self.waiting.firsts();
        while let Some(((new, _), (line, client))) = firsts.pop_first() {
            if new && !self.may_start() {
                return;
            }
            if self.dispatch(client, turn)
                && let Some((position, next)) = self.waiting.first(&line)
            {
                firsts.insert(position, (line, next));
            }
        }
    }

    /// A request waited too long.
    pub(super) fn gave_up(&mut self, client: ClientId, turn: &mut RouterTurn<'_>) {
        if !self.requests.contains_key(&client) || self.waits_for_host(client, turn.now) {
            return;
        }
        let request = &self.requests[&client];
        let model = request.works.first().and_then(|work| work.model.clone());
        let is_for_room = matches!(request.cause, None | Some(LegFailure::Busy { .. }));
        if is_for_room
            && request.has_legs()
            && self.dispatcher.registry.is_full(turn.now, model.as_deref())
        {
            return self.renew_wait(turn.now, client);
        }
        let answer = if let Some(cause) = &request.cause {
            ClientAnswer::Failed(cause.clone())
        } else if self.dispatcher.registry.is_full(turn.now, model.as_deref()) {
            ClientAnswer::Failed(LegFailure::Busy { retry_after: None })
        } else if let Some(unserved) = self.unserved(turn.now, model.as_deref()) {
            unserved
        } else {
            let registry = &self.dispatcher.registry;
            match registry.only_misfits(model.as_deref()) {
                Some(why) => ClientAnswer::Misfit(why.clone()),
                None => ClientAnswer::NoInstance(registry.unavailable(turn.now, model.as_deref())),
            }
        };
        self.finish(client, Some(answer), turn);
    }

    /// True if what waits of a request would go to instances that failed it.
    fn would_repeat(&self, now: Nanos, client: ClientId) -> bool {
        let works = self.requests[&client].works.iter().filter(|work| work.is_waiting());
        let mut works = works.filter(|work| work.has_failed());
        works.any(|work| self.dispatcher.would_repeat(now, client, work))
    }

    /// Sends what waits of a request that failed: at once to others, to the same instances after a
    /// pause.
    fn send_again(&mut self, client: ClientId, turn: &mut RouterTurn<'_>) {
        let pause = self.dispatcher.config.pause(self.requests[&client].tried);
        if pause > Nanos::ZERO && self.would_repeat(turn.now, client) {
            self.unqueue(client);
            self.paused.insert(client);
            self.dispatcher.timers.arm(RouterTimer::Retry(client), turn.now + pause);
        } else if !self.dispatch(client, turn) {
            self.enqueue(turn.now, client);
        }
    }

    /// The pause of a request is over.
    pub(super) fn retry(&mut self, client: ClientId, turn: &mut RouterTurn<'_>) {
        if !self.dispatch(client, turn) {
            self.enqueue(turn.now, client);
        }
    }

    /// An instance has come: requests that it has not failed wait no longer.
    pub(super) fn wake(&mut self, turn: &mut RouterTurn<'_>) {
        let paused: Vec<ClientId> = self.paused.iter().copied().collect();
        for client in paused {
            if !self.would_repeat(turn.now, client) {
                // If there is none for it now, it goes on waiting.
                let _sent = self.dispatch(client, turn);
            }
        }
    }

    /// Ends a request: cancels its legs, forgets it, and answers if there is someone to answer.
    pub(super) fn finish(
        &mut self,
        client: ClientId,
        answer: Option<ClientAnswer>,
        turn: &mut RouterTurn<'_>,
    ) {
        if !self.requests.contains_key(&client) {
            return;
        }
        self.unqueue(client);
        let mut request = self.requests.remove(&client).expect("just seen");
        for leg in request.works.iter().flat_map(|work| work.legs()) {
            self.dispatcher.cancel(leg, turn);
        }
        for work in request.works.iter_mut().filter(|work| !work.is_done()) {
            self.dispatcher.abandon(work, turn);
        }
        self.active -= u32::from(request.started && !planted!("requests-stay-active"));
        if let Some(answer) = answer {
            if let ClientAnswer::Finished { .. } = answer {
                self.budget.served(turn.now);
            }
            turn.push(RouterEffect::Answer { client, answer });
        }
    }

    /// Takes news of a leg.
    pub(super) fn leg_event(&mut self, id: LegId, event: LegEvent, turn: &mut RouterTurn<'_>) {
        let Some(leg) = self.dispatcher.leg(id) else {
            self.dispatcher.counters.late += 1;
            return;
        };
        let (instance_id, is_prefill) = (leg.instance_id, leg.sample.is_none());
        match event {
            LegEvent::FirstToken => {
                self.dispatcher.succeeded(id, instance_id);
                self.first_token(id);
            }
            LegEvent::Prefilled { params } if is_prefill => {
                self.dispatcher.succeeded(id, instance_id);
                self.prefilled(id, Some(&params), turn);
            }
            // Said of another leg than a prefill's it is as if nothing had been recomputed.
            LegEvent::Prefilled { .. } => {
                let reason = FinishReason::Length;
                self.leg_event(id, LegEvent::Done { reason, recomputed: None }, turn);
            }
            LegEvent::Done { reason: FinishReason::Length | FinishReason::Stop, recomputed } => {
                self.dispatcher.succeeded(id, instance_id);
                self.dispatcher.note_kv_result(turn.now, id, recomputed.as_ref());
                self.done(id, recomputed, turn);
            }
            LegEvent::Done { recomputed, .. } => {
                let ended = if is_prefill { Failure::PrefillEnded } else { Failure::Cancelled };
                let failure = LegFailure::Instance(recomputed.unwrap_or(ended));
                self.failed(id, failure, turn);
            }
            LegEvent::Failed(failure) => self.failed(id, failure, turn),
        }
    }

    fn first_token(&mut self, id: LegId) {
        let Some(&LegInFlight { client, prompt, sample: Some(sample), .. }) =
            self.dispatcher.leg(id)
        else {
            return;
        };
        let request = self.requests.get_mut(&client).expect("a leg has a request");
        if !planted!("streams-are-tried-again") {
            request.works[prompt].samples[sample].progress = SampleProgress::Streaming(id);
        }
    }

    /// A prefill leg ended well; decodes that waited for its answer go.
    fn prefilled(&mut self, id: LegId, params: Option<&Arc<str>>, turn: &mut RouterTurn<'_>) {
        let LegInFlight { client, prompt, .. } = self.dispatcher.end(id);
        let request = self.requests.get_mut(&client).expect("a leg has a request");
        let work = &mut request.works[prompt];
        work.prefill = None;
        for leg in work.legs() {
            self.dispatcher.release_held(leg, params, turn);
        }
    }

    fn done(&mut self, id: LegId, recomputed: Option<Failure>, turn: &mut RouterTurn<'_>) {
        let Some(&LegInFlight { client, prompt, sample: Some(sample), .. }) =
            self.dispatcher.leg(id)
        else {
            return self.prefilled(id, None, turn);
        };
        self.dispatcher.end(id);
        let request = self.requests.get_mut(&client).expect("a leg has a request");
        let work = &mut request.works[prompt];
        work.samples[sample].progress = SampleProgress::Done;
        work.recomputed |= recomputed.is_some();
        if work.is_done() {
            // Nobody wants its KV any more: the decode computed it itself, or had it cached. That a
            // prefill which ends meanwhile need not keep it the decode says, too, if it lives.
            let running = work.prefill.take();
            if let Some(prefill) = running {
                self.dispatcher.cancel(prefill, turn);
            }
            let is_early = running.is_some() && !planted!("cached-prompts-are-not-abandoned");
            if work.recomputed || is_early {
                self.dispatcher.abandon(work, turn);
            }
        }
        request.open -= 1;
        if request.recomputed.is_none() {
            request.recomputed = recomputed;
        }
        if request.open == 0 {
            let recomputed = request.recomputed.take();
            self.finish(client, Some(ClientAnswer::Finished { recomputed }), turn);
        } else {
            self.renew_wait(turn.now, client);
        }
    }

    fn failed(&mut self, id: LegId, failure: LegFailure, turn: &mut RouterTurn<'_>) {
        let instance_id = self.dispatcher.leg(id).expect("checked by the caller").instance_id;
        if let LegFailure::Busy { retry_after } = failure {
            self.dispatcher.refused(turn.now, id, retry_after);
        }
        self.dispatcher.failed(turn.now, id, instance_id, &failure);
        let leg = self.dispatcher.end(id);
        self.fail_over(leg, failure, turn);
    }

    /// Cancels the other legs of the attempt that `leg` belonged to and tries again, if that can
    /// still be done unseen; else the request has failed.
    fn fail_over(&mut self, leg: LegInFlight, failure: LegFailure, turn: &mut RouterTurn<'_>) {
        let is_excused = self.is_excused(&leg, &failure);
        let LegInFlight { client, prompt, sample, instance_id, prefill, .. } = leg;
        let request = self.requests.get_mut(&client).expect("a leg has a request");
        let work = &mut request.works[prompt];
        let mut streamed = false;
        let is_busy = matches!(failure, LegFailure::Busy { .. });
        let is_try = !is_busy && !is_excused;
        match sample {
            None => {
                work.prefill = None;
                // Every sample that was sent has the KV, or went without it.
                if !work.needs_prefill() {
                    return;
                }
            }
            Some(sample) => {
                let state = &mut work.samples[sample];
                streamed = matches!(state.progress, SampleProgress::Streaming(_));
                state.progress = SampleProgress::Waiting;
                state.dispatched -= u32::from(!is_try);
                if let (LegFailure::Instance(_), Some(prefill)) = (&failure, prefill) {
                    work.avoid(prefill);
                }
            }
        }
        if !is_busy {
            work.blame(instance_id, prefill, &failure);
        }
        if let Some(prefill) = work.prefill.take()
            && !planted!("other-leg-is-not-cancelled")
        {
            self.dispatcher.cancel(prefill, turn);
        }
        self.dispatcher.abandon(work, turn);
        let mut exhausted = false;
        for sample in &mut work.samples {
            if let SampleProgress::Running(leg) = sample.progress {
                self.dispatcher.cancel(leg, turn);
                sample.progress = SampleProgress::Waiting;
                sample.dispatched -= u32::from(!is_try);
            }
            if sample.progress == SampleProgress::Waiting && is_try {
                let retries = self.dispatcher.config.retries_max;
                let sent = sample.dispatched + u32::from(planted!("one-retry-less"));
                exhausted |= sent > retries && !planted!("retries-without-limit");
            }
        }
        if streamed || exhausted || failure.is_final() {
            return self.finish(client, Some(ClientAnswer::Failed(failure)), turn);
        }
        if is_busy {
            return self.find_room(client, failure, turn);
        }
        let share = self.dispatcher.config.retry_share;
        let share = share.filter(|_| is_try && !planted!("retries-have-no-budget"));
        if share.is_some_and(|share| !self.budget.take(turn.now, self.requests.len(), share)) {
            self.dispatcher.counters.refused_retries += 1;
            return self.finish(client, Some(ClientAnswer::Failed(failure)), turn);
        }
        let request = self.requests.get_mut(&client).expect("a leg has a request");
        request.cause = Some(failure);
        request.busy_until = None;
        request.tried += 1;
        request.excused += u32::from(is_excused);
        self.dispatcher.counters.retries += 1;
        self.dispatcher.counters.excused += u64::from(is_excused);
        self.send_again(client, turn);
    }

    /// Retries a request after an instance refused one of its legs as busy, or makes it wait for
    /// room until its time is over. A request whose prompts have several samples pauses first: the
    /// refusal ended all samples, and room for one is not room for all.
    fn find_room(&mut self, client: ClientId, busy: LegFailure, turn: &mut RouterTurn<'_>) {
        let wait_max = self.dispatcher.config.wait_max;
        let request = self.requests.get_mut(&client).expect("a leg has a request");
        let until = *request.busy_until.get_or_insert(turn.now + wait_max);
        request.cause = Some(busy.clone());
        let has_several = request.works.iter().any(|work| work.samples.len() > 1);
        // Another instance may have room even if the time is over.
        if !has_several && self.dispatch(client, turn) {
            return;
        }
        let request = self.requests.get_mut(&client).expect("a leg has a request");
        if turn.now >= until && !request.has_legs() {
            return self.finish(client, Some(ClientAnswer::Failed(busy)), turn);
        }
        if has_several {
            let until = until.max(turn.now);
            request.tried += 1;
            let pause = self.dispatcher.config.pause(request.tried).max(BUSY_PAUSE_MIN);
            self.unqueue(client);
            self.paused.insert(client);
            self.dispatcher.timers.arm(RouterTimer::Retry(client), (turn.now + pause).min(until));
        } else {
            self.enqueue(turn.now, client);
        }
    }

    /// Gives a request that is served in rounds, since the instances have no room for all of it at
    /// once, time for the next round.
    fn renew_wait(&mut self, now: Nanos, client: ClientId) {
        let request = self.requests.get_mut(&client).expect("only known requests wait");
        let is_for_room = matches!(request.cause, None | Some(LegFailure::Busy { .. }));
        if is_for_room {
            request.busy_until = None;
            if request.ticket.is_some() {
                let until = now + self.dispatcher.config.wait_max;
                self.dispatcher.timers.arm(RouterTimer::Wait(client), until);
            }
        }
    }

    /// Fails the legs of an instance over that takes no more; streams only if told so.
    pub(super) fn abandon(
        &mut self,
        instance_id: InstanceId,
        streams: bool,
        reason: LeaveReason,
        turn: &mut RouterTurn<'_>,
    ) {
        let Some(instance) = self.dispatcher.registry.get(instance_id) else { return };
        let legs: Vec<LegId> = instance.legs.keys().copied().collect();
        for id in legs {
            // Failing one leg over may have cancelled others of the list.
            let Some(leg) = self.dispatcher.leg(id) else { continue };
            if streams || !self.is_streaming(leg) {
                let leg = self.dispatcher.cancel(id, turn);
                self.fail_over(leg, LegFailure::Left(reason), turn);
            }
        }
    }

    fn is_streaming(&self, leg: &LegInFlight) -> bool {
        leg.sample.is_some_and(|sample| {
            let request = &self.requests[&leg.client];
            matches!(
                request.works[leg.prompt].samples[sample].progress,
                SampleProgress::Streaming(_)
            )
        })
    }
}
