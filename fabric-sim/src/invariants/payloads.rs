//! I20: a payload arrives as it was put, and one that does not come has a cause.

use super::{CheckContext, Invariant};
use crate::observation::{
    Observation, ObservationKind, PayloadSight, ProducerEnd, ReceiverOutcome, SimProcessId,
};
use kvferry_engine::core::payload::{PayloadConfig, PayloadFailure};
use kvferry_scenarios::lists::FaultKind;
use kvferry_scenarios::run::{Departure, PayloadHostSettings, Run, WorkloadStream};
use std::collections::{BTreeMap, BTreeSet};

/// A receiver of a stream.
type StageReceiver = (u32, u16);

/// A chunk of which a receiver was told that it does not come.
#[derive(Debug)]
struct MissedChunk {
    receiver: u16,
    /// The host of the receiver.
    at: u16,
    chunk: u32,
    failure: PayloadFailure,
}

/// What is known of the streams of a run.
#[derive(Debug, Default)]
pub(super) struct PayloadsArrive {
    /// How the producer of a stream ended, at which host, and what it had put.
    produced: BTreeMap<u32, (SimProcessId, u32, ProducerEnd)>,
    /// Receivers that were told that a chunk does not come, until their producer has ended too.
    missed: BTreeMap<u32, Vec<MissedChunk>>,
    /// Streams that somebody cleans up, those with more receivers than they are put for, and those of one
    /// payload.
    cleaned: BTreeSet<u32>,
    scarce: BTreeSet<u32>,
    whole: BTreeSet<u32>,
    /// Streams that use the id of an earlier one again, and which.
    again: BTreeMap<u32, u32>,
    /// Instances that a fault hit; none for all.
    hit: BTreeSet<Option<u16>>,
    drained: BTreeSet<u16>,
    /// Some host keeps payloads for a while only.
    expires: bool,
    /// Some table is smaller than usual.
    is_tight: bool,
}

fn is_tight(host: &PayloadHostSettings) -> bool {
    let PayloadConfig { pool, hold, room, .. } = host.config;
    host.config != PayloadConfig { pool, hold, room, ..PayloadConfig::default() }
}

impl PayloadsArrive {
    pub(super) fn new(run: &Run) -> PayloadsArrive {
        let cleans = |stream: &WorkloadStream| {
            let mut departures = stream.receivers.iter().filter_map(|one| one.gone);
            departures.any(|(_, how)| how == Departure::CleansUp)
        };
        let those = |is_it: &dyn Fn(&WorkloadStream) -> bool| {
            let streams = (0..).zip(&run.streams).filter(|(_, stream)| is_it(stream));
            streams.map(|(at, _)| at).collect()
        };
        PayloadsArrive {
            scarce: those(&|stream| (stream.copies as usize) < stream.receivers.len()),
            whole: those(&|stream| stream.is_whole),
            again: (0..).zip(&run.streams).filter_map(|(at, one)| Some((at, one.of?))).collect(),
            cleaned: those(&cleans),
            expires: run.hosts.iter().any(|host| host.config.hold.0 > 0),
            is_tight: run.hosts.iter().any(is_tight),
            ..PayloadsArrive::default()
        }
    }

    /// True if some fault hit one of the cores of these hosts.
    fn is_hit(&self, hosts: [u16; 2]) -> bool {
        let cores = hosts.into_iter().flat_map(|first| [Some(first), Some(first + 1)]);
        cores.chain([None]).any(|one| self.hit.contains(&one))
    }

    fn is_drained(&self, host: u16) -> bool {
        self.drained.contains(&host) || self.drained.contains(&(host + 1))
    }

    fn is_caused(
        &self,
        stream: u32,
        (receiver, from): (u16, u16),
        (failure, how): (&PayloadFailure, &ProducerEnd),
    ) -> bool {
        let is_hit = self.is_hit([receiver, from]);
        match failure {
            PayloadFailure::GivenUp(_) => {
                matches!(how, ProducerEnd::GaveUp | ProducerEnd::NoRoom(_))
            }
            PayloadFailure::ProducerGone => {
                matches!(how, ProducerEnd::Left | ProducerEnd::HostGone)
            }
            PayloadFailure::PeerGone(_) | PayloadFailure::NotMoved(_) => {
                is_hit || self.is_drained(from)
            }
            // What became of it is forgotten.
            PayloadFailure::Ended => self.whole.contains(&stream) && self.is_tight,
            PayloadFailure::Taken => self.scarce.contains(&stream),
            PayloadFailure::Expired => self.expires || self.is_tight,
            PayloadFailure::CleanedUp => {
                *how == ProducerEnd::CleanedUp || self.cleaned.contains(&stream)
            }
            // What is put for others may fill a pool, whatever its size.
            PayloadFailure::PoolFull { .. } => true,
            PayloadFailure::Overload(_) => self.is_tight,
            PayloadFailure::Closed => self.is_drained(receiver) || self.is_drained(from),
            _ => false,
        }
    }

