//! The end of a run: healing, rest, audit.

use super::clients::End;
use super::{Actor, ActorId, Due, Simulation};
use crate::observe::{Observation, Part, Who};
use engine::core::time::Nanos;
use engine::core::{Gauges, Machine};
use scenarios::Run;

/// Time between two looks at whether the run is over.
const INTERVAL: Nanos = Nanos::from_ms(50);

/// Without any progress for this long after the last fault, requests are not going to end.
const STUCK: Nanos = Nanos::from_secs(60);

/// Without any progress for this long, faults that have not hit yet are not going to.
const IDLE: Nanos = Nanos::from_secs(20);

/// Where a run is on its way to the end.
#[derive(Debug)]
pub(super) struct Rest {
    /// The time that the scenario gives.
    within: Option<Nanos>,
    /// What leases, orphans and fences may hold after the last request.
    hold: Nanos,
    progress: Nanos,
    healed: Option<Nanos>,
    /// When the last request ended.
    ended: Option<Nanos>,
    /// Gauges were asked for and have come.
    audited: bool,
    pub(super) at_rest: bool,
    pub(super) over: bool,
}

impl Rest {
    pub(super) fn new(run: &Run) -> Rest {
        let lease = run.protocol.lease.unwrap_or(Nanos::from_secs(30));
        let silent = run.protocol.silent.unwrap_or(Nanos::from_secs(7));
        Rest {
            within: run.expect.within,
            hold: lease + lease + silent + Nanos::from_secs(30),
            progress: Nanos::ZERO,
            healed: None,
            ended: None,
            audited: false,
            at_rest: false,
            over: false,
        }
    }

    /// When something last came a step further.
    pub(super) fn progress(&self) -> Nanos {
        self.progress
    }

    pub(super) fn interval(&self) -> Nanos {
        INTERVAL
    }

    /// A request or a step came a step further.
    pub(super) fn progressed(&mut self, now: Nanos) {
        self.progress = now;
    }
}

impl Simulation {
    /// Looks whether the run is over.
    pub(super) fn check_rest(&mut self) {
        let now = self.now;
        if self.rest.healed.is_none() && self.clients.all_arrived() && self.faults_are_over() {
            self.rest.healed = Some(now);
            self.watch.heal(now);
            self.perform_actions();
        }
        for index in 0..self.instances.len() as u16 {
            self.see_engine(index);
        }
        if self.clients.open > 0 || !self.clients.all_arrived() || self.rest.healed.is_none() {
            self.rest.ended = None;
            self.rest.audited = false;
            if self.is_stuck() {
                return self.finish();
            }
            return self.queue.push(now + INTERVAL, super::Entry::Check);
        }
        let ended = *self.rest.ended.get_or_insert(now);
        if self.rest.audited && self.nothing_held() {
            self.rest.at_rest = true;
            return self.finish();
        }
        if now > ended.max(self.rest.progress) + self.rest.hold {
            return self.finish();
        }
        for slot in 0..self.actors.len() as u32 {
            if self.actors[slot as usize].alive {
                self.due.push_back(Due::Audit(slot));
            }
        }
        self.rest.audited = true;
        self.queue.push(now + INTERVAL, super::Entry::Check);
    }

    /// True if nothing more is to be expected of the faults: they are over, or nothing happens any
    /// more that they wait for.
    fn faults_are_over(&self) -> bool {
        let last = self.watch.last_fault(self.now);
        let idle = self.clients.open == 0 || self.now > self.rest.progress + IDLE;
        idle || last.is_none_or(|last| last < self.now)
    }

    fn is_stuck(&self) -> bool {
        let Some(healed) = self.rest.healed else { return false };
        match self.rest.within {
            Some(within) if self.now > within => true,
            _ => self.now > self.rest.progress.max(healed) + STUCK,
        }
    }

    /// What a machine said of itself.
    pub(super) fn audited(&mut self, slot: u32, gauges: Gauges) {
        let actor = &mut self.actors[slot as usize];
        actor.gauges = gauges;
        actor.unasked = 0;
        self.see_gauges(slot);
    }

