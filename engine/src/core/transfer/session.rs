//! Peers and the sessions to their ranks: opened at the hello, reopened when they die, revoked by
//! a fence.

use super::fair_queue::FairQueue;
use super::stripe::Stripe;
use super::{QuiesceWaiter, Transfer, TransferTimer, TransferTurn};
use crate::core::command::DataCommand;
use crate::core::error::Failure;
use crate::core::ids::ConnectionId;
use crate::core::layout::{Geometry, Mismatch, RankLayout, Route, routes};
use crate::core::message::{Role, TransferReport};
use crate::core::time::Nanos;
use crate::core::timers::Timers;
use crate::fabric::{
    Address, Credits, FabricError, PeerId, Refused, RegionDesc, RegionId, SessionId,
};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SessionState {
    Opening,
    Open,
    /// Closed, not quiet yet.
    Closing,
    /// Quiet; opened anew after a pause.
    Pausing,
}

/// The session for one pair of regions, through all its reopenings.
#[derive(Debug)]
pub(super) struct TransferSession {
    pub(super) id: SessionId,
    pub(super) state: SessionState,
    pub(super) in_flight: u32,
    /// Last completion.
    pub(super) progress: Nanos,
    pub(super) peer: PeerId,
    local: RegionId,
    remote: RegionDesc,
    /// Reopenings since the last success.
    pub(super) reopens: u32,
}

#[derive(Debug, PartialEq)]
enum TransferPeerPhase {
    Opening,
    Ready,
    Failed(Failure),
    /// Number of answers that the fence waits for.
    Fencing(u32),
}

/// A peer engine in one connection.
#[derive(Debug)]
pub(super) struct TransferPeer {
    pub(super) ids: Vec<PeerId>,
    pub(super) routes: Vec<Route>,
    pub(super) stripes: Vec<Stripe>,
    pub(super) sessions: Vec<TransferSession>,
    pub(super) queue: FairQueue,
    /// What is in flight to each of its ranks.
    pub(super) used: BTreeMap<PeerId, Credits>,
    phase: TransferPeerPhase,
    /// What its KV cache looks like, for who digests what is exchanged with it.
    pub(super) layout: (Arc<Geometry>, Arc<Vec<RankLayout>>),
    /// The ways by which digests are made, once there was one; see [`Transfer::digest_routes`].
    pub(super) digest_routes: Option<Arc<Vec<Route>>>,
}

impl TransferPeer {
    /// The number of units, or why no flow can start.
    pub(super) fn usable(&self) -> Result<usize, Failure> {
        match &self.phase {
            TransferPeerPhase::Opening | TransferPeerPhase::Ready => Ok(self.stripes.len()),
            TransferPeerPhase::Failed(failure) => Err(failure.clone()),
            TransferPeerPhase::Fencing(_) => Err(Failure::PeerSilent),
        }
    }

    /// What is kept of it, its link apart: its ranks, the ways to them, and what each has in
    /// flight.
    pub(super) fn entries(&self) -> usize {
        let digested: usize = self.digest_routes.iter().map(|routes| routes.len()).sum();
        let ways = self.routes.len() + self.stripes.len() + self.sessions.len() + digested;
        self.ids.len() + ways + self.used.len()
    }

    /// Its sessions that are not open or on which nothing was done since they died, and itself if
    /// it is given up.
    pub(super) fn failures(&self) -> usize {
        let failed = |one: &&TransferSession| one.reopens > 0 || one.state != SessionState::Open;
        self.sessions.iter().filter(failed).count() + usize::from(!self.working())
    }

    pub(super) fn is_fencing(&self) -> bool {
        matches!(self.phase, TransferPeerPhase::Fencing(_))
    }

    fn working(&self) -> bool {
        matches!(self.phase, TransferPeerPhase::Opening | TransferPeerPhase::Ready)
    }
}

