//! From a run to the parts of a simulation.

use super::actor::MachineId;
use super::clients::Clients;
use super::event::{ProcessEvent, SimEvent};
use super::inputs::InputLog;
use super::legs::SimLegs;
use super::observer::Observer;
use super::process::{RouterProcess, SimInstance};
use super::quiescence::Quiescence;
use super::stages::SimStages;
use super::trace::Tracer;
use super::{ReadyStep, SimMachine, SimOptions, Simulation, report};
use crate::dma::{Dma, DmaCalls, DmaConfig, SimDataPlane};
use crate::keyed_rng::InclusiveRange;
use crate::memory::{MemoryFidelity, MemoryShape, PieceSize, RankStore};
use crate::net::{ControlNetwork, NetCalls, NetConfig};
use crate::observation::SimProcessId;
use crate::queue::EventQueue;
use crate::slab::Slab;
use kvferry_engine::core::Gauges;
use kvferry_engine::core::config::CoreConfig;
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::core::transfer::TransferConfig;
use kvferry_engine::fabric::{ControlPlane, DataPlane, Endpoint, LinkKind, Memory};
use kvferry_scenarios::decide;
use kvferry_scenarios::engine::EngineConfig;
use kvferry_scenarios::geometry::{RankMemory, geometry, rank_memory};
use kvferry_scenarios::lists::FaultKind;
use kvferry_scenarios::run::{DurationRange, InstanceSettings as Spec, PayloadHostSettings, Run};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Frames of each channel from which a foreign one is drawn.
const RECORDED: usize = 64;

/// Name of the router on the control network.
pub(super) const ROUTER: &str = "router";

/// Of the draw whether an instance is one process.
const WHOLE: u64 = decide::kind("whole");

impl Simulation {
    /// A world at time zero.
    pub fn new(run: Arc<Run>, options: SimOptions) -> Simulation {
        let mut dma = Dma::new(dma_config(&run));
        let mut net = ControlNetwork::new(net_config(&run));
        let nodes = nodes(&run);
        let mut control = net.add_plane(ROUTER, router_node(&run));
        control.listen(LinkKind::Discovery).expect("a new plane listens to nothing");
        let tp_max = run.instances.iter().chain(becomes(&run)).map(|spec| spec.tp).max();
        let stride = 1 + u32::from(tp_max.unwrap_or(1));
        let mut simulation = Simulation {
            options,
            now: Nanos::ZERO,
            queue: EventQueue::new(),
            envelopes: Slab::default(),
            ready: VecDeque::new(),
            follow: VecDeque::new(),
            current: None,
            idle: false,
            machines: machines(&run, stride),
            stride,
            instances: instances(&run, &nodes, stride - 1, &mut dma),
            router: RouterProcess { control, paused: false, is_down: false, held: Vec::new() },
            dma,
            net,
            planes: Vec::new(),
            control: vec![SimProcessId::ROUTER],
            unit: unit(&run),
            legs: SimLegs::new(&run),
            clients: Clients::new(&run, options.fresh),
            stages: SimStages::new(&run),
            tracer: Tracer::new(&run, options),
            observer: Observer::new(&run, options.check, options.record),
            inputs: InputLog::new(&run, options.inputs),
            quiescence: Quiescence::new(&run, options),
            races: Vec::new(),
            stats: report::RunStats::default(),
            pairs: Vec::new(),
            calls: DmaCalls::default(),
            net_calls: NetCalls::default(),
            fault_at: None,
            outputs: Vec::new(),
            net_outputs: Vec::new(),
            run,
        };
        simulation.begin();
        simulation
    }

    fn begin(&mut self) {
        self.flush_router();
        let config = self.run.router.config.clone();
        let incarnation = Incarnation(1 + self.options.wall);
        let config = super::MachineConfig::Router(Box::new(config), incarnation);
        self.ready.push_back(ReadyStep::Start(0, config));
        for instance in 0..self.instances.len() as u16 {
            let what = ProcessEvent::Start;
            self.queue.push(Nanos::ZERO, SimEvent::Process { instance, what });
        }
        self.plan_faults();
        self.first_arrival();
        self.plan_streams();
        self.queue.push(self.quiescence.interval(), SimEvent::Check);
    }
}

