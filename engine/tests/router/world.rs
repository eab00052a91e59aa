//! A router with a model beside it that judges every effect.

use kvferry_engine::core::command::ControlCommand;
use kvferry_engine::core::ids::{ClientId, EngineId, Incarnation, LegId, TransferId, TransferKey};
use kvferry_engine::core::message::{FinishReason, Mode, Registration, Role};
use kvferry_engine::core::router::{
    ClientAnswer, ClientRequest, LegBody, LegEvent, LegFailure, RoutedPrompt, Router, RouterConfig,
    RouterEffect, RouterInput, Unavailable,
};
use kvferry_engine::core::{Gauges, Machine, Nanos, Outbox};
use std::collections::{BTreeMap, BTreeSet};

/// What was last said by an engine, and what its legs told.
#[derive(Clone, Debug)]
struct EngineModel {
    registration: Registration,
    expires: Nanos,
    /// Counted failures without a success between.
    failures: u32,
    suspect_until: Nanos,
    /// Legs before this one say nothing new.
    since: LegId,
    /// An answer was of no use since the last success. Three of them are an outage, of which legs that
    /// were sent before say nothing: when it is suspect is the router's to know.
    struck: bool,
}

/// A leg in flight.
#[derive(Clone, Debug)]
pub(crate) struct LiveLeg {
    pub(crate) client: ClientId,
    pub(crate) engine: EngineId,
    /// Of the engine, when the leg was sent.
    incarnation: Incarnation,
    pub(crate) key: TransferKey,
    /// None for prefill.
    pub(crate) sample: Option<u32>,
    pub(crate) streams: bool,
}

pub(crate) struct RouterWorld {
    pub(crate) router: Router,
    pub(crate) now: Nanos,
    pub(crate) config: RouterConfig,
    known: BTreeMap<EngineId, EngineModel>,
    pub(crate) live: BTreeMap<LegId, LiveLeg>,
    pub(crate) ended: Vec<LegId>,
    pub(crate) open: BTreeSet<ClientId>,
    pub(crate) answers: BTreeMap<ClientId, ClientAnswer>,
    pub(crate) gone: BTreeSet<ClientId>,
    /// Transfer ids with the call that made them and its client.
    ids: BTreeMap<TransferId, (u64, ClientId)>,
    dispatched: BTreeMap<(ClientId, u32, u32), u32>,
    /// Samples that the prefill of a key was told of, and decode legs sent.
    siblings: BTreeMap<TransferKey, (u32, u32)>,
    /// Prefill and decode of each attempt.
    pub(crate) pairs: Vec<(EngineId, EngineId)>,
    /// What instances were told on their links.
    pub(crate) told: Vec<ControlCommand>,
    calls: u64,
    next_client: u64,
    draining: bool,
}

/// A registration of an engine whose name starts with its role.
pub(crate) fn registration(
    name: &str,
    incarnation: u64,
    sequence: u64,
    mode: Mode,
) -> Registration {
    Registration {
        sequence,
        tp: 8,
        ..Registration::new(
            name.into(),
            Incarnation(incarnation),
            if name.starts_with('p') { Role::Prefill } else { Role::Decode },
            mode,
            format!("{name}:8000").as_str().into(),
            format!("tcp://{name}:6301").as_str().into(),
        )
    }
}

/// A prompt without known prefix.
pub(crate) fn prompt(tokens: u32) -> RoutedPrompt {
    RoutedPrompt { tokens, prefix: [].into() }
}

impl RouterWorld {
    pub(crate) fn new(config: RouterConfig) -> Self {
        #[cfg(feature = "planted")]
        kvferry_engine::planted::plant_from_environment();
        RouterWorld {
            router: Router::new(config.clone(), Incarnation(7)),
            now: Nanos::ZERO,
            config,
            known: BTreeMap::new(),
            live: BTreeMap::new(),
            ended: Vec::new(),
            open: BTreeSet::new(),
            answers: BTreeMap::new(),
            gone: BTreeSet::new(),
            ids: BTreeMap::new(),
            dispatched: BTreeMap::new(),
            siblings: BTreeMap::new(),
            pairs: Vec::new(),
            told: Vec::new(),
            calls: 0,
            next_client: 0,
            draining: false,
        }
    }

