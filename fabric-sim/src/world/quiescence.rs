//! The end of a run: healing, rest, audit.

use super::clients::ClientOutcome;
use super::event::SimEvent;
use super::liveness::{has_probes, switch_at};
use super::process::{SimInstance, SimProcess};
use super::stages::patience;
use super::{MachineId, ReadyStep, SimMachine, SimOptions, Simulation};
use crate::dma::SimDataPlane;
use crate::invariants::LivenessBounds;
use crate::observation::{InstanceMachine, Observation, SimProcessId};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::core::{Gauges, Machine};
use kvferry_scenarios::Run;
use kvferry_scenarios::engine::PoolGauges;
use kvferry_scenarios::run::LivenessMode;

/// Time between two looks at whether the run is over.
const INTERVAL: Nanos = Nanos::from_ms(50);

/// Without any progress for this long after the last fault, requests are not going to end.
const STUCK: Nanos = Nanos::from_secs(60);

/// Without any progress for this long, faults that have not hit yet are not going to.
const IDLE: Nanos = Nanos::from_secs(20);

/// Time in which instances of a fresh fleet have registered.
const SETTLED: Nanos = Nanos::from_secs(1);

/// Hosts that were cut off from each other for good remember what they have to tell for longer.
fn rest(run: &Run) -> Nanos {
    Nanos::from_secs(if run.hosts.is_empty() { 30 } else { 300 })
}

/// Where a run is on its way to the end.
#[derive(Debug)]
pub(super) struct Quiescence {
    /// The time that the scenario gives.
    within: Option<Nanos>,
    /// What leases, orphans and fences may hold after the last request.
    hold: Nanos,
    /// Without any progress for this long after the last fault, nothing is going to end.
    stuck: Nanos,
    progress: Nanos,
    /// The same without probes.
    served: Nanos,
    /// With a core: when the safety phase ends at the latest.
    switch: Nanos,
    /// From the end of the safety phase to the first probe; none without faults.
    grace: Option<Nanos>,
    probing: bool,
    lease: Nanos,
    /// When probes before left nothing behind.
    cleared: Nanos,
    healed: Option<Nanos>,
    /// Names of the instances in the core, once drawn.
    pub(super) core: Vec<String>,
    /// When the last request ended.
    ended: Option<Nanos>,
    /// Gauges were asked for and have come.
    audited: bool,
    pub(super) quiescent: bool,
    pub(super) over: bool,
}

impl Quiescence {
    pub(super) fn new(run: &Run, options: SimOptions) -> Quiescence {
        let limits = LivenessBounds::of(run);
        let grace = match options.fresh {
            true => Some(SETTLED),
            false => has_probes(run).then(|| limits.grace()),
        };
        Quiescence {
            within: run.expect.within,
            hold: limits.lease.scale(2, 1) + limits.silent + rest(run),
            stuck: STUCK + patience(run).scale(2, 1),
            progress: Nanos::ZERO,
            served: Nanos::ZERO,
            switch: switch_at(run),
            grace,
            probing: false,
            lease: limits.lease + Nanos::from_secs(1),
            cleared: Nanos::ZERO,
            healed: None,
            core: Vec::new(),
            ended: None,
            audited: false,
            quiescent: false,
            over: false,
        }
    }

    /// When something of the workload last came a step further.
    pub(super) fn served(&self) -> Nanos {
        self.served
    }

    /// When the liveness phase began.
    pub(super) fn settled_at(&self) -> Nanos {
        self.healed.unwrap_or(Nanos::MAX)
    }

    /// True in the liveness phase.
    pub(super) fn is_settled(&self) -> bool {
        self.healed.is_some()
    }

    /// When the next probe may be sent.
    pub(super) fn probe_at(&self) -> Option<Nanos> {
        Some((self.healed? + self.grace?).max(self.cleared))
    }

    /// A probe ended badly; its source may be held for another lease.
    pub(super) fn not_cleared(&mut self, now: Nanos) {
        self.cleared = now + self.lease;
    }

    /// The workload is done, what comes now are probes.
    pub(super) fn probing(&mut self) {
        self.probing = true;
    }

    pub(super) fn interval(&self) -> Nanos {
        INTERVAL
    }

    /// Bytes of an operation arrived.
    pub(super) fn moved(&mut self, now: Nanos) {
        self.progress = now;
    }

    /// A request or a step came a step further.
    pub(super) fn progressed(&mut self, now: Nanos) {
        self.progress = now;
        if !self.probing {
            self.served = now;
        }
    }
}

