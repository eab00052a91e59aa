//! The liveness phase: a core is healed and stays connected, the rest stays as it is, and at last
//! requests of the world's own show whether the fast path is back.

use super::Simulation;
use super::process::SimInstance;
use super::stages::last_start;
use crate::abilities::fits;
use crate::keyed_rng::KeyedRng;
use crate::observation::Observation;
use kvferry_engine::core::message::Role;
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::decide::kind;
use kvferry_scenarios::run::{InstanceSettings, LivenessMode, Run};
use std::collections::BTreeSet;

/// Which pair of the core fits in any case.
const PAIR: u64 = kind("liveness.pair");

/// Which others are in the core.
const MEMBER: u64 = kind("liveness.member");

/// How long the safety phase goes on when the last request has come.
const SWITCH: u64 = kind("liveness.switch");

/// Times to draw from for [`SWITCH`]. The longer ones are as long as a silence that makes a peer
/// down, so that recovery is met half-way.
const SWITCHES: [Nanos; 6] = [
    Nanos::from_ms(50),
    Nanos::from_ms(200),
    Nanos::from_ms(500),
    Nanos::from_secs(2),
    Nanos::from_secs(5),
    Nanos::from_secs(8),
];

/// When a run with a core changes to the liveness phase, if nothing ends it earlier.
pub(super) fn switch_at(run: &Run) -> Nanos {
    let drawn = KeyedRng::new(run.seed).below(SWITCH, 0, 0, SWITCHES.len() as u64);
    let last = run.requests.last().map_or(Nanos::ZERO, |request| request.arrival);
    last.max(last_start(run)) + SWITCHES[drawn as usize]
}

/// True if requests of the world's own end the run: if there are faults to recover from, and room
/// for a prompt that is not empty.
pub(super) fn has_probes(run: &Run) -> bool {
    let fits = run.longest().is_some_and(|longest| longest > 1);
    run.probes && !run.faults.is_empty() && (fits || !run.hosts.is_empty())
}

impl Simulation {
    /// Ends the safety phase.
    pub(super) fn settle(&mut self) {
        let core = match self.run.liveness {
            LivenessMode::Heal => {
                self.observer.faults.heal(self.now);
                let returns = |at: &u16| {
                    let one = &self.instances[usize::from(*at)];
                    one.process.is_some() || one.returns
                };
                (0..self.instances.len() as u16).filter(returns).collect()
            }
            LivenessMode::Core => {
                let core = self.draw_core();
                self.observer.faults.settle(self.now, &core);
                core
            }
        };
        self.perform_actions();
        if self.run.liveness == LivenessMode::Core {
            for index in 0..self.instances.len() as u16 {
                match core.contains(&index) {
                    true => self.start(index),
                    false => {
                        self.give_up_switch(index);
                        self.instances[usize::from(index)].returns = false;
                    }
                }
            }
        }
        let members: Vec<u16> = core.iter().copied().collect();
        let frozen: Vec<u16> =
            (0..self.instances.len() as u16).filter(|index| self.is_frozen(*index)).collect();
        let broken: Vec<_> = self.observer.faults.lasting().collect();
        let settled = Observation::Settled { core: &members, frozen: &frozen, broken: &broken };
        self.observer.observe(self.now, &settled);
        self.observer.observe(self.now, &Observation::Healed);
        // Without faults there is no other phase.
        if self.run.faults.is_empty() && !self.options.fresh {
            return;
        }
        let name = |index: &u16| self.run.instances[usize::from(*index)].name.clone();
        let names: Vec<String> = members.iter().map(name).collect();
        self.tracer.settled(self.now, &names);
        self.quiescence.core = names;
    }

    /// Pairs of the core that fit each other, none of which is frozen.
    pub(super) fn whole_pairs(&self) -> Vec<(u16, u16)> {
        let is_member = |index: &u16| {
            let name = &self.run.instances[usize::from(*index)].name;
            let instance = &self.instances[usize::from(*index)];
            self.quiescence.core.contains(name) && instance.process.is_some() && !instance.paused
        };
        let members: Vec<u16> = (0..self.instances.len() as u16).filter(is_member).collect();
        self.fitting_pairs(&members, |index| &self.instances[usize::from(index)].spec)
    }

    /// Pairs of these instances that fit each other in these shapes, the prefill first.
    fn fitting_pairs<'a>(
        &self,
        members: &[u16],
        spec: impl Fn(u16) -> &'a InstanceSettings,
    ) -> Vec<(u16, u16)> {
        let pairs = members.iter().flat_map(|p| members.iter().map(|d| (*p, *d)));
        let is_fit = |(p, d): &(u16, u16)| {
            spec(*p).role == Role::Prefill
                && self.parts(*p) != self.parts(*d)
                && fits(&self.run.model, spec(*p), spec(*d))
        };
        pairs.filter(is_fit).collect()
    }

    /// The router is always in the core; here come a prefill and a decode that fit each other, if
    /// there are such, and of the others each with even odds.
    fn draw_core(&self) -> BTreeSet<u16> {
        let keyed = KeyedRng::new(self.run.seed);
        let specs: Vec<InstanceSettings> = self.instances.iter().map(SimInstance::next).collect();
        let all: Vec<u16> = (0..self.instances.len() as u16).collect();
        let pairs = self.fitting_pairs(&all, |index| &specs[usize::from(index)]);
        let drawn = keyed.below(PAIR, 0, 0, pairs.len() as u64) as usize;
        let mut core: BTreeSet<u16> =
            pairs.get(drawn).map_or(BTreeSet::new(), |(p, d)| [*p, *d].into());
        core.extend(
            all.into_iter().filter(|index| keyed.draw(MEMBER, u64::from(*index), 0) & 1 == 1),
        );
        core.into_iter().flat_map(|index| self.parts(index)).collect()
    }

    /// True for an instance that never makes a step again, though its memory is there.
    pub(super) fn is_frozen(&self, index: u16) -> bool {
        let instance = &self.instances[usize::from(index)];
        self.quiescence.is_settled() && instance.paused && instance.process.is_some()
    }

    /// Asks the next of the world's own requests once those of the workload have ended and
    /// everything has had its time; true until all have ended. Runs without faults have none.
    pub(super) fn probe(&mut self) -> bool {
        let Some(at) = self.quiescence.probe_at() else { return false };
        let serves_payloads = !self.run.hosts.is_empty();
        let all_probed = match serves_payloads {
            true => self.stages.all_probed(),
            false => self.clients.all_probed(&self.instances),
        };
        if all_probed {
            return false;
        }
        if self.now >= at {
            self.quiescence.probing();
            self.stats.close();
            match serves_payloads {
                true => self.stage_probes(),
                false => self.client_probes(),
            }
        }
        self.queue
            .push((self.now + self.quiescence.interval()).max(at), super::event::SimEvent::Check);
        true
    }
}
