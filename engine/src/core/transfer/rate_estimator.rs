//! What the link to a peer carries, as its completions tell: how large an operation may be, and how
//! much has to be in flight to keep the link busy.

use super::TransferSettings;
use crate::core::time::Nanos;
use crate::fabric::Credits;

/// How long a measured rate counts, once or twice.
const EPOCH: Nanos = Nanos::from_secs(1);

/// Operations that may always be in flight, so that the next one is there when one ends.
const PAIR: u32 = 2;

/// Operations that may be in flight, whatever was measured, on a plane that tells of their ends
/// late, as long as they have no more than two of the smallest cut ones have.
const SMALL: u32 = 16;

/// Operations of one measurement, beside four for each that is in flight when it ends: those that
/// are in flight when the next one begins count in neither.
const MEASURED: u32 = 32;

/// The best value of two periods, this one and the last.
#[derive(Clone, Copy, Debug, Default)]
struct WindowedBest {
    this: Option<u64>,
    last: Option<u64>,
}

impl WindowedBest {
    fn next_period(&mut self) {
        if self.this.is_some() {
            self.last = self.this.take();
        }
    }

    fn of(self, better: fn(u64, u64) -> u64) -> Option<u64> {
        match (self.this, self.last) {
            (Some(this), Some(last)) => Some(better(this, last)),
            (this, last) => this.or(last),
        }
    }
}

/// The delivery rate and the delay of a link, much as BBR keeps them (Cardwell et al., ACM Queue
/// 2016): the highest rate at which bytes were delivered, and the shortest time that an operation
/// took. Their product is what the link holds.
///
/// A rate is what operations delivered that were both submitted and completed within one
/// measurement, over its time. What was under way before does not count, though some of it is
/// delivered then: an operation that is submitted just before a large one ends would otherwise seem
/// to have delivered both.
///
/// What others have since then taken of the link shows in an operation that lasts: where all that
/// ended within its time makes less than half of the rate, that is the rate.
#[derive(Debug, Default)]
pub(super) struct RateEstimator {
    /// The measurement under way: its number, its beginning, and what was delivered in it.
    measurement: u64,
    since: Nanos,
    delivered: Credits,
    /// Bytes of all operations that are done.
    done: u64,
    epoch: Nanos,
    /// Bytes per second; of epochs.
    rate: WindowedBest,
    /// Nanoseconds from submission to completion; of times without a pause, because only an
    /// operation that comes after a pause does not wait for others of ours.
    span: WindowedBest,
}

/// What was known of a link when an operation was submitted.
#[derive(Clone, Copy, Debug)]
pub(super) struct RateSample {
    at: Nanos,
    /// In which it counts.
    measurement: u64,
    /// Bytes of all operations that were done by then.
    done: u64,
}

impl RateEstimator {
    /// An operation is submitted; `idle` says that none is in flight.
    pub(super) fn posted(&mut self, now: Nanos, idle: bool) -> RateSample {
        if idle {
            self.span.next_period();
            self.measure(now);
        }
        RateSample { at: now, measurement: self.measurement, done: self.done }
    }

    fn measure(&mut self, now: Nanos) {
        self.measurement += 1;
        self.since = now;
        self.delivered = Credits::default();
    }

    /// An operation of `bytes` bytes is done; so many others are in flight.
    pub(super) fn done(
        &mut self,
        now: Nanos,
        submitted: RateSample,
        bytes: u64,
        in_flight: u32,
        settings: &TransferSettings,
    ) {
        let span = Nanos((now - submitted.at).0.max(1));
        self.span.this = Some(self.span.this.map_or(span.0, |best| best.min(span.0)));
        if now >= self.epoch + EPOCH {
            self.epoch = now;
            self.rate.next_period();
        }
        self.done = self.done.wrapping_add(bytes);
        if span > settings.operation_time.scale(2, 1) && !planted!("old-rate-is-kept") {
            let left = per_second(self.done.wrapping_sub(submitted.done), span);
            if self.rate.of(u64::max).is_some_and(|rate| left < rate / 2) {
                self.rate = WindowedBest { this: Some(left), last: None };
                return self.measure(now);
            }
        }
        if submitted.measurement != self.measurement {
            return;
        }
        self.delivered.add(&Credits { operations: 1, ranges: 0, bytes });
        let rate = per_second(self.delivered.bytes, now - self.since);
        self.rate.this = Some(self.rate.this.map_or(rate, |best| best.max(rate)));
        if self.delivered.operations >= MEASURED + 4 * in_flight {
            self.measure(now);
        }
    }

