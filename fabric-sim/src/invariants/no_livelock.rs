//! L3: retries per request and reconnects per peer stay under their limits while nothing
//! progresses.

use super::caused::{FaultReach, reach};
use super::state::TrackedOp;
use super::{CheckContext, Invariant};
use crate::abilities::caps;
use crate::observation::{BlockRef, Observation, ObservationKind, SimProcessId, SimRankId};
use kvferry_engine::core::channel::ChannelConfig;
use kvferry_engine::core::config::REBUILDS_MAX;
use kvferry_engine::core::dialect::native::Frame;
use kvferry_engine::core::ids::{ClientId, ConnectionId, RankSet};
use kvferry_engine::core::message::{FlowState, TransferJob, TransferReport};
use kvferry_engine::core::router::LegBody;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{Completion, Placement};
use kvferry_scenarios::Run;
use kvferry_scenarios::run::InstanceSettings;
use std::collections::{BTreeMap, BTreeSet};

/// Most tries of a leg that instances refuse as busy: the router learns when there is room.
const BUSY_MAX: usize = 64;

/// Dials that nobody answered.
#[derive(Clone, Copy, Debug)]
struct UnansweredDials {
    since: Nanos,
    count: u64,
    told: bool,
}

/// Sets of sessions to a peer, each of which a rank did not open.
#[derive(Debug, Default)]
struct PeerTries {
    count: u32,
    /// Ranks that have not opened those of the last one.
    unready: RankSet,
}

/// Operations of a rank that failed, without one between that succeeded.
#[derive(Clone, Debug)]
struct FailureStreak {
    /// How many for each range of blocks.
    failures: BTreeMap<(SimRankId, Option<BlockRef>, Option<BlockRef>), u64>,
    /// Flows that had ended before.
    ended: u64,
}

/// Counts dials per pair and failures per rank.
#[derive(Debug, Default)]
pub(super) struct NoLivelock {
    /// Dispatches of a leg beyond the first.
    retries: u32,
    /// Some fault can have cost the router an instance's host: as many tries again are excused, at
    /// instances without one.
    hosts_lost: bool,
    channels: Vec<ChannelConfig>,
    /// Failures that one flow may see for one range of blocks: those of its operations, each time.
    failures_max: u64,
    /// Remote ranks that one flow may read the same range of blocks from. All that is read has one
    /// target, whereas each rank that is written to is another.
    sources_max: u64,
    dials: BTreeMap<(SimProcessId, u16), UnansweredDials>,
    peers: BTreeMap<(SimProcessId, ConnectionId), PeerTries>,
    /// Flows that a core has started, and that a rank has ended.
    started: BTreeMap<SimProcessId, u64>,
    ended: BTreeMap<SimRankId, u64>,
    streaks: BTreeMap<SimRankId, FailureStreak>,
}

/// Instances of a run, and those that they become.
fn all(run: &Run) -> impl Iterator<Item = &InstanceSettings> {
    let becomes = run.faults.iter().filter_map(|fault| fault.becomes.as_deref());
    run.instances.iter().chain(becomes)
}

/// Operations of one flow that begin in the same block: one a layer, and more if they have few
/// ranges or bytes. No range is shorter than K or V of a token in a head.
fn operations(run: &Run, instance: &InstanceSettings) -> u64 {
    let settings = &instance.protocol.transfer;
    let plane = caps(Placement::OnCompletion, &instance.fabric);
    let slices = u64::from(settings.slices_max.min(plane.slices_max).max(1));
    let tokens = all(run).map(|one| one.block_tokens).max();
    let heads = u64::from(tokens.unwrap_or(1)) * u64::from(run.model.kv_heads);
    let bytes = settings.operation_bytes_min.min(plane.per_peer.bytes).min(plane.in_all.bytes);
    let by_bytes = (heads * u64::from(run.model.head_bytes)).div_ceil(bytes.max(1));
    u64::from(run.model.layers) * ((2 * heads).div_ceil(slices)).max(by_bytes)
}

