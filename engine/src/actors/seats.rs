//! The two kinds of seat: over a data plane and over a control plane.

use super::driver::Seat;
use crate::core::command::ControlCommand;
use crate::core::decode::{Decode, DecodeEffect, DecodeInput};
use crate::core::machine::Machine;
use crate::core::message::Report;
use crate::core::prefill::{Prefill, PrefillEffect, PrefillInput};
use crate::core::time::Nanos;
use crate::core::transfer::{Transfer, TransferEffect, TransferInput};
use crate::driver::{perform_control, perform_data};
use crate::fabric::{ControlEvent, ControlPlane, DataPlane, Wake};
use actix::{Message, Recipient};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::task::Waker;

/// A report of a transfer actor for its core.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct RankReport {
    /// TP rank.
    pub rank: u16,
    /// What it says.
    pub report: Report,
}

/// The place of a transfer actor; its reports go to `core`.
pub struct DataSeat {
    /// TP rank.
    pub rank: u16,
    /// Its data plane.
    pub plane: Box<dyn DataPlane>,
    /// Where its reports go.
    pub core: Recipient<RankReport>,
}

impl Seat for DataSeat {
    type Machine = Transfer;

    fn poll(&mut self, now: Nanos, out: &mut VecDeque<TransferInput>) -> Wake {
        let mut events = Vec::new();
        let wake = self.plane.poll(now, &mut events);
        out.extend(events.into_iter().map(TransferInput::Data));
        wake
    }

    fn perform(&mut self, effect: TransferEffect, out: &mut VecDeque<TransferInput>) {
        match effect {
            TransferEffect::Data(command) => {
                out.extend(perform_data(self.plane.as_mut(), command).map(TransferInput::Refused));
            }
            TransferEffect::Report(report) => {
                self.core.do_send(RankReport { rank: self.rank, report });
            }
        }
    }

    fn tick(&self) -> TransferInput {
        TransferInput::Tick
    }

    fn set_waker(&mut self, waker: Waker) {
        self.plane.set_waker(waker);
    }

    fn doorbell(&mut self) -> Option<BorrowedFd<'_>> {
        self.plane.doorbell()
    }
}

/// A machine with a control plane.
pub trait CoreMachine: Machine {
    /// Its tick.
    fn tick() -> Self::Input;

    /// A control event as its input.
    fn control(event: ControlEvent) -> Self::Input;

    /// The control command in an effect, or the effect.
    ///
    /// # Errors
    /// Any other effect, unchanged.
    fn command(effect: Self::Effect) -> Result<ControlCommand, Self::Effect>;
}

macro_rules! core_machine {
    ($machine:ty, $input:ident, $effect:ident) => {
        impl CoreMachine for $machine {
            fn tick() -> $input {
                $input::Tick
            }

            fn control(event: ControlEvent) -> $input {
                $input::Control(event)
            }

            fn command(effect: $effect) -> Result<ControlCommand, $effect> {
                match effect {
                    $effect::Control(command) => Ok(command),
                    other => Err(other),
                }
            }
        }
    };
}

core_machine!(Prefill, PrefillInput, PrefillEffect);
core_machine!(Decode, DecodeInput, DecodeEffect);

/// An effect that is not for the control plane: a job or an answer.
#[derive(Debug)]
pub struct Foreign<E>(pub E);

impl<E> Message for Foreign<E> {
    type Result = ();
}

/// The place of a prefill or decode actor; what is not for the control plane goes to
/// `outlet`.
pub struct ControlSeat<M: CoreMachine> {
    /// Its control plane.
    pub plane: Box<dyn ControlPlane>,
    /// Where its other effects go.
    pub outlet: Recipient<Foreign<M::Effect>>,
}

impl<M: CoreMachine + Unpin + 'static> Seat for ControlSeat<M> {
    type Machine = M;

    fn poll(&mut self, now: Nanos, out: &mut VecDeque<M::Input>) -> Wake {
        let mut events = Vec::new();
        let wake = self.plane.poll(now, &mut events);
        out.extend(events.into_iter().map(M::control));
        wake
    }

    fn perform(&mut self, effect: M::Effect, out: &mut VecDeque<M::Input>) {
        match M::command(effect) {
            Ok(command) => {
                out.extend(perform_control(self.plane.as_mut(), command).map(M::control))
            }
            Err(other) => self.outlet.do_send(Foreign(other)),
        }
    }

    fn tick(&self) -> M::Input {
        M::tick()
    }

    fn set_waker(&mut self, waker: Waker) {
        self.plane.set_waker(waker);
    }
}
