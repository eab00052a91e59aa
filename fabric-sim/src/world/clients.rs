//! Clients and the oracle that follows their requests to the end.

use super::Simulation;
use super::event::SimEvent;
use super::process::SimInstance;
use crate::observation::Observation;
use kvferry_engine::core::ids::{ClientId, EngineId};
use kvferry_engine::core::message::Role;
use kvferry_engine::core::router::{self, ClientAnswer, ClientRequest, RouterInput};
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::Run;
use kvferry_scenarios::decide::{decide, kind};
use kvferry_scenarios::run::{WorkloadPrompt, WorkloadRequest};

/// How a request ended. *Unknown*: its caller is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ClientOutcome {
    Finished,
    Failed,
    Unknown,
}

/// Requests of the world's own for which the router chooses, sent one after another, at least: the second one may
/// meet what the first one left.
const PROBES: usize = 2;

/// Probes for each pair: the first may meet a queue pair that died while nobody used it, the last is
/// as fast as in a fresh fleet.
const ROUNDS: usize = 2;

/// Tokens of their prompts, at most.
const PROBE_TOKENS: u64 = 64;

const PROBE: u64 = kind("liveness.probe");

/// All requests, by their client number.
#[derive(Debug)]
pub(super) struct Clients {
    states: Vec<SimClient>,
    /// Requests of the workload; those with larger numbers are probes.
    own: usize,
    /// What a probe asks for; all are alike but for their text.
    probe: WorkloadRequest,
    /// Sessions that were dead when the first of them came.
    dead: usize,
    /// Prefills and decodes of the core that fit: the last probes go to one of these pairs each.
    /// None before the first probe.
    pairs: Option<Vec<(u16, u16)>>,
    /// Probes are for one pair each only.
    pairs_only: bool,
    /// Probes that took the fast path.
    pub(super) probes_fast: u64,
    /// The next to arrive.
    next: usize,
    /// Requests that arrived and have not ended.
    pub(super) open: usize,
}

#[derive(Clone, Debug, Default)]
struct SimClient {
    arrived: bool,
    first_token: Option<Nanos>,
    end: Option<ClientOutcome>,
    /// The prefill and the decode that alone may serve it.
    pair: Option<(u16, u16)>,
    /// When it was sent, of a probe, and the operations that had been posted until then.
    asked: Nanos,
    posted_before: u64,
}

impl Clients {
    /// The clients of a run; with `pairs_only` none of the workload, and a probe for each pair.
    pub(super) fn new(run: &Run, pairs_only: bool) -> Clients {
        let own = if pairs_only { 0 } else { run.requests.len() };
        let states = vec![SimClient::default(); own];
        let (pairs, probe, dead, probes_fast) = (None, probe(run), 0, 0);
        Clients { states, own, probe, dead, pairs, pairs_only, probes_fast, next: 0, open: 0 }
    }

    /// The requests that these clients send, probes apart.
    fn workload<'a>(&self, run: &'a Run) -> &'a [WorkloadRequest] {
        &run.requests[..self.own]
    }

    /// True if every request of the workload has arrived.
    pub(super) fn all_arrived(&self) -> bool {
        self.next == self.own
    }

    /// Probes for which the router chooses the instances: as many as there are pairs, because all but
    /// one of them may be found not to work, and as there are dead sessions, because an instance that
    /// tries no operation twice may find one of them each time.
    fn routed_probes(&self, instances: &[SimInstance]) -> usize {
        if self.pairs_only {
            return 0;
        }
        let of = |role| instances.iter().filter(|one| one.spec.role == role).count();
        let pairs = of(Role::Prefill) * of(Role::Decode);
        pairs.max(PROBES) + self.dead
    }

    /// True if all probes have arrived: those that are routed, then [`ROUNDS`] for each pair.
    pub(super) fn all_probed(&self, instances: &[SimInstance]) -> bool {
        let Some(pairs) = &self.pairs else { return false };
        self.states.len() - self.own >= self.routed_probes(instances) + ROUNDS * pairs.len()
    }

    /// Requests that ended in some way.
    pub(super) fn ended(&self, end: &ClientOutcome) -> u64 {
        let states = self.states[..self.own].iter();
        states.filter(|state| state.end.as_ref() == Some(end)).count() as u64
    }

    /// From the arrival of a request of the workload to its first token.
    pub(super) fn first_token_after(&self, run: &Run, request: u32) -> Option<Nanos> {
        let request = request as usize;
        let first = self.states[..self.own].get(request)?.first_token?;
        Some(first - run.requests.get(request)?.arrival)
    }

    /// The request that came last of those that have not ended.
    pub(super) fn newest(&self) -> Option<ClientId> {
        let open = |state: &SimClient| state.arrived && state.end.is_none();
        let newest = self.states[..self.next].iter().rposition(open);
        newest.map(|index| ClientId(index as u64))
    }
}

