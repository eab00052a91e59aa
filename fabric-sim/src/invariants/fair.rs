//! I19: until the first fault, flows from a rank to a peer that all have work get equal shares.

use super::state::{TrackedLoad, freed};
use super::{CheckContext, Invariant};
use crate::abilities::LOCAL;
use crate::observation::{
    BlockRef, Observation, ObservationKind, SimProcessId, SimRankId, Submission,
};
use kvferry_engine::core::dialect::native::Frame;
use kvferry_engine::core::ids::TransferKey;
use kvferry_engine::core::message::{AttemptTag, Message, PrefillAnswer, PrefillHook, TransferJob};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::core::transfer::TransferSettings;
use kvferry_engine::fabric::Direction;
use kvferry_scenarios::Run;
use std::collections::{BTreeMap, BTreeSet};

/// By how many quanta, or of the largest operations, one flow may be ahead of another: a quantum
/// and an operation at either end, and what those that were there move while many come at once.
const AHEAD: u64 = 6;

/// An operation counts at least as a quantum over this.
const SHORTEST: u64 = 128;

/// What a flow fills, by the number that the blocks of it have.
type LoadNumber = u32;

/// A prompt at the prefill that computes it.
type PromptAt = (SimProcessId, TransferKey);

/// What a flow had of a link: bytes, and what its operations count at most.
#[derive(Clone, Copy, Debug, Default)]
struct FlowUsage {
    bytes: u64,
    cost: u64,
}

/// Flows from one rank to a peer.
#[derive(Debug, Default)]
struct FairLink {
    /// What each flow had before this instant, and since.
    served: BTreeMap<LoadNumber, FlowUsage>,
    instant: Nanos,
    fresh: BTreeMap<LoadNumber, FlowUsage>,
    /// Flows all of which can be submitted, with what each had by then.
    since: BTreeMap<LoadNumber, BTreeMap<LoadNumber, FlowUsage>>,
    /// Bytes of the largest operation.
    largest: u64,
}

/// What is known of a prompt until its prefill let go of it.
#[derive(Debug, Default)]
struct FairPrompt {
    /// Requests that have its key.
    requests: u32,
    computed: bool,
}

/// A flow of which everything can be submitted, and which has not submitted everything, has a share
/// of the operations of its rank. Whenever it submits one it still had work until then: from when
/// it could submit everything, no other flow of the same link may have submitted more than it by
/// [`AHEAD`] quanta. What is submitted in the same instant comes in some order and waits for
/// nothing. After the first fault nothing is checked: whatever is repeated or waits for a session
/// is no matter of shares.
#[derive(Debug, Default)]
pub(super) struct FairShare {
    faulted: bool,
    /// What a flow may send before others, at most.
    quantum: u64,
    links: BTreeMap<(SimRankId, SimProcessId), FairLink>,
    /// Loads from when on everything of them can be submitted, soonest first.
    ready: BTreeSet<(Nanos, LoadNumber)>,
    /// Prompts, and the loads that wait for those that are not computed.
    sources: BTreeMap<PromptAt, FairPrompt>,
    waiting: BTreeMap<PromptAt, Vec<LoadNumber>>,
    /// Loads that have not ended, with the prompt that each one asked to be written.
    open: BTreeMap<LoadNumber, Option<PromptAt>>,
    /// Of these, those of which everything can be submitted.
    active: BTreeSet<LoadNumber>,
}

impl FairLink {
    /// What was submitted in instants before belongs to the past.
    fn turn(&mut self, now: Nanos) {
        if self.instant < now {
            self.instant = now;
            for (load, more) in std::mem::take(&mut self.fresh) {
                let served = self.served.entry(load).or_default();
                served.bytes += more.bytes;
                served.cost += more.cost;
            }
        }
    }
}

/// True for a link that a load may use: one between its decode and the prefill that it asked.
fn is_used(load: Option<&TrackedLoad>, (from, to): &(SimRankId, SimProcessId)) -> bool {
    load.is_some_and(|load| {
        let is_end = |who: SimProcessId| who == from.who || who == *to;
        is_end(load.who) && load.peer.is_none_or(is_end)
    })
}

impl FairShare {
    pub(super) fn new(run: &Run) -> FairShare {
        let settings = TransferSettings::default();
        let rate = run.network.bandwidth.max(run.network.node_bandwidth);
        let carried = u128::from(rate) * u128::from(settings.operation_time.0) / 1_000_000_000;
        let (least, most) = (settings.operation_bytes_min, settings.operation_bytes_max);
        let quantum = u64::try_from(carried).unwrap_or(u64::MAX).clamp(2 * least, most);
        FairShare { quantum, ..FairShare::default() }
    }

