//! The actor between the connectors of one engine and the protocol.

use super::metrics::{Metrics, Scrape};
use super::proto::{FromHost, Hello, ToHost, VERSION, Who};
use super::record::{Record, Trace};
use super::records::{KEPT, Records};
use super::spec::{Engine, Worker};
use super::start::{self, Started};
use super::words::Words;
use crate::cores::{Cores, FlowOwner, Outlets, log_violation};
use crate::legs::Own;
use crate::meters::Counters;
use crate::scrape;
use actix::{
    Actor, ActorFutureExt, Addr, AsyncContext, Context, Handler, Message, ResponseActFuture,
    WrapFuture,
};
use engine::actors::{Clock, Foreign, RankReport};
use engine::core::Nanos;
use engine::core::decode::DecodeEffect;
use engine::core::ids::{EngineId, FlowId, Incarnation, RequestId};
use engine::core::machine::Gauges;
use engine::core::message::{DecodeHook, Job, PrefillAnswer, PrefillHook};
use engine::core::prefill::PrefillEffect;
use engine::core::router::LegBody;
use fabric_host::HostConfig;
use futures_util::future::{LocalBoxFuture, ready};
use prometheus_client::registry::Registry;
use serde_json::value::RawValue;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::sync::mpsc::Sender;
use tokio::sync::oneshot;

/// A connection said hello; what is for it goes into `out`.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Joined {
    pub(super) client: u64,
    pub(super) hello: Hello,
    pub(super) out: Sender<FromHost>,
}

/// A connection said something else.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Said {
    pub(super) client: u64,
    pub(super) message: ToHost,
}

/// A connection ended.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Left(pub(super) u64);

/// A core says which request a flow is for.
#[derive(Message)]
#[rtype(result = "()")]
struct Owned {
    flow: FlowId,
    owner: Option<FlowOwner>,
}

/// How often a scheduler may be told how many blocks are kept.
const KEPT_EVERY: Duration = Duration::from_secs(1);

/// A host that no engine came to after this long has no engine.
const ALONE: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Scheduler,
    Worker(u16),
    /// The transfer actor in a worker.
    Transfer(u16),
}

struct Client {
    part: Part,
    out: Sender<FromHost>,
}

/// The engine is complete and served.
struct Serving {
    cores: Cores,
    own: Own,
    engine: EngineId,
    records: Records,
    metrics: Metrics,
    /// What all are told when these ranks in other processes have said something.
    pending: Option<(FromHost, BTreeSet<u16>)>,
    /// Blocks held and in quarantine, as the scheduler was told.
    kept: (u32, u32),
}

/// The actor.
pub(super) struct Gateway {
    clock: Clock,
    /// What the operator says of the data planes.
    fabric: HostConfig,
    /// Microseconds since 1970 at which the clock was zero.
    started_unix_us: u64,
    clients: BTreeMap<u64, Client>,
    engine: Option<Box<Engine>>,
    workers: BTreeMap<u16, Worker>,
    /// Where those with a transfer actor say why their process ends.
    words: BTreeMap<u16, Words>,
    serving: Option<Serving>,
    /// Connections that are no part of the engine.
    observers: BTreeSet<u64>,
    /// The engine was told that it is not served.
    is_refused: bool,
    /// Told when a part of the engine has left.
    over: Option<oneshot::Sender<()>>,
}

impl Gateway {
    /// `started` is when the clock was zero.
    pub(super) fn start(
        (clock, started): (Clock, Incarnation),
        fabric: HostConfig,
        over: oneshot::Sender<()>,
    ) -> Addr<Gateway> {
        let gateway = Gateway {
            clock,
            fabric,
            started_unix_us: started.0,
            clients: BTreeMap::new(),
            engine: None,
            workers: BTreeMap::new(),
            words: BTreeMap::new(),
            serving: None,
            observers: BTreeSet::new(),
            is_refused: false,
            over: Some(over),
        };
        gateway.start()
    }

    /// A part that does not take what it is told is cut off: it would miss an answer.
    fn tell(&mut self, to: impl Fn(Part) -> bool, message: &FromHost) {
        let told = |client: &Client| client.out.try_send(message.clone()).is_ok();
        self.clients.retain(|_, client| !to(client.part) || told(client));
    }

    fn refuse(&mut self, why: &str) {
        tracing::error!(why, "the engine is not served");
        self.tell(|_| true, &FromHost::Refused { why: why.into() });
        self.clients.clear();
        self.is_refused = true;
    }

