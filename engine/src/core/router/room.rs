//! Number of legs that an instance takes at a time, learned from its busy answers.
//!
//! An instance that answers busy works and is full. The legs that it had when a refused leg was
//! sent are what it takes; further legs wait until one of them ends. After some legs have ended well
//! at the limit, the limit rises: by one, then by twice as much each time, until a leg is refused
//! again. Each refused attempt to rise doubles the number of legs that have to end well before the
//! next one; a refusal below the limit before the rise halves it, since the instance takes less for a
//! time. If the instance refused a leg while it had no other, it has not noticed yet that a leg
//! was cancelled, or others than this router fill it: it gets one leg after a short pause, and then
//! after the time that it names or longer pauses each time.

use super::io::RouterConfig;
use super::registry::{RegisteredInstance, Registry};
use crate::core::ids::LegId;
use crate::core::message::Role;
use crate::core::time::Nanos;

/// Shortest pause.
const PAUSE_MIN: Nanos = Nanos::from_ms(20);

/// Most legs that have to end well before the limit rises.
const QUIET_MAX: u32 = 64;

/// A leg that an instance refused as busy.
#[derive(Clone, Copy, Debug)]
pub(super) struct RefusedLeg {
    pub(super) leg: LegId,
    /// Number of the next leg that the router sends.
    pub(super) next: LegId,
    /// Legs of the instance that were in flight when the refused leg was sent.
    pub(super) ahead: u32,
    /// True if another instance of the same server has legs in flight.
    pub(super) is_shared: bool,
    /// Time after which the instance asks for the next attempt, if it named one.
    pub(super) retry_after: Option<Nanos>,
}

/// Limit of an instance's legs, learned from its busy answers.
#[derive(Clone, Debug, Default)]
pub(super) struct LegRoom {
    /// Legs at a time; `None` if no leg was refused.
    limit: Option<u32>,
    /// Time before which no leg is sent.
    until: Nanos,
    /// Pauses since a leg was last served.
    pauses: u32,
    /// Legs with a smaller number were sent before the limit changed and are ignored.
    since: LegId,
    /// Legs that have to end well before the limit rises.
    quiet: u32,
    /// Legs that ended well since the limit changed.
    ended: u32,
    /// Amount by which the limit rises next.
    step: u32,
    /// Limit before the last rise.
    base: u32,
}

impl LegRoom {
    /// True if an instance with this many legs in flight takes one more.
    pub(super) fn has(&self, now: Nanos, legs: usize) -> bool {
        now >= self.until && self.limit.is_none_or(|limit| legs < limit as usize)
    }

    /// Legs at a time, if a leg was refused.
    pub(super) fn limit(&self) -> Option<u32> {
        self.limit
    }

    /// Pauses in a row, since a leg was last served.
    pub(super) fn pauses(&self) -> u32 {
        self.pauses
    }

    /// Learns from a busy answer. Returns the end of the pause if there is one.
    pub(super) fn refused(
        &mut self,
        now: Nanos,
        refused: RefusedLeg,
        config: &RouterConfig,
    ) -> Option<Nanos> {
        let RefusedLeg { leg, next, ahead, is_shared, retry_after } = refused;
        let limit = self.limit.unwrap_or(u32::MAX).min(ahead).max(1);
        self.limit = Some(limit);
        self.ended = 0;
        self.step = 1;
        // Many legs are refused at once; only those sent after the first refusal are news.
        if leg >= self.since {
            self.quiet = match ahead {
                // Nothing is known of how many legs it takes when it works.
                0 => 1,
                _ if ahead < self.base => (self.quiet / 2).max(1),
                _ => (2 * self.quiet).clamp(1, QUIET_MAX),
            };
            self.since = next;
        }
        self.base = limit;
        if ahead > 0 {
            return None;
        }
        let doubled = 1 << self.pauses.min(16);
        let own = config.retry_pause.max(PAUSE_MIN).scale(doubled, 2);
        let pause = match retry_after {
            // The other instances of the server have legs; one that ends makes room.
            _ if is_shared || self.pauses == 0 => PAUSE_MIN.scale(doubled, 1),
            Some(span) => span.max(PAUSE_MIN),
            None => own,
        };
        self.pauses = self.pauses.saturating_add(1);
        self.until = self.until.max(now + pause.min(config.breaker_max));
        Some(self.until)
    }

