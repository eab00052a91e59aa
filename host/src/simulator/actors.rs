//! A simulation whose machines are in the actors that are deployed.
//!
//! Each simulated process is a [`Driver`], as `kvferry host` has it, reached through its mailbox;
//! only planes and engine are the simulated world, and its clock is the world's. What the machines
//! of a process tell one another the driver hands on by itself, and the world has to expect each
//! such turn. The trace has to equal that of [`kvferry_sim::world::run`].

use actix::System;
use kvferry_engine::actors::{
    Clock, Driver, EffectHandler, Input, InputQueue, InstanceAdapter, MailboxSender, PlaneAdapter,
    PlaneSet, Query,
};
use kvferry_engine::core::command::{ControlCommand, DataCommand, DataRefusal};
use kvferry_engine::core::decode::{DecodeEffect, DecodeInput};
use kvferry_engine::core::error::{Failure, PeerViolation};
use kvferry_engine::core::ids::{EngineId, RequestId};
use kvferry_engine::core::instance::{Instance, InstanceInput, InstancePart};
use kvferry_engine::core::message::{
    DecodeAnswer, PrefillAnswer, RouterEvent, TransferJob, TransferReport as Said,
};
use kvferry_engine::core::payload::{DirectoryNews, PayloadCore, PayloadEffect, PayloadInput};
use kvferry_engine::core::prefill::{PrefillEffect, PrefillInput};
use kvferry_engine::core::router::{Router, RouterEffect, RouterInput};
use kvferry_engine::core::transfer::{TransferEffect, TransferInput};
use kvferry_engine::core::{Gauges, Machine, Nanos};
use kvferry_engine::fabric::{ControlEvent, NextPoll};
use kvferry_scenarios::Run;
use kvferry_sim::world::{
    MachineConfig, MachineEffect, MachineId, MachineInput, RunReport, SimOptions, SimStep,
    Simulation, StepAction,
};
use std::cell::{RefCell, RefMut};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;

/// Places in the mailbox of each actor; of these one is ever taken.
const PLACES: usize = 2;

/// Runs a scenario through the actors, on one thread, in simulated time.
pub fn run(run: &Run, options: SimOptions) -> RunReport {
    let simulation = Simulation::new(Arc::new(run.clone()), options);
    let world = ActorSimulation { simulation: Some(simulation), is_given: false, gauges: false };
    let stage = StepDispatcher {
        world: SimulationHandle(Rc::new(RefCell::new(world))),
        time: Arc::default(),
        processes: BTreeMap::new(),
    };
    System::new().block_on(stage.play())
}

/// The world, and the turn that is out.
struct ActorSimulation {
    /// There until the end.
    simulation: Option<Simulation>,
    /// The turn is in a mailbox.
    is_given: bool,
    /// The turn asks for gauges.
    gauges: bool,
}

/// The world, as all adapters have it; they are on one thread.
#[derive(Clone)]
struct SimulationHandle(Rc<RefCell<ActorSimulation>>);

impl SimulationHandle {
    fn simulation(&self) -> RefMut<'_, Simulation> {
        RefMut::map(self.0.borrow_mut(), |world| world.simulation.as_mut().expect("it goes on"))
    }

    /// A machine begins to handle an input: the one that its actor was given, or one that follows,
    /// which the world has to expect.
    fn began(&self, now: Nanos, is_expected: impl FnOnce(MachineId, MachineInput) -> bool) {
        if std::mem::take(&mut self.0.borrow_mut().is_given) {
            return;
        }
        let turn = self.simulation().next().expect("the world expects that something follows");
        let StepAction::Input(input) = turn.action else {
            panic!("the world expects {:?}", turn.action)
        };
        let text = format!("{input:?} for {} at {:?}", turn.actor, turn.now);
        assert!(turn.now == now && is_expected(turn.actor, input), "the world expects {text}");
        self.0.borrow_mut().gauges = turn.gauges;
    }

    /// Hands on what a core wants, a call of its plane or a job.
    fn core_effect<E>(&self, effect: E) -> Option<MachineInput>
    where
        PrefillEffect: From<E>,
        DecodeEffect: From<E>,
    {
        let mut simulation = self.simulation();
        let effect = match simulation.actor() {
            MachineId::Prefill(_) => MachineEffect::Prefill(effect.into()),
            MachineId::Decode(_) => MachineEffect::Decode(effect.into()),
            other => panic!("{other} is no core"),
        };
        simulation.effect(effect)
    }

    fn ended(&self, deadline: Option<Nanos>, gauges: impl FnOnce() -> Gauges) {
        let gauges = self.0.borrow().gauges.then(gauges);
        self.simulation().end_step(deadline, gauges);
    }
}

