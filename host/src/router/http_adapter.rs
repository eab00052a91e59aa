//! The adapter of the router core between its plane and HTTP: it turns what the core wants into
//! legs, and what becomes of them into news for the core and answers for the clients.

mod causes;

use super::args::HttpSettings;
use super::error::HttpError;
use super::in_flight::{ClientState, InFlightLeg, PartState};
use super::leg::{self, LegError, LegResult, MadeLeg, ResponseHead, StreamBeginning};
use super::load::LoadCalls;
use super::memory_budget::ChargedBytes;
use super::merge::{self, PartFacts};
use super::metrics::{LegLabels, RouterMetrics, role_name};
use super::params::{self, TransferUid};
use super::pool::ConnectionPool;
use super::probe::{self, ProbeOrder};
use super::relay::{StreamEnd, StreamRelay};
use super::request_spans::LegTracer;
use super::routed_request::{RoutedRequest, is_alone, order, transfer_of};
use crate::instance::{ReportedFailure, find_failure};
use crate::spans::OpenSpan;
use actix::{Addr, Context, Handler, Message};
use hyper::StatusCode;
use kvferry_engine::actors::{Clock, CountedInput as _, Driver, PlaneAdapter};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{ClientId, EngineId, LegId, TransferKey};
use kvferry_engine::core::message::{FinishReason, Mode, Role};
use kvferry_engine::core::router::{
    ClientAnswer, ClientRequest, InstancePair, LegBody, LegEvent, RegistrationProof, RoutedPrompt,
    Router, RouterEffect, RouterInput,
};
use kvferry_engine::effects::perform_control;
use kvferry_engine::fabric::{ControlPlane, Endpoint, NextPoll};
use kvferry_wire::{SignedEvent, SignedPlane, ZmqPlane};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// The actor with the router core, in the adapter [`HttpAdapter`].
pub(crate) type RouterAddr = Addr<Driver<HttpAdapter>>;

/// Requests that may wait for the actor; further ones are refused. What follows from a request is
/// bounded by those that were taken.
pub(crate) const MAILBOX: usize = 4_096;

/// What the core is to hear.
type RouterInputQueue = VecDeque<RouterInput>;

/// What a client gets to hear; after `Ended` nothing more.
pub(crate) enum ClientEvent {
    /// The answer of one part, or its beginning.
    Part { part: usize, head: ResponseHead, body: PartBody, facts: PartFacts },
    /// All parts are there, or it failed.
    Ended(Result<(), HttpError>),
}

/// The answer of one part.
pub(crate) enum PartBody {
    Whole(ChargedBytes),
    Stream(Box<StreamRelay>),
}

#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct SubmitRequest {
    pub(crate) client: ClientId,
    pub(crate) job: Arc<RoutedRequest>,
    pub(crate) prompts: Vec<RoutedPrompt>,
    /// With room for all parts and the end.
    pub(crate) events: mpsc::Sender<ClientEvent>,
}

/// A client went away, or has its answer.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct ClientGone(pub(crate) ClientId);

/// The router is about to end: instances are to register with another one.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct ReleaseInstances;

/// News of a leg.
#[derive(Message)]
#[rtype(result = "()")]
struct LegMessage(LegId, LegResult);

/// A stream ended, and its instance may have told something of the leg.
#[derive(Message)]
#[rtype(result = "()")]
struct StreamEnded(LegId, StreamEnd, Option<ReportedFailure>);

/// Turns effects of the router core into legs, and what becomes of them into inputs.
pub(crate) struct HttpAdapter {
    core: RouterAddr,
    plane: SignedPlane<ZmqPlane>,
    pool: ConnectionPool,
    settings: Arc<HttpSettings>,
    metrics: RouterMetrics,
    clients: HashMap<ClientId, ClientState>,
    legs: HashMap<LegId, InFlightLeg>,
    /// The legs of decodes that say why KV did not come, by what these call them.
    transfers: HashMap<(TransferKey, u32), LegId>,
    loads: LoadCalls,
    clock: Clock,
}