impl NoLivelock {
    pub(super) fn new(run: &Run) -> NoLivelock {
        let tries = |one: &InstanceSettings| 1 + u64::from(one.protocol.transfer.retries_max);
        let failures = run.instances.iter().map(|one| operations(run, one) * tries(one));
        NoLivelock {
            retries: run.router.config.retries_max,
            channels: run.instances.iter().map(|one| one.protocol.channel.clone()).collect(),
            failures_max: failures.max().unwrap_or(0),
            sources_max: all(run).map(|one| u64::from(one.tp)).max().unwrap_or(1),
            ..NoLivelock::default()
        }
    }

    /// How often a leg was dispatched and the limit, if that is exceeded.
    fn dispatched(
        &self,
        now: CheckContext<'_>,
        client: ClientId,
        body: &LegBody,
    ) -> Option<(u32, u32)> {
        let client = now.state.client(client);
        let before = client.map_or(&[][..], |client| &client.legs);
        let (part, times) = match body {
            // Each sample of a prompt that is tried again needs the prompt again.
            LegBody::Prefill { prompt, .. } => {
                let of_it = before.iter().map(|leg| leg.part).filter(|part| part.0 == *prompt);
                let samples: BTreeSet<_> = of_it.filter_map(|part| part.1).collect();
                ((*prompt, None), samples.len().max(1) as u32)
            }
            LegBody::Decode { prompt, sample, .. } => ((*prompt, Some(*sample)), 1),
        };
        let [before, busy] = client.map_or([0; 2], |client| client.tries(part));
        let excused = if self.hosts_lost { self.retries } else { 0 };
        let (count, limit) = (1 + before as u32, 1 + (self.retries + excused) * times);
        let is_hammered = busy > BUSY_MAX;
        (count > limit || is_hammered).then_some((count + busy as u32, limit))
    }

    /// Counts a set of sessions of a core to a peer; how many none of which came about, if that are too
    /// many.
    fn connected(&mut self, who: SimProcessId, peer: ConnectionId, tp: u16) -> Option<u32> {
        let tries = self.peers.entry((who, peer)).or_default();
        tries.count += 1;
        tries.unready = RankSet::first(tp);
        (tries.count == REBUILDS_MAX + 2).then_some(tries.count)
    }

    /// A rank has opened its sessions to a peer.
    fn ready(&mut self, from: SimRankId, peer: ConnectionId) {
        let Some(tries) = self.peers.get_mut(&(from.who, peer)) else { return };
        tries.unready.remove(from.rank);
        if tries.unready.is_empty() {
            self.peers.remove(&(from.who, peer));
        }
    }

    /// Counts a dial; how many there were in how long a time, if that are too many.
    fn dialled(&mut self, now: Nanos, from: SimProcessId, to: u16) -> Option<(u64, Nanos)> {
        let none = UnansweredDials { since: now, count: 0, told: false };
        let dials = self.dials.entry((from, to)).or_insert(none);
        dials.count += 1;
        let span = now - dials.since;
        let channel = &self.channels[usize::from(from.instance)];
        if dials.told || dials.count <= channel.dials_max(span) {
            return None;
        }
        dials.told = true;
        Some((dials.count, span))
    }
}

