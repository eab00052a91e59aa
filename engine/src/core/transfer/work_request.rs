//! The life of an operation: cut from a piece, submitted, completed, retried.

use super::flow::LocalKv;
use super::rate_estimator::RateSample;
use super::session::SessionState;
use super::stripe::StripeRange;
use super::{QuiesceWaiter, Transfer, TransferTimer, TransferTurn};
use crate::core::command::DataCommand;
use crate::core::error::Failure;
use crate::core::ids::{ConnectionId, FlowId};
use crate::core::layout::{Mismatch, Slices, TokenSpan};
use crate::core::message::Role;
use crate::core::time::Nanos;
use crate::fabric::{
    Completion, Credits, Direction, FabricError, Landed, OpId, PeerId, QuiesceTicket, Refused,
    SessionId,
};

/// An operation that the data plane has accepted.
#[derive(Debug)]
pub(super) struct WorkRequest {
    flow: FlowId,
    piece: StripeRange,
    peer: ConnectionId,
    index: usize,
    remote: PeerId,
    pub(super) session: SessionId,
    credits: Credits,
    submitted: RateSample,
}

/// What came of the try to post an operation on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PostOutcome {
    Yes,
    /// No flow of the link has anything to post.
    Idle,
    /// The link, or its peer, has no room before one of its operations completes.
    Full,
    /// The plane has no room before any operation completes.
    NoCredit,
}

