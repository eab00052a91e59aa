//! What the prefill and the decode core have in common: the turn of an input, peers, their
//! connection to the transfer actors, and the registration with the router.

mod payload_peers;
mod rebuilds;

use super::channel::{capability, is_awaited};
use super::config::CoreConfig;
use super::dialect::native::kind_of;
use super::engine_core::{CoreEffect, CoreInput, CoreTurn};
use super::error::{Failure, PeerViolation};
use super::heartbeat::Heartbeat;
use super::ids::{ConnectionId, EngineId, FlowId, Incarnation, RankSet, RequestId, TransferKey};
use super::layout::{BlockList, Geometry, RankLayout};
use super::machine::Gauges;
use super::message::{
    FlowState, Message, Mode, MoriioLeg, RouterEvent, TransferJob, TransferReport,
};
use super::moriio::{MoriioConfig, MoriioCounters, MoriioPeers};
use super::peers::{LocalEngine, PeerEvent, PeerInfo, PeerTurn, Peers};
use super::prompt_hash::PromptHash;
use super::time::Nanos;
use super::timers::Timers;
use crate::fabric::{ControlEvent, Endpoint};
use payload_peers::PayloadPeers;
use rebuilds::PeerRebuilds;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Blocks of one request, per group.
pub(super) type GroupBlocks = Arc<Vec<BlockList>>;

/// What a core learns from its peer manager.
#[derive(Debug)]
pub(super) enum PeerManagerEvent {
    /// Of a peer. One that is down is being fenced, and `Fenced` follows.
    Peer(PeerEvent),
    /// Nothing moves between the peer and this engine any more.
    Fenced {
        connection: ConnectionId,
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
    Router(RouterEvent),
    /// A rank of this engine cannot serve.
    Unusable {
        failure: Failure,
    },
}

/// A prefill or decode core behind its peer manager.
pub(super) trait EngineCore {
    type Hook;
    type Answer;

    fn peer_manager(&mut self) -> &mut PeerManager;