impl Invariant for NoLivelock {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Faulted, Dispatched, Dialled, FrameArrived, Job, Report, Completed]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        match seen {
            Observation::Faulted { kind, .. } => {
                use FaultReach::*;
                self.hosts_lost |= matches!(reach(*kind), Wire | Foreign | Process | Router);
            }
            Observation::Dispatched { client, body, .. } => {
                if let Some((count, limit)) = self.dispatched(now, *client, body) {
                    now.report(|| {
                        format!("a leg of client {client} was dispatched {count} times, at most {limit} are allowed")
                    });
                }
            }
            Observation::Dialled { from, to: Some(to) } => {
                if let Some((count, span)) = self.dialled(now.at, *from, *to) {
                    let (from, to) = (now.name(from.instance), now.name(*to));
                    let span = span.as_secs_f64();
                    now.report(|| {
                        format!("{from} dialled {to} {count} times in {span:.3} s in vain")
                    });
                }
            }
            Observation::FrameArrived { from, to, frame: Frame::Welcome(_) } => {
                self.dials.remove(&(*to, from.instance));
            }
            Observation::Job { who, job: TransferJob::Peer { peer, .. } } => {
                let tp = now.state.place(who.instance).map_or(1, |place| place.spec.tp);
                if let Some(count) = self.connected(*who, *peer, tp) {
                    let name = now.name(who.instance);
                    now.report(|| {
                        format!("{name} connected its ranks to a peer {count} times in vain")
                    });
                }
            }
            Observation::Report { from, report: TransferReport::PeerReady { peer } } => {
                self.ready(*from, *peer);
            }
            Observation::Job {
                who,
                job:
                    TransferJob::Write { .. } | TransferJob::Read { .. } | TransferJob::Digest { .. },
            } => {
                *self.started.entry(*who).or_default() += 1;
            }
            Observation::Report {
                from,
                report:
                    TransferReport::Flow {
                        state: FlowState::Done { .. } | FlowState::Failed(_), ..
                    },
            } => *self.ended.entry(*from).or_default() += 1,
            Observation::Completed { from, op, outcome } => {
                self.completed(now, *from, op.0, outcome)
            }
            _ => {}
        }
    }
}