    /// A decode asked a prefill to write.
    fn announced(
        &mut self,
        now: CheckContext<'_>,
        (from, to): (SimProcessId, SimProcessId),
        tag: &AttemptTag,
    ) {
        let Some((request, attempt)) = now.state.tagged(from.instance, tag) else { return };
        let load = now.state.load_number(from.instance, request);
        if attempt != tag.attempt || load == 0 || self.open.contains_key(&load) {
            return;
        }
        let prompt = (to, tag.key.clone());
        match self.sources.get(&prompt).is_some_and(|source| source.computed) {
            true => self.can_start(now.at, load),
            false => self.waiting.entry(prompt.clone()).or_default().push(load),
        }
        self.open.insert(load, Some(prompt));
    }

    /// The hooks, jobs and layers of before reach the ranks within this time.
    fn can_start(&mut self, now: Nanos, load: LoadNumber) {
        self.ready.insert((now + LOCAL.scale(4, 1), load));
    }

    fn prefill_hook(&mut self, now: CheckContext<'_>, who: SimProcessId, hook: &PrefillHook) {
        match hook {
            PrefillHook::Arrived { leg, .. } => {
                self.sources.entry((who, leg.key.clone())).or_default().requests += 1;
            }
            PrefillHook::Finished { request, .. } => {
                let Some(prompt) = now.state.prompt(who, request) else { return };
                let prompt = (who, prompt.key.clone());
                for load in self.waiting.remove(&prompt).unwrap_or_default() {
                    self.can_start(now.at, load);
                }
                self.sources.entry(prompt).or_default().computed = true;
            }
            PrefillHook::Scheduled { .. } | PrefillHook::Preempted { .. } => {}
        }
    }

    /// A prefill is done with a request; with the last one of a prompt nothing more of it is sent.
    fn freed(&mut self, now: CheckContext<'_>, who: SimProcessId, answer: &PrefillAnswer) {
        let request = freed(answer);
        let Some(prompt) = request.and_then(|request| now.state.prompt(who, request)) else {
            return;
        };
        let prompt = (who, prompt.key.clone());
        if let Some(source) = self.sources.get_mut(&prompt) {
            source.requests = source.requests.saturating_sub(1);
            if source.requests == 0 {
                self.sources.remove(&prompt);
            }
        }
    }

    fn job(&mut self, now: CheckContext<'_>, who: SimProcessId, job: &TransferJob) {
        let TransferJob::Read { local, .. } = job else { return };
        let first = (0..).zip(local.iter()).find_map(|(group, list)| {
            let block = *list.ids.first()?;
            Some(BlockRef { group, block })
        });
        let load = first.map_or(0, |at| now.state.block(who.instance, at).load);
        if load == 0 || self.open.contains_key(&load) {
            return;
        }
        self.open.insert(load, None);
        self.can_start(now.at, load);
    }

    fn ended(&mut self, now: CheckContext<'_>, load: LoadNumber) {
        let Some(prompt) = self.open.remove(&load) else { return };
        if let Some(prompt) = prompt
            && let Some(loads) = self.waiting.get_mut(&prompt)
        {
            loads.retain(|other| *other != load);
            if loads.is_empty() {
                self.waiting.remove(&prompt);
            }
        }
        self.ready.retain(|(_, other)| *other != load);
        self.active.remove(&load);
        let known = now.state.load_at(load);
        for (_, link) in self.links.iter_mut().filter(|(ends, _)| is_used(known, ends)) {
            link.since.remove(&load);
            link.fresh.remove(&load);
            // What others saw of it was there by then.
            if link.served.remove(&load).is_some() {
                link.since.values_mut().for_each(|others| {
                    others.remove(&load);
                });
            }
        }
    }

    fn submitted(
        &mut self,
        now: CheckContext<'_>,
        seen: &Submission<'_>,
    ) -> Option<(LoadNumber, LoadNumber, u64)> {
        if self.open.len() < 2 {
            // Nobody to be ahead of; what is sent now counts for nobody.
            return None;
        }
        while self.ready.first().is_some_and(|(at, _)| *at <= now.at) {
            let Some((_, load)) = self.ready.pop_first() else { break };
            let known = now.state.load_at(load);
            for (_, link) in self.links.iter_mut().filter(|(ends, _)| is_used(known, ends)) {
                link.turn(now.at);
                link.since.insert(load, link.served.clone());
            }
            self.active.insert(load);
        }
        let write = seen.direction == Direction::Write;
        let (target, written) =
            if write { (seen.peer, seen.remote) } else { (seen.from, seen.local) };
        let mine = now.state.block(target.who.instance, *written.first()?).load;
        if mine == 0 {
            return None;
        }
        let link = self.links.entry((seen.from, seen.peer.who)).or_default();
        link.largest = link.largest.max(seen.bytes);
        link.turn(now.at);
        if self.active.contains(&mine) {
            // Nobody had sent anything here by then.
            link.since.entry(mine).or_default();
        }
        let most = AHEAD * link.largest.max(self.quantum);
        let unfair = link.since.get(&mine).and_then(|before| {
            let before = |load: &LoadNumber| before.get(load).copied().unwrap_or_default();
            let cost = link.served.get(&mine).map_or(0, |served| served.cost);
            let got = cost.saturating_sub(before(&mine).cost);
            let ahead = |(other, served): (&LoadNumber, &FlowUsage)| {
                let more = served.bytes.saturating_sub(before(other).bytes).saturating_sub(got);
                (*other != mine && more > most).then_some((*other, more))
            };
            link.served.iter().find_map(ahead)
        });
        let fresh = link.fresh.entry(mine).or_default();
        fresh.bytes += seen.bytes;
        fresh.cost += seen.bytes.max(self.quantum / SHORTEST);
        unfair.map(|(other, more)| (mine, other, more))
    }
}