/// A short prompt that fits whatever the requests of the workload fit, and one token of output.
fn probe(run: &Run) -> WorkloadRequest {
    let tokens = run.longest().map_or(0, |longest| longest.saturating_sub(1).min(PROBE_TOKENS));
    let prompt = WorkloadPrompt { tokens: tokens as u32, prefix: [].into(), tail: 0 };
    let (samples, output) = (1, 1);
    let (arrival, prompts) = (Nanos::ZERO, vec![prompt]);
    WorkloadRequest {
        arrival,
        prompts,
        samples,
        output,
        abort: None,
        stop: false,
        model: None,
        decode_rendering: None,
    }
}

impl Simulation {
    /// The request of a client.
    pub(super) fn request(&self, client: ClientId) -> WorkloadRequest {
        if let Some(request) = self.clients.workload(&self.run).get(client.0 as usize) {
            return request.clone();
        }
        let mut probe = self.clients.probe.clone();
        probe.prompts[0].tail = decide(self.run.seed, PROBE, client.0, 0);
        probe
    }

    pub(super) fn first_arrival(&mut self) {
        if let Some(first) = self.clients.workload(&self.run).first() {
            self.queue.push(first.arrival, SimEvent::Arrive);
        }
    }

    /// The next client asks.
    pub(super) fn client_arrives(&mut self) {
        let run = self.run.clone();
        let index = self.clients.next;
        let request = &run.requests[index];
        self.clients.next += 1;
        self.clients.open += 1;
        self.clients.states[index].arrived = true;
        if let Some(next) = run.requests.get(index + 1) {
            self.queue.push(next.arrival, SimEvent::Arrive);
        }
        if let Some(abort) = request.abort {
            let client = index as u32;
            self.queue.push(request.arrival + abort, SimEvent::ClientGone { client });
        }
        let client = ClientId(index as u64);
        self.quiescence.progressed(self.now);
        self.observer.observe(self.now, &Observation::Asked { client });
        self.ask(client);
    }

    /// The world itself asks.
    pub(super) fn client_probes(&mut self) {
        if self.clients.pairs.is_none() {
            self.clients.dead = self.dma.dead_sessions();
            self.clients.pairs = Some(self.whole_pairs());
            if self.clients.all_probed(&self.instances) {
                return;
            }
        }
        let sent = self.clients.states.len() - self.clients.own;
        let routed = self.clients.routed_probes(&self.instances);
        let pairs = self.clients.pairs.as_deref().unwrap_or_default();
        let pair =
            sent.checked_sub(routed).and_then(|at| pairs.get(at % pairs.len().max(1))).copied();
        let client = ClientId(self.clients.states.len() as u64);
        self.clients.states.push(SimClient {
            arrived: true,
            pair,
            asked: self.now,
            posted_before: self.stats.all_posted(),
            ..SimClient::default()
        });
        self.clients.open += 1;
        self.quiescence.progressed(self.now);
        self.observer.observe(self.now, &Observation::Probed { client, pair });
        self.ask(client);
    }