impl Transfer {
    /// A flow has something to post.
    pub(super) fn list(&mut self, id: FlowId) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let Some(peer) = self.peers.get_mut(&flow.peer) else { return };
        peer.queue.list(id, &mut flow.share, &self.config.settings);
        self.list_link(self.flows[&id].peer);
    }

    /// Something may be posted on the link to a peer.
    pub(super) fn list_link(&mut self, connection: ConnectionId) {
        let Some(peer) = self.peers.get_mut(&connection) else { return };
        let link = &mut peer.queue;
        if link.has_flows() && !link.refused && !std::mem::replace(&mut link.listed, true) {
            self.ring.push_back(connection);
        }
    }

    /// Submits operations while there is credit, in turns of the links.
    pub(super) fn pump(&mut self, turn: &mut TransferTurn<'_>) {
        while let Some(&connection) = self.ring.front() {
            let posted = match self.peers.contains_key(&connection) {
                true => self.post_next(connection, turn),
                false => PostOutcome::Idle,
            };
            match posted {
                PostOutcome::NoCredit => return,
                PostOutcome::Yes => self.ring.rotate_left(1),
                PostOutcome::Idle | PostOutcome::Full => {
                    self.ring.pop_front();
                    if let Some(peer) = self.peers.get_mut(&connection) {
                        peer.queue.listed = false;
                    }
                }
            }
        }
    }

    /// Submits the next operation of a link. Nothing is planned for which there is no room.
    fn post_next(&mut self, connection: ConnectionId, turn: &mut TransferTurn<'_>) -> PostOutcome {
        loop {
            let settings = &self.config.settings;
            let Some(peer) = self.peers.get_mut(&connection) else { return PostOutcome::Idle };
            let Some(id) = peer.queue.next(settings) else { return PostOutcome::Idle };
            let flow = self.flows.get_mut(&id).expect("an ended flow is on no link");
            let Some(piece) = flow.pieces.front() else {
                flow.share.unlisted();
                peer.queue.unlist(settings);
                continue;
            };
            let unit = &peer.stripes[piece.stripe];
            let session = &peer.sessions[unit.session];
            if session.state != SessionState::Open {
                peer.queue.park(settings);
                continue;
            }
            let bytes = match planted!("operations-are-not-cut-by-bytes") {
                true => u64::MAX,
                false => peer.queue.pace.operation_bytes(settings),
            };
            let most = self.config.operation_most(bytes);
            let to = unit.cut(piece, flow.tokens, &most);
            let need = unit.bound((piece.from, to), flow.tokens).at_most(&most);
            let used = peer.used.get(&session.peer).copied().unwrap_or_default();
            let room = peer.queue.has_room(need.bytes, settings)
                && (self.config.caps.per_peer.fits(&used, &need)
                    || planted!("credit-of-a-peer-is-ignored"));
            if !room {
                return PostOutcome::Full;
            }
            let fits = self.config.in_all().fits(&self.used, &need);
            if !fits && !planted!("credit-in-all-is-ignored") {
                return PostOutcome::NoCredit;
            }
            let mut piece = flow.next_piece().expect("it was just seen");
            self.pieces -= 1;
            if to < piece.to {
                flow.put_first(StripeRange { from: to, ..piece.clone() });
                self.pieces += 1;
                piece.to = to;
            }
            if self.submit(id, piece, &most, turn) {
                return PostOutcome::Yes;
            }
        }
    }

    /// Plans a piece and submits it, or as much of it as an operation may have. False if that
    /// is nothing, or the flow fails over it.
    fn submit(
        &mut self,
        id: FlowId,
        mut piece: StripeRange,
        most: &Credits,
        turn: &mut TransferTurn<'_>,
    ) -> bool {
        if let Err(mismatch) = self.plan(id, &piece) {
            self.fail_flow(id, Failure::Mismatch(mismatch), true, turn);
            return false;
        }
        let (slices, end) = part(&self.scratch, piece.part, most);
        if slices.is_empty() {
            self.settle_piece(id, 0, turn);
            return false;
        }
        let op = OpId(self.fresh());
        let flow = self.flows.get_mut(&id).expect("it was just planned");
        let peer = self.peers.get_mut(&flow.peer).expect("a flow that posts has a peer");
        if let Some(end) = end {
            let (from, to) = piece.part.unwrap_or((0, u64::MAX));
            flow.put_first(StripeRange { part: Some((end, to)), ..piece.clone() });
            self.pieces += 1;
            piece.part = Some((from, end));
            if planted!("rest-of-a-split-is-not-counted") {
                flow.outstanding -= 1;
            }
        }
        let index = peer.stripes[piece.stripe].session;
        let session = &mut peer.sessions[index];
        if !flow.touched.contains(&session.id) {
            flow.touched.push(session.id);
        }
        flow.in_flight += 1;
        if session.in_flight == 0 {
            session.progress = turn.now;
            self.timers
                .arm_if_idle(TransferTimer::Stalled(session.id), turn.now + self.config.stall());
        }
        session.in_flight += 1;
        piece.tries += 1;
        let (ranges, bytes) = (slices.count() as u64, slices.bytes());
        let credits = Credits { operations: 1, ranges, bytes };
        self.used.add(&credits);
        peer.used.entry(session.peer).or_default().add(&credits);
        let (session, remote) = (session.id, session.peer);
        let settings = &self.config.settings;
        let submitted = peer.queue.posted(turn.now, &mut flow.share, &credits, settings);
        let entry = WorkRequest {
            flow: id,
            piece,
            peer: flow.peer,
            index,
            remote,
            session,
            credits,
            submitted,
        };
        self.ops.insert(op, entry);
        let direction = match self.config.role {
            Role::Prefill => Direction::Write,
            Role::Decode => Direction::Read,
        };
        turn.push(DataCommand::Submit { op, session, direction, slices });
        true
    }

    /// Makes the byte ranges of a piece, in `scratch`.
    fn plan(&mut self, id: FlowId, piece: &StripeRange) -> Result<(), Mismatch> {
        self.scratch.clear();
        let flow = &self.flows[&id];
        let peer = &self.peers[&flow.peer];
        let unit = &peer.stripes[piece.stripe];
        let local = match &flow.local {
            LocalKv::Blocks(blocks) => blocks.as_slice(),
            LocalKv::Source(id) => self.sources.get(id).map_or(&[][..], |s| s.blocks.as_slice()),
        };
        let (Some(local), Some(remote)) = (local.get(unit.group), flow.remote.get(unit.group))
        else {
            return Err(Mismatch(format!("no block list for group {}", unit.group).into()));
        };
        let span = TokenSpan { group: unit.group, from: piece.from, to: piece.to, local, remote };
        unit.plan(&peer.routes, span, flow.tokens, &mut self.scratch)
    }

    /// Takes an operation off the books.
    fn take_op(&mut self, now: Nanos, id: OpId) -> Option<WorkRequest> {
        let Some(op) = self.ops.remove(&id) else {
            self.unasked(id.0);
            return None;
        };
        if !planted!("credit-is-not-given-back") {
            self.used.remove(&op.credits);
        }
        // Operations and tickets are numbered together.
        let behind = (op.session, QuiesceTicket(id.0))..=(op.session, QuiesceTicket(u64::MAX));
        self.tickets.range_mut(behind).for_each(|(_, asked)| asked.at = now);
        if let Some(flow) = self.flows.get_mut(&op.flow) {
            flow.in_flight -= 1;
        }
        if let Some(peer) = self.peers.get_mut(&op.peer)
            && let Some(used) = peer.used.get_mut(&op.remote)
        {
            used.remove(&op.credits);
            peer.queue.ended(&op.credits);
            let session = &mut peer.sessions[op.index];
            if session.id == op.session || planted!("late-completions-count-for-the-next-session") {
                session.in_flight -= 1;
                session.progress = now;
            }
        }
        self.list_link(op.peer);
        Some(op)
    }

    pub(super) fn completed(&mut self, id: OpId, outcome: Completion, turn: &mut TransferTurn<'_>) {
        let Some(op) = self.take_op(turn.now, id) else { return };
        let flow = op.flow;
        match outcome {
            Completion::Done | Completion::Failed { landed: Landed::All, .. } => {
                if let Some(peer) = self.peers.get_mut(&op.peer) {
                    if !planted!("reopenings-of-a-life-count") {
                        peer.sessions[op.index].reopens = 0;
                    }
                    if outcome == Completion::Done {
                        let (link, settings) = (&mut peer.queue, &self.config.settings);
                        let others = link.in_flight.operations;
                        link.pace.done(turn.now, op.submitted, op.credits.bytes, others, settings);
                    }
                }
                self.settle_piece(flow, op.credits.bytes, turn);
            }
            Completion::Failed { cause, landed } => self.op_failed(op, cause, landed, turn),
        }
        self.end_if_over(flow, turn);
    }

    fn op_failed(
        &mut self,
        op: WorkRequest,
        cause: FabricError,
        landed: Landed,
        turn: &mut TransferTurn<'_>,
    ) {
        let Some(flow) = self.flows.get_mut(&op.flow) else { return };
        let unsure = landed != Landed::None && !planted!("failed-operations-are-quiet");
        if unsure && !flow.unsure.contains(&op.session) {
            flow.unsure.push(op.session);
        }
        // This may end the peer, and the flow with it, which then waits for what is noted above.
        if matches!(cause, FabricError::QueuePair | FabricError::PeerGone) {
            self.session_died(op.session, cause.clone(), turn);
        }
        if self.flows.get(&op.flow).is_none_or(|flow| flow.ending.is_some()) {
            return;
        }
        if op.piece.tries > self.config.settings.retries_max
            && !planted!("operations-are-tried-for-ever")
        {
            return self.fail_flow(op.flow, Failure::Fabric(cause), true, turn);
        }
        match landed {
            Landed::None => self.retry(op.flow, op.piece),
            _ if planted!("retry-without-quiet") => self.retry(op.flow, op.piece),
            _ => self.quiesce(op.session, QuiesceWaiter::Retry(op.flow, op.piece), turn),
        }
    }

    /// Queues a piece that failed and is quiet again, ahead of the others. Rewriting the same bytes
    /// into the same blocks is harmless while the flow lives.
    pub(super) fn retry(&mut self, id: FlowId, piece: StripeRange) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        if flow.ending.is_none() {
            flow.give_back(piece);
            self.pieces += 1;
            self.list(id);
        }
    }

    pub(super) fn submit_refused(&mut self, id: OpId, why: Refused, turn: &mut TransferTurn<'_>) {
        let Some(mut op) = self.take_op(turn.now, id) else { return };
        let flow = op.flow;
        match why {
            Refused::Busy => {
                op.piece.tries -= u32::from(!planted!("busy-burns-a-try"));
                self.retry(flow, op.piece);
                if let Some(peer) = self.peers.get_mut(&op.peer) {
                    peer.queue.refuse();
                    // Otherwise there is room when an operation completes, and not before.
                    if peer.queue.in_flight.operations == 0
                        || planted!("busy-has-a-deadline-of-no-use")
                    {
                        let again = turn.now + self.config.settings.busy_delay;
                        self.timers.arm_if_idle(TransferTimer::Busy(op.peer), again);
                    }
                }
            }
            Refused::Gone => {
                self.session_died(op.session, FabricError::QueuePair, turn);
                if op.piece.tries > self.config.settings.retries_max {
                    let failure = Failure::Fabric(FabricError::QueuePair);
                    self.fail_flow(flow, failure, true, turn);
                } else {
                    self.retry(flow, op.piece);
                }
            }
            why => self.fail_flow(flow, Failure::Refused(why), true, turn),
        }
        self.end_if_over(flow, turn);
    }

    /// The plane may have room again.
    pub(super) fn busy_over(&mut self, connection: ConnectionId) {
        if let Some(peer) = self.peers.get_mut(&connection) {
            peer.queue.refused = false;
        }
        self.list_link(connection);
    }
}

