//! The processes of a pipeline's stages, what each is to the payload core, and it to them.

use super::gateway::{ClientJoined, ClientLeft, ClientMessage, DrainSidecar, IdleCheck};
use super::metrics::Scrape;
use super::mori_stages::{MORI_CLIENT, MoriStageActor, MoriStagePlanes, MoriStages, input_of};
use super::pool_peers::{PoolAddress, PoolCores, PoolPeers};
use super::proto::{ClientIdentity, FromHost, ToHost, VersionRange};
use super::socket::ServesClients;
use super::stage_metrics::StageMetrics;
use actix::{Addr, AsyncContext, Context, Handler, Message};
use kvferry_engine::actors::{Clock, Driver, Input, InputQueue, MailboxSender, PlaneAdapter};
use kvferry_engine::core::ids::{EngineId, Incarnation};
use kvferry_engine::core::machine::Machine;
use kvferry_engine::core::omni_mori::OmniMoriInput;
use kvferry_engine::core::payload::{
    FormerUse, PayloadAnswer, PayloadClient, PayloadConfig, PayloadCore, PayloadEffect,
    PayloadFailure, PayloadHook, PayloadInput, PayloadKey,
};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{Endpoint, NextPoll};
use kvferry_fabric_host::MemfdPool;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;
use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::oneshot;

/// The actor: the payloads of a host, and the processes that put and get them.
pub(super) type StageActor = Driver<StageGateway>;

/// Messages of connections that may wait for the actor.
const MAILBOX: usize = 4_096;

/// Other hosts that are known at most; those that a stage names beyond are not asked.
const HOSTS_MAX: usize = 4_096;

/// What a host of payloads is.
pub(super) struct StageConfig {
    pub(super) payloads: PayloadConfig,
    pub(super) incarnation: Incarnation,
    /// Bytes of the pool, before they were rounded.
    pub(super) pool_asked: u64,
    /// It ends when no process has been there for so long; if none is given, when it is told to.
    pub(super) idle: Option<Duration>,
}

/// What a host of payloads is made of.
pub(super) struct StageParts {
    pub(super) pool: Arc<MemfdPool>,
    /// The way to other hosts, if there is one.
    pub(super) cores: Option<PoolCores>,
    /// The way to stages whose connector is vLLM-Omni's for MoRI, if they are served.
    pub(super) mori: Option<MoriStagePlanes>,
}

/// Such stages tell, by way of their actor, as a client of the payload core.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct MoriHook(pub(super) PayloadHook);

pub(super) struct StageGateway {
    config: StageConfig,
    pool: Arc<MemfdPool>,
    /// What other hosts call this one, if they reach it.
    engine: Option<EngineId>,
    /// The way to other hosts, if there is one.
    peers: Option<PoolPeers>,
    /// Stages with a connector of MoRI, and their deployment.
    mori: Option<(Addr<MoriStageActor>, Arc<str>)>,
    /// Processes of the deployment that has such stages.
    of_mori: BTreeSet<PayloadClient>,
    /// What is pulled from such stages, and for whom.
    fetches: BTreeMap<PayloadKey, BTreeSet<PayloadClient>>,
    /// Those that have joined; one that is cut off is told nothing any more.
    clients: BTreeMap<PayloadClient, Option<Sender<FromHost>>>,
    metrics: StageMetrics,
    /// Counts the processes that came and went, so that an idle host is known.
    changes: u64,
    /// Told when no process has been there for long.
    over: Option<oneshot::Sender<()>>,
}