    /// True if a receiver may know of an earlier stream alone, whose id this one has: the host with the
    /// first chunk of this one is out of its reach.
    fn is_former(&self, stream: u32, missed: &MissedChunk, from: u16) -> bool {
        let earlier = std::iter::successors(self.again.get(&stream), |of| self.again.get(of));
        let mut ends = earlier.filter_map(|of| self.produced.get(of)).map(|(.., how)| how);
        let is_caused = |how: &ProducerEnd| match missed.failure {
            PayloadFailure::GivenUp(_) => {
                matches!(how, ProducerEnd::GaveUp | ProducerEnd::NoRoom(_))
            }
            PayloadFailure::ProducerGone => *how == ProducerEnd::Left,
            // When all have ended, it is cleaned up.
            PayloadFailure::CleanedUp | PayloadFailure::Taken => true,
            _ => false,
        };
        missed.chunk == 0 && self.is_hit([missed.at, from]) && ends.any(is_caused)
    }

    /// Looks at what was missed in a stream whose producer has ended.
    fn judge(&mut self, now: CheckContext<'_>, stream: u32) {
        let Some((host, put, how)) = self.produced.get(&stream) else { return };
        // Whoever puts nothing for long leaves what became of an earlier request with its id.
        if *put == 0 && self.again.contains_key(&stream) {
            self.missed.remove(&stream);
            return;
        }
        for missed in self.missed.remove(&stream).unwrap_or_default() {
            let MissedChunk { receiver, at, failure, .. } = &missed;
            if !self.is_caused(stream, (*at, host.instance), (failure, how))
                && !self.is_former(stream, &missed, host.instance)
            {
                let [from, to] = [host.instance, *at].map(|one| now.name(one));
                now.report(|| {
                    format!(
                        "receiver {receiver} at {to} of stream {stream} from {from} was told \
                         {failure:?}, but its producer ended with {how:?}"
                    )
                });
            }
        }
    }

    fn ended(
        &mut self,
        now: CheckContext<'_>,
        (stream, receiver): StageReceiver,
        (host, chunk): (SimProcessId, u32),
        outcome: &ReceiverOutcome,
    ) {
        match outcome {
            ReceiverOutcome::Finished if self.whole.contains(&stream) && chunk == 1 => {}
            ReceiverOutcome::Finished => {
                let produced = self.produced.get(&stream);
                let has_all = produced
                    .is_some_and(|(_, put, how)| *how == ProducerEnd::Ended && *put == chunk);
                if !has_all {
                    let name = now.name(host.instance);
                    now.report(|| {
                        format!(
                            "receiver {receiver} at {name} of stream {stream} was told that it \
                             ended with {chunk} chunks, but the producer ended with {produced:?}"
                        )
                    });
                }
            }
            ReceiverOutcome::Missing(failure) => {
                let (at, failure) = (host.instance, failure.clone());
                let missed = MissedChunk { receiver, at, chunk, failure };
                self.missed.entry(stream).or_default().push(missed);
                self.judge(now, stream);
            }
            ReceiverOutcome::Departed | ReceiverOutcome::HostGone => {}
        }
    }
}

