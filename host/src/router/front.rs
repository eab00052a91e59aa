//! The seat of the router core between its plane and HTTP: it turns what the core wants into legs,
//! and what becomes of them into news for the core and answers for the clients.

use super::api::Asked;
use super::error::Refusal;
use super::leg::{self, DP_RANK, Fault, Head, JSON, News, Order, REQUEST_ID};
use super::merge;
use super::metrics::{Leg as LegLabels, Metrics, role_name};
use super::params::{self, Unique};
use super::pool::{Pool, Reply};
use super::probe;
use super::relay::{End, Relay};
use super::settings::Settings;
use crate::told::{self, Heard};
use actix::{Addr, Context, Handler, Message};
use bytes::Bytes;
use engine::actors::{Clock, Driver, Heard as _, Seat};
use engine::core::Nanos;
use engine::core::ids::{ClientId, EngineId, LegId, TransferId};
use engine::core::message::{FinishReason, Mode, Role};
use engine::core::router::{
    Answer, ClientRequest, LegBody, LegEvent, LegFailure, Pair, Prompt, Router, RouterEffect,
    RouterInput,
};
use engine::driver::perform_control;
use engine::fabric::{ControlPlane, Endpoint, Wake};
use hyper::StatusCode;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::Waker;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

/// The actor with the router core, in the seat that is [`Front`].
pub(crate) type Core = Addr<Driver<Front>>;

/// Requests that may wait for the actor; further ones are refused. What follows from a request is
/// bounded by those that were taken.
pub(crate) const MAILBOX: usize = 4_096;

/// What the core is to hear.
type Inputs = VecDeque<RouterInput>;

/// A client's request.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) asked: Asked,
    /// Headers that all legs carry.
    pub(crate) headers: HeaderMap,
}

/// What a client gets to hear; after `Ended` nothing more.
pub(crate) enum Event {
    /// The answer of one part, or its beginning.
    Part { part: usize, head: Head, body: PartBody, cached: Option<u64> },
    /// All parts are there, or it failed.
    Ended(Result<(), Refusal>),
}

/// The answer of one part.
pub(crate) enum PartBody {
    Whole(Bytes),
    Stream(Box<Relay>),
}

/// A client asks.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct Ask {
    pub(crate) client: ClientId,
    pub(crate) job: Arc<Job>,
    pub(crate) prompts: Vec<Prompt>,
    /// With room for all parts and the end.
    pub(crate) events: mpsc::Sender<Event>,
}

/// A client went away, or has its answer.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct Left(pub(crate) ClientId);

/// News of a leg.
#[derive(Message)]
#[rtype(result = "()")]
struct OfLeg(LegId, News);

/// A stream ended, and its instance may have told something of the leg.
#[derive(Message)]
#[rtype(result = "()")]
struct StreamEnded(LegId, End, Option<Heard>);

struct Client {
    job: Arc<Job>,
    events: mpsc::Sender<Event>,
    parts: Vec<PartState>,
    fault: Option<Refusal>,
}

/// One transfer of a request.
#[derive(Clone, Debug, Default)]
struct PartState {
    /// What the legs of its last attempt are called by.
    unique: Option<(TransferId, Unique)>,
    /// Prompt tokens that the prefill had cached.
    cached: Option<u64>,
}

/// A leg in flight.
struct Running {
    client: ClientId,
    part: usize,
    role: Role,
    engine: EngineId,
    /// The prefill's answer is what the decode reads by.
    wants_params: bool,
    /// The instance tells what became of the KV.
    tells: bool,
    task: JoinHandle<()>,
    /// Cuts the stream when it is dropped.
    cut: Option<oneshot::Sender<()>>,
}

/// The seat.
pub(crate) struct Front {
    core: Core,
    plane: Box<dyn ControlPlane>,
    pool: Pool,
    settings: Arc<Settings>,
    metrics: Metrics,
    clients: HashMap<ClientId, Client>,
    legs: HashMap<LegId, Running>,
}

impl Front {
    /// Starts the router core, which listens on `plane`.
    pub(crate) fn start(
        router: Router,
        plane: Box<dyn ControlPlane>,
        clock: Clock,
        pool: Pool,
        settings: Arc<Settings>,
        metrics: Metrics,
    ) -> Core {
        let seat = |core| {
            let (clients, legs) = Default::default();
            Front { core, plane, pool, settings, metrics, clients, legs }
        };
        Driver::start(seat, router, None, clock)
    }

