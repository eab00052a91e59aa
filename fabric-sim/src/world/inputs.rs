//! Inputs as places of a run: faults that wait for `input.due` and `input.handled` fire right before and
//! right after one.
//!
//! Deadlines do not count, nor do registrations, acknowledgements, signs of life and what the router
//! is told of servers: they come all the time, whatever becomes of a request.

use super::actor::{MachineId, MachineInput};
use super::event::{SimEnvelope, SimEvent};
use super::{ReadyStep, Simulation};
use crate::faults::{FaultSubject, ROUTER};
use kvferry_engine::core::decode::DecodeInput;
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::prefill::PrefillInput;
use kvferry_engine::core::router::RouterInput;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::ControlEvent;
use kvferry_scenarios::Run;
use kvferry_scenarios::lists::TriggerEvent;
use std::fmt::Debug;

/// Longest text of an input, in characters.
const WORDS_MAX: usize = 72;

/// An input of the safety phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputPlace {
    /// `nth` of a fault that fires before it.
    pub due: u32,
    /// `nth` of a fault that fires after it; none if nobody was left to handle it.
    pub handled: Option<u32>,
    pub at: Nanos,
    /// The instance that has it; [`ROUTER`] is the router.
    pub instance: u16,
    /// Which machine gets what.
    pub what: String,
}

/// Inputs so far.
#[derive(Debug)]
pub(super) struct InputLog {
    /// Some fault waits for inputs, or they are listed.
    is_on: bool,
    /// The inputs of the run, if they are listed.
    list: Option<Vec<InputPlace>>,
    due: u32,
    handled: u32,
    /// The instance of the input that a machine is handling.
    current: Option<u16>,
}

impl InputLog {
    pub(super) fn new(run: &Run, lists: bool) -> InputLog {
        let waits = |fault: &kvferry_scenarios::run::InjectedFault| fault.trigger.is_input();
        let is_on = lists || run.faults.iter().any(waits);
        InputLog { is_on, list: lists.then(Vec::new), due: 0, handled: 0, current: None }
    }

    pub(super) fn take(&mut self) -> Vec<InputPlace> {
        self.list.take().unwrap_or_default()
    }
}

/// True for an input that is about a request, a peer or an operation.
fn counts(id: MachineId, input: &MachineInput) -> bool {
    let of_servers = matches!(
        input,
        MachineInput::Router(RouterInput::Probed { .. } | RouterInput::Load { .. })
    );
    let background =
        matches!(frame(input), Some(Frame::Register(_) | Frame::Ack { .. } | Frame::Probe { .. }));
    *input != id.tick() && !of_servers && !background
}

/// The frame that an input is, if it is one.
fn frame(input: &MachineInput) -> Option<Frame> {
    let (MachineInput::Router(RouterInput::Control(event))
    | MachineInput::Prefill(PrefillInput::Control(event))
    | MachineInput::Decode(DecodeInput::Control(event))) = input
    else {
        return None;
    };
    let ControlEvent::Frame { parts, .. } = event else { return None };
    native::decode(parts.first()?).ok()
}

/// An input in a few words.
fn words(who: &str, input: &impl Debug) -> String {
    format!("{who}: {input:?}").chars().take(WORDS_MAX).collect()
}

impl Simulation {
    /// Tells faults of the input that a machine handles next, if it is one that counts.
    pub(super) fn next_input_due(&mut self) {
        self.inputs.current = None;
        if !self.inputs.is_on {
            return;
        }
        let Some(ReadyStep::Input { slot, incarnation, input, .. }) = self.ready.front() else {
            return;
        };
        let machine = &self.machines[*slot as usize];
        if !machine.alive || machine.incarnation != *incarnation || !counts(machine.id, input) {
            return;
        }
        let instance = machine.instance.unwrap_or(ROUTER);
        let list = self.inputs.list.is_some();
        let what = if list { machine_words(machine.id, input) } else { String::new() };
        self.input_due(instance, what);
        self.inputs.current = Some(instance);
    }

    /// Tells faults of an input that an engine is about to get; whose engine it is, if it gets it.
    pub(super) fn engine_input_due(&mut self, entry: SimEvent) -> Option<u16> {
        if !self.inputs.is_on {
            return None;
        }
        let (instance, incarnation, input) = match entry {
            SimEvent::Layers { instance, incarnation } => (instance, Some(incarnation), None),
            SimEvent::Envelope(slot) => match self.envelopes.get(slot)? {
                SimEnvelope::Engine { instance, incarnation, input } => {
                    (*instance, Some(*incarnation), Some(input))
                }
                SimEnvelope::Ask { instance, input, .. } => (*instance, None, Some(input)),
                _ => return None,
            },
            _ => return None,
        };
        let acts = |world: &Simulation| {
            let state = &world.instances[usize::from(instance)];
            let is_same = incarnation.is_none_or(|incarnation| state.incarnation == incarnation);
            is_same && state.process.is_some() && !state.paused
        };
        if !acts(self) {
            return None;
        }
        let what = match (&self.inputs.list, input) {
            (None, _) => String::new(),
            (Some(_), Some(input)) => words(&format!("engine {instance}"), input),
            (Some(_), None) => format!("engine {instance}: layers are computed"),
        };
        self.input_due(instance, what);
        acts(self).then_some(instance)
    }

    fn input_due(&mut self, instance: u16, what: String) {
        self.inputs.due += 1;
        let (due, at) = (self.inputs.due, self.now);
        if let Some(list) = self.inputs.list.as_mut().filter(|_| !self.quiescence.is_settled()) {
            list.push(InputPlace { due, handled: None, at, instance, what });
        }
        self.observer.input(self.now, TriggerEvent::InputDue, &FaultSubject::at(instance));
        if self.observer.faults.has_output() {
            self.perform_actions();
        }
    }

    /// The machine whose turn it was has handled what was due.
    pub(super) fn machine_handled(&mut self) {
        if let Some(instance) = self.inputs.current.take() {
            self.input_handled(instance);
        }
    }

    /// Tells faults that an input was handled.
    pub(super) fn input_handled(&mut self, instance: u16) {
        self.inputs.handled += 1;
        let (due, handled) = (self.inputs.due, self.inputs.handled);
        let last = self.inputs.list.as_mut().and_then(|list| list.last_mut());
        if let Some(place) = last.filter(|place| place.due == due) {
            place.handled = Some(handled);
        }
        self.observer.input(self.now, TriggerEvent::InputHandled, &FaultSubject::at(instance));
    }
}

/// What a machine gets, in a few words.
fn machine_words(id: MachineId, input: &MachineInput) -> String {
    let who = id.to_string();
    match frame(input) {
        Some(Frame::Data { message, .. }) => words(&who, &message),
        Some(frame) => words(&who, &frame),
        None => words(&who, input),
    }
}