/// A process with machines.
enum ActorProcess {
    Router(MailboxSender<Driver<SimulatedRouterAdapter>>),
    /// Those that it begins with are not all there.
    Starting(Box<Instance>),
    Instance(MailboxSender<Driver<InstanceAdapter<SimulatedFabric, SimulatedEffectHandler>>>),
    Payload(MailboxSender<Driver<SimulatedPayloadAdapter>>),
}

/// Hands out the turns of the world.
struct StepDispatcher {
    world: SimulationHandle,
    time: Arc<AtomicU64>,
    /// The processes by their slots.
    processes: BTreeMap<u32, ActorProcess>,
}

impl StepDispatcher {
    async fn play(mut self) -> RunReport {
        loop {
            let turn = self.world.simulation().next();
            let Some(SimStep { now, actor, slot, action: what, gauges }) = turn else { break };
            let home = self.world.simulation().process_slot(slot);
            self.time.store(now.0, Ordering::Relaxed);
            match what {
                StepAction::Start(config) => {
                    self.start(home, config);
                    // A machine that has just come into being wants nothing.
                    self.world.simulation().end_step(None, None);
                }
                StepAction::Stop => _ = self.processes.remove(&home),
                StepAction::Input(input) => {
                    (self.world.0.borrow_mut().is_given, self.world.0.borrow_mut().gauges) =
                        (true, gauges);
                    self.deliver(home, actor, input).await;
                    let owes = self.world.simulation().follows_on();
                    assert!(!owes, "the world expects that more follows for {actor} at {now:?}");
                }
            }
        }
        let simulation = self.world.0.borrow_mut().simulation.take();
        simulation.expect("it went on until now").into_report()
    }

    fn start(&mut self, home: u32, config: MachineConfig) {
        if let MachineConfig::Router(config, incarnation) = config {
            let (adapter, machine) =
                (SimulatedRouterAdapter(self.world.clone()), Router::new(*config, incarnation));
            let driver = Driver::start(|_| adapter, machine, None, self.clock());
            self.processes.insert(home, ActorProcess::Router(MailboxSender::new(driver, PLACES)));
            return;
        }
        if let MachineConfig::Payload(config, engine, incarnation) = config {
            let machine = PayloadCore::with_peers(*config, engine, incarnation);
            let adapter = SimulatedPayloadAdapter(self.world.clone());
            let driver = Driver::start(|_| adapter, machine, None, self.clock());
            self.processes.insert(home, ActorProcess::Payload(MailboxSender::new(driver, PLACES)));
            return;
        }
        let process =
            self.processes.entry(home).or_insert_with(|| ActorProcess::Starting(Box::default()));
        let ActorProcess::Starting(instance) = process else {
            panic!("it has begun without {config:?}")
        };
        match config {
            MachineConfig::Prefill(config) | MachineConfig::Decode(config) => {
                instance.add_core(*config);
            }
            MachineConfig::Transfer(config) => instance.add_rank(*config),
            MachineConfig::Router(..) | MachineConfig::Payload(..) => {
                unreachable!("they are no part of an instance")
            }
        }
    }

    fn clock(&self) -> Clock {
        let time = self.time.clone();
        Arc::new(move || Nanos(time.load(Ordering::Relaxed)))
    }

    /// Gives an input to the actor of a process, and waits until it and what follows are handled.
    async fn deliver(&mut self, home: u32, actor: MachineId, input: MachineInput) {
        let clock = self.clock();
        let process = self.processes.get_mut(&home).expect("it was started");
        if let ActorProcess::Starting(instance) = process {
            let (fabric, outlet) =
                (SimulatedFabric(self.world.clone()), SimulatedEffectHandler::new(&self.world));
            let adapter = InstanceAdapter { fabric, outlet };
            let driver = Driver::start(|_| adapter, std::mem::take(&mut **instance), None, clock);
            *process = ActorProcess::Instance(MailboxSender::new(driver, PLACES));
        }
        match process {
            ActorProcess::Router(port) => {
                let MachineInput::Router(input) = input else { panic!("{input:?} for {actor}") };
                post(port, input).await;
            }
            ActorProcess::Payload(port) => {
                let MachineInput::Payload(input) = input else { panic!("{input:?} for {actor}") };
                post(port, input).await;
            }
            ActorProcess::Instance(port) => post(port, as_instance(actor, input)).await,
            ActorProcess::Starting(_) => unreachable!("it has just begun"),
        }
    }
}

