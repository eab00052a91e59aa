//! A fault of the run, prepared: whom it concerns, when it fires, what it has done so far.

use super::action::{FaultSubject, ROUTER};
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::decide::{DecisionKey, chance, mix};
use kvferry_scenarios::lists::{FaultKind, MessageName, TriggerEvent};
use kvferry_scenarios::run::{DurationRange, FaultTrigger, InjectedFault, InstanceSettings, Run};

/// Instances that a name stands for: indices, ascending, [`ROUTER`] for the router; any if none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InstanceFilter(pub(super) Option<Vec<u16>>);

impl InstanceFilter {
    fn of(name: Option<&String>, instances: &[InstanceSettings]) -> InstanceFilter {
        InstanceFilter(name.map(|name| match name.as_str() {
            "router" => vec![ROUTER],
            name => {
                let fits = |one: &InstanceSettings| one.name == name || one.host == name;
                let found = (0..).zip(instances).filter(|(_, one)| fits(one));
                found.map(|(index, _)| index).collect()
            }
        }))
    }

    pub(super) fn has(&self, instance: u16) -> bool {
        self.has_or_none(Some(instance))
    }

    pub(super) fn has_or_none(&self, instance: Option<u16>) -> bool {
        let is = |these: &Vec<u16>| instance.is_some_and(|one| these.contains(&one));
        self.0.as_ref().is_none_or(is)
    }

    /// The named instances; `default` if it is any.
    pub(super) fn or(&self, default: Option<u16>) -> Vec<u16> {
        self.0.clone().unwrap_or_else(|| default.into_iter().collect())
    }
}

/// What `on` waits for.
#[derive(Clone, Debug)]
pub(super) struct EventMatcher {
    pub(super) event: TriggerEvent,
    from: InstanceFilter,
    to: InstanceFilter,
    message: Option<MessageName>,
    nth: u32,
    seen: u32,
}

#[derive(Clone, Debug)]
pub(super) enum TriggerCondition {
    At(Nanos),
    On(EventMatcher),
    Chance(u32),
}

/// One fault of the run.
#[derive(Clone, Debug)]
pub(super) struct FaultPlan {
    pub(super) fault: InjectedFault,
    pub(super) target: InstanceFilter,
    pub(super) from: InstanceFilter,
    pub(super) to: InstanceFilter,
    pub(super) when: TriggerCondition,
    /// Times that it can still fire.
    left: u32,
    /// Times that it has fired and waits for something to hit.
    armed: u32,
    /// Times that it has fired.
    fired: u64,
    /// How often it has hit something.
    pub(super) hits: u64,
    seed: u64,
}

impl FaultPlan {
    pub(super) fn new(run: &Run, fault: &InjectedFault) -> FaultPlan {
        let names = |name: &Option<String>| InstanceFilter::of(name.as_ref(), &run.instances);
        let when = match &fault.trigger {
            FaultTrigger::At(at) => TriggerCondition::At(*at),
            FaultTrigger::Chance(ppm) => TriggerCondition::Chance(*ppm),
            FaultTrigger::On { event, from, to, message, nth } => {
                TriggerCondition::On(EventMatcher {
                    event: *event,
                    from: names(from),
                    to: names(to),
                    message: *message,
                    nth: *nth,
                    seen: 0,
                })
            }
        };
        FaultPlan {
            target: names(&fault.target),
            from: names(&fault.from),
            to: names(&fault.to),
            when,
            left: fault.times,
            armed: 0,
            fired: 0,
            hits: 0,
            seed: run.seed,
            fault: fault.clone(),
        }
    }

    pub(super) fn kind(&self) -> FaultKind {
        self.fault.kind
    }

    /// A decision about part `name` of this fault, keyed by what it is about.
    pub(super) fn key(&self, name: &str, spot: &FaultSubject) -> DecisionKey {
        let place = u64::from(spot.from) << 16 | u64::from(spot.rank);
        let keyed = DecisionKey::new(self.seed, "fault.engine").part(name);
        keyed.actor(mix(self.fault.key, place)).nth(spot.nth)
    }

    /// Draws a span of this fault, keyed by how often it has fired.
    pub(super) fn draw(&self, name: &str, span: Option<DurationRange>) -> Option<Nanos> {
        let keyed = DecisionKey::new(self.seed, "fault.engine").part(name);
        span.map(|span| span.draw(&keyed.actor(self.fault.key).nth(self.fired)))
    }

    /// `delay`, drawn for this time.
    pub(super) fn delay(&self) -> Nanos {
        self.draw("delay", self.fault.delay).unwrap_or(Nanos::ZERO)
    }

    /// Even or odd, drawn for this time.
    pub(super) fn coin(&self) -> bool {
        let keyed = DecisionKey::new(self.seed, "fault.engine").part("coin");
        keyed.actor(self.fault.key).nth(self.fired).get() & 1 == 1
    }

    /// True if an operation, frame, leg or step is one that this fault is about.
    pub(super) fn concerns(&self, spot: &FaultSubject) -> bool {
        self.from.has(spot.from)
            && self.to.has_or_none(spot.to)
            && (self.target.has(spot.from) || self.target.has_or_none(spot.to))
            && (self.fault.message.is_none() || self.fault.message == spot.message)
    }

    /// Counts an event; true if the fault fires now.
    pub(super) fn matches_event(&mut self, event: TriggerEvent, spot: &FaultSubject) -> bool {
        let TriggerCondition::On(watch) = &mut self.when else { return false };
        let fits = watch.event == event
            && watch.from.has(spot.from)
            && watch.to.has_or_none(spot.to)
            && (watch.message.is_none() || watch.message == spot.message);
        if !fits {
            return false;
        }
        watch.seen = watch.seen.saturating_add(1);
        watch.seen >= watch.nth && self.spend()
    }

    /// Draws for an opportunity; true if the fault fires now.
    pub(super) fn chances(&mut self, spot: &FaultSubject) -> bool {
        let TriggerCondition::Chance(ppm) = self.when else { return false };
        self.left > 0 && chance(self.key("chance", spot).get(), ppm) && self.spend()
    }

    /// Takes one of the times that it can fire.
    pub(super) fn spend(&mut self) -> bool {
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        self.fired += 1;
        true
    }

    /// It has fired, and hits the next thing that it concerns.
    pub(super) fn arm(&mut self) {
        self.armed += 1;
    }

    /// True if it has waited for this; it waits no more.
    pub(super) fn disarm(&mut self) -> bool {
        let armed = self.armed > 0;
        self.armed -= u32::from(armed);
        armed
    }

    /// It never fires again.
    pub(super) fn end(&mut self) {
        self.left = 0;
        self.armed = 0;
    }

    /// True if it has yet to fire at a time or an input, or to hit something.
    pub(super) fn is_pending(&self) -> bool {
        let comes = match &self.when {
            TriggerCondition::At(_) => true,
            TriggerCondition::On(watch) => watch.event.is_input(),
            TriggerCondition::Chance(_) => false,
        };
        self.armed > 0 || (self.left > 0 && comes)
    }
}