    fn see_gauges(&mut self, slot: u32) {
        let Actor { id, instance, gauges, limits, .. } = self.actors[slot as usize];
        let process = |index: u16| self.instances[usize::from(index)].process.as_ref();
        if instance.is_some_and(|index| process(index).is_none()) {
            // It has crashed, and has one more turn.
            return;
        }
        let who = instance.map_or(Who::ROUTER, |instance| self.who(instance));
        let part = match id {
            ActorId::Transfer(_, rank) => Part::Transfer(rank),
            ActorId::Router | ActorId::Prefill(_) | ActorId::Decode(_) => Part::Core,
        };
        self.watch.see(self.now, &Observation::Gauges { who, part, gauges, limits });
    }

    /// The engine of an instance and its pools.
    fn see_engine(&mut self, index: u16) {
        let who = self.who(index);
        let Some(process) = &self.instances[usize::from(index)].process else { return };
        for group in 0..self.run.model.groups.len() as u16 {
            let pool = process.engine.pool(usize::from(group));
            self.watch.see(self.now, &Observation::Pool { who, group, pool });
        }
        let (part, engine) = (Part::Engine, &process.engine);
        let (gauges, limits) = (engine.gauges(), engine.config().limits());
        self.watch.see(self.now, &Observation::Gauges { who, part, gauges, limits });
    }

    /// True if no machine, engine or network has anything under way.
    fn nothing_held(&self) -> bool {
        let idle = |gauges: &Gauges| {
            let Gauges { transfers, operations, held, quarantined, queued, .. } = *gauges;
            [transfers, operations, held, quarantined, queued].iter().all(|count| *count == 0)
        };
        let machines = self.actors.iter().filter(|actor| actor.alive);
        let mut engines = self.instances.iter().filter_map(|instance| instance.process.as_ref());
        self.letters.len() == 0
            && self.dma.unsettled() == 0
            && machines.map(|actor| &actor.gauges).all(idle)
            && engines.all(|process| process.step.is_none())
            && self.pools_idle()
    }

    fn pools_idle(&self) -> bool {
        self.instances.iter().filter_map(|instance| instance.process.as_ref()).all(|process| {
            (0..self.run.model.groups.len()).all(|group| {
                let pool = process.engine.pool(group);
                pool.held == 0 && pool.quarantined == 0
            })
        })
    }

    /// What was under way at the end, for people.
    pub(super) fn what_is_left(&self) -> String {
        let mut left = Vec::new();
        for actor in self.actors.iter().filter(|actor| actor.alive) {
            let Gauges { transfers, operations, held, quarantined, queued, .. } = actor.gauges;
            if [transfers, operations, held, quarantined, queued] != [0; 5] {
                left.push(format!(
                    "{}: {transfers} transfers, {operations} operations, {held} held, \
                     {quarantined} quarantined, {queued} queued",
                    actor.id
                ));
            }
        }
        for (index, instance) in self.instances.iter().enumerate() {
            let Some(process) = &instance.process else { continue };
            for group in 0..self.run.model.groups.len() {
                let pool = process.engine.pool(group);
                if pool.held + pool.quarantined > 0 {
                    let (held, quarantined) = (pool.held, pool.quarantined);
                    left.push(format!(
                        "pool {group} of instance {index}: {held} held, {quarantined} quarantined"
                    ));
                }
            }
        }
        let (letters, operations) = (self.letters.len(), self.dma.unsettled());
        left.push(format!("{letters} letters and {operations} operations under way"));
        left.join("; ")
    }

    /// Ends the run: the last audit.
    pub(super) fn finish(&mut self) {
        if std::mem::replace(&mut self.rest.over, true) {
            return;
        }
        for index in 0..self.instances.len() as u16 {
            self.see_engine(index);
        }
        for slot in 0..self.actors.len() as u32 {
            if self.actors[slot as usize].alive {
                self.see_gauges(slot);
            }
        }
        self.watch.finish(self.now, self.rest.at_rest);
    }

    /// The report of a run that is over.
    ///
    /// # Panics
    /// If the run is not over.
    pub fn into_report(mut self) -> super::Report {
        assert!(self.rest.over, "the run goes on");
        let ends = [End::Finished, End::Failed, End::Unknown];
        let [finished, failed, unknown] = ends.map(|end| self.clients.ended(&end));
        self.report([finished, failed, unknown])
    }
}
