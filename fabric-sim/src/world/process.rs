//! Processes: their parts, starts, crashes and pauses.

use super::actor::{MachineConfig, MachineId};
use super::build;
use super::event::{ProcessEvent, SimEvent};
use super::role_switch::RoleSwitch;
use super::{ReadyStep, Simulation};
use crate::dma::{DataPlaneIx, NicIx, SimDataPlane};
use crate::faults::ROUTER;
use crate::memory::MemoryShape;
use crate::net::SimControlPlane;
use crate::observation::{Observation, SimProcessId, SimRankId};
use kvferry_engine::core::Outbox;
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::Role;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::core::transfer::TransferInput;
use kvferry_engine::fabric::{ControlPlane, LinkKind, Placement};
use kvferry_scenarios::engine::{EngineEffect, SimEngine, StepPlan};
use std::ops::Range;
use std::sync::Arc;

/// An instance over all its incarnations.
#[derive(Debug)]
pub(super) struct SimInstance {
    pub(super) spec: kvferry_scenarios::run::InstanceSettings,
    /// What it is from its next start on.
    pub(super) becomes: Option<kvferry_scenarios::run::InstanceSettings>,
    /// It is in the other role then.
    pub(super) switch: Option<RoleSwitch>,
    /// Counts its starts from 0; `u32::MAX` before the first.
    pub(super) incarnation: u32,
    /// Number of its newest incarnation; a clock that steps back makes it smaller.
    pub(super) incarnation_number: u32,
    pub(super) node: u32,
    /// Core and ranks are in one process and hear one another at once; otherwise each is in its
    /// own, as with `transfer` `worker`.
    pub(super) is_whole: bool,
    /// Ports to other nodes and within the node, by rank.
    pub(super) ports: Vec<(NicIx, NicIx)>,
    /// It is down and will start.
    pub(super) returns: bool,
    /// None while it is down.
    pub(super) process: Option<SimProcess>,
    pub(super) paused: bool,
    /// Entries that wait for the end of the pause.
    pub(super) held: Vec<SimEvent>,
}

impl SimInstance {
    pub(super) fn is_current(&self, incarnation: u32) -> bool {
        self.incarnation == incarnation && self.process.is_some()
    }

    /// Becomes its next incarnation; the switch to its other role, if that is one.
    fn begin(&mut self) -> Option<RoleSwitch> {
        self.returns = false;
        self.spec = self.next();
        let (becomes, switch) = (self.becomes.take(), self.switch.take());
        self.incarnation = self.incarnation.wrapping_add(1);
        let is_same = |switch: &RoleSwitch| switch.is_as_told() && becomes.is_none();
        self.incarnation_number += match &switch {
            Some(switch) if switch.is_told() && !is_same(switch) => 2,
            _ => 1,
        };
        switch
    }
}

#[derive(Debug)]
pub(super) struct SimProcess {
    /// None in a host, where stages are served.
    pub(super) engine: Option<SimEngine>,
    pub(super) out: Outbox<EngineEffect>,
    pub(super) control: SimControlPlane,
    pub(super) ranks: Vec<SimDataPlane>,
    pub(super) step: Option<ForwardPass>,
}

/// A forward pass under way.
#[derive(Debug)]
pub(super) struct ForwardPass {
    pub(super) plan: StepPlan,
    pub(super) started: Nanos,
    /// Layers that are complete.
    pub(super) layers: u16,
    /// Layers that will be complete at the next `Layers` entry.
    pub(super) next: u16,
}

#[derive(Debug)]
pub(super) struct RouterProcess {
    pub(super) control: SimControlPlane,
    pub(super) paused: bool,
    /// It died and will start again.
    pub(super) is_down: bool,
    /// Entries that wait for the end of the pause, or clients for the next router.
    pub(super) held: Vec<SimEvent>,
}

/// Whose data plane it is.
#[derive(Clone, Debug)]
pub(super) struct DataPlaneOwner {
    pub(super) at: SimRankId,
    pub(super) shape: Arc<MemoryShape>,
    pub(super) credits: u32,
    pub(super) placement: Placement,
}

