//! The engine's requests: what is computed, and when its blocks may go.

use super::{Prefill, PrefillTimer, PrefillTurn, PromptTransfer};
use crate::core::config::CoreSettings;
use crate::core::error::Failure;
use crate::core::ids::{RequestId, SourceId, StepId, TransferKey};
use crate::core::layout::BlockList;
use crate::core::message::{Chunk, FinishReason, Mode, PrefillAnswer, PrefillLeg, TransferJob};
use crate::core::prompt_hash::PromptHash;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A request with a prefill leg, from its arrival until its blocks are free.
#[derive(Debug)]
pub(super) struct PrefillRequest {
    pub(super) key: TransferKey,
    pub(super) leg: PrefillLeg,
    pub(super) tokens: u32,
    pub(super) prompt_hash: PromptHash,
    /// The source that chunks go to; replaced at a preemption.
    pub(super) source: SourceId,
    /// True if the transfer actors know the source.
    pub(super) mentioned: bool,
    pub(super) blocks: Vec<BlockList>,
    /// Tokens that are computed when the scheduled steps are done.
    scheduled: u32,
    /// Tokens that were computed before a preemption.
    lost: u32,
    pub(super) finished: Option<FinishReason>,
    /// Only computed: another copy of the prompt serves the siblings.
    spare: bool,
    /// Sources given up by preemptions and the flows that still read from them.
    pub(super) draining: BTreeMap<SourceId, u32>,
}

/// Number of samples of a prompt; at least one.
fn siblings(leg: &PrefillLeg) -> u32 {
    leg.siblings.max(1)
}

impl PrefillRequest {
    /// True if the prompt is not yet as far as it was before a preemption.
    pub(super) fn is_behind(&self) -> bool {
        self.scheduled < self.lost
    }

    /// Number of samples; each has a receiver.
    pub(super) fn siblings(&self) -> u32 {
        siblings(&self.leg)
    }

    /// True if a step computes the prompt, or did.
    pub(super) fn begun(&self) -> bool {
        self.scheduled > 0
    }

    /// True if a step computes the last of the prompt, or did.
    pub(super) fn ending(&self) -> bool {
        self.scheduled >= self.tokens
    }

    fn blocks_held(&self) -> u32 {
        self.blocks.iter().map(|list| list.ids.len() as u32).sum()
    }

    /// True if the whole prompt's KV is there.
    pub(super) fn computed(&self) -> bool {
        matches!(self.finished, Some(FinishReason::Length | FinishReason::Stop))
    }

    /// Takes a chunk's blocks; says how many.
    fn add(&mut self, chunk: &Chunk) -> u32 {
        let mut added = 0;
        self.blocks.resize_with(chunk.blocks.len().max(self.blocks.len()), BlockList::default);
        for (have, new) in self.blocks.iter_mut().zip(&chunk.blocks) {
            if have.ids.is_empty() {
                have.first = new.first;
            }
            have.ids.extend_from_slice(&new.ids);
            added += new.ids.len() as u32;
        }
        self.scheduled = self.scheduled.max(chunk.to);
        added
    }
}

impl Prefill {
    pub(super) fn arrived(
        &mut self,
        id: RequestId,
        leg: PrefillLeg,
        (tokens, prompt_hash): (u32, PromptHash),
        turn: &mut PrefillTurn<'_>,
    ) {
        if let Err(failure) = self.admit(&id, &leg) {
            turn.push(PrefillAnswer::Rejected { request: id, failure });
            return;
        }
        let source = SourceId(self.fresh());
        let key = leg.key.clone();
        let (peer, mode) = (leg.moriio.clone(), leg.mode);
        let entry = self.keys.entry(key.clone()).or_default();
        entry.copies += 1;
        let spare = entry.request.is_some();
        entry.request.get_or_insert_with(|| id.clone());
        let before = entry.served.len();
        entry.served.retain(|sibling| *sibling < siblings(&leg));
        self.served -= before - entry.served.len();
        let request = PrefillRequest {
            key: key.clone(),
            leg,
            tokens,
            prompt_hash,
            source,
            mentioned: false,
            blocks: Vec::new(),
            scheduled: 0,
            lost: 0,
            finished: None,
            spare,
            draining: BTreeMap::new(),
        };
        self.requests.insert(id, request);
        if !spare {
            self.timers.cancel(&PrefillTimer::Orphan(key.clone()));
            self.bind_receivers(&key, turn);
            if let Some(peer) = peer {
                let prompt = (tokens, prompt_hash);
                self.peer_manager.expect_moriio((&key, mode), prompt, &peer, turn);
            }
        }
    }