    /// Gives an input and judges the effects.
    pub(crate) fn give(&mut self, input: RouterInput) -> usize {
        let mut out = Outbox::new();
        self.calls += 1;
        self.router.handle(self.now, input, &mut out);
        let effects: Vec<_> = out.drain().collect();
        let count = effects.len();
        for effect in effects {
            match effect {
                RouterEffect::Control(command) => self.told.push(command),
                RouterEffect::Dispatch { leg, client, engine, http, body, .. } => {
                    assert_eq!(http, self.known[&engine].registration.http);
                    self.judge_dispatch(leg, client, engine, &body);
                }
                RouterEffect::Probe { http, .. } => panic!("{http} is probed unasked"),
                RouterEffect::LegCauses { engine, .. } => panic!("{engine} told nothing"),
                RouterEffect::AskLoad { .. } => assert!(self.config.load_period.is_some()),
                RouterEffect::CancelLeg { leg } => self.end(leg),
                RouterEffect::Answer { client, answer } => {
                    assert!(self.open.remove(&client), "{client} has no open request");
                    assert!(self.answers.insert(client, answer).is_none());
                }
            }
        }
        self.judge_tables();
        count
    }

    fn end(&mut self, leg: LegId) {
        assert!(self.live.remove(&leg).is_some(), "{leg} is not in flight");
        self.ended.push(leg);
    }

    fn judge_dispatch(&mut self, leg: LegId, client: ClientId, engine: EngineId, body: &LegBody) {
        assert!(self.open.contains(&client), "leg for {client}, who is not waiting");
        let known = &self.known[&engine];
        assert!(self.now < known.expires, "{engine} has expired");
        assert!(!known.registration.draining, "{engine} is draining");
        assert!(self.now >= known.suspect_until, "{engine} is suspect");
        let instance = &known.registration;
        let (key, sample) = match body {
            LegBody::Prefill { transfer, prompt } => {
                assert_eq!((instance.role, instance.mode), (Role::Prefill, transfer.mode));
                assert_eq!(transfer.key.prompt, *prompt);
                let before = self.siblings.insert(transfer.key.clone(), (transfer.siblings, 0));
                assert!(before.is_none(), "key used twice");
                (&transfer.key, None)
            }
            LegBody::Decode { transfer, prompt, sample, .. } => {
                assert_eq!((instance.role, instance.mode), (Role::Decode, transfer.mode));
                assert_eq!(transfer.key.prompt, *prompt);
                let prefill = self.live.values().find(|leg| leg.key == transfer.key).unwrap();
                assert_eq!((prefill.sample, &prefill.engine), (None, &transfer.prefill));
                let source = &self.known[&transfer.prefill].registration;
                assert_eq!((source.mode, &source.control), (instance.mode, &transfer.control));
                let (_, sent) = self.siblings.get_mut(&transfer.key).unwrap();
                assert_eq!(*sent, transfer.sibling);
                *sent += 1;
                let dispatched = self.dispatched.entry((client, *prompt, *sample)).or_default();
                *dispatched += 1;
                // As many tries again are excused, if their instances had begun anew or left.
                assert!(*dispatched <= 1 + 2 * self.config.retries_max, "too many tries");
                self.pairs.push((transfer.prefill.clone(), engine.clone()));
                (&transfer.key, Some(*sample))
            }
        };
        let maker = *self.ids.entry(key.id.clone()).or_insert((self.calls, client));
        assert_eq!(maker, (self.calls, client), "transfer id {} is not new", key.id);
        let (incarnation, key) = (instance.incarnation, key.clone());
        let new = LiveLeg { client, engine, incarnation, key, sample, streams: false };
        assert!(self.live.insert(leg, new).is_none() && !self.ended.contains(&leg));
    }

