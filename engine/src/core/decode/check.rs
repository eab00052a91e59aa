//! Whether the KV that arrived is that of the prefill, before the engine is told of it.

use super::request::{DecodePhase, DecodeRequest};
use super::{Decode, DecodeTurn};
use crate::core::error::Failure;
use crate::core::ids::{FlowId, RankSet, RequestId};
use crate::core::layout::{Geometry, GroupKind};
use crate::core::message::{FlowState, TransferJob};
use crate::core::verify::{DigestPlan, KvDigest, block_tokens};

/// What became of the KV that was verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifyCounters {
    /// Blocks of a layer, of a rank, that were digested and are those of the prefill.
    pub blocks: u64,
    /// Transfers that did not arrive as they were sent.
    pub mismatches: u64,
}

/// KV that is being digested here.
#[derive(Debug)]
pub(super) struct KvCheck {
    pub(super) flow: FlowId,
    /// Ranks that have not ended it.
    left: RankSet,
    /// First token that is digested.
    from: u32,
    /// Tokens for which there is one sum.
    block: u32,
    /// What they have found so far.
    found: KvDigest,
    /// What the prefill has.
    sent: Box<KvDigest>,
}

impl Decode {
    /// First token that a peer with this geometry writes, or that is read from it.
    ///
    /// A prefill digests whole blocks before it knows where a prefix hit of a decode that reads ends.
    /// So a decode that verifies reads the whole block in which its hit ends. It reads no more than the
    /// rest where groups have blocks of different sizes: those before the end of the hit are not among
    /// the destinations.
    pub(super) fn moved_from(&self, request: &DecodeRequest, peer: &Geometry) -> u32 {
        let (own, computed) = (&self.config.geometry, request.computed);
        let is_exact = self.config.verify.is_off() || request.lease.is_none();
        if is_exact || planted!("reads-begin-inside-of-a-block") {
            return computed;
        }
        let block = block_tokens(peer, own);
        let groups = peer.groups.iter().zip(&own.groups);
        let mut kept = groups.filter(|(group, _)| group.kind != GroupKind::State);
        let is_equal = kept.all(|(peer, own)| peer.block_tokens.min(own.block_tokens) == block);
        if is_equal { computed - computed % block } else { computed }
    }

    /// Everything is in the blocks, as far as is known: the engine is told, after a look at the
    /// bytes if they are to be verified.
    pub(super) fn arrived_whole(
        &mut self,
        id: &RequestId,
        sent: Option<Box<KvDigest>>,
        turn: &mut DecodeTurn<'_>,
    ) {
        let level = self.config.verify;
        if level.is_off() {
            return self.answer(id, Ok(()), turn);
        }
        let flow = FlowId(self.fresh());
        let Some(request) = self.requests.get(id) else { return };
        let Some(sent) = sent else {
            let why = "the prefill sent no digest of it, though it was asked for one";
            return self.answer(id, Err(Failure::Corrupt(why.into())), turn);
        };
        let Some(info) = self.peer_manager.info(request.connection) else {
            return self.answer(id, Err(Failure::PeerSilent), turn);
        };
        let plan =
            DigestPlan::new(level, (&request.tag.key, info.incarnation), request.prompt_hash);
        let block = block_tokens(&info.geometry, &self.config.geometry);
        let from = self.moved_from(request, &info.geometry);
        turn.push(TransferJob::Digest {
            flow,
            peer: request.connection,
            from,
            tokens: request.tokens,
            blocks: request.blocks.clone(),
            plan,
        });
        let left = RankSet::first(self.config.geometry.tp);
        let found = KvDigest::default();
        let Some(request) = self.requests.get_mut(id) else { return };
        request.phase = DecodePhase::Checking(KvCheck { flow, left, from, block, found, sent });
        self.flows.insert(flow, id.clone());
        if planted!("loaded-before-it-is-verified") {
            self.answer(id, Ok(()), turn);
        }
    }

    /// News of the ranks that digest. True if the flow is one of them.
    pub(super) fn check_news(
        &mut self,
        (rank, flow): (u16, FlowId),
        id: &RequestId,
        state: &FlowState,
        turn: &mut DecodeTurn<'_>,
    ) -> bool {
        let Some(request) = self.requests.get_mut(id) else { return false };
        let DecodePhase::Checking(check) = &mut request.phase else { return false };
        if check.flow != flow {
            return false;
        }
        match state {
            FlowState::Digested(digest) => check.found.merge(digest),
            FlowState::Done { .. } => {
                check.left.remove(rank);
                if check.left.is_empty() {
                    self.compare(id, turn);
                }
            }
            FlowState::Failed(failure) | FlowState::Failing(failure) => {
                let failure = failure.clone();
                self.stop_check(id, failure, turn);
            }
            FlowState::Moving => {}
        }
        true
    }

    fn compare(&mut self, id: &RequestId, turn: &mut DecodeTurn<'_>) {
        let Some(request) = self.requests.get(id) else { return };
        let DecodePhase::Checking(check) = &request.phase else { return };
        let KvCheck { flow, from, block, found, sent, .. } = check;
        let (flow, from, block) = (*flow, *from, *block);
        // A prefill that is read from does not know what was here already.
        let is_read = request.lease.is_some();
        let is_whole = !is_read || from == 0;
        let skips_a_part = is_read || planted!("the-block-where-a-hit-ends-is-not-compared");
        let from = if skips_a_part { from.div_ceil(block) } else { from / block } as usize;
        let difference = sent.difference(found, from, is_whole);
        let wrong = difference.filter(|_| !planted!("digests-are-not-compared"));
        let result = match wrong {
            None => {
                self.verified.blocks += found.count;
                Ok(())
            }
            Some(wrong) => {
                self.verified.mismatches += 1;
                let text =
                    format!("{wrong}, of {block} tokens a block, from {}", request.prefill.0);
                Err(Failure::Corrupt(text.into()))
            }
        };
        self.flows.remove(&flow);
        self.answer(id, result, turn);
    }

    /// The blocks are whole and nobody writes into them: they are given back at once, whatever their
    /// digest is.
    pub(super) fn stop_check(
        &mut self,
        id: &RequestId,
        failure: Failure,
        turn: &mut DecodeTurn<'_>,
    ) {
        let Some(request) = self.requests.get(id) else { return };
        let DecodePhase::Checking(KvCheck { flow, .. }) = &request.phase else { return };
        let flow = *flow;
        self.flows.remove(&flow);
        turn.push(TransferJob::Stop { flow });
        self.answer(id, Err(failure), turn);
    }

    /// What became of the KV that was verified.
    pub fn verified(&self) -> VerifyCounters {
        self.verified
    }
}