impl HttpAdapter {
    /// Starts the router core, which listens on `plane`.
    pub(crate) fn start(
        router: Router,
        plane: SignedPlane<ZmqPlane>,
        clock: Clock,
        pool: ConnectionPool,
        settings: Arc<HttpSettings>,
        metrics: RouterMetrics,
    ) -> RouterAddr {
        let now = clock.clone();
        let adapter = |core| {
            let (clients, legs, transfers) = Default::default();
            let (loads, clock) = (LoadCalls::new(), now);
            HttpAdapter {
                core,
                plane,
                pool,
                settings,
                metrics,
                clients,
                legs,
                transfers,
                loads,
                clock,
            }
        };
        Driver::start(adapter, router, None, clock)
    }

    /// Id of the client's request of a leg, for the log; empty if the client has disconnected.
    fn request_id(&self, running: &InFlightLeg) -> &str {
        self.clients.get(&running.client).map_or("", |client| client.job.id.as_str())
    }

    fn leg_ended(&self, running: &mut InFlightLeg, outcome: &'static str) {
        if let Some(span) = running.span.take() {
            span.end(outcome);
        }
        let role = role_name(running.role);
        self.metrics.legs.get_or_create(&LegLabels { role, outcome }).inc();
    }

    fn dispatch(&mut self, sent: LegDispatch) {
        let LegDispatch { leg, client, engine, http, pair, body } = sent;
        let (LegBody::Prefill { prompt, .. } | LegBody::Decode { prompt, .. }) = &body;
        let (part, role) = (*prompt as usize, body.role());
        let wants_params = match &body {
            LegBody::Prefill { transfer, .. } => transfer.mode == Mode::Pull && !pair.is_native(),
            LegBody::Decode { .. } => false,
        };
        let tells = match role {
            Role::Prefill => pair.prefill.native || pair.is_static(),
            Role::Decode => (pair.decode.native || pair.is_static()) && !is_alone(&body),
        };
        let made = self.order(client, part, (&engine, &http), &pair, &body);
        let Some((order, span)) = made else { return };
        let inner_id = order.as_ref().ok().and_then(|order| order.inner_id.clone());
        let (times, sent) = (self.metrics.times.of(role, &engine), Instant::now());
        if let Some(client) = self.clients.get_mut(&client) {
            times.queue.observe((sent - client.arrived).as_secs_f64());
            // The answer of another attempt tells nothing of this one.
            client.parts[part].prefilled.take_if(|_| role == Role::Prefill);
            client.fault = None;
        }
        let transfer = self.transfer_told(client, part, &pair, &body);
        self.transfers.extend(transfer.iter().map(|transfer| (transfer.clone(), leg)));
        let core = self.core.clone();
        let (pool, limits) = (self.pool.clone(), self.settings.limits);
        // In a box, as it is moved several times until it runs.
        let task = actix::spawn(Box::pin(async move {
            let news = match order {
                Ok(order) => leg::run(pool, order, limits).await,
                Err(why) => LegResult::Failed(LegError::invalid_answer(role, &why)),
            };
            core.do_send(LegMessage(leg, news));
        }));
        let running = InFlightLeg {
            client,
            part,
            role,
            engine,
            inner_id,
            http,
            wants_params,
            reports_failures: tells,
            transfer,
            cause: None,
            uncaused: None,
            sent,
            times,
            task,
            cut: None,
            span,
        };
        self.legs.insert(leg, running);
    }

    /// The request of a leg, and its span if it is traced; none if its client has gone.
    fn order(
        &mut self,
        client: ClientId,
        part: usize,
        (engine, http): (&EngineId, &Endpoint),
        pair: &InstancePair,
        body: &LegBody,
    ) -> Option<(MadeLeg, Option<OpenSpan>)> {
        let client = self.clients.get_mut(&client)?;
        let (key, _) = transfer_of(body);
        let state = &mut client.parts[part];
        let unique = match &state.unique {
            Some((id, unique)) if *id == key.id => *unique,
            _ => {
                state.attempts += 1;
                state.unique.insert((key.id.clone(), TransferUid(rand::random()))).1
            }
        };
        let attempt = (unique, state.attempts);
        let begin = |spans: &LegTracer| spans.begin((engine, http), (pair, body), attempt);
        let span = client.job.spans.as_ref().map(begin);
        let (above, proof) = (span.as_ref().map(OpenSpan::context), &self.settings.proof);
        Some((order(&client.job, part, http, (pair, body), (unique, proof, above)), span))
    }