impl Simulation {
    /// Looks whether the run is over.
    pub(super) fn check_quiescence(&mut self) {
        let now = self.now;
        if self.quiescence.healed.is_none() && self.all_arrived() && self.safety_is_over() {
            self.quiescence.healed = Some(now);
            self.settle();
        }
        for index in 0..self.instances.len() as u16 {
            self.see_engine(index);
        }
        self.check_streams();
        if !self.is_served() || !self.all_arrived() || self.quiescence.healed.is_none() {
            self.quiescence.ended = None;
            self.quiescence.audited = false;
            if self.is_stuck() {
                return self.finish();
            }
            return self.queue.push(now + INTERVAL, SimEvent::Check);
        }
        if self.probe() {
            return;
        }
        let ended = *self.quiescence.ended.get_or_insert(now);
        if self.quiescence.audited && self.nothing_held() {
            self.quiescence.quiescent = true;
            return self.finish();
        }
        if now > ended.max(self.quiescence.progress) + self.quiescence.hold {
            return self.finish();
        }
        for slot in 0..self.machines.len() as u32 {
            if self.acts(slot) {
                self.ready.push_back(ReadyStep::Audit(slot));
            }
        }
        self.quiescence.audited = true;
        self.queue.push(now + INTERVAL, SimEvent::Check);
    }

    /// True if all requests have arrived, and all stages have begun.
    fn all_arrived(&self) -> bool {
        self.clients.all_arrived() && self.now >= self.stages.last
    }

    /// True if nobody waits for anything.
    fn is_served(&self) -> bool {
        self.clients.open == 0 && self.stages.open == 0
    }

    /// True if nothing more is to be expected of the faults: they are over, or nothing happens any
    /// more that they wait for. With a core they need not be over.
    fn safety_is_over(&self) -> bool {
        let idle = self.is_served() || self.now > self.quiescence.progress + IDLE;
        idle || match self.run.liveness {
            LivenessMode::Core => self.now >= self.quiescence.switch,
            LivenessMode::Heal => {
                self.observer.last_fault(self.now).is_none_or(|last| last < self.now)
            }
        }
    }

    fn is_stuck(&self) -> bool {
        let Some(healed) = self.quiescence.healed else { return false };
        match self.quiescence.within {
            Some(within) if self.now > within && !self.quiescence.probing => true,
            _ => self.now > self.quiescence.progress.max(healed) + self.quiescence.stuck,
        }
    }

    /// What a machine said of itself.
    pub(super) fn audited(&mut self, slot: u32, gauges: Gauges) {
        let actor = &mut self.machines[slot as usize];
        actor.gauges = gauges;
        actor.unasked = 0;
        self.see_gauges(slot);
    }

    fn see_gauges(&mut self, slot: u32) {
        let SimMachine { gauges, limits, .. } = self.machines[slot as usize];
        let Some((who, part)) = self.machine(slot) else { return };
        self.observer.observe(self.now, &Observation::Gauges { who, part, gauges, limits });
    }

    /// A deadline of a machine was due, and nothing came of it.
    pub(super) fn see_woken(&mut self, slot: u32) {
        let heard = self.machines[slot as usize].heard;
        let Some((who, part)) = self.machine(slot) else { return };
        self.observer.observe(self.now, &Observation::Woken { who, part, heard });
    }

    /// Whose machine it is; none if it has crashed, and has one more turn.
    pub(super) fn machine(&self, slot: u32) -> Option<(SimProcessId, InstanceMachine)> {
        let SimMachine { id, instance, .. } = &self.machines[slot as usize];
        let part = match *id {
            MachineId::Transfer(_, rank) => InstanceMachine::Transfer(rank),
            MachineId::Router | MachineId::Prefill(_) | MachineId::Decode(_) => {
                InstanceMachine::Core
            }
            MachineId::Payload(_) => InstanceMachine::Payload,
        };
        let Some(index) = *instance else { return Some((SimProcessId::ROUTER, part)) };
        self.instances[usize::from(index)].process.as_ref()?;
        Some((self.who(index), part))
    }

    /// The engine of an instance and its pools.
    fn see_engine(&mut self, index: u16) {
        let who = self.who(index);
        let process = self.instances[usize::from(index)].process.as_ref();
        let Some(engine) = process.and_then(|process| process.engine.as_ref()) else { return };
        for group in 0..self.run.model.groups.len() as u16 {
            let pool = engine.pool(usize::from(group));
            self.observer.observe(self.now, &Observation::Pool { who, group, pool });
        }
        let part = InstanceMachine::Engine;
        let (gauges, limits) = (engine.gauges(), engine.config().limits());
        self.observer.observe(self.now, &Observation::Gauges { who, part, gauges, limits });
    }

