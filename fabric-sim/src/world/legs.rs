//! Legs: the connections between the router and the engines (HTTP in a deployment).

use super::event::SimEnvelope;
use super::{LOCAL, Simulation};
use crate::observation::{Observation, SimProcessId};
use kvferry_engine::core::ids::{ClientId, EngineId, LegId, RequestId, Role};
use kvferry_engine::core::router::{
    LegBody, LegEvent, LegFailure, PrefixEstimate, RouterInput, ServerLoad,
};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::Endpoint;
use kvferry_scenarios::Run;
use kvferry_scenarios::decide::DecisionKey;
use kvferry_scenarios::engine::{EngineInput, PromptContent};
use std::collections::BTreeMap;

/// Legs that the fabric of connections delivers twice get numbers from here on.
const COPIES: u64 = 1 << 63;

/// Legs that have not ended.
#[derive(Debug)]
pub(super) struct SimLegs {
    live: BTreeMap<LegId, SimLeg>,
    /// Instances by where they take legs.
    endpoints: BTreeMap<String, u16>,
    /// Times that a server was asked for its load.
    asked: u64,
}

#[derive(Debug)]
struct SimLeg {
    client: ClientId,
    instance: u16,
    /// The process that took it in.
    incarnation: Option<u32>,
    /// When what was sent last arrives there.
    sent: Nanos,
    /// When what was sent last arrives at the router.
    back: Nanos,
    drawn: u64,
}

impl SimLegs {
    pub(super) fn new(run: &Run) -> SimLegs {
        let endpoint = |(index, spec)| (super::build::http(spec).0.to_string(), index);
        let endpoints = (0..).zip(&run.instances).map(endpoint).collect();
        SimLegs { live: BTreeMap::new(), endpoints, asked: 0 }
    }

    /// Legs that have not ended at an instance.
    fn at(&self, instance: u16) -> u32 {
        self.live.values().filter(|leg| leg.instance == instance).count() as u32
    }

    /// Legs of a client and where they are served.
    pub(super) fn of(&self, client: ClientId) -> Vec<(LegId, u16)> {
        let mine = self.live.iter().filter(|(_, leg)| leg.client == client);
        mine.map(|(id, leg)| (*id, leg.instance)).collect()
    }
}

impl Simulation {
    fn leg_latency(&self, leg: LegId, n: u64) -> Nanos {
        let key = DecisionKey::new(self.run.seed, "leg.latency").actor(leg.0).nth(n);
        self.run.network.control_latency.draw(&key)
    }

    /// How long it takes until others notice that a process died.
    pub(super) fn detection(&self, instance: u16) -> Nanos {
        let n = u64::from(self.instances[instance as usize].incarnation);
        let key =
            DecisionKey::new(self.run.seed, "process.detection").actor(u64::from(instance)).nth(n);
        self.run.network.control_latency.draw(&key) + Nanos::from_us(100)
    }

    pub(super) fn dispatch(
        &mut self,
        leg: LegId,
        client: ClientId,
        engine: &EngineId,
        http: &Endpoint,
        (body, expected): (LegBody, PrefixEstimate),
    ) {
        let Some(instance) = self.legs.endpoints.get(&*http.0).copied() else {
            debug_assert!(false, "{engine} registered with an address that nobody has: {http}");
            return;
        };
        let seen = Observation::Dispatched { leg, client, instance, body: &body, expected };
        self.observer.observe(self.now, &seen);
        let fate = self.observer.leg_sent(self.now, instance, client, leg, &body);
        let at = self.now + self.leg_latency(leg, 0) + fate.delay;
        let incarnation = None;
        let state = SimLeg { client, instance, incarnation, sent: at, back: at, drawn: 1 };
        self.legs.live.insert(leg, state);
        if fate.lost {
            return self.post(at - self.now, SimEnvelope::Broken { leg });
        }
        let input = self.leg_input(leg, client, body);
        if let Some(after) = fate.twice {
            let mut again = input.clone();
            let copy = LegId(leg.0 | COPIES);
            if let EngineInput::Leg { leg, .. } = &mut again {
                *leg = copy;
            }
            let envelope = SimEnvelope::Ask { instance, leg: copy, input: again };
            self.post(at + after - self.now, envelope);
        }
        self.post(at - self.now, SimEnvelope::Ask { instance, leg, input });
    }

    /// True if there is a server at an HTTP address, and it is not paused.
    pub(super) fn answers_http(&self, http: &Endpoint) -> bool {
        let instance = self.legs.endpoints.get(&*http.0);
        let instance = instance.and_then(|at| self.instances.get(usize::from(*at)));
        instance.is_some_and(|it| it.process.is_some() && !it.paused)
    }

    /// A server is asked for its load. Two answers of eight are lost or late, and one is a lie.
    pub(super) fn ask_load(&mut self, http: &Endpoint) {
        let Some(instance) = self.legs.endpoints.get(&*http.0).copied() else { return };
        if self.instances[usize::from(instance)].process.is_none() {
            return;
        }
        let key = DecisionKey::new(self.run.seed, "load").actor(u64::from(instance));
        let key = key.nth(self.legs.asked);
        self.legs.asked += 1;
        let word = |part| key.part(part).get();
        let latency = self.run.network.control_latency.draw(&key.part("latency"));
        let true_load = ServerLoad { running: self.legs.at(instance), ..ServerLoad::default() };
        let (after, load) = match word("fate") % 8 {
            0 => return,
            1 => (latency + Nanos::from_ms(word("late") % 20_000), true_load),
            2 => {
                let lie = |part| (word(part) >> (32 + word(part) % 32)) as u32;
                let (running, waiting) = (lie("running"), lie("waiting"));
                let (queued, kv_cache) = (lie("queued"), lie("kv_cache") as u16);
                (latency, ServerLoad { running, waiting, queued, kv_cache })
            }
            _ => (latency, true_load),
        };
        let input = RouterInput::Load { http: http.clone(), load }.into();
        let incarnation = self.router_incarnation();
        self.post(after, SimEnvelope::Machine { slot: 0, incarnation, input, cause: 0 });
    }