impl Invariant for FairShare {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Faulted, FrameArrived, PrefillHook, PrefillAnswer, Job, DecodeAnswer, Submitted]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        if self.faulted {
            return;
        }
        match seen {
            Observation::Faulted { .. } => {
                *self = FairShare { faulted: true, ..FairShare::default() }
            }
            Observation::FrameArrived {
                from,
                to,
                frame: Frame::Data { message: Message::Announce { tag, .. }, .. },
            } => self.announced(now, (*from, *to), tag),
            Observation::PrefillHook { who, hook } => self.prefill_hook(now, *who, hook),
            Observation::PrefillAnswer { who, answer } => self.freed(now, *who, answer),
            Observation::Job { who, job } => self.job(now, *who, job),
            Observation::DecodeAnswer { who, answer } if answer.is_last() => {
                self.ended(now, now.state.load_number(who.instance, answer.request()));
            }
            Observation::Submitted(seen) => {
                if let Some((mine, other, more)) = self.submitted(now, seen) {
                    let rank = now.rank(seen.from);
                    let request = |load| {
                        now.state.load_at(load).map_or("?".into(), |load| load.request.clone())
                    };
                    let (mine, other) = (request(mine), request(other));
                    now.report(|| {
                        format!(
                            "{rank} sent {more} bytes more of request {other} than of \
                             request {mine}, which had work all the time"
                        )
                    });
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{D0, InvariantBench, InvariantId, P0};
    use kvferry_engine::core::ids::{ConnectionId, FlowId};
    use kvferry_engine::core::layout::BlockList;
    use std::sync::Arc;

    /// Two reads of ten operations of a block each; both can be submitted wholly.
    fn reads() -> InvariantBench {
        let mut bench = InvariantBench::with(InvariantId::Fair, |run| {
            // The least quantum, which is that of 256 blocks.
            (run.network.bandwidth, run.network.node_bandwidth) = (1_000_000, 1_000_000);
        });
        for (name, from) in [("a", 0_u32), ("b", 20)] {
            let ids: Vec<u32> = (from..from + 12).collect();
            bench.allocated(D0, name, 192, &ids);
            let blocks = Arc::new(vec![BlockList::new(ids)]);
            let job = &TransferJob::Read {
                flow: FlowId(u64::from(from) + 1),
                request: name.into(),
                peer: ConnectionId(1),
                from: 0,
                tokens: 192,
                remote: blocks.clone(),
                local: blocks,
            };
            bench.see(Observation::Job { who: D0, job });
            bench.now = bench.now + LOCAL.scale(4, 1);
            // The first one of each makes the pair known.
            read(&mut bench, from, 1);
        }
        bench
    }

    /// Operations of 256 KiB each.
    fn read(bench: &mut InvariantBench, from: u32, count: u32) {
        for block in from..from + count {
            let op = bench.now.0;
            bench.submit((D0, P0), op, Direction::Read, (&[block; 256], &[block; 256]));
        }
    }

    #[test]
    fn equal_shares_hold_whatever_the_order() {
        let mut bench = reads();
        for block in 1..8 {
            read(&mut bench, block, 1);
            read(&mut bench, 20 + block, 1);
        }
        bench.holds();
    }

    #[test]
    fn who_has_work_is_not_left_behind() {
        let mut bench = reads();
        read(&mut bench, 1, 9);
        bench.holds();
        read(&mut bench, 21, 1);
        bench.fails("sent 2097152 bytes more of request a than of request b");
        // A flow that has ended leaves nobody behind.
        let mut bench = reads();
        bench.loaded(D0, "b");
        read(&mut bench, 1, 9);
        bench.holds();
    }

    #[test]
    fn after_a_fault_nothing_is_said() {
        let mut bench = reads();
        let kind = kvferry_scenarios::lists::FaultKind::AckLost;
        bench.see(Observation::Faulted { kind, from: Some(0), to: None });
        read(&mut bench, 1, 9);
        read(&mut bench, 21, 1);
        bench.holds();
    }
}
