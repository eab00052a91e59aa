//! Faults injected into real transfers of a process: the `fabric.*` kinds of the scenario language
//! that make sense without a simulated network.
//!
//! A transfer counts as `op.posted` once it is taken; one that is refused for a full queue is not.
//! Of several faults that hit the same transfer the first of the file wins.

use crate::decide::{DecisionKey, chance};
use crate::error::ScenarioError;
use crate::fault::{DrawnFault, DurationRange, FaultTrigger};
use crate::file::FaultFile;
use crate::lists::{FaultKind, TriggerEvent};
use kvferry_engine::core::Nanos;
use std::convert::Infallible;
use std::path::Path;

/// Environment variable that names the file, for every process that injects faults.
pub const VARIABLE: &str = "KVFERRY_FAULTS";

/// What becomes of a transfer that a fault hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedEffect {
    /// Reported as done, nothing moves.
    NoCopy,
    /// It arrives, and its end is reported otherwise.
    Reported(ReportFault),
    /// It fails, nothing moves.
    Fails,
    /// It fails, and so does everything else between the two engines, for good.
    KillsPeer,
    /// Reported as done at once, it moves this much later.
    MovedLate(Nanos),
    /// Reported as failed at once, it moves all the same this much later.
    FailsAndMoves(Nanos),
}

/// How the end of a transfer is reported that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportFault {
    Late(Nanos),
    AsFailed,
    Never,
}

/// The faults of a file, and what they have done so far.
#[derive(Debug, Default)]
pub struct FaultInjector {
    seed: u64,
    plans: Vec<FaultRule>,
    posted: u64,
}

#[derive(Debug)]
struct FaultRule {
    fault: DrawnFault<Infallible>,
    left: u32,
    fired: u64,
    /// For `fabric.queue_full`: until when the queue is full.
    full_until: Nanos,
}

impl FaultInjector {
    /// Every kind that can be injected into the transfers of a process.
    pub const KINDS: [FaultKind; 9] = [
        FaultKind::QpError,
        FaultKind::AckLost,
        FaultKind::CompletionLost,
        FaultKind::QueueFull,
        FaultKind::CompletionReorder,
        FaultKind::NotifyOvertakes,
        FaultKind::LateLanding,
        FaultKind::SiblingFailure,
        FaultKind::NoCopy,
    ];

    /// Loads a file of faults of these kinds, which are some of [`FaultInjector::KINDS`].
    ///
    /// # Errors
    /// With file, line, what cannot be injected and what can.
    pub fn load(path: &Path, kinds: &[FaultKind]) -> Result<FaultInjector, ScenarioError> {
        FaultInjector::new(&FaultFile::load(path)?, kinds)
    }

    fn new(file: &FaultFile, kinds: &[FaultKind]) -> Result<FaultInjector, ScenarioError> {
        let mut plans = Vec::new();
        for fault in file.faults() {
            if !kinds.contains(&fault.kind) {
                let what = format!("{} cannot be injected into real transfers", fault.kind);
                let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
                return Err(file.error(
                    fault.line,
                    what,
                    &format!("use one of {}", names.join(", ")),
                ));
            }
            if let FaultTrigger::On { event, .. } = &fault.trigger
                && *event != TriggerEvent::OpPosted
            {
                let what = format!("{event} is not seen by this process");
                return Err(file.error(
                    fault.line,
                    what,
                    "wait for op.posted, or use `at` or `chance`",
                ));
            }
            plans.push(FaultRule { left: fault.times, fault, fired: 0, full_until: Nanos::ZERO });
        }
        Ok(FaultInjector { seed: file.seed(), plans, posted: 0 })
    }

    /// True if the queue is made out to be full.
    pub fn queue_full(&self, now: Nanos) -> bool {
        self.plans.iter().any(|plan| now < plan.full_until)
    }

    /// Counts a transfer that is taken; what happens to it.
    pub fn posted(&mut self, now: Nanos) -> Option<InjectedEffect> {
        self.posted += 1;
        let (seed, nth) = (self.seed, self.posted);
        let mut hit = None;
        for plan in &mut self.plans {
            if plan.fires(seed, nth, now) {
                let effect = plan.effect(seed, now);
                hit = hit.or(effect);
            }
        }
        hit
    }
}

impl FaultRule {
    fn fires(&mut self, seed: u64, nth: u64, now: Nanos) -> bool {
        let key =
            DecisionKey::new(seed, "fault.drill").part("chance").actor(self.fault.key).nth(nth);
        let fires = self.left > 0
            && match &self.fault.trigger {
                FaultTrigger::At(at) => now >= *at,
                FaultTrigger::On { nth: first, .. } => nth >= u64::from(*first),
                FaultTrigger::Chance(ppm) => chance(key.get(), *ppm),
            };
        if fires {
            self.left -= 1;
            self.fired += 1;
        }
        fires
    }

