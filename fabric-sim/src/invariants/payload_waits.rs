//! Who waits for a payload, and who has to be told that it does not come: the part of L1 and of L2
//! that is about stages.

use super::{CheckContext, LivenessBounds, takes_few};
use crate::observation::{PayloadSight, ProducerEnd, SimProcessId};
use kvferry_engine::core::payload::PayloadConfig;
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::lists::FaultKind;
use kvferry_scenarios::run::Run;
use std::collections::{BTreeMap, BTreeSet};

/// A receiver that has not ended.
#[derive(Clone, Copy, Debug)]
struct WaitingStage {
    host: SimProcessId,
    chunk: u32,
    since: Nanos,
    /// It said which host has what it asks for.
    is_named: bool,
}

#[derive(Debug, Default)]
pub(super) struct PayloadWaits {
    waiting: BTreeMap<(u32, u16), WaitingStage>,
    /// Where the producer of a stream is.
    sources: BTreeMap<u32, u16>,
    produced: BTreeMap<u32, (SimProcessId, Nanos, (u32, ProducerEnd))>,
    /// When a payload core last heard another one, by their processes.
    heard: BTreeMap<(SimProcessId, SimProcessId), Nanos>,
    /// Streams of the workload; those behind are the world's own.
    own: u32,
    /// Hosts remember less of what ended than by default, or take fewer questions of each other, so that
    /// some wait until others have ended.
    is_tight: bool,
    /// For how long a host may stand still, which learns nothing meanwhile.
    pause: Nanos,
    /// Instances that take nothing new any more.
    pub(super) drained: BTreeSet<u16>,
}

impl PayloadWaits {
    pub(super) fn new(run: &Run) -> PayloadWaits {
        let usual = PayloadConfig::default();
        let few = |host: &PayloadConfig| {
            host.tombstones_max < usual.tombstones_max
                || host.streams_max < usual.streams_max
                || host.host_payloads_max < usual.host_payloads_max
        };
        let pauses = run.faults.iter().filter(|fault| fault.kind == FaultKind::Pause);
        let pause = pauses.filter_map(|fault| fault.lasts).map(|lasts| lasts.max).max();
        PayloadWaits {
            pause: pause.unwrap_or_default(),
            own: run.streams.len() as u32,
            is_tight: run.hosts.iter().any(|host| few(&host.config))
                || run.instances.iter().any(takes_few),
            ..PayloadWaits::default()
        }
    }

    /// True if a stream is one of the world's own, which come after the faults.
    pub(super) fn is_probe(&self, stream: u32) -> bool {
        stream >= self.own
    }

    /// True if these hosts are whole and stay connected.
    pub(super) fn are_well(&self, now: CheckContext<'_>, hosts: [u16; 2]) -> bool {
        let cores: BTreeSet<u16> = hosts.into_iter().flat_map(|first| [first, first + 1]).collect();
        let in_core = cores.iter().all(|one| now.state.core.contains(one));
        let is_lost = |one: &u16| now.state.is_frozen(*one) || self.drained.contains(one);
        in_core && !now.state.is_broken(&cores) && !cores.iter().any(is_lost)
    }

    /// The host where a stream comes from, once its producer has begun.
    pub(super) fn source(&self, stream: u32) -> Option<u16> {
        self.sources.get(&stream).copied()
    }

    /// A note reached the prefill core of a host, from the decode core of another one.
    pub(super) fn note(&mut self, at: Nanos, from: SimProcessId, to: SimProcessId) {
        self.heard.insert((to, from), at);
    }

    /// True if a receiver is known to wait for what was at a host when that was lost: it had got what
    /// was put before there, or had asked there.
    fn is_known(&self, waits: &WaitingStage, source: SimProcessId, lost: Nanos) -> bool {
        let WaitingStage { host, chunk, since, is_named } = *waits;
        let reader = SimProcessId { instance: host.instance + 1, ..host };
        let heard = self.heard.get(&(source, reader));
        let has_asked = is_named && heard.is_some_and(|at| since < *at && *at < lost);
        since < lost && (chunk > 0 && source.instance != host.instance || has_asked)
    }

    pub(super) fn follow(&mut self, at: Nanos, host: SimProcessId, sight: &PayloadSight<'_>) {
        match *sight {
            PayloadSight::Begins { stream } => {
                self.sources.insert(stream, host.instance);
            }
            PayloadSight::Asked { stream, receiver, chunk, is_named } => {
                let waits = WaitingStage { host, chunk, since: at, is_named };
                self.waiting.insert((stream, receiver), waits);
            }
            PayloadSight::Ended { stream, receiver, .. } => {
                self.waiting.remove(&(stream, receiver));
            }
            PayloadSight::Produced { stream, put, how } => {
                self.produced.insert(stream, (host, at, (put, how.clone())));
            }
            _ => {}
        }
    }

    /// A receiver that learned later than it takes to miss a dead peer that its host is gone, though it
    /// was known where what it waited for came from, and who knew did not stand still. For texts.
    pub(super) fn told_late(
        &self,
        now: CheckContext<'_>,
        (stream, receiver): (u32, u16),
        limits: LivenessBounds,
    ) -> Option<String> {
        let waits = self.waiting.get(&(stream, receiver))?;
        let (source, ended, (_, how)) = self.produced.get(&stream)?;
        let is_known = self.is_known(waits, *source, *ended);
        let due = now.state.last_fault.max(*ended) + limits.end() + self.pause;
        let is_late = *how == ProducerEnd::HostGone && is_known && now.at > due;
        is_late.then(|| {
            let [from, to] = [source, &waits.host].map(|one| now.name(one.instance));
            format!(
                "receiver {receiver} at {to} of stream {stream} learned later than by {due} that {from} \
                 was gone at {ended}"
            )
        })
    }

