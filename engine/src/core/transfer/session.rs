//! Peers and the sessions to their ranks: opened at the hello, reopened when they die, revoked by
//! a fence.

use super::link::Link;
use super::post::Piece;
use super::{Out, Timer, Transfer, Waiter};
use crate::core::command::DataCommand;
use crate::core::error::Failure;
use crate::core::ids::PeerSlot;
use crate::core::layout::{
    Footprint, Geometry, GroupKind, Mismatch, RankLayout, Route, Slices, Span, routes,
};
use crate::core::message::{Report, Role};
use crate::core::time::Nanos;
use crate::fabric::{Cause, Credits, PeerId, Refused, RegionDesc, RegionId, SessionId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Layers of one group that travel together between this rank and one rank of a peer.
#[derive(Debug)]
pub(super) struct Unit {
    pub(super) session: usize,
    pub(super) group: usize,
    /// The layer that is computed last.
    pub(super) last_layer: u16,
    route: usize,
    layers: Vec<u16>,
    kind: GroupKind,
    /// Tokens are sent in multiples of the larger block size of the two sides.
    align: u32,
    /// Tokens of which only all have a meaning.
    whole: u32,
    /// Of all its layers.
    footprint: Footprint,
}

impl Unit {
    /// Of `ready` tokens, those that may be sent now.
    pub(super) fn sendable(&self, ready: u32, tokens: u32) -> u32 {
        if ready >= tokens {
            tokens
        } else if self.kind == GroupKind::State {
            0
        } else {
            ready / self.align * self.align
        }
    }

    /// First token from `from` on that is moved of a prompt of `tokens` tokens; what is outside a
    /// sliding window is left out.
    fn first(&self, from: u32, tokens: u32) -> u32 {
        let from = match self.kind {
            GroupKind::Window { tokens: window } => {
                let window = if planted!("window-is-half") { window / 2 } else { window };
                from.max(tokens.saturating_sub(window))
            }
            GroupKind::Full | GroupKind::State => from,
        };
        from - from % self.whole
    }

    /// How far one operation gets with a piece of a prompt of `tokens` tokens: to the end of a block,
    /// one at least.
    pub(super) fn cut(&self, piece: &Piece, tokens: u32, most: &Credits) -> u32 {
        if piece.is_part() || self.kind == GroupKind::State {
            return piece.to;
        }
        let of = |most: u64, each: u64| most / each.max(1);
        let blocks = of(most.bytes, self.footprint.block_bytes)
            .min(of(most.ranges, self.footprint.block_ranges));
        let first = u64::from(self.first(piece.from, tokens));
        let align = u64::from(self.align.max(1));
        let end = first.saturating_add(blocks.saturating_mul(self.footprint.block_tokens));
        let end = (end / align * align).max((first / align + 1) * align);
        u32::try_from(end).map_or(piece.to, |end| end.min(piece.to))
    }

    /// No less than the operation for these tokens takes of a plane's credit.
    pub(super) fn bound(&self, (from, to): (u32, u32), tokens: u32) -> Credits {
        let Footprint { block_tokens, block_bytes, block_ranges, token_ranges } = self.footprint;
        let (first, end) = match self.kind {
            GroupKind::State => (0, 1),
            _ => (u64::from(self.first(from, tokens)), u64::from(to)),
        };
        let blocks = end.div_ceil(block_tokens).saturating_sub(first / block_tokens);
        let over = (block_tokens - first % block_tokens) % block_tokens;
        Credits {
            operations: 1,
            ranges: (blocks * block_ranges + over * token_ranges).max(1),
            bytes: blocks * block_bytes,
        }
    }

    /// Plans a span of a prompt of `tokens` tokens.
    pub(super) fn plan(
        &self,
        routes: &[Route],
        mut span: Span<'_>,
        tokens: u32,
        out: &mut Slices,
    ) -> Result<(), Mismatch> {
        match self.kind {
            GroupKind::State => (span.from, span.to) = (0, 1),
            GroupKind::Full | GroupKind::Window { .. } => {
                span.from = self.first(span.from, tokens);
            }
        }
        if span.from >= span.to {
            return Ok(());
        }
        routes[self.route].plan(&self.layers, &span, out)
    }
}

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
pub(super) struct Session {
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
enum Phase {
    Opening,
    Ready,
    Failed(Failure),
    /// Number of answers that the fence waits for.
    Fencing(u32),
}

/// A peer engine in one conversation.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) ids: Vec<PeerId>,
    pub(super) routes: Vec<Route>,
    pub(super) units: Vec<Unit>,
    pub(super) sessions: Vec<Session>,
    pub(super) link: Link,
    /// What is in flight to each of its ranks.
    pub(super) used: BTreeMap<PeerId, Credits>,
    phase: Phase,
}

impl Peer {
    /// The number of units, or why no flow can start.
    pub(super) fn usable(&self) -> Result<usize, Failure> {
        match &self.phase {
            Phase::Opening | Phase::Ready => Ok(self.units.len()),
            Phase::Failed(failure) => Err(failure.clone()),
            Phase::Fencing(_) => Err(Failure::PeerSilent),
        }
    }

    /// What is kept of it, its link apart: its ranks, the ways to them, and what each has in flight.
    pub(super) fn entries(&self) -> usize {
        let ways = self.routes.len() + self.units.len() + self.sessions.len();
        self.ids.len() + ways + self.used.len()
    }

    pub(super) fn is_fencing(&self) -> bool {
        matches!(self.phase, Phase::Fencing(_))
    }

    fn working(&self) -> bool {
        matches!(self.phase, Phase::Opening | Phase::Ready)
    }
}

impl Transfer {
    pub(super) fn peer_known(
        &mut self,
        now: Nanos,
        slot: PeerSlot,
        geometry: &Geometry,
        ranks: &Arc<Vec<RankLayout>>,
        pass: u64,
        out: &mut Out,
    ) {
        let mut ids = BTreeMap::new();
        for rank in ranks.iter() {
            let id = PeerId(self.fresh() as u32);
            ids.insert(rank.rank, id);
            out.push(DataCommand::Connect { peer: id, address: rank.address.clone(), pass });
        }
        let mut peer = Peer {
            ids: ids.values().copied().collect(),
            routes: Vec::new(),
            units: Vec::new(),
            sessions: Vec::new(),
            link: Link::default(),
            used: BTreeMap::new(),
            phase: Phase::Opening,
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
            peer.phase = Phase::Failed(failure.clone());
            out.push(Report::PeerFailed { peer: slot, failure });
        }
        let previous = self.peers.insert(slot, peer);
        assert!(previous.is_none(), "peer slot {slot} used twice");
        self.open_all(now, slot, out);
        self.report_if_ready(slot, out);
    }

    fn build_routes(
        &self,
        peer: &mut Peer,
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
                        peer.sessions.push(Session {
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
                    peer.units.push(Unit {
                        session,
                        group,
                        last_layer: layers.iter().copied().max().unwrap_or(0),
                        route: index,
                        layers: layers.to_vec(),
                        kind: spec.kind,
                        align: own.alignment(geometry, group),
                        whole: if own.packed { own.groups[group].block_tokens.max(1) } else { 1 },
                        footprint: footprint(route, layers),
                    });
                }
            }
        }
        peer.units.sort_by_key(|unit| unit.last_layer);
        Ok(())
    }

    fn open_all(&mut self, now: Nanos, slot: PeerSlot, out: &mut Out) {
        let count = self.peers.get(&slot).map_or(0, |peer| peer.sessions.len());
        for index in 0..count {
            self.reopen(now, slot, index, out);
        }
    }

    /// Opens a session that is quiet, under a new id.
    pub(super) fn reopen(&mut self, now: Nanos, slot: PeerSlot, index: usize, out: &mut Out) {
        let id = SessionId(self.fresh() as u32);
        let Some(peer) = self.peers.get_mut(&slot) else { return };
        if !peer.working() {
            return;
        }
        let session = &mut peer.sessions[index];
        session.id = id;
        session.state = SessionState::Opening;
        session.in_flight = 0;
        self.sessions.insert(id, (slot, index));
        self.timers.arm(Timer::Opening(id), now + self.config.open());
        out.push(DataCommand::Open {
            session: id,
            local: session.local,
            peer: session.peer,
            remote: session.remote.clone(),
        });
    }

    fn session_mut(&mut self, id: SessionId) -> Option<(PeerSlot, usize, &mut Session)> {
        let &(slot, index) = self.sessions.get(&id)?;
        let session = self.peers.get_mut(&slot)?.sessions.get_mut(index)?;
        (session.id == id).then_some((slot, index, session))
    }

    pub(super) fn opened(
        &mut self,
        now: Nanos,
        id: SessionId,
        result: Result<(), Cause>,
        out: &mut Out,
    ) {
        let Some((slot, _, session)) = self.session_mut(id) else { return };
        if session.state != SessionState::Opening {
            return;
        }
        match result {
            Ok(()) => {
                session.state = SessionState::Open;
                self.timers.cancel(&Timer::Opening(id));
                self.report_if_ready(slot, out);
                self.unpark(slot);
            }
            Err(cause) => self.session_died(now, id, cause, out),
        }
    }

    /// Flows that waited for a session of a peer try again.
    fn unpark(&mut self, slot: PeerSlot) {
        let Some(peer) = self.peers.get_mut(&slot) else { return };
        for id in peer.link.unpark() {
            if let Some(flow) = self.flows.get_mut(&id) {
                flow.share.unlisted();
                self.list(id);
            }
        }
    }

    fn report_if_ready(&mut self, slot: PeerSlot, out: &mut Out) {
        let Some(peer) = self.peers.get_mut(&slot) else { return };
        let open = peer.sessions.iter().all(|session| session.state == SessionState::Open);
        if peer.phase == Phase::Opening && open {
            peer.phase = Phase::Ready;
            out.push(Report::PeerReady { peer: slot });
        }
    }

    /// Tears a session down after an error; it is opened anew when it is quiet.
    pub(super) fn session_died(&mut self, now: Nanos, id: SessionId, cause: Cause, out: &mut Out) {
        let Some((slot, index, session)) = self.session_mut(id) else { return };
        if !matches!(session.state, SessionState::Open | SessionState::Opening) {
            return;
        }
        session.state = SessionState::Closing;
        session.reopens += 1;
        let given_up = session.reopens;
        if let Some(peer) = self.peers.get_mut(&slot) {
            peer.link.pace.forget(now);
        }
        self.timers.cancel(&Timer::Opening(id));
        self.timers.cancel(&Timer::Stalled(id));
        out.push(DataCommand::Close { session: id });
        self.quiesce(now, id, Waiter::Reopen(slot, index), out);
        if given_up > self.config.settings.reopens_max {
            self.peer_failed(now, slot, Failure::Fabric(cause), out);
        }
    }

    pub(super) fn session_quiet(&mut self, now: Nanos, slot: PeerSlot, index: usize) {
        let Some(peer) = self.peers.get_mut(&slot) else { return };
        let working = peer.working();
        let session = &mut peer.sessions[index];
        if session.state != SessionState::Closing {
            return;
        }
        session.state = SessionState::Pausing;
        self.sessions.remove(&session.id);
        if working {
            let pause = self.config.settings.reopen_delay.scale(1 << session.reopens.min(10), 2);
            self.timers.arm(Timer::Reopen(slot, index), now + pause);
        }
    }

    pub(super) fn check_stalled(&mut self, now: Nanos, id: SessionId, out: &mut Out) {
        let stall = self.config.stall();
        let Some((_, _, session)) = self.session_mut(id) else { return };
        if session.in_flight == 0 || planted!("nothing-is-ever-stalled") {
            return;
        }
        let due = session.progress + stall;
        if now >= due {
            self.session_died(now, id, Cause::AckTimeout, out);
        } else {
            self.timers.arm(Timer::Stalled(id), due);
        }
    }

    fn peer_failed(&mut self, now: Nanos, slot: PeerSlot, failure: Failure, out: &mut Out) {
        let Some(peer) = self.peers.get_mut(&slot) else { return };
        if !peer.working() {
            return;
        }
        peer.phase = Phase::Failed(failure.clone());
        self.fail_flows_of(now, slot, &failure, out);
        out.push(Report::PeerFailed { peer: slot, failure });
    }

    fn fail_flows_of(&mut self, now: Nanos, slot: PeerSlot, failure: &Failure, out: &mut Out) {
        let flows: Vec<_> =
            self.flows.iter().filter(|(_, f)| f.peer == slot).map(|(id, _)| *id).collect();
        for flow in flows {
            self.fail_flow(now, flow, failure.clone(), true, out);
        }
    }

    fn slot_of(&self, id: PeerId) -> Option<PeerSlot> {
        self.peers.iter().find(|(_, peer)| peer.ids.contains(&id)).map(|(slot, _)| *slot)
    }

    pub(super) fn connect_refused(&mut self, now: Nanos, id: PeerId, why: Refused, out: &mut Out) {
        if let Some(slot) = self.slot_of(id) {
            self.peer_failed(now, slot, Failure::Refused(why), out);
        }
    }

    pub(super) fn peer_down(&mut self, now: Nanos, id: PeerId, out: &mut Out) {
        let Some(slot) = self.slot_of(id) else { return };
        let Some(peer) = self.peers.get(&slot) else { return };
        let dead: Vec<_> =
            peer.sessions.iter().filter(|s| s.peer == id).map(|session| session.id).collect();
        for session in dead {
            self.session_died(now, session, Cause::PeerGone, out);
        }
    }

    /// Revokes everything between this rank and a peer, both ways.
    pub(super) fn fence(&mut self, now: Nanos, slot: PeerSlot, out: &mut Out) {
        let Some(peer) = self.peers.get_mut(&slot) else {
            out.push(Report::Fenced { peer: slot });
            return;
        };
        if peer.is_fencing() {
            return;
        }
        let ids = peer.ids.clone();
        let mut closing = Vec::new();
        for (index, session) in peer.sessions.iter_mut().enumerate() {
            self.timers.cancel(&Timer::Reopen(slot, index));
            self.timers.cancel(&Timer::Opening(session.id));
            self.timers.cancel(&Timer::Stalled(session.id));
            match session.state {
                SessionState::Pausing => {}
                SessionState::Closing => closing.push(session.id),
                SessionState::Opening | SessionState::Open => {
                    session.state = SessionState::Closing;
                    out.push(DataCommand::Close { session: session.id });
                    closing.push(session.id);
                }
            }
        }
        // One more than there are answers to wait for, so that no answer ends it half-way.
        peer.phase = Phase::Fencing(1 + (ids.len() + closing.len()) as u32);
        for session in closing {
            self.quiesce(now, session, Waiter::Fence(slot), out);
        }
        for id in ids {
            self.fencing.insert(id, slot);
            out.push(DataCommand::Fence { peer: id });
        }
        self.fail_flows_of(now, slot, &Failure::PeerSilent, out);
        self.fence_part_done(slot, out);
    }

    pub(super) fn fenced(&mut self, id: PeerId, out: &mut Out) {
        if let Some(slot) = self.fencing.remove(&id) {
            self.fence_part_done(slot, out);
        }
    }

    pub(super) fn fence_part_done(&mut self, slot: PeerSlot, out: &mut Out) {
        let Some(peer) = self.peers.get_mut(&slot) else { return };
        let Phase::Fencing(left) = &mut peer.phase else { return };
        *left -= 1;
        if *left > 0 {
            return;
        }
        let Some(peer) = self.peers.remove(&slot) else { return };
        self.sessions.retain(|_, (owner, _)| *owner != slot);
        for id in peer.ids {
            out.push(DataCommand::Disconnect { peer: id });
        }
        out.push(Report::Fenced { peer: slot });
    }
}

/// Of several layers of a route, in one group.
fn footprint(route: &Route, layers: &[u16]) -> Footprint {
    let mut all = Footprint { block_tokens: 1, block_bytes: 0, block_ranges: 0, token_ranges: 0 };
    for layer in layers {
        let each = route.footprint(*layer);
        all = Footprint {
            block_tokens: each.block_tokens,
            block_bytes: all.block_bytes + each.block_bytes,
            block_ranges: all.block_ranges + each.block_ranges,
            token_ranges: all.token_ranges + each.token_ranges,
        };
    }
    all
}
