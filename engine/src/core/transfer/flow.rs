//! The life of a flow on this rank.

use super::fair_queue::FlowShare;
use super::session::TransferPeer;
use super::stripe::StripeRange;
use super::{QuiesceWaiter, Transfer, TransferTurn};
use crate::core::error::Failure;
use crate::core::ids::{ConnectionId, FlowId, SourceId};
use crate::core::layout::BlockList;
use crate::core::message::{FlowState, TransferReport};
use crate::core::time::Nanos;
use crate::core::verify::DigestPlan;
use crate::fabric::{FabricError, Placement, SessionId};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Where the local KV of a flow is.
#[derive(Debug)]
pub(super) enum LocalKv {
    /// In a source that may still grow: the flow writes.
    Source(SourceId),
    /// In these blocks: the flow reads into them.
    Blocks(Arc<Vec<BlockList>>),
}

/// One attempt to move one prompt between this rank and the ranks of a peer.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) peer: ConnectionId,
    pub(super) local: LocalKv,
    pub(super) remote: Arc<Vec<BlockList>>,
    pub(super) tokens: u32,
    /// Tokens queued, per unit of the peer.
    queued: Vec<u32>,
    /// Units not wholly queued.
    units_left: u32,
    /// What is to be posted, in this order.
    pub(super) pieces: VecDeque<StripeRange>,
    /// Pieces at the front that were posted before.
    returned: usize,
    /// Pieces that are queued, in flight or wait to be tried again.
    pub(super) outstanding: u32,
    pub(super) in_flight: u32,
    /// What it has of the link.
    pub(super) share: FlowShare,
    /// Sessions that took an operation of it.
    pub(super) touched: Vec<SessionId>,
    /// Sessions on which an operation of it failed, bytes of which may still land.
    pub(super) unsure: Vec<SessionId>,
    /// Why it ends without success.
    pub(super) ending: Option<Failure>,
    /// Quiesce tickets it waits for.
    tickets: u32,
    /// True once the final quiesce was asked for.
    closing: bool,
    pub(super) bytes: u64,
    reported: Nanos,
}

impl Flow {
    /// Units, and sessions that have to do with it.
    pub(super) fn entries(&self) -> usize {
        self.queued.len() + self.touched.len() + self.unsure.len()
    }

    /// Takes the next piece.
    pub(super) fn next_piece(&mut self) -> Option<StripeRange> {
        self.returned = self.returned.saturating_sub(1);
        self.pieces.pop_front()
    }

    /// Queues what an operation leaves over of its piece.
    pub(super) fn put_first(&mut self, rest: StripeRange) {
        self.outstanding += 1;
        self.pieces.push_front(rest);
    }

    /// Queues a piece that was posted before, behind others of its kind.
    pub(super) fn give_back(&mut self, piece: StripeRange) {
        let at = self.returned.min(self.pieces.len());
        self.pieces.insert(at, piece);
        self.returned = at + 1;
    }

    /// What a flow that is cut off says last.
    pub(super) fn final_state(self, failure: Failure) -> FlowState {
        FlowState::Failed(self.ending.unwrap_or(failure))
    }
}

impl Transfer {
    /// Starts to move tokens `from..` of a prompt of `tokens` tokens; reports if the peer cannot be
    /// used.
    pub(super) fn start_flow(
        &mut self,
        id: FlowId,
        (peer, verify): (ConnectionId, Option<DigestPlan>),
        (from, tokens): (u32, u32),
        (local, remote): (LocalKv, Arc<Vec<BlockList>>),
        turn: &mut TransferTurn<'_>,
    ) {
        let usable = self.peers.get(&peer).map_or(Err(Failure::Unreachable), TransferPeer::usable);
        let usable = usable.and_then(|units| {
            let plan = verify.map(|plan| (peer, plan));
            plan.map_or(Ok(()), |plan| self.begin_digest(id, plan, tokens, false)).map(|()| units)
        });
        let units = match usable {
            Ok(units) => units,
            Err(failure) => {
                let state = FlowState::Failed(failure);
                return turn.push(TransferReport::Flow { flow: id, state });
            }
        };
        if let LocalKv::Source(source) = &local {
            self.sources.entry(*source).or_default().flows.push(id);
        }
        let flow = Flow {
            peer,
            local,
            remote,
            tokens,
            queued: vec![from; units],
            units_left: if from < tokens { units as u32 } else { 0 },
            pieces: VecDeque::new(),
            returned: 0,
            outstanding: 0,
            in_flight: 0,
            share: FlowShare::default(),
            touched: Vec::new(),
            unsure: Vec::new(),
            ending: None,
            tickets: 0,
            closing: false,
            bytes: 0,
            reported: turn.now,
        };
        let previous = self.flows.insert(id, flow);
        assert!(previous.is_none(), "flow {id} started twice");
        self.advance(id, 0..u16::MAX, turn);
    }

    /// Queues what the flow can move now in units that end with one of `layers`, and ends it if
    /// that was all.
    pub(super) fn advance(&mut self, id: FlowId, layers: Range<u16>, turn: &mut TransferTurn<'_>) {
        if let Some(first) = self.queue_stripes(id, layers) {
            self.digest_pieces(id, first, turn);
        }
        self.finish_if_done(id, turn);
    }