/// The incarnation of an instance in an incarnation, as its wall clock says. As with clocks, no two
/// instances share one, so that a connection of one is none of another.
pub(super) fn wall_clock_incarnation(instance: u16, born: u32, wall: u64) -> Incarnation {
    Incarnation(((1 + u64::from(instance)) << 32 | u64::from(born)) + wall)
}

impl Simulation {
    pub(super) fn who(&self, instance: u16) -> SimProcessId {
        SimProcessId { instance, incarnation: self.instances[instance as usize].incarnation }
    }

    /// The newest incarnation of an instance, as its peers know it.
    pub(super) fn born(&self, index: u16) -> Incarnation {
        let number = self.instances[usize::from(index)].incarnation_number;
        wall_clock_incarnation(index, number, self.options.wall)
    }

    pub(super) fn process_event(&mut self, instance: u16, what: ProcessEvent) {
        if instance == ROUTER {
            return self.start_router();
        }
        match what {
            ProcessEvent::Start if self.instances[usize::from(instance)].returns => {
                self.start(instance);
            }
            ProcessEvent::Start => {}
            ProcessEvent::Switch => self.switch_if_idle(instance),
        }
    }

    /// The instances of the process that an instance is part of: both cores of a host, or itself.
    pub(super) fn parts(&self, index: u16) -> Range<u16> {
        match self.host_of(index).map(|host| self.run.hosts[usize::from(host)].instance) {
            Some(first) => first..first + 2,
            None => index..index + 1,
        }
    }

    /// Starts a process in its next incarnation.
    pub(super) fn start(&mut self, index: u16) {
        if self.instances[index as usize].process.is_some() {
            return;
        }
        self.parts(index).for_each(|part| self.start_instance(part));
        if let Some(host) = self.host_of(index) {
            self.start_payloads(host);
        }
    }

    fn start_instance(&mut self, index: u16) {
        let instance = &mut self.instances[index as usize];
        if instance.process.is_some() {
            return;
        }
        let switch = instance.begin();
        let (spec, incarnation, node) =
            (instance.spec.clone(), instance.incarnation, instance.node);
        let who = self.who(index);
        let run = self.run.clone();
        let memory = build::memory(&run, &spec, self.unit);
        let born = self.born(index);
        let core = build::core(&run, &spec, born);
        let mut control = self.net.add_plane(&spec.name, node);
        control.listen(LinkKind::Handshake).expect("a new plane listens to nothing");
        self.control.push(who);
        let mut ranks = Vec::with_capacity(usize::from(spec.tp));
        let mut due = Vec::with_capacity(usize::from(spec.tp));
        for (rank, store, shape) in memory.ranks() {
            let (nic, nic_local) = self.instances[index as usize].ports[usize::from(rank)];
            let segment = (0..store.segments()).map(|s| store.memory(s, u32::from(rank)));
            let registered = segment.collect();
            let caps = crate::abilities::caps(self.observer.faults.placement(), &spec.fabric);
            let plane = crate::dma::PlaneSpec { node, nic, nic_local, caps, store };
            let plane = self.dma.add_plane(plane);
            let at = SimRankId { who, rank };
            self.planes.push(DataPlaneOwner {
                at,
                shape,
                credits: caps.in_all.operations,
                placement: caps.placement,
            });
            let config = build::transfer(&spec, &core, rank, &plane, registered, &memory);
            let slot = self.rank_slot(index, rank);
            self.machines[slot as usize].limits = config.limits(&core);
            ranks.push(plane);
            due.push((slot, rank, config));
        }
        let config = build::engine(&run, &spec, index, incarnation);
        let engine_blocks = config.blocks();
        let engine = (!spec.is_pool).then(|| {
            SimEngine::new(config).expect("drawing a run refuses engines that cannot run")
        });
        let out = Outbox::new();
        let process = SimProcess { engine, out, control, ranks, step: None };
        self.instances[index as usize].process = Some(process);
        self.observer.observe(self.now, &Observation::Started { who, spec: &spec });
        self.flush_control(index);
        let slot = self.core_slot(index);
        self.machines[slot as usize].limits = core.limits(engine_blocks);
        let (id, config) = match spec.role {
            Role::Prefill => (MachineId::Prefill(index), MachineConfig::Prefill(core)),
            Role::Decode => (MachineId::Decode(index), MachineConfig::Decode(core)),
        };
        self.restart_machine(slot, id, incarnation);
        self.ready.push_back(ReadyStep::Start(slot, config));
        let ranks: Vec<u32> = due.iter().map(|(slot, ..)| *slot).collect();
        for (slot, rank, config) in due {
            self.restart_machine(slot, MachineId::Transfer(index, rank), incarnation);
            self.ready.push_back(ReadyStep::Start(slot, MachineConfig::Transfer(config)));
        }
        for slot in ranks {
            let input = TransferInput::Start.into();
            self.ready.push_back(ReadyStep::Input { slot, incarnation, input, cause: 0 });
        }
        if let Some(switch) = switch {
            self.serve_waiting(index, switch);
        }
    }