    /// Takes up a part of the engine. False for an observer, which is none.
    fn join(&mut self, client: u64, hello: Hello, out: Sender<FromHost>) -> Result<bool, String> {
        if hello.version != VERSION {
            let other = hello.version;
            let why = format!(
                "who connects speaks version {other} and the host {VERSION}; install one version of \
                 kvferry for both"
            );
            return Err(why);
        }
        let part = match &hello.who {
            Who::Observer => {
                self.observers.insert(client);
                // It is told all and dropped with the sender.
                let _ = out.try_send(FromHost::Trace(Box::new(self.trace())));
                return Ok(false);
            }
            Who::Scheduler(_) => Part::Scheduler,
            Who::Worker(worker) => Part::Worker(worker.rank),
            Who::Transfer { rank, .. } => Part::Transfer(*rank),
        };
        if self.clients.values().any(|known| known.part == part) || self.serving.is_some() {
            return Err(format!(
                "another {part:?} is served by this host; give each engine its own"
            ));
        }
        self.clients.insert(client, Client { part, out });
        match hello.who {
            Who::Scheduler(engine) => self.engine = Some(engine),
            Who::Worker(worker) => _ = self.workers.insert(worker.rank, *worker),
            Who::Transfer { rank, words } => {
                let pid = self.workers.get(&rank).map(|worker| worker.pid);
                let words = pid.zip(words).and_then(|(pid, words)| Words::of(pid, words));
                self.words.extend(words.map(|words| (rank, words)));
            }
            Who::Observer => {}
        }
        Ok(true)
    }

    fn trace(&self) -> Trace {
        let told = |serving: &Serving| {
            let Own { role, mode, .. } = serving.own;
            (serving.engine.clone(), role, mode)
        };
        Trace {
            program: env!("CARGO_PKG_VERSION").into(),
            engine: self.serving.as_ref().map(told),
            pid: std::process::id(),
            started_unix_us: self.started_unix_us,
            now: (self.clock)(),
            records: self.serving.as_ref().map_or(Vec::new(), |serving| serving.records.list()),
        }
    }

    /// Starts the protocol when all parts of the engine are there.
    fn serve(&mut self, context: &mut Context<Self>) -> Result<(), String> {
        let Some(engine) = self.engine.as_ref().filter(|engine| self.is_complete(engine)) else {
            return Ok(());
        };
        let own = context.address();
        let outlets = Outlets {
            prefill: own.clone().recipient(),
            decode: own.clone().recipient(),
            reports: own.recipient(),
        };
        let planes = (&self.workers, &self.fabric);
        let started = start::start(engine, planes, outlets, &self.clock)?;
        let Started { cores, own, engine: name, life, lease, tallies, away, memory } = started;
        let (address, lease_ms) = (own.address.clone(), lease.0 / 1_000_000);
        let records = Records::new(own.role, own.mode, engine.tp, KEPT);
        let moved_by = (engine.settings.backend(), engine.settings.transfer(), memory);
        let metrics = Metrics::new(own.role, own.mode, moved_by, tallies);
        let (engine, kept) = (name, (0, 0));
        let ranks = away.iter().map(|plan| plan.rank).collect();
        let pending = Some((FromHost::Ready { address, lease_ms, life }, ranks));
        let serving = Serving { cores, own, engine, records, metrics, pending, kept };
        self.serving = Some(serving);
        for plan in away {
            let rank = plan.rank;
            self.tell(|part| part == Part::Transfer(rank), &FromHost::Begin(Box::new(plan)));
        }
        self.begun(None);
        context.run_interval(KEPT_EVERY, |own, context| {
            let gauges = own.gauges();
            context.spawn(gauges.into_actor(own).map(|gauges, own, _| own.tell_kept(gauges)));
        });
        Ok(())
    }

    /// A rank in another process has begun, if one is named. If none is waited for any more, the
    /// engine is served.
    fn begun(&mut self, rank: Option<u16>) {
        let Some(Serving { pending, .. }) = &mut self.serving else { return };
        let Some((_, ranks)) = pending else { return };
        ranks.retain(|waited| Some(*waited) != rank);
        if ranks.is_empty()
            && let Some((ready, _)) = pending.take()
        {
            self.tell(|_| true, &ready);
        }
    }

    /// True if all its parts are there.
    fn is_complete(&self, engine: &Engine) -> bool {
        let is_away = engine.is_away();
        let is_there = |part| self.clients.values().any(|client| client.part == part);
        (0..engine.tp).all(|rank| {
            self.workers.contains_key(&rank) && (!is_away || is_there(Part::Transfer(rank)))
        })
    }

