//! The fault engine: decides when the faults of a run fire and what they do to operations, frames
//! and legs; what happens to whole instances and links it asks of the world as [`FaultAction`]s.
//!
//! A fault with `on` fires at the nth matching event and each one after it while `times` lasts; a
//! fault with `chance` draws at each opportunity; a fault with `at` fires when
//! [`FaultScheduler::tick`] is called. What then has no object (an operation, frame or leg fault
//! without one at hand) hits the next that it concerns.
//!
//! Every decision is keyed by the fault's own key and by what it is about (sender and its count),
//! so that a fault more or less changes no decision of the others.
//!
//! Several faults on one operation: delays add up, failure wins over overtaken data and that over
//! none, `Never` over `Lost` over `Given`. On one frame: loss wins, delays add up.
//!
//! ```
//! use kvferry_sim::faults::FaultScheduler;
//!
//! let text = "about = 'one prompt'\nseed = 1\n[workload]\nmode = 'push'\nrequests = 1\n";
//! let scenario = kvferry_scenarios::parse("one.toml", text, ".".as_ref(), None)?;
//! let faults = FaultScheduler::new(&scenario.draw(1)?);
//! // Without faults there is nothing to wake up for, and nothing that did not happen.
//! assert!(faults.deadline().is_none() && faults.by_table().is_empty());
//! # Ok::<(), kvferry_scenarios::ScenarioError>(())
//! ```

mod action;
mod decision;
mod plan;
#[cfg(test)]
mod tests;
mod trigger;

pub use action::{
    ChanceHit, CoveragePhase, FaultAction, FaultHit, FaultSubject, LegDecision, ROUTER,
};

use kvferry_engine::core::message::Role;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::Placement;
use kvferry_scenarios::Opportunity;
use kvferry_scenarios::decide::{below, mix};
use kvferry_scenarios::lists::{FaultKind, TriggerEvent};
use kvferry_scenarios::run::{RaceOrder, Run};
use plan::{FaultPlan, TriggerCondition};
use std::collections::{BTreeMap, BTreeSet};
use trigger::FaultWindow;

/// Hits of faults with `chance` that are kept.
const CHANCE_HITS_MAX: usize = 4_096;

/// All faults of a run.
#[derive(Debug, Default)]
pub struct FaultScheduler {
    plans: Vec<FaultPlan>,
    /// Indices of those that wait for an event, by event.
    by_event: Vec<Vec<usize>>,
    of_ops: Vec<usize>,
    of_frames: Vec<usize>,
    of_legs: Vec<usize>,
    of_steps: Vec<usize>,
    of_memory: Vec<usize>,
    of_requests: Vec<usize>,
    /// Some fault wants to know when leases end.
    races: bool,
    /// Some fault has a chance.
    has_chances: bool,
    /// What is due when: plans that fire and windows that end.
    due: BTreeMap<(Nanos, u64), FaultDeadline>,
    serial: u64,
    windows: BTreeMap<u64, FaultWindow>,
    /// Pairs between which frames vanish, with the number of windows that say so.
    vanish: BTreeMap<(u16, u16), u32>,
    /// Instance, rank and delay.
    lags: Vec<(u16, u16, Nanos)>,
    /// Pairs whose lease a read races with, and when it ends.
    raced: BTreeMap<(u16, u16), Nanos>,
    roles: Vec<Role>,
    phases: Vec<CoveragePhase>,
    actions: Vec<FaultAction>,
    hits: Vec<FaultHit>,
    coverage: BTreeMap<(FaultKind, CoveragePhase), u64>,
    /// Events so far, by event and instance; counted where some fault has a chance.
    seen: BTreeMap<(TriggerEvent, u16), u32>,
    chance_hits: Vec<ChanceHit>,
    last: Nanos,
    healed: bool,
}

#[derive(Clone, Copy, Debug)]
enum FaultDeadline {
    Fire(usize),
    End(u64),
}

impl FaultScheduler {
    /// The faults of a run; none has fired.
    pub fn new(run: &Run) -> FaultScheduler {
        let mut faults = FaultScheduler {
            plans: run.faults.iter().map(|fault| FaultPlan::new(run, fault)).collect(),
            by_event: vec![Vec::new(); TriggerEvent::ALL.len()],
            roles: run.instances.iter().map(|instance| instance.role).collect(),
            phases: vec![CoveragePhase::Idle; run.instances.len()],
            ..FaultScheduler::default()
        };
        for index in 0..faults.plans.len() {
            faults.file(index);
        }
        faults
    }

