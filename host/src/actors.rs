//! A simulation whose machines are actix actors.
//!
//! The stage owns the simulated world and hands out one turn at a time: while a turn is out every
//! mailbox but one is empty, so the only order is the simulator's, and the trace has to equal that
//! of [`fabric_sim::run`].

use actix::{Actor, AsyncContext, Context, Handler, Recipient, System};
use engine::actors::{Effects as Played, Port, Shell};
use engine::core::decode::{Decode, DecodeEffect};
use engine::core::prefill::{Prefill, PrefillEffect};
use engine::core::router::{Router, RouterEffect};
use engine::core::transfer::{Transfer, TransferEffect};
use engine::core::{Machine, Nanos, Outbox};
use fabric_sim::world::{
    ActorId, Effects, MachineConfig, MachineInput, Options, Report, Simulation, Turn, What,
};
use scenarios::Run;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Places in the mailbox of each actor; the stage never needs more than one.
const CREDITS: usize = 1;

/// Runs a scenario through the actor shells, on one thread, in simulated time.
pub fn run(run: &Run, options: Options) -> Report {
    let simulation = Simulation::new(Arc::new(run.clone()), options);
    System::new().block_on(async move {
        let (done, report) = oneshot::channel();
        Stage {
            simulation: Some(simulation),
            players: Vec::new(),
            gauges: false,
            done: Some(done),
        }
        .start();
        report.await.expect("the stage reports before it stops")
    })
}

enum Player {
    Router(Port<Shell<Router>>),
    Prefill(Port<Shell<Prefill>>),
    Decode(Port<Shell<Decode>>),
    Transfer(Port<Shell<Transfer>>),
}

impl Player {
    fn new(slot: u32, config: MachineConfig, stage: &Context<Stage>) -> Player {
        fn shell<M: Machine + Unpin + 'static>(
            slot: u32,
            machine: M,
            outlet: Recipient<Played<M::Effect>>,
        ) -> Port<Shell<M>> {
            Shell::start(u64::from(slot), machine, outlet, CREDITS)
        }
        let stage = stage.address();
        match config {
            MachineConfig::Router(config, incarnation) => {
                Player::Router(shell(slot, Router::new(*config, incarnation), stage.recipient()))
            }
            MachineConfig::Prefill(config) => {
                Player::Prefill(shell(slot, Prefill::new(*config), stage.recipient()))
            }
            MachineConfig::Decode(config) => {
                Player::Decode(shell(slot, Decode::new(*config), stage.recipient()))
            }
            MachineConfig::Transfer(config) => {
                Player::Transfer(shell(slot, Transfer::new(*config), stage.recipient()))
            }
        }
    }

    fn play(&self, now: Nanos, input: MachineInput) {
        let sent = match (self, input) {
            (Player::Router(port), MachineInput::Router(input)) => port.send(now, input).is_ok(),
            (Player::Prefill(port), MachineInput::Prefill(input)) => port.send(now, input).is_ok(),
            (Player::Decode(port), MachineInput::Decode(input)) => port.send(now, input).is_ok(),
            (Player::Transfer(port), MachineInput::Transfer(input)) => {
                port.send(now, input).is_ok()
            }
            (_, input) => panic!("input for another machine: {input:?}"),
        };
        assert!(sent, "the credit of the turn before is back");
    }
}

/// The actor that owns the world.
struct Stage {
    simulation: Option<Simulation>,
    players: Vec<Option<Player>>,
    /// Whether the turn that is out asks for gauges.
    gauges: bool,
    done: Option<oneshot::Sender<Report>>,
}

impl Stage {
    /// Hands out turns until one has to be waited for.
    fn advance(&mut self, context: &Context<Self>) {
        while let Some(simulation) = &mut self.simulation {
            let Some(Turn { now, actor, slot, what, gauges }) = simulation.next() else {
                let report = self.simulation.take().map(Simulation::into_report);
                if let (Some(report), Some(done)) = (report, self.done.take()) {
                    // The receiver is only gone if the system is stopping.
                    let _ = done.send(report);
                }
                return;
            };
            let index = slot as usize;
            if self.players.len() <= index {
                self.players.resize_with(index + 1, || None);
            }
            match what {
                What::Start(config) => {
                    self.players[index] = Some(Player::new(slot, config, context));
                    apply_nothing(simulation, actor);
                }
                What::Stop => self.players[index] = None,
                What::Input(input) => {
                    self.gauges = gauges;
                    self.players[index].as_ref().expect("was started").play(now, input);
                    return;
                }
            }
        }
    }
}

/// A machine that has just come into being wants nothing.
fn apply_nothing(simulation: &mut Simulation, actor: ActorId) {
    match actor {
        ActorId::Router => simulation.apply(Effects::Router(&mut Outbox::new()), None, None),
        ActorId::Prefill(_) => simulation.apply(Effects::Prefill(&mut Outbox::new()), None, None),
        ActorId::Decode(_) => simulation.apply(Effects::Decode(&mut Outbox::new()), None, None),
        ActorId::Transfer(..) => {
            simulation.apply(Effects::Transfer(&mut Outbox::new()), None, None);
        }
    }
}

impl Actor for Stage {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        self.advance(context);
    }
}

macro_rules! played {
    ($($kind:ident: $effect:ty;)*) => {$(
        impl Handler<Played<$effect>> for Stage {
            type Result = ();

            fn handle(&mut self, turn: Played<$effect>, context: &mut Self::Context) {
                let Played { effects, deadline, gauges, credit, .. } = turn;
                let gauges = self.gauges.then_some(gauges);
                if let Some(simulation) = &mut self.simulation {
                    let mut outbox = Outbox::from(effects);
                    simulation.apply(Effects::$kind(&mut outbox), deadline, gauges);
                }
                drop(credit);
                self.advance(context);
            }
        }
    )*};
}

played! {
    Router: RouterEffect;
    Prefill: PrefillEffect;
    Decode: DecodeEffect;
    Transfer: TransferEffect;
}