impl StageGateway {
    pub(super) fn start(
        clock: Clock,
        (config, parts): (StageConfig, StageParts),
        over: oneshot::Sender<()>,
    ) -> MailboxSender<StageActor> {
        let StageParts { pool, cores, mori } = parts;
        let payloads = config.payloads.clone();
        let engine = cores.as_ref().map(|cores| cores.engine.clone());
        let machine = match &engine {
            Some(engine) => PayloadCore::with_peers(payloads, engine.clone(), config.incarnation),
            None => PayloadCore::new(payloads),
        };
        let counted = cores.as_ref().map(|cores| (cores.counters.clone(), cores.trust));
        let metrics = StageMetrics::new(pool.len(), counted);
        let (idle, timing) = (config.idle, clock.clone());
        let adapter = |own: Addr<StageActor>| {
            let peers = cores.map(|cores| cores.start(&own, &timing));
            let mori = mori.map(|planes| {
                let (deployment, told) = (planes.deployment.clone(), (own, metrics.mori.clone()));
                (MoriStages::start(timing, (planes, pool.clone()), told), deployment)
            });
            StageGateway {
                config,
                pool,
                engine,
                peers,
                mori,
                of_mori: BTreeSet::new(),
                fetches: BTreeMap::new(),
                clients: BTreeMap::new(),
                metrics,
                changes: 0,
                over: Some(over),
            }
        };
        let actor = Driver::start(adapter, machine, None, clock);
        if idle.is_some() {
            actor.do_send(ClientLeft(0));
        }
        MailboxSender::new(actor, MAILBOX)
    }

    /// Takes up a process of a stage.
    fn join(
        &mut self,
        ClientJoined { client, hello, out }: ClientJoined,
        inputs: &mut InputQueue<PayloadCore>,
    ) -> Result<(), (Sender<FromHost>, String)> {
        let agreed = hello.versions().agree("who connects");
        let (needed, lacks) = hello.who.needs();
        let why = match (agreed, hello.who) {
            (Err(why), _) => why,
            (Ok(version), ClientIdentity::Stage { .. }) if version < needed => {
                format!("version {version} has no {lacks} install one version of kvferry for both")
            }
            (Ok(_), ClientIdentity::Stage { pool, .. }) if self.is_outdated(pool) => {
                let asked = self.config.pool_asked;
                tracing::info!(client, asked, ?pool, "ends for a pool of another size");
                // The connection ends with it, and who connects starts the next host.
                self.end();
                return Ok(());
            }
            (Ok(_), ClientIdentity::Stage { deployment, stage, .. }) => {
                tracing::info!(client, %deployment, %stage, "a process of a stage joined");
                let client = PayloadClient(client as u32);
                let pool = FromHost::Pool {
                    client,
                    bytes: self.pool.len(),
                    descriptor: self.pool.descriptor().as_raw_fd(),
                    engine: self.engine.clone(),
                    incarnation: self.config.incarnation,
                    versions: VersionRange::OWN,
                };
                // One that is gone already leaves next.
                let _ = out.try_send(pool);
                if self.mori.as_ref().is_some_and(|(_, served)| *served == deployment) {
                    self.of_mori.insert(client);
                }
                self.clients.insert(client, Some(out));
                self.changes += 1;
                let hook = PayloadHook::Joined { deployment, stage };
                inputs.push_back(PayloadInput::Hook { client, hook });
                return Ok(());
            }
            (Ok(_), _) => {
                "this host has a pool for payloads of stages, and serves no engine; give \
                the engine a host of its own"
                    .into()
            }
        };
        Err((out, why))
    }

    fn on_message(
        &mut self,
        ClientMessage { client, message, .. }: ClientMessage,
        inputs: &mut InputQueue<PayloadCore>,
    ) {
        let client = PayloadClient(client as u32);
        if !matches!(self.clients.get(&client), Some(Some(_))) {
            return;
        }
        match message {
            // Whoever has said these itself: the connection says them.
            ToHost::Payload(PayloadHook::Joined { .. } | PayloadHook::Left) => {
                self.cut(client, "what the connection says is not said by it");
            }
            ToHost::Payload(hook) => {
                if let PayloadHook::WantFrom { host, .. } = &hook {
                    inputs.extend(self.meet(host));
                }
                inputs.push_back(PayloadInput::Hook { client, hook });
            }
            ToHost::Fetch { key, sender } => self.fetch(client, (key, sender), inputs),
            _ => self.cut(client, "a stage says nothing but what it does with payloads"),
        }
    }

    /// A host that a stage names is one from then on.
    fn meet(&mut self, host: &EngineId) -> Option<PayloadInput> {
        let peers = self.peers.as_mut().filter(|peers| peers.len() < HOSTS_MAX)?;
        peers.add(&PoolAddress::parse(&host.0)?)
    }

    /// Wants a payload that is put at this host, and asks no other one for it.
    fn want_here(&self, key: PayloadKey) -> PayloadHook {
        PayloadHook::WantFrom { key, host: self.engine.clone().unwrap_or_else(|| "".into()) }
    }