    /// What was measured holds no more, nor does what is in flight count in what is measured next.
    pub(super) fn forget(&mut self, now: Nanos) {
        (self.rate, self.span) = (WindowedBest::default(), WindowedBest::default());
        self.measure(now);
    }

    /// What the link carries in some time, if anything is known of it.
    fn carries(&self, time: Nanos) -> Option<u64> {
        let bytes = u128::from(self.rate.of(u64::max)?) * u128::from(time.0) / 1_000_000_000;
        Some(u64::try_from(bytes).unwrap_or(u64::MAX))
    }

    /// Bytes of one operation: what the link carries in [`TransferSettings::operation_time`],
    /// within the bounds of the settings.
    pub(super) fn operation_bytes(&self, settings: &TransferSettings) -> u64 {
        let bytes =
            self.carries(settings.operation_time).unwrap_or(2 * settings.operation_bytes_min);
        let most = settings.operation_bytes_max.max(1);
        bytes.clamp(settings.operation_bytes_min.clamp(1, most), most)
    }

    /// True if `bytes` more keep the link busy rather than make its queue longer: less is in flight
    /// than twice of what it holds, so that a link that turns out to hold more is found out, and
    /// less than the operation time's worth.
    pub(super) fn has_room(
        &self,
        in_flight: &Credits,
        bytes: u64,
        settings: &TransferSettings,
    ) -> bool {
        let all = in_flight.bytes.saturating_add(bytes);
        let small = in_flight.operations < SMALL && all <= 2 * settings.operation_bytes_min;
        if in_flight.operations < PAIR || small {
            return true;
        }
        let span = self.span.of(u64::min).map_or(Nanos::ZERO, Nanos);
        let most = self.carries(span.scale(2, 1).min(settings.operation_time)).unwrap_or(0);
        all <= most
    }
}

