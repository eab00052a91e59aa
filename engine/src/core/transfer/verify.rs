//! Digests of what flows move: of a source as soon as it is computed, of other blocks at once.

use super::flow::LocalKv;
use super::{Transfer, TransferTurn};
use crate::core::command::DataCommand;
use crate::core::error::Failure;
use crate::core::ids::{ConnectionId, FlowId};
use crate::core::layout::{
    BlockList, Geometry, GroupKind, Mismatch, Route, RouteSide, routes, routes_from,
};
use crate::core::message::{FlowState, Role, TransferReport};
use crate::core::verify::{DigestPlan, KvDigest, block_tokens, empty};
use crate::fabric::{DigestBatch, DigestId, DigestParts, FabricError, Refused, RegionId};
use std::sync::Arc;

/// A digest that is not complete.
#[derive(Debug)]
pub(super) struct FlowDigest {
    plan: DigestPlan,
    tokens: u32,
    /// Tokens for which there is one sum.
    block: u32,
    /// True if there is no flow that moves anything.
    pub(super) alone: bool,
    /// What the plane has not answered.
    pub(super) open: u32,
    sum: KvDigest,
}

/// What the plane was asked for: a layer of these blocks of a flow.
#[derive(Debug)]
pub(super) struct DigestRequest {
    flow: FlowId,
    layer: u16,
    blocks: Vec<usize>,
}

/// A part of a prompt: some layers of a group on a route.
#[derive(Clone, Copy, Debug)]
pub(super) struct DigestSpan<'a> {
    pub(super) route: usize,
    pub(super) group: usize,
    pub(super) layers: &'a [u16],
    pub(super) from: u32,
    pub(super) to: u32,
}

impl Transfer {
    /// The ways between the ranks of a peer and this one, seen from the prefill; with them what is
    /// digested comes in the same order on both sides.
    fn digest_routes(&mut self, peer: ConnectionId) -> Result<Arc<Vec<Route>>, Failure> {
        let own = self.layout().ok_or(Failure::EngineGone)?;
        let geometry = &self.config.geometry;
        let peer = self.peers.get_mut(&peer).ok_or(Failure::Unreachable)?;
        if let Some(known) = &peer.digest_routes {
            return Ok(known.clone());
        }
        let (theirs, ranks) = &peer.layout;
        let built = match self.config.role {
            Role::Prefill => routes(true, (geometry, &own), (theirs, ranks)),
            Role::Decode => routes_from((theirs, ranks), (geometry, &own)),
        };
        let built = Arc::new(built.map_err(Failure::Mismatch)?);
        peer.digest_routes = Some(built.clone());
        Ok(built)
    }

    /// Begins the digest of a flow.
    pub(super) fn begin_digest(
        &mut self,
        flow: FlowId,
        (peer, plan): (ConnectionId, DigestPlan),
        tokens: u32,
        alone: bool,
    ) -> Result<(), Failure> {
        self.digest_routes(peer)?;
        let Some(peer) = self.peers.get(&peer) else { return Err(Failure::Unreachable) };
        let (own, theirs) = (&self.config.geometry, &peer.layout.0);
        let digest = FlowDigest {
            plan,
            tokens,
            block: block_tokens(own, theirs),
            alone,
            open: 0,
            sum: empty(own, theirs, tokens),
        };
        self.digests.insert(flow, digest);
        Ok(())
    }

    /// Digests own blocks as they are.
    pub(super) fn digest_blocks(
        &mut self,
        flow: FlowId,
        (peer, plan): (ConnectionId, DigestPlan),
        (from, tokens): (u32, u32),
        blocks: &[BlockList],
        turn: &mut TransferTurn<'_>,
    ) {
        if let Err(failure) = self.begin_digest(flow, (peer, plan), tokens, true) {
            let state = FlowState::Failed(failure);
            return turn.push(TransferReport::Flow { flow, state });
        }
        let geometry = self.config.geometry.clone();
        let count = self.digest_routes(peer).map_or(0, |routes| routes.len());
        for route in 0..count {
            for (group, spec) in geometry.groups.iter().enumerate() {
                let span = DigestSpan { route, group, layers: &spec.layers, from, to: tokens };
                let list = blocks.get(group).cloned().unwrap_or_default();
                if let Err(failure) = self.digest_span(flow, peer, span, &list, turn) {
                    return self.digest_failed(flow, failure, turn);
                }
            }
        }
        self.end_digest_if_done(flow, turn);
    }