    fn judge_tables(&self) {
        assert!(self.live.values().all(|leg| self.open.contains(&leg.client)), "leg left over");
        assert!(self.siblings.values().all(|(told, sent)| told == sent), "siblings miscounted");
        let gauges = self.router.gauges();
        assert_eq!(gauges.transfers as usize, self.open.len());
        assert!(gauges.queued <= self.config.waiting_max + self.config.requests_max);
        let limits = self.config.limits();
        assert!(gauges.entries <= limits.entries && gauges.remembered <= limits.remembered);
        assert_eq!(gauges.entries == 0, self.open.is_empty(), "{gauges:?}");
        let served: BTreeSet<_> = self.live.values().map(|leg| leg.client).collect();
        assert!(served.len() <= self.config.requests_max as usize);
        assert!(served.len() + gauges.queued as usize >= self.open.len(), "a request is stuck");
        let views: Vec<_> = self.router.instances(self.now).collect();
        assert!(views.len() <= self.config.instances_max as usize);
        assert_eq!(views.iter().map(|v| v.legs as usize).sum::<usize>(), self.live.len());
        assert!(views.iter().all(|v| (v.legs == 0) == (v.tokens == 0)));
    }

    /// Registers an engine anew or again.
    pub(crate) fn register(&mut self, registration: Registration) {
        let now = self.now;
        let config = &self.config;
        let lives = if registration.draining { config.drain_max } else { config.expiry };
        let fresh = EngineModel {
            registration: registration.clone(),
            expires: now + lives,
            failures: 0,
            suspect_until: Nanos::ZERO,
            since: LegId(0),
            struck: false,
        };
        let known = self.known.entry(registration.engine.clone()).or_insert(fresh.clone());
        let number = |r: &Registration| (r.incarnation, r.sequence);
        if number(&known.registration) < number(&registration) {
            let same = known.registration.incarnation == registration.incarnation;
            // What left without legs comes back as new.
            let leaves = now >= known.expires || known.registration.draining;
            let place = (&registration.engine, registration.incarnation);
            let idle = self.live.values().all(|leg| (&leg.engine, leg.incarnation) != place);
            if !same || leaves && idle {
                *known = fresh;
            } else {
                known.registration = registration.clone();
                known.expires = fresh.expires;
                if known.failures <= 1 {
                    known.suspect_until = Nanos::ZERO;
                }
            }
        }
        self.give(RouterInput::Register(registration));
    }

    pub(crate) fn request(&mut self, prompts: Vec<RoutedPrompt>, samples: u32) -> ClientId {
        let client = ClientId(self.next_client);
        self.next_client += 1;
        self.open.insert(client);
        let queued = self.router.gauges().queued;
        self.give(RouterInput::Request(ClientRequest {
            client,
            prompts,
            samples,
            output: 16,
            model: None,
            engines: None,
        }));
        assert!(self.router.gauges().queued <= queued.max(self.config.waiting_max));
        if self.draining {
            let draining = ClientAnswer::NoInstance(Unavailable::Draining);
            assert_eq!(self.answers[&client], draining);
        }
        client
    }

    /// The client goes away.
    pub(crate) fn go(&mut self, client: ClientId) {
        if self.open.remove(&client) {
            self.gone.insert(client);
        }
        self.give(RouterInput::Gone { client });
        assert!(!self.answers.contains_key(&client) || !self.gone.contains(&client));
    }