    /// A process wants what a stage with a connector of MoRI has.
    fn fetch(
        &mut self,
        client: PayloadClient,
        (key, sender): (PayloadKey, Endpoint),
        inputs: &mut InputQueue<PayloadCore>,
    ) {
        let why = match &self.mori {
            Some((mori, _)) if self.of_mori.contains(&client) => {
                let hook = self.want_here(key.clone());
                inputs.push_back(PayloadInput::Hook { client, hook });
                self.fetches.entry(key.clone()).or_default().insert(client);
                return mori.do_send(Input(OmniMoriInput::Fetch { key, sender }));
            }
            Some((_, deployment)) => {
                format!("this host serves MoRI stages of deployment {deployment}")
            }
            None => "this host serves no MoRI stages: give it payload_mori_listen".into(),
        };
        let (failure, former) = (PayloadFailure::GivenUp(why.into()), FormerUse::No);
        self.tell(client, PayloadAnswer::Missing { key, failure, former });
    }

    /// A process has its answer about a payload, or is gone: if it was the last, it is pulled no more.
    fn fetched(&mut self, client: PayloadClient, key: &PayloadKey) {
        let Some(waiting) = self.fetches.get_mut(key) else { return };
        waiting.remove(&client);
        if waiting.is_empty() {
            self.fetches.remove(key);
            if let Some((mori, _)) = &self.mori {
                mori.do_send(Input(OmniMoriInput::Stop { key: key.clone() }));
            }
        }
    }

    fn tell(&mut self, client: PayloadClient, answer: PayloadAnswer) {
        let Some(Some(out)) = self.clients.get(&client) else { return };
        // One whose connection has ended leaves next.
        if let Err(TrySendError::Full(_)) = out.try_send(FromHost::Payload(answer)) {
            self.cut(client, "it does not take what it is told");
        }
    }

    /// Ends a connection; what it has goes when that is over.
    fn cut(&mut self, client: PayloadClient, why: &str) {
        tracing::warn!(%client, why, "a process of a stage is cut off");
        if let Some(out) = self.clients.get_mut(&client).and_then(Option::take) {
            // One that does not read is not told.
            let _ = out.try_send(FromHost::Refused { why: why.into() });
        }
    }

    fn on_left(&mut self, client: u64, inputs: &mut InputQueue<PayloadCore>) {
        let client = PayloadClient(client as u32);
        self.changes += 1;
        self.of_mori.remove(&client);
        let waits = |waiting: &BTreeSet<_>| waiting.contains(&client);
        let its = self.fetches.iter().filter(|(_, waiting)| waits(waiting));
        for key in its.map(|(key, _)| key.clone()).collect::<Vec<_>>() {
            self.fetched(client, &key);
        }
        if self.clients.remove(&client).is_some() {
            inputs.push_back(PayloadInput::Hook { client, hook: PayloadHook::Left });
        }
    }

    /// Ends the host if no process came or went since.
    fn end_if_idle(&mut self, changes: u64) {
        if self.changes == changes && self.clients.is_empty() {
            self.end();
        }
    }

    fn end(&mut self) {
        if let Some(over) = self.over.take() {
            // Who waits for it may have ended before.
            let _ = over.send(());
        }
    }

    /// True if the pool is not the one that a stage asks for, and was made for stages that are gone.
    fn is_outdated(&self, asked: Option<u64>) -> bool {
        let is_other = asked.is_some_and(|bytes| bytes != self.config.pool_asked);
        is_other && self.config.idle.is_some() && self.clients.is_empty()
    }
}

impl PlaneAdapter for StageGateway {
    type Machine = PayloadCore;

    fn poll(&mut self, _: Nanos, _: &mut InputQueue<PayloadCore>) -> NextPoll {
        NextPoll::External
    }