impl Transfer {
    pub(super) fn peer_known(
        &mut self,
        connection: ConnectionId,
        geometry: &Arc<Geometry>,
        ranks: &Arc<Vec<RankLayout>>,
        fence_key: u64,
        turn: &mut TransferTurn<'_>,
    ) {
        let mut ids = BTreeMap::new();
        for rank in ranks.iter() {
            let id = PeerId(self.fresh() as u32);
            ids.insert(rank.rank, id);
            turn.push(DataCommand::Connect { peer: id, address: rank.address.clone(), fence_key });
        }
        let mut peer = TransferPeer {
            ids: ids.values().copied().collect(),
            routes: Vec::new(),
            stripes: Vec::new(),
            sessions: Vec::new(),
            queue: FairQueue::default(),
            used: BTreeMap::new(),
            phase: TransferPeerPhase::Opening,
            layout: (geometry.clone(), ranks.clone()),
            digest_routes: None,
        };
        let built = match self.layout() {
            Some(layout) if self.initiates() => {
                self.build_routes(&mut peer, &layout, geometry, ranks, &ids)
            }
            Some(_) => Ok(()),
            None => Err(Mismatch("memory is not registered yet".into())),
        };
        if let Err(mismatch) = built {
            let failure = Failure::Mismatch(mismatch);
            peer.phase = TransferPeerPhase::Failed(failure.clone());
            turn.push(TransferReport::PeerFailed { peer: connection, failure });
        }
        let previous = self.peers.insert(connection, peer);
        assert!(previous.is_none(), "connection {connection} used twice");
        let count = self.peers.get(&connection).map_or(0, |peer| peer.sessions.len());
        for index in 0..count {
            self.reopen(connection, index, turn);
        }
        self.report_if_ready(connection, turn);
    }

    fn build_routes(
        &self,
        peer: &mut TransferPeer,
        layout: &RankLayout,
        geometry: &Geometry,
        ranks: &[RankLayout],
        ids: &BTreeMap<u16, PeerId>,
    ) -> Result<(), Mismatch> {
        let own = &self.config.geometry;
        let source = self.config.role == Role::Prefill;
        peer.routes = routes(source, (own, layout), (geometry, ranks))?;
        let mut known = BTreeMap::new();
        for (index, route) in peer.routes.iter().enumerate() {
            let rank = ranks
                .iter()
                .find(|rank| rank.rank == route.remote_rank)
                .ok_or_else(|| Mismatch(format!("no rank {}", route.remote_rank).into()))?;
            for (group, spec) in own.groups.iter().enumerate() {
                let run = |a: &u16, b: &u16| route.regions(*a) == route.regions(*b);
                let per_op = self.config.settings.layers_per_op.max(1) as usize;
                for layers in spec.layers.chunk_by(run).flat_map(|run| run.chunks(per_op)) {
                    let regions = route.regions(layers[0]);
                    let session = *known.entry((route.remote_rank, regions)).or_insert_with(|| {
                        peer.sessions.push(TransferSession {
                            id: SessionId(0),
                            state: SessionState::Pausing,
                            in_flight: 0,
                            progress: Nanos::ZERO,
                            peer: ids[&route.remote_rank],
                            local: RegionId(u32::from(regions.0)),
                            remote: rank.regions[usize::from(regions.1)].0.clone(),
                            reopens: 0,
                        });
                        peer.sessions.len() - 1
                    });
                    let sides = (&**own, geometry);
                    let route = (index, route);
                    peer.stripes.push(Stripe::new(session, group, route, layers, sides));
                }
            }
        }
        peer.stripes.sort_by_key(|unit| unit.last_layer);
        Ok(())
    }

    /// Opens a session that is quiet, under a new id.
    pub(super) fn reopen(
        &mut self,
        connection: ConnectionId,
        index: usize,
        turn: &mut TransferTurn<'_>,
    ) {
        let id = SessionId(self.fresh() as u32);
        let Some(peer) = self.peers.get_mut(&connection) else { return };
        if !peer.working() {
            return;
        }
        let session = &mut peer.sessions[index];
        session.id = id;
        session.state = SessionState::Opening;
        session.in_flight = 0;
        self.sessions.insert(id, (connection, index));
        self.timers.arm(TransferTimer::Opening(id), turn.now + self.config.open());
        turn.push(DataCommand::Open {
            session: id,
            local: session.local,
            peer: session.peer,
            remote: session.remote.clone(),
        });
    }

    fn session_mut(
        &mut self,
        id: SessionId,
    ) -> Option<(ConnectionId, usize, &mut TransferSession)> {
        let &(connection, index) = self.sessions.get(&id)?;
        let session = self.peers.get_mut(&connection)?.sessions.get_mut(index)?;
        (session.id == id).then_some((connection, index, session))
    }