    /// Learns from a leg that was served while the instance had this many legs in flight, including
    /// this one; `next` is the number of the next leg that the router sends.
    pub(super) fn served(&mut self, leg: LegId, next: LegId, legs: usize) {
        self.until = Nanos::ZERO;
        self.pauses = 0;
        let Some(limit) = self.limit else { return };
        // A leg below the limit does not show that there is more room.
        if legs < limit as usize || leg < self.since {
            return;
        }
        self.ended += 1;
        // The rise before was not refused.
        if self.step > 1 && self.ended == 1 {
            self.quiet = (self.quiet / 2).max(1);
        }
        if self.ended >= self.quiet {
            self.limit = Some(limit.saturating_add(self.step));
            self.base = limit;
            self.step = self.step.saturating_mul(2);
            self.since = next;
            self.ended = 0;
        }
    }
}

impl RegisteredInstance {
    /// True if it takes one more leg, as far as its busy answers tell.
    pub(super) fn has_room(&self, now: Nanos) -> bool {
        self.room.has(now, self.legs.len())
    }

    /// Legs that were sent to it and have not ended.
    pub(super) fn sent_legs(&self) -> usize {
        self.legs.len() - self.held
    }
}

impl Registry {
    /// True if an instance of each of these roles may take a leg, whoever it is for.
    pub(super) fn any_takes(&self, now: Nanos, roles: &[Role]) -> bool {
        roles.iter().all(|role| {
            self.of_role(*role).any(|(_, it)| {
                let is_full = !it.has_room(now) && !planted!("full-instances-get-legs");
                it.is_there(now) && !it.unproven && it.hostless.is_none() && !is_full
            })
        })
    }

    /// Time until an instance of each role takes legs, as far as failures and busy answers tell.
    pub(super) fn opens_after(&self, now: Nanos) -> Nanos {
        let of = |role| {
            let there = self.of_role(role).filter(|(_, it)| it.is_there(now));
            there.map(|(_, it)| it.health.until().max(it.room.until) - now).min()
        };
        of(Role::Prefill).max(of(Role::Decode)).unwrap_or(Nanos::ZERO)
    }

