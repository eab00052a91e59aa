//! The life of an operation: accepted, moving, landed, reported, settled.

use super::call::{
    BytesDecision, CompletionDecision, DataPlaneIx, DmaContext, DmaEvent, DmaHooks, DmaLanding,
    DmaMessage, DmaOutput, OpDecision, OpInfo, OpSlot,
};
use super::nic::span;
use super::session::DmaSessionState;
use super::{Dma, draw};
use crate::memory::{CopySide, MemoryFidelity, OpSlice, SegmentOffset, land};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Completion, DataEvent, Direction, FabricError, Landed, OpId, SessionId,
};
use kvferry_scenarios::decide::{below, mix};

/// An operation. Its slot is reused with another turn, so that events of the old one are seen as
/// stale.
#[derive(Debug)]
pub(super) struct DmaOp {
    pub(super) slot: OpSlot,
    id: OpId,
    pub(super) plane: DataPlaneIx,
    pub(super) peer: DataPlaneIx,
    pub(super) session: u32,
    /// Order of acceptance in the session.
    order: u64,
    pub(super) direction: Direction,
    pub(super) from: CopySide,
    pub(super) to: CopySide,
    pub(super) slices: Vec<OpSlice>,
    next: u32,
    /// Slices that land before `turn_over`.
    stop: u32,
    bytes: u64,
    decision: OpDecision,
    /// Counts of ports that have not served it.
    stages: u8,
    servers: [u32; 3],
    /// It counts among the transfers of its ports.
    moving: bool,
    /// Its first byte may be under way.
    pub(super) started: bool,
    /// Nothing of it lands any more.
    pub(super) ended: bool,
    pub(super) reported: bool,
    pub(super) outcome: Option<Completion>,
    /// Access was checked in these epochs of initiator and peer.
    pub(super) checked: Option<(u32, u32)>,
    /// Since when it waits for a partition to end.
    stalled: bool,
    rest: u64,
    latency: Nanos,
    /// When it was put on its ports.
    since: Nanos,
}

const NO_SERVER: u32 = u32::MAX;

impl DmaOp {
    /// True if it is done but for the last way of its bytes, at their destination, where no link
    /// is in between.
    pub(super) fn is_past(&self) -> bool {
        !self.ended && !self.moving && self.outcome == Some(Completion::Done)
    }

    /// True if it was reported as failed.
    pub(super) fn failed(&self) -> bool {
        self.reported && matches!(self.outcome, Some(Completion::Failed { .. }))
    }

    fn spare(key: u32) -> DmaOp {
        let side = CopySide { store: 0, place: SegmentOffset { segment: 0, base: 0 } };
        DmaOp {
            slot: OpSlot { key, generation: 0 },
            id: OpId(0),
            plane: DataPlaneIx(0),
            peer: DataPlaneIx(0),
            session: 0,
            order: 0,
            direction: Direction::Read,
            from: side,
            to: side,
            slices: Vec::new(),
            next: 0,
            stop: 0,
            bytes: 0,
            decision: OpDecision::default(),
            stages: 0,
            servers: [NO_SERVER; 3],
            moving: false,
            started: false,
            ended: false,
            reported: false,
            outcome: None,
            checked: None,
            stalled: false,
            rest: 0,
            latency: Nanos::ZERO,
            since: Nanos::ZERO,
        }
    }
}