    /// What the decode of a leg calls the leg's transfer when it tells why the KV did not come; none
    /// if it tells nothing.
    fn transfer_told(
        &self,
        client: ClientId,
        part: usize,
        pair: &InstancePair,
        body: &LegBody,
    ) -> Option<(TransferKey, u32)> {
        let LegBody::Decode { transfer, .. } = body else { return None };
        if !pair.decode.native || is_alone(body) {
            return None;
        }
        if pair.is_native() {
            return Some((transfer.key.clone(), transfer.sibling));
        }
        // A leg in MoRIIO's form has one id and one receiver.
        let (_, unique) = self.clients.get(&client)?.parts[part].unique.as_ref()?;
        let id = unique.transfer_id().as_str().into();
        Some((TransferKey { id, prompt: 0 }, 0))
    }

    fn whole(
        &mut self,
        leg: LegId,
        head: ResponseHead,
        body: ChargedBytes,
        out: &mut RouterInputQueue,
    ) {
        let Some(mut running) = self.take_leg(leg) else { return };
        let Some(client) = self.clients.get_mut(&running.client) else { return };
        let part = running.part;
        if running.role == Role::Prefill {
            running.times.first_token.observe(running.sent.elapsed().as_secs_f64());
            client.parts[part].prefilled = Some(Instant::now());
            client.parts[part].cached = merge::cached(&body.bytes);
            return self.prefilled(leg, &mut running, body, out);
        }
        let cached = client.parts[part].cached;
        self.settings.makers.note(client.job.asked.api, &body.bytes, &running.http);
        let told = if running.reports_failures { find_failure(&body.bytes) } else { None };
        let told = told.and_then(|told| told.failure).or(running.cause.take());
        let facts = PartFacts { cached, inner_id: running.inner_id.clone() };
        let body = PartBody::Whole(body);
        // There is room for every part, or the client has gone and its guard says so.
        let _ = client.events.try_send(ClientEvent::Part { part, head, body, facts });
        self.decoded(leg, &mut running, told, out);
    }

    /// A decode leg ended well, with KV or, as it may tell, without, be it for a cause that is
    /// unknown here.
    fn decoded(
        &self,
        leg: LegId,
        running: &mut InFlightLeg,
        told: Option<Failure>,
        out: &mut RouterInputQueue,
    ) {
        let Some(failure) = told else {
            self.leg_ended(running, "done");
            return out.push_back(leg_input(leg, done()));
        };
        if let Some(span) = &mut running.span {
            span.set("kvferry.recomputed", failure.kind());
        }
        self.leg_ended(running, "done");
        tracing::warn!(%leg, engine = %running.engine, request = self.request_id(running), %failure,
            "decode computed a prompt itself");
        let event = LegEvent::Done { reason: FinishReason::Length, recomputed: Some(failure) };
        out.push_back(leg_input(leg, event));
    }

    fn prefilled(
        &mut self,
        leg: LegId,
        running: &mut InFlightLeg,
        body: ChargedBytes,
        out: &mut RouterInputQueue,
    ) {
        let ChargedBytes { bytes, mut memory } = body;
        // What it has computed is of no use.
        if let Some(heard) = running.reports_failures.then(|| find_failure(&bytes)).flatten() {
            let fault = LegError::from_reported(heard);
            return self.failed(leg, running, fault, out);
        }
        if !running.wants_params {
            self.leg_ended(running, "done");
            return out.push_back(leg_input(leg, done()));
        }
        match params::answered(bytes) {
            Ok(Some(params)) => {
                // Twice: the core and the leg of the decode each hold a copy.
                let held = memory.set(params.len() * 2);
                if let Some(client) = self.clients.get_mut(&running.client) {
                    client.parts[running.part].params_memory = Some(memory);
                }
                if let Err(why) = held {
                    let fault = LegError::from(why);
                    return self.failed(leg, running, fault, out);
                }
                self.leg_ended(running, "done");
                out.push_back(leg_input(leg, LegEvent::Prefilled { params }));
            }
            Ok(None) => {
                tracing::warn!(%leg, engine = %running.engine, request = self.request_id(running),
                    "prefill answered without kv_transfer_params: decode computes the prompt");
                self.leg_ended(running, "done");
                out.push_back(leg_input(leg, done()));
            }
            Err(why) => {
                let fault = LegError::invalid_answer(running.role, &why);
                self.failed(leg, running, fault, out);
            }
        }
    }

