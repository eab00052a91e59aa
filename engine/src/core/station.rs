//! What the prefill and the decode core have in common: peers, their connection to the transfer
//! actors, and the registration with the router.

use super::beacon::Beacon;
use super::channel::{ChannelConfig, capability};
use super::command::ControlCommand;
use super::dialect::native::kind_of;
use super::error::{Failure, PeerViolation};
use super::ids::{EngineId, FlowId, Incarnation, PeerSlot, RankSet, RequestId, TransferKey};
use super::layout::{BlockList, Geometry, Mismatch, RankLayout};
use super::machine::{Gauges, Outbox};
use super::message::{FlowState, Job, Message, Mode, MoriioPeer, Report, Role, RouterNews};
use super::moriio::{MoriioConfig, MoriioCounters, MoriioPeers};
use super::peers::{Me, Out, PeerEvent, PeerInfo, Peers};
use super::time::Nanos;
use super::timers::Timers;
use crate::fabric::{ControlEvent, Endpoint};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Who a prefill or decode core is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoreConfig {
    /// Name of the engine core; one per DP rank.
    pub engine: EngineId,
    /// Its life.
    pub incarnation: Incarnation,
    /// What it does.
    pub role: Role,
    /// How it transfers.
    pub mode: Mode,
    /// Its KV cache.
    pub geometry: Arc<Geometry>,
    /// Where legs are sent.
    pub http: Endpoint,
    /// Where peers say hello.
    pub control: Endpoint,
    /// DP rank and number of DP ranks.
    pub dp: (u16, u16),
    /// Discovery endpoint of the router, if there is one.
    pub router: Option<Endpoint>,
    /// Times and limits.
    pub settings: CoreSettings,
    /// Times and limits of the channels to peers.
    pub channel: ChannelConfig,
    /// Who it is to peers that speak MoRIIO, if it deals with any.
    pub moriio: Option<MoriioConfig>,
}

/// Times and limits of a prefill or decode core.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CoreSettings {
    /// Time between registrations.
    pub heartbeat: Nanos,
    /// Length of a source lease: how long a finished prefill waits for its receivers, and how long
    /// a reader may read without renewing.
    pub lease: Nanos,
    /// What a reader takes off a lease, in percent, because clocks differ.
    pub drift_percent: u32,
    /// How long an announcement waits for its prefill leg.
    pub orphan: Nanos,
    /// How long the receivers of a preempted prompt wait until it is scheduled again.
    pub resume: Nanos,
    /// Transfers announced before their prefill leg arrived.
    pub early_max: u32,
    /// Remembered ids of ended transfers.
    pub tombstones_max: u32,
    /// Pause before a peer whose sessions failed is connected anew; doubles.
    pub rebuild_delay: Nanos,
    /// Requests with a leg at one time.
    pub requests_max: u32,
    /// Receivers at one time, all prompts together; further ones are refused.
    pub receivers_max: u32,
    /// Push: how long a computed prompt waits for receivers that have asked for it to say where it
    /// shall go, at least a lease. They may wait for blocks themselves.
    pub claim: Nanos,
}

impl Default for CoreSettings {
    fn default() -> Self {
        CoreSettings {
            heartbeat: Nanos::from_secs(1),
            lease: Nanos::from_secs(30),
            drift_percent: 10,
            orphan: Nanos::from_secs(30),
            resume: Nanos::from_secs(5),
            early_max: 65_536,
            tombstones_max: 4_096,
            rebuild_delay: Nanos::from_ms(200),
            requests_max: 65_536,
            receivers_max: 262_144,
            claim: Nanos::from_secs(600),
        }
    }
}

/// Times in a row that the ranks of a peer that still answers are connected anew, before the
/// conversation is ended.
const REBUILDS_MAX: u32 = 5;

/// True if the peer would wait for the message for ever. Who asks for something is told if it cannot
/// be asked for; leases and sources end by themselves.
fn is_awaited(message: &Message) -> bool {
    !matches!(
        message,
        Message::Ask { .. }
            | Message::Announce { .. }
            | Message::Pull { .. }
            | Message::Renew { .. }
            | Message::Renewed { .. }
            | Message::Release { .. }
    )
}

/// Blocks of one request, per group.
pub(super) type Blocks = Arc<Vec<BlockList>>;