    /// Reports on a leg in flight.
    pub(crate) fn leg(&mut self, leg: LegId, event: LegEvent) {
        let LiveLeg { engine, incarnation, key, streams, sample, .. } = self.live[&leg].clone();
        let next = LegId(self.live.keys().chain(&self.ended).max().unwrap().0 + 1);
        let is_busy = matches!(event, LegEvent::Failed(LegFailure::Busy { .. }));
        // A leg refused as busy is not a try, nor are those of its siblings.
        if is_busy && (sample.is_none() || !streams) {
            self.forget_tries(&key);
        }
        let known = self.known.get_mut(&engine).unwrap();
        match &event {
            LegEvent::FirstToken => {
                self.live.get_mut(&leg).unwrap().streams = sample.is_some();
            }
            LegEvent::Done { .. } | LegEvent::Prefilled { .. } | LegEvent::Failed(_) => {
                self.live.remove(&leg);
                self.ended.push(leg);
            }
        }
        // What becomes of the streams of an incarnation says nothing of the next one.
        let is_of_it = known.registration.incarnation == incarnation;
        match &event {
            _ if !is_of_it => {}
            LegEvent::Failed(LegFailure::Connection) => {
                if !known.struck && (known.failures == 0 || leg >= known.since) {
                    known.failures += 1;
                    known.since = next;
                    known.suspect_until = self.now + self.config.suspicion;
                }
            }
            LegEvent::Failed(_) | LegEvent::Done { reason: FinishReason::Error, .. } => {
                known.struck = true;
            }
            _ => {
                (known.failures, known.struck) = (0, false);
                known.suspect_until = Nanos::ZERO;
            }
        }
        let before: Vec<LegId> = self.attempt(&key);
        let failed = matches!(
            event,
            LegEvent::Failed(_) | LegEvent::Done { reason: FinishReason::Error, .. }
        );
        self.give(RouterInput::Leg { leg, event });
        if failed && !streams && !(sample.is_none() && before.is_empty()) {
            assert!(self.attempt(&key).is_empty(), "siblings of a failed leg go on");
        }
    }

    /// Subtracts the tries of the attempt under a key.
    fn forget_tries(&mut self, key: &TransferKey) {
        let client = self.ids[&key.id].1;
        for leg in self.attempt(key) {
            let sample = self.live[&leg].sample.expect("a decode leg");
            *self.dispatched.get_mut(&(client, key.prompt, sample)).unwrap() -= 1;
        }
    }

    /// Decode legs without a token under a key.
    fn attempt(&self, key: &TransferKey) -> Vec<LegId> {
        let running = |leg: &LiveLeg| leg.key == *key && !leg.streams && leg.sample.is_some();
        self.live.iter().filter(|(_, leg)| running(leg)).map(|(id, _)| *id).collect()
    }

    /// Ends a leg well.
    pub(crate) fn done(&mut self, leg: LegId) {
        self.leg(leg, LegEvent::Done { reason: FinishReason::Length, recomputed: None });
    }

    /// The legs of a client: prefill or decode.
    pub(crate) fn legs(&self, client: ClientId, role: Role) -> Vec<LegId> {
        let wanted =
            |leg: &LiveLeg| leg.client == client && leg.sample.is_none() == (role == Role::Prefill);
        self.live.iter().filter(|(_, leg)| wanted(leg)).map(|(id, _)| *id).collect()
    }

    /// News of a leg that ended changes nothing.
    pub(crate) fn late(&mut self, leg: LegId, event: LegEvent) {
        self.give(RouterInput::Tick);
        let before: Gauges = self.router.gauges();
        assert_eq!(self.give(RouterInput::Leg { leg, event }), 0, "a late event had effects");
        assert_eq!(self.router.gauges(), before);
    }

    /// Takes no new requests from now on.
    pub(crate) fn drain(&mut self) {
        self.draining = true;
        self.give(RouterInput::Drain);
    }

    /// Lets time pass, with a tick at each deadline.
    pub(crate) fn advance(&mut self, span: Nanos) {
        let until = self.now + span;
        while let Some(due) = self.router.deadline().filter(|due| *due <= until) {
            self.now = self.now.max(due);
            let before = self.router.deadline();
            self.give(RouterInput::Tick);
            assert!(self.router.deadline() != before, "a tick at the deadline does not move it");
        }
        self.now = until;
    }

    /// Everything ends: legs that are in flight well, what waits by its timeout.
    pub(crate) fn finish(&mut self) {
        while !self.open.is_empty() {
            while let Some(leg) = self.live.keys().next().copied() {
                self.done(leg);
            }
            self.advance(self.config.wait_max);
        }
        self.judge_tables();
        let answered: BTreeSet<_> = self.answers.keys().copied().collect();
        assert_eq!(answered.len() + self.gone.len(), self.next_client as usize);
        assert!(answered.is_disjoint(&self.gone));
        assert!(self.live.is_empty());
        self.advance(self.config.expiry + self.config.drain_max + self.config.stream_grace);
        assert_eq!(self.router.gauges().peers, 0, "all registrations have expired");
        assert_eq!(self.router.deadline(), None, "a timer is left");
    }
}