    fn begun(
        &mut self,
        leg: LegId,
        head: ResponseHead,
        beginning: StreamBeginning,
        out: &mut RouterInputQueue,
    ) {
        let Some(running) = self.legs.get_mut(&leg) else { return };
        let Some(client) = self.clients.get_mut(&running.client) else { return };
        let (cut, is_cut) = oneshot::channel();
        running.cut = Some(cut);
        let part = running.part;
        self.settings.makers.note(client.job.asked.api, &beginning.first, &running.http);
        let now = Instant::now();
        running.times.first_token.observe((now - running.sent).as_secs_f64());
        if let Some(span) = &mut running.span {
            span.event("first_token");
        }
        if let Some(prefilled) = client.parts[part].prefilled {
            running.times.transfer.observe((now - prefilled).as_secs_f64());
        }
        let between = running.times.inter_token.clone();
        let core = self.core.clone();
        let report = move |end, heard| core.do_send(StreamEnded(leg, end, heard));
        let (idle, tells) = (self.settings.limits.idle, running.reports_failures);
        let StreamBeginning { first, body, memory } = beginning;
        let relay = StreamRelay::new((first, body, memory), (idle, between), is_cut, tells, report);
        let body = PartBody::Stream(Box::new(relay));
        let cached = client.parts[part].cached;
        let facts = PartFacts { cached, inner_id: running.inner_id.clone() };
        let _ = client.events.try_send(ClientEvent::Part { part, head, body, facts });
        out.push_back(leg_input(leg, LegEvent::FirstToken));
    }

    fn stream_ended(
        &mut self,
        leg: LegId,
        end: StreamEnd,
        heard: Option<ReportedFailure>,
        out: &mut RouterInputQueue,
    ) {
        let Some(mut running) = self.take_leg(leg) else { return };
        match end {
            Ok(()) => {
                let told = heard.and_then(|heard| heard.failure).or(running.cause.take());
                self.decoded(leg, &mut running, told, out);
            }
            Err(why) => {
                let why = format!("the stream broke off: {why}");
                let fault = LegError::connection(running.role, &why);
                self.failed(leg, &mut running, fault, out);
            }
        }
    }

    fn answer(&mut self, core: &Router, client: ClientId, answer: &ClientAnswer) {
        let Some(mut known) = self.clients.remove(&client) else { return };
        let ended = match answer {
            ClientAnswer::Finished { .. } => Ok(()),
            ClientAnswer::Failed(failure) => {
                Err(known.fault.take().unwrap_or_else(|| causes::refusal(failure)))
            }
            ClientAnswer::NoModel(served) => {
                let asked = known.job.asked.model.as_deref().unwrap_or_default();
                Err(HttpError::no_model(asked, served))
            }
            ClientAnswer::NoInstance(why) => Err(HttpError::unavailable(*why)),
            ClientAnswer::NoRole { missing, served } => {
                let asked = known.job.asked.model.as_deref().unwrap_or_default();
                Err(HttpError::no_role(asked, *missing, served))
            }
            ClientAnswer::Overload => Err(HttpError::new(
                StatusCode::TOO_MANY_REQUESTS,
                "the router has as many requests open, or waiting, as it takes (--open-max, \
                 --queue-size): send it again later, or have the operator add instances",
            )),
            ClientAnswer::Misfit(why) => Err(HttpError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                &format!(
                    "no prefill and decode instance fit: {why}; /registrations/rejected of --admin-addr has all"
                ),
            )),
        };
        let again = || Duration::from_nanos(core.retry_after((self.clock)()).0);
        let ended = ended.map_err(|error| error.or_retry_after(Some(again())));
        let _ = known.events.try_send(ClientEvent::Ended(ended));
    }
}

/// A dispatch of the core.
struct LegDispatch {
    leg: LegId,
    client: ClientId,
    engine: EngineId,
    http: Endpoint,
    pair: Box<InstancePair>,
    body: LegBody,
}

fn leg_input(leg: LegId, event: LegEvent) -> RouterInput {
    RouterInput::Leg { leg, event }
}

fn done() -> LegEvent {
    LegEvent::Done { reason: FinishReason::Length, recomputed: None }
}

impl PlaneAdapter for HttpAdapter {
    type Machine = Router;

