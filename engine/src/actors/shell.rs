//! One machine as an actor.

use super::credit::{Credit, Port};
use crate::core::machine::{Gauges, Machine, Outbox};
use crate::core::time::Nanos;
use actix::{Actor, Context, Handler, Message, Recipient};

/// One input for a machine.
#[derive(Debug)]
pub struct Turn<I> {
    /// The time that the machine is told.
    pub now: Nanos,
    /// The input.
    pub input: I,
    /// The place it takes.
    pub credit: Credit,
}

impl<I> Message for Turn<I> {
    type Result = ();
}

/// What a machine wants done after one turn.
#[derive(Debug)]
pub struct Effects<E> {
    /// Which shell, as its maker numbered it.
    pub shell: u64,
    /// In order.
    pub effects: Vec<E>,
    /// When the machine wants its next tick.
    pub deadline: Option<Nanos>,
    /// Sizes of the machine's tables.
    pub gauges: Gauges,
    /// Drop it when the effects are performed.
    pub credit: Credit,
}

impl<E> Message for Effects<E> {
    type Result = ();
}

/// An actor that owns a machine and knows nothing else.
pub struct Shell<M: Machine> {
    id: u64,
    machine: M,
    outbox: Outbox<M::Effect>,
    outlet: Recipient<Effects<M::Effect>>,
}

impl<M: Machine + Unpin + 'static> Shell<M> {
    /// Starts the actor in the current arbiter with `credits` places in its mailbox. Every turn is
    /// answered with one message to `outlet`, which therefore never holds more than `credits` of
    /// them.
    pub fn start(
        id: u64,
        machine: M,
        outlet: Recipient<Effects<M::Effect>>,
        credits: usize,
    ) -> Port<Shell<M>> {
        let address = Shell::create(|context: &mut Context<Shell<M>>| {
            context.set_mailbox_capacity(credits.max(1));
            Shell { id, machine, outbox: Outbox::new(), outlet }
        });
        Port::new(address, credits)
    }
}

impl<M: Machine + Unpin + 'static> Actor for Shell<M> {
    type Context = Context<Self>;
}

impl<M: Machine + Unpin + 'static> Handler<Turn<M::Input>> for Shell<M> {
    type Result = ();

    fn handle(&mut self, turn: Turn<M::Input>, _: &mut Self::Context) {
        self.machine.handle(turn.now, turn.input, &mut self.outbox);
        self.outlet.do_send(Effects {
            shell: self.id,
            effects: self.outbox.take(),
            deadline: self.machine.deadline(),
            gauges: self.machine.gauges(),
            credit: turn.credit,
        });
    }
}
