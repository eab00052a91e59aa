//! What the connectors of one engine are to its protocol actor, and it to them.

mod late;

use super::config::OperatorConfig;
use super::last_error::LastErrorPipe;
use super::metrics::{Scrape, SidecarMetrics};
use super::proto::{self, ClientIdentity, ConnectorHello, FromHost, ToHost, VersionRange};
use super::record::{TransferRecord, TransferTrace};
use super::socket::ServesClients;
use super::spec::{ServingEngine, ServingWorker};
use super::start::{self, StartedEngine};
use crate::instance::{
    InstanceIdentity, KEPT, PlaneCounters, PrefillOffer, TransferLog, log_refusal, log_router,
    log_violation, metrics_text,
};
use crate::spans::parent_in;
use actix::{AsyncContext, Handler, Message};
use kvferry_engine::actors::{
    Clock, Driver, EffectHandler, InputQueue, InstanceAdapter, InstanceBuilder, InstanceDriver,
    LocalPlanes, MailboxSender,
};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::error::{Failure, PeerViolation};
use kvferry_engine::core::ids::{EngineId, RequestId, Role};
use kvferry_engine::core::instance::{Instance, InstanceInput};
use kvferry_engine::core::machine::{Gauges, Machine};
use kvferry_engine::core::message::{
    DecodeAnswer, DecodeHook, PrefillAnswer, PrefillHook, RouterEvent, TransferJob, TransferReport,
};
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::core::router::LegBody;
use prometheus_client::registry::Registry;
use serde_json::value::RawValue;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::sync::mpsc::Sender;
use tokio::sync::oneshot;

/// A connection said hello; what is for it goes into `out`.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct ClientJoined {
    pub(super) client: u64,
    pub(super) hello: ConnectorHello,
    pub(super) out: Sender<FromHost>,
}

/// A connection said something else.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct ClientMessage {
    pub(super) client: u64,
    pub(super) message: ToHost,
    /// There was no room for anything new: a request that arrived is refused.
    pub(super) is_refused: bool,
}

#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct ClientLeft(pub(super) u64);

/// The host is about to end: the router is told to send no more.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct DrainSidecar;

/// Nobody may have come since so many came and went.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct IdleCheck(pub(super) u64);

/// The actor: the machines of the engine, their planes, and the gateway.
pub(super) type GatewayActor = InstanceDriver<Gateway>;

/// Messages of connections that may wait for the actor. A quarter is kept for news of what was
/// begun.
const MAILBOX: usize = 4_096;

/// How often a scheduler may be told how many blocks are kept.
const KEPT_EVERY: Duration = Duration::from_secs(1);

/// A host that no engine came to after this long has no engine.
const ALONE: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectorRole {
    Scheduler,
    Worker(u16),
    /// The transfer actor in a worker.
    Transfer(u16),
}

struct ConnectorClient {
    part: ConnectorRole,
    /// Which is spoken with it.
    version: u16,
    out: Sender<FromHost>,
}

/// The engine is complete and served.
struct ActiveEngine {
    own: InstanceIdentity,
    engine: EngineId,
    records: TransferLog,
    metrics: SidecarMetrics,
    /// What all are told when these ranks in other processes have said something.
    pending: Option<(FromHost, BTreeSet<u16>)>,
    /// Blocks held and in quarantine, as the scheduler was told.
    kept: (u32, u32),
    /// What the answers of a prefill are made of, likewise.
    offer: Option<Box<PrefillOffer>>,
}

pub(super) struct Gateway {
    clock: Clock,
    /// What was configured for the host.
    operator: OperatorConfig,
    /// Microseconds since 1970 at which the clock was zero.
    started_unix_us: u64,
    clients: BTreeMap<u64, ConnectorClient>,
    engine: Option<Box<ServingEngine>>,
    workers: BTreeMap<u16, ServingWorker>,
    /// Where those with a transfer actor say why their process ends.
    last_errors: BTreeMap<u16, LastErrorPipe>,
    serving: Option<ActiveEngine>,
    /// Connections that are no part of the engine.
    observers: BTreeSet<u64>,
    /// The engine was told that it is not served.
    is_refused: bool,
    /// Told when a part of the engine has left.
    over: Option<oneshot::Sender<()>>,
}

