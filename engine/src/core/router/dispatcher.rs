//! The instances together with the legs that are in flight on them.

use super::RouterTurn;
use super::health::{FailureSeverity, of_instance, of_pair};
use super::io::{
    InstancePair, LegBody, LegFailure, PrefixEstimate, ProbeId, RouterConfig, RouterEffect,
};
use super::load::ServerLoad;
use super::pairing::{Choice, SelectionRequest};
use super::registry::{InstanceId, RegisteredInstance, Registry};
use super::requests::{PromptState, SampleProgress, SampleState};
use super::room::RefusedLeg;
use super::view::RouterCounters;
use crate::core::error::Failure;
use crate::core::ids::{ClientId, Incarnation, LegId, TransferId, TransferKey};
use crate::core::message::{DecodeLeg, Mode, PrefillLeg, Role, ServedModels};
use crate::core::time::Nanos;
use crate::core::timers::Timers;
use crate::fabric::Endpoint;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Servers are not asked for their load more often.
const LOAD_PERIOD_MIN: Nanos = Nanos::from_ms(1);

/// A leg in flight.
#[derive(Clone, Debug)]
pub(super) struct LegInFlight {
    pub(super) client: ClientId,
    pub(super) prompt: usize,
    /// The sample that it decodes; none for a prefill leg.
    pub(super) sample: Option<usize>,
    pub(super) instance_id: InstanceId,
    /// Of a decode leg: where its KV comes from.
    pub(super) prefill: Option<InstanceId>,
    /// What it was charged to its instance.
    tokens: u64,
    /// Tokens of its prompt that its instance probably has.
    saved: u32,
    /// Legs that its instance had in flight when it was sent.
    ahead: u32,
    /// Of a decode leg that reads by MoRIIO, or between static instances: what is sent when the
    /// prefill has answered.
    held: Option<Box<(InstancePair, LegBody)>>,
}

impl LegInFlight {
    /// A prefill leg for a prompt of a client.
    fn new((client, prompt): (ClientId, usize), choice: Choice, tokens: u64) -> Self {
        let Choice { instance_id, saved, .. } = choice;
        let (sample, prefill, ahead, held) = (None, None, 0, None);
        LegInFlight { client, prompt, sample, instance_id, prefill, tokens, saved, ahead, held }
    }
}

/// Deadlines of the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RouterTimer {
    /// A registration expires, or the time for the legs that were left then is over.
    Expiry(InstanceId),
    /// A suspect instance may take legs again.
    Heal(InstanceId),
    /// An instance that refused legs as busy may take legs again.
    Room(InstanceId),
    /// An instance that did not answer, or whose models are to be read again, is probed again.
    Probe(InstanceId),
    /// Servers are asked for their load.
    Load,
    /// A request waited long enough for an instance.
    Wait(ClientId),
    /// A request is sent again, to whomever.
    Retry(ClientId),
}

/// Sends, cancels and accounts for legs.
#[derive(Debug)]
pub(super) struct LegDispatcher {
    pub(super) config: RouterConfig,
    pub(super) registry: Registry,
    pub(super) timers: Timers<RouterTimer>,
    pub(super) counters: RouterCounters,
    legs: BTreeMap<LegId, LegInFlight>,
    incarnation: Incarnation,
    next_leg: u64,
    next_transfer: u64,
}

impl LegDispatcher {
    pub(super) fn new(config: RouterConfig, incarnation: Incarnation) -> Self {
        LegDispatcher {
            registry: Registry::new(config.instances_max),
            config,
            timers: Timers::default(),
            counters: RouterCounters::default(),
            legs: BTreeMap::new(),
            incarnation,
            next_leg: 0,
            next_transfer: 0,
        }
    }

    /// A transfer id that was never used before, by any incarnation of this router.
    fn new_transfer(&mut self) -> TransferId {
        let id = format!("tx-{:x}-{:x}", self.incarnation.0, self.next_transfer);
        if !planted!("transfer-ids-come-again") {
            self.next_transfer += 1;
        }
        id.into()
    }

    /// Entries about legs that have not ended.
    pub(super) fn entries(&self) -> usize {
        self.legs.len() + self.registry.legs()
    }

