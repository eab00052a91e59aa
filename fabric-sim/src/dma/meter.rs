//! For how long a port was full.

use kvferry_engine::core::time::Nanos;

/// Time over which the use of a port is averaged.
const WINDOW: u64 = 100_000_000;

/// Percent of a window in use from which on it is full.
const FULL: u64 = 80;

/// Adds up the windows in which more than 80 % of a port was used.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UtilizationMeter {
    /// Number of the window that is being filled.
    window: u64,
    /// Nanoseconds of it that the port was in use.
    used: u64,
    /// Full windows before it.
    full: u64,
}

impl UtilizationMeter {
    /// The port was in use for `used` nanoseconds, spread evenly over a span. Spans come by their
    /// ends; what lies before the window that is being filled is left out, so that a port may have
    /// been full for longer than the meter says, and not for less.
    pub(super) fn add(&mut self, (began, to): (Nanos, Nanos), used: u64) {
        let (from, to) = (began.0.max(self.window * WINDOW), to.0);
        let whole = (to - began.0).max(1);
        let used = match from > began.0 {
            true => (u128::from(used) * u128::from(to - from) / u128::from(whole)) as u64,
            false => used,
        };
        let (first, last) = (from / WINDOW, to / WINDOW);
        if first >= last {
            self.turn_to(last.max(self.window));
            self.used += used;
            return;
        }
        let share =
            |part: u64| (u128::from(used) * u128::from(part) / u128::from(to - from)) as u64;
        self.turn_to(first);
        self.used += share((first + 1) * WINDOW - from);
        if last > first + 1 {
            // All windows in between are alike.
            self.turn_to(first + 1);
            self.used = share(WINDOW);
            self.full += (last - first - 2) * u64::from(self.is_full());
        }
        self.turn_to(last);
        self.used += share(to - last * WINDOW);
    }

    fn is_full(&self) -> bool {
        self.used * 100 > WINDOW * FULL
    }

    fn turn_to(&mut self, window: u64) {
        if window > self.window {
            self.full += u64::from(self.is_full());
            (self.window, self.used) = (window, 0);
        }
    }

    /// Time for which the port was full.
    pub(super) fn full(&self) -> Nanos {
        Nanos((self.full + u64::from(self.is_full())) * WINDOW)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(spans: &[(u64, u64, u64)]) -> u64 {
        let mut meter = UtilizationMeter::default();
        for (from, to, percent) in spans {
            let span = (Nanos::from_ms(*from), Nanos::from_ms(*to));
            meter.add(span, (to - from) * percent * 10_000);
        }
        meter.full().0 / 1_000_000
    }

    #[test]
    fn a_window_is_full_above_four_fifths() {
        assert_eq!(full(&[(0, 100, 80)]), 0);
        assert_eq!(full(&[(0, 100, 81)]), 100);
        assert_eq!(full(&[(0, 50, 100), (60, 95, 100)]), 100);
        assert_eq!(full(&[(0, 50, 100), (110, 145, 100)]), 0);
    }

    #[test]
    fn a_long_span_fills_every_window_but_those_at_its_ends() {
        assert_eq!(full(&[(50, 1_050, 100)]), 900);
        assert_eq!(full(&[(0, 1_000, 100), (1_000, 1_090, 100)]), 1_100);
        assert_eq!(full(&[(0, 10_000, 70)]), 0);
        // Two that share the port.
        assert_eq!(full(&[(0, 1_000, 45), (0, 1_000, 45)]), 0);
        assert_eq!(full(&[(0, 90, 45), (0, 95, 45), (100, 195, 90)]), 200);
    }
}