    pub(super) fn restart_machine(&mut self, slot: u32, id: MachineId, incarnation: u32) {
        let actor = &mut self.machines[slot as usize];
        actor.id = id;
        actor.incarnation = incarnation;
        actor.deadline = None;
        actor.tick = None;
        actor.generation = actor.generation.wrapping_add(1);
        actor.late = Nanos::ZERO;
        actor.heard = 0;
    }

    /// A process loses its state and its memory.
    pub(super) fn crash(&mut self, index: u16) {
        if self.instances[index as usize].process.is_none() {
            return;
        }
        self.parts(index).for_each(|part| self.crash_instance(part));
        if let Some(host) = self.host_of(index) {
            self.stop_payloads(host);
        }
    }

    fn crash_instance(&mut self, index: u16) {
        let who = self.who(index);
        let Some(process) = self.instances[index as usize].process.take() else { return };
        let detected = self.detection(index);
        let told = Some(detected);
        self.with_dma(|dma, cx| {
            process.ranks.iter().for_each(|plane| dma.crash(plane.ix(), (detected, told), cx));
        });
        self.with_net(|net, cx| net.crash(process.control.ix(), told, cx));
        for slot in self.core_slot(index)..self.core_slot(index) + self.stride {
            // What it was to be told in this instant it is not told any more.
            if std::mem::take(&mut self.machines[slot as usize].alive) {
                self.ready.push_back(ReadyStep::Stop(slot));
            }
        }
        self.observer.observe(self.now, &Observation::Crashed { who });
        self.break_legs(who, detected);
        // What begins after this is another process, which nobody stopped.
        self.pause_instance(index, false);
    }

    /// Stops the turns of a process's machines and its engine, or lets them go on. What the fabric
    /// does without the process's help goes on.
    pub(super) fn set_paused(&mut self, index: u16, paused: bool) {
        self.parts(index).for_each(|part| self.pause_instance(part, paused));
    }

    fn pause_instance(&mut self, index: u16, paused: bool) {
        let instance = &mut self.instances[index as usize];
        if std::mem::replace(&mut instance.paused, paused) == paused {
            return;
        }
        for entry in std::mem::take(&mut instance.held) {
            self.queue.push(self.now, entry);
        }
        // What was late arrives now; what comes after it must not overtake it.
        let ranks = instance.spec.tp;
        for rank in 0..ranks {
            let slot = self.rank_slot(index, rank);
            let late = &mut self.machines[slot as usize].late;
            if *late > Nanos::ZERO {
                *late = (*late).max(self.now);
            }
        }
        let planes = self.data_planes(index);
        self.with_dma(|dma, cx| {
            planes.into_iter().for_each(|plane| dma.set_paused(plane, paused, cx));
        });
        let Some(process) = &self.instances[index as usize].process else { return };
        let control = process.control.ix();
        self.with_net(|net, cx| net.set_paused(control, paused, cx));
    }

    /// The data planes of an instance by rank; none while it is down.
    pub(super) fn data_planes(&self, index: u16) -> Vec<DataPlaneIx> {
        let process = self.instances.get(usize::from(index)).and_then(|one| one.process.as_ref());
        process.map_or(Vec::new(), |one| one.ranks.iter().map(SimDataPlane::ix).collect())
    }
}