    fn poll(&mut self, now: Nanos, out: &mut RouterInputQueue) -> NextPoll {
        let mut events = Vec::new();
        let wake = self.plane.poll_signed(now, &mut events);
        out.extend(events.into_iter().map(|event| match event {
            SignedEvent::Control(event) => RouterInput::Control(event),
            SignedEvent::Proven(link) => {
                RouterInput::Proof { link, proof: RegistrationProof::Signed }
            }
            SignedEvent::Wrong(link, why) => {
                RouterInput::Proof { link, proof: RegistrationProof::Wrong(why.into()) }
            }
        }));
        wake
    }

    fn perform(&mut self, core: &Router, effect: RouterEffect, out: &mut RouterInputQueue) {
        match effect {
            RouterEffect::Control(command) => {
                let events = perform_control(&mut self.plane, command);
                out.extend(events.map(RouterInput::Control));
            }
            RouterEffect::Dispatch { leg, client, engine, http, pair, body, .. } => {
                self.dispatch(LegDispatch { leg, client, engine, http, pair, body });
            }
            RouterEffect::CancelLeg { leg } => {
                if let Some(mut running) = self.take_leg(leg) {
                    self.leg_ended(&mut running, "cancelled");
                    running.task.abort();
                }
            }
            RouterEffect::LegCauses { engine, failed } => self.causes(&engine, failed, out),
            RouterEffect::Answer { client, answer } => self.answer(core, client, &answer),
            RouterEffect::Probe { probe, http: to, is_unproven, is_doubted, wants_models } => {
                let order = ProbeOrder { probe, to, is_unproven, is_doubted, wants_models };
                let key = self.settings.authorization.clone();
                let identity = self.settings.identity.clone();
                probe::start(order, self.pool.clone(), key, identity, self.core.clone());
            }
            RouterEffect::AskLoad { http } => {
                self.loads.start(http, self.pool.clone(), self.core.clone(), &self.metrics);
            }
        }
    }

    fn ticks(&self, _: &Router, _: Nanos, out: &mut RouterInputQueue) {
        out.push_back(RouterInput::Tick);
    }

    fn began(&mut self, _: Nanos, input: &RouterInput) {
        input.count();
    }

    fn set_waker(&mut self, waker: Waker) {
        self.plane.set_waker(waker);
    }
}

impl Handler<SubmitRequest> for Driver<HttpAdapter> {
    type Result = ();

    fn handle(&mut self, ask: SubmitRequest, context: &mut Context<Self>) {
        let SubmitRequest { client, job, prompts, events } = ask;
        let parts = job.asked.parts.iter().map(|_| PartState::default()).collect();
        let (output, model) = (job.asked.output, job.asked.model.clone());
        self.with_adapter(context, |front, out| {
            front.clients.insert(
                client,
                ClientState { job, arrived: Instant::now(), events, parts, fault: None },
            );
            let request =
                ClientRequest { client, prompts, samples: 1, output, model, engines: None };
            out.push_back(RouterInput::Request(request));
        });
    }
}

impl Handler<ClientGone> for Driver<HttpAdapter> {
    type Result = ();

    fn handle(&mut self, ClientGone(client): ClientGone, context: &mut Context<Self>) {
        self.with_adapter(context, |front, out| {
            if front.clients.remove(&client).is_some() {
                out.push_back(RouterInput::Gone { client });
            }
        });
    }
}

impl Handler<ReleaseInstances> for Driver<HttpAdapter> {
    type Result = ();

    fn handle(&mut self, _: ReleaseInstances, context: &mut Context<Self>) {
        self.with_adapter(context, |front, out| {
            front.plane.stop_listening();
            out.push_back(RouterInput::Release);
        });
    }
}

impl Handler<LegMessage> for Driver<HttpAdapter> {
    type Result = ();

    fn handle(&mut self, LegMessage(leg, news): LegMessage, context: &mut Context<Self>) {
        self.with_adapter(context, |front, out| match news {
            LegResult::Whole(head, body) => front.whole(leg, head, body, out),
            LegResult::Begun(head, beginning) => front.begun(leg, head, beginning, out),
            LegResult::Failed(fault) => front.leg_failed(leg, fault, out),
        });
    }
}

impl Handler<StreamEnded> for Driver<HttpAdapter> {
    type Result = ();

    fn handle(&mut self, ended: StreamEnded, context: &mut Context<Self>) {
        let StreamEnded(leg, end, heard) = ended;
        self.with_adapter(context, |front, out| front.stream_ended(leg, end, heard, out));
    }
}