    /// Sizes of the core's tables; zeros as long as there is none.
    fn gauges(&self) -> LocalBoxFuture<'static, Gauges> {
        match &self.serving {
            Some(serving) => serving.cores.gauges(),
            None => Box::pin(ready(Gauges::default())),
        }
    }

    fn tell_kept(&mut self, Gauges { held, quarantined, .. }: Gauges) {
        let Some(serving) = &mut self.serving else { return };
        if std::mem::replace(&mut serving.kept, (held, quarantined)) != (held, quarantined) {
            self.scheduler(&FromHost::Kept { held, quarantined });
        }
    }

    /// What is left of an engine whose parts are not all there is not served, and comes again.
    fn end(&mut self) {
        if let Some(over) = self.over.take() {
            // Who waits for it may have ended before.
            let _ = over.send(());
        }
    }

    fn scheduler(&mut self, message: &FromHost) {
        self.tell(|part| part == Part::Scheduler, message);
    }

    /// Tells the scheduler of the transfer that something ended, if it did.
    fn note(&mut self, watch: impl FnOnce(&mut Records, Nanos) -> Option<&Record>) {
        let now = (self.clock)();
        let Some(Serving { records, metrics, .. }) = &mut self.serving else { return };
        if let Some(ended) = watch(records, now).and_then(|record| metrics.ended(record)) {
            self.scheduler(&FromHost::Ended(ended));
        }
    }

    fn prefill(&mut self, hook: PrefillHook) {
        self.note(|records, now| {
            records.prefill(now, &hook);
            None
        });
        if let Some(Serving { cores, .. }) = &self.serving {
            cores.prefill(hook);
        }
    }

    fn decode(&mut self, hook: DecodeHook) {
        self.note(|records, now| records.decode(now, &hook));
        if let Some(Serving { cores, .. }) = &self.serving {
            cores.decode(hook);
        }
    }

    /// Has the ranks do a job.
    fn job(&mut self, job: &Job, gateway: Addr<Gateway>) {
        let now = (self.clock)();
        let Some(Serving { cores, records, .. }) = &mut self.serving else { return };
        if let Some(flow) = records.job(now, job) {
            // Told before the core hears of the flow's end, and so before its request ends.
            cores.flow(flow, move |owner| gateway.do_send(Owned { flow, owner }));
        }
        cores.job(job);
        if self.engine.as_ref().is_some_and(|engine| engine.is_away()) {
            self.tell(|part| matches!(part, Part::Transfer(_)), &FromHost::Job(job.clone()));
        }
    }

    /// Passes on what a transfer actor reports.
    fn report(&mut self, RankReport { rank, report }: RankReport) {
        let now = (self.clock)();
        if let Some(Serving { cores, records, .. }) = &mut self.serving {
            records.report(now, &report);
            cores.report(rank, report);
        }
    }

    fn moved(&self, rank: u16, counters: Counters) {
        if let Some(Serving { metrics, .. }) = &self.serving {
            metrics.told(rank, counters);
        }
    }

    fn arrived(&mut self, request: RequestId, params: &str, tokens: u32) {
        let Some(Serving { own, .. }) = &self.serving else { return };
        let json: Result<Box<RawValue>, _> = serde_json::from_str(params);
        let leg = json.map_err(|why| why.to_string());
        match leg.and_then(|json| own.leg(&request, Some(&json), 1)) {
            Ok(LegBody::Prefill { transfer: leg, .. }) => {
                self.prefill(PrefillHook::Arrived { request, leg, tokens });
            }
            Ok(LegBody::Decode { transfer: leg, .. }) => {
                self.decode(DecodeHook::Arrived { request, leg, tokens });
            }
            Err(why) => {
                self.note(|records, now| Some(records.unusable(now, &request, tokens, &why)));
                tracing::warn!(request = &*request.0, why, "kv_transfer_params cannot be used");
                self.scheduler(&FromHost::Unusable { request, why });
            }
        }
    }

    fn said(&mut self, part: Part, message: ToHost) {
        let Some(Serving { cores, .. }) = &self.serving else { return };
        match message {
            ToHost::Arrived { request, params, tokens } => self.arrived(request, &params, tokens),
            ToHost::Prefill(hook) => self.prefill(hook),
            ToHost::Decode(hook) => self.decode(hook),
            ToHost::Layers { step, layers } => {
                if let Part::Worker(rank) = part {
                    cores.layers(Some(rank), step, layers);
                }
            }
            ToHost::Report { report, moved } => {
                if let Part::Transfer(rank) = part {
                    self.begun(Some(rank));
                    self.moved(rank, moved);
                    self.report(RankReport { rank, report });
                }
            }
            ToHost::Moved(moved) => {
                if let Part::Transfer(rank) = part {
                    self.moved(rank, moved);
                }
            }
            ToHost::Unable { why } => self.refuse(&why),
        }
    }
}