/// The bytes `range` of a plan, or all of it; of these as much as an operation may have, and where
/// in the plan it ends if that is not all.
fn part(all: &Slices, range: Option<(u64, u64)>, most: &Credits) -> (Slices, Option<u64>) {
    if range.is_none() && all.count() as u64 <= most.ranges && all.bytes() <= most.bytes {
        return (all.clone(), None);
    }
    let (from, to) = range.unwrap_or((0, u64::MAX));
    let mut some = Slices::default();
    let (mut end, mut room) = (0, most.bytes);
    for index in 0..all.count() {
        let first = end;
        end += all.len[index];
        let (start, stop) = (from.max(first), to.min(end));
        if start >= stop {
            continue;
        }
        if some.count() as u64 == most.ranges || room == 0 {
            return (some, Some(start));
        }
        let taken = (stop - start).min(room);
        let skipped = start - first;
        some.push(all.local[index] + skipped, all.remote[index] + skipped, taken);
        room -= taken;
        if taken < stop - start {
            return (some, Some(start + taken));
        }
    }
    (some, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_plan_are_the_plan_in_order() {
        let mut all = Slices::default();
        for (local, remote, len) in [(0, 100, 10), (20, 200, 1), (40, 300, 25), (70, 0, 4)] {
            all.push(local, remote, len);
        }
        let bytes_of = |slices: &Slices| -> Vec<(u64, u64)> {
            let each = slices.local.iter().zip(&slices.remote).zip(&slices.len);
            each.flat_map(|((l, r), len)| (0..*len).map(move |at| (l + at, r + at))).collect()
        };
        for (ranges, bytes) in [(1, 1), (1, 7), (2, 12), (3, 100), (1, 100), (4, 40), (9, 39)] {
            let most = Credits { operations: 1, ranges, bytes };
            let (mut range, mut found) = (None, Vec::new());
            for operations in 0.. {
                assert!(operations <= 40, "{most:?}: it does not come to an end");
                let (some, end) = part(&all, range, &most);
                assert!(some.count() as u64 <= ranges && some.bytes() <= bytes, "{most:?}");
                found.extend(bytes_of(&some));
                let Some(end) = end else { break };
                range = Some((end, u64::MAX));
            }
            assert_eq!(found, bytes_of(&all), "{most:?}");
        }
        let (some, end) = part(&all, Some((5, 12)), &Credits::UNLIMITED);
        assert_eq!((bytes_of(&some), end), (bytes_of(&all)[5..12].to_vec(), None));
    }
}