/// Instances that others become by a restart.
fn becomes(run: &Run) -> impl Iterator<Item = &Spec> {
    run.faults.iter().filter_map(|fault| fault.becomes.as_deref())
}

fn nodes(run: &Run) -> BTreeMap<String, u32> {
    let mut nodes = BTreeMap::new();
    for instance in &run.instances {
        let next = nodes.len() as u32;
        nodes.entry(instance.node.clone()).or_insert(next);
    }
    nodes
}

/// The router stands on a node of its own.
pub(super) fn router_node(run: &Run) -> u32 {
    nodes(run).len() as u32
}

fn machines(run: &Run, stride: u32) -> Vec<SimMachine> {
    let actor = |id, instance| SimMachine {
        id,
        instance,
        incarnation: 0,
        alive: false,
        tick: None,
        deadline: None,
        generation: 0,
        late: Nanos::ZERO,
        gauges: Gauges::default(),
        limits: Gauges::default(),
        unasked: 0,
        heard: 0,
    };
    let limits = run.router.config.limits();
    let mut actors = vec![SimMachine { limits, ..actor(MachineId::Router, None) }];
    for instance in 0..run.instances.len() as u16 {
        actors.extend((0..stride).map(|_| actor(MachineId::Router, Some(instance))));
    }
    let payload = |(at, host): (u16, &PayloadHostSettings)| SimMachine {
        limits: host.config.limits(),
        ..actor(MachineId::Payload(at), Some(host.instance))
    };
    actors.extend((0..).zip(&run.hosts).map(payload));
    actors
}

fn instances(run: &Run, nodes: &BTreeMap<String, u32>, tp: u32, dma: &mut Dma) -> Vec<SimInstance> {
    let network = &run.network;
    // A clock that steps back needs room.
    let steps_back = run.faults.iter().any(|fault| fault.kind == FaultKind::ClockBack);
    let born = if steps_back { 1 << 30 } else { 0 };
    let instance = |(index, spec): (u64, &Spec)| SimInstance {
        spec: spec.clone(),
        is_whole: is_whole(run, index),
        becomes: None,
        switch: None,
        returns: true,
        incarnation: u32::MAX,
        incarnation_number: born,
        node: nodes[&spec.node],
        ports: (0..tp)
            .map(|_| (dma.add_nic(network.bandwidth), dma.add_nic(network.node_bandwidth)))
            .collect(),
        process: None,
        paused: false,
        held: Vec::new(),
    };
    (0..).zip(&run.instances).map(instance).collect()
}

/// Whether core and ranks of an instance are in one process: half of them are, by the seed, unless
/// the run has faults that come between the two.
fn is_whole(run: &Run, instance: u64) -> bool {
    let comes_between = |kind| matches!(kind, FaultKind::RankLag | FaultKind::ExpiryRace);
    let is_drawn = decide::mix(decide::mix(run.seed, WHOLE), instance) & 1 == 0;
    is_drawn && !run.faults.iter().any(|fault| comes_between(fault.kind))
}

fn between(span: DurationRange) -> InclusiveRange {
    InclusiveRange::new(span.min.0, span.max.0)
}

fn dma_config(run: &Run) -> DmaConfig {
    DmaConfig {
        seed: run.seed,
        fidelity: run.memory,
        latency: between(run.network.latency),
        latency_local: between(run.network.node_latency),
        ..DmaConfig::default()
    }
}

fn net_config(run: &Run) -> NetConfig {
    let latency = between(run.network.control_latency);
    let foreign = run.faults.iter().any(|fault| fault.kind == FaultKind::Foreign);
    let recorded = if foreign { RECORDED } else { 0 };
    NetConfig { seed: run.seed, latency, recorded, ..NetConfig::default() }
}