/// What a core learns from its station.
#[derive(Debug)]
pub(super) enum News {
    /// Of a peer. One that is down is being fenced, and `Fenced` follows.
    Peer(PeerEvent),
    /// Nothing moves between the peer and this engine any more.
    Fenced {
        slot: PeerSlot,
    },
    Flow {
        rank: u16,
        flow: FlowId,
        state: FlowState,
    },
    /// The router says that nobody will fetch what is left of a transfer.
    Abandoned {
        key: TransferKey,
    },
    /// What becomes of the registrations.
    Router(RouterNews),
    /// A rank of this engine cannot serve.
    Unusable {
        failure: Failure,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Rebuild(PeerSlot),
}

fn peer_out<'a, E: From<ControlCommand>>(
    out: &'a mut Outbox<E>,
    events: &'a mut Vec<PeerEvent>,
) -> Out<'a> {
    Out { commands: out, events }
}

#[derive(Debug)]
pub(super) struct Station {
    tp: u16,
    geometry: Arc<Geometry>,
    mode: Mode,
    requests_max: usize,
    receivers_max: u32,
    rebuild_delay: Nanos,
    pub(super) peers: Peers,
    moriio: Option<MoriioPeers>,
    /// What the peers did that the core has not dealt with.
    events: Vec<PeerEvent>,
    beacon: Option<Beacon>,
    layouts: Vec<Option<RankLayout>>,
    unusable: Option<Failure>,
    /// Peers that the ranks know.
    connected: BTreeSet<PeerSlot>,
    /// Peers being fenced and the ranks that have not answered.
    fencing: BTreeMap<PeerSlot, RankSet>,
    /// How many things are under way with a peer, and with all.
    uses: BTreeMap<PeerSlot, u32>,
    uses_total: u32,
    /// Times in a row that a live peer was connected anew.
    rebuilds: BTreeMap<PeerSlot, u32>,
    timers: Timers<Timer>,
    violations: u32,
}

impl Station {
    pub(super) fn new(config: &CoreConfig) -> Station {
        let me = Me {
            engine: config.engine.clone(),
            incarnation: config.incarnation,
            role: config.role,
            geometry: config.geometry.clone(),
            capabilities: match config.mode {
                Mode::Push => capability::PUSH,
                Mode::Pull => capability::PULL,
            },
        };
        Station {
            tp: config.geometry.tp,
            geometry: config.geometry.clone(),
            mode: config.mode,
            requests_max: config.settings.requests_max as usize,
            receivers_max: config.settings.receivers_max,
            rebuild_delay: config.settings.rebuild_delay,
            peers: Peers::new(config.channel.clone(), me, config.moriio.is_some()),
            moriio: config
                .moriio
                .clone()
                .map(|moriio| MoriioPeers::new(moriio, config.role, config.geometry.clone())),
            events: Vec::new(),
            beacon: Beacon::new(config),
            layouts: vec![None; usize::from(config.geometry.tp)],
            unusable: None,
            connected: BTreeSet::new(),
            fencing: BTreeMap::new(),
            uses: BTreeMap::new(),
            uses_total: 0,
            rebuilds: BTreeMap::new(),
            timers: Timers::default(),
            violations: 0,
        }
    }

    /// Whether a request with a leg of this mode, with a peer of this kind, can be taken beside
    /// `requests` others.
    pub(super) fn admit(
        &self,
        mode: Mode,
        peer: Option<&Arc<MoriioPeer>>,
        requests: usize,
    ) -> Result<(), Failure> {
        match (peer, &self.moriio) {
            (Some(_), None) => {
                let text = "the leg names a peer that speaks MoRIIO, this engine does not";
                return Err(Failure::Mismatch(Mismatch(text.into())));
            }
            (Some(_), Some(moriio)) => moriio.admits()?,
            (None, _) => {}
        }
        if let Some(failure) = &self.unusable {
            return Err(failure.clone());
        }
        if mode != self.mode {
            let text = format!("leg says {mode}, this engine does {}", self.mode);
            return Err(Failure::Mismatch(Mismatch(text.into())));
        }
        let full = requests >= self.requests_max && !planted!("requests-without-limit");
        if full { Err(Failure::Overload) } else { Ok(()) }
    }

