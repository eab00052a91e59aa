//! Instances that change their role.
//!
//! One that registers so goes on as it is until its legs have ended, and what it says to the router
//! meanwhile is what it will say: its role and its incarnation are those of its next start. Legs for
//! what it will be wait until then, as connections do that nobody has accepted.

use super::Simulation;
use super::event::{ProcessEvent, SimEnvelope, SimEvent};
use super::process::{SimInstance, wall_clock_incarnation};
use kvferry_engine::core::command::ControlCommand;
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::ids::LegId;
use kvferry_engine::core::machine::Machine;
use kvferry_engine::core::message::Registration;
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::engine::EngineInput;
use kvferry_scenarios::run::InstanceSettings;

/// How long an instance that has registered waits for legs of its former role, which may be under way.
const LINGER: Nanos = Nanos::from_ms(5);

/// From the end of a process to its next start.
const PAUSE: Nanos = Nanos::from_ms(1);

/// A switch to the other role at the next start.
#[derive(Debug)]
pub(super) struct RoleSwitch {
    /// When it registered so; none if it does that after its start.
    told: Option<Nanos>,
    /// Its legs have ended or are ended: it is about to start as what it registered.
    ends: bool,
    /// Legs for what it will be.
    waiting: Vec<(LegId, EngineInput)>,
}

impl RoleSwitch {
    /// The instance has registered in its next role and incarnation.
    pub(super) fn is_told(&self) -> bool {
        self.told.is_some()
    }

    /// That is the incarnation that starts next, as nothing else has come between.
    pub(super) fn is_as_told(&self) -> bool {
        self.ends
    }
}

impl SimInstance {
    /// What it is from its next start on.
    pub(super) fn next(&self) -> InstanceSettings {
        let spec = self.becomes.as_ref().unwrap_or(&self.spec);
        if self.switch.is_some() { spec.switched() } else { spec.clone() }
    }
}

impl Simulation {
    /// An instance is to be in the other role from its next start on.
    pub(super) fn switch(&mut self, index: u16, registers: bool) {
        let instance = &mut self.instances[usize::from(index)];
        if instance.switch.is_some() || instance.spec.is_pool {
            return;
        }
        let acts = instance.process.is_some() && !instance.paused;
        let told = (registers && acts).then_some(self.now);
        instance.switch = Some(RoleSwitch { told, ends: false, waiting: Vec::new() });
        if told.is_some() {
            self.drain(index);
            let what = ProcessEvent::Switch;
            self.queue.push(self.now + LINGER, SimEvent::Process { instance: index, what });
        }
    }

    /// What an instance that switches says to the router.
    pub(super) fn in_new_role(&self, index: u16, command: ControlCommand) -> ControlCommand {
        let instance = &self.instances[usize::from(index)];
        let tells = instance.switch.as_ref().is_some_and(RoleSwitch::is_told);
        match command {
            ControlCommand::Send { link, frame } if tells => {
                let frame = match native::decode(&frame) {
                    Ok(Frame::Register(said)) => {
                        let number = instance.incarnation_number + 1;
                        let registration = Registration {
                            role: instance.next().role,
                            incarnation: wall_clock_incarnation(index, number, self.options.wall),
                            // The process that it announces counts from 1.
                            sequence: 0,
                            draining: false,
                            troubles: Vec::new(),
                            failed: Vec::new(),
                            ..said
                        };
                        native::encode(&Frame::Register(registration))
                    }
                    _ => frame,
                };
                ControlCommand::Send { link, frame }
            }
            other => other,
        }
    }

    /// Keeps a leg that is for what an instance will be.
    pub(super) fn wait_for_switch(
        &mut self,
        index: u16,
        leg: LegId,
        input: EngineInput,
    ) -> Option<EngineInput> {
        let instance = &mut self.instances[usize::from(index)];
        let lives = instance.process.is_some();
        let (Some(switch), EngineInput::Leg { body, .. }) = (&mut instance.switch, &input) else {
            return Some(input);
        };
        let role = body.role();
        if !switch.is_told() || !(lives || switch.ends) || role == instance.spec.role {
            return Some(input);
        }
        switch.waiting.push((leg, input));
        None
    }

    /// The engine of an instance that switches did something; it may have been its last.
    pub(super) fn look_at_switch(&mut self, instance: u16) {
        if self.has_ended_legs(instance) {
            let what = ProcessEvent::Switch;
            self.queue.push(self.now, SimEvent::Process { instance, what });
        }
    }

    fn has_ended_legs(&self, index: u16) -> bool {
        let SimInstance { switch, process, paused, .. } = &self.instances[usize::from(index)];
        let Some(RoleSwitch { told: Some(told), ends: false, .. }) = switch else { return false };
        let engine = process.as_ref().and_then(|process| process.engine.as_ref());
        let is_idle = engine.is_some_and(|engine| engine.gauges().transfers == 0);
        is_idle && !paused && self.now >= *told + LINGER
    }

    pub(super) fn switch_if_idle(&mut self, index: u16) {
        if self.has_ended_legs(index) {
            self.end_switch(index);
        }
    }

    /// The process of an instance that switches ends, and the next one starts.
    pub(super) fn end_switch(&mut self, index: u16) {
        let instance = &mut self.instances[usize::from(index)];
        let Some(switch) = &mut instance.switch else { return };
        if instance.process.is_none() || switch.ends {
            return;
        }
        switch.ends = switch.is_told();
        self.crash(index);
        self.instances[usize::from(index)].returns = true;
        let what = ProcessEvent::Start;
        self.queue.push(self.now + PAUSE, SimEvent::Process { instance: index, what });
    }

    /// An instance that has registered in its next role does not come to that.
    pub(super) fn give_up_switch(&mut self, index: u16) {
        let switch = &self.instances[usize::from(index)].switch;
        if switch.as_ref().is_some_and(RoleSwitch::is_told) {
            self.crash(index);
            self.interrupt_switch(index);
        }
    }

    /// Legs that waited reach the process that they are for.
    pub(super) fn serve_waiting(&mut self, instance: u16, switch: RoleSwitch) {
        for (leg, input) in switch.waiting {
            self.post(Nanos::ZERO, SimEnvelope::Ask { instance, leg, input });
        }
    }

    /// The process that an instance has announced does not come: connections that wait for it break.
    pub(super) fn interrupt_switch(&mut self, index: u16) {
        let after = self.detection(index);
        let Some(switch) = &mut self.instances[usize::from(index)].switch else { return };
        switch.ends = false;
        for (leg, _) in std::mem::take(&mut switch.waiting) {
            self.post(after, SimEnvelope::Broken { leg });
        }
    }
}
