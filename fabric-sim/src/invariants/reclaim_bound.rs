//! L5: blocks held for a dead peer return within the lease bound (sources) or the fence bound
//! (destinations).

use super::state::{RequestAt, freed};
use super::{CheckContext, Invariant, LivenessBounds};
use crate::observation::{
    BlockRef, Observation, ObservationKind, SimProcessId, SimRankId, Submission,
};
use kvferry_engine::core::ids::{RequestId, TransferKey};
use kvferry_engine::core::message::{DecodeHook, PrefillHook};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::Direction;
use std::collections::BTreeMap;

/// The blocks of a prefill request.
#[derive(Debug)]
struct HeldSource {
    /// The last block of each group and chunk, which no other request shares.
    tails: Vec<BlockRef>,
    /// When an operation that reads it completed last.
    moved: Nanos,
}

/// A destination whose writer died is given back within silence + fence + 1 s. A source is given
/// back within a lease and that time after its request finished, an operation on it completed, or
/// the last decode that lives and waits for it was done with it.
#[derive(Debug, Default)]
pub(super) struct ReclaimBound {
    limits: LivenessBounds,
    /// When each incarnation ended.
    died: BTreeMap<SimProcessId, Nanos>,
    sources: BTreeMap<RequestAt, HeldSource>,
    /// Whose the last blocks of chunks are.
    tails: BTreeMap<(SimProcessId, BlockRef), RequestId>,
    /// Which source an operation reads.
    ops: BTreeMap<(SimRankId, u64), RequestAt>,
    /// Decode requests that have not ended, or whose load has not.
    wants: BTreeMap<RequestAt, TransferKey>,
    /// Their number by transfer, and when it changed last.
    wanted: BTreeMap<TransferKey, (u32, Nanos)>,
}

impl ReclaimBound {
    pub(super) fn new(limits: LivenessBounds) -> ReclaimBound {
        ReclaimBound { limits, ..ReclaimBound::default() }
    }

    fn check_loads(&self, now: CheckContext<'_>) {
        if self.died.is_empty() {
            return;
        }
        let bound = self.limits.end();
        for load in now.state.loads().filter(|load| now.state.acts(load.who)) {
            let Some(peer) = load.peer else { continue };
            let Some(died) = self.died.get(&peer) else { continue };
            // A peer that is itself disturbed notices a death only after the last fault.
            let from = (*died).max(load.begun).max(now.state.last_hit);
            if now.at <= from + bound {
                continue;
            }
            let (name, peer) = (now.name(load.who.instance), now.name(peer.instance));
            let (died, request) = (died.as_secs_f64(), &load.request);
            now.report_once((load.who, &load.request), || {
                format!(
                    "{name} still holds the blocks of request {request} for {peer}, which died at \
                     {died:.6} s"
                )
            });
        }
    }

    fn check_sources(&mut self, now: CheckContext<'_>) {
        let bound = self.limits.lease + self.limits.end();
        let mut late = Vec::new();
        for ((who, request), source) in &self.sources {
            let Some(prompt) = now.state.prompt(*who, request) else { continue };
            let Some(finished) = prompt.finished.filter(|_| now.state.acts(*who)) else { continue };
            let (receivers, changed) = self.wanted.get(&prompt.key).copied().unwrap_or_default();
            let from = finished.max(source.moved).max(changed).max(now.state.last_hit);
            if receivers > 0 || now.at <= from + bound {
                continue;
            }
            late.push((*who, request.clone()));
            let (name, since) = (now.name(who.instance), finished.as_secs_f64());
            now.report(|| {
                format!(
                    "{name} still holds the blocks of request {request}, which finished at \
                     {since:.6} s"
                )
            });
        }
        for (who, request) in late {
            self.forget(who, &request);
        }
    }

