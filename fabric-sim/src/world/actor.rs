//! The state machines of a simulation, seen as one kind of thing.

use kvferry_engine::core::config::CoreConfig;
use kvferry_engine::core::decode::{Decode, DecodeEffect, DecodeInput};
use kvferry_engine::core::ids::{EngineId, Incarnation};
use kvferry_engine::core::payload::{PayloadConfig, PayloadCore, PayloadEffect, PayloadInput};
use kvferry_engine::core::prefill::{Prefill, PrefillEffect, PrefillInput};
use kvferry_engine::core::router::{Router, RouterConfig, RouterEffect, RouterInput};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::core::transfer::{Transfer, TransferConfig, TransferEffect, TransferInput};
use kvferry_engine::core::{Gauges, Machine, Outbox};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A machine of a simulation; the same over all incarnations of its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum MachineId {
    Router,
    /// The core of the prefill instance with this index into the instances of the run.
    Prefill(u16),
    /// The core of the decode instance with this index.
    Decode(u16),
    /// The transfer actor of an instance and TP rank.
    Transfer(u16, u16),
    /// The payloads of the host with this index into the hosts of the run.
    Payload(u16),
}

impl fmt::Display for MachineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MachineId::Router => f.write_str("router"),
            MachineId::Prefill(instance) => write!(f, "prefill {instance}"),
            MachineId::Decode(instance) => write!(f, "decode {instance}"),
            MachineId::Transfer(instance, rank) => write!(f, "transfer {instance}/{rank}"),
            MachineId::Payload(host) => write!(f, "payload {host}"),
        }
    }
}

/// What a machine is made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MachineConfig {
    Router(Box<RouterConfig>, Incarnation),
    Prefill(Box<CoreConfig>),
    Decode(Box<CoreConfig>),
    Transfer(Box<TransferConfig>),
    /// With the prefill core of its host.
    Payload(Box<PayloadConfig>, EngineId, Incarnation),
}

/// An input of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MachineInput {
    Router(RouterInput),
    /// Of a prefill core.
    Prefill(PrefillInput),
    /// Of a decode core.
    Decode(DecodeInput),
    /// Of a transfer actor.
    Transfer(TransferInput),
    /// Of the payloads of a host.
    Payload(PayloadInput),
}

/// An effect of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MachineEffect {
    Router(RouterEffect),
    /// Of a prefill core.
    Prefill(PrefillEffect),
    /// Of a decode core.
    Decode(DecodeEffect),
    /// Of a transfer actor.
    Transfer(TransferEffect),
    /// Of the payloads of a host.
    Payload(PayloadEffect),
}

/// One machine and its outbox.
#[derive(Debug)]
pub enum AnyMachine {
    Router(Box<Router>, Outbox<RouterEffect>),
    Prefill(Box<Prefill>, Outbox<PrefillEffect>),
    Decode(Box<Decode>, Outbox<DecodeEffect>),
    Transfer(Box<Transfer>, Outbox<TransferEffect>),
    Payload(Box<PayloadCore>, Outbox<PayloadEffect>),
}

/// Does the same with whichever machine it is and its outbox.
macro_rules! each {
    ($any:expr, $machine:pat, $out:pat => $does:expr) => {
        match $any {
            AnyMachine::Router($machine, $out) => $does,
            AnyMachine::Prefill($machine, $out) => $does,
            AnyMachine::Decode($machine, $out) => $does,
            AnyMachine::Transfer($machine, $out) => $does,
            AnyMachine::Payload($machine, $out) => $does,
        }
    };
}

impl AnyMachine {
    pub fn new(config: MachineConfig) -> AnyMachine {
        match config {
            MachineConfig::Router(config, incarnation) => {
                AnyMachine::Router(Box::new(Router::new(*config, incarnation)), Outbox::new())
            }
            MachineConfig::Prefill(config) => {
                AnyMachine::Prefill(Box::new(Prefill::new(*config)), Outbox::new())
            }
            MachineConfig::Decode(config) => {
                AnyMachine::Decode(Box::new(Decode::new(*config)), Outbox::new())
            }
            MachineConfig::Transfer(config) => {
                AnyMachine::Transfer(Box::new(Transfer::new(*config)), Outbox::new())
            }
            MachineConfig::Payload(config, engine, incarnation) => {
                let core = PayloadCore::with_peers(*config, engine, incarnation);
                AnyMachine::Payload(Box::new(core), Outbox::new())
            }
        }
    }

    /// Takes one input; the effects wait in the outbox.
    ///
    /// # Panics
    /// If the input is for another kind of machine.
    pub fn handle(&mut self, now: Nanos, input: MachineInput) {
        match (self, input) {
            (AnyMachine::Router(machine, out), MachineInput::Router(input)) => {
                machine.handle(now, input, out);
            }
            (AnyMachine::Prefill(machine, out), MachineInput::Prefill(input)) => {
                machine.handle(now, input, out);
            }
            (AnyMachine::Decode(machine, out), MachineInput::Decode(input)) => {
                machine.handle(now, input, out);
            }
            (AnyMachine::Transfer(machine, out), MachineInput::Transfer(input)) => {
                machine.handle(now, input, out);
            }
            (AnyMachine::Payload(machine, out), MachineInput::Payload(input)) => {
                machine.handle(now, input, out);
            }
            (_, input) => panic!("input for another machine: {input:?}"),
        }
    }

    /// True if no effects wait.
    pub(super) fn is_silent(&self) -> bool {
        each!(self, _, out => out.is_empty())
    }

    /// Takes the effects that wait.
    pub fn take_effects(&mut self) -> Vec<MachineEffect> {
        each!(self, _, out => out.drain().map(MachineEffect::from).collect())
    }

    pub fn deadline(&self) -> Option<Nanos> {
        each!(self, machine, _ => machine.deadline())
    }

    pub fn gauges(&self) -> Gauges {
        each!(self, machine, _ => machine.gauges())
    }
}

macro_rules! wraps {
    ($($kind:ident: $input:ty, $effect:ty;)*) => {$(
        impl From<$input> for MachineInput {
            fn from(input: $input) -> MachineInput {
                MachineInput::$kind(input)
            }
        }

        impl From<$effect> for MachineEffect {
            fn from(effect: $effect) -> MachineEffect {
                MachineEffect::$kind(effect)
            }
        }
    )*};
}

wraps! {
    Router: RouterInput, RouterEffect;
    Prefill: PrefillInput, PrefillEffect;
    Decode: DecodeInput, DecodeEffect;
    Transfer: TransferInput, TransferEffect;
    Payload: PayloadInput, PayloadEffect;
}

impl MachineId {
    /// The input that says that a deadline may be due.
    pub fn tick(self) -> MachineInput {
        match self {
            MachineId::Router => RouterInput::Tick.into(),
            MachineId::Prefill(_) => PrefillInput::Tick.into(),
            MachineId::Decode(_) => DecodeInput::Tick.into(),
            MachineId::Transfer(..) => TransferInput::Tick.into(),
            MachineId::Payload(_) => PayloadInput::Tick.into(),
        }
    }
}
