//! One row: batches one at a time, then several in flight.

use super::args::brief;
use super::batch::{BatchRanges, BatchShape};
use super::connection::BenchConnection;
use super::harness::{PlaneHarness, SESSION, fatal_event};
use crate::process::CommandError;
use kvferry_engine::fabric::{Completion, DataEvent, Direction, OpId, Refused, Submit};
use std::fmt;
use std::time::{Duration, Instant};

/// Times that are kept for percentiles; of more, some at random.
const KEPT: usize = 1 << 20;

/// What is measured in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BenchCase {
    pub(super) direction: Direction,
    pub(super) shape: BatchShape,
}

impl BenchCase {
    /// `write` or `read`.
    pub(super) fn name(self) -> &'static str {
        match self.direction {
            Direction::Write => "write",
            Direction::Read => "read",
        }
    }
}

impl fmt::Display for BenchCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BatchShape { size, batch, .. } = self.shape;
        write!(f, "{} of {batch} x {}", self.name(), brief(size))
    }
}

/// What came out. Times are those of one batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Measurement {
    pub(super) mean: Duration,
    pub(super) p50: Duration,
    pub(super) p99: Duration,
    /// Bytes per second, one batch at a time.
    pub(super) serial_rate: f64,
    /// Most batches that were in flight.
    pub(super) inflight: u32,
    /// Bytes per second with them.
    pub(super) pipelined_rate: f64,
}

/// The session, from the side that measures.
pub(super) struct BenchSession<'a> {
    pub(super) side: &'a mut PlaneHarness,
    pub(super) line: &'a BenchConnection,
    pub(super) operations: u64,
}

impl BenchSession<'_> {
    /// Measures for `span`, with `inflight` batches at a time in its second half.
    ///
    /// # Errors
    /// A batch failed or did not end.
    pub(super) fn row(
        &mut self,
        kind: BenchCase,
        span: Duration,
        inflight: u32,
    ) -> Result<Measurement, CommandError> {
        let depth = inflight.min(self.side.plane.caps().in_all.operations).max(1);
        let batches = u64::from(depth).min(kind.shape.apart());
        let batches: Vec<BatchRanges> = (0..batches).map(|nth| kind.shape.ranges(nth)).collect();
        // What is slow the first time, such as pages that nobody has touched, is no part of it.
        for ranges in &batches {
            self.run_batch(kind, ranges)?;
        }
        let times = self.run_serial(kind, &batches, span / 2)?;
        let (inflight, together) = self.run_pipelined(kind, &batches, depth, span / 2)?;
        let mean = times.mean();
        let alone = kind.shape.bytes() as f64 / mean.as_secs_f64();
        let [p50, p99] = times.percentiles([0.50, 0.99]);
        Ok(Measurement { mean, p50, p99, serial_rate: alone, inflight, pipelined_rate: together })
    }

    /// Moves one batch, from its submit to its completion.
    ///
    /// # Errors
    /// It failed or did not end.
    pub(super) fn run_batch(
        &mut self,
        kind: BenchCase,
        ranges: &BatchRanges,
    ) -> Result<(), CommandError> {
        let since = Instant::now();
        while !self.post(kind, ranges)? {
            self.collect(kind, since)?;
        }
        while self.collect(kind, since)? == 0 {}
        Ok(())
    }

    fn run_serial(
        &mut self,
        kind: BenchCase,
        batches: &[BatchRanges],
        span: Duration,
    ) -> Result<LatencySamples, CommandError> {
        let (mut times, begun) = (LatencySamples::default(), Instant::now());
        for ranges in batches.iter().cycle() {
            let since = Instant::now();
            self.run_batch(kind, ranges)?;
            times.add(since.elapsed());
            if begun.elapsed() >= span {
                break;
            }
        }
        Ok(times)
    }

    /// Batches that were in flight at most, and bytes per second.
    fn run_pipelined(
        &mut self,
        kind: BenchCase,
        batches: &[BatchRanges],
        depth: u32,
        span: Duration,
    ) -> Result<(u32, f64), CommandError> {
        let begun = Instant::now();
        let (mut flying, mut most, mut done, mut last) = (0, 0, 0_u64, begun);
        let mut next = batches.iter().cycle();
        let mut posted = next.next().expect("a row has batches");
        loop {
            let goes_on = done == 0 || begun.elapsed() < span;
            // A plane that is full takes the same batch after its next event.
            while goes_on && flying < depth && self.post(kind, posted)? {
                flying += 1;
                posted = next.next().expect("it goes round");
            }
            most = most.max(flying);
            if flying == 0 && !goes_on {
                break;
            }
            let ended = self.collect(kind, last)?;
            if ended > 0 {
                (flying, done, last) = (flying - ended, done + u64::from(ended), Instant::now());
            }
        }
        let bytes = done * kind.shape.bytes();
        Ok((most, bytes as f64 / last.duration_since(begun).as_secs_f64()))
    }

    /// False if the plane is full.
    fn post(&mut self, kind: BenchCase, ranges: &BatchRanges) -> Result<bool, CommandError> {
        let BatchRanges { local, remote, len } = ranges;
        let (op, direction) = (OpId(self.operations + 1), kind.direction);
        match self.side.plane.submit(Submit { op, session: SESSION, direction, local, remote, len })
        {
            Ok(()) => {
                self.operations += 1;
                Ok(true)
            }
            Err(Refused::Busy) => Ok(false),
            Err(why) => Err(CommandError::Input(format!("{kind}: {why}"))),
        }
    }

    /// Polls once; how many operations ended.
    fn collect(&mut self, kind: BenchCase, since: Instant) -> Result<u32, CommandError> {
        if self.side.events.is_empty() {
            let left = self.side.check(Some(self.line), &kind, since)?;
            self.side.poll_once(left);
        }
        let mut ended = 0;
        for event in std::mem::take(&mut self.side.events) {
            match &event {
                DataEvent::Completed { outcome: Completion::Done, .. } => ended += 1,
                DataEvent::Completed { outcome: Completion::Failed { cause, .. }, .. } => {
                    return Err(CommandError::Input(format!(
                        "{kind}: {}",
                        self.side.explain(cause)
                    )));
                }
                other => {
                    if let Some(why) = fatal_event(other) {
                        return Err(CommandError::Input(format!("{kind}: {why}")));
                    }
                }
            }
        }
        Ok(ended)
    }
}

