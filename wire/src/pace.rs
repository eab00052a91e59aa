//! How fast messages of a connection come.

use std::time::{Duration, Instant};

/// Messages of a connection in a second that no honest peer sends: a core takes one in 1 to 2 us, and
/// a transfer has about ten.
pub(crate) const FAST_MESSAGES: u64 = 100_000;

/// Seconds in a row with more messages than that, after which a connection is cut.
const FAST_SECONDS: u32 = 3;

const SECOND: Duration = Duration::from_secs(1);

/// The pace of a connection. Messages that the process keeps up with cost a share of a core all the
/// same, if they come as fast as a sender can write them.
#[derive(Debug)]
pub(crate) struct MessagePace {
    since: Instant,
    messages: u64,
    fast_seconds: u32,
}

impl MessagePace {
    pub(crate) fn new(now: Instant) -> MessagePace {
        MessagePace { since: now, messages: 0, fast_seconds: 0 }
    }

    /// Counts messages; true if the connection is to be cut.
    pub(crate) fn is_flood(&mut self, messages: usize, now: Instant) -> bool {
        self.messages += messages as u64;
        let span = now.saturating_duration_since(self.since);
        if span < SECOND {
            return false;
        }
        let is_fast = u128::from(self.messages) * SECOND.as_nanos()
            > u128::from(FAST_MESSAGES) * span.as_nanos();
        let fast_seconds = if is_fast { self.fast_seconds + 1 } else { 0 };
        *self = MessagePace { since: now, messages: 0, fast_seconds };
        fast_seconds >= FAST_SECONDS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The read at which a connection is cut that gets so many messages in a tenth of each of these
    /// seconds, ten times.
    fn cut_at(seconds: &[usize]) -> Option<usize> {
        let mut now = Instant::now();
        let mut pace = MessagePace::new(now);
        let reads = seconds.iter().flat_map(|messages| [messages / 10; 10]);
        reads.enumerate().find_map(|(read, messages)| {
            now += SECOND / 10;
            pace.is_flood(messages, now).then_some(read + 1)
        })
    }

    #[test]
    fn a_connection_is_cut_after_three_fast_seconds_in_a_row() {
        let most = FAST_MESSAGES as usize;
        assert_eq!(cut_at(&[most + 10; 4]), Some(30));
        assert_eq!(cut_at(&[most; 60]), None);
        assert_eq!(cut_at(&[10 * most, 10 * most, 0, 10 * most, 10 * most, 0]), None);
        assert_eq!(cut_at(&[10 * most, 0, 10 * most, 10 * most, 10 * most]), Some(50));
    }

    #[test]
    fn a_burst_after_silence_is_no_flood() {
        let now = Instant::now();
        let mut pace = MessagePace::new(now);
        for minute in 1..10 {
            let burst = 2 * FAST_MESSAGES as usize;
            assert!(!pace.is_flood(burst, now + SECOND * 60 * minute));
        }
    }
}
