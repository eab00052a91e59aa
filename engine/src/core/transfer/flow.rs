//! The life of a flow on this rank.

use super::post::Post;
use super::{Out, Transfer, Waiter};
use crate::core::error::Failure;
use crate::core::ids::{FlowId, PeerSlot, SourceId};
use crate::core::layout::BlockList;
use crate::core::message::{FlowState, Report};
use crate::core::time::Nanos;
use crate::fabric::{Placement, SessionId};
use std::sync::Arc;

/// Where the local KV of a flow is.
#[derive(Debug)]
pub(super) enum Local {
    /// In a source that may still grow: the flow writes.
    Source(SourceId),
    /// In these blocks: the flow reads into them.
    Blocks(Arc<Vec<BlockList>>),
}

/// One attempt to move one prompt between this rank and the ranks of a peer.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) peer: PeerSlot,
    pub(super) local: Local,
    pub(super) remote: Arc<Vec<BlockList>>,
    pub(super) tokens: u32,
    /// Tokens posted, per unit of the peer.
    posted: Vec<u32>,
    /// Units not wholly posted.
    units_left: u32,
    /// Posts that are queued, in flight or to be retried.
    pub(super) outstanding: u32,
    /// Sessions that took an operation of it.
    pub(super) touched: Vec<SessionId>,
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
    /// What a flow that is cut off says last.
    pub(super) fn final_state(self, failure: Failure) -> FlowState {
        FlowState::Failed(self.ending.unwrap_or(failure))
    }
}

impl Transfer {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn start_write(
        &mut self,
        now: Nanos,
        id: FlowId,
        source: SourceId,
        peer: PeerSlot,
        range: (u32, u32),
        remote: Arc<Vec<BlockList>>,
        out: &mut Out,
    ) {
        if self.start(now, id, peer, range, Local::Source(source), remote, out) {
            self.sources.entry(source).or_default().flows.push(id);
            self.advance(now, id, out);
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn start_read(
        &mut self,
        now: Nanos,
        id: FlowId,
        peer: PeerSlot,
        range: (u32, u32),
        remote: Arc<Vec<BlockList>>,
        local: Arc<Vec<BlockList>>,
        out: &mut Out,
    ) {
        if self.start(now, id, peer, range, Local::Blocks(local), remote, out) {
            self.advance(now, id, out);
        }
    }

    /// Makes a flow; reports and answers false if its peer cannot be used.
    #[allow(clippy::too_many_arguments)]
    fn start(
        &mut self,
        now: Nanos,
        id: FlowId,
        slot: PeerSlot,
        (from, tokens): (u32, u32),
        local: Local,
        remote: Arc<Vec<BlockList>>,
        out: &mut Out,
    ) -> bool {
        let units = match self.peers.get(&slot).map(|peer| peer.usable()) {
            Some(Ok(units)) => units,
            Some(Err(failure)) => {
                out.push(Report::Flow { flow: id, state: FlowState::Failed(failure) });
                return false;
            }
            None => {
                let state = FlowState::Failed(Failure::Unreachable);
                out.push(Report::Flow { flow: id, state });
                return false;
            }
        };
        let flow = Flow {
            peer: slot,
            local,
            remote,
            tokens,
            posted: vec![from; units],
            units_left: if from < tokens { units as u32 } else { 0 },
            outstanding: 0,
            touched: Vec::new(),
            ending: None,
            tickets: 0,
            closing: false,
            bytes: 0,
            reported: now,
        };
        let previous = self.flows.insert(id, flow);
        assert!(previous.is_none(), "flow {id} started twice");
        true
    }

    /// Posts what the flow can move now, and ends it if that was all.
    pub(super) fn advance(&mut self, now: Nanos, id: FlowId, out: &mut Out) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let Some(peer) = self.peers.get(&flow.peer) else { return };
        if flow.ending.is_some() || flow.closing {
            return;
        }
        let source = match &flow.local {
            Local::Source(source) => match self.sources.get(source) {
                Some(source) => Some(source),
                None => return,
            },
            Local::Blocks(_) => None,
        };
        for (index, unit) in peer.units.iter().enumerate() {
            let posted = flow.posted[index];
            if posted >= flow.tokens {
                continue;
            }
            let ready = source.map_or(flow.tokens, |s| s.ready(unit.last_layer, self.computed));
            let to = unit.sendable(ready, flow.tokens);
            if to <= posted {
                continue;
            }
            flow.posted[index] = to;
            flow.outstanding += 1;
            if to == flow.tokens {
                flow.units_left -= 1;
            }
            self.queue.push_back(Post::new(id, index, posted, to));
        }
        self.finish_if_done(now, id, out);
    }

    /// One post of the flow is done.
    pub(super) fn settle_post(&mut self, now: Nanos, id: FlowId, bytes: u64, out: &mut Out) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        flow.outstanding -= 1;
        flow.bytes += bytes;
        if flow.ending.is_none() && now >= flow.reported + Nanos::from_secs(1) {
            flow.reported = now;
            out.push(Report::Flow { flow: id, state: FlowState::Moving });
        }
        self.finish_if_done(now, id, out);
    }

    fn finish_if_done(&mut self, now: Nanos, id: FlowId, out: &mut Out) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let done = flow.units_left == 0 && flow.outstanding == 0;
        if !done || flow.ending.is_some() || flow.closing {
            return;
        }
        flow.closing = true;
        match self.config.placement {
            Placement::OnCompletion => self.end_flow(id, out),
            Placement::OnQuiet => self.quiesce_flow(now, id, out),
        }
    }

    /// Ends a flow without success: posts nothing more, and reports once it is quiet.
    pub(super) fn fail_flow(
        &mut self,
        now: Nanos,
        id: FlowId,
        failure: Failure,
        announce: bool,
        out: &mut Out,
    ) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        if flow.ending.is_some() {
            return;
        }
        if announce {
            out.push(Report::Flow { flow: id, state: FlowState::Failing(failure.clone()) });
        }
        flow.ending = Some(failure);
        self.quiesce_flow(now, id, out);
    }

    /// Asks every session the flow touched for `Quiet`; ends the flow if there is none.
    fn quiesce_flow(&mut self, now: Nanos, id: FlowId, out: &mut Out) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let sessions = std::mem::take(&mut flow.touched);
        flow.tickets += sessions.len() as u32;
        if flow.tickets == 0 {
            self.end_flow(id, out);
            return;
        }
        for &session in &sessions {
            self.quiesce(now, session, Waiter::Flow(id), out);
        }
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.touched = sessions;
        }
    }

    pub(super) fn flow_quiet(&mut self, id: FlowId, out: &mut Out) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        flow.tickets -= 1;
        if flow.tickets == 0 {
            self.end_flow(id, out);
        }
    }

    fn end_flow(&mut self, id: FlowId, out: &mut Out) {
        let Some(flow) = self.flows.remove(&id) else { return };
        if let Local::Source(source) = &flow.local
            && let Some(source) = self.sources.get_mut(source)
        {
            source.flows.retain(|other| *other != id);
        }
        let state = match flow.ending {
            Some(failure) => FlowState::Failed(failure),
            None => FlowState::Done { bytes: flow.bytes },
        };
        out.push(Report::Flow { flow: id, state });
    }
}