    /// Queues what can be moved; says which piece of it is the first.
    fn queue_stripes(&mut self, id: FlowId, layers: Range<u16>) -> Option<usize> {
        let flow = self.flows.get_mut(&id)?;
        let peer = self.peers.get(&flow.peer)?;
        if flow.ending.is_some() || flow.closing || flow.units_left == 0 {
            return None;
        }
        let source = match &flow.local {
            LocalKv::Source(source) => Some(self.sources.get(source)?),
            LocalKv::Blocks(_) => None,
        };
        let had = flow.pieces.len();
        let start = peer.stripes.partition_point(|unit| unit.last_layer < layers.start);
        let units = peer.stripes.iter().enumerate().skip(start);
        for (index, unit) in units.take_while(|(_, unit)| unit.last_layer < layers.end) {
            let queued = flow.queued[index];
            if queued >= flow.tokens {
                continue;
            }
            let ready = source.map_or(flow.tokens, |s| s.ready(unit.last_layer, self.computed));
            let to = unit.sendable(ready, flow.tokens);
            if to <= queued {
                continue;
            }
            flow.queued[index] = to;
            flow.outstanding += 1;
            if to == flow.tokens {
                flow.units_left -= 1;
            }
            flow.pieces.push_back(StripeRange::new(index, queued, to));
        }
        let added = flow.pieces.len() - had;
        if added > 0 {
            self.pieces += added as u32;
            self.list(id);
        }
        (added > 0).then_some(had)
    }

    /// One piece of the flow is done.
    pub(super) fn settle_piece(&mut self, id: FlowId, bytes: u64, turn: &mut TransferTurn<'_>) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        flow.outstanding -= 1;
        flow.bytes += if planted!("bytes-are-counted-twice") { 2 * bytes } else { bytes };
        if flow.ending.is_none() && turn.now >= flow.reported + Nanos::from_secs(1) {
            flow.reported = turn.now;
            turn.push(TransferReport::Flow { flow: id, state: FlowState::Moving });
        }
        self.finish_if_done(id, turn);
    }

    pub(super) fn finish_if_done(&mut self, id: FlowId, turn: &mut TransferTurn<'_>) {
        let is_digested = self.is_digested(id);
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let settled = flow.outstanding == 0 || planted!("newest-operation-ends-the-flow");
        let done = flow.units_left == 0 && settled && is_digested;
        if !done || flow.ending.is_some() || flow.closing {
            return;
        }
        flow.closing = true;
        let unseen = match self.config.caps.placement {
            Placement::OnCompletion => Vec::new(),
            Placement::OnQuiet => std::mem::take(&mut flow.touched),
        };
        self.quiesce_flow(id, &unseen, turn);
    }

    /// Ends a flow without success: posts nothing more, and reports once it is quiet.
    pub(super) fn fail_flow(
        &mut self,
        id: FlowId,
        failure: Failure,
        announce: bool,
        turn: &mut TransferTurn<'_>,
    ) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        if flow.ending.is_some() {
            return;
        }
        if announce {
            turn.push(TransferReport::Flow {
                flow: id,
                state: FlowState::Failing(failure.clone()),
            });
        }
        flow.ending = Some(failure);
        self.pieces -= flow.pieces.len() as u32;
        flow.pieces = VecDeque::new();
        if planted!("end-of-a-flow-ends-its-sessions") {
            for session in flow.touched.clone() {
                self.session_died(session, FabricError::AckTimeout, turn);
            }
        }
        self.end_if_over(id, turn);
    }

    /// Once the last operation of a flow that ends without success is over, sees to it that no byte
    /// of it can land any more.
    pub(super) fn end_if_over(&mut self, id: FlowId, turn: &mut TransferTurn<'_>) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let in_flight = flow.in_flight > 0 && !planted!("failed-flow-leaves-its-operations");
        if flow.ending.is_none() || in_flight || flow.closing {
            return;
        }
        flow.closing = true;
        let unsure = match self.config.caps.placement {
            Placement::OnCompletion => std::mem::take(&mut flow.unsure),
            Placement::OnQuiet => std::mem::take(&mut flow.touched),
        };
        self.quiesce_flow(id, &unsure, turn);
    }

    /// Asks sessions for `Quiet` before the flow ends.
    fn quiesce_flow(&mut self, id: FlowId, sessions: &[SessionId], turn: &mut TransferTurn<'_>) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        flow.tickets = sessions.len() as u32;
        if sessions.is_empty() {
            return self.end_flow(id, turn);
        }
        for &session in sessions {
            self.quiesce(session, QuiesceWaiter::Flow(id), turn);
        }
    }

    pub(super) fn flow_quiet(&mut self, id: FlowId, turn: &mut TransferTurn<'_>) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        flow.tickets -= 1;
        if flow.tickets == 0 {
            self.end_flow(id, turn);
        }
    }

    fn end_flow(&mut self, id: FlowId, turn: &mut TransferTurn<'_>) {
        let Some(flow) = self.flows.remove(&id) else { return };
        if let Some(peer) = self.peers.get_mut(&flow.peer) {
            peer.queue.forget(id, &flow.share);
        }
        if let LocalKv::Source(source) = &flow.local
            && let Some(source) = self.sources.get_mut(source)
        {
            source.flows.retain(|other| *other != id);
        }
        let state = match flow.ending {
            Some(failure) => {
                self.digests.remove(&id);
                FlowState::Failed(failure)
            }
            None => {
                self.report_digest(id, turn);
                FlowState::Done { bytes: flow.bytes }
            }
        };
        turn.push(TransferReport::Flow { flow: id, state });
    }
}