    fn leg_input(&self, leg: LegId, client: ClientId, body: LegBody) -> EngineInput {
        let (LegBody::Prefill { prompt, .. } | LegBody::Decode { prompt, .. }) = &body;
        let asked = self.request(client);
        let content = &asked.prompts[*prompt as usize];
        let content = PromptContent::new(content, self.run.prefix_tokens);
        let rendering = asked.decode_rendering.filter(|_| body.role() == Role::Decode);
        EngineInput::Leg {
            leg,
            request: RequestId::from(format!("c{client}.{prompt}")),
            prompt: match rendering {
                Some(word) => content.rendered(word),
                None => content,
            },
            body,
            stop: asked.stop,
        }
    }

    /// A leg reaches its instance.
    pub(super) fn leg_arrives(&mut self, instance: u16, leg: LegId, input: EngineInput) {
        let who = self.who(instance);
        let Some(input) = self.wait_for_switch(instance, leg, input) else { return };
        if self.instances[instance as usize].process.is_none() {
            return self.leg_broken(leg);
        }
        match self.legs.live.get_mut(&leg) {
            Some(state) => state.incarnation = Some(who.incarnation),
            // Its caller gave up before it came.
            None if leg.0 & COPIES == 0 => return,
            None => {}
        }
        self.engine_input(instance, input);
    }

    /// An engine says something about a leg.
    pub(super) fn leg_event(&mut self, instance: u16, leg: LegId, event: LegEvent) {
        let who = self.who(instance);
        self.observer.observe(self.now, &Observation::Leg { who, leg, event: &event });
        let Some(n) = self.legs.live.get_mut(&leg).map(|state| {
            state.drawn += 1;
            state.drawn
        }) else {
            return;
        };
        let at = self.now + self.leg_latency(leg, n);
        let Some(state) = self.legs.live.get_mut(&leg) else { return };
        state.back = state.back.max(at);
        let (at, client) = (state.back, state.client);
        match event {
            LegEvent::FirstToken => self.first_token(client),
            LegEvent::Done { .. } | LegEvent::Prefilled { .. } | LegEvent::Failed(_) => {
                self.legs.live.remove(&leg);
            }
        }
        self.tell_router(leg, event, at);
    }

    fn tell_router(&mut self, leg: LegId, event: LegEvent, at: Nanos) {
        let input = RouterInput::Leg { leg: Self::router_leg(leg), event }.into();
        let incarnation = self.router_incarnation();
        let envelope = SimEnvelope::Machine { slot: 0, incarnation, input, cause: 0 };
        self.post(at - self.now, envelope);
    }

    /// The router closes the connection of a leg.
    pub(super) fn cancel_leg(&mut self, leg: LegId) {
        let Some(state) = self.legs.live.remove(&leg) else { return };
        self.observer.observe(self.now, &Observation::LegClosed { leg });
        let at = (self.now + self.leg_latency(leg, state.drawn + 1)).max(state.sent);
        let (instance, input) = (state.instance, EngineInput::CancelLeg { leg });
        let incarnation = self.instances[usize::from(instance)].incarnation;
        self.post(at - self.now, SimEnvelope::Engine { instance, incarnation, input });
    }

    /// The router closes all its connections, without a word of its own.
    pub(super) fn cancel_all_legs(&mut self) {
        let legs: Vec<LegId> = self.legs.live.keys().copied().collect();
        legs.into_iter().for_each(|leg| self.cancel_leg(leg));
    }

    /// The connection of the leg that an instance took in last breaks: the engine sees its caller leave,
    /// and the router finds it cut a while later.
    pub(super) fn cut_leg(&mut self, instance: u16, noticed: Nanos) {
        let is_here = |leg: &SimLeg| leg.instance == instance && leg.incarnation.is_some();
        let newest = self.legs.live.iter().rfind(|(_, leg)| is_here(leg));
        let Some((leg, incarnation)) = newest.map(|(id, leg)| (*id, leg.incarnation)) else {
            return;
        };
        let incarnation = incarnation.expect("it was taken in");
        let input = EngineInput::CancelLeg { leg };
        self.post(LOCAL, SimEnvelope::Engine { instance, incarnation, input });
        self.post(noticed, SimEnvelope::Broken { leg });
    }

    /// The router finds the connection of a leg cut.
    pub(super) fn leg_broken(&mut self, leg: LegId) {
        let Some(state) = self.legs.live.remove(&leg) else { return };
        self.observer.observe(self.now, &Observation::LegClosed { leg });
        let at = (self.now + self.leg_latency(leg, state.drawn + 1)).max(state.back);
        self.tell_router(leg, LegEvent::Failed(LegFailure::Connection), at);
    }

    /// A process died, and with it its connections.
    pub(super) fn break_legs(&mut self, who: SimProcessId, after: Nanos) {
        let of_it =
            |leg: &SimLeg| leg.instance == who.instance && leg.incarnation == Some(who.incarnation);
        let mine = self.legs.live.iter().filter(|(_, leg)| of_it(leg));
        let legs: Vec<LegId> = mine.map(|(leg, _)| *leg).collect();
        for leg in legs {
            self.post(after, SimEnvelope::Broken { leg });
        }
    }
}