    fn ask(&mut self, client: ClientId) {
        let request = self.request(client);
        let prompt = |prompt: WorkloadPrompt| router::RoutedPrompt {
            tokens: prompt.tokens,
            prefix: prompt.prefix,
        };
        let prompts = request.prompts.into_iter().map(prompt).collect();
        let (samples, output) = (request.samples, request.output);
        let pair = self.clients.states.get(client.0 as usize).and_then(|state| state.pair);
        let name = |at: u16| EngineId::from(self.run.instances[usize::from(at)].name.as_str());
        let engines = pair.map(|(prefill, decode)| [name(prefill), name(decode)].into());
        let model = request.model;
        let asked = ClientRequest { client, prompts, samples, output, model, engines };
        self.tell(0, RouterInput::Request(asked).into());
    }

    /// A client goes away, unless it has its answer.
    pub(super) fn client_gone(&mut self, client: u32) {
        let Some(state) = self.clients.states.get_mut(client as usize) else { return };
        if !state.arrived || state.end.is_some() {
            return;
        }
        state.end = Some(ClientOutcome::Unknown);
        self.clients.open -= 1;
        let client = ClientId(u64::from(client));
        self.quiescence.progressed(self.now);
        self.observer.observe(self.now, &Observation::ClientGone { client });
        self.tell(0, RouterInput::Gone { client }.into());
    }

    /// The connections of all clients end without an answer.
    pub(super) fn clients_unanswered(&mut self) {
        for index in 0..self.clients.states.len() {
            let state = &mut self.clients.states[index];
            if state.arrived && state.end.is_none() {
                state.end = Some(ClientOutcome::Unknown);
                self.clients.open -= 1;
                self.quiescence.progressed(self.now);
                let client = ClientId(index as u64);
                self.observer.observe(self.now, &Observation::ClientGone { client });
            }
        }
    }

    /// The router answers a client.
    pub(super) fn client_answered(&mut self, client: ClientId, answer: &ClientAnswer) {
        self.observer.observe(self.now, &Observation::Answered { client, answer });
        let Some(state) = self.clients.states.get_mut(client.0 as usize) else { return };
        if state.end.is_some() {
            return;
        }
        let fast = matches!(answer, ClientAnswer::Finished { recomputed: None });
        if client.0 as usize >= self.clients.own {
            match fast {
                true => self.clients.probes_fast += 1,
                false => self.quiescence.not_cleared(self.now),
            }
        }
        let Some(state) = self.clients.states.get(client.0 as usize) else { return };
        if let (true, Some(pair)) = (fast, state.pair) {
            let took = self.now - state.asked;
            let operations = self.stats.all_posted() - state.posted_before;
            self.pair_served(pair, took, operations);
        }
        let Some(state) = self.clients.states.get_mut(client.0 as usize) else { return };
        let end = match answer {
            ClientAnswer::Finished { recomputed } => {
                if let Some(failure) = recomputed {
                    self.stats.recomputed(failure);
                }
                ClientOutcome::Finished
            }
            ClientAnswer::Failed(failure) => {
                self.stats.failed(&failure.to_string());
                ClientOutcome::Failed
            }
            ClientAnswer::NoInstance(_) | ClientAnswer::Misfit(_) => {
                self.stats.failed("no instance");
                ClientOutcome::Failed
            }
            ClientAnswer::NoModel(_) | ClientAnswer::NoRole { .. } => {
                self.stats.failed("no such model");
                ClientOutcome::Failed
            }
            ClientAnswer::Overload => {
                self.stats.failed("overload of the router");
                ClientOutcome::Failed
            }
        };
        state.end = Some(end);
        self.clients.open -= 1;
        self.quiescence.progressed(self.now);
    }

    /// A client sees its first token.
    pub(super) fn first_token(&mut self, client: ClientId) {
        let Some(state) = self.clients.states.get_mut(client.0 as usize) else { return };
        if state.first_token.is_none() {
            state.first_token = Some(self.now);
            if let Some(request) = self.clients.workload(&self.run).get(client.0 as usize) {
                self.stats.ttft(self.now - request.arrival);
            }
        }
    }
}