impl NoLivelock {
    fn completed(&mut self, now: CheckContext<'_>, from: SimRankId, op: u64, outcome: &Completion) {
        if *outcome == Completion::Done {
            if !self.streaks.is_empty() {
                self.streaks.remove(&from);
            }
            return;
        }
        let Some(range) = now.state.op(from, op).map(TrackedOp::range) else { return };
        let ended = self.ended.get(&from).copied().unwrap_or(0);
        let fresh = || FailureStreak { failures: BTreeMap::new(), ended };
        let row = self.streaks.entry(from).or_insert_with(fresh);
        let failures = row.failures.entry(range).or_default();
        *failures += 1;
        // The flows under way at the first failure, those since, and what was left of those before.
        let started = self.started.get(&from.who).copied().unwrap_or(0);
        let sources = if range.0 == from { self.sources_max } else { 1 };
        let limit = (1 + started.saturating_sub(row.ended)) * self.failures_max * sources;
        if *failures == limit + 1 {
            let rank = now.rank(from);
            now.report(|| {
                format!("{limit} operations of {rank} on the same blocks failed in a row")
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{
        D0, InvariantBench, InvariantId, P0, decode_body, done, failed, finished_answer,
        prefill_body,
    };
    use kvferry_engine::core::ids::{FlowId, SourceId};
    use kvferry_engine::core::layout::{Geometry, KvGroup};
    use kvferry_engine::fabric::{Direction, Landed};
    use kvferry_scenarios::lists::FaultKind;
    use std::sync::Arc;

    fn bench() -> InvariantBench {
        InvariantBench::new(InvariantId::NoLivelock)
    }

    #[test]
    fn dispatches_are_limited() {
        let mut bench = bench();
        for leg in 0..3 {
            bench.dispatched(1, leg, P0, &prefill_body("r"));
            bench.dispatched(1, 10 + leg, D0, &decode_body("r"));
        }
        bench.holds();
        bench.dispatched(1, 20, D0, &decode_body("r"));
        bench.fails("dispatched 4 times, at most 3");
        for (kind, held) in [(FaultKind::QpError, false), (FaultKind::Crash, true)] {
            let mut bench = self::bench();
            bench.see(Observation::Faulted { kind, from: Some(0), to: None });
            for leg in 0..4 {
                bench.dispatched(1, leg, D0, &decode_body("r"));
            }
            bench.judges(held, "dispatched 4 times, at most 3");
        }
        let mut bench = self::bench();
        for leg in 0..9 {
            bench.dispatched(1, leg, D0, &decode_body("r"));
            bench.answered(1, &finished_answer(false));
        }
        bench.holds();
    }

    #[test]
    fn dials_in_vain_are_limited() {
        let mut bench = bench();
        let dial = |bench: &mut InvariantBench, count, pause| {
            for _ in 0..count {
                bench.now = bench.now + pause;
                bench.see(Observation::Dialled { from: D0, to: Some(P0.instance) });
            }
        };
        dial(&mut bench, 500, Nanos::from_ms(500));
        bench.holds();
        dial(&mut bench, 5_000, Nanos::from_ms(50));
        bench.fails("s in vain");
    }

    #[test]
    fn sets_of_sessions_in_vain_are_limited() {
        let geometry = Arc::new(Geometry::new("model", 1, vec![KvGroup::full(16, 0..1)]));
        for (ready, held) in [(&[0, 1][..], true), (&[1], false)] {
            let mut bench = InvariantBench::with(InvariantId::NoLivelock, |run| {
                run.instances.iter_mut().for_each(|one| one.tp = 2);
            });
            let peer = ConnectionId(1);
            for _ in 0..REBUILDS_MAX + 2 {
                let (geometry, ranks) = (geometry.clone(), Arc::new(Vec::new()));
                let job = &TransferJob::Peer { peer, geometry, ranks, fence_key: 0 };
                bench.see(Observation::Job { who: D0, job });
                for rank in ready {
                    let from = SimRankId { who: D0, rank: *rank };
                    bench.see(Observation::Report {
                        from,
                        report: &TransferReport::PeerReady { peer },
                    });
                }
            }
            bench.judges(held, "d0 connected its ranks to a peer 7 times in vain");
        }
    }

    #[test]
    fn failures_in_a_row_are_limited() {
        let mut bench = bench();
        let mut op = 0;
        let mut complete = |bench: &mut InvariantBench, count: u64, outcome: &Completion| {
            for _ in 0..count {
                op += 1;
                bench.write(P0, D0, op, &[4]);
                bench.complete(P0, op, outcome);
            }
        };
        let failure = failed(Landed::None);
        // There are layers operations of a range, and each is tried four times.
        complete(&mut bench, 8, &failure);
        complete(&mut bench, 1, &done());
        complete(&mut bench, 8, &failure);
        let job = TransferJob::Write {
            flow: FlowId(1),
            request: "r".into(),
            reader: None,
            source: SourceId(1),
            peer: ConnectionId(1),
            from: 0,
            tokens: 16,
            blocks: Default::default(),
            verify: None,
        };
        bench.see(Observation::Job { who: P0, job: &job });
        complete(&mut bench, 8, &failure);
        bench.holds();
        complete(&mut bench, 2, &failure);
        bench.fails("16 operations of p0 rank 0 on the same blocks failed in a row");
    }

    #[test]
    fn a_read_of_several_ranks_fails_once_for_each() {
        for (ranks, count, held) in [(1, 8, true), (1, 9, false), (4, 32, true), (4, 33, false)] {
            let mut bench = InvariantBench::with(InvariantId::NoLivelock, |run| {
                run.instances.iter_mut().for_each(|one| one.tp = ranks);
            });
            for op in 0..count {
                bench.submit((D0, P0), op, Direction::Read, (&[4], &[5]));
                bench.complete(D0, op, &failed(Landed::None));
            }
            bench.judges(held, "of d0 rank 0 on the same blocks failed in a row");
        }
    }

    #[test]
    fn operations_that_reach_nothing_are_told_apart_by_what_they_read() {
        let mut bench = bench();
        let fail = |bench: &mut InvariantBench, op, block| {
            bench.submit((P0, D0), op, Direction::Write, (&[block], &[]));
            bench.complete(P0, op, &failed(Landed::None));
        };
        for op in 0..24 {
            fail(&mut bench, op, op as u32 % 8);
        }
        bench.holds();
        for op in 24..30 {
            fail(&mut bench, op, 0);
        }
        bench.fails("8 operations of p0 rank 0 on the same blocks failed in a row");
    }
}