    fn leg_ended(&self, role: Role, outcome: &'static str) {
        self.metrics.legs.get_or_create(&LegLabels { role: role_name(role), outcome }).inc();
    }

    fn dispatch(&mut self, sent: Sent) {
        let Sent { leg, client, engine, http, pair, body } = sent;
        let (LegBody::Prefill { prompt, .. } | LegBody::Decode { prompt, .. }) = &body;
        let (part, role) = (*prompt as usize, role_of(&body));
        let wants_params = match &body {
            LegBody::Prefill { transfer, .. } => transfer.mode == Mode::Pull && !pair.is_native(),
            LegBody::Decode { .. } => false,
        };
        let tells = match role {
            Role::Prefill => pair.prefill.native,
            Role::Decode => pair.decode.native,
        };
        let Some(order) = self.order(client, part, &http, &pair, &body) else { return };
        let core = self.core.clone();
        let (pool, limits) = (self.pool.clone(), self.settings.limits);
        let task = actix::spawn(async move {
            let news = match order {
                Ok(order) => leg::run(pool, order, limits).await,
                Err(why) => News::Failed(Fault::nonsense(&why)),
            };
            core.do_send(OfLeg(leg, news));
        });
        let running = Running { client, part, role, engine, wants_params, tells, task, cut: None };
        self.legs.insert(leg, running);
    }

    /// The request of a leg; none if its client has gone.
    fn order(
        &mut self,
        client: ClientId,
        part: usize,
        http: &Endpoint,
        pair: &Pair,
        body: &LegBody,
    ) -> Option<Result<Order, String>> {
        let client = self.clients.get_mut(&client)?;
        let (LegBody::Prefill { transfer: engine::core::message::PrefillLeg { key, .. }, .. }
        | LegBody::Decode { transfer: engine::core::message::DecodeLeg { key, .. }, .. }) = body;
        let state = &mut client.parts[part];
        let unique = match &state.unique {
            Some((id, unique)) if *id == key.id => *unique,
            _ => state.unique.insert((key.id.clone(), Unique(rand::random()))).1,
        };
        Some(order(&client.job, part, http, pair, body, unique))
    }

    fn whole(&mut self, leg: LegId, head: Head, body: Bytes, out: &mut Inputs) {
        let Some(running) = self.legs.remove(&leg) else { return };
        let Some(client) = self.clients.get_mut(&running.client) else { return };
        let part = running.part;
        if running.role == Role::Prefill {
            client.parts[part].cached = merge::cached(&body);
            return self.prefilled(leg, &running, &body, out);
        }
        let cached = client.parts[part].cached;
        let told = if running.tells { told::heard(&body) } else { None };
        let body = PartBody::Whole(body);
        // There is room for every part, or the client has gone and its guard says so.
        let _ = client.events.try_send(Event::Part { part, head, body, cached });
        self.decoded(leg, &running, told, out);
    }

    /// A decode leg ended well, with KV or, as it may tell, without, be it for a cause that is unknown
    /// here.
    fn decoded(&self, leg: LegId, running: &Running, told: Option<Heard>, out: &mut Inputs) {
        self.leg_ended(Role::Decode, "done");
        let Some(Heard { failure: Some(failure), .. }) = told else {
            return out.push_back(news(leg, done()));
        };
        tracing::warn!(%leg, engine = %running.engine, client = %running.client, %failure,
            "decode computed a prompt itself");
        let event = LegEvent::Done { reason: FinishReason::Length, recomputed: Some(failure) };
        out.push_back(news(leg, event));
    }