async fn post<S: PlaneAdapter>(
    port: &MailboxSender<Driver<S>>,
    input: <S::Machine as Machine>::Input,
) {
    let place = port.reserve().expect("the turn before gave its place back");
    port.post(Input(input), place);
    let handled = port.address().send(Query(Box::new(|_: &S::Machine| ()))).await;
    handled.expect("the actor lives as long as its process");
}

/// An input of a machine, as its instance takes it.
fn as_instance(actor: MachineId, input: MachineInput) -> InstanceInput {
    match (actor, input) {
        (_, MachineInput::Prefill(input)) => match input {
            PrefillInput::Hook(hook) => InstanceInput::Prefill(hook),
            PrefillInput::Control(event) => InstanceInput::Control(event),
            PrefillInput::Report { rank, report } => InstanceInput::Report { rank, report },
            PrefillInput::Directory(call) => InstanceInput::Directory(call),
            PrefillInput::Drain => InstanceInput::Drain,
            PrefillInput::Tick => InstanceInput::Tick(InstancePart::Core),
        },
        (_, MachineInput::Decode(input)) => match input {
            DecodeInput::Hook(hook) => InstanceInput::Decode(hook),
            DecodeInput::Control(event) => InstanceInput::Control(event),
            DecodeInput::Report { rank, report } => InstanceInput::Report { rank, report },
            DecodeInput::Directory(call) => InstanceInput::Directory(call),
            DecodeInput::Drain => InstanceInput::Drain,
            DecodeInput::Tick => InstanceInput::Tick(InstancePart::Core),
        },
        (MachineId::Transfer(_, rank), MachineInput::Transfer(input)) => match input {
            TransferInput::Start => InstanceInput::Start(rank),
            TransferInput::Job(job) => InstanceInput::Job { rank, job },
            TransferInput::Layers { step, layers } => InstanceInput::Layers { rank, step, layers },
            TransferInput::Data(event) => InstanceInput::Data { rank, event },
            TransferInput::Refused(refusal) => InstanceInput::Refused { rank, refusal },
            TransferInput::Tick => InstanceInput::Tick(InstancePart::Rank(rank)),
        },
        (actor, input) => panic!("{input:?} for {actor}"),
    }
}

/// The planes of an instance: the world's.
struct SimulatedFabric(SimulationHandle);

impl PlaneSet for SimulatedFabric {
    fn control(&mut self, command: ControlCommand) -> Option<ControlEvent> {
        match self.0.core_effect(command)? {
            MachineInput::Prefill(PrefillInput::Control(event))
            | MachineInput::Decode(DecodeInput::Control(event)) => Some(event),
            other => panic!("{other:?} follows from a call of a control plane"),
        }
    }

    fn data(&mut self, _: u16, command: DataCommand) -> Option<DataRefusal> {
        let effect = MachineEffect::Transfer(TransferEffect::Data(command));
        match self.0.simulation().effect(effect)? {
            MachineInput::Transfer(TransferInput::Refused(refusal)) => Some(refusal),
            other => panic!("{other:?} follows from a call of a data plane"),
        }
    }

    fn poll(&mut self, _: Nanos, _: &mut InputQueue<Instance>) -> NextPoll {
        NextPoll::External
    }

    fn set_waker(&mut self, _: &Waker) {}
}

/// Where the rest goes: the world is the engine, and the other processes.
struct SimulatedEffectHandler {
    world: SimulationHandle,
    /// The machine whose turn it is.
    part: InstancePart,
}

impl SimulatedEffectHandler {
    fn new(world: &SimulationHandle) -> SimulatedEffectHandler {
        SimulatedEffectHandler { world: world.clone(), part: InstancePart::Core }
    }

    /// Nothing of this kind is refused.
    fn tell(&self, effect: MachineEffect) {
        let refused = self.world.simulation().effect(effect);
        assert_eq!(refused, None, "only planes refuse");
    }
}

impl EffectHandler for SimulatedEffectHandler {
    const KEEPS_TIME: bool = false;

    fn prefill(&mut self, answer: PrefillAnswer, _: &mut InputQueue<Instance>) {
        self.tell(MachineEffect::Prefill(PrefillEffect::Answer(answer)));
    }

    fn decode(&mut self, answer: DecodeAnswer, _: &mut InputQueue<Instance>) {
        self.tell(MachineEffect::Decode(DecodeEffect::Answer(answer)));
    }

    fn job(&mut self, job: &TransferJob) {
        self.world.core_effect(job.clone());
    }

    fn report(&mut self, _: u16, report: &Said) {
        self.tell(MachineEffect::Transfer(TransferEffect::Report(report.clone())));
    }