    fn perform(&mut self, _: &PayloadCore, effect: PayloadEffect, _: &mut InputQueue<PayloadCore>) {
        let effect = match &self.peers {
            Some(peers) => peers.perform(effect),
            None => Some(effect),
        };
        match effect {
            Some(PayloadEffect::Answer { client: MORI_CLIENT, answer }) => {
                if let Some((mori, _)) = &self.mori {
                    mori.do_send(input_of(&self.pool, answer));
                }
            }
            Some(PayloadEffect::Answer { client, answer }) => {
                self.metrics.answered(&answer);
                if let PayloadAnswer::Arrived { key, .. }
                | PayloadAnswer::Missing { key, .. }
                | PayloadAnswer::Abandoned { key } = &answer
                {
                    self.fetched(client, key);
                }
                if let PayloadAnswer::Missing { key, failure, .. } = &answer {
                    tracing::debug!(%client, %key, why = %failure, "a payload does not come");
                }
                self.tell(client, answer);
            }
            Some(PayloadEffect::Misuse { client, rule }) => {
                tracing::warn!(%client, %rule, "a process of a stage broke a rule");
            }
            Some(PayloadEffect::PeerMisuse { peer, rule }) => {
                tracing::warn!(%peer, %rule, "a host of payloads broke a rule");
            }
            Some(PayloadEffect::FetchFailed { peer, failure }) => {
                tracing::warn!(%peer, why = %failure, "a payload did not come from another host");
            }
            // Without other hosts there is nothing for the cores.
            _ => {}
        }
    }

    fn ticks(&self, _: &PayloadCore, _: Nanos, out: &mut InputQueue<PayloadCore>) {
        out.push_back(PayloadInput::Tick);
    }

    fn set_waker(&mut self, _: Waker) {}

    fn began(&mut self, _: Nanos, input: &PayloadInput) {
        if let PayloadInput::Hook { hook, .. } = input {
            self.metrics.told(hook);
        }
    }
}

impl ServesClients for StageActor {
    const OF: &'static str = "a stage";
}

impl Handler<ClientJoined> for StageActor {
    type Result = ();

    fn handle(&mut self, joined: ClientJoined, context: &mut Context<Self>) {
        let client = joined.client;
        let refused = self.with_adapter(context, |gateway, inputs| gateway.join(joined, inputs));
        if let Err((out, why)) = refused {
            tracing::warn!(client, why, "refused a connection");
            // It is dropped with the sender.
            let _ = out.try_send(FromHost::Refused { why });
        }
    }
}

impl Handler<MoriHook> for StageActor {
    type Result = ();

    fn handle(&mut self, MoriHook(hook): MoriHook, context: &mut Context<Self>) {
        let client = MORI_CLIENT;
        self.with_adapter(context, |gateway, inputs| {
            // A stranger has no other host asked.
            let hook = match hook {
                PayloadHook::Want { key, .. } => gateway.want_here(key),
                hook => hook,
            };
            inputs.push_back(PayloadInput::Hook { client, hook });
        });
    }
}

impl Handler<ClientMessage> for StageActor {
    type Result = ();

    fn handle(&mut self, said: ClientMessage, context: &mut Context<Self>) {
        self.with_adapter(context, |gateway, inputs| gateway.on_message(said, inputs));
    }
}

impl Handler<ClientLeft> for StageActor {
    type Result = ();

    fn handle(&mut self, ClientLeft(client): ClientLeft, context: &mut Context<Self>) {
        let (changes, idle) = self.with_adapter(context, |gateway, inputs| {
            gateway.on_left(client, inputs);
            (gateway.changes, gateway.config.idle.filter(|_| gateway.clients.is_empty()))
        });
        if let Some(idle) = idle {
            context.notify_later(IdleCheck(changes), idle);
        }
    }
}

impl Handler<IdleCheck> for StageActor {
    type Result = ();

    fn handle(&mut self, IdleCheck(changes): IdleCheck, context: &mut Context<Self>) {
        self.with_adapter(context, |gateway, _| gateway.end_if_idle(changes));
    }
}

impl Handler<DrainSidecar> for StageActor {
    type Result = ();

    fn handle(&mut self, _: DrainSidecar, context: &mut Context<Self>) {
        self.with_adapter(context, |_, inputs| inputs.push_back(PayloadInput::Drain));
    }
}

impl Handler<Scrape> for StageActor {
    type Result = String;

    fn handle(&mut self, _: Scrape, _: &mut Context<Self>) -> String {
        let (gateway, core) = self.adapter_and_machine();
        gateway.metrics.page(&core.gauges(), core.free_bytes())
    }
}
