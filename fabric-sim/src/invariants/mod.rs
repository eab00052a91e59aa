//! The invariants of the protocol, one file each, told every event that they are about at a cost
//! that is proportional to what the event touched. Sizes of tables are looked at now and then, and
//! at rest.
//!
//! [`Invariants`] tells each observation to those that want its kind, then follows it in the state
//! that they share. An invariant reports a [`Violation`] where it can be seen first, and the same
//! thing once.

mod bounded;
mod bounded_work;
mod caused;
mod credit;
mod deterministic;
mod every_request_ends;
mod fair;
mod forgets;
mod heals;
mod in_order;
mod isolation;
mod leg_choices;
mod leg_recipients;
mod legal;
mod no_early_reuse;
mod no_foreign_bytes;
mod no_growth;
mod no_leak;
mod no_livelock;
mod no_panic;
mod no_silent_success;
mod one_outcome;
mod payload_waits;
mod payloads;
mod prefix_estimates;
mod real_tries;
mod reclaim_bound;
mod right_recipient;
mod stable_source;
mod state;
#[cfg(test)]
mod testing;

pub use deterministic::{compare_clocks, compare_traces};

use crate::observation::{Observation, ObservationKind, SimRankId};
use kvferry_engine::core::config::CoreSettings;
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::lists::{FaultKind, InvariantId};
use kvferry_scenarios::run::{InstanceSettings, ProtocolSettings, Run};
use state::InvariantState;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

/// Observations between two audits.
const AUDIT: u64 = 4_096;

/// Violations that are kept; later ones are counted.
const KEPT: usize = 64;

/// Something that must not be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// What does not hold.
    pub id: InvariantId,
    pub at: Nanos,
    /// Instance, transfer, block, and what was expected.
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {:.6} s: {}", self.id, self.at.as_secs_f64(), self.text)
    }
}

/// Where violations are reported.
#[derive(Debug, Default)]
struct ViolationLog {
    list: Vec<Violation>,
    count: u64,
    /// What is reported once only, by who reports it.
    told: BTreeSet<(InvariantId, String)>,
}

/// When and in which state an invariant looks at something, and where it says what must not be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckContext<'a> {
    id: InvariantId,
    pub(crate) at: Nanos,
    /// The state before the observation.
    pub(crate) state: &'a InvariantState,
    found: &'a RefCell<ViolationLog>,
}

impl<'a> CheckContext<'a> {
    /// Reports a violation; later ones of many are only counted, and not even put into words.
    #[cold]
    pub(crate) fn report(self, text: impl FnOnce() -> String) {
        let mut found = self.found.borrow_mut();
        found.count += 1;
        if found.list.len() < KEPT {
            found.list.push(Violation { id: self.id, at: self.at, text: text() });
        }
    }

    /// The same, if it is the first of those with this key.
    #[cold]
    pub(crate) fn report_once(self, key: impl fmt::Debug, text: impl FnOnce() -> String) {
        let key = (self.id, format!("{key:?}"));
        let is_first = self.found.borrow_mut().told.insert(key);
        if is_first {
            self.report(text);
        }
    }

    /// The name of an instance, for texts.
    pub(crate) fn name(self, instance: u16) -> &'a str {
        self.state.name(instance)
    }

    /// A rank, for texts.
    pub(crate) fn rank(self, at: SimRankId) -> String {
        format!("{} rank {}", self.name(at.who.instance), at.rank)
    }
}

pub(crate) trait Invariant: fmt::Debug + Send {
    /// Kinds of observations that it wants.
    fn wants(&self) -> &'static [ObservationKind] {
        &[]
    }

    fn observe(&mut self, _now: CheckContext<'_>, _seen: &Observation<'_>) {}

    /// Looks at everything; called each few thousand observations, and last at the end.
    fn audit(&mut self, _now: CheckContext<'_>) {}

    /// The run is over; at rest nothing is under way.
    fn finish(&mut self, _now: CheckContext<'_>, _at_rest: bool) {}
}

/// Bounds that the settings of a run imply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LivenessBounds {
    /// A peer that is not heard for this long is down.
    pub(crate) silent: Nanos,
    /// A fence is answered within.
    pub(crate) fence: Nanos,
    /// Length of a source lease.
    pub(crate) lease: Nanos,
    /// How long a receiver waits for a prompt whose name was forgotten, or a prompt that is
    /// computed once more for its receivers; zero where as many are remembered as by default.
    pub(crate) orphan: Nanos,
    /// How long legs wait for an instance that drains and stands still; zero where none drains.
    pub(crate) drain: Nanos,
    /// Longest wait at the router for an instance.
    pub(crate) wait: Nanos,
    /// Longest time that the router keeps away from an instance that failed.
    pub(crate) breaker: Nanos,
    /// Dispatches of a leg beyond the first.
    pub(crate) retries: u32,
    /// When the run has to be at rest, if the file says it.
    pub(crate) within: Option<Nanos>,
}

