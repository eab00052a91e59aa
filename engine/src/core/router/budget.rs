//! Share of requests that the router may retry, since more retries would add to the overload; and
//! the time that waiting requests will take, estimated from the recent rate.

use super::io::RetryShare;
use crate::core::time::Nanos;

/// Seconds that are looked back on.
pub(super) const WINDOW: u64 = 10;

const SECOND: u64 = 1_000_000_000;

/// Numbers of events within one second.
#[derive(Clone, Copy, Debug, Default)]
struct BudgetSlot {
    requests: u64,
    retries: u64,
    /// Requests that ended well.
    served: u64,
}

/// Requests and retries of the last [`WINDOW`] seconds, each second in a slot.
#[derive(Debug, Default)]
pub(super) struct RetryBudget {
    slots: [BudgetSlot; WINDOW as usize],
    /// The second of the newest slot.
    second: u64,
}

impl RetryBudget {
    /// Forgets what is too old; returns the slot of now.
    fn slot(&mut self, now: Nanos) -> &mut BudgetSlot {
        let second = now.0 / SECOND;
        let passed = second.saturating_sub(self.second).min(WINDOW);
        self.second = self.second.max(second);
        for back in 0..passed {
            self.slots[((self.second - back) % WINDOW) as usize] = BudgetSlot::default();
        }
        &mut self.slots[(self.second % WINDOW) as usize]
    }

    /// A request came.
    pub(super) fn came(&mut self, now: Nanos) {
        self.slot(now).requests += 1;
    }

    /// A request ended well.
    pub(super) fn served(&mut self, now: Nanos) {
        self.slot(now).served += 1;
    }

    /// Time in which this many requests were served lately; the whole window if none was.
    pub(super) fn time_for(&self, now: Nanos, requests: usize) -> Nanos {
        let second = now.0 / SECOND;
        let is_fresh = second.saturating_sub(self.second) < WINDOW;
        let served: u64 = self.slots.iter().filter(|_| is_fresh).map(|slot| slot.served).sum();
        let window = Nanos(WINDOW.min(second + 1) * SECOND);
        match served {
            0 => window,
            served => window.scale(requests as u64, served),
        }
    }

    /// True if something may be sent again, which is counted, with so many requests open.
    pub(super) fn take(&mut self, now: Nanos, open: usize, share: RetryShare) -> bool {
        self.slot(now);
        let sum = |of: fn(&BudgetSlot) -> u64| self.slots.iter().map(of).sum::<u64>();
        let (requests, retries) = (sum(|slot| slot.requests), sum(|slot| slot.retries));
        let of_requests = requests.max(open as u64) * u64::from(share.percent) / 100;
        let has_room = retries < of_requests + u64::from(share.per_second) * WINDOW;
        self.slot(now).retries += u64::from(has_room);
        has_room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Retries that are let through at a time.
    fn taken(budget: &mut RetryBudget, at: u64, open: usize, share: RetryShare) -> usize {
        let now = Nanos::from_ms(at);
        (0..1_000).take_while(|_| budget.take(now, open, share)).count()
    }

    #[test]
    fn time_for_requests_follows_those_that_were_served() {
        let mut budget = RetryBudget::default();
        let at = Nanos::from_secs(100);
        assert_eq!(budget.time_for(at, 5), Nanos::from_secs(WINDOW));
        (0..20).for_each(|_| budget.served(at));
        assert_eq!(budget.time_for(at, 5), Nanos::from_ms(2_500));
        assert_eq!(budget.time_for(Nanos::from_secs(110), 5), Nanos::from_secs(WINDOW));
    }

    #[test]
    fn a_share_of_the_requests_and_some_per_second_are_sent_again() {
        let share = RetryShare { percent: 20, per_second: 3 };
        let mut budget = RetryBudget::default();
        assert_eq!(taken(&mut budget, 500, 0, share), 30);
        (0..100).for_each(|_| budget.came(Nanos::from_ms(1_500)));
        assert_eq!(taken(&mut budget, 1_500, 0, share), 20);
        // Of those that are open, if these are more.
        assert_eq!(taken(&mut budget, 1_900, 150, share), 10);
        // The thirty go out of the window, then the rest, and the requests.
        assert_eq!(taken(&mut budget, 9_900, 0, share), 0);
        assert_eq!(taken(&mut budget, 10_100, 0, share), 20);
        assert_eq!(taken(&mut budget, 11_100, 0, share), 10);
        assert_eq!(taken(&mut budget, 60_000, 0, share), 30);
        // A time that goes back is that of the newest slot.
        assert_eq!(taken(&mut budget, 59_000, 0, share), 0);
        assert_eq!(taken(&mut budget, 80_000, 0, RetryShare { percent: 0, per_second: 0 }), 0);
    }
}