impl Gateway {
    /// `started_unix_us` is when the clock was zero, in microseconds since 1970.
    pub(super) fn start(
        (clock, started_unix_us): (Clock, u64),
        operator: OperatorConfig,
        over: oneshot::Sender<()>,
    ) -> MailboxSender<GatewayActor> {
        let outlet = Gateway {
            clock: clock.clone(),
            operator,
            started_unix_us,
            clients: BTreeMap::new(),
            engine: None,
            workers: BTreeMap::new(),
            last_errors: BTreeMap::new(),
            serving: None,
            observers: BTreeSet::new(),
            is_refused: false,
            over: Some(over),
        };
        let site = InstanceAdapter { fabric: LocalPlanes::new(), outlet };
        let host = Driver::start(|_| site, Instance::default(), None, clock);
        let alone = host.clone();
        // It ends by itself.
        let _detached = actix::spawn(async move {
            tokio::time::sleep(ALONE).await;
            alone.do_send(IdleCheck(0));
        });
        MailboxSender::new(host, MAILBOX)
    }

    /// A part that does not take what it is told is cut off: it would miss an answer.
    fn send_to(&mut self, to: impl Fn(ConnectorRole) -> bool, message: &FromHost) {
        let told = |client: &ConnectorClient| {
            client.out.try_send(message.clone().in_version(client.version)).is_ok()
        };
        self.clients.retain(|_, client| !to(client.part) || told(client));
    }

    fn refuse(&mut self, why: &str) {
        tracing::error!(why, "the engine is not served");
        self.send_to(|_| true, &FromHost::Refused { why: why.into() });
        self.clients.clear();
        self.is_refused = true;
    }

    /// Takes up a part of the engine. False for an observer, which is none.
    fn join(
        &mut self,
        client: u64,
        hello: ConnectorHello,
        out: Sender<FromHost>,
    ) -> Result<bool, String> {
        let version = hello.versions().agree("who connects")?;
        let part = match &hello.who {
            ClientIdentity::Observer => {
                self.observers.insert(client);
                // It is told all and dropped with the sender.
                let _ = out.try_send(FromHost::Trace(Box::new(self.trace())));
                return Ok(false);
            }
            ClientIdentity::Scheduler(_) => ConnectorRole::Scheduler,
            ClientIdentity::Worker(worker) => ConnectorRole::Worker(worker.rank),
            ClientIdentity::Transfer { rank, .. } => ConnectorRole::Transfer(*rank),
            ClientIdentity::Stage { .. } => {
                return Err("this host has no pool for payloads of stages; start one with \
                    --payload-pool BYTES"
                    .into());
            }
        };
        if self.clients.values().any(|known| known.part == part) || self.serving.is_some() {
            return Err(format!(
                "another {part:?} is served by this host; give each engine its own"
            ));
        }
        tracing::debug!(client, ?part, version, "joined");
        self.clients.insert(client, ConnectorClient { part, version, out });
        match hello.who {
            ClientIdentity::Scheduler(engine) => self.engine = Some(engine),
            ClientIdentity::Worker(worker) => _ = self.workers.insert(worker.rank, *worker),
            ClientIdentity::Transfer { rank, last_error: words } => {
                let pid = self.workers.get(&rank).map(|worker| worker.pid);
                let words = pid.zip(words).and_then(|(pid, words)| LastErrorPipe::of(pid, words));
                self.last_errors.extend(words.map(|words| (rank, words)));
            }
            ClientIdentity::Observer | ClientIdentity::Stage { .. } => {}
        }
        Ok(true)
    }

    fn trace(&self) -> TransferTrace {
        let told = |serving: &ActiveEngine| {
            let InstanceIdentity { role, mode, .. } = serving.own;
            (serving.engine.clone(), role, mode)
        };
        TransferTrace {
            program: env!("CARGO_PKG_VERSION").into(),
            engine: self.serving.as_ref().map(told),
            pid: std::process::id(),
            started_unix_us: self.started_unix_us,
            now: (self.clock)(),
            records: self.serving.as_ref().map_or(Vec::new(), |serving| serving.records.list()),
        }
    }

