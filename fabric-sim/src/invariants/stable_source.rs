//! I4: a source block is neither freed nor rewritten while a transfer that may be used reads it.

use super::{CheckContext, Invariant, usable};
use crate::abilities::LOCAL;
use crate::observation::{BlockRef, Observation, ObservationKind, SimProcessId};
use kvferry_engine::core::dialect::native::Frame;
use kvferry_engine::core::ids::{Attempt, FlowId, RequestId, TransferKey};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{
    AttemptTag, DecodeAnswer, DecodeHook, FlowState, Message, Mode, TransferJob, TransferReport,
};
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::Run;
use kvferry_scenarios::lists::FaultKind;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

/// A pull and its lease, as its reader counts it.
#[derive(Debug)]
struct PullLease {
    key: (TransferKey, u32),
    /// When its core was told of it, and asked; later if it was paused.
    told: Nanos,
    /// When the question was sent, which may have waited for a link.
    sent: Option<Nanos>,
    usable: Nanos,
    /// The end of a longer lease.
    renewed: Nanos,
    /// The newest question for a longer one: its number and when it was sent.
    renewal: (u32, Nanos),
    /// Which attempt it is, once asked.
    attempt: Option<Attempt>,
    /// Who promised to keep which blocks.
    granted: Option<(SimProcessId, Vec<BlockRef>)>,
    /// What reads, and when its core was told of the newest rank that has read.
    flow: Option<FlowId>,
    read: Option<Nanos>,
}

/// A push keeps its source until it is quiet. A pull may lose it at the end of its lease, but then
/// what it reads must not be used, lost or not; what was read before may be, after a look at it.
/// Before that end it loses nothing while its reader lives, however silent that is.
#[derive(Debug, Default)]
pub(super) struct StableSource {
    usable: Vec<Nanos>,
    pulls: BTreeMap<(SimProcessId, RequestId), PullLease>,
    keys: BTreeMap<(SimProcessId, TransferKey, u32), RequestId>,
    /// What reads for which request.
    flows: BTreeMap<(SimProcessId, FlowId), RequestId>,
    /// Blocks that some pull was promised, by who promised them, and how often.
    promised: BTreeMap<(SimProcessId, BlockRef), u32>,
    /// Instances that were paused at some time.
    paused: BTreeSet<u16>,
}

