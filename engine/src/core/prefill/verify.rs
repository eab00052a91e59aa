//! What a prefill proves to receivers that verify.

use super::receiver::{Receiver, ReceiverState};
use super::{FlowEntry, Prefill, PrefillTurn};
use crate::core::ids::{FlowId, RankSet, TransferKey};
use crate::core::message::TransferJob;
use crate::core::prompt_hash::PromptHash;
use crate::core::verify::{DigestPlan, KvDigest};
use std::sync::Arc;

impl Prefill {
    /// Plan of the digests that a receiver wants, if any. Only engines that verify ask for digests
    /// and are asked for them.
    pub(super) fn digest_plan(
        &self,
        key: &TransferKey,
        receiver: &Receiver,
        prompt: PromptHash,
    ) -> Option<DigestPlan> {
        let level = receiver.prompt.verify.filter(|_| !self.config.verify.is_off())?;
        Some(DigestPlan::new(level, (key, self.config.incarnation), prompt))
    }

    /// Has the ranks digest a prompt that a receiver will read; it is granted when they have.
    pub(super) fn digest_source(
        &mut self,
        key: &TransferKey,
        sibling: u32,
        plan: DigestPlan,
        turn: &mut PrefillTurn<'_>,
    ) {
        let flow = FlowId(self.fresh());
        let left = RankSet::first(self.config.geometry.tp);
        let Some(entry) = self.keys.get_mut(key) else { return };
        let Some(request) = entry.request.as_ref().and_then(|id| self.requests.get(id)) else {
            return;
        };
        let Some(receiver) = entry.receivers.get_mut(&sibling) else { return };
        receiver.state = ReceiverState::Digesting(flow);
        turn.push(TransferJob::Digest {
            flow,
            peer: receiver.connection,
            from: 0,
            tokens: request.tokens,
            blocks: Arc::new(request.blocks.clone()),
            plan,
        });
        let (key, source) = (key.clone(), request.source);
        let entry =
            FlowEntry { key, sibling, source, left, failure: None, plan: Some(plan), digest: None };
        self.flows.insert(flow, entry);
    }

    /// A rank has digested its part.
    pub(super) fn flow_digested(&mut self, id: FlowId, digest: &KvDigest) {
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.digest.get_or_insert_default().merge(digest);
        }
    }
}