    /// True if no machine, engine or network has anything under way.
    fn nothing_held(&self) -> bool {
        self.envelopes_in_flight() == 0
            && self.operations_under_way() == 0
            && self.processes().all(|(_, process)| process.step.is_none())
            && self.held().next().is_none()
    }

    /// True if a machine lives and may make a step.
    pub(super) fn acts(&self, slot: u32) -> bool {
        let actor = &self.machines[slot as usize];
        actor.alive && !actor.instance.is_some_and(|index| self.is_frozen(index))
    }

    /// Processes that may make a step.
    fn processes(&self) -> impl Iterator<Item = (u16, &SimProcess)> {
        let all = (0..).zip(&self.instances).filter(|(index, _)| !self.is_frozen(*index));
        all.filter_map(|(index, instance)| Some((index, instance.process.as_ref()?)))
    }

    fn frozen(&self) -> impl Iterator<Item = &SimInstance> {
        let all = (0..).zip(&self.instances);
        all.filter(|(index, _)| self.is_frozen(*index)).map(|(_, instance)| instance)
    }

    /// Envelopes that somebody will open.
    fn envelopes_in_flight(&self) -> usize {
        let envelope = |entry: &&SimEvent| matches!(entry, SimEvent::Envelope(_));
        let held = self.frozen().map(|one| one.held.iter().filter(envelope).count());
        self.envelopes.len() - held.sum::<usize>()
    }

    /// Operations of those who can still do something about them.
    fn operations_under_way(&self) -> usize {
        let processes = self.frozen().filter_map(|one| one.process.as_ref());
        let planes: Vec<_> = processes.flat_map(|one| &one.ranks).map(SimDataPlane::ix).collect();
        self.dma.unsettled_but_of(&planes)
    }

    /// What machines and pools hold, for people.
    fn held(&self) -> impl Iterator<Item = String> {
        let slots = (0..self.machines.len() as u32).filter(|slot| self.acts(*slot));
        let machines = slots.filter_map(|slot| {
            let SimMachine { id, gauges, .. } = &self.machines[slot as usize];
            let Gauges { transfers, operations, held, quarantined, queued, entries, .. } = *gauges;
            let is_idle = [transfers, operations, held, quarantined, queued, entries] == [0; 6];
            (!is_idle).then(|| {
                format!(
                    "{id}: {transfers} transfers, {operations} operations, {held} held, \
                     {quarantined} quarantined, {queued} queued, {entries} entries"
                )
            })
        });
        let groups = 0..self.run.model.groups.len();
        let pools =
            self.processes().flat_map(move |one| groups.clone().map(move |group| (one, group)));
        machines.chain(pools.filter_map(|((index, process), group)| {
            let PoolGauges { held, quarantined, .. } = process.engine.as_ref()?.pool(group);
            (held + quarantined > 0).then(|| {
                format!("pool {group} of instance {index}: {held} held, {quarantined} quarantined")
            })
        }))
    }

    /// What was under way at the end, for people.
    pub(super) fn outstanding_work(&self) -> String {
        let (envelopes, operations) = (self.envelopes_in_flight(), self.operations_under_way());
        let under_way = format!("{envelopes} envelopes and {operations} operations under way");
        self.held().chain([under_way]).collect::<Vec<_>>().join("; ")
    }

    /// Ends the run: the last audit.
    pub(super) fn finish(&mut self) {
        if std::mem::replace(&mut self.quiescence.over, true) {
            return;
        }
        for index in 0..self.instances.len() as u16 {
            self.see_engine(index);
        }
        for slot in 0..self.machines.len() as u32 {
            // What a machine said before its last inputs is not what it says now.
            if self.acts(slot) && self.machines[slot as usize].unasked == 0 {
                self.see_gauges(slot);
            }
        }
        self.observer.finish(self.now, self.quiescence.quiescent);
    }

    /// The report of a run that is over.
    ///
    /// # Panics
    /// If the run is not over.
    pub fn into_report(mut self) -> super::RunReport {
        assert!(self.quiescence.over, "the run goes on");
        let ends = [ClientOutcome::Finished, ClientOutcome::Failed, ClientOutcome::Unknown];
        let [finished, failed, unknown] = ends.map(|end| self.clients.ended(&end));
        self.report([finished, failed, unknown])
    }
}