    /// A receiver that waits in vain and was not told so, though it could be known: its producer
    /// said it, or was lost to a host that knew that it came from there. For texts.
    pub(super) fn overdue(
        &self,
        now: CheckContext<'_>,
        (stream, receiver): (u32, u16),
    ) -> Option<String> {
        let waits = self.waiting.get(&(stream, receiver))?;
        let (source, ended, (put, how)) = self.produced.get(&stream)?;
        let is_known = match how {
            ProducerEnd::HostGone => self.is_known(waits, *source, *ended),
            // Nobody knows of what it would have put.
            ProducerEnd::Left if *put == 0 => false,
            _ => now.state.is_current(*source) && !self.is_tight,
        };
        let is_told = is_known && self.are_well(now, [source.instance, waits.host.instance]);
        is_told.then(|| {
            let [from, to] = [source, &waits.host].map(|one| now.name(one.instance));
            let (chunk, since) = (waits.chunk, waits.since);
            format!(
                "receiver {receiver} at {to} waits since {since} for chunk {chunk} of stream {stream} \
                 from {from}, whose producer ended with {how:?} at {ended}"
            )
        })
    }

    /// Those that have not ended at the end of a run.
    pub(super) fn open(&self) -> impl Iterator<Item = (u32, u16, SimProcessId)> + '_ {
        self.waiting.iter().map(|((stream, receiver), waits)| (*stream, *receiver, waits.host))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{D0, InvariantBench, InvariantId, P0};
    use crate::observation::{Observation, ReceiverOutcome};
    use kvferry_engine::core::payload::PayloadFailure;

    fn bench(id: InvariantId) -> InvariantBench {
        let mut bench = InvariantBench::new(id);
        let core = &[0, 1, 2, 3];
        bench.see(Observation::Settled { core, frozen: &[], broken: &[] });
        bench
    }

    fn see(bench: &mut InvariantBench, host: SimProcessId, sight: PayloadSight<'_>) {
        bench.see(Observation::Payload { host, sight });
    }

    fn asked(bench: &mut InvariantBench, chunk: u32) {
        let sight = PayloadSight::Asked { stream: 0, receiver: 0, chunk, is_named: false };
        see(bench, D0, sight);
    }

    fn produced(bench: &mut InvariantBench, put: u32, how: &ProducerEnd) {
        see(bench, P0, PayloadSight::Produced { stream: 0, put, how });
    }

    fn overdue(bench: &mut InvariantBench, chunk: u32) {
        see(bench, D0, PayloadSight::Overdue { stream: 0, receiver: 0, chunk });
    }

    #[test]
    fn who_waits_in_vain_for_what_is_known_not_to_come_is_reported() {
        for (chunk, how, is_known) in [
            (0, ProducerEnd::Ended, true),
            (0, ProducerEnd::HostGone, false),
            (1, ProducerEnd::HostGone, true),
            (1, ProducerEnd::Left, true),
        ] {
            let mut bench = bench(InvariantId::EveryRequestEnds);
            asked(&mut bench, chunk);
            bench.pass(Nanos::from_ms(1));
            produced(&mut bench, chunk, &how);
            overdue(&mut bench, chunk);
            let departed = ReceiverOutcome::Departed;
            let ended = PayloadSight::Ended { stream: 0, receiver: 0, chunk, outcome: &departed };
            see(&mut bench, D0, ended);
            match is_known {
                false => bench.holds(),
                true => bench.fails("receiver 0 at d0 waits since"),
            }
        }
    }

    #[test]
    fn a_lost_host_is_missed_in_time() {
        for (after, is_late) in [(1, false), (60, true)] {
            let mut bench = bench(InvariantId::EveryRequestEnds);
            asked(&mut bench, 1);
            bench.pass(Nanos::from_ms(1));
            produced(&mut bench, 1, &ProducerEnd::HostGone);
            bench.pass(Nanos::from_secs(after));
            let outcome = &ReceiverOutcome::Missing(PayloadFailure::PeerGone("p0".into()));
            see(&mut bench, D0, PayloadSight::Ended { stream: 0, receiver: 0, chunk: 1, outcome });
            match is_late {
                false => bench.holds(),
                true => bench.fails("learned later than by"),
            }
        }
    }

    #[test]
    fn a_receiver_without_an_end_is_reported() {
        let mut bench = bench(InvariantId::EveryRequestEnds);
        asked(&mut bench, 0);
        bench.finish();
        bench.fails("receiver 0 at d0 of stream 0 has no end");
    }

    #[test]
    fn what_comes_after_the_faults_arrives() {
        for outcome in [ReceiverOutcome::Finished, ReceiverOutcome::Departed] {
            let mut bench = bench(InvariantId::Heals);
            see(&mut bench, P0, PayloadSight::Begins { stream: 0 });
            asked(&mut bench, 0);
            let outcome = &outcome;
            see(&mut bench, D0, PayloadSight::Ended { stream: 0, receiver: 0, chunk: 1, outcome });
            match outcome {
                ReceiverOutcome::Finished => bench.holds(),
                _ => bench.fails("stream 0 from p0 to d0 came after the faults"),
            }
        }
    }
}