impl Dma {
    /// Takes an operation that the plane accepted.
    pub(super) fn accept(
        &mut self,
        plane: DataPlaneIx,
        (id, session_id, direction): (OpId, SessionId, Direction),
        slices: &[OpSlice],
        hooks: &mut dyn DmaHooks,
        cx: &mut DmaContext<'_>,
    ) {
        let me = &mut self.planes[plane.0 as usize];
        let nth = me.submitted;
        me.submitted += 1;
        let number = *me.sessions.get(&session_id).expect("the plane knows its open sessions");
        let session = &self.sessions[number as usize];
        let (peer, local, remote) = (session.remote.plane, session.local, session.remote.serial);
        let place = |plane: DataPlaneIx, serial: u32| {
            let (place, _) = self.planes.get(plane.0 as usize)?.places.get(&serial)?;
            Some((place.segment as u32, place.base))
        };
        let admitted = &self.planes[peer.0 as usize].admitted;
        let reaches = admitted.contains(&(plane, session.fence_key));
        let info = OpInfo {
            plane,
            peer,
            op: id,
            session: session_id,
            fence_key: session.fence_key,
            direction,
            nth,
            slices,
            local_at: place(plane, local),
            remote_at: place(peer, remote).filter(|_| reaches),
        };
        let fate = hooks.decide_op(cx.now, &info);
        let session = &mut self.sessions[number as usize];
        let order = session.accepted;
        session.accepted += 1;
        let dead = session.state != DmaSessionState::Open;
        let key = self.free_ops.pop().unwrap_or_else(|| {
            let key = self.ops.len() as u32;
            self.ops.push(DmaOp::spare(key));
            key
        });
        session.unsettled.insert(order, key);
        let latency = self.latency(plane, peer, nth, draw::LATENCY);
        let op = &mut self.ops[key as usize];
        let (slot, mut kept) = (op.slot, std::mem::take(&mut op.slices));
        kept.clear();
        kept.extend_from_slice(slices);
        *op = DmaOp {
            slot,
            id,
            plane,
            peer,
            session: number,
            order,
            direction,
            decision: fate,
            ..DmaOp::spare(key)
        };
        op.bytes = slices.iter().map(|slice| slice.len).sum();
        op.slices = kept;
        op.latency = latency;
        if dead {
            op.ended = true;
            op.outcome =
                Some(Completion::Failed { cause: FabricError::QueuePair, landed: Landed::None });
            return cx.after(latency, DmaEvent::Report(op.slot));
        }
        self.prepare(key, nth);
        let delay = self.ops[key as usize].decision.delay;
        if delay > Nanos::ZERO {
            cx.after(delay, DmaEvent::Start(slot));
        } else {
            self.start(key, cx);
        }
    }

    /// Draws the order of the slices and how many land.
    fn prepare(&mut self, key: u32, nth: u64) {
        let (keyed, fidelity) = (self.keyed, self.config.fidelity);
        let op = &mut self.ops[key as usize];
        let count = op.slices.len() as u32;
        let actor = u64::from(op.plane.0);
        let partial = !matches!(op.decision.bytes, BytesDecision::Whole);
        if fidelity == MemoryFidelity::Bytes || partial {
            let mut bits = keyed.draw(draw::SHUFFLE, actor, nth);
            for at in (1..op.slices.len()).rev() {
                bits = mix(bits, at as u64);
                op.slices.swap(at, below(bits, at as u64 + 1) as usize);
            }
        }
        let some = keyed.below(draw::STOP, actor, nth, u64::from(count)) as u32;
        op.stop = match op.decision.bytes {
            BytesDecision::Whole | BytesDecision::Fails { landed: Landed::All, .. } => count,
            BytesDecision::Fails { landed: Landed::None, .. } | BytesDecision::Missing => 0,
            BytesDecision::Fails { landed: Landed::Unknown, .. }
            | BytesDecision::Overtaken { .. } => some,
        };
    }

    fn latency(&self, a: DataPlaneIx, b: DataPlaneIx, n: u64, kind: u64) -> Nanos {
        let node = |plane: DataPlaneIx| self.planes.get(plane.0 as usize).map(|plane| plane.node);
        let near = node(a) == node(b);
        let range = if near { self.config.latency_local } else { self.config.latency };
        Nanos(range.pick(self.keyed.draw(kind, u64::from(a.0), n)))
    }