impl Invariant for PayloadsArrive {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Payload, Faulted]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        let (host, sight) = match seen {
            Observation::Faulted { kind, from, to } => {
                if *kind == FaultKind::Drain {
                    self.drained.extend(*from);
                }
                self.hit.insert(*from);
                self.hit.extend(to.map(Some));
                return;
            }
            Observation::Payload { host, sight } => (*host, *sight),
            _ => return,
        };
        match sight {
            PayloadSight::Misuse { rule } => {
                let name = now.name(host.instance);
                now.report(|| format!("at {name}: {rule}"));
            }
            PayloadSight::Produced { stream, put, how } => {
                self.produced.insert(stream, (host, put, how.clone()));
                self.judge(now, stream);
            }
            PayloadSight::Got { stream, receiver, chunk, wrong: Some(wrong) } => {
                let name = now.name(host.instance);
                now.report(|| {
                    format!(
                        "receiver {receiver} at {name} has chunk {chunk} of stream {stream}, {wrong}"
                    )
                });
            }
            PayloadSight::Ended { stream, receiver, chunk, outcome } => {
                self.ended(now, (stream, receiver), (host, chunk), outcome);
            }
            PayloadSight::Begins { .. }
            | PayloadSight::Asked { .. }
            | PayloadSight::Got { .. }
            | PayloadSight::Overdue { .. } => {}
        }
    }

    fn finish(&mut self, now: CheckContext<'_>, _at_rest: bool) {
        for stream in std::mem::take(&mut self.missed).into_keys() {
            now.report(|| format!("the producer of stream {stream} has not ended"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{D0, InvariantBench, InvariantId, P0};
    use kvferry_engine::core::time::Nanos;
    use kvferry_scenarios::run::WorkloadEnd;

    fn see(bench: &mut InvariantBench, host: SimProcessId, sight: PayloadSight<'_>) {
        bench.see(Observation::Payload { host, sight });
    }

    fn ended(chunk: u32, outcome: &ReceiverOutcome) -> PayloadSight<'_> {
        PayloadSight::Ended { stream: 0, receiver: 0, chunk, outcome }
    }

    fn produced(bench: &mut InvariantBench, put: u32, how: &ProducerEnd) {
        see(bench, P0, PayloadSight::Produced { stream: 0, put, how });
    }

    #[test]
    fn bytes_that_differ_and_broken_rules_are_reported() {
        let mut bench = InvariantBench::new(InvariantId::PayloadsArrive);
        let got = |wrong| PayloadSight::Got { stream: 0, receiver: 0, chunk: 3, wrong };
        see(&mut bench, D0, got(None));
        bench.holds();
        see(&mut bench, D0, got(Some("of which bytes differ")));
        bench.fails("receiver 0 at d0 has chunk 3 of stream 0, of which bytes differ");
        let mut bench = InvariantBench::new(InvariantId::PayloadsArrive);
        see(&mut bench, D0, PayloadSight::Misuse { rule: "the ticket is in use" });
        bench.fails("at d0: the ticket is in use");
    }

    #[test]
    fn a_stream_does_not_end_before_its_last_chunk() {
        for chunk in [1, 2] {
            let mut bench = InvariantBench::new(InvariantId::PayloadsArrive);
            produced(&mut bench, 2, &ProducerEnd::Ended);
            see(&mut bench, D0, ended(chunk, &ReceiverOutcome::Finished));
            match chunk {
                2 => bench.holds(),
                _ => bench.fails("was told that it ended with 1 chunks"),
            }
        }
    }

    #[test]
    fn what_does_not_come_has_a_cause() {
        let gone = ReceiverOutcome::Missing(PayloadFailure::ProducerGone);
        for how in [ProducerEnd::Left, ProducerEnd::Ended] {
            let mut bench = InvariantBench::new(InvariantId::PayloadsArrive);
            see(&mut bench, D0, ended(0, &gone));
            bench.holds();
            produced(&mut bench, 1, &how);
            match how {
                ProducerEnd::Left => bench.holds(),
                _ => bench.fails("was told ProducerGone, but its producer ended with Ended"),
            }
        }
        // A host is lost by a fault at one of the two.
        let lost = ReceiverOutcome::Missing(PayloadFailure::PeerGone("p0".into()));
        for hit in [Some(P0.instance), Some(7)] {
            let mut bench = InvariantBench::new(InvariantId::PayloadsArrive);
            bench.see(Observation::Faulted { kind: FaultKind::Pause, from: hit, to: None });
            produced(&mut bench, 1, &ProducerEnd::HostGone);
            see(&mut bench, D0, ended(0, &lost));
            match hit {
                Some(0) => bench.holds(),
                _ => bench.fails("was told PeerGone(\"p0\")"),
            }
        }
    }

    fn stream(of: Option<u32>) -> WorkloadStream {
        WorkloadStream {
            of,
            from: 0,
            start: Nanos::ZERO,
            chunks: Vec::new(),
            is_whole: false,
            puts: 1,
            copies: 1,
            wait: Nanos::ZERO,
            end: WorkloadEnd::Ends,
            receivers: Vec::new(),
        }
    }

    #[test]
    fn an_earlier_stream_is_the_cause_where_the_next_one_is_out_of_reach() {
        for (chunk, is_hit, failure, is_caused) in [
            (0, true, PayloadFailure::CleanedUp, true),
            (0, true, PayloadFailure::GivenUp("it was aborted".into()), true),
            (0, true, PayloadFailure::ProducerGone, false),
            (1, true, PayloadFailure::CleanedUp, false),
            (0, false, PayloadFailure::CleanedUp, false),
        ] {
            let mut bench = InvariantBench::with(InvariantId::PayloadsArrive, |run| {
                run.streams = vec![stream(None), stream(Some(0))];
            });
            produced(&mut bench, 0, &ProducerEnd::GaveUp);
            if is_hit {
                let (from, to) = (Some(P0.instance), None);
                bench.see(Observation::Faulted { kind: FaultKind::Partition, from, to });
            }
            let how = &ProducerEnd::Ended;
            see(&mut bench, P0, PayloadSight::Produced { stream: 1, put: 2, how });
            let outcome = &ReceiverOutcome::Missing(failure);
            see(&mut bench, D0, PayloadSight::Ended { stream: 1, receiver: 0, chunk, outcome });
            match is_caused {
                true => bench.holds(),
                false => bench.fails("receiver 0 at d0 of stream 1 from p0 was told"),
            }
        }
    }
}