    pub(super) fn opened(
        &mut self,
        id: SessionId,
        result: Result<(), FabricError>,
        turn: &mut TransferTurn<'_>,
    ) {
        let Some((connection, _, session)) = self.session_mut(id) else { return };
        if session.state != SessionState::Opening {
            return;
        }
        match result {
            Ok(()) => {
                session.state = SessionState::Open;
                self.timers.cancel(&TransferTimer::Opening(id));
                self.report_if_ready(connection, turn);
                self.unpark(connection);
            }
            Err(cause) => self.session_died(id, cause, turn),
        }
    }

    /// Flows that waited for a session of a peer try again.
    fn unpark(&mut self, connection: ConnectionId) {
        let Some(peer) = self.peers.get_mut(&connection) else { return };
        for id in peer.queue.unpark() {
            if let Some(flow) = self.flows.get_mut(&id) {
                flow.share.unlisted();
                self.list(id);
            }
        }
    }

    fn report_if_ready(&mut self, connection: ConnectionId, turn: &mut TransferTurn<'_>) {
        let Some(peer) = self.peers.get_mut(&connection) else { return };
        let open = peer.sessions.iter().all(|session| session.state == SessionState::Open);
        if peer.phase == TransferPeerPhase::Opening && open {
            peer.phase = TransferPeerPhase::Ready;
            turn.push(TransferReport::PeerReady { peer: connection });
        }
    }

    /// Tears a session down after an error; it is opened anew when it is quiet.
    pub(super) fn session_died(
        &mut self,
        id: SessionId,
        cause: FabricError,
        turn: &mut TransferTurn<'_>,
    ) {
        let Some((connection, index, session)) = self.session_mut(id) else { return };
        if !matches!(session.state, SessionState::Open | SessionState::Opening) {
            return;
        }
        session.state = SessionState::Closing;
        session.reopens += 1;
        let given_up = session.reopens;
        if let Some(peer) = self.peers.get_mut(&connection) {
            peer.queue.pace.forget(turn.now);
        }
        self.timers.cancel(&TransferTimer::Opening(id));
        self.timers.cancel(&TransferTimer::Stalled(id));
        turn.push(DataCommand::Close { session: id });
        self.quiesce(id, QuiesceWaiter::Reopen(connection, index), turn);
        if given_up > self.config.settings.reopens_max {
            self.peer_failed(connection, Failure::Fabric(cause), turn);
        }
    }

    pub(super) fn session_quiet(&mut self, now: Nanos, connection: ConnectionId, index: usize) {
        let Some(peer) = self.peers.get_mut(&connection) else { return };
        let working = peer.working();
        let session = &mut peer.sessions[index];
        if session.state != SessionState::Closing {
            return;
        }
        session.state = SessionState::Pausing;
        self.sessions.remove(&session.id);
        if working {
            let pause = self.config.settings.reopen_delay.scale(1 << session.reopens.min(10), 2);
            self.timers.arm(TransferTimer::Reopen(connection, index), now + pause);
        }
    }

    pub(super) fn check_stalled(&mut self, id: SessionId, turn: &mut TransferTurn<'_>) {
        let stall = self.config.stall();
        let Some((_, _, session)) = self.session_mut(id) else { return };
        if session.in_flight == 0 || planted!("nothing-is-ever-stalled") {
            return;
        }
        let due = session.progress + stall;
        if turn.now >= due {
            self.session_died(id, FabricError::AckTimeout, turn);
        } else {
            self.timers.arm(TransferTimer::Stalled(id), due);
        }
    }

    fn peer_failed(
        &mut self,
        connection: ConnectionId,
        failure: Failure,
        turn: &mut TransferTurn<'_>,
    ) {
        let Some(peer) = self.peers.get_mut(&connection) else { return };
        if !peer.working() {
            return;
        }
        peer.phase = TransferPeerPhase::Failed(failure.clone());
        self.fail_flows_of(connection, &failure, turn);
        turn.push(TransferReport::PeerFailed { peer: connection, failure });
    }

    fn fail_flows_of(
        &mut self,
        connection: ConnectionId,
        failure: &Failure,
        turn: &mut TransferTurn<'_>,
    ) {
        let flows: Vec<_> =
            self.flows.iter().filter(|(_, f)| f.peer == connection).map(|(id, _)| *id).collect();
        for flow in flows {
            self.fail_flow(flow, failure.clone(), true, turn);
        }
    }

    fn slot_of(&self, id: PeerId) -> Option<ConnectionId> {
        self.peers
            .iter()
            .find(|(_, peer)| peer.ids.contains(&id))
            .map(|(connection, _)| *connection)
    }

