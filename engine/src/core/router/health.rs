//! Whether legs to an instance, or KV between two of them, are likely to get through.

use super::io::{LegFailure, RouterConfig};
use crate::core::error::Failure;
use crate::core::ids::LegId;
use crate::core::time::Nanos;

/// Failures of single requests in a row that count as one failure of the instance.
const STRIKES_MAX: u32 = 3;

/// What the legs of an instance, or of a pair of them, told of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Health {
    /// Failures since the last success.
    failures: u32,
    /// No traffic before.
    until: Nanos,
    /// Legs with a smaller number were sent before the last failure.
    since: LegId,
    /// Failures of single requests since the last success.
    strikes: u32,
    /// True if the last failure was made of such.
    struck: bool,
}

/// How much a failed leg says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum FailureSeverity {
    Nothing,
    /// [`STRIKES_MAX`] in a row are a failure.
    Strike,
    Failure,
    /// It will not be better in these incarnations.
    Final,
}

/// What a failed leg says about its instance.
pub(in crate::core) fn of_instance(failure: &LegFailure) -> FailureSeverity {
    match failure {
        LegFailure::Connection => FailureSeverity::Failure,
        LegFailure::Busy { .. } if planted!("busy-counts-as-failure") => FailureSeverity::Failure,
        LegFailure::Busy { .. } => FailureSeverity::Nothing,
        LegFailure::Answer(_) => FailureSeverity::Strike,
        LegFailure::Request(_) | LegFailure::Left(_) => FailureSeverity::Nothing,
        LegFailure::Instance(failure) => match failure {
            Failure::EngineGone | Failure::Overload | Failure::OtherLife => {
                FailureSeverity::Failure
            }
            Failure::Fabric(_) | Failure::Refused(_) | Failure::Stalled => FailureSeverity::Strike,
            // About the other side of the pair or about the one request.
            _ => FailureSeverity::Nothing,
        },
    }
}

/// What it says about prefill and decode together that a decode went without the KV.
pub(super) fn of_pair(failure: &Failure) -> FailureSeverity {
    match failure {
        Failure::HelloRefused(_) => FailureSeverity::Final,
        Failure::Violation(_) => FailureSeverity::Strike,
        failure if failure.is_of_pair() => FailureSeverity::Failure,
        // About one of the two or about the one request.
        _ => FailureSeverity::Nothing,
    }
}

impl Health {
    /// Failures since the last success.
    pub(super) fn failures(&self) -> u32 {
        self.failures
    }

    /// True if a failure or a strike has come since the last success.
    pub(super) fn has_failed(&self) -> bool {
        self.failures > 0 || self.strikes > 0
    }

    /// True if it is kept out of traffic.
    pub(super) fn is_suspect(&self, now: Nanos) -> bool {
        now < self.until
    }

    /// Time until which it is kept out of traffic.
    pub(super) fn until(&self) -> Nanos {
        self.until
    }

    /// From which leg on a leg in flight is a trial that others wait for, if trials are wanted.
    pub(super) fn on_trial(&self) -> Option<LegId> {
        (self.failures >= 2).then_some(self.since)
    }

    /// The instance registered again.
    pub(super) fn registered(&mut self) {
        if self.failures <= 1 {
            self.until = Nanos::ZERO;
        }
    }

    /// What failed lately was the fault of others.
    pub(super) fn clear_strikes(&mut self) {
        self.strikes = 0;
        if self.struck {
            self.succeeded();
        }
    }

    /// A leg got through.
    pub(super) fn succeeded(&mut self) {
        if planted!("breaker-never-resets") {
            return;
        }
        self.failures = 0;
        self.strikes = 0;
        self.struck = false;
        self.until = Nanos::ZERO;
    }