fn per_second(bytes: u64, time: Nanos) -> u64 {
    let rate = u128::from(bytes) * 1_000_000_000 / u128::from(time.0.max(1));
    u64::try_from(rate).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// A link that serves one operation after the other, `rate` bytes a millisecond, and tells of
    /// it `delay` milliseconds later: bytes in flight and per operation after a while.
    fn settles(rate: u64, delay: u64, size: Option<u64>) -> (u64, u64) {
        let settings = TransferSettings::default();
        let (mut pace, mut used) = (RateEstimator::default(), Credits::default());
        let mut flying = std::collections::VecDeque::new();
        let (mut now, mut free) = (0_u64, 0_u64);
        for _ in 0..3_000 {
            let bytes = size.unwrap_or_else(|| pace.operation_bytes(&settings));
            let more = Credits { operations: 1, ranges: 1, bytes };
            if pace.has_room(&used, bytes, &settings) {
                free = free.max(now) + bytes * MS / rate;
                let submitted = pace.posted(Nanos(now), used.operations == 0);
                flying.push_back((free + delay * MS, submitted, more));
                used.add(&more);
                continue;
            }
            let (at, submitted, less) = flying.pop_front().expect("room for two");
            now = at;
            used.remove(&less);
            pace.done(Nanos(now), submitted, less.bytes, used.operations, &settings);
        }
        (used.bytes, pace.operation_bytes(&settings))
    }

    #[test]
    fn an_operation_takes_as_long_as_it_may() {
        // 0.1 GB/s, in bytes per millisecond.
        let (_, slow) = settles(100_000, 0, None);
        assert!((1_900_000..=2_000_000).contains(&slow), "{slow}");
        let (_, fast) = settles(50_000_000, 0, None);
        assert_eq!(fast, TransferSettings::default().operation_bytes_max);
        let (_, crawling) = settles(100, 0, None);
        assert_eq!(crawling, TransferSettings::default().operation_bytes_min);
    }

    #[test]
    fn no_more_is_in_flight_than_the_link_needs() {
        // Without a delay two operations keep it busy.
        let (flying, bytes) = settles(100_000, 0, None);
        assert!(flying <= 2 * bytes, "{flying} in flight in operations of {bytes}");
        // 10 GB/s and 1 ms hold 10 MB, which operations of 64 KiB reach too.
        for size in [None, Some(65_536)] {
            let (flying, _) = settles(10_000_000, 1, size);
            assert!(flying >= 10_000_000, "{flying} in flight");
            assert!(flying <= 2 * (10_000_000 + 2 * (16 << 20)), "{flying} in flight");
        }
    }

    #[test]
    fn what_was_measured_counts_for_two_epochs_at_most() {
        let settings = TransferSettings::default();
        let mut pace = RateEstimator::default();
        let at = |s: u64| Nanos(s * 1_000 * MS);
        let submitted = pace.posted(at(0), true);
        pace.done(at(1), submitted, 100 << 20, 0, &settings);
        assert_eq!(pace.operation_bytes(&settings), 100 * (1 << 20) / 50);
        for (second, rate) in [(3, 100), (5, 60), (7, 60)] {
            let submitted = pace.posted(at(second - 1), true);
            pace.done(at(second), submitted, 60 << 20, 0, &settings);
            assert_eq!(pace.operation_bytes(&settings), rate * (1 << 20) / 50, "{second} s");
        }
        let submitted = pace.posted(at(7), true);
        pace.forget(at(8));
        pace.done(at(9), submitted, 1 << 30, 0, &settings);
        assert_eq!(pace.operation_bytes(&settings), 2 * settings.operation_bytes_min);
    }

    #[test]
    fn a_link_that_others_have_come_to_is_measured_anew() {
        let settings = TransferSettings::default();
        let mut pace = RateEstimator::default();
        let submitted = pace.posted(Nanos(0), true);
        pace.done(Nanos(MS), submitted, 1_000_000, 0, &settings);
        let large = pace.operation_bytes(&settings);
        assert_eq!(large, settings.operation_bytes_max, "20 ms at 1 GB/s");
        // Two are always in flight, and the link carries 200 MB/s.
        let took = Nanos(large * MS / 200_000);
        let mut now = Nanos(MS);
        let (mut first, mut second) = (pace.posted(now, true), pace.posted(now, false));
        for _ in 0..3 {
            now = now + took;
            pace.done(now, first, large, 1, &settings);
            (first, second) = (second, pace.posted(now, false));
        }
        let bytes = pace.operation_bytes(&settings);
        assert!((3_500_000..=4_500_000).contains(&bytes), "{bytes} in 20 ms at 200 MB/s");
        // A short operation that waits behind them says the same, one that does not says nothing.
        let short = pace.posted(now, false);
        pace.done(now + Nanos(30 * MS), short, 1_000, 1, &settings);
        assert_eq!(pace.operation_bytes(&settings), bytes);
    }

    #[test]
    fn what_was_under_way_before_is_not_what_an_operation_delivered() {
        let settings = TransferSettings::default();
        let mut pace = RateEstimator::default();
        // 100 MB/s: a large operation, and a short one that is submitted when it is nearly over,
        // again and again.
        let mut large = pace.posted(Nanos::ZERO, true);
        for end in (1..200).map(|count| Nanos(count * 100 * MS)) {
            let short_at = Nanos(end.0 - MS);
            let short = pace.posted(short_at, false);
            pace.done(end, large, 10_000_000 - 100_000, 1, &settings);
            large = pace.posted(end, false);
            pace.done(end + Nanos(MS), short, 100_000, 1, &settings);
            let bytes = pace.operation_bytes(&settings);
            assert!(bytes <= 2_100_000, "{bytes} in 20 ms at 100 MB/s");
        }
    }
}