    fn prefilled(&mut self, leg: LegId, running: &Running, body: &[u8], out: &mut Inputs) {
        #[derive(Deserialize)]
        struct Answered<'a> {
            #[serde(borrow)]
            kv_transfer_params: Option<&'a RawValue>,
        }
        // What it has computed is of no use.
        if let Some(heard) = running.tells.then(|| told::heard(body)).flatten() {
            let fault = Fault::told(heard, &running.engine);
            return self.failed(leg, running, fault, out);
        }
        if !running.wants_params {
            self.leg_ended(Role::Prefill, "done");
            return out.push_back(news(leg, done()));
        }
        match serde_json::from_slice::<Answered<'_>>(body) {
            Ok(Answered { kv_transfer_params: Some(params) }) if params.get() != "null" => {
                self.leg_ended(Role::Prefill, "done");
                let params = params.get().into();
                out.push_back(news(leg, LegEvent::Prefilled { params }));
            }
            Ok(_) => {
                tracing::warn!(%leg, engine = %running.engine,
                    "prefill answered without kv_transfer_params: decode computes the prompt");
                self.leg_ended(Role::Prefill, "done");
                out.push_back(news(leg, done()));
            }
            Err(why) => {
                let why = format!("prefill {} answered what is no JSON: {why}", running.engine);
                self.failed(leg, running, Fault::nonsense(&why), out);
            }
        }
    }

    fn begun(&mut self, leg: LegId, head: Head, first: Bytes, body: Reply, out: &mut Inputs) {
        let Some(running) = self.legs.get_mut(&leg) else { return };
        let Some(client) = self.clients.get_mut(&running.client) else { return };
        let (cut, is_cut) = oneshot::channel();
        running.cut = Some(cut);
        let part = running.part;
        let core = self.core.clone();
        let report = move |end, heard| core.do_send(StreamEnded(leg, end, heard));
        let (idle, tells) = (self.settings.limits.idle, running.tells);
        let relay = Relay::new((first, body), idle, is_cut, tells, report);
        let (body, cached) = (PartBody::Stream(Box::new(relay)), client.parts[part].cached);
        let _ = client.events.try_send(Event::Part { part, head, body, cached });
        out.push_back(news(leg, LegEvent::FirstToken));
    }

    fn stream_ended(&mut self, leg: LegId, end: End, heard: Option<Heard>, out: &mut Inputs) {
        let Some(running) = self.legs.remove(&leg) else { return };
        match end {
            Ok(()) => self.decoded(leg, &running, heard, out),
            Err(why) => {
                let message = format!("decode {}: the stream broke off: {why}", running.engine);
                let refusal = Refusal::new(StatusCode::BAD_GATEWAY, &message);
                let fault = Fault { failure: LegFailure::Connection, refusal };
                self.failed(leg, &running, fault, out);
            }
        }
    }

    fn failed(&mut self, leg: LegId, running: &Running, fault: Fault, out: &mut Inputs) {
        let Fault { failure, refusal } = fault;
        tracing::warn!(%leg, engine = %running.engine, role = role_name(running.role),
            client = %running.client, %failure, "leg failed");
        self.leg_ended(running.role, "failed");
        if let Some(client) = self.clients.get_mut(&running.client) {
            client.fault = Some(refusal);
        }
        out.push_back(news(leg, LegEvent::Failed(failure)));
    }

    fn answer(&mut self, client: ClientId, answer: &Answer) {
        let Some(mut known) = self.clients.remove(&client) else { return };
        let ended = match answer {
            Answer::Finished { .. } => Ok(()),
            Answer::Failed(failure) => Err(known.fault.take().unwrap_or_else(|| refusal(failure))),
            Answer::NoInstance => Err(Refusal::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "no prefill and decode instance of equal transfer mode is ready; \
                 see /workers for what is registered",
            )),
            Answer::Misfit(why) => Err(Refusal::new(
                StatusCode::SERVICE_UNAVAILABLE,
                &format!(
                    "no prefill and decode instance fit: {why}; see /registrations/rejected for all"
                ),
            )),
        };
        let _ = known.events.try_send(Event::Ended(ended));
    }
}

/// A dispatch of the core.
struct Sent {
    leg: LegId,
    client: ClientId,
    engine: EngineId,
    http: Endpoint,
    pair: Box<Pair>,
    body: LegBody,
}

fn news(leg: LegId, event: LegEvent) -> RouterInput {
    RouterInput::Leg { leg, event }
}

fn done() -> LegEvent {
    LegEvent::Done { reason: FinishReason::Length, recomputed: None }
}

fn role_of(body: &LegBody) -> Role {
    match body {
        LegBody::Prefill { .. } => Role::Prefill,
        LegBody::Decode { .. } => Role::Decode,
    }
}

/// What a client is told when the core gave up and no instance had said anything.
fn refusal(failure: &LegFailure) -> Refusal {
    match failure {
        LegFailure::Request(why) => Refusal::bad(why, ""),
        LegFailure::Busy => Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "all instances are busy"),
        failure => Refusal::new(StatusCode::BAD_GATEWAY, &format!("no instance served: {failure}")),
    }
}