    /// Enters a fault into the lists that it is looked up in.
    fn file(&mut self, index: usize) {
        let (kind, when) = (self.plans[index].kind(), self.plans[index].when.clone());
        match when {
            TriggerCondition::At(at) => self.schedule(at, FaultDeadline::Fire(index)),
            TriggerCondition::On(watch) => self.by_event[watch.event as usize].push(index),
            TriggerCondition::Chance(_) => self.has_chances = true,
        }
        match kind.schema().opportunity {
            Opportunity::Operation => self.of_ops.push(index),
            Opportunity::Lease => {
                self.of_ops.push(index);
                self.races = true;
            }
            Opportunity::Frame | Opportunity::Registration => self.of_frames.push(index),
            Opportunity::Leg => self.of_legs.push(index),
            Opportunity::Step => self.of_steps.push(index),
            Opportunity::Memory => self.of_memory.push(index),
            Opportunity::Request if !kind.is_static() => self.of_requests.push(index),
            Opportunity::Request | Opportunity::Run => {}
        }
        if kind == FaultKind::DoneOutOfOrder {
            self.of_ops.push(index);
        }
    }

    /// When planes have to count bytes as placed, for the faults of this run to be legal.
    pub fn placement(&self) -> Placement {
        let overtakes = |plan: &FaultPlan| match plan.kind() {
            FaultKind::NotifyOvertakes => true,
            FaultKind::DoneOutOfOrder => plan.fault.first != RaceOrder::Late,
            _ => false,
        };
        if self.plans.iter().any(overtakes) { Placement::OnQuiet } else { Placement::OnCompletion }
    }

    /// True if [`FaultSubject::lease`] is of use.
    pub fn races(&self) -> bool {
        self.races
    }

    fn schedule(&mut self, at: Nanos, due: FaultDeadline) {
        self.serial += 1;
        self.due.insert((at, self.serial), due);
    }

    /// When to call [`FaultScheduler::tick`] next.
    pub fn deadline(&self) -> Option<Nanos> {
        self.due.first_key_value().map(|((at, _), _)| *at)
    }

    /// Fires and ends what is due.
    pub fn tick(&mut self, now: Nanos) {
        while let Some(entry) = self.due.first_entry().filter(|entry| entry.key().0 <= now) {
            match entry.remove() {
                FaultDeadline::Fire(index) if self.plans[index].spend() => {
                    self.fire(now, index, None)
                }
                FaultDeadline::Fire(_) => {}
                FaultDeadline::End(serial) => self.close_window(now, serial),
            }
        }
    }

    /// Something happened. Operations, frames and legs that are sent are told by
    /// [`FaultScheduler::decide_op`], [`FaultScheduler::decide_frame`] and
    /// [`FaultScheduler::decide_leg`] instead.
    pub fn on_event(&mut self, now: Nanos, event: TriggerEvent, spot: &FaultSubject) {
        self.follow(event, spot);
        if self.has_chances {
            *self.seen.entry((event, spot.from)).or_default() += 1;
        }
        for at in 0..self.by_event[event as usize].len() {
            let index = self.by_event[event as usize][at];
            if self.plans[index].matches_event(event, spot) {
                self.fire(now, index, Some(spot));
            }
        }
        match event {
            TriggerEvent::StepStarted => {
                for at in 0..self.of_steps.len() {
                    let index = self.of_steps[at];
                    if self.plans[index].target.has(spot.from) {
                        self.draw(now, index, spot);
                    }
                }
            }
            TriggerEvent::RequestArrived => {
                for at in 0..self.of_requests.len() {
                    self.draw(now, self.of_requests[at], spot);
                }
            }
            _ => {}
        }
    }

    fn draw(&mut self, now: Nanos, index: usize, spot: &FaultSubject) {
        if self.chances(index, spot) {
            self.fire(now, index, Some(spot));
        }
    }

    /// Draws for an opportunity; true if the fault fires now.
    fn chances(&mut self, index: usize, spot: &FaultSubject) -> bool {
        let plan = &mut self.plans[index];
        if !plan.chances(spot) {
            return false;
        }
        let event = match plan.kind().schema().opportunity {
            Opportunity::Operation | Opportunity::Lease => TriggerEvent::OpPosted,
            Opportunity::Frame | Opportunity::Registration => TriggerEvent::FrameSent,
            Opportunity::Leg => TriggerEvent::LegDispatched,
            Opportunity::Step => TriggerEvent::StepStarted,
            Opportunity::Request => TriggerEvent::RequestArrived,
            // No event comes where memory is registered.
            Opportunity::Memory | Opportunity::Run => return true,
        };
        if let Some(nth) = self.seen.get(&(event, spot.from)).copied()
            && self.chance_hits.len() < CHANCE_HITS_MAX
        {
            self.chance_hits.push(ChanceHit {
                key: plan.fault.key,
                event,
                from: spot.from,
                nth,
                lasts: plan.draw("lasts", plan.fault.lasts),
                delay: plan.draw("delay", plan.fault.delay),
            });
        }
        true
    }