    /// The machines of the engine, when all its parts are there.
    fn serve(&mut self) -> Result<Option<InstanceBuilder>, String> {
        let Some(engine) = self.engine.as_ref().filter(|engine| self.is_complete(engine)) else {
            return Ok(None);
        };
        let oldest = self.clients.values().map(|client| client.version).min();
        start::can_verify(engine, oldest)?;
        let started = start::start(engine, (&self.workers, &self.operator))?;
        let StartedEngine { instance, own, engine: name, incarnation, .. } = started;
        let StartedEngine { lease, tallies, worker_plans: away, memory, trust, .. } = started;
        let (address, lease_ms) = (own.address.clone(), lease.0 / 1_000_000);
        let moved_by = (engine.settings.backend(), engine.settings.transfer(), memory);
        let mut metrics = SidecarMetrics::new(own.role, own.mode, moved_by, (tallies, trust));
        let records = TransferLog::new(own.role, own.mode, engine.tp, KEPT);
        let records = metrics.traced(records, &name);
        let (engine, kept, versions) = (name, (0, 0), VersionRange::OWN);
        let ranks = away.iter().map(|plan| plan.rank).collect();
        let offer = (own.role == Role::Prefill).then(|| Box::new(own.offer()));
        let ready =
            FromHost::Ready { address, lease_ms, incarnation, versions, offer: offer.clone() };
        let pending = Some((ready, ranks));
        self.serving = Some(ActiveEngine { own, engine, records, metrics, pending, kept, offer });
        for plan in away {
            let rank = plan.rank;
            let to = |part| part == ConnectorRole::Transfer(rank);
            self.send_to(to, &FromHost::Begin(Box::new(plan)));
        }
        Ok(Some(instance))
    }

    /// A rank in another process has begun, if one is named. If none is waited for any more, the
    /// engine is served.
    fn on_rank_started(&mut self, rank: Option<u16>) {
        let Some(ActiveEngine { pending, .. }) = &mut self.serving else { return };
        let Some((_, ranks)) = pending else { return };
        ranks.retain(|waited| Some(*waited) != rank);
        if ranks.is_empty()
            && let Some((ready, _)) = pending.take()
        {
            self.send_to(|_| true, &ready);
        }
    }

    fn tell_kept(&mut self, Gauges { held, quarantined, .. }: Gauges) {
        let Some(serving) = &mut self.serving else { return };
        if std::mem::replace(&mut serving.kept, (held, quarantined)) != (held, quarantined) {
            self.scheduler(&FromHost::Kept { held, quarantined });
        }
    }