    fn effect(&mut self, seed: u64, now: Nanos) -> Option<InjectedEffect> {
        let key = |name| {
            let key = DecisionKey::new(seed, "fault.drill").part(name);
            key.actor(self.fault.key).nth(self.fired)
        };
        let draw = |name, span: Option<DurationRange>| {
            span.map_or(Nanos::ZERO, |span| span.draw(&key(name)))
        };
        let delay = draw("delay", self.fault.delay);
        match self.fault.kind {
            FaultKind::QpError => Some(InjectedEffect::KillsPeer),
            FaultKind::AckLost => Some(InjectedEffect::Reported(ReportFault::AsFailed)),
            FaultKind::CompletionLost => Some(InjectedEffect::Reported(ReportFault::Never)),
            FaultKind::SiblingFailure => Some(InjectedEffect::Fails),
            FaultKind::NoCopy => Some(InjectedEffect::NoCopy),
            FaultKind::CompletionReorder => {
                Some(InjectedEffect::Reported(ReportFault::Late(delay)))
            }
            FaultKind::NotifyOvertakes => Some(InjectedEffect::MovedLate(delay)),
            FaultKind::LateLanding => Some(InjectedEffect::FailsAndMoves(delay)),
            _ => {
                self.full_until = now + draw("lasts", self.fault.lasts);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [FaultKind; 4] =
        [FaultKind::NoCopy, FaultKind::AckLost, FaultKind::CompletionReorder, FaultKind::QueueFull];

    fn faults(text: &str) -> FaultInjector {
        let file = FaultFile::parse("f.toml", text).unwrap_or_else(|why| panic!("{why}"));
        FaultInjector::new(&file, &KINDS).unwrap_or_else(|why| panic!("{why}"))
    }

    #[test]
    fn a_fault_hits_the_nth_transfer_and_those_behind_it_while_it_lasts() {
        let mut faults = faults(
            "[[fault]]\nkind = \"fabric.no_copy\"\non = { event = \"op.posted\", nth = 2 }\n\
             times = 2\n[[fault]]\nkind = \"fabric.ack_lost\"\nat = \"5us\"\n",
        );
        let hits: Vec<_> = (0..6).map(|us| faults.posted(Nanos::from_us(us))).collect();
        let no_copy = Some(InjectedEffect::NoCopy);
        let ack_lost = Some(InjectedEffect::Reported(ReportFault::AsFailed));
        assert_eq!(hits, [None, no_copy, no_copy, None, None, ack_lost]);
    }

    #[test]
    fn chance_is_the_same_again_and_is_met() {
        let text = "[[fault]]\nkind = \"fabric.reorder\"\nchance = 0.25\ndelay = \"1ms..2ms\"\n";
        let draws = || {
            let mut faults = faults(text);
            (0..4_000).map(|_| faults.posted(Nanos::ZERO)).collect::<Vec<_>>()
        };
        let first = draws();
        assert_eq!(first, draws());
        let late: Vec<_> = first.iter().flatten().collect();
        assert!((900..1_100).contains(&late.len()), "{}", late.len());
        let (low, high) = (Nanos::from_ms(1), Nanos::from_ms(2));
        for effect in late {
            assert!(
                matches!(effect, InjectedEffect::Reported(ReportFault::Late(by)) if (low..=high).contains(by))
            );
        }
    }

    #[test]
    fn a_full_queue_is_full_for_a_while() {
        let mut faults = faults(
            "[[fault]]\nkind = \"fabric.queue_full\"\non = { event = \"op.posted\", nth = 1 }\n\
             lasts = \"3us\"\n",
        );
        assert!(!faults.queue_full(Nanos::ZERO));
        assert_eq!(faults.posted(Nanos::from_us(1)), None, "the one that fills it is taken");
        assert!(faults.queue_full(Nanos::from_us(3)));
        assert!(!faults.queue_full(Nanos::from_us(4)));
    }

    #[test]
    fn what_cannot_be_injected_is_refused_with_its_line() {
        let refused = |text: &str| {
            let file = FaultFile::parse("f.toml", text).unwrap_or_else(|why| panic!("{why}"));
            FaultInjector::new(&file, &KINDS).expect_err("refused").to_string()
        };
        let wire = refused("seed = 1\n[[fault]]\nkind = \"wire.loss\"\nchance = 1\n");
        assert!(wire.contains("f.toml:3") && wire.contains("fabric.no_copy"), "{wire}");
        let event =
            refused("[[fault]]\nkind = \"fabric.no_copy\"\non = { event = \"op.landed\" }\n");
        assert!(event.contains("f.toml:2") && event.contains("op.posted"), "{event}");
    }
}