    fn admit(&self, id: &RequestId, leg: &PrefillLeg) -> Result<(), Failure> {
        self.peer_manager.admit(leg.mode, leg.moriio.as_ref(), self.requests.len())?;
        let other_incarnation =
            leg.incarnation.is_some_and(|incarnation| incarnation != self.config.incarnation);
        if other_incarnation && !planted!("leg-of-another-incarnation") {
            return Err(Failure::OtherLife);
        }
        // Who wanted it has left, which is nothing to worry about.
        if self.abandoned.contains(&leg.key) && !self.requests.contains_key(id) {
            return Err(Failure::Cancelled);
        }
        let copies = self.keys.get(&leg.key).map_or(0, |key| key.copies);
        let duplicate = self.requests.contains_key(id)
            || self.tombstones.contains(&leg.key)
            || copies >= siblings(leg) && !planted!("copies-are-not-counted");
        if duplicate { Err(Failure::DuplicateKey) } else { Ok(()) }
    }

    pub(super) fn scheduled(&mut self, step: StepId, chunk: Chunk, turn: &mut PrefillTurn<'_>) {
        let Some(request) = self.requests.get_mut(&chunk.request) else { return };
        assert!(request.finished.is_none(), "{} was scheduled after it finished", chunk.request);
        let first = !request.begun();
        self.held += request.add(&chunk);
        if request.spare {
            return;
        }
        let resumed = request.lost > 0 && !request.is_behind();
        let pushes = request.leg.mode == Mode::Push;
        // What is pulled moves when it is whole: its receivers need no blocks before the last step.
        let binds =
            if pushes || planted!("pull-asks-for-blocks-early") { first } else { request.ending() };
        let key = (binds || resumed).then(|| request.key.clone());
        if pushes {
            request.mentioned = true;
            turn.push(TransferJob::Source {
                source: request.source,
                step,
                ready: chunk.from,
                to: chunk.to,
                tokens: request.tokens,
                blocks: Arc::new(chunk.blocks),
            });
        }
        let Some(key) = key else { return };
        if resumed {
            self.timers.cancel(&PrefillTimer::Resume(key.clone()));
        }
        if binds {
            self.bind_receivers(&key, turn);
        }
    }