/// How long batches took.
#[derive(Debug, Default)]
struct LatencySamples {
    count: u64,
    sum: Duration,
    kept: Vec<u64>,
}

impl LatencySamples {
    fn add(&mut self, time: Duration) {
        self.count += 1;
        self.sum += time;
        let nanos = time.as_nanos() as u64;
        match self.kept.len() < KEPT {
            true => self.kept.push(nanos),
            // Each of all has the same chance to be kept.
            false => {
                let at = rand::random_range(0..self.count) as usize;
                if let Some(kept) = self.kept.get_mut(at) {
                    *kept = nanos;
                }
            }
        }
    }

    fn mean(&self) -> Duration {
        Duration::from_nanos((self.sum.as_nanos() / u128::from(self.count.max(1))) as u64)
    }

    /// The least time that a part of them did not exceed.
    fn percentiles<const N: usize>(mut self, parts: [f64; N]) -> [Duration; N] {
        self.kept.sort_unstable();
        parts.map(|part| {
            let at = (part * self.kept.len() as f64).ceil() as usize;
            let at = at.clamp(1, self.kept.len().max(1)) - 1;
            Duration::from_nanos(self.kept.get(at).copied().unwrap_or_default())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_summed_up() {
        let mut times = LatencySamples::default();
        (1..=200).rev().for_each(|us| times.add(Duration::from_micros(us)));
        assert_eq!(times.mean(), Duration::from_nanos(100_500));
        let [p50, p99, all] = times.percentiles([0.5, 0.99, 1.0]).map(|time| time.as_micros());
        assert_eq!((p50, p99, all), (100, 198, 200));
    }
}