    /// Digests what a flow that writes has just queued, from its piece `first` on.
    pub(super) fn digest_pieces(&mut self, id: FlowId, first: usize, turn: &mut TransferTurn<'_>) {
        let Some(flow) = self.flows.get(&id).filter(|_| self.digests.contains_key(&id)) else {
            return;
        };
        let (peer, LocalKv::Source(source)) = (flow.peer, &flow.local) else { return };
        let Some(known) = self.peers.get(&peer) else { return };
        let pieces: Vec<_> = (flow.pieces.range(first.min(flow.pieces.len())..))
            .map(|piece| (known.stripes[piece.stripe].digested(), piece.from, piece.to))
            .collect();
        let source = *source;
        for ((route, group, layers), from, to) in pieces {
            let span = DigestSpan { route, group, layers: &layers, from, to };
            let list = self.sources.get(&source).and_then(|kv| kv.blocks.get(group).cloned());
            let list = list.unwrap_or_default();
            if let Err(failure) = self.digest_span(id, peer, span, &list, turn) {
                return self.digest_failed(id, failure, turn);
            }
        }
    }

    /// Asks the plane for the digests of a span, a batch for each layer.
    fn digest_span(
        &mut self,
        flow: FlowId,
        peer: ConnectionId,
        span: DigestSpan<'_>,
        list: &BlockList,
        turn: &mut TransferTurn<'_>,
    ) -> Result<(), Failure> {
        let routes = self.digest_routes(peer)?;
        let (route, role) = (&routes[span.route], self.config.role);
        let (own, theirs) = (self.config.rank, route.remote_rank);
        let (side, ranks) = match role {
            Role::Prefill => (RouteSide::Local, (own, theirs)),
            Role::Decode => (RouteSide::Remote, (theirs, own)),
        };
        if planted!("copies-of-a-head-are-digested-once") && self.is_copy(peer, ranks.1) {
            return Ok(());
        }
        for layer in span.layers {
            let Some(digest) = self.digests.get(&flow) else { return Ok(()) };
            let geometry = &self.config.geometry;
            let made = batch(digest, geometry, (route, ranks), (side, list), (span, *layer));
            let (parts, blocks) = made.map_err(Failure::Mismatch)?;
            if parts.is_empty() {
                continue;
            }
            let id = DigestId(self.fresh());
            let region = RegionId(u32::from(route.region_on(side, *layer)));
            turn.push(DataCommand::Digest(DigestBatch { id, region, parts }));
            self.digest_requests.insert(id, DigestRequest { flow, layer: *layer, blocks });
            self.digests.entry(flow).and_modify(|digest| digest.open += 1);
        }
        Ok(())
    }

    /// True if a rank of the decode has the heads of a lower one.
    fn is_copy(&self, peer: ConnectionId, rank: u16) -> bool {
        let decode = match (self.config.role, self.peers.get(&peer)) {
            (Role::Prefill, Some(peer)) => &peer.layout.0,
            _ => &self.config.geometry,
        };
        !rank.is_multiple_of((decode.tp / decode.kv_heads.max(1)).max(1))
    }

    /// The plane has answered, or has not taken it.
    pub(super) fn digested(
        &mut self,
        id: DigestId,
        result: Result<Vec<u64>, Failure>,
        turn: &mut TransferTurn<'_>,
    ) {
        let Some(DigestRequest { flow, layer, blocks }) = self.digest_requests.remove(&id) else {
            return self.unasked(id.0);
        };
        let Some(digest) = self.digests.get_mut(&flow) else { return };
        digest.open -= 1;
        match result {
            Ok(digests) if digests.len() == blocks.len() => {
                for (block, of_block) in blocks.iter().zip(digests) {
                    digest.sum.add(*block, usize::from(layer), of_block);
                }
            }
            Ok(digests) => {
                let text = format!("{} digests of {} blocks", digests.len(), blocks.len());
                let cause = FabricError::Backend(text.into());
                return self.digest_failed(flow, Failure::Fabric(cause), turn);
            }
            Err(failure) => return self.digest_failed(flow, failure, turn),
        }
        match digest.alone {
            true => self.end_digest_if_done(flow, turn),
            false => self.finish_if_done(flow, turn),
        }
    }