/// The largest piece of a block that no transfer between two instances cuts.
fn unit(run: &Run) -> PieceSize {
    let specs = || run.instances.iter().chain(becomes(run));
    let heads = |tp: u16| match run.model.latent {
        true => 1,
        false => u32::from((run.model.kv_heads / tp).max(1)),
    };
    PieceSize {
        tokens: specs().map(|spec| spec.block_tokens).fold(0, gcd).max(1),
        slots: specs().map(|spec| heads(spec.tp)).fold(0, gcd).max(1),
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The memory of an instance's ranks, to be made.
pub(super) struct InstanceMemory {
    pub(super) layout: RankMemory,
    shapes: Vec<Arc<MemoryShape>>,
    fidelity: MemoryFidelity,
}

impl InstanceMemory {
    /// Rank, memory and its shape.
    pub(super) fn ranks(&self) -> impl Iterator<Item = (u16, RankStore, Arc<MemoryShape>)> + '_ {
        (0..).zip(&self.shapes).map(|(rank, shape)| {
            let store = RankStore::new(shape.clone(), self.fidelity);
            (rank, store.expect("drawing a run refuses such shapes"), shape.clone())
        })
    }
}

pub(super) fn memory(run: &Run, spec: &Spec, unit: PieceSize) -> InstanceMemory {
    let (geometry, layout) = (geometry(&run.model, spec), rank_memory(&run.model, spec));
    let shape = |rank| MemoryShape::new(&geometry, rank, &layout.layers, &layout.regions, unit);
    let shapes = (0..spec.tp)
        .map(|rank| Arc::new(shape(rank).expect("drawing a run refuses such shapes")))
        .collect();
    InstanceMemory { layout, shapes, fidelity: run.memory }
}

/// Where legs of an instance are sent.
pub(super) fn http(spec: &Spec) -> Endpoint {
    Endpoint(format!("http://{}", spec.name).into())
}

/// Where the core of an instance listens.
pub(super) fn control(spec: &Spec) -> Endpoint {
    Endpoint(format!("sim://{}", spec.name).into())
}

/// Arguments of an instance's core.
pub(super) fn core(run: &Run, spec: &Spec, incarnation: Incarnation) -> Box<CoreConfig> {
    let (name, control) = (spec.name.as_str(), control(spec));
    Box::new(CoreConfig {
        mode: spec.mode,
        http: http(spec),
        dp: (spec.dp_rank, spec.dp_size),
        router: (!spec.is_pool).then(|| Endpoint(format!("sim://{ROUTER}").into())),
        payloads: spec.is_pool,
        verify: run.verify,
        models: spec.models.clone(),
        settings: spec.protocol.core.clone(),
        channel: spec.protocol.channel.clone(),
        ..CoreConfig::new(spec.role, name, incarnation, geometry(&run.model, spec), control)
    })
}

/// Arguments of a rank's transfer actor.
pub(super) fn transfer(
    spec: &Spec,
    core: &CoreConfig,
    rank: u16,
    plane: &SimDataPlane,
    registered: Vec<Memory>,
    memory: &InstanceMemory,
) -> Box<TransferConfig> {
    let (plane, layers) = ((plane.address(), plane.caps()), memory.layout.layers.clone());
    let settings = spec.protocol.transfer.clone();
    let transfer = TransferConfig::new(core, rank, plane, registered, layers);
    Box::new(TransferConfig { settings, ..transfer })
}

/// Settings of an instance's serving engine.
pub(super) fn engine(run: &Run, spec: &Spec, index: u16, incarnation: u32) -> EngineConfig {
    let actor = u64::from(index) << 32 | u64::from(incarnation);
    let seed = decide::decide(run.seed, decide::kind("engine.ids"), actor, 0);
    let id_seed = run.router.ids_differ.then_some(seed);
    EngineConfig::new(&run.model, spec, &run.engine, id_seed)
}