    /// Puts an operation on its ports.
    pub(super) fn start(&mut self, key: u32, cx: &mut DmaContext<'_>) {
        let op = &self.ops[key as usize];
        if op.ended {
            return;
        }
        let (from, to) = match op.direction {
            Direction::Write => (op.plane, op.peer),
            Direction::Read => (op.peer, op.plane),
        };
        let servers = self.servers(from, to);
        let op = &mut self.ops[key as usize];
        (op.servers, op.started, op.moving, op.since) = (servers, true, true, cx.now);
        let (slot, bytes, latency) = (op.slot, op.bytes, op.latency);
        let used = servers.into_iter().filter(|server| *server != NO_SERVER);
        if self.config.fidelity == MemoryFidelity::Bytes {
            used.for_each(|server| self.nics.servers[server as usize].enter(bytes));
            let first = self.pace(key);
            return cx.after(latency + first, DmaEvent::Land(slot));
        }
        op.stages = used.clone().count() as u8;
        for server in used {
            let place = &mut self.nics.servers[server as usize];
            place.arrive((server, cx.now), slot, bytes, cx.queue);
        }
    }

    fn servers(&self, from: DataPlaneIx, to: DataPlaneIx) -> [u32; 3] {
        let (a, b) = (&self.planes[from.0 as usize], &self.planes[to.0 as usize]);
        let (out, into) = match a.node == b.node {
            true => (a.nic_local, b.nic_local),
            false => (a.nic, b.nic),
        };
        let slow = self.slow.get(&(a.node, b.node)).copied().unwrap_or(NO_SERVER);
        [self.nics.get(out).out, self.nics.get(into).into, slow]
    }

    /// Time that the next slice takes at the current share.
    #[inline]
    fn pace(&mut self, key: u32) -> Nanos {
        let op = &mut self.ops[key as usize];
        let Some(slice) = op.slices.get(op.next as usize) else { return Nanos::ZERO };
        let servers = &self.nics.servers;
        let share = |server: &u32| servers.get(*server as usize).map_or(0, |server| server.share());
        let share = op.servers.iter().map(share).max().unwrap_or(0);
        span(slice.len, share, &mut op.rest)
    }

    /// A port is done with the operations that are due.
    pub(super) fn serve(&mut self, (server, turn): (u32, u32), cx: &mut DmaContext<'_>) {
        let place = &mut self.nics.servers[server as usize];
        if !place.is_due(turn) {
            return;
        }
        while let Some(slot) = place.serve(cx.now) {
            let op = &mut self.ops[slot.key as usize];
            if op.slot == slot {
                op.stages -= 1;
                if op.stages == 0 {
                    cx.after(op.latency, DmaEvent::Land(op.slot));
                }
            }
        }
        place.plan(server, cx.queue);
    }

    /// Lands what is due of an operation.
    pub(super) fn land(&mut self, key: u32, cx: &mut DmaContext<'_>) {
        let op = &mut self.ops[key as usize];
        if op.ended || op.stalled {
            return;
        }
        if let Err(cause) = self.may_land(key) {
            return self.break_off(key, cause, cx);
        }
        if !self.ops[key as usize].is_past() && !self.cut.is_empty() && self.is_cut(key) {
            return self.stall(key, cx);
        }
        let single = self.config.fidelity == MemoryFidelity::Bytes;
        let op = &self.ops[key as usize];
        let left = op.stop - op.next;
        self.land_slices(key, if single { left.min(1) } else { left }, cx);
        let op = &self.ops[key as usize];
        if op.next < op.stop {
            let slot = op.slot;
            let pace = if op.reported { op.latency.scale(1, 4) } else { self.pace(key) };
            return cx.after(pace, DmaEvent::Land(slot));
        }
        self.turn_over(key, cx);
    }

    #[inline]
    fn land_slices(&mut self, key: u32, count: u32, cx: &mut DmaContext<'_>) {
        if count == 0 {
            return;
        }
        let op = &mut self.ops[key as usize];
        let first = op.next;
        let slices = &op.slices[first as usize..(first + count) as usize];
        let local_is_source = op.direction == Direction::Write;
        land(&mut self.stores, (op.from, op.to), local_is_source, slices, &mut self.scratch);
        cx.out.push(DmaOutput::Landed(landing(op, (key, first, count))));
        op.next += count;
    }