    pub(super) fn finished(
        &mut self,
        id: RequestId,
        reason: FinishReason,
        turn: &mut PrefillTurn<'_>,
    ) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let key = request.key.clone();
        if request.computed() && reason == FinishReason::Aborted {
            return self.abandoned(&key, turn);
        }
        request.finished = Some(reason);
        if request.spare {
            return self.free(&id, None, turn);
        }
        if request.computed() && request.ending() {
            self.bind_receivers(&key, turn);
            let CoreSettings { lease, claim, .. } = self.config.settings;
            let cut = if planted!("hold-cut-to-a-quarter") { 4 } else { 1 };
            self.timers.arm(PrefillTimer::Hold(key.clone()), turn.now + lease.scale(1, cut));
            // Who may still ask may still be late.
            self.timers.arm(PrefillTimer::Claim(key.clone()), turn.now + claim.max(lease));
        } else {
            request.finished = Some(FinishReason::Aborted);
            // A push may be over before the engine has an answer, that of decode too: then whoever
            // asked leaves, and nobody lacks anything.
            self.try_free(&key, turn);
            self.end_key(&key, &Failure::PrefillEnded, turn);
        }
        self.try_free(&key, turn);
    }

    pub(super) fn preempted(&mut self, id: RequestId, turn: &mut PrefillTurn<'_>) {
        let source = SourceId(self.fresh());
        let Some(request) = self.requests.get_mut(&id) else {
            // It crossed with a rejection, and the engine waits all the same.
            if !planted!("a-rejected-prompt-is-never-safe") {
                turn.push(PrefillAnswer::PreemptionSafe { request: id });
            }
            return;
        };
        assert!(request.finished.is_none(), "{id} was preempted after it finished");
        let old = std::mem::replace(&mut request.source, source);
        if !planted!("preempted-blocks-stay-counted") {
            self.held -= request.blocks_held();
        }
        request.blocks.clear();
        request.lost = request.lost.max(std::mem::take(&mut request.scheduled));
        let mentioned = std::mem::take(&mut request.mentioned);
        let key = request.key.clone();
        let flows = if request.spare { 0 } else { self.restart_receivers(&key, old, turn) };
        self.await_resumption(turn.now, &key);
        if flows > 0 && !planted!("preemption-waits-for-nobody") {
            if let Some(request) = self.requests.get_mut(&id) {
                request.draining.insert(old, flows);
            }
            return;
        }
        if mentioned {
            turn.push(TransferJob::Forget { source: old });
        }
        turn.push(PrefillAnswer::PreemptionSafe { request: id });
    }

    /// One flow of a source that a preemption gave up is quiet.
    pub(super) fn drained(&mut self, id: &RequestId, source: SourceId, turn: &mut PrefillTurn<'_>) {
        let Some(request) = self.requests.get_mut(id) else { return };
        let Some(left) = request.draining.get_mut(&source) else { return };
        *left -= 1;
        if *left == 0 || planted!("preempted-source-safe-at-first-quiet") {
            request.draining.remove(&source);
            turn.push(TransferJob::Forget { source });
            turn.push(PrefillAnswer::PreemptionSafe { request: id.clone() });
        }
    }

    /// Frees the blocks of a key's request if nobody needs them any more.
    pub(super) fn try_free(&mut self, key: &TransferKey, turn: &mut PrefillTurn<'_>) {
        let Some(entry) = self.keys.get(key) else { return };
        let Some(id) = entry.request.clone() else {
            return self.forget_if_idle(key);
        };
        let Some(request) = self.requests.get(&id) else { return };
        let served = entry.served.range(..request.siblings()).count() as u32;
        let all_served = served >= request.siblings()
            || planted!("source-freed-after-one-sibling") && served > 0;
        let ended = request.finished.is_some() && (all_served || entry.closed);
        if !ended || !entry.receivers.is_empty() || !request.draining.is_empty() {
            return;
        }
        let failure = entry.failure.clone();
        self.free(&id, failure, turn);
        self.forget_key(key);
        self.timers.cancel(&PrefillTimer::Hold(key.clone()));
        self.timers.cancel(&PrefillTimer::Claim(key.clone()));
        self.timers.cancel(&PrefillTimer::Resume(key.clone()));
        if !planted!("prefill-forgets-ended-names") {
            self.tombstones.insert(key.clone());
        }
    }

    fn forget_key(&mut self, key: &TransferKey) {
        self.served -= self.keys.remove(key).map_or(0, |entry| entry.served.len());
    }

    /// A key that only receivers know and that all of them have left needs no entry.
    fn forget_if_idle(&mut self, key: &TransferKey) {
        let idle = |entry: &PromptTransfer| entry.receivers.is_empty() && entry.served.is_empty();
        if self.keys.get(key).is_some_and(idle) {
            self.keys.remove(key);
            self.timers.cancel(&PrefillTimer::Orphan(key.clone()));
        }
    }

    fn free(&mut self, id: &RequestId, failure: Option<Failure>, turn: &mut PrefillTurn<'_>) {
        let Some(request) = self.requests.remove(id) else { return };
        if !request.spare {
            self.peer_manager.forget(&request.key);
        }
        self.held -= request.blocks_held();
        if request.mentioned && !planted!("source-is-not-forgotten") {
            turn.push(TransferJob::Forget { source: request.source });
        }
        turn.push(PrefillAnswer::SourceFree { request: id.clone(), failure });
    }

    /// Ends a key for all its receivers; its blocks go when every flow is quiet.
    pub(super) fn end_key(
        &mut self,
        key: &TransferKey,
        failure: &Failure,
        turn: &mut PrefillTurn<'_>,
    ) {
        let Some(entry) = self.keys.get_mut(key) else { return };
        entry.closed = true;
        entry.failure.get_or_insert_with(|| failure.clone());
        self.end_receivers(key, |_| true, failure, turn);
    }

    /// Closes a key to decodes that have not asked yet; `failure` is why those that lack it do.
    pub(super) fn close(
        &mut self,
        key: &TransferKey,
        failure: Failure,
        turn: &mut PrefillTurn<'_>,
    ) {
        let Some(entry) = self.keys.get_mut(key) else { return };
        entry.closed = true;
        let missing =
            entry.request.as_ref().and_then(|id| self.requests.get(id)).is_some_and(|request| {
                let of_prompt = ..request.siblings();
                let served = entry.served.range(of_prompt).count();
                let open = entry.receivers.range(of_prompt).count();
                ((served + open) as u32) < request.siblings()
            });
        if missing {
            entry.failure.get_or_insert(failure);
        }
        self.try_free(key, turn);
    }

    /// Nobody new will fetch a prompt: it goes when those that fetch it now have ended.
    pub(super) fn abandoned(&mut self, key: &TransferKey, turn: &mut PrefillTurn<'_>) {
        match self.keys.get(key) {
            Some(entry) if entry.request.is_some() => self.close(key, Failure::Cancelled, turn),
            Some(_) => self.orphaned(key, turn),
            // Its leg, if it is still on its way, comes too late.
            None if !self.tombstones.contains(key) => {
                self.tombstones.insert(key.clone());
                self.abandoned.insert(key.clone());
            }
            None => {}
        }
    }

    pub(super) fn orphaned(&mut self, key: &TransferKey, turn: &mut PrefillTurn<'_>) {
        if self.keys.get(key).is_some_and(|entry| entry.request.is_none()) {
            self.end_key(key, &Failure::UnknownTransfer, turn);
            self.forget_key(key);
            self.tombstones.insert(key.clone());
            self.abandoned.insert(key.clone());
        }
    }
}