    /// Why this engine can serve no further receiver, if it cannot.
    pub(super) fn unusable(&self) -> Option<&Failure> {
        let full = self.uses_total >= self.receivers_max && !planted!("receivers-without-limit");
        self.unusable.as_ref().or(full.then_some(&Failure::Overload))
    }

    pub(super) fn info(&self, slot: PeerSlot) -> Option<&PeerInfo> {
        match &self.moriio {
            Some(moriio) if slot.is_moriio() => moriio.info(slot),
            _ => self.peers.info(slot),
        }
    }

    /// The slot of a prefill that speaks MoRIIO, for one transfer.
    pub(super) fn reach_moriio<E: From<ControlCommand>>(
        &mut self,
        now: Nanos,
        (request, key): (&RequestId, &TransferKey),
        peer: &Arc<MoriioPeer>,
        out: &mut Outbox<E>,
    ) -> PeerSlot {
        let moriio = self.moriio.as_mut().expect("checked when the leg was admitted");
        moriio.reach(now, request, &key.id, peer, &mut peer_out(out, &mut self.events))
    }

    /// A decode that speaks MoRIIO is to fetch a prompt of this many tokens.
    pub(super) fn expect_moriio<E: From<ControlCommand>>(
        &mut self,
        now: Nanos,
        key: &TransferKey,
        wanted: (Mode, u32),
        peer: &Arc<MoriioPeer>,
        out: &mut Outbox<E>,
    ) {
        if let Some(moriio) = &mut self.moriio {
            moriio.expect(now, key, wanted, peer, &mut peer_out(out, &mut self.events));
        }
    }

    /// The engine is done with a transfer.
    pub(super) fn forget(&mut self, key: &TransferKey) {
        if let Some(moriio) = &mut self.moriio {
            moriio.forget(&key.id);
        }
    }

    pub(super) fn reach<E: From<ControlCommand>>(
        &mut self,
        now: Nanos,
        engine: &EngineId,
        control: &Endpoint,
        life: Option<Incarnation>,
        out: &mut Outbox<E>,
    ) -> PeerSlot {
        self.peers.reach(now, engine, control, life, &mut peer_out(out, &mut self.events))
    }

    /// Queues a message; a peer that is down gets nothing, which its `Down` has dealt with. One that
    /// would wait for ever for a message that finds no room is done with.
    pub(super) fn send<E: From<ControlCommand>>(
        &mut self,
        now: Nanos,
        slot: PeerSlot,
        message: Message,
        out: &mut Outbox<E>,
    ) -> Result<(), Failure> {
        if let Some(moriio) = self.moriio.as_mut().filter(|_| slot.is_moriio()) {
            moriio.send(now, slot, message, &mut peer_out(out, &mut self.events));
            return Ok(());
        }
        let awaited = is_awaited(&message);
        let sent = self.peers.send(now, slot, message, &mut peer_out(out, &mut self.events));
        if awaited && sent == Err(Failure::Overload) {
            self.peers.fail(now, slot, Failure::Overload, &mut peer_out(out, &mut self.events));
        }
        sent
    }

    pub(super) fn control<E: From<ControlCommand>>(
        &mut self,
        now: Nanos,
        event: ControlEvent,
        news: &mut Vec<News>,
        out: &mut Outbox<E>,
    ) {
        match &mut self.beacon {
            Some(beacon) if beacon.owns(&event) => beacon.control(now, &event, news, out),
            _ => {
                let native = match &mut self.moriio {
                    Some(moriio) => {
                        moriio.control(now, event, &mut peer_out(out, &mut self.events))
                    }
                    None => Some(event),
                };
                if let Some(event) = native {
                    self.peers.control(now, event, &mut peer_out(out, &mut self.events));
                }
            }
        }
    }

    pub(super) fn tick<E: From<ControlCommand> + From<Job>>(
        &mut self,
        now: Nanos,
        out: &mut Outbox<E>,
    ) {
        self.peers.tick(now, &mut peer_out(out, &mut self.events));
        if let Some(moriio) = &mut self.moriio {
            moriio.tick(now, &mut peer_out(out, &mut self.events));
        }
        if let Some(beacon) = &mut self.beacon {
            beacon.tick(now, &mut self.peers, out);
        }
        while let Some(Timer::Rebuild(slot)) = self.timers.pop_due(now) {
            self.connect_ranks(slot, out);
        }
    }