    /// True if a request for the model only lacks room: all instances of a role that would take it
    /// are full.
    pub(super) fn is_full(&self, now: Nanos, model: Option<&str>) -> bool {
        [Role::Prefill, Role::Decode].into_iter().any(|role| {
            let mut takers = self
                .of_role(role)
                .filter(|(_, it)| it.is_there(now) && it.serves(model))
                .filter(|(_, it)| !it.unproven && it.hostless.is_none())
                .filter(|(_, it)| !it.health.is_suspect(now))
                .peekable();
            takers.peek().is_some() && takers.all(|(_, it)| !it.has_room(now))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// An instance that takes `cap` legs at a time, and a router that always has more to send.
    struct FullInstance {
        room: LegRoom,
        /// Legs in flight, oldest first.
        taken: VecDeque<LegId>,
        next: u64,
        refused: u32,
    }

    impl FullInstance {
        fn new() -> FullInstance {
            FullInstance { room: LegRoom::default(), taken: VecDeque::new(), next: 0, refused: 0 }
        }

        /// Sends up to `offered` legs while there is room; the instance refuses those above `cap`.
        fn fill(&mut self, offered: u32, cap: u32) {
            let config = RouterConfig::default();
            let mut sent = Vec::new();
            while self.taken.len() + sent.len() < offered as usize {
                let ahead = (self.taken.len() + sent.len()) as u32;
                if !self.room.has(Nanos::ZERO, ahead as usize) {
                    break;
                }
                sent.push((LegId(self.next), ahead));
                self.next += 1;
            }
            for (leg, ahead) in sent {
                if ahead < cap {
                    self.taken.push_back(leg);
                    continue;
                }
                let (is_shared, retry_after) = (false, None);
                let next = LegId(self.next);
                let refused = RefusedLeg { leg, next, ahead, is_shared, retry_after };
                assert_eq!(self.room.refused(Nanos::ZERO, refused, &config), None);
                self.refused += 1;
            }
        }

        fn end_one(&mut self) {
            let legs = self.taken.len();
            let leg = self.taken.pop_front().expect("one is in flight");
            self.room.served(leg, LegId(self.next), legs);
        }
    }

    #[test]
    fn limit_is_exact_after_one_burst_and_refusals_become_rare() {
        let mut instance = FullInstance::new();
        instance.fill(8, 4);
        assert_eq!((instance.room.limit(), instance.refused), (Some(4), 4));
        for _ in 0..1_000 {
            instance.end_one();
            instance.fill(8, 4);
            assert_eq!(instance.taken.len(), 4, "all places are used");
        }
        assert!(instance.refused < 4 + 6 + 1_000 / QUIET_MAX + 1, "{}", instance.refused);
    }

    #[test]
    fn limit_follows_an_instance_that_takes_more() {
        let mut instance = FullInstance::new();
        instance.fill(8, 4);
        for _ in 0..1_000 {
            instance.end_one();
            instance.fill(8, 4);
        }
        let before = instance.refused;
        for _ in 0..8 * QUIET_MAX {
            instance.end_one();
            instance.fill(100, 1_000);
        }
        assert_eq!((instance.taken.len(), instance.refused), (100, before));
    }

    #[test]
    fn instance_that_refused_every_leg_for_a_time_is_back_at_its_rate_after_a_few_legs() {
        let mut instance = FullInstance::new();
        for _ in 0..1_000 {
            instance.fill(8, 4);
            instance.end_one();
        }
        assert!(instance.room.quiet > QUIET_MAX / 4, "{}", instance.room.quiet);
        while !instance.taken.is_empty() {
            instance.end_one();
        }
        let config = RouterConfig::default();
        for _ in 0..8 {
            let (leg, next) = (LegId(instance.next), LegId(instance.next + 1));
            let (ahead, is_shared, retry_after) = (0, false, None);
            let refused = RefusedLeg { leg, next, ahead, is_shared, retry_after };
            instance.room.refused(Nanos::ZERO, refused, &config);
            instance.next += 1;
        }
        instance.room.until = Nanos::ZERO;
        for _ in 0..8 {
            instance.fill(8, 4);
            instance.end_one();
        }
        instance.fill(8, 4);
        assert_eq!(instance.taken.len(), 4);
    }

    #[test]
    fn limit_does_not_rise_while_it_is_not_used() {
        let mut instance = FullInstance::new();
        instance.fill(8, 4);
        for _ in 0..1_000 {
            instance.end_one();
            instance.fill(2, 4);
        }
        assert!(instance.room.limit() <= Some(6), "{:?}", instance.room.limit());
    }

    #[test]
    fn instance_without_legs_is_left_alone_for_the_time_that_it_names_or_longer_each_time() {
        let config = RouterConfig::default();
        let refuse = |room: &mut LegRoom, at: u64, is_shared, retry_after| {
            let (leg, next, ahead) = (LegId(at), LegId(at + 1), 0);
            let refused = RefusedLeg { leg, next, ahead, is_shared, retry_after };
            room.refused(Nanos::from_ms(at), refused, &config)
        };
        let mut room = LegRoom::default();
        let hour = Some(Nanos::from_secs(3_600));
        assert_eq!(
            refuse(&mut room, 0, false, hour),
            Some(PAUSE_MIN),
            "a cancelled leg may be left"
        );
        let after = refuse(&mut room, 20, false, Some(Nanos::from_secs(2)));
        assert_eq!(after, Some(Nanos::from_ms(2_020)));
        assert!(!room.has(Nanos::from_ms(2_019), 0) && room.has(Nanos::from_ms(2_020), 0));
        assert!(!room.has(Nanos::from_ms(2_020), 1), "one leg tries it");
        let huge = refuse(&mut room, 2_020, false, Some(Nanos::MAX));
        assert_eq!(huge, Some(Nanos::from_ms(12_020)), "bounded");
        assert_eq!(refuse(&mut room, 13_000, false, None), Some(Nanos::from_ms(15_000)));
        room.served(LegId(13_001), LegId(14_000), 1);
        assert_eq!(refuse(&mut room, 15_000, true, None), Some(Nanos::from_ms(15_020)));
        assert_eq!(refuse(&mut room, 15_020, true, None), Some(Nanos::from_ms(15_060)));
    }
}