    /// Lands at once what is outstanding of an operation that was reported as done: its session
    /// becomes quiet, and what is done may not be lost.
    pub(super) fn flush(&mut self, key: u32, cx: &mut DmaContext<'_>) {
        let op = &self.ops[key as usize];
        if op.ended || op.outcome != Some(Completion::Done) {
            return;
        }
        let left = op.slices.len() as u32 - op.next;
        if self.may_land(key).is_ok() {
            self.land_slices(key, left, cx);
        }
    }

    /// An operation fails where it stands.
    fn break_off(&mut self, key: u32, cause: FabricError, cx: &mut DmaContext<'_>) {
        self.leave_ports(key);
        let op = &mut self.ops[key as usize];
        op.ended = true;
        if op.reported {
            return self.settle(key, cx);
        }
        let landed = if op.next > 0 { Landed::Unknown } else { Landed::None };
        let wait = match cause {
            FabricError::PeerGone => self.config.ack_timeout,
            _ => op.latency,
        };
        op.decision.kill_session |= self.config.failure_kills;
        op.outcome = Some(Completion::Failed { cause, landed });
        cx.after(wait, DmaEvent::Report(op.slot));
    }

    fn stall(&mut self, key: u32, cx: &mut DmaContext<'_>) {
        let op = &mut self.ops[key as usize];
        op.stalled = true;
        self.stalled.insert(key);
        if !op.reported {
            cx.after(self.config.ack_timeout, DmaEvent::Timeout(op.slot));
        }
    }

    /// A partition healed: stalled operations go on where nothing else cuts them off.
    pub(super) fn resume(&mut self, cx: &mut DmaContext<'_>) {
        for key in std::mem::take(&mut self.stalled) {
            let op = &mut self.ops[key as usize];
            op.stalled = false;
            cx.after(op.latency, DmaEvent::Land(op.slot));
        }
    }

    pub(super) fn time_out(&mut self, key: u32, cx: &mut DmaContext<'_>) {
        let op = &mut self.ops[key as usize];
        if op.stalled && !op.reported && op.outcome.is_none() {
            self.stalled.remove(&key);
            self.break_off(key, FabricError::AckTimeout, cx);
        }
    }

    /// Counts the use of ports by an operation that moved slice by slice.
    fn meter(&mut self, key: u32, now: Nanos) {
        if self.config.fidelity == MemoryFidelity::Bytes {
            let op = &self.ops[key as usize];
            for server in op.servers.into_iter().filter(|server| *server != NO_SERVER) {
                self.nics.servers[server as usize].used((op.since, now), op.bytes);
            }
        }
    }

    fn leave_ports(&mut self, key: u32) {
        let op = &mut self.ops[key as usize];
        if std::mem::take(&mut op.moving) && self.config.fidelity == MemoryFidelity::Bytes {
            for server in op.servers.into_iter().filter(|server| *server != NO_SERVER) {
                self.nics.servers[server as usize].leave();
            }
        }
    }

    /// All slices landed that do so by themselves.
    fn turn_over(&mut self, key: u32, cx: &mut DmaContext<'_>) {
        let all = self.ops[key as usize].slices.len() as u32;
        let first_time = self.ops[key as usize].moving;
        if first_time {
            self.meter(key, cx.now);
        }
        self.leave_ports(key);
        let ack = self.ack_after(key);
        let whole = self.acknowledge(key, ack);
        let op = &mut self.ops[key as usize];
        if !first_time {
            op.ended = true;
            return self.settle(key, cx);
        }
        let mut wait = ack;
        let late = match op.decision.bytes.clone() {
            BytesDecision::Whole | BytesDecision::Missing => {
                (op.outcome, wait) = whole;
                None
            }
            BytesDecision::Fails { cause, landed, late } => {
                op.outcome.get_or_insert(Completion::Failed { cause, landed });
                late.filter(|_| landed == Landed::Unknown)
            }
            BytesDecision::Overtaken { by } => {
                op.outcome.get_or_insert(Completion::Done);
                Some(by)
            }
        };
        let op = &mut self.ops[key as usize];
        match late {
            Some(late) if op.next < all => {
                op.stop = all;
                cx.after(ack + late, DmaEvent::Land(op.slot));
            }
            _ => op.ended = true,
        }
        if op.reported {
            self.settle(key, cx);
        } else if op.outcome.is_some() {
            let at = (cx.now + wait).max(op.decision.not_before);
            cx.queue.at(at, DmaEvent::Report(op.slot));
        }
    }