    /// A leg failed; `next` is the number of the next leg to be sent anywhere. Returns until when
    /// there is to be no traffic if this changed.
    pub(super) fn failed(
        &mut self,
        now: Nanos,
        leg: LegId,
        next: LegId,
        weight: FailureSeverity,
        config: &RouterConfig,
    ) -> Option<Nanos> {
        match weight {
            FailureSeverity::Nothing => return None,
            FailureSeverity::Strike => {
                self.strikes += 1;
                if self.strikes < STRIKES_MAX {
                    return None;
                }
            }
            FailureSeverity::Failure | FailureSeverity::Final => {}
        }
        // Many legs fail with one outage; only those sent after it was known tell something new.
        if self.failures > 0 && leg < self.since && !planted!("one-outage-counts-often") {
            return None;
        }
        self.strikes = 0;
        self.struck = matches!(weight, FailureSeverity::Strike);
        self.failures = self.failures.saturating_add(1);
        self.since = next;
        let until = match weight {
            FailureSeverity::Final => Nanos::MAX,
            _ => {
                let doubled = config.suspicion.scale(1 << (self.failures - 1).min(32), 1);
                now + doubled.min(config.breaker_max)
            }
        };
        self.until = self.until.max(until);
        Some(self.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> RouterConfig {
        RouterConfig { suspicion: Nanos(100), breaker_max: Nanos(350), ..RouterConfig::default() }
    }

    fn fail(health: &mut Health, now: u64, leg: u64, next: u64) -> Option<Nanos> {
        health.failed(Nanos(now), LegId(leg), LegId(next), FailureSeverity::Failure, &config())
    }

    #[test]
    fn suspicion_doubles_up_to_the_limit() {
        let mut health = Health::default();
        assert_eq!(fail(&mut health, 0, 0, 1), Some(Nanos(100)));
        assert!(health.is_suspect(Nanos(99)) && !health.is_suspect(Nanos(100)));
        assert_eq!(health.on_trial(), None);
        assert_eq!(fail(&mut health, 200, 1, 2), Some(Nanos(400)));
        assert_eq!(health.on_trial(), Some(LegId(2)));
        assert_eq!(fail(&mut health, 500, 2, 3), Some(Nanos(850)));
        assert_eq!(fail(&mut health, 900, 3, 4), Some(Nanos(1250)));
        health.succeeded();
        assert!(!health.is_suspect(Nanos(900)));
        assert_eq!(fail(&mut health, 2000, 4, 5), Some(Nanos(2100)));
    }

    #[test]
    fn strikes_with_a_success_between_are_no_failure() {
        let mut health = Health::default();
        let strike = |health: &mut Health, now| {
            let (now, leg) = (Nanos(now), LegId(now));
            health.failed(now, leg, LegId(leg.0 + 1), FailureSeverity::Strike, &config())
        };
        for round in 0..u64::from(STRIKES_MAX) + 2 {
            for number in 1..u64::from(STRIKES_MAX) {
                assert_eq!(strike(&mut health, 10 * round + number), None);
            }
            health.succeeded();
        }
        let now = 100;
        for number in 1..u64::from(STRIKES_MAX) {
            assert_eq!(strike(&mut health, now + number), None);
        }
        assert!(strike(&mut health, now + u64::from(STRIKES_MAX)).is_some());
    }

    #[test]
    fn what_is_final_stays_so_until_a_leg_gets_through() {
        let mut health = Health::default();
        health.failed(Nanos(0), LegId(0), LegId(1), FailureSeverity::Final, &config());
        fail(&mut health, 1, 1, 2);
        assert!(health.is_suspect(Nanos(1_000_000)));
        health.succeeded();
        assert!(!health.is_suspect(Nanos(2)));
    }

    #[test]
    fn legs_of_one_outage_count_once() {
        let mut health = Health::default();
        assert!(fail(&mut health, 0, 3, 10).is_some());
        for leg in 4..10 {
            assert_eq!(fail(&mut health, 1, leg, 12), None);
        }
        assert!(!health.is_suspect(Nanos(100)));
    }

    #[test]
    fn registering_heals_the_first_failure_only() {
        let mut health = Health::default();
        fail(&mut health, 0, 0, 1);
        health.registered();
        assert!(!health.is_suspect(Nanos(1)));
        fail(&mut health, 1, 1, 2);
        health.registered();
        assert!(health.is_suspect(Nanos(2)));
    }

    #[test]
    fn single_request_failures_add_up() {
        let mut health = Health::default();
        let mut fail = |leg: u64, failure| {
            let weight = of_instance(&LegFailure::Instance(failure));
            health.failed(Nanos(0), LegId(leg), LegId(leg + 1), weight, &config()).is_some()
        };
        assert!(!fail(0, Failure::Stalled) && !fail(1, Failure::Stalled));
        assert!(!fail(2, Failure::PeerSilent));
        assert!(fail(3, Failure::Stalled));
    }
}