    /// The secret may have been changed by which the answers of a prefill are sealed.
    fn tell_offer(&mut self) {
        let Some(ActiveEngine { own, offer: Some(told), .. }) = &mut self.serving else { return };
        let offer = own.offer();
        if offer != **told {
            **told = offer;
            let news = FromHost::Offer(told.clone());
            self.scheduler(&news);
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
        self.send_to(|part| part == ConnectorRole::Scheduler, message);
    }

    /// Tells the scheduler of the transfer that something ended, if it did.
    fn note(&mut self, watch: impl FnOnce(&mut TransferLog, Nanos) -> Option<&TransferRecord>) {
        let now = (self.clock)();
        let Some(ActiveEngine { records, metrics, .. }) = &mut self.serving else { return };
        if let Some(ended) = watch(records, now).and_then(|record| metrics.ended(record)) {
            self.scheduler(&FromHost::Ended(ended));
        }
    }

    /// The core of a prefill hears what its engine does; one that is refused is told so in its
    /// place.
    fn on_prefill(&mut self, hook: PrefillHook, is_refused: bool, out: &mut InputQueue<Instance>) {
        self.note(|records, now| {
            records.prefill(now, &hook);
            None
        });
        match hook {
            PrefillHook::Arrived { request, .. } if is_refused => {
                let failure = Failure::Overload;
                self.prefill(PrefillAnswer::Rejected { request, failure }, out);
            }
            hook => out.push_back(InstanceInput::Prefill(hook)),
        }
    }

    /// As [`Gateway::on_prefill`], of a decode.
    fn on_decode(&mut self, hook: DecodeHook, is_refused: bool, out: &mut InputQueue<Instance>) {
        self.note(|records, now| records.decode(now, &hook));
        match hook {
            DecodeHook::Arrived { request, .. } if is_refused => {
                let failure = Failure::Overload;
                self.decode(DecodeAnswer::Rejected { request, failure }, out);
            }
            hook => out.push_back(InstanceInput::Decode(hook)),
        }
    }

    fn moved(&self, rank: u16, counters: PlaneCounters) {
        if let Some(ActiveEngine { metrics, .. }) = &self.serving {
            metrics.set_rank_counters(rank, counters);
        }
    }

    fn arrived(
        &mut self,
        (request, params): (RequestId, &str),
        (tokens, prompt_hash): (u32, Option<PromptHash>),
        is_refused: bool,
        out: &mut InputQueue<Instance>,
    ) {
        let Some(ActiveEngine { own, records, .. }) = &mut self.serving else { return };
        records.set_parent(|| parent_in(params));
        let json = serde_json::from_str::<Box<RawValue>>(params).map_err(|why| why.to_string());
        let leg = json.and_then(|json| own.leg(&request, Some(&json), 1));
        match leg.and_then(|leg| Ok((leg, prompt_hash.ok_or(proto::NO_PROMPT_HASH)?))) {
            Ok((LegBody::Prefill { transfer: leg, .. }, prompt_hash)) => {
                let hook = PrefillHook::Arrived { request, leg, tokens, prompt_hash };
                self.on_prefill(hook, is_refused, out);
            }
            Ok((LegBody::Decode { transfer: leg, .. }, prompt_hash)) => {
                let hook = DecodeHook::Arrived { request, leg, tokens, prompt_hash };
                self.on_decode(hook, is_refused, out);
            }
            Err(why) => {
                self.note(|records, now| Some(records.unusable(now, &request, tokens, &why)));
                tracing::warn!(request = &*request.0, why, "kv_transfer_params cannot be used");
                self.scheduler(&FromHost::Unusable { request, why });
            }
        }
    }

    fn on_message(&mut self, said: ClientMessage, out: &mut InputQueue<Instance>) {
        let ClientMessage { client, message, is_refused } = said;
        let Some(part) = self.clients.get(&client).map(|client| client.part) else { return };
        if self.serving.is_none() {
            return;
        }
        match (message, part) {
            (ToHost::Arrived { request, params, tokens, prompt_hash }, _) => {
                self.arrived((request, &params), (tokens, prompt_hash), is_refused, out);
            }
            (ToHost::Prefill(hook), _) => self.on_prefill(hook, false, out),
            (ToHost::Decode(hook), _) => self.on_decode(hook, false, out),
            (ToHost::Layers { step, layers }, ConnectorRole::Worker(rank)) => {
                out.push_back(InstanceInput::Layers { rank, step, layers });
            }
            (ToHost::Report { report, moved }, ConnectorRole::Transfer(rank)) => {
                self.on_rank_started(Some(rank));
                self.moved(rank, moved);
                self.report(rank, &report);
                out.push_back(InstanceInput::Report { rank, report });
            }
            (ToHost::Moved(moved), ConnectorRole::Transfer(rank)) => self.moved(rank, moved),
            (
                ToHost::Layers { .. }
                | ToHost::Report { .. }
                | ToHost::Moved(_)
                | ToHost::Payload(_)
                | ToHost::Fetch { .. },
                _,
            ) => {}
            (ToHost::Unable { why }, _) => self.refuse(&why),
        }
    }

    fn on_left(&mut self, client: u64) {
        if self.observers.remove(&client) {
            return;
        }
        let left = self.clients.remove(&client);
        if let Some(ConnectorClient { part: ConnectorRole::Transfer(rank), .. }) = left
            && let Some(said) = self.last_errors.remove(&rank).and_then(LastErrorPipe::read)
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

impl EffectHandler for Gateway {
    fn prefill(&mut self, answer: PrefillAnswer, _: &mut InputQueue<Instance>) {
        self.note(|records, now| records.prefill_answer(now, &answer));
        let is_for = match answer {
            PrefillAnswer::PreemptionSafe { .. } => |part| matches!(part, ConnectorRole::Worker(_)),
            _ => |part| part == ConnectorRole::Scheduler,
        };
        self.send_to(is_for, &FromHost::Prefill(answer));
    }

    fn decode(&mut self, answer: DecodeAnswer, _: &mut InputQueue<Instance>) {
        self.note(|records, now| records.decode_answer(now, &answer));
        self.scheduler(&FromHost::Decode(answer));
    }

    fn job(&mut self, job: &TransferJob) {
        let now = (self.clock)();
        if let Some(ActiveEngine { records, .. }) = &mut self.serving {
            records.job(now, job);
        }
        if self.engine.as_ref().is_some_and(|engine| engine.runs_in_workers()) {
            self.send_to(
                |part| matches!(part, ConnectorRole::Transfer(_)),
                &FromHost::Job(job.clone()),
            );
        }
    }

    fn report(&mut self, _: u16, report: &TransferReport) {
        let now = (self.clock)();
        if let Some(ActiveEngine { records, .. }) = &mut self.serving {
            records.report(now, report);
        }
    }

    fn router(&mut self, news: &RouterEvent) {
        log_router(news);
        if let Some(ActiveEngine { metrics, .. }) = &self.serving {
            metrics.router(news);
        }
    }

    fn violation(&mut self, violation: &PeerViolation) {
        log_violation(violation);
    }

    fn speaks_moriio(&mut self, request: &RequestId) {
        if let Some(ActiveEngine { records, .. }) = &mut self.serving {
            records.speaks_moriio(request);
        }
    }

    fn refused(&mut self, peer: &EngineId, failure: &Failure) {
        log_refusal(peer, failure);
    }
}

impl ServesClients for GatewayActor {
    const OF: &'static str = "the engine";
}

impl Handler<ClientJoined> for GatewayActor {
    type Result = ();

    fn handle(
        &mut self,
        ClientJoined { client, hello, out }: ClientJoined,
        context: &mut Self::Context,
    ) {
        let limit = match &hello.who {
            ClientIdentity::Scheduler(engine) => Some(engine.settings.start_timeout()),
            _ => None,
        };
        let mut starts = None;
        let joined = self.with_adapter(context, |site, _| {
            let gateway = &mut site.outlet;
            match gateway.join(client, hello, out.clone()) {
                Ok(true) => {
                    starts = limit;
                    gateway.serve().unwrap_or_else(|why| {
                        gateway.refuse(&why);
                        None
                    })
                }
                Ok(false) => None,
                Err(why) => {
                    tracing::warn!(why, "refused a connection");
                    // It is dropped with the sender.
                    let _ = out.try_send(FromHost::Refused { why });
                    None
                }
            }
        });
        if let Some(limit) = starts {
            late::watch_start(limit, context);
        }
        let Some(instance) = joined else { return };
        instance.install(self, context);
        self.with_adapter(context, |site, _| site.outlet.on_rank_started(None));
        context.run_interval(KEPT_EVERY, |host, context| {
            let gauges = host.adapter_and_machine().1.gauges();
            host.with_adapter(context, |site, _| {
                site.outlet.tell_kept(gauges);
                site.outlet.tell_offer();
            });
        });
    }
}

impl Handler<ClientMessage> for GatewayActor {
    type Result = ();

    fn handle(&mut self, said: ClientMessage, context: &mut Self::Context) {
        self.with_adapter(context, |site, out| site.outlet.on_message(said, out));
    }
}

impl Handler<ClientLeft> for GatewayActor {
    type Result = ();

    fn handle(&mut self, ClientLeft(client): ClientLeft, context: &mut Self::Context) {
        self.with_adapter(context, |site, _| site.outlet.on_left(client));
    }
}

impl Handler<DrainSidecar> for GatewayActor {
    type Result = ();

    fn handle(&mut self, _: DrainSidecar, context: &mut Self::Context) {
        self.with_adapter(context, |_, out| out.push_back(InstanceInput::Drain));
        if let Some(ActiveEngine { records, .. }) = &self.adapter_and_machine().0.outlet.serving {
            records.finish();
        }
    }
}

impl Handler<IdleCheck> for GatewayActor {
    type Result = ();

    fn handle(&mut self, IdleCheck(_): IdleCheck, context: &mut Self::Context) {
        self.with_adapter(context, |site, _| {
            if site.outlet.clients.is_empty() {
                site.outlet.end();
            }
        });
    }
}

impl Handler<Scrape> for GatewayActor {
    type Result = String;

    fn handle(&mut self, _: Scrape, _: &mut Self::Context) -> Self::Result {
        let (site, instance) = self.adapter_and_machine();
        match &site.outlet.serving {
            Some(ActiveEngine { records, metrics, .. }) => {
                metrics.page(records.open(), &instance.gauges(), instance.verified())
            }
            None => metrics_text(&Registry::default()),
        }
    }
}

#[cfg(test)]
mod tests;