    pub(super) fn connect_refused(
        &mut self,
        id: PeerId,
        why: Refused,
        turn: &mut TransferTurn<'_>,
    ) {
        if let Some(connection) = self.slot_of(id) {
            self.peer_failed(connection, Failure::Refused(why), turn);
        }
    }

    pub(super) fn peer_down(&mut self, id: PeerId, turn: &mut TransferTurn<'_>) {
        let Some(connection) = self.slot_of(id) else { return };
        let Some(peer) = self.peers.get(&connection) else { return };
        let dead: Vec<_> =
            peer.sessions.iter().filter(|s| s.peer == id).map(|session| session.id).collect();
        for session in dead {
            self.session_died(session, FabricError::PeerGone, turn);
        }
    }

    /// Revokes everything between this rank and a peer, both ways.
    pub(super) fn fence(&mut self, connection: ConnectionId, turn: &mut TransferTurn<'_>) {
        let Some(peer) = self.peers.get_mut(&connection) else {
            turn.push(TransferReport::Fenced { peer: connection });
            return;
        };
        if peer.is_fencing() {
            return;
        }
        let ids = peer.ids.clone();
        let mut closing = Vec::new();
        for (index, session) in peer.sessions.iter_mut().enumerate() {
            self.timers.cancel(&TransferTimer::Reopen(connection, index));
            self.timers.cancel(&TransferTimer::Opening(session.id));
            self.timers.cancel(&TransferTimer::Stalled(session.id));
            match session.state {
                SessionState::Pausing => {}
                SessionState::Closing => closing.push(session.id),
                SessionState::Opening | SessionState::Open => {
                    session.state = SessionState::Closing;
                    turn.push(DataCommand::Close { session: session.id });
                    closing.push(session.id);
                }
            }
        }
        // One more than there are answers to wait for, so that no answer ends it half-way.
        peer.phase = TransferPeerPhase::Fencing(1 + (ids.len() + closing.len()) as u32);
        for session in closing {
            self.quiesce(session, QuiesceWaiter::Fence(connection), turn);
        }
        for id in ids {
            self.fencing.insert(id, connection);
            turn.push(DataCommand::Fence { peer: id });
        }
        self.fail_flows_of(connection, &Failure::PeerSilent, turn);
        self.fence_part_done(connection, turn);
    }

    pub(super) fn fenced(&mut self, id: PeerId, turn: &mut TransferTurn<'_>) {
        if let Some(connection) = self.fencing.remove(&id) {
            self.fence_part_done(connection, turn);
        }
    }

    pub(super) fn fence_part_done(
        &mut self,
        connection: ConnectionId,
        turn: &mut TransferTurn<'_>,
    ) {
        let Some(peer) = self.peers.get_mut(&connection) else { return };
        let TransferPeerPhase::Fencing(left) = &mut peer.phase else { return };
        *left -= 1;
        if *left > 0 {
            return;
        }
        let Some(peer) = self.peers.remove(&connection) else { return };
        self.sessions.retain(|_, (owner, _)| *owner != connection);
        for id in peer.ids {
            turn.push(DataCommand::Disconnect { peer: id });
        }
        turn.push(TransferReport::Fenced { peer: connection });
    }

    /// The backend was rebuilt: whatever was under way is over, and nothing of it lands any more.
    pub(super) fn reset(&mut self, address: Address, turn: &mut TransferTurn<'_>) {
        self.address = address;
        self.void = self.next_id;
        let lost = Failure::Fabric(FabricError::Backend("data plane was rebuilt".into()));
        for (flow, state) in std::mem::take(&mut self.flows) {
            if !planted!("a-new-backend-ends-no-flow") {
                turn.push(TransferReport::Flow { flow, state: state.final_state(lost.clone()) });
            }
        }
        self.reset_digests(turn);
        for (peer, state) in std::mem::take(&mut self.peers) {
            // The new backend has those that were connected when it was there already.
            for id in &state.ids {
                turn.push(DataCommand::Disconnect { peer: *id });
            }
            turn.push(if state.is_fencing() {
                TransferReport::Fenced { peer }
            } else {
                TransferReport::PeerFailed { peer, failure: lost.clone() }
            });
        }
        for source in self.sources.values_mut() {
            source.flows.clear();
        }
        self.sessions.clear();
        self.fencing.clear();
        self.pieces = 0;
        self.ring.clear();
        self.ops.clear();
        self.used = Credits::default();
        self.tickets.clear();
        self.timers = Timers::default();
        self.register_all(turn);
    }
}