    pub(super) fn deadline(&self) -> Option<Nanos> {
        let beacon = self.beacon.as_ref().and_then(Beacon::deadline);
        let moriio = self.moriio.as_ref().and_then(MoriioPeers::deadline);
        [self.peers.deadline(), self.timers.next(), beacon, moriio].into_iter().flatten().min()
    }

    pub(super) fn drain<E: From<ControlCommand>>(&mut self, now: Nanos, out: &mut Outbox<E>) {
        if let Some(beacon) = &mut self.beacon {
            beacon.drain(now, out);
        }
    }

    /// Something is under way with the peer: notice if it falls silent.
    pub(super) fn hold<E: From<ControlCommand>>(
        &mut self,
        now: Nanos,
        slot: PeerSlot,
        out: &mut Outbox<E>,
    ) {
        let uses = self.uses.entry(slot).or_default();
        *uses += 1;
        self.uses_total += 1;
        if *uses == 1 && !slot.is_moriio() {
            self.peers.watch(now, slot, true, &mut peer_out(out, &mut self.events));
        }
    }

    /// One thing less is under way with the peer.
    pub(super) fn unhold<E: From<ControlCommand>>(
        &mut self,
        now: Nanos,
        slot: PeerSlot,
        out: &mut Outbox<E>,
    ) {
        let Some(uses) = self.uses.get_mut(&slot) else { return };
        *uses -= 1;
        self.uses_total -= 1;
        if *uses == 0 {
            self.uses.remove(&slot);
            if slot.is_moriio() {
                return;
            }
            self.peers.watch(now, slot, false, &mut peer_out(out, &mut self.events));
        }
    }

    /// A prompt of a peer did not come, and why, or one did: told to the router with the
    /// registrations.
    pub(super) fn peer_carried(
        &mut self,
        now: Nanos,
        peer: (&EngineId, Option<Incarnation>),
        failure: Option<&Failure>,
    ) {
        if let Some(beacon) = &mut self.beacon {
            beacon.peer(now, peer, failure);
        }
    }

    /// A message that this role never gets.
    pub(super) fn violation(&mut self, slot: PeerSlot, message: &Message) -> PeerViolation {
        self.violations = self.violations.saturating_add(1);
        PeerViolation {
            peer: self.info(slot).map_or("unknown".into(), |info| info.engine.0.clone()),
            frame: kind_of(message).name().into(),
            rule: "not said to this role".into(),
        }
    }

    /// Sorts what the peers said: connects ranks to new peers, fences lost ones, passes on the
    /// rest. Call it until there is no news.
    pub(super) fn digest<E: From<ControlCommand> + From<Job>>(
        &mut self,
        news: &mut Vec<News>,
        out: &mut Outbox<E>,
    ) {
        if let Some(beacon) = &mut self.beacon {
            news.extend(beacon.said().into_iter().map(News::Router));
        }
        let events = std::mem::take(&mut self.events);
        for event in events {
            match &event {
                PeerEvent::Up { slot } => self.connect_ranks(*slot, out),
                PeerEvent::Down { slot, .. } => {
                    let slot = *slot;
                    self.rebuilds.remove(&slot);
                    self.timers.cancel(&Timer::Rebuild(slot));
                    news.push(News::Peer(event));
                    self.fence(slot, news, out);
                    continue;
                }
                _ => {}
            }
            news.push(News::Peer(event));
        }
    }

    fn connect_ranks<E: From<Job>>(&mut self, slot: PeerSlot, out: &mut Outbox<E>) {
        let Some(info) = self.info(slot).cloned() else { return };
        self.connected.insert(slot);
        out.push(Job::Peer {
            peer: slot,
            geometry: info.geometry,
            ranks: info.ranks,
            pass: info.pass,
        });
    }

    fn fence<E: From<Job>>(&mut self, slot: PeerSlot, news: &mut Vec<News>, out: &mut Outbox<E>) {
        if self.fencing.contains_key(&slot) {
            return;
        }
        if !self.connected.remove(&slot) {
            return news.push(News::Fenced { slot });
        }
        self.fencing.insert(slot, RankSet::first(self.tp));
        self.peers.reserve(self.fencing.len());
        out.push(Job::Fence { peer: slot });
    }