    /// Follows the transfers of each instance.
    fn follow(&mut self, event: TriggerEvent, spot: &FaultSubject) {
        let phase = match event {
            TriggerEvent::TransferAnnounced => CoveragePhase::Announced,
            TriggerEvent::TransferGranted => CoveragePhase::Granted,
            TriggerEvent::TransferWriting | TriggerEvent::TransferReading => CoveragePhase::Moving,
            TriggerEvent::TransferDelivered => CoveragePhase::Delivered,
            TriggerEvent::TransferEnded => CoveragePhase::Idle,
            _ => return,
        };
        for instance in [Some(spot.from), spot.to].into_iter().flatten() {
            if let Some(slot) = self.phases.get_mut(usize::from(instance)) {
                *slot = phase;
            }
        }
    }

    fn act(&mut self, action: FaultAction) {
        self.actions.push(action);
    }

    /// Counts a fault that hit.
    fn hit(&mut self, now: Nanos, index: usize, from: Option<u16>, to: Option<u16>) {
        self.last = self.last.max(now);
        let plan = &mut self.plans[index];
        plan.hits += 1;
        let kind = plan.kind();
        let phase = |instance: Option<u16>| {
            instance.and_then(|instance| self.phases.get(usize::from(instance)).copied())
        };
        let phase = phase(from).max(phase(to)).unwrap_or_default();
        *self.coverage.entry((kind, phase)).or_default() += 1;
        self.hits.push(FaultHit { kind, from, to });
    }

    /// What the world has to do since the last call.
    pub fn take_actions(&mut self, into: &mut Vec<FaultAction>) {
        into.append(&mut self.actions);
    }

    /// What hit since the last call.
    pub fn take_hits(&mut self, into: &mut Vec<FaultHit>) {
        into.append(&mut self.hits);
    }

    /// True if there is something to take.
    pub fn has_output(&self) -> bool {
        !self.actions.is_empty() || !self.hits.is_empty()
    }

    /// How often each kind hit in each phase of the transfers concerned.
    pub fn coverage(&self) -> &BTreeMap<(FaultKind, CoveragePhase), u64> {
        &self.coverage
    }

    /// How often the faults of each table of the file hit, by line and kind.
    pub fn by_table(&self) -> BTreeMap<(u32, FaultKind), u64> {
        let mut tables = BTreeMap::new();
        for plan in &self.plans {
            *tables.entry((plan.fault.line, plan.kind())).or_default() += plan.hits;
        }
        tables
    }

    /// Hits of faults with `chance`, the first few.
    pub fn chance_hits(&self) -> &[ChanceHit] {
        &self.chance_hits
    }

    /// When the last fault hit or ended; `now` while a transient one lasts or is still to come.
    pub fn last_fault(&self, now: Nanos) -> Nanos {
        let lasting = self.windows.values().any(|window| !window.for_good);
        let coming = !self.healed && self.plans.iter().any(FaultPlan::is_pending);
        if lasting || coming { self.last.max(now) } else { self.last }
    }

    /// Ends everything transient; nothing fires any more. What was done for good stays.
    pub fn heal(&mut self, now: Nanos) {
        self.end_windows(now, |window| !window.for_good);
    }

    /// Nothing fires any more. What lasts among members of the core and the router ends, also if it
    /// was for good; everything else that lasts is for good from now on.
    pub fn settle(&mut self, now: Nanos, core: &BTreeSet<u16>) {
        let inside = |end: Option<u16>| end.is_none_or(|end| end == ROUTER || core.contains(&end));
        self.end_windows(now, |window| inside(window.pair.0) && inside(window.pair.1));
    }

    fn end_windows(&mut self, now: Nanos, ends: impl Fn(&FaultWindow) -> bool) {
        self.healed = true;
        for plan in &mut self.plans {
            plan.end();
        }
        self.due.clear();
        let over = self.windows.iter().filter(|(_, window)| ends(window));
        let over: Vec<u64> = over.map(|(serial, _)| *serial).collect();
        for serial in over {
            self.close_window(now, serial);
        }
        for window in self.windows.values_mut() {
            window.for_good = true;
        }
    }

    /// A drawn instance of a role, for faults that name none.
    fn any_instance(&self, index: usize, role: Option<Role>, salt: u64) -> Option<u16> {
        let fits = |at: &usize| role.is_none_or(|role| self.roles[*at] == role);
        let count = (0..self.roles.len()).filter(fits).count() as u64;
        let uniform = mix(self.plans[index].key("any", &FaultSubject::default()).get(), salt);
        let at = (0..self.roles.len()).filter(fits).nth(below(uniform, count) as usize)?;
        Some(at as u16)
    }
}
