//! The simulated world: processes, planes, serving engines, clients and faults around the protocol
//! machines of a [`Run`].
//!
//! The world holds no machine. [`Simulation::next`] says which machine has to do what, whoever
//! holds the machines does it, and [`Simulation::apply`] takes the effects. A core loop
//! ([`run`]) and actors can therefore drive the same simulation, and give the same trace.
//!
//! ```
//! use kvferry_sim::world::{SimOptions, run};
//!
//! let text = "about = 'one prompt'\nseed = 1\n[workload]\nmode = 'push'\nrequests = 1\n";
//! let scenario = kvferry_scenarios::parse("one.toml", text, ".".as_ref(), None)?;
//! // Same run, same trace, whether anybody looks at it or not.
//! let drawn = scenario.draw(1)?;
//! let trace = |check| run(&drawn, SimOptions { check, ..SimOptions::default() }).trace_hash;
//! assert_eq!(trace(true), trace(false));
//! # Ok::<(), kvferry_scenarios::ScenarioError>(())
//! ```

mod actions;
mod actor;
mod build;
mod clients;
mod content;
mod effects;
mod event;
mod fresh;
mod inputs;
mod legs;
mod liveness;
mod observer;
mod outputs;
mod payloads;
mod process;
mod quiescence;
mod race;
mod report;
mod role_switch;
mod router_death;
mod serving;
mod sight;
mod stages;
mod trace;

pub use actor::{AnyMachine, MachineConfig, MachineEffect, MachineId, MachineInput};
pub use fresh::{FreshFleet, MachineAtRest, PairProbe};
pub use inputs::InputPlace;
pub use report::{
    CauseCounts, FULL, OperationTotals, Percentiles, ReceiverTotals, RunReport, RunVerdict,
    SaturatedLink,
};
pub use sight::{Sight, SightedRank, frame_digest};
pub use trace::{RecordedDetail, RecordedEvent, Recording};

use crate::abilities::LOCAL;
use crate::dma::{Dma, DmaCalls, DmaContext, DmaOutput};
use crate::memory::PieceSize;
use crate::net::{ControlNetwork, NetCalls, NetContext, NetOutput};
use crate::queue::{EventQueue, StepContext};
use crate::slab::Slab;
use clients::Clients;
use event::{SimEnvelope, SimEvent};
use inputs::InputLog;
use kvferry_engine::core::Gauges;
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::Run;
use legs::SimLegs;
use observer::Observer;
use process::{DataPlaneOwner, RouterProcess, SimInstance};
use quiescence::Quiescence;
use stages::SimStages;
use std::collections::VecDeque;
use std::sync::Arc;
use trace::Tracer;

/// How a simulation is run. None of it changes what happens; `wall` changes the numbers of
/// incarnations, which the trace hash contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimOptions {
    /// Keep all inputs and effects.
    pub record: bool,
    pub check: bool,
    /// List the inputs of the safety phase.
    pub inputs: bool,
    /// Hash the effects that leave machines, see [`RunReport::outputs_hash`].
    pub outputs: bool,
    /// By how many microseconds all wall clocks are ahead.
    pub wall: u64,
    /// Serve nothing but the requests that are for one pair each.
    pub fresh: bool,
}

impl Default for SimOptions {
    fn default() -> Self {
        SimOptions {
            record: false,
            check: true,
            inputs: false,
            outputs: false,
            wall: 0,
            fresh: false,
        }
    }
}

/// What a machine has to do now. Each turn but `Stop` is answered by one [`Simulation::apply`]
/// before the next turn is asked for.
#[derive(Debug)]
pub struct SimStep {
    /// Time to hand to the machine.
    pub now: Nanos,
    pub actor: MachineId,
    /// The same as a small number, for tables.
    pub slot: u32,
    /// What it has to do.
    pub action: StepAction,
    /// True if [`Simulation::apply`] wants to know the gauges.
    pub gauges: bool,
}

/// What a machine has to do.
#[derive(Debug)]
pub enum StepAction {
    /// Come into being; has no effects.
    Start(MachineConfig),
    Stop,
    Input(MachineInput),
}

/// A turn that is due.
#[derive(Debug)]
enum ReadyStep {
    Start(u32, MachineConfig),
    Stop(u32),
    Input { slot: u32, incarnation: u32, input: MachineInput, cause: u64 },
    Audit(u32),
}