impl Actor for Gateway {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.run_later(ALONE, |own, _| {
            if own.clients.is_empty() {
                own.end();
            }
        });
    }
}

impl Handler<Joined> for Gateway {
    type Result = ();

    fn handle(&mut self, Joined { client, hello, out }: Joined, context: &mut Self::Context) {
        match self.join(client, hello, out.clone()) {
            Ok(true) => {
                if let Err(why) = self.serve(context) {
                    self.refuse(&why);
                }
            }
            Ok(false) => {}
            Err(why) => {
                tracing::warn!(why, "refused a connection");
                // It is dropped with the sender.
                let _ = out.try_send(FromHost::Refused { why });
            }
        }
    }
}

impl Handler<Said> for Gateway {
    type Result = ();

    fn handle(&mut self, Said { client, message }: Said, _: &mut Self::Context) {
        if let Some(part) = self.clients.get(&client).map(|client| client.part) {
            self.said(part, message);
        }
    }
}

impl Handler<Left> for Gateway {
    type Result = ();

    fn handle(&mut self, Left(client): Left, _: &mut Self::Context) {
        if self.observers.remove(&client) {
            return;
        }
        let left = self.clients.remove(&client);
        if let Some(Client { part: Part::Transfer(rank), .. }) = left
            && let Some(said) = self.words.remove(&rank).and_then(Words::read)
        {
            tracing::error!(rank, said, "the process of a worker has ended");
        }
        let was_part = left.is_some();
        let is_left = was_part && (self.serving.is_some() || self.clients.is_empty());
        if is_left || self.is_refused {
            self.end();
        }
    }
}

impl Handler<RankReport> for Gateway {
    type Result = ();

    fn handle(&mut self, report: RankReport, _: &mut Self::Context) {
        self.report(report);
    }
}

impl Handler<Owned> for Gateway {
    type Result = ();

    fn handle(&mut self, Owned { flow, owner }: Owned, _: &mut Self::Context) {
        if let Some(Serving { records, .. }) = &mut self.serving {
            records.owned(flow, owner);
        }
    }
}

impl Handler<Scrape> for Gateway {
    type Result = ResponseActFuture<Self, String>;

    fn handle(&mut self, _: Scrape, _: &mut Self::Context) -> Self::Result {
        let page = |gauges: Gauges, own: &mut Gateway, _: &mut Self::Context| match &own.serving {
            Some(Serving { records, metrics, .. }) => metrics.page(records.open(), &gauges),
            None => scrape::encode(&Registry::default()),
        };
        Box::pin(self.gauges().into_actor(self).map(page))
    }
}

impl Handler<Foreign<PrefillEffect>> for Gateway {
    type Result = ();

    fn handle(&mut self, Foreign(effect): Foreign<PrefillEffect>, context: &mut Self::Context) {
        match effect {
            PrefillEffect::Job(job) => self.job(&job, context.address()),
            PrefillEffect::Answer(answer) => {
                self.note(|records, now| records.prefill_answer(now, &answer));
                let is_for = match answer {
                    PrefillAnswer::PreemptionSafe { .. } => |part| matches!(part, Part::Worker(_)),
                    _ => |part| part == Part::Scheduler,
                };
                self.tell(is_for, &FromHost::Prefill(answer));
            }
            PrefillEffect::Violation(violation) => log_violation(&violation),
            PrefillEffect::Control(_) => {}
        }
    }
}

impl Handler<Foreign<DecodeEffect>> for Gateway {
    type Result = ();

    fn handle(&mut self, Foreign(effect): Foreign<DecodeEffect>, context: &mut Self::Context) {
        match effect {
            DecodeEffect::Job(job) => self.job(&job, context.address()),
            DecodeEffect::Answer(answer) => {
                self.note(|records, now| records.decode_answer(now, &answer));
                self.scheduler(&FromHost::Decode(answer));
            }
            DecodeEffect::Violation(violation) => log_violation(&violation),
            DecodeEffect::Control(_) => {}
        }
    }
}