/// A pull that is forgotten was promised nothing any more.
fn drop_promises(promised: &mut BTreeMap<(SimProcessId, BlockRef), u32>, pull: &PullLease) {
    let Some((owner, blocks)) = &pull.granted else { return };
    for block in blocks {
        if let Entry::Occupied(mut count) = promised.entry((*owner, *block)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

impl StableSource {
    pub(super) fn new(run: &Run) -> StableSource {
        StableSource { usable: usable(run), ..StableSource::default() }
    }

    fn hook(&mut self, now: CheckContext<'_>, who: SimProcessId, hook: &DecodeHook) {
        match hook {
            DecodeHook::Arrived { request, leg, .. } if leg.mode == Mode::Pull => {
                let key = (leg.key.clone(), leg.sibling);
                // A second one under this key is refused.
                self.keys.entry((who, key.0.clone(), key.1)).or_insert_with(|| request.clone());
                let (told, renewed) = (now.at + LOCAL, Nanos::ZERO);
                let (usable, renewal) = (Nanos::ZERO, (0, now.at));
                let pull = PullLease {
                    key,
                    told,
                    sent: None,
                    usable,
                    renewed,
                    renewal,
                    attempt: None,
                    granted: None,
                    flow: None,
                    read: None,
                };
                if let Some(before) = self.pulls.insert((who, request.clone()), pull) {
                    drop_promises(&mut self.promised, &before);
                }
            }
            DecodeHook::Finished { request, .. }
                if now.state.load(who.instance, request).is_none() =>
            {
                self.forget(who, request);
            }
            _ => {}
        }
    }

    fn forget(&mut self, who: SimProcessId, request: &RequestId) -> Option<PullLease> {
        let pull = self.pulls.remove(&(who, request.clone()))?;
        drop_promises(&mut self.promised, &pull);
        let key = (who, pull.key.0.clone(), pull.key.1);
        if self.keys.get(&key) == Some(request) {
            self.keys.remove(&key);
        }
        if let Some(flow) = pull.flow {
            self.flows.remove(&(who, flow));
        }
        Some(pull)
    }

    fn crashed(&mut self, who: SimProcessId) {
        let promised = &mut self.promised;
        self.pulls.retain(|(reader, _), pull| {
            let stays = *reader != who;
            if !stays {
                drop_promises(promised, pull);
            }
            stays
        });
        self.keys.retain(|key, _| key.0 != who);
        self.flows.retain(|key, _| key.0 != who);
    }

    fn pull_of(&mut self, who: SimProcessId, tag: &AttemptTag) -> Option<&mut PullLease> {
        let request = self.keys.get(&(who, tag.key.clone(), tag.sibling))?.clone();
        self.pulls.get_mut(&(who, request))
    }

    fn asked(&mut self, now: Nanos, who: SimProcessId, of: SimProcessId, tag: &AttemptTag) {
        let usable = self.usable.get(usize::from(of.instance)).copied().unwrap_or(Nanos::MAX);
        if let Some(pull) = self.pull_of(who, tag) {
            pull.usable = pull.usable.max(usable);
            pull.sent.get_or_insert(now);
            pull.attempt.get_or_insert(tag.attempt);
        }
    }

    /// A reader got its grant.
    fn granted(
        &mut self,
        now: CheckContext<'_>,
        (from, to): (SimProcessId, SimProcessId),
        tag: &AttemptTag,
        blocks: &[BlockList],
    ) {
        let Some(pull) = self.pull_of(to, tag) else { return };
        if pull.attempt != Some(tag.attempt) || pull.granted.is_some() {
            return;
        }
        // Of a sliding window the list names blocks, too, that were passed and are free.
        let whole = |group: u16| !now.state.slides(group);
        let list = |(group, list): (u16, &BlockList)| {
            list.ids.iter().map(|block| BlockRef { group, block: *block }).collect::<Vec<_>>()
        };
        let blocks: Vec<BlockRef> =
            (0..).zip(blocks).filter(|(group, _)| whole(*group)).flat_map(list).collect();
        pull.granted = Some((from, blocks.clone()));
        for block in blocks {
            *self.promised.entry((from, block)).or_default() += 1;
        }
    }

    /// True if a prefill promised one of these blocks to some reader.
    fn is_promised(&self, prefill: SimProcessId, freed: &[Vec<u32>]) -> bool {
        BlockRef::all(freed).any(|block| self.promised.contains_key(&(prefill, block)))
    }

    /// A reader that a prefill has promised one of these blocks to, and to whom they still belong.
    fn deprived_reader(
        &self,
        now: CheckContext<'_>,
        prefill: SimProcessId,
        freed: &[Vec<u32>],
    ) -> Option<(SimProcessId, &RequestId)> {
        if !self.is_promised(prefill, freed) {
            return None;
        }
        let is_freed = |at: &BlockRef| {
            freed.get(usize::from(at.group)).is_some_and(|ids| ids.contains(&at.block))
        };
        let robbed = |(who, _): &(SimProcessId, RequestId), pull: &PullLease| {
            let promised = pull.granted.as_ref().filter(|(owner, _)| *owner == prefill);
            promised.is_some_and(|(_, blocks)| blocks.iter().any(is_freed))
                && now.state.acts(*who)
                && now.at < self.end(*who, pull)
        };
        let mut pulls = self.pulls.iter();
        pulls.find(|(key, pull)| robbed(key, pull)).map(|((who, request), _)| (*who, request))
    }

    /// The lease counts from when its reader asks.
    fn end(&self, who: SimProcessId, pull: &PullLease) -> Nanos {
        let paused = self.paused.contains(&who.instance);
        let asked = pull.sent.filter(|_| paused).unwrap_or(pull.told);
        pull.renewed.max(asked + pull.usable)
    }

    /// A question for a longer lease counts from when it was sent first, once it is answered.
    fn renew(&mut self, now: Nanos, who: SimProcessId, tag: &AttemptTag, count: u32) {
        if let Some(pull) = self.pull_of(who, tag)
            && pull.renewal.0 < count
        {
            pull.renewal = (count, now);
        }
    }

    fn renewed(&mut self, who: SimProcessId, tag: &AttemptTag, count: u32) {
        if let Some(pull) = self.pull_of(who, tag)
            && pull.renewal.0 == count
        {
            pull.renewed = pull.renewed.max(pull.renewal.1 + pull.usable);
        }
    }

    /// All that a rank had to read is there.
    fn read(&mut self, now: Nanos, who: SimProcessId, flow: FlowId) {
        if let Some(request) = self.flows.get(&(who, flow))
            && let Some(pull) = self.pulls.get_mut(&(who, request.clone()))
        {
            pull.read = Some(now + LOCAL);
        }
    }

    /// A reader needs the source no more.
    fn released(&mut self, now: Nanos, who: SimProcessId, tag: &AttemptTag) {
        let key = (who, tag.key.clone(), tag.sibling);
        let Some(request) = self.keys.get(&key).cloned() else { return };
        let Some(mut pull) = self.pulls.remove(&(who, request.clone())) else { return };
        if pull.attempt == Some(tag.attempt) && now < self.end(who, &pull) {
            drop_promises(&mut self.promised, &pull);
            pull.granted = None;
        }
        self.pulls.insert((who, request), pull);
    }

    fn loaded(&mut self, now: CheckContext<'_>, who: SimProcessId, request: &RequestId) {
        let pull = self.forget(who, request).filter(|pull| pull.sent.is_some());
        let load = now.state.load(who.instance, request);
        if load.is_some_and(|load| load.blocks.is_empty()) {
            // All of it was cached, nothing is used of the source.
            return;
        }
        let late = |pull: PullLease| {
            let end = self.end(who, &pull);
            (now.at.min(pull.read.unwrap_or(Nanos::MAX)) >= end).then_some(end)
        };
        let name = || now.name(who.instance);
        if let Some(end) = pull.and_then(late) {
            let (name, end) = (name(), end.as_secs_f64());
            return now.report(|| {
                format!("{name} uses request {request}, the lease of which ended at {end:.6} s")
            });
        }
        let Some(torn) = load.and_then(|load| load.torn) else { return };
        let (name, block, source) = (name(), torn.block, now.name(torn.source));
        now.report(|| {
            format!(
                "{name} uses request {request}, part of which was read from {block} of {source} \
                 after that block went to another owner"
            )
        });
    }

    /// Blocks go to another owner, which they do when they are freed first of all.
    fn given_up(
        &self,
        now: CheckContext<'_>,
        (who, request): (SimProcessId, &RequestId),
        blocks: &[Vec<u32>],
        is_freed: bool,
    ) {
        let name = now.name(who.instance);
        if is_freed && let Some((reader, load)) = self.deprived_reader(now, who, blocks) {
            let reader = now.name(reader.instance);
            now.report(|| {
                format!(
                    "request {request} on {name} lost its blocks, but {reader} may read them for \
                     its request {load}"
                )
            });
        }
        let is_read = |at: &BlockRef| now.state.block(who.instance, *at).reads > 0;
        if let Some(block) = BlockRef::all(blocks).find(is_read) {
            now.report(|| {
                format!(
                    "{block} of request {request} on {name} went to another owner while a write \
                     reads it"
                )
            });
        }
    }
}

impl Invariant for StableSource {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[
            Freed,
            Taken,
            DecodeHook,
            DecodeAnswer,
            Job,
            Report,
            FrameSent,
            FrameArrived,
            Crashed,
            Faulted,
        ]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        match seen {
            Observation::Freed { who, request, blocks } => {
                self.given_up(now, (*who, request), blocks, true);
            }
            Observation::Taken { who, request, blocks } => {
                self.given_up(now, (*who, request), blocks, false);
            }
            Observation::DecodeHook { who, hook } => self.hook(now, *who, hook),
            Observation::DecodeAnswer { who, answer } => match answer {
                DecodeAnswer::Allocate { .. } => {}
                DecodeAnswer::Loaded { request } => self.loaded(now, *who, request),
                DecodeAnswer::LoadFailed { request, .. }
                | DecodeAnswer::Rejected { request, .. } => {
                    self.forget(*who, request);
                }
            },
            Observation::Job { who, job: TransferJob::Read { flow, request, .. } } => {
                if let Some(pull) = self.pulls.get_mut(&(*who, request.clone())) {
                    pull.flow = Some(*flow);
                    self.flows.insert((*who, *flow), request.clone());
                }
            }
            Observation::Report {
                from,
                report: TransferReport::Flow { flow, state: FlowState::Done { .. } },
            } => self.read(now.at, from.who, *flow),
            Observation::FrameSent {
                from,
                to,
                frame: Frame::Data { message: Message::Pull { tag, .. }, .. },
            } => self.asked(now.at, *from, *to, tag),
            Observation::FrameSent {
                from,
                frame: Frame::Data { message: Message::Renew { tag, count }, .. },
                ..
            } => self.renew(now.at, *from, tag, *count),
            Observation::FrameSent {
                from,
                frame: Frame::Data { message: Message::Release { tag, .. }, .. },
                ..
            } => self.released(now.at, *from, tag),
            Observation::FrameArrived {
                to,
                frame: Frame::Data { message: Message::Renewed { tag, count, .. }, .. },
                ..
            } => self.renewed(*to, tag, *count),
            Observation::FrameArrived {
                from,
                to,
                frame: Frame::Data { message: Message::Grant { tag, blocks, .. }, .. },
            } => self.granted(now, (*from, *to), tag, blocks),
            Observation::Faulted { kind: FaultKind::Pause, from, .. } => {
                self.paused.extend(*from);
            }
            Observation::Crashed { who } => self.crashed(*who),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{
        D0, HASH, InvariantBench, InvariantId, P0, decode_leg, done, failed, rank, request, tag,
    };
    use kvferry_engine::core::ids::ConnectionId;
    use kvferry_engine::core::message::DecodeLeg;
    use kvferry_engine::fabric::{Direction, Landed, QuiesceTicket, SessionId};
    use std::sync::Arc;

    fn bench() -> InvariantBench {
        let mut bench = InvariantBench::new(InvariantId::StableSource);
        bench.taken(P0, "p", &[7]);
        bench
    }

    #[test]
    fn a_push_keeps_its_source_until_it_is_quiet() {
        let mut bench = bench();
        bench.submit((P0, D0), 1, Direction::Write, (&[7], &[4]));
        bench.complete(P0, 1, &failed(Landed::Unknown));
        bench.quiet(P0, SessionId(1), QuiesceTicket(1));
        bench.freed(P0, "p", &[7]);
        bench.holds();
        let mut bench = self::bench();
        bench.submit((P0, D0), 1, Direction::Write, (&[7], &[4]));
        bench.freed(P0, "p", &[7]);
        bench.fails("block 7 of request p on p0");
    }

    #[test]
    fn a_push_towards_a_dead_peer_lets_go_of_its_source() {
        let mut bench = bench();
        bench.submit((P0, D0), 1, Direction::Write, (&[7], &[4]));
        bench.crash(D0);
        bench.freed(P0, "p", &[7]);
        bench.holds();
    }

    fn granted() -> InvariantBench {
        let mut bench = bench();
        bench.allocated(D0, "r", 16, &[4]);
        bench.pull(tag("r"), 16);
        let (tag, blocks, lease) = (tag("r"), Vec::new(), Nanos::from_secs(1));
        bench.send(P0, D0, Message::Grant { tag, tokens: 16, blocks, lease, digest: None });
        bench.submit((D0, P0), 1, Direction::Read, (&[4], &[7]));
        bench
    }

    #[test]
    fn a_pull_may_lose_its_source_if_it_is_not_used() {
        let mut bench = granted();
        bench.freed(P0, "p", &[7]);
        bench.land_read(D0, P0, 1, &[7], &[4]);
        bench.complete(D0, 1, &done());
        bench.load_failed(D0, "r");
        bench.holds();
    }

    #[test]
    fn a_pull_that_lost_its_source_must_not_be_used() {
        let mut bench = granted();
        bench.land_read(D0, P0, 1, &[7], &[4]);
        bench.holds();
        bench.freed(P0, "p", &[7]);
        bench.land_read(D0, P0, 1, &[7], &[4]);
        bench.loaded(D0, "r");
        bench.fails("d0 uses request r");
    }

    #[test]
    fn a_late_grant_of_an_attempt_before_counts_for_nothing() {
        for late in [false, true] {
            let mut bench = bench();
            bench.allocated(D0, "r", 16, &[4]);
            let newest = AttemptTag { attempt: Attempt(40), ..tag("r") };
            bench.pull(newest.clone(), 16);
            let grant = |tag| {
                let (blocks, lease) = (Vec::new(), Nanos::from_secs(1));
                Message::Grant { tag, tokens: 16, blocks, lease, digest: None }
            };
            if late {
                bench.send(P0, D0, grant(AttemptTag { attempt: Attempt(3), ..tag("r") }));
            }
            // Only now the prompt is computed, into a block that was somebody else's.
            bench.taken(P0, "q", &[7]);
            bench.send(P0, D0, grant(newest));
            bench.submit((D0, P0), 1, Direction::Read, (&[4], &[7]));
            bench.land_read(D0, P0, 1, &[7], &[4]);
            bench.loaded(D0, "r");
            bench.holds();
        }
    }

    /// A pull that asks at 0 s, with a lease of 30 s.
    fn pulling() -> InvariantBench {
        let mut bench = bench();
        bench.now = Nanos::ZERO;
        let leg = DecodeLeg { mode: Mode::Pull, ..decode_leg("r") };
        let hook =
            &DecodeHook::Arrived { request: request("r"), leg, tokens: 16, prompt_hash: HASH };
        bench.see(Observation::DecodeHook { who: D0, hook });
        for _ in 0..2 {
            bench.pull(tag("r"), 16);
        }
        bench
    }

    #[test]
    fn what_was_read_is_not_used_from_the_end_of_the_lease_on() {
        let end = Nanos::from_secs(27) + Nanos(1) + LOCAL;
        for (at, held) in [(end - Nanos(1), true), (end, false)] {
            let mut bench = pulling();
            bench.now = at - Nanos(1);
            bench.loaded(D0, "r");
            bench.judges(held, "the lease of which ended at 27.0");
        }
    }

    #[test]
    fn what_was_read_before_the_end_of_the_lease_is_used_after_a_look_at_it() {
        let end = Nanos::from_secs(27) + Nanos(1);
        for (read, held) in [(end - Nanos(1), true), (end, false)] {
            let mut bench = pulling();
            let (flow, blocks) = (FlowId(3), Arc::new(Vec::new()));
            let (peer, remote, local) = (ConnectionId(0), blocks.clone(), blocks);
            let request = request("r");
            let job =
                &TransferJob::Read { flow, request, peer, from: 0, tokens: 16, remote, local };
            bench.see(Observation::Job { who: D0, job });
            let report = &TransferReport::Flow { flow, state: FlowState::Done { bytes: 1 } };
            for at in [Nanos::from_secs(1), read] {
                bench.now = at - Nanos(1);
                bench.see(Observation::Report { from: rank(D0), report });
            }
            bench.now = Nanos::from_secs(28);
            bench.loaded(D0, "r");
            bench.judges(held, "the lease of which ended at 27.0");
        }
    }

    #[test]
    fn what_was_cached_is_used_after_the_lease() {
        for computed in [16, 0] {
            let mut bench = pulling();
            bench.now = Nanos::from_secs(28);
            let blocks = vec![BlockList::new(vec![4])];
            let hook = &DecodeHook::Allocated { request: request("r"), computed, blocks };
            bench.see(Observation::DecodeHook { who: D0, hook });
            bench.loaded(D0, "r");
            match computed {
                0 => bench.fails("the lease of which ended at 27.0"),
                _ => bench.holds(),
            }
        }
    }

    #[test]
    fn a_core_that_was_paused_asks_later() {
        let mut bench = pulling();
        let from = Some(D0.instance);
        bench.see(Observation::Faulted { kind: FaultKind::Pause, from, to: None });
        bench.now = Nanos::from_secs(27) + Nanos(1);
        bench.loaded(D0, "r");
        bench.fails("the lease of which ended at 27.0");
        let mut bench = self::bench();
        let leg = DecodeLeg { mode: Mode::Pull, ..decode_leg("r") };
        let hook =
            &DecodeHook::Arrived { request: request("r"), leg, tokens: 16, prompt_hash: HASH };
        bench.see(Observation::DecodeHook { who: D0, hook });
        bench.see(Observation::Faulted { kind: FaultKind::Pause, from, to: None });
        bench.now = Nanos::from_secs(5);
        bench.pull(tag("r"), 16);
        bench.now = Nanos::from_secs(31);
        bench.loaded(D0, "r");
        bench.holds();
    }

    #[test]
    fn a_silent_reader_keeps_its_source_until_its_lease_ends() {
        for (seconds, crashed, held) in [(20, false, false), (20, true, true), (28, false, true)] {
            let mut bench = pulling();
            let (blocks, lease) = (vec![BlockList::new(vec![7])], Nanos::from_secs(30));
            bench.arrive(
                P0,
                D0,
                Message::Grant { tag: tag("r"), tokens: 16, blocks, lease, digest: None },
            );
            if crashed {
                bench.crash(D0);
            }
            bench.now = Nanos::from_secs(seconds);
            bench.freed(P0, "p", &[7]);
            bench.judges(held, "p on p0 lost its blocks, but d0 may read them");
        }
    }

    #[test]
    fn a_renewed_lease_counts_from_the_question() {
        for answered in [true, false] {
            let mut bench = pulling();
            bench.now = Nanos::from_secs(10);
            for _ in 0..2 {
                bench.send(D0, P0, Message::Renew { tag: tag("r"), count: 1 });
                bench.now = bench.now + Nanos::from_secs(10);
            }
            if answered {
                let lease = Nanos::from_secs(30);
                bench.arrive(P0, D0, Message::Renewed { tag: tag("r"), count: 1, lease });
            }
            bench.now = Nanos::from_secs(36);
            bench.loaded(D0, "r");
            bench.judges(answered, "the lease of which ended at 27.0");
        }
    }
}