    /// True if nothing of a flow is still to be digested.
    pub(super) fn is_digested(&self, flow: FlowId) -> bool {
        self.digests.get(&flow).is_none_or(|digest| digest.open == 0)
            || planted!("delivered-before-it-is-digested")
    }

    /// Tells the digest of a flow that ends well, if it has one.
    pub(super) fn report_digest(&mut self, flow: FlowId, turn: &mut TransferTurn<'_>) {
        let Some(digest) = self.digests.remove(&flow) else { return };
        let state = FlowState::Digested(Box::new(digest.sum));
        turn.push(TransferReport::Flow { flow, state });
    }

    fn end_digest_if_done(&mut self, flow: FlowId, turn: &mut TransferTurn<'_>) {
        if self.digests.get(&flow).is_some_and(|digest| digest.alone && digest.open == 0) {
            self.report_digest(flow, turn);
            turn.push(TransferReport::Flow { flow, state: FlowState::Done { bytes: 0 } });
        }
    }

    fn digest_failed(&mut self, flow: FlowId, failure: Failure, turn: &mut TransferTurn<'_>) {
        match self.digests.remove(&flow) {
            Some(digest) if digest.alone => {
                let state = FlowState::Failed(failure);
                turn.push(TransferReport::Flow { flow, state });
            }
            _ => self.fail_flow(flow, failure, true, turn),
        }
    }

    /// Gives a digest up that is no part of a flow which moves something.
    pub(super) fn stop_digest(&mut self, flow: FlowId, turn: &mut TransferTurn<'_>) {
        if self.digests.get(&flow).is_some_and(|digest| digest.alone) {
            self.digest_failed(flow, Failure::Cancelled, turn);
        }
    }

    /// The backend was rebuilt, and answers nothing that the old one was asked. That is no failure of an
    /// operation, which would be tried again.
    pub(super) fn reset_digests(&mut self, turn: &mut TransferTurn<'_>) {
        self.digest_requests.clear();
        for (flow, digest) in std::mem::take(&mut self.digests) {
            if digest.alone {
                let state = FlowState::Failed(Failure::Refused(Refused::Gone));
                turn.push(TransferReport::Flow { flow, state });
            }
        }
    }
}

/// What a span has of a layer to be digested on one side, and which sums it goes to.
fn batch(
    digest: &FlowDigest,
    geometry: &Geometry,
    (route, ranks): (&Route, (u16, u16)),
    side: (RouteSide, &BlockList),
    (span, layer): (DigestSpan<'_>, u16),
) -> Result<(DigestParts, Vec<usize>), Mismatch> {
    let (mut parts, mut blocks) = (DigestParts::default(), Vec::new());
    let (group, tokens) = (&geometry.groups[span.group], digest.tokens);
    let is_state = group.kind == GroupKind::State;
    let unit = route.unit_tokens(span.group);
    let whole = if planted!("digests-begin-with-the-window") { 1 } else { unit };
    let (from, to) = match is_state {
        true => (0, u32::from(!planted!("states-are-not-digested"))),
        false => (group.kind.handed_over_from(span.from, tokens, whole), span.to),
    };
    if from >= to {
        return Ok((parts, blocks));
    }
    let last = if is_state { 0 } else { tokens.saturating_sub(1) / unit };
    for number in from / unit..to.div_ceil(unit) {
        if !digest.plan.has(layer, last.saturating_sub(number)) {
            continue;
        }
        let first = number * unit;
        let rows = match geometry.packed && !planted!("rest-of-a-packed-block-is-not-digested") {
            true => 0..unit,
            false => from.saturating_sub(first)..(tokens - first).min(unit),
        };
        parts.begin(digest.plan.seed(layer, first, ranks));
        route.unit_ranges(side, layer, number, rows, |at, len| parts.push(at, len))?;
        let of_block = if is_state { tokens.saturating_sub(1) } else { first };
        blocks.push((of_block / digest.block) as usize);
    }
    Ok((parts, blocks))
}