/// What the world knows of a machine.
#[derive(Debug)]
struct SimMachine {
    id: MachineId,
    /// `None` for the router.
    instance: Option<u16>,
    incarnation: u32,
    alive: bool,
    /// When its next `Tick` entry is due.
    tick: Option<Nanos>,
    deadline: Option<Nanos>,
    /// Names the `Tick` entry that counts.
    generation: u32,
    /// When the last input that is late because its rank lags arrives.
    late: Nanos,
    /// What it said of itself last.
    gauges: Gauges,
    /// What its gauges stay within.
    limits: Gauges,
    /// Inputs since it was asked for its gauges.
    unasked: u8,
    /// What it heard in this incarnation, its deadlines apart.
    heard: u64,
}

/// The state of a run, see [`run`].
#[derive(Debug)]
pub struct Simulation {
    run: Arc<Run>,
    options: SimOptions,
    now: Nanos,
    queue: EventQueue<SimEvent>,
    /// What is on its way between two parts of the world.
    envelopes: Slab<SimEnvelope>,
    ready: VecDeque<ReadyStep>,
    /// What follows from the last turns in the same process: ahead of what is due.
    follow: VecDeque<ReadyStep>,
    /// Whose turn it is, and the trace number of its input.
    current: Option<(u32, u64)>,
    /// The turn is that of a deadline, and nothing came of it so far.
    idle: bool,
    machines: Vec<SimMachine>,
    stride: u32,
    instances: Vec<SimInstance>,
    router: RouterProcess,
    dma: Dma,
    net: ControlNetwork,
    /// Who owns a data plane, by its index.
    planes: Vec<DataPlaneOwner>,
    /// Who owns a control plane, by its index.
    control: Vec<crate::observation::SimProcessId>,
    unit: PieceSize,
    legs: SimLegs,
    clients: Clients,
    stages: SimStages,
    tracer: Tracer,
    observer: Observer,
    inputs: InputLog,
    quiescence: Quiescence,
    races: Vec<race::LeaseRace>,
    stats: report::RunStats,
    /// Requests after the faults that one pair served over the fast path.
    pairs: Vec<fresh::PairProbe>,
    calls: DmaCalls,
    net_calls: NetCalls,
    /// When the next `Fault` entry is due.
    fault_at: Option<Nanos>,
    outputs: Vec<DmaOutput>,
    net_outputs: Vec<NetOutput>,
}

/// Inputs of a machine from one look at its gauges to the next.
const LOOK: u8 = 8;