impl LivenessBounds {
    pub(crate) fn of(run: &Run) -> LivenessBounds {
        // Of several settings the longest; what becomes is what was but for its geometry.
        let longest = |of: fn(&ProtocolSettings) -> Nanos| {
            run.instances.iter().map(|one| of(&one.protocol)).max().unwrap_or(Nanos::ZERO)
        };
        LivenessBounds {
            silent: longest(|set| set.channel.silent),
            fence: longest(|set| set.fence),
            lease: longest(|set| set.core.lease),
            orphan: longest(|ProtocolSettings { core, .. }| {
                let forgets = core.tombstones_max < CoreSettings::default().tombstones_max;
                if forgets { core.orphan.max(core.lease) } else { Nanos::ZERO }
            }),
            drain: match run
                .faults
                .iter()
                .any(|fault| matches!(fault.kind, FaultKind::Drain | FaultKind::RoleSwitch))
            {
                true => run.router.config.drain_max,
                false => Nanos::ZERO,
            },
            wait: run.router.config.wait_max,
            breaker: run.router.config.breaker_max,
            retries: run.router.config.retries_max,
            within: run.expect.within,
        }
    }

    /// After this time peers, breakers and registrations are what they should be.
    pub(crate) fn grace(&self) -> Nanos {
        self.end() + self.breaker
    }

    /// Within this time after the last fault everything ends that can end.
    pub(crate) fn end(&self) -> Nanos {
        self.silent + self.fence + Nanos::from_secs(1)
    }
}

/// True for a core that takes so few requests that prompts which wait for their lease are all.
pub(crate) fn takes_few(one: &InstanceSettings) -> bool {
    let core = &one.protocol.core;
    core.requests_max.min(core.receivers_max) < CoreSettings::default().requests_max
}

/// Number of leading hashes of a prompt that are in a set; zero without one.
fn leading(prefix: &[u64], among: Option<&BTreeSet<u64>>) -> usize {
    prefix.iter().take_while(|hash| among.is_some_and(|them| them.contains(hash))).count()
}

/// The models that requests name, by client; none for requests of the simulator's own.
pub(crate) fn models(run: &Run) -> Vec<Option<Arc<str>>> {
    run.requests.iter().map(|request| request.model.clone()).collect()
}

/// The lease that each instance grants, as its readers count it, so that clocks may differ.
pub(crate) fn usable(run: &Run) -> Vec<Nanos> {
    let drift = |one: &InstanceSettings| one.protocol.core.drift_percent.min(100);
    let drift = run.instances.iter().map(drift).min().unwrap_or(0);
    let usable =
        |one: &InstanceSettings| one.protocol.core.lease.scale(u64::from(100 - drift), 100);
    run.instances.iter().map(usable).collect()
}

/// All invariants that a run has to keep.
#[derive(Debug)]
pub struct Invariants {
    list: Vec<(InvariantId, Box<dyn Invariant>)>,
    /// Indices into the list, by kind of observation.
    wanted: Vec<Vec<u8>>,
    state: InvariantState,
    found: RefCell<ViolationLog>,
    seen: u64,
}