    pub(super) fn report<E: From<ControlCommand> + From<Job>>(
        &mut self,
        now: Nanos,
        rank: u16,
        report: Report,
        news: &mut Vec<News>,
        out: &mut Outbox<E>,
    ) {
        match report {
            Report::Ready { layout } => self.rank_ready(now, rank, layout, out),
            Report::Unusable { failure } => {
                self.unusable = Some(failure.clone());
                news.push(News::Unusable { failure });
            }
            Report::PeerReady { peer } => {
                self.rebuilds.remove(&peer);
            }
            Report::PeerFailed { peer, failure } if peer.is_moriio() => {
                // Nobody else says that it is gone.
                if let Some(moriio) = &mut self.moriio {
                    moriio.fail(peer, failure, &mut peer_out(out, &mut self.events));
                }
            }
            Report::PeerFailed { peer, .. } => self.fence(peer, news, out),
            Report::Fenced { peer } => self.rank_fenced(now, rank, peer, news, out),
            Report::Flow { flow, state } => news.push(News::Flow { rank, flow, state }),
        }
    }

    fn rank_ready<E: From<ControlCommand>>(
        &mut self,
        now: Nanos,
        rank: u16,
        layout: RankLayout,
        out: &mut Outbox<E>,
    ) {
        let Some(slot) = self.layouts.get_mut(usize::from(rank)) else { return };
        *slot = Some(layout);
        if let Some(ranks) = self.layouts.iter().cloned().collect::<Option<Vec<_>>>() {
            if let Some(moriio) = &mut self.moriio {
                moriio.set_ranks(now, ranks.clone(), &mut peer_out(out, &mut self.events));
            }
            if let Some(beacon) = &mut self.beacon {
                beacon.start(now, (&self.geometry, &ranks), &mut self.peers, out);
            }
            self.peers.set_ranks(now, ranks, &mut peer_out(out, &mut self.events));
        }
    }

    fn rank_fenced<E: From<ControlCommand>>(
        &mut self,
        now: Nanos,
        rank: u16,
        slot: PeerSlot,
        news: &mut Vec<News>,
        out: &mut Outbox<E>,
    ) {
        let Some(fencing) = self.fencing.get_mut(&slot) else { return };
        fencing.remove(rank);
        if !fencing.is_empty() && !planted!("fenced-by-the-first-rank") {
            return;
        }
        self.fencing.remove(&slot);
        self.peers.reserve(self.fencing.len());
        news.push(News::Fenced { slot });
        if self.peers.info(slot).is_none() {
            return;
        }
        let tries = self.rebuilds.entry(slot).or_default();
        if *tries < REBUILDS_MAX {
            let pause = self.rebuild_delay.scale(1 << *tries, 1);
            *tries += 1;
            self.timers.arm(Timer::Rebuild(slot), now + pause);
        } else {
            self.rebuilds.remove(&slot);
            let unsaid = self.peers.close(now, slot, &mut peer_out(out, &mut self.events));
            let failure = Failure::Unreachable;
            news.push(News::Peer(PeerEvent::Down { slot, failure, unsaid }));
            news.push(News::Fenced { slot });
        }
    }

    /// What was counted of peers that speak MoRIIO.
    pub(super) fn moriio(&self) -> MoriioCounters {
        self.moriio.as_ref().map(MoriioPeers::counters).unwrap_or_default()
    }

    pub(super) fn gauges(&self) -> Gauges {
        let peers = self.peers.gauges();
        let [beacon, troubles] = self.beacon.as_ref().map_or([0; 2], Beacon::sizes);
        let moriio = self.moriio.as_ref().map(MoriioPeers::gauges).unwrap_or_default();
        let remembered = (self.connected.len() + self.rebuilds.len()) as u32 + troubles;
        Gauges {
            queued: peers.queued + moriio.queued + self.fencing.len() as u32,
            peers: peers.peers + moriio.peers,
            links: peers.links + moriio.links,
            entries: moriio.entries + (self.uses.len() + self.timers.len()) as u32,
            remembered: peers.remembered + moriio.remembered + remembered,
            delivered: peers.delivered,
            violations: [self.violations, beacon, moriio.violations]
                .into_iter()
                .fold(peers.violations, u32::saturating_add),
            ..Gauges::default()
        }
    }
}