impl Simulation {
    /// The next turn of a machine; none when the run is over. Handles what does not concern a
    /// machine on the way.
    ///
    /// # Panics
    /// If the turn before was not applied.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<SimStep> {
        assert!(self.current.is_none(), "the turn before has to be applied first");
        loop {
            // What follows from a step is of the same turn: a process ends after it.
            if self.follow.is_empty() && self.observer.faults.has_output() {
                self.perform_actions();
            }
            if self.follow.is_empty() {
                self.next_input_due();
            }
            if let Some(due) = self.follow.pop_front().or_else(|| self.ready.pop_front()) {
                match self.prepare_step(due) {
                    Some(turn) => return Some(turn),
                    None => continue,
                }
            }
            if self.quiescence.over {
                return None;
            }
            let Some((now, entry)) = self.queue.pop() else {
                self.finish();
                continue;
            };
            self.now = now;
            self.handle(entry);
        }
    }

    fn prepare_step(&mut self, due: ReadyStep) -> Option<SimStep> {
        self.keep_sights();
        let (slot, what, gauges) = match due {
            ReadyStep::Start(slot, config) => {
                let actor = &mut self.machines[slot as usize];
                actor.alive = true;
                self.tracer.started(self.now, actor.id, &config);
                (slot, StepAction::Start(config), false)
            }
            ReadyStep::Stop(slot) => {
                let actor = &mut self.machines[slot as usize];
                actor.alive = false;
                self.tracer.stopped(self.now, actor.id);
                let (now, actor) = (self.now, actor.id);
                return Some(SimStep { now, actor, slot, action: StepAction::Stop, gauges: false });
            }
            ReadyStep::Input { slot, incarnation, input, cause } => {
                let actor = &self.machines[slot as usize];
                if !actor.alive || actor.incarnation != incarnation {
                    return None;
                }
                self.tracer.input(self.now, actor.id, cause, &input);
                let ask = self.options.check && actor.unasked >= LOOK;
                self.idle = input == actor.id.tick();
                self.machines[slot as usize].heard += u64::from(!self.idle);
                (slot, StepAction::Input(input), ask)
            }
            ReadyStep::Audit(slot) => {
                let actor = &self.machines[slot as usize];
                if !actor.alive {
                    return None;
                }
                let input = actor.id.tick();
                self.tracer.input(self.now, actor.id, 0, &input);
                (slot, StepAction::Input(input), true)
            }
        };
        let actor = self.machines[slot as usize].id;
        self.current = Some((slot, self.tracer.seq()));
        Some(SimStep { now: self.now, actor, slot, action: what, gauges })
    }

    /// Puts what the world saw since the last turn into the recording, if there is one.
    fn keep_sights(&mut self) {
        if let Some(sights) = &mut self.observer.sights {
            self.tracer.saw(sights.0.drain(..));
        }
    }

    /// Takes the effects of the turn that [`Simulation::next`] gave out from the machine that had it,
    /// and what that says of itself if `gauges` are asked for.
    ///
    /// # Panics
    /// If no turn is out.
    pub fn apply(&mut self, machine: &mut AnyMachine, gauges: bool) {
        let turn = self.current.expect("a turn is out");
        let (deadline, gauges) = (machine.deadline(), gauges.then(|| machine.gauges()));
        self.idle &= machine.is_silent();
        match machine {
            AnyMachine::Router(_, out) => out.drain().for_each(|effect| {
                self.router_effect(turn, effect);
            }),
            AnyMachine::Prefill(_, out) => out.drain().for_each(|effect| {
                self.prefill_effect(turn, effect);
            }),
            AnyMachine::Decode(_, out) => out.drain().for_each(|effect| {
                self.decode_effect(turn, effect);
            }),
            AnyMachine::Transfer(_, out) => out.drain().for_each(|effect| {
                self.transfer_effect(turn, effect);
            }),
            AnyMachine::Payload(_, out) => out.drain().for_each(|effect| {
                self.payload_effect(turn, effect);
            }),
        }
        self.end_step(deadline, gauges);
    }

    /// Takes one effect of the turn that is out, for who takes them one at a time. The answer is
    /// what a plane refused; it is the next turn but for what follows from effects before.
    ///
    /// # Panics
    /// If no turn is out, or the effect is of another kind of machine.
    pub fn effect(&mut self, effect: MachineEffect) -> Option<MachineInput> {
        let turn = self.current.expect("a turn is out");
        self.idle = false;
        match effect {
            MachineEffect::Router(effect) => self.router_effect(turn, effect),
            MachineEffect::Prefill(effect) => self.prefill_effect(turn, effect),
            MachineEffect::Decode(effect) => self.decode_effect(turn, effect),
            MachineEffect::Transfer(effect) => self.transfer_effect(turn, effect),
            MachineEffect::Payload(effect) => {
                self.payload_effect(turn, effect);
                None
            }
        }
    }

    /// Ends the turn that is out: all its effects were taken.
    ///
    /// # Panics
    /// If no turn is out.
    pub fn end_step(&mut self, deadline: Option<Nanos>, gauges: Option<Gauges>) {
        let (slot, _) = self.current.take().expect("a turn is out");
        if std::mem::take(&mut self.idle) {
            self.see_woken(slot);
        }
        self.flush(slot);
        self.machine_handled();
        match gauges {
            Some(gauges) => self.audited(slot, gauges),
            None => {
                let unasked = &mut self.machines[slot as usize].unasked;
                *unasked = unasked.saturating_add(1);
            }
        }
        self.arm(slot, deadline);
    }

    /// Keeps one `Tick` entry per machine in the queue, not later than its deadline. An entry that
    /// comes too early is put back without a turn.
    fn arm(&mut self, slot: u32, deadline: Option<Nanos>) {
        let actor = &mut self.machines[slot as usize];
        actor.deadline = deadline;
        let Some(at) = deadline else { return };
        if actor.tick.is_none_or(|tick| at < tick) {
            actor.generation = actor.generation.wrapping_add(1);
            actor.tick = Some(at);
            self.queue.push(at, SimEvent::Tick { slot, generation: actor.generation });
        }
    }

    fn ticked(&mut self, slot: u32, turn: u32) {
        let actor = &mut self.machines[slot as usize];
        if actor.generation != turn {
            return;
        }
        actor.tick = None;
        match actor.deadline {
            Some(at) if at <= self.now => {
                let (incarnation, input) = (actor.incarnation, actor.id.tick());
                self.ready.push_back(ReadyStep::Input { slot, incarnation, input, cause: 0 });
            }
            deadline => self.arm(slot, deadline),
        }
    }

    fn handle(&mut self, entry: SimEvent) {
        let engine = self.engine_input_due(entry);
        if self.hold(entry) || self.defer_for_race(entry) {
            return;
        }
        match entry {
            SimEvent::Dma(event) => {
                self.with_dma(|dma, cx| dma.step(event, cx));
            }
            SimEvent::Net(event) => {
                self.with_net(|net, cx| net.step(event, cx));
            }
            SimEvent::Envelope(slot) => {
                let envelope = self.envelopes.take(slot);
                self.deliver_envelope(envelope);
            }
            SimEvent::Tick { slot, generation: turn } => self.ticked(slot, turn),
            SimEvent::Layers { instance, incarnation } => {
                self.layers_computed(instance, incarnation)
            }
            SimEvent::Arrive => self.client_arrives(),
            SimEvent::ClientGone { client } => self.client_gone(client),
            SimEvent::Stage(event) => self.stage_event(event),
            SimEvent::Process { instance, what } => self.process_event(instance, what),
            SimEvent::Fault => self.fault_due(),
            SimEvent::Check => self.check_quiescence(),
        }
        if let Some(instance) = engine {
            self.input_handled(instance);
        }
    }

    /// Has the data network do something, and hands on what it did.
    fn with_dma(&mut self, act: impl FnOnce(&mut Dma, &mut DmaContext<'_>)) {
        let mut outputs = std::mem::take(&mut self.outputs);
        act(&mut self.dma, &mut StepContext::new(self.now, &mut self.queue, &mut outputs));
        self.data_outputs(&mut outputs);
        self.outputs = outputs;
    }

    /// The same with the control network.
    fn with_net(&mut self, act: impl FnOnce(&mut ControlNetwork, &mut NetContext<'_>)) {
        let mut outputs = std::mem::take(&mut self.net_outputs);
        act(&mut self.net, &mut StepContext::new(self.now, &mut self.queue, &mut outputs));
        self.control_outputs(&mut outputs);
        self.net_outputs = outputs;
    }

    /// Holds back what a paused process would do; true if it is held.
    fn hold(&mut self, entry: SimEvent) -> bool {
        if self.router.is_down && entry == SimEvent::Arrive {
            self.router.held.push(entry);
            return true;
        }
        let instance = match entry {
            SimEvent::Tick { slot, .. } => self.machines[slot as usize].instance,
            SimEvent::Layers { instance, .. } => Some(instance),
            SimEvent::Arrive | SimEvent::ClientGone { .. } => None,
            SimEvent::Envelope(slot) => match self.envelopes.get(slot).expect("it is on its way") {
                SimEnvelope::Machine { slot, .. } => self.machines[*slot as usize].instance,
                SimEnvelope::Job { instance, .. }
                | SimEnvelope::Engine { instance, .. }
                | SimEnvelope::Ask { instance, .. } => Some(*instance),
                SimEnvelope::Broken { .. } => None,
                // It has left the host, and stages do not stand still with it.
                SimEnvelope::Stage { .. } => return false,
            },
            _ => return false,
        };
        let (paused, held) = match instance.map(|index| &mut self.instances[usize::from(index)]) {
            Some(instance) => (instance.paused, &mut instance.held),
            None => (self.router.paused, &mut self.router.held),
        };
        if paused {
            held.push(entry);
        }
        paused
    }

    fn deliver_envelope(&mut self, envelope: SimEnvelope) {
        match envelope {
            SimEnvelope::Machine { slot, incarnation, input, cause } => {
                self.ready.push_back(ReadyStep::Input { slot, incarnation, input, cause });
            }
            SimEnvelope::Job { instance, incarnation, job, cause } => {
                self.send_to_ranks(instance, incarnation, job, cause)
            }
            SimEnvelope::Engine { instance, incarnation, input } => {
                if self.instances[instance as usize].is_current(incarnation) {
                    self.engine_input(instance, input);
                }
            }
            SimEnvelope::Ask { instance, leg, input } => self.leg_arrives(instance, leg, input),
            SimEnvelope::Broken { leg } => self.leg_broken(leg),
            SimEnvelope::Stage { host, client, answer } => self.stage_told(host, client, answer),
        }
    }

    /// Sends something that arrives after a fixed time, so that order is kept.
    fn post(&mut self, after: Nanos, envelope: SimEnvelope) {
        let entry = SimEvent::Envelope(self.envelopes.add(envelope));
        self.queue.push(self.now + after, entry);
    }

    /// The machine whose turn is out.
    ///
    /// # Panics
    /// If no turn is out.
    pub fn actor(&self) -> MachineId {
        let (slot, _) = self.current.expect("a turn is out");
        self.machines[slot as usize].id
    }

    /// True if more follows from the turns before in the process of their machine.
    pub fn follows_on(&self) -> bool {
        !self.follow.is_empty()
    }

    /// The slot that stands for the process of a machine: machines of one process have the same.
    pub fn process_slot(&self, slot: u32) -> u32 {
        if slot >= self.payload_slot(0) {
            return slot;
        }
        let instance = self.machines[slot as usize].instance;
        let whole = instance.filter(|index| self.instances[usize::from(*index)].is_whole);
        whole.map_or(slot, |index| self.core_slot(index))
    }

    fn core_slot(&self, instance: u16) -> u32 {
        1 + u32::from(instance) * self.stride
    }

    /// The payloads of a host, behind all machines of instances.
    fn payload_slot(&self, host: u16) -> u32 {
        self.core_slot(self.instances.len() as u16) + u32::from(host)
    }

    fn rank_slot(&self, instance: u16, rank: u16) -> u32 {
        self.core_slot(instance) + 1 + u32::from(rank)
    }
}

/// Turns between two looks of who watches a run.
pub const WATCH_TURNS: u64 = 1 << 14;

/// Runs a scenario through the protocol machines, stepped in one loop.
pub fn run(run: &Run, options: SimOptions) -> RunReport {
    run_watched(run, options, &mut |_| {})
}

/// As [`run`]; `watch` is told the time every [`WATCH_TURNS`] turns.
pub fn run_watched(run: &Run, options: SimOptions, watch: &mut dyn FnMut(Nanos)) -> RunReport {
    let mut report = simulate(run, options, watch);
    fresh::judge(run, options, &mut FreshFleet::default(), &mut report);
    report
}

/// As [`run`], for runs that are often judged beside the same fleet.
pub fn run_beside(run: &Run, options: SimOptions, fleet: &mut FreshFleet) -> RunReport {
    let mut report = simulate(run, options, &mut |_| {});
    fresh::judge(run, options, fleet, &mut report);
    report
}

fn simulate(run: &Run, options: SimOptions, watch: &mut dyn FnMut(Nanos)) -> RunReport {
    let mut turns = 0_u64;
    let mut simulation = Simulation::new(Arc::new(run.clone()), options);
    let mut machines: Vec<Option<AnyMachine>> = Vec::new();
    while let Some(SimStep { now, slot, action: what, gauges, .. }) = simulation.next() {
        turns += 1;
        if turns.is_multiple_of(WATCH_TURNS) {
            watch(now);
        }
        let slot = slot as usize;
        if machines.len() <= slot {
            machines.resize_with(slot + 1, || None);
        }
        match what {
            StepAction::Start(config) => machines[slot] = Some(AnyMachine::new(config)),
            StepAction::Stop => {
                machines[slot] = None;
                continue;
            }
            StepAction::Input(input) => {
                machines[slot].as_mut().expect("the machine was started").handle(now, input);
            }
        }
        let machine = machines[slot].as_mut().expect("the machine was started");
        simulation.apply(machine, gauges);
    }
    simulation.into_report()
}