    /// Entries about instances, and deadlines of these and of requests that wait.
    pub(super) fn remembered(&self) -> usize {
        self.registry.remembered() + self.timers.len() + self.counters.rejected.len()
    }

    /// A leg in flight.
    pub(super) fn leg(&self, leg: LegId) -> Option<&LegInFlight> {
        self.legs.get(&leg)
    }

    /// True if there are a prefill and a decode, whether or not they take legs now.
    pub(super) fn has_both(&self, now: Nanos) -> bool {
        let has = |role| self.registry.of_role(role).any(|(_, instance)| instance.is_there(now));
        has(Role::Prefill) && has(Role::Decode)
    }

    /// True if the instances for a prompt are there, and are ones that failed it.
    pub(super) fn would_repeat(&self, now: Nanos, client: ClientId, work: &PromptState) -> bool {
        let want = self.want(now, client, work);
        if want.is_direct() {
            let decode = want.choose_alone();
            return decode.is_some_and(|decode| work.blamed.contains(&decode.instance_id));
        }
        let Some(prefill) = want.choose_prefill() else { return false };
        let decode = want.choose_decode(prefill.instance_id);
        decode.is_some_and(|decode| work.failed_by(prefill.instance_id, decode.instance_id))
    }

    fn want<'a>(
        &'a self,
        now: Nanos,
        client: ClientId,
        work: &'a PromptState,
    ) -> SelectionRequest<'a> {
        let (registry, config) = (&self.registry, &self.config);
        let (prompt, model, avoid) = (&work.prompt, work.model.as_deref(), &work.avoid);
        let engines = work.engines.as_deref();
        SelectionRequest { registry, config, now, client, prompt, model, engines, avoid }
    }

    /// Sends one prefill leg and a decode leg for each waiting sample of a prompt under transfer
    /// `id`, or a new one. False if there is no pair of instances to take them; then nothing was
    /// done.
    pub(super) fn dispatch(
        &mut self,
        client: ClientId,
        index: usize,
        work: &mut PromptState,
        id: &mut Option<TransferId>,
        turn: &mut RouterTurn<'_>,
    ) -> bool {
        let want = self.want(turn.now, client, work);
        let Some(prefill) = want.choose_prefill() else { return false };
        let instance_id = prefill.instance_id;
        let Some(first) = want.choose_decode(instance_id) else { return false };
        let id = match id {
            Some(id) => id.clone(),
            None => id.insert(self.new_transfer()).clone(),
        };
        let key = TransferKey { id, prompt: index as u32 };
        let is_waiting = |sample: &&SampleState| sample.progress == SampleProgress::Waiting;
        let waiting = work.samples.iter().filter(is_waiting).count() as u32;
        let tokens = u64::from(work.prompt.tokens - prefill.saved).max(1);
        let leg = LegInFlight::new((client, index), prefill, tokens);
        let pair = self.pair(instance_id, first.instance_id);
        let incarnation =
            self.registry.get(instance_id).map(|prefill| prefill.registration.incarnation);
        let transfer = PrefillLeg {
            key: key.clone(),
            siblings: if planted!("one-receiver-per-prompt") { 1 } else { waiting },
            mode: prefill.mode,
            incarnation,
            moriio: None,
        };
        let body = LegBody::Prefill { transfer, prompt: index as u32 };
        let prefill_leg = self.assign(leg, &work.prompt.prefix);
        self.emit(prefill_leg, pair, body, turn);
        work.prefill = Some(prefill_leg);
        work.source = Some((prefill.instance_id, key.clone()));
        let (mut sibling, mut chosen) = (0, Some(first));
        for sample in 0..work.samples.len() {
            if work.samples[sample].progress != SampleProgress::Waiting {
                continue;
            }
            let next = || self.want(turn.now, client, work).choose_decode(instance_id);
            let next = chosen.take().or_else(next);
            let decode = next.filter(|_| !planted!("samples-go-to-one-decode")).unwrap_or(first);
            let place = DecodeDispatch { client, index, sample, sibling, decode };
            let leg = self.dispatch_decode(place, work, prefill, &key, turn);
            work.samples[sample].progress = SampleProgress::Running(leg);
            work.samples[sample].dispatched += 1;
            sibling += u32::from(!planted!("samples-share-a-number"));
        }
        true
    }

    /// True if all prompts that wait are such that a decode is to compute them alone.
    pub(super) fn are_direct(&self, now: Nanos, client: ClientId, works: &[PromptState]) -> bool {
        let mut waiting = works.iter().filter(|work| work.is_waiting());
        waiting.all(|work| self.want(now, client, work).is_direct())
    }

    /// Sends each waiting sample of a prompt to a decode that computes it alone. False if there is
    /// none for one of them; then that one and those after it wait.
    pub(super) fn dispatch_direct(
        &mut self,
        (client, index): (ClientId, usize),
        work: &mut PromptState,
        turn: &mut RouterTurn<'_>,
    ) -> bool {
        let mut is_first = true;
        for sample in 0..work.samples.len() {
            if work.samples[sample].progress != SampleProgress::Waiting {
                continue;
            }
            let decode = self.want(turn.now, client, work).choose_alone();
            let Some(decode) = decode else { return false };
            self.counters.direct += u64::from(std::mem::take(&mut is_first));
            let transfer = DecodeLeg::alone(self.new_transfer(), decode.mode);
            let (prompt, output) = (index as u32, work.output);
            let nth = sample as u32;
            let body = LegBody::Decode { transfer, prompt, sample: nth, output, params: None };
            let computed = work.prompt.tokens - decode.saved;
            let tokens = (u64::from(computed) + u64::from(output)).max(1);
            let leg = LegInFlight::new((client, index), decode, tokens);
            let leg = LegInFlight { sample: Some(sample), ..leg };
            let leg = self.assign(leg, &work.prompt.prefix);
            let pair = self.pair(decode.instance_id, decode.instance_id);
            self.emit(leg, pair, body, turn);
            work.samples[sample].progress = SampleProgress::Running(leg);
            work.samples[sample].dispatched += 1;
        }
        true
    }

    fn dispatch_decode(
        &mut self,
        place: DecodeDispatch,
        work: &PromptState,
        prefill: Choice,
        key: &TransferKey,
        turn: &mut RouterTurn<'_>,
    ) -> LegId {
        let DecodeDispatch { client, index, sample, sibling, decode } = place;
        let source = &self.registry.instance_mut(prefill.instance_id).registration;
        let transfer = DecodeLeg {
            key: key.clone(),
            sibling,
            mode: prefill.mode,
            prefill: source.engine.clone(),
            control: source.control.clone(),
            incarnation: Some(source.incarnation),
            moriio: None,
        };
        let output = work.output;
        let (prompt, nth) = (index as u32, sample as u32);
        let body = LegBody::Decode { transfer, prompt, sample: nth, output, params: None };
        let pair = self.pair(prefill.instance_id, decode.instance_id);
        let held = prefill.mode == Mode::Pull && !pair.is_native();
        let tokens = (u64::from(work.prompt.tokens) + u64::from(output)).max(1);
        let leg = LegInFlight {
            sample: Some(sample),
            prefill: Some(prefill.instance_id),
            ..LegInFlight::new((client, index), decode, tokens)
        };
        let leg = self.assign(leg, &work.prompt.prefix);
        self.registry.note_pair(prefill.instance_id, decode.instance_id);
        if held {
            let waits = self.legs.get_mut(&leg).expect("just assigned");
            waits.held = Some(Box::new((pair, body)));
            self.registry.instance_mut(decode.instance_id).held += 1;
        } else {
            self.emit(leg, pair, body, turn);
        }
        leg
    }

    fn pair(&mut self, prefill: InstanceId, decode: InstanceId) -> InstancePair {
        let mut party = |instance_id| self.registry.instance_mut(instance_id).party();
        InstancePair { prefill: party(prefill), decode: party(decode) }
    }

    /// Charges a leg to its instance.
    fn assign(&mut self, leg: LegInFlight, prefix: &[u64]) -> LegId {
        let id = LegId(self.next_leg);
        self.next_leg += 1;
        self.registry.assign(leg.instance_id, id, leg.client, leg.tokens);
        self.registry.instance_mut(leg.instance_id).prefixes.touch(prefix);
        self.legs.insert(id, leg);
        id
    }

    fn emit(&mut self, id: LegId, pair: InstancePair, body: LegBody, turn: &mut RouterTurn<'_>) {
        let leg = self.legs.get_mut(&id).expect("only legs in flight are sent");
        let (client, instance_id) = (leg.client, leg.instance_id);
        let instance = self.registry.instance_mut(instance_id);
        leg.ahead = instance.sent_legs().saturating_sub(1) as u32;
        let registration = &instance.registration;
        let expected = PrefixEstimate { incarnation: registration.incarnation, tokens: leg.saved };
        let (engine, http) = (registration.engine.clone(), registration.http.clone());
        let pair = Box::new(pair);
        turn.push(RouterEffect::Dispatch { leg: id, client, engine, http, pair, body, expected });
        self.counters.legs += 1;
    }

    /// Sends a leg that waited for the prefill's answer, if it did; `None` if there is nothing to
    /// read.
    pub(super) fn release_held(
        &mut self,
        id: LegId,
        answer: Option<&Arc<str>>,
        turn: &mut RouterTurn<'_>,
    ) {
        let held = self.legs.get_mut(&id).and_then(|leg| leg.held.take());
        let Some((pair, mut body)) = held.map(|held| *held) else { return };
        if let LegBody::Decode { params, .. } = &mut body {
            *params = answer.cloned();
        }
        self.counters.unread += u64::from(answer.is_none());
        let instance_id = self.legs[&id].instance_id;
        self.registry.instance_mut(instance_id).held -= 1;
        self.emit(id, pair, body, turn);
    }

    /// Takes a leg that ended out of the tables.
    pub(super) fn end(&mut self, id: LegId) -> LegInFlight {
        let leg = self.legs.remove(&id).expect("only legs in flight end");
        if leg.held.is_some() {
            self.registry.instance_mut(leg.instance_id).held -= 1;
        }
        if self.registry.release(leg.instance_id, id, leg.tokens) {
            self.remove(leg.instance_id);
        }
        leg
    }

    /// Ends a leg that the instance has not ended.
    pub(super) fn cancel(&mut self, id: LegId, turn: &mut RouterTurn<'_>) -> LegInFlight {
        if self.legs[&id].held.is_none() {
            turn.push(RouterEffect::CancelLeg { leg: id });
            self.counters.cancelled += 1;
        }
        self.end(id)
    }

    /// Tells the prefill that holds a prompt's KV that nobody else will fetch it.
    pub(super) fn abandon(&mut self, work: &mut PromptState, turn: &mut RouterTurn<'_>) {
        let Some((instance_id, key)) = work.source.take() else { return };
        if planted!("prefill-is-not-told") {
            return;
        }
        if self.registry.get(instance_id).is_some_and(|prefill| prefill.native) {
            let told = self.registry.instance_mut(instance_id).abandoned.add(key);
            told.into_iter().for_each(|command| turn.push(command));
        }
    }

    /// Notes that the instance of a leg in flight served it.
    pub(super) fn succeeded(&mut self, id: LegId, instance_id: InstanceId) {
        let instance = self.registry.instance_mut(instance_id);
        instance.health.succeeded();
        instance.room.served(id, LegId(self.next_leg), instance.legs.len());
        self.timers.cancel(&RouterTimer::Heal(instance_id));
        self.timers.cancel(&RouterTimer::Room(instance_id));
    }

    /// Notes that the instance of a leg in flight refused it as busy.
    pub(super) fn refused(&mut self, now: Nanos, id: LegId, retry_after: Option<Nanos>) {
        let LegInFlight { instance_id, mut ahead, .. } = self.legs[&id];
        let instance = self.registry.instance_mut(instance_id);
        // Legs that were sent after this one may have come first.
        if ahead == 0 {
            ahead = instance.sent_legs().saturating_sub(1) as u32;
        }
        let http = instance.registration.http.clone();
        let is_shared = self
            .registry
            .at(&http)
            .any(|(other, instance)| other != instance_id && !instance.legs.is_empty());
        let next = LegId(self.next_leg);
        let refused = RefusedLeg { leg: id, next, ahead, is_shared, retry_after };
        let room = &mut self.registry.instance_mut(instance_id).room;
        if let Some(until) = room.refused(now, refused, &self.config) {
            self.timers.arm(RouterTimer::Room(instance_id), until);
        }
        self.counters.busy += 1;
    }

    /// Notes that a leg in flight failed.
    pub(super) fn failed(
        &mut self,
        now: Nanos,
        id: LegId,
        instance_id: InstanceId,
        failure: &LegFailure,
    ) {
        let next = LegId(self.next_leg);
        let weight = match of_instance(failure) {
            FailureSeverity::Strike if self.is_of_known_pair(id) => FailureSeverity::Nothing,
            weight => weight,
        };
        let health = &mut self.registry.instance_mut(instance_id).health;
        if let Some(until) = health.failed(now, id, next, weight, &self.config) {
            self.counters.suspicions += 1;
            self.timers.arm(RouterTimer::Heal(instance_id), until);
            self.doubt(now, instance_id);
        }
        if let LegFailure::Instance(why) = failure {
            self.note_kv_result(now, id, Some(why));
        }
    }

    /// True if the leg is of a decode whose prefill, or pair, is known to have failed: what happens to it again
    /// says nothing of the decode alone.
    fn is_of_known_pair(&self, id: LegId) -> bool {
        let Some(&LegInFlight { instance_id, prefill: Some(prefill), .. }) = self.legs.get(&id)
        else {
            return false;
        };
        let named = |decode: &RegisteredInstance| decode.troubles.contains_key(&prefill);
        let failing = |prefill: &RegisteredInstance| {
            prefill.failing.get(&instance_id).is_some_and(|health| health.failures() > 0)
        };
        self.registry.get(instance_id).is_some_and(named)
            || self.registry.get(prefill).is_some_and(failing)
            || self.registry.lacks_host(prefill)
    }

    /// Notes that the decode of a leg in flight got its KV, or why not.
    pub(super) fn note_kv_result(&mut self, now: Nanos, id: LegId, failure: Option<&Failure>) {
        let Some(&LegInFlight { instance_id, prefill: Some(prefill), .. }) = self.legs.get(&id)
        else {
            return;
        };
        let Some(source) = self.registry.get(prefill) else { return };
        let Some(failure) = failure else {
            // An answer may say nothing of a prompt that was computed again; the decode itself
            // does.
            let named = |decode: &RegisteredInstance| decode.troubles.contains_key(&prefill);
            if !source.failing.is_empty() && !self.registry.get(instance_id).is_some_and(named) {
                self.registry.instance_mut(prefill).failing.remove(&instance_id);
            }
            return;
        };
        self.pair_failed(now, id, (prefill, instance_id), of_pair(failure));
    }

    fn pair_failed(
        &mut self,
        now: Nanos,
        id: LegId,
        (prefill, decode): (InstanceId, InstanceId),
        weight: FailureSeverity,
    ) {
        if matches!(weight, FailureSeverity::Nothing) || planted!("failing-pairs-are-not-noted") {
            return;
        }
        let next = LegId(self.next_leg);
        let failing = &mut self.registry.instance_mut(prefill).failing;
        failing.entry(decode).or_default().failed(now, id, next, weight, &self.config);
    }

    /// A decode registered, and may have said which prefills are out of reach. A pair that is known
    /// to be suspect is no more so: the legs that showed it may have told of it, too.
    pub(super) fn heard_of_pairs(&mut self, now: Nanos, decode: InstanceId) {
        let (news, over) = self.registry.troubles(decode);
        for prefill in over {
            self.registry.instance_mut(prefill).failing.remove(&decode);
        }
        for (prefill, failure) in news {
            self.registry.instance_mut(decode).health.clear_strikes();
            let failing = &self.registry.instance_mut(prefill).failing;
            if failing.get(&decode).is_none_or(|health| !health.is_suspect(now)) {
                let next = LegId(self.next_leg);
                self.pair_failed(now, next, (prefill, decode), of_pair(&failure));
            }
        }
    }

    /// A static instance does not say that it is there: when it failed it is to answer a probe again.
    fn doubt(&mut self, now: Nanos, instance_id: InstanceId) {
        let instance = self.registry.instance_mut(instance_id);
        if let Some(period) = self.config.probe.filter(|_| instance.dialects().is_static()) {
            instance.unproven = true;
            self.timers.arm(RouterTimer::Probe(instance_id), now + period);
        }
    }

    /// Asks an instance that has not answered, or has no host, whether it answers, and one that does not
    /// say which models it serves for these.
    pub(super) fn probe(&mut self, instance_id: InstanceId, turn: &mut RouterTurn<'_>) {
        let Some(instance) = self.registry.get(instance_id) else { return };
        let wants_models =
            self.config.models_period.is_some() && instance.registration.models.is_none();
        let (is_unproven, is_doubted) = (instance.unproven, instance.is_doubted());
        let wants_models = wants_models && !instance.lost;
        if is_unproven && !instance.lost || wants_models || is_doubted {
            let (probe, http) = (ProbeId(instance_id.0), instance.registration.http.clone());
            turn.push(RouterEffect::Probe { probe, http, is_unproven, is_doubted, wants_models });
        }
    }

    /// Notes whether an instance answered a probe. True if it takes legs from now on.
    pub(super) fn probed(
        &mut self,
        now: Nanos,
        probe: ProbeId,
        (answers, models): (bool, Option<Arc<ServedModels>>),
    ) -> bool {
        let instance_id = InstanceId(probe.0);
        if self.registry.get(instance_id).is_none_or(|instance| instance.replaced) {
            return false;
        }
        let instance = self.registry.instance_mut(instance_id);
        // What it listed before holds as long as it lists nothing else.
        if let Some(models) = models.filter(|models| models.is_well_formed()) {
            instance.listed_models = Some(models);
            self.registry.note_models(instance_id);
        }
        let instance = self.registry.instance_mut(instance_id);
        let is_proven = answers && instance.unproven;
        if is_proven {
            instance.unproven = false;
            if instance.dialects().is_static() {
                instance.health.registered();
            }
        }
        if answers && instance.lost {
            self.timers.arm(RouterTimer::Expiry(instance_id), now + self.config.stream_grace);
        }
        let instance = self.registry.instance_mut(instance_id);
        let says_models = instance.registration.models.is_some();
        let period = match instance.unproven || instance.is_doubted() {
            true => self.config.probe,
            false => self.config.models_period.filter(|_| !says_models),
        };
        if let Some(period) = period {
            self.timers.arm(RouterTimer::Probe(instance_id), now + period);
        }
        is_proven
    }

    fn load_period(&self) -> Option<Nanos> {
        let period = self.config.load_period.filter(|period| *period > Nanos::ZERO);
        period.map(|period| period.max(LOAD_PERIOD_MIN))
    }

    /// Servers are to be asked for their load, if they are not to be already.
    pub(super) fn await_loads(&mut self, now: Nanos) {
        if let Some(period) = self.load_period() {
            self.timers.arm_if_idle(RouterTimer::Load, now + period);
        }
    }

    /// Asks servers for their load, as long as there are some.
    pub(super) fn ask_loads(&mut self, turn: &mut RouterTurn<'_>) {
        let asked = self.registry.ask_loads(turn.now);
        if !asked.is_empty() {
            self.await_loads(turn.now);
        }
        asked.into_iter().for_each(|http| turn.push(RouterEffect::AskLoad { http }));
    }

    /// A server said how busy it is.
    pub(super) fn loaded(&mut self, now: Nanos, http: &Endpoint, load: ServerLoad) {
        if let Some(period) = self.load_period() {
            self.registry.loaded(now, http, load, period);
        }
    }
}

/// Which decode leg is sent, and to whom.
#[derive(Clone, Copy)]
struct DecodeDispatch {
    client: ClientId,
    index: usize,
    sample: usize,
    sibling: u32,
    decode: Choice,
}