    fn prefill_hook(&mut self, now: Nanos, who: SimProcessId, hook: &PrefillHook) {
        match hook {
            PrefillHook::Arrived { request, .. } => {
                let source = HeldSource { tails: Vec::new(), moved: now };
                self.sources.insert((who, request.clone()), source);
            }
            PrefillHook::Scheduled { chunks, .. } => {
                for chunk in chunks {
                    let Some(source) = self.sources.get_mut(&(who, chunk.request.clone())) else {
                        continue;
                    };
                    for (group, list) in (0..).zip(&chunk.blocks) {
                        let Some(block) = list.ids.last().copied() else { continue };
                        let at = BlockRef { group, block };
                        source.tails.push(at);
                        self.tails.insert((who, at), chunk.request.clone());
                    }
                }
            }
            PrefillHook::Finished { .. } | PrefillHook::Preempted { .. } => {}
        }
    }

    fn forget(&mut self, who: SimProcessId, request: &RequestId) {
        let Some(source) = self.sources.remove(&(who, request.clone())) else { return };
        for at in source.tails {
            if self.tails.get(&(who, at)) == Some(request) {
                self.tails.remove(&(who, at));
            }
        }
    }

    fn submitted(&mut self, seen: &Submission<'_>) {
        let (of, blocks) = match seen.direction {
            Direction::Write => (seen.from.who, seen.local),
            Direction::Read => (seen.peer.who, seen.remote),
        };
        let Some(tail) = blocks.last() else { return };
        if let Some(request) = self.tails.get(&(of, *tail)) {
            self.ops.insert((seen.from, seen.op.0), (of, request.clone()));
        }
    }

    /// A decode request waits for a transfer.
    fn want(
        &mut self,
        now: CheckContext<'_>,
        who: SimProcessId,
        request: &RequestId,
        key: &TransferKey,
    ) {
        self.wants.insert((who, request.clone()), key.clone());
        let wanted = self.wanted.entry(key.clone()).or_default();
        *wanted = (wanted.0 + 1, now.at);
    }

    /// A decode request is done with its transfer.
    fn done(&mut self, now: CheckContext<'_>, who: SimProcessId, request: &RequestId) {
        if let Some(key) = self.wants.remove(&(who, request.clone()))
            && let Some(wanted) = self.wanted.get_mut(&key)
        {
            *wanted = (wanted.0 - 1, now.at);
        }
    }

    fn crashed(&mut self, now: CheckContext<'_>, who: SimProcessId) {
        self.died.insert(who, now.at);
        self.sources.retain(|key, _| key.0 != who);
        self.tails.retain(|key, _| key.0 != who);
        self.ops.retain(|key, _| key.0.who != who);
        let lost: Vec<_> =
            self.wants.keys().filter(|key| key.0 == who).map(|key| key.1.clone()).collect();
        lost.iter().for_each(|request| self.done(now, who, request));
    }

    fn decode_hook(&mut self, now: CheckContext<'_>, who: SimProcessId, hook: &DecodeHook) {
        match hook {
            DecodeHook::Arrived { request, leg, .. } => self.want(now, who, request, &leg.key),
            // Until its answer it waits for its blocks.
            DecodeHook::Finished { request, .. }
                if now.state.load(who.instance, request).is_none() =>
            {
                self.done(now, who, request);
            }
            DecodeHook::Finished { .. } | DecodeHook::Allocated { .. } => {}
        }
    }
}