    fn on_hook(&mut self, hook: Self::Hook, turn: &mut CoreTurn<'_, Self::Answer>);

    /// News of the peers and of the own ranks; what is only for the log does not come here.
    fn on_event(&mut self, event: PeerManagerEvent, turn: &mut CoreTurn<'_, Self::Answer>);

    /// Deadlines of the core's own.
    fn on_deadlines(&mut self, turn: &mut CoreTurn<'_, Self::Answer>);

    /// The turn of one input.
    fn turn(&mut self, input: CoreInput<Self::Hook>, turn: &mut CoreTurn<'_, Self::Answer>) {
        match input {
            CoreInput::Hook(hook) => self.on_hook(hook, turn),
            CoreInput::Control(event) => self.peer_manager().control(event, turn),
            CoreInput::Report { rank, report } => {
                self.peer_manager().report(rank, report, turn);
            }
            CoreInput::Directory(call) => self.peer_manager().directory(call, turn),
            CoreInput::Drain => self.peer_manager().drain(turn),
            CoreInput::Tick => {
                self.peer_manager().tick(turn);
                self.on_deadlines(turn);
            }
        }
        loop {
            let events = self.peer_manager().take_events(turn);
            if events.is_empty() {
                break;
            }
            for event in events {
                if self.peer_manager().tell_payloads(&event, turn) {
                    continue;
                }
                match event {
                    PeerManagerEvent::Peer(PeerEvent::Violation(violation)) => {
                        turn.push(CoreEffect::Violation(violation));
                    }
                    PeerManagerEvent::Peer(PeerEvent::Refused { engine: peer, failure }) => {
                        turn.push(CoreEffect::Refused { peer, failure });
                    }
                    PeerManagerEvent::Router(event) => turn.push(CoreEffect::Router(event)),
                    event => self.on_event(event, turn),
                }
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PeerManagerTimer {
    Rebuild(ConnectionId),
}

fn peer_turn<'a, A>(turn: &'a mut CoreTurn<'_, A>, events: &'a mut Vec<PeerEvent>) -> PeerTurn<'a> {
    PeerTurn { now: turn.now, commands: turn, events }
}

#[derive(Debug)]
pub(super) struct PeerManager {
    tp: u16,
    geometry: Arc<Geometry>,
    mode: Mode,
    requests_max: usize,
    receivers_max: u32,
    rebuild_delay: Nanos,
    pub(super) peers: Peers,
    moriio: Option<MoriioPeers>,
    payload_peers: PayloadPeers,
    /// What the peers did that is not sorted yet.
    peer_events: Vec<PeerEvent>,
    /// What the core has not dealt with.
    events: Vec<PeerManagerEvent>,
    heartbeat: Option<Heartbeat>,
    layouts: Vec<Option<RankLayout>>,
    unusable: Option<Failure>,
    /// Peers that the ranks know.
    connected: BTreeSet<ConnectionId>,
    /// Peers being fenced and the ranks that have not answered.
    fencing: BTreeMap<ConnectionId, RankSet>,
    /// How many things are under way with a peer, and with all.
    uses: BTreeMap<ConnectionId, u32>,
    uses_total: u32,
    rebuilds: PeerRebuilds,
    timers: Timers<PeerManagerTimer>,
    violations: u32,
}

/// What an engine is to peers that speak MoRIIO; where KV is verified it deals with none.
fn moriio_of(config: &CoreConfig) -> Option<MoriioConfig> {
    let mut moriio = config.moriio.clone()?;
    if !config.verify.is_off() && !planted!("moriio-is-spoken-unverified") {
        moriio.closed.get_or_insert_with(|| {
            let engine = &config.engine;
            format!(
                "{engine} verifies KV, which peers that speak MoRIIO cannot prove: turn its `verify` \
                 off, or use a peer with kvferry"
            )
            .into()
        });
    }
    Some(moriio)
}

impl PeerManager {
    pub(super) fn new(config: &CoreConfig) -> PeerManager {
        let me = LocalEngine {
            engine: config.engine.clone(),
            incarnation: config.incarnation,
            role: config.role,
            geometry: config.geometry.clone(),
            capabilities: {
                let mode = match config.mode {
                    Mode::Push => capability::PUSH,
                    Mode::Pull => capability::PULL,
                };
                let with = |on: bool, ability| if on { ability } else { 0 };
                mode | with(config.payloads, capability::PAYLOADS)
                    | with(!config.verify.is_off(), capability::VERIFY)
            },
        };
        PeerManager {
            tp: config.geometry.tp,
            geometry: config.geometry.clone(),
            mode: config.mode,
            requests_max: config.settings.requests_max as usize,
            receivers_max: config.settings.receivers_max,
            rebuild_delay: config.settings.rebuild_delay,
            peers: Peers::new(config.channel.clone(), me, config.moriio.is_some()),
            moriio: moriio_of(config).map(|moriio| {
                MoriioPeers::new(moriio, (config.role, config.mode), config.geometry.clone())
            }),
            payload_peers: PayloadPeers::new(config.payloads, config.role),
            peer_events: Vec::new(),
            events: Vec::new(),
            heartbeat: Heartbeat::new(config),
            layouts: vec![None; usize::from(config.geometry.tp)],
            unusable: None,
            connected: BTreeSet::new(),
            fencing: BTreeMap::new(),
            uses: BTreeMap::new(),
            uses_total: 0,
            rebuilds: PeerRebuilds::default(),
            timers: Timers::default(),
            violations: 0,
        }
    }

    /// Whether a request with a leg of this mode, with a peer of this kind, can be taken beside
    /// `requests` others.
    pub(super) fn admit(
        &self,
        mode: Mode,
        peer: Option<&Arc<MoriioLeg>>,
        requests: usize,
    ) -> Result<(), Failure> {
        match (peer, &self.moriio) {
            (Some(_), None) => {
                let text = "the leg names a peer that speaks MoRIIO, this engine does not";
                return Err(Failure::mismatch(text));
            }
            (Some(leg), Some(moriio)) => moriio.admits(leg)?,
            (None, _) => {}
        }
        if let Some(failure) = &self.unusable {
            return Err(failure.clone());
        }
        if mode != self.mode {
            let text = format!("leg says {mode}, this engine does {}", self.mode);
            return Err(Failure::mismatch(text));
        }
        let full = requests >= self.requests_max && !planted!("requests-without-limit");
        if full { Err(Failure::Overload) } else { Ok(()) }
    }

    /// Why this engine can serve no further receiver, if it cannot.
    pub(super) fn unusable(&self) -> Option<&Failure> {
        let full = self.uses_total >= self.receivers_max && !planted!("receivers-without-limit");
        self.unusable.as_ref().or(full.then_some(&Failure::Overload))
    }

    pub(super) fn info(&self, connection: ConnectionId) -> Option<&PeerInfo> {
        match &self.moriio {
            Some(moriio) if connection.is_moriio() => moriio.info(connection),
            _ => self.peers.info(connection),
        }
    }

    /// The connection of a prefill that speaks MoRIIO, for one transfer.
    ///
    /// # Errors
    /// Why such a prefill cannot use this engine's memory.
    pub(super) fn reach_moriio<A>(
        &mut self,
        (request, key): (&RequestId, &TransferKey),
        peer: &Arc<MoriioLeg>,
        turn: &mut CoreTurn<'_, A>,
    ) -> Result<ConnectionId, Failure> {
        let moriio = self.moriio.as_mut().expect("checked when the leg was admitted");
        if peer.peer.is_some() {
            moriio.fits()?;
        }
        Ok(moriio.reach(request, &key.id, peer, &mut peer_turn(turn, &mut self.peer_events)))
    }

    /// A decode that speaks MoRIIO will fetch a prompt with this number of tokens and this hash.
    pub(super) fn expect_moriio<A>(
        &mut self,
        transfer: (&TransferKey, Mode),
        prompt: (u32, PromptHash),
        peer: &Arc<MoriioLeg>,
        turn: &mut CoreTurn<'_, A>,
    ) {
        if let Some(moriio) = &mut self.moriio {
            moriio.expect(transfer, prompt, peer, &mut peer_turn(turn, &mut self.peer_events));
        }
    }

    /// The engine is done with a transfer.
    pub(super) fn forget(&mut self, key: &TransferKey) {
        if let Some(moriio) = &mut self.moriio {
            moriio.forget(&key.id);
        }
    }

    pub(super) fn reach<A>(
        &mut self,
        engine: &EngineId,
        control: &Endpoint,
        incarnation: Option<Incarnation>,
        turn: &mut CoreTurn<'_, A>,
    ) -> ConnectionId {
        self.peers.reach(engine, control, incarnation, &mut peer_turn(turn, &mut self.peer_events))
    }

    /// Queues a message; a peer that is down gets nothing, which its `Down` has dealt with. One
    /// that would wait for ever for a message that finds no room is done with.
    pub(super) fn send<A>(
        &mut self,
        connection: ConnectionId,
        message: Message,
        turn: &mut CoreTurn<'_, A>,
    ) -> Result<(), Failure> {
        if let Some(moriio) = self.moriio.as_mut().filter(|_| connection.is_moriio()) {
            moriio.send(connection, message, &mut peer_turn(turn, &mut self.peer_events));
            return Ok(());
        }
        let awaited = is_awaited(&message);
        let sent =
            self.peers.send(connection, message, &mut peer_turn(turn, &mut self.peer_events));
        if awaited && sent == Err(Failure::Overload) {
            self.peers.end(
                connection,
                Failure::Overload,
                &mut peer_turn(turn, &mut self.peer_events),
            );
        }
        sent
    }

    pub(super) fn control<A>(&mut self, event: ControlEvent, turn: &mut CoreTurn<'_, A>) {
        match &mut self.heartbeat {
            Some(heartbeat) if heartbeat.owns(&event) => {
                let keys = heartbeat.control(&event, &mut peer_turn(turn, &mut self.peer_events));
                let abandoned = keys.into_iter().map(|key| PeerManagerEvent::Abandoned { key });
                self.events.extend(abandoned);
            }
            _ => {
                let native = match &mut self.moriio {
                    Some(moriio) => {
                        moriio.control(event, &mut peer_turn(turn, &mut self.peer_events))
                    }
                    None => Some(event),
                };
                if let Some(event) = native {
                    self.peers.control(event, &mut peer_turn(turn, &mut self.peer_events));
                }
            }
        }
    }

    pub(super) fn tick<A>(&mut self, turn: &mut CoreTurn<'_, A>) {
        self.peers.tick(&mut peer_turn(turn, &mut self.peer_events));
        if let Some(moriio) = &mut self.moriio {
            moriio.tick(&mut peer_turn(turn, &mut self.peer_events));
        }
        if let Some(heartbeat) = &mut self.heartbeat {
            heartbeat.tick(&mut self.peers, &mut peer_turn(turn, &mut self.peer_events));
        }
        while let Some(PeerManagerTimer::Rebuild(connection)) = self.timers.pop_due(turn.now) {
            self.connect_ranks(connection, turn);
        }
    }

    pub(super) fn deadline(&self) -> Option<Nanos> {
        let heartbeat = self.heartbeat.as_ref().and_then(Heartbeat::deadline);
        let moriio = self.moriio.as_ref().and_then(MoriioPeers::deadline);
        [self.peers.deadline(), self.timers.next(), heartbeat, moriio].into_iter().flatten().min()
    }

    pub(super) fn drain<A>(&mut self, turn: &mut CoreTurn<'_, A>) {
        if let Some(heartbeat) = &mut self.heartbeat {
            heartbeat.drain(&mut peer_turn(turn, &mut self.peer_events));
        }
    }

    /// Something is under way with the peer: notice if it falls silent.
    pub(super) fn hold<A>(&mut self, connection: ConnectionId, turn: &mut CoreTurn<'_, A>) {
        let uses = self.uses.entry(connection).or_default();
        *uses += 1;
        self.uses_total += 1;
        if *uses == 1 && !connection.is_moriio() {
            self.watch(connection, turn);
        }
    }

    /// One thing less is under way with the peer.
    pub(super) fn unhold<A>(&mut self, connection: ConnectionId, turn: &mut CoreTurn<'_, A>) {
        let Some(uses) = self.uses.get_mut(&connection) else { return };
        *uses -= 1;
        self.uses_total -= 1;
        if *uses == 0 {
            self.uses.remove(&connection);
            if !connection.is_moriio() {
                self.watch(connection, turn);
            }
        }
    }

    /// A prompt of a peer did not come, and why, or one did: told to the router with the
    /// registrations.
    pub(super) fn note_peer_result(
        &mut self,
        now: Nanos,
        peer: (&EngineId, Option<Incarnation>),
        failure: Option<&Failure>,
    ) {
        if let Some(heartbeat) = &mut self.heartbeat {
            heartbeat.peer(now, peer, failure);
        }
    }

    /// Tells the router why a leg failed.
    pub(super) fn note_failed_leg(
        &mut self,
        now: Nanos,
        leg: (&TransferKey, u32),
        failure: &Failure,
    ) {
        if let Some(heartbeat) = &mut self.heartbeat {
            heartbeat.leg_failed(now, leg, failure);
        }
    }

    /// A message that this role never gets.
    pub(super) fn violation(
        &mut self,
        connection: ConnectionId,
        message: &Message,
    ) -> PeerViolation {
        self.violations = self.violations.saturating_add(1);
        PeerViolation {
            peer: self.info(connection).map_or("unknown".into(), |info| info.engine.0.clone()),
            frame: kind_of(message).name().into(),
            rule: "not said to this role".into(),
        }
    }

    /// What the core is to deal with, in order; ask until there is nothing. Connects ranks to new
    /// peers and fences lost ones.
    pub(super) fn take_events<A>(&mut self, turn: &mut CoreTurn<'_, A>) -> Vec<PeerManagerEvent> {
        if let Some(heartbeat) = &mut self.heartbeat {
            self.events
                .extend(heartbeat.take_router_events().into_iter().map(PeerManagerEvent::Router));
        }
        for event in std::mem::take(&mut self.peer_events) {
            let lost = match &event {
                PeerEvent::Down { connection, .. } => Some(*connection),
                _ => None,
            };
            if let PeerEvent::Up { connection } = &event {
                self.connect_ranks(*connection, turn);
            }
            self.events.push(PeerManagerEvent::Peer(event));
            if let Some(connection) = lost {
                self.rebuilds.forget(connection);
                self.timers.cancel(&PeerManagerTimer::Rebuild(connection));
                self.fence(connection, turn);
            }
        }
        std::mem::take(&mut self.events)
    }

    fn connect_ranks<A>(&mut self, connection: ConnectionId, turn: &mut CoreTurn<'_, A>) {
        let Some(info) = self.info(connection).cloned() else { return };
        self.connected.insert(connection);
        turn.push(TransferJob::Peer {
            peer: connection,
            geometry: info.geometry,
            ranks: info.ranks,
            fence_key: info.fence_key,
        });
    }

    fn fence<A>(&mut self, connection: ConnectionId, turn: &mut CoreTurn<'_, A>) {
        if self.fencing.contains_key(&connection) {
            return;
        }
        if !self.connected.remove(&connection) {
            return self.events.push(PeerManagerEvent::Fenced { connection });
        }
        self.fencing.insert(connection, RankSet::first(self.tp));
        self.peers.reserve(self.fencing.len());
        turn.push(TransferJob::Fence { peer: connection });
    }

    pub(super) fn report<A>(
        &mut self,
        rank: u16,
        report: TransferReport,
        turn: &mut CoreTurn<'_, A>,
    ) {
        match report {
            TransferReport::Ready { layout } => self.rank_ready(rank, layout, turn),
            TransferReport::Unusable { failure } => {
                self.unusable = Some(failure.clone());
                self.events.push(PeerManagerEvent::Unusable { failure });
            }
            TransferReport::PeerReady { peer } => self.rebuilds.ready(peer, rank),
            TransferReport::PeerFailed { peer, failure } if peer.is_moriio() => {
                // Nobody else says that it is gone.
                if let Some(moriio) = &mut self.moriio {
                    moriio.fail(peer, failure, &mut peer_turn(turn, &mut self.peer_events));
                }
            }
            TransferReport::PeerFailed { peer, .. } => self.fence(peer, turn),
            TransferReport::Fenced { peer } => self.rank_fenced(rank, peer, turn),
            TransferReport::Flow { flow, state } => {
                self.events.push(PeerManagerEvent::Flow { rank, flow, state });
            }
        }
    }

    fn rank_ready<A>(&mut self, rank: u16, layout: RankLayout, turn: &mut CoreTurn<'_, A>) {
        let Some(connection) = self.layouts.get_mut(usize::from(rank)) else { return };
        *connection = Some(layout);
        if let Some(ranks) = self.layouts.iter().cloned().collect::<Option<Vec<_>>>() {
            if let Some(moriio) = &mut self.moriio {
                moriio.set_ranks(ranks.clone(), &mut peer_turn(turn, &mut self.peer_events));
            }
            if let Some(heartbeat) = &mut self.heartbeat {
                heartbeat.start(
                    (&self.geometry, &ranks),
                    &mut self.peers,
                    &mut peer_turn(turn, &mut self.peer_events),
                );
            }
            self.peers.set_ranks(ranks, &mut peer_turn(turn, &mut self.peer_events));
        }
    }

    fn rank_fenced<A>(&mut self, rank: u16, connection: ConnectionId, turn: &mut CoreTurn<'_, A>) {
        let Some(fencing) = self.fencing.get_mut(&connection) else { return };
        fencing.remove(rank);
        if !fencing.is_empty() && !planted!("fenced-by-the-first-rank") {
            return;
        }
        self.fencing.remove(&connection);
        self.peers.reserve(self.fencing.len());
        self.events.push(PeerManagerEvent::Fenced { connection });
        if self.peers.info(connection).is_none() {
            return;
        }
        if let Some(before) = self.rebuilds.failed(connection, self.tp) {
            let pause = self.rebuild_delay.scale(1 << before, 1);
            self.timers.arm(PeerManagerTimer::Rebuild(connection), turn.now + pause);
        } else {
            let unacked_releases =
                self.peers.close(connection, &mut peer_turn(turn, &mut self.peer_events));
            let failure = Failure::Unreachable;
            self.events.push(PeerManagerEvent::Peer(PeerEvent::Down {
                connection,
                failure,
                unacked_releases,
            }));
            self.events.push(PeerManagerEvent::Fenced { connection });
        }
    }

    /// What was counted of peers that speak MoRIIO.
    pub(super) fn moriio(&self) -> MoriioCounters {
        self.moriio.as_ref().map(MoriioPeers::counters).unwrap_or_default()
    }

    pub(super) fn gauges(&self) -> Gauges {
        let peers = self.peers.gauges();
        let [heartbeat, troubles] = self.heartbeat.as_ref().map_or([0; 2], Heartbeat::sizes);
        let moriio = self.moriio.as_ref().map(MoriioPeers::gauges).unwrap_or_default();
        let known = self.connected.len() + self.rebuilds.len() + self.payload_peers.len();
        let remembered = known as u32 + troubles;
        Gauges {
            queued: peers.queued + moriio.queued + self.fencing.len() as u32,
            peers: peers.peers + moriio.peers,
            links: peers.links + moriio.links,
            entries: moriio.entries + (self.uses.len() + self.timers.len()) as u32,
            remembered: peers.remembered + moriio.remembered + remembered,
            failures: peers.failures + moriio.failures + self.rebuilds.len() as u32 + troubles,
            delivered: peers.delivered,
            violations: [self.violations, heartbeat, moriio.violations]
                .into_iter()
                .fold(peers.violations, u32::saturating_add),
            ..Gauges::default()
        }
    }
}