fn order(
    job: &Job,
    part: usize,
    http: &Endpoint,
    pair: &Pair,
    body: &LegBody,
    unique: Unique,
) -> Result<Order, String> {
    let mut headers = job.headers.clone();
    let id = unique.request_id(pair)?;
    headers.insert(REQUEST_ID, HeaderValue::try_from(id).map_err(|why| why.to_string())?);
    let to = match body {
        LegBody::Prefill { .. } => &pair.prefill,
        LegBody::Decode { .. } => &pair.decode,
    };
    if to.dp_size > 1 {
        headers.insert(DP_RANK, to.dp_rank.into());
    }
    let transfer = params::write(body, pair, unique)?;
    let prefill = role_of(body) == Role::Prefill;
    let stream = job.asked.stream && !prefill;
    let body = job.asked.leg(part, prefill, transfer.as_deref()).into();
    Ok(Order { to: http.clone(), path: job.asked.api.path(), headers, body, stream })
}

impl Job {
    /// A job whose legs carry these headers of the client, and this authorization.
    pub(crate) fn new(asked: Asked, client: &HeaderMap, own: Option<&HeaderValue>) -> Job {
        let mut headers = HeaderMap::with_capacity(8);
        headers.insert(CONTENT_TYPE, JSON);
        if let Some(key) = own.or_else(|| client.get(AUTHORIZATION)) {
            headers.insert(AUTHORIZATION, key.clone());
        }
        for name in leg::TRACE {
            if let Some(value) = client.get(&name) {
                headers.insert(name, value.clone());
            }
        }
        Job { asked, headers }
    }
}

impl Seat for Front {
    type Machine = Router;

    fn poll(&mut self, now: Nanos, out: &mut Inputs) -> Wake {
        let mut events = Vec::new();
        let wake = self.plane.poll(now, &mut events);
        out.extend(events.into_iter().map(RouterInput::Control));
        wake
    }

    fn perform(&mut self, _: &Router, effect: RouterEffect, out: &mut Inputs) {
        match effect {
            RouterEffect::Control(command) => {
                let events = perform_control(self.plane.as_mut(), command);
                out.extend(events.map(RouterInput::Control));
            }
            RouterEffect::Dispatch { leg, client, engine, http, pair, body } => {
                self.dispatch(Sent { leg, client, engine, http, pair, body });
            }
            RouterEffect::CancelLeg { leg } => {
                if let Some(running) = self.legs.remove(&leg) {
                    self.leg_ended(running.role, "cancelled");
                    running.task.abort();
                }
            }
            RouterEffect::Answer { client, answer } => self.answer(client, &answer),
            RouterEffect::Probe { probe, http } => {
                probe::start(probe, http, self.pool.clone(), self.core.clone());
            }
        }
    }

    fn ticks(&self, _: &Router, _: Nanos, out: &mut Inputs) {
        out.push_back(RouterInput::Tick);
    }

    fn began(&mut self, _: Nanos, input: &RouterInput) {
        input.count();
    }

    fn set_waker(&mut self, waker: Waker) {
        self.plane.set_waker(waker);
    }
}

impl Handler<Ask> for Driver<Front> {
    type Result = ();

    fn handle(&mut self, ask: Ask, context: &mut Context<Self>) {
        let Ask { client, job, prompts, events } = ask;
        let parts = vec![PartState::default(); job.asked.parts.len()];
        let output = job.asked.output;
        self.tell(context, |front, out| {
            front.clients.insert(client, Client { job, events, parts, fault: None });
            let request = ClientRequest { client, prompts, samples: 1, output };
            out.push_back(RouterInput::Request(request));
        });
    }
}

impl Handler<Left> for Driver<Front> {
    type Result = ();

    fn handle(&mut self, Left(client): Left, context: &mut Context<Self>) {
        self.tell(context, |front, out| {
            if front.clients.remove(&client).is_some() {
                out.push_back(RouterInput::Gone { client });
            }
        });
    }
}

impl Handler<OfLeg> for Driver<Front> {
    type Result = ();

    fn handle(&mut self, OfLeg(leg, news): OfLeg, context: &mut Context<Self>) {
        self.tell(context, |front, out| match news {
            News::Whole(head, body) => front.whole(leg, head, body, out),
            News::Begun(head, first, body) => front.begun(leg, head, first, body, out),
            News::Failed(fault) => {
                if let Some(running) = front.legs.remove(&leg) {
                    front.failed(leg, &running, fault, out);
                }
            }
        });
    }
}

impl Handler<StreamEnded> for Driver<Front> {
    type Result = ();

    fn handle(&mut self, ended: StreamEnded, context: &mut Context<Self>) {
        let StreamEnded(leg, end, heard) = ended;
        self.tell(context, |front, out| front.stream_ended(leg, end, heard, out));
    }
}