impl Invariant for ReclaimBound {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Crashed, PrefillHook, PrefillAnswer, DecodeHook, DecodeAnswer, Submitted, Completed]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        match seen {
            Observation::Crashed { who } => self.crashed(now, *who),
            Observation::DecodeHook { who, hook } => self.decode_hook(now, *who, hook),
            Observation::DecodeAnswer { who, answer } if answer.is_last() => {
                self.done(now, *who, answer.request());
            }
            Observation::PrefillHook { who, hook } => self.prefill_hook(now.at, *who, hook),
            Observation::PrefillAnswer { who, answer } => {
                if let Some(request) = freed(answer) {
                    self.check_sources(now);
                    self.forget(*who, request);
                }
            }
            Observation::Submitted(seen) => self.submitted(seen),
            Observation::Completed { from, op, .. } => {
                let source = self.ops.remove(&(*from, op.0));
                if let Some(source) = source.and_then(|source| self.sources.get_mut(&source)) {
                    source.moved = now.at;
                }
            }
            _ => {}
        }
    }

    fn audit(&mut self, now: CheckContext<'_>) {
        self.check_loads(now);
        self.check_sources(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{
        D0, HASH, InvariantBench, InvariantId, P0, decode_leg, done, prefill_leg, request,
    };
    use kvferry_engine::core::ids::StepId;
    use kvferry_engine::core::layout::BlockList;
    use kvferry_engine::core::message::{Chunk, FinishReason, Mode, PrefillAnswer};

    #[test]
    fn destinations_return_within_the_fence_bound() {
        let mut bench = InvariantBench::new(InvariantId::ReclaimBound);
        bench.allocated(D0, "r", 16, &[4]);
        bench.announced(D0, P0, "r");
        bench.crash(P0);
        bench.now = bench.now + Nanos::from_secs(9);
        bench.finish();
        bench.holds();
        bench.now = bench.now + Nanos::from_secs(2);
        bench.finish();
        bench.fails("d0 still holds the blocks of request r for p0");
    }

    /// A prompt of one block is computed.
    fn computed(bench: &mut InvariantBench, name: &str, block: u32) {
        let leg = prefill_leg(name, Mode::Push);
        let blocks = vec![BlockList::new(vec![block])];
        let chunks = vec![Chunk { request: request(name), from: 0, to: 16, blocks }];
        let hooks = [
            PrefillHook::Arrived { request: request(name), leg, tokens: 16, prompt_hash: HASH },
            PrefillHook::Scheduled { step: StepId(1), chunks },
            PrefillHook::Finished { request: request(name), reason: FinishReason::Length },
        ];
        for hook in &hooks {
            bench.see(Observation::PrefillHook { who: P0, hook });
        }
    }

    #[test]
    fn sources_return_within_the_lease_bound() {
        let mut bench = InvariantBench::new(InvariantId::ReclaimBound);
        computed(&mut bench, "r", 1);
        bench.now = bench.now + Nanos::from_secs(39);
        let answer = &PrefillAnswer::SourceFree { request: request("r"), failure: None };
        bench.see(Observation::PrefillAnswer { who: P0, answer });
        computed(&mut bench, "s", 1);
        bench.finish();
        bench.holds();
        bench.now = bench.now + Nanos::from_secs(41);
        bench.finish();
        bench.fails("p0 still holds the blocks of request s");
    }

    #[test]
    fn only_operations_on_a_source_make_it_wait_longer() {
        for (block, held) in [(1, true), (2, false)] {
            let mut bench = InvariantBench::new(InvariantId::ReclaimBound);
            computed(&mut bench, "r", 1);
            bench.now = bench.now + Nanos::from_secs(30);
            bench.write(P0, D0, 1, &[block]);
            bench.complete(P0, 1, &done());
            bench.now = bench.now + Nanos::from_secs(30);
            bench.finish();
            bench.judges(held, "p0 still holds the blocks of request r");
        }
    }

    #[test]
    fn a_source_stays_while_a_living_decode_waits_for_it() {
        let mut bench = InvariantBench::new(InvariantId::ReclaimBound);
        let leg = prefill_leg("r", Mode::Push);
        let hook =
            &PrefillHook::Arrived { request: request("p"), leg, tokens: 16, prompt_hash: HASH };
        bench.see(Observation::PrefillHook { who: P0, hook });
        let hook = &DecodeHook::Arrived {
            request: request("r"),
            leg: decode_leg("r"),
            tokens: 16,
            prompt_hash: HASH,
        };
        bench.see(Observation::DecodeHook { who: D0, hook });
        let hook = &PrefillHook::Finished { request: request("p"), reason: FinishReason::Length };
        bench.see(Observation::PrefillHook { who: P0, hook });
        bench.now = bench.now + Nanos::from_secs(100);
        bench.finish();
        bench.holds();
        bench.crash(D0);
        bench.now = bench.now + Nanos::from_secs(41);
        bench.finish();
        bench.fails("p0 still holds the blocks of request p");
    }
}