    fn violation(&mut self, violation: &PeerViolation) {
        let violation = violation.clone();
        let actor = self.world.simulation().actor();
        self.tell(match actor {
            MachineId::Prefill(_) => MachineEffect::Prefill(PrefillEffect::Violation(violation)),
            _ => MachineEffect::Decode(DecodeEffect::Violation(violation)),
        });
    }

    fn speaks_moriio(&mut self, request: &RequestId) {
        // Prefills ask nobody.
        let request = request.clone();
        self.tell(MachineEffect::Decode(DecodeEffect::SpeaksMoriio { request }));
    }

    fn refused(&mut self, peer: &EngineId, failure: &Failure) {
        let (peer, failure) = (peer.clone(), failure.clone());
        let actor = self.world.simulation().actor();
        self.tell(match actor {
            MachineId::Prefill(_) => {
                MachineEffect::Prefill(PrefillEffect::Refused { peer, failure })
            }
            _ => MachineEffect::Decode(DecodeEffect::Refused { peer, failure }),
        });
    }

    fn router(&mut self, news: &RouterEvent) {
        let news = news.clone();
        let actor = self.world.simulation().actor();
        self.tell(match actor {
            MachineId::Prefill(_) => MachineEffect::Prefill(PrefillEffect::Router(news)),
            _ => MachineEffect::Decode(DecodeEffect::Router(news)),
        });
    }

    fn directory(&mut self, news: DirectoryNews, _: &mut InputQueue<Instance>) {
        let actor = self.world.simulation().actor();
        self.tell(match actor {
            MachineId::Prefill(_) => MachineEffect::Prefill(PrefillEffect::Directory(news)),
            _ => MachineEffect::Decode(DecodeEffect::Directory(news)),
        });
    }

    fn began(&mut self, now: Nanos, input: &InstanceInput) {
        self.part = input.part();
        self.world.began(now, |actor, expected| as_instance(actor, expected) == *input);
    }

    fn ended(&mut self, instance: &Instance) {
        let (part, gauges) = (self.part, || instance.gauges_of(self.part));
        self.world.ended(instance.deadline_of(part), gauges);
    }
}

/// The router's adapter: its plane is the world's, and so are the legs and clients.
struct SimulatedRouterAdapter(SimulationHandle);

impl PlaneAdapter for SimulatedRouterAdapter {
    type Machine = Router;

    const KEEPS_TIME: bool = false;

    fn poll(&mut self, _: Nanos, _: &mut InputQueue<Router>) -> NextPoll {
        NextPoll::External
    }

    fn perform(&mut self, _: &Router, effect: RouterEffect, out: &mut InputQueue<Router>) {
        let refused = self.0.simulation().effect(MachineEffect::Router(effect));
        out.extend(refused.map(|input| match input {
            MachineInput::Router(input) => input,
            other => panic!("{other:?} for the router"),
        }));
    }

    fn ticks(&self, _: &Router, _: Nanos, _: &mut InputQueue<Router>) {}

    fn set_waker(&mut self, _: Waker) {}

    fn began(&mut self, now: Nanos, input: &RouterInput) {
        self.0.began(now, |_, expected| expected == MachineInput::Router(input.clone()));
    }

    fn ended(&mut self, router: &Router) {
        self.0.ended(router.deadline(), || router.gauges());
    }
}

/// The payloads' adapter: stages and cores are the world's.
struct SimulatedPayloadAdapter(SimulationHandle);

impl PlaneAdapter for SimulatedPayloadAdapter {
    type Machine = PayloadCore;

    const KEEPS_TIME: bool = false;

    fn poll(&mut self, _: Nanos, _: &mut InputQueue<PayloadCore>) -> NextPoll {
        NextPoll::External
    }

    fn perform(&mut self, _: &PayloadCore, effect: PayloadEffect, _: &mut InputQueue<PayloadCore>) {
        let refused = self.0.simulation().effect(MachineEffect::Payload(effect));
        assert_eq!(refused, None, "nothing of this kind is refused");
    }

    fn ticks(&self, _: &PayloadCore, _: Nanos, _: &mut InputQueue<PayloadCore>) {}

    fn set_waker(&mut self, _: Waker) {}

    fn began(&mut self, now: Nanos, input: &PayloadInput) {
        self.0.began(now, |_, expected| expected == MachineInput::Payload(input.clone()));
    }

    fn ended(&mut self, payloads: &PayloadCore) {
        self.0.ended(payloads.deadline(), || payloads.gauges());
    }
}