    fn ack_after(&self, key: u32) -> Nanos {
        let op = &self.ops[key as usize];
        self.latency(op.plane, op.peer, op.id.0, draw::ACK) + op.decision.ack_delay
    }

    /// How and after what time an operation is reported whose bytes all arrived.
    fn acknowledge(&self, key: u32, ack: Nanos) -> (Option<Completion>, Nanos) {
        let op = &self.ops[key as usize];
        if op.outcome.is_some() {
            return (op.outcome.clone(), ack);
        }
        let lost = Completion::Failed { cause: FabricError::AckTimeout, landed: Landed::Unknown };
        match op.decision.ack {
            CompletionDecision::Never => (None, ack),
            CompletionDecision::Lost => (Some(lost), self.config.ack_timeout),
            CompletionDecision::Given if self.cut_between(op.peer, op.plane) => {
                (Some(lost), self.config.ack_timeout)
            }
            CompletionDecision::Given => (Some(Completion::Done), ack),
        }
    }

    /// Reports an operation, once.
    pub(super) fn report(&mut self, key: u32, cx: &mut DmaContext<'_>) {
        let op = &self.ops[key as usize];
        if op.reported {
            return;
        }
        let session = op.session;
        let kills = op.decision.kill_session && self.mark_dead(session, cx);
        self.finish_report(key, cx);
        if kills {
            self.fail_all(session, &FabricError::QueuePair, cx);
        }
        self.settle(key, cx);
    }

    /// Reports an operation unless it was.
    pub(super) fn finish_report(&mut self, key: u32, cx: &mut DmaContext<'_>) {
        let op = &mut self.ops[key as usize];
        if std::mem::replace(&mut op.reported, true) {
            return;
        }
        let (plane, id) = (op.plane, op.id);
        let lost = Completion::Failed { cause: FabricError::Closed, landed: Landed::Unknown };
        let outcome = op.outcome.get_or_insert(lost).clone();
        if self.planes[plane.0 as usize].alive {
            cx.out.push(DmaOutput::Completed { plane, op: id, outcome: outcome.clone() });
        }
        self.hand_over(plane, DmaMessage::Event(DataEvent::Completed { op: id, outcome }), cx);
    }

    /// Forgets an operation that is reported and of which nothing lands any more.
    fn settle(&mut self, key: u32, cx: &mut DmaContext<'_>) {
        let op = &self.ops[key as usize];
        if op.reported && op.ended {
            let (session, order) = (op.session, op.order);
            self.sessions[session as usize].unsettled.remove(&order);
            self.discard(key);
            self.answer_tickets(session, cx);
        }
    }

    /// Frees the slot; nothing of the operation lands any more.
    pub(super) fn discard(&mut self, key: u32) {
        self.leave_ports(key);
        self.stalled.remove(&key);
        let op = &mut self.ops[key as usize];
        op.ended = true;
        op.slot.generation = op.slot.generation.wrapping_add(1);
        self.free_ops.push(key);
    }
}

fn landing(op: &DmaOp, (slot, first, count): (u32, u32, u32)) -> DmaLanding {
    let (source, target) = match op.direction {
        Direction::Write => (op.plane, op.peer),
        Direction::Read => (op.peer, op.plane),
    };
    let at = |side: &CopySide| (side.place.segment as u32, side.place.base);
    DmaLanding {
        plane: op.plane,
        op: op.id,
        direction: op.direction,
        source,
        source_at: at(&op.from),
        target,
        target_at: at(&op.to),
        late: op.reported,
        slot,
        first,
        count,
    }
}