fn make(id: InvariantId, run: &Run) -> Box<dyn Invariant> {
    let limits = LivenessBounds::of(run);
    match id {
        InvariantId::NoForeignBytes => Box::new(no_foreign_bytes::NoForeignBytes),
        InvariantId::NoEarlyReuse => Box::new(no_early_reuse::NoEarlyReuse),
        InvariantId::NoLeak => Box::new(no_leak::NoLeak::default()),
        InvariantId::StableSource => Box::new(stable_source::StableSource::new(run)),
        InvariantId::OneOutcome => Box::new(one_outcome::OneOutcome::default()),
        InvariantId::NoSilentSuccess => Box::new(no_silent_success::NoSilentSuccess::default()),
        InvariantId::RightRecipient => Box::new(right_recipient::RightRecipient::new(run)),
        InvariantId::Bounded => Box::new(bounded::BoundedTables),
        InvariantId::Credit => Box::new(credit::CreditsRespected::default()),
        InvariantId::Legal => Box::new(legal::LegalTransitions::default()),
        InvariantId::Deterministic | InvariantId::NoWallClock => Box::new(deterministic::SameTrace),
        InvariantId::NoPanic => Box::new(no_panic::NoPanic::default()),
        InvariantId::NoGrowth => Box::new(no_growth::NoGrowth),
        InvariantId::InOrder => Box::new(in_order::InOrderDelivery::default()),
        InvariantId::RealTries => Box::new(real_tries::RealTries::new(run)),
        InvariantId::Caused => Box::new(caused::CausedFailures::new(run)),
        InvariantId::BoundedWork => Box::new(bounded_work::BoundedWork::new(run)),
        InvariantId::Fair => Box::new(fair::FairShare::new(run)),
        InvariantId::PayloadsArrive => Box::new(payloads::PayloadsArrive::new(run)),
        InvariantId::LegChoices => Box::new(leg_choices::LegChoices::new(run)),
        InvariantId::PrefixEstimates => Box::new(prefix_estimates::PrefixEstimates::new(run)),
        InvariantId::EveryRequestEnds => {
            Box::new(every_request_ends::EveryRequestEnds::new(limits, run))
        }
        InvariantId::Heals => Box::new(heals::HealsFastPath::new(run)),
        InvariantId::NoLivelock => Box::new(no_livelock::NoLivelock::new(run)),
        InvariantId::Isolation => Box::new(isolation::FaultIsolation::new(run)),
        InvariantId::ReclaimBound => Box::new(reclaim_bound::ReclaimBound::new(limits)),
        InvariantId::Forgets => Box::new(forgets::ForgetsFailures::default()),
    }
}

impl Invariants {
    /// Those that the run expects to hold; all if it names none.
    pub fn new(run: &Run) -> Invariants {
        let all = InvariantId::ALL;
        let hold = if run.expect.hold.is_empty() { all } else { &run.expect.hold };
        let list: Vec<_> = hold.iter().map(|id| (*id, make(*id, run))).collect();
        let mut wanted = vec![Vec::new(); ObservationKind::COUNT];
        for (index, (_, invariant)) in list.iter().enumerate() {
            for kind in invariant.wants() {
                wanted[*kind as usize].push(index as u8);
            }
        }
        let (state, found) = (InvariantState::new(run), RefCell::default());
        Invariants { list, wanted, state, found, seen: 0 }
    }

    #[inline]
    pub fn observe(&mut self, at: Nanos, seen: &Observation<'_>) {
        for index in &self.wanted[seen.kind() as usize] {
            let (id, invariant) = &mut self.list[usize::from(*index)];
            let now = CheckContext { id: *id, at, state: &self.state, found: &self.found };
            invariant.observe(now, seen);
        }
        self.state.follow(at, seen);
        self.seen += 1;
        if self.seen.is_multiple_of(AUDIT) {
            self.audit(at);
        }
    }

    fn audit(&mut self, at: Nanos) {
        self.each(at, |invariant, now| invariant.audit(now));
    }

    /// The run is over; `at_rest` says that nothing is under way any more.
    pub fn finish(&mut self, at: Nanos, at_rest: bool) {
        self.audit(at);
        self.each(at, |invariant, now| invariant.finish(now, at_rest));
    }

    fn each(&mut self, at: Nanos, ask: impl Fn(&mut dyn Invariant, CheckContext<'_>)) {
        for (id, invariant) in &mut self.list {
            let now = CheckContext { id: *id, at, state: &self.state, found: &self.found };
            ask(&mut **invariant, now);
        }
    }

    /// The first violations, in the order in which they were seen.
    pub fn violations(&self) -> Vec<Violation> {
        self.found.borrow().list.clone()
    }

    /// All violations, those that are not kept included.
    pub fn count(&self) -> u64 {
        self.found.borrow().count
    }
}
