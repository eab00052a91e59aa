//! Performs the effects of machines on planes and passes on what they tell one another.

use super::actor::MachineInput;
use super::event::SimEnvelope;
use super::observer::Observer;
use super::process::DataPlaneOwner;
use super::{LOCAL, ReadyStep, Simulation};
use crate::dma::{DataPlaneIx, DmaHooks, DmaMessage, DmaOutput, OpDecision, OpInfo, SimDataPlane};
use crate::net::{
    ControlNetwork, FrameDecision, FrameInfo, NetCalls, NetContext, NetHooks, NetMessage,
    NetOutput, SimControlPlane,
};
use crate::observation::{Observation, SimProcessId, SimRankId};
use crate::queue::StepContext;
use kvferry_engine::core::command::{ControlCommand, DataCommand, DataRefusal};
use kvferry_engine::core::decode::{DecodeEffect, DecodeInput};
use kvferry_engine::core::message::{Role, TransferJob, TransferReport};
use kvferry_engine::core::payload::PayloadInput;
use kvferry_engine::core::prefill::{PrefillEffect, PrefillInput};
use kvferry_engine::core::router::{RouterEffect, RouterInput};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::core::transfer::{TransferEffect, TransferInput};
use kvferry_engine::effects::{perform_control, perform_data};
use kvferry_engine::fabric::{
    Completion, ControlEvent, ControlPlane, DataEvent, DataPlane, FabricError, Refused,
};
use kvferry_scenarios::engine::EngineInput;

impl Simulation {
    pub(super) fn router_effect(
        &mut self,
        (slot, cause): (u32, u64),
        effect: RouterEffect,
    ) -> Option<MachineInput> {
        self.tracer.effect(self.now, super::MachineId::Router, cause, &effect);
        match effect {
            RouterEffect::Control(command) => {
                let refused = perform_control(&mut self.router.control, command)?;
                let input = RouterInput::Control(refused).into();
                return Some(self.follows(slot, self.router_incarnation(), input, 0));
            }
            RouterEffect::Dispatch { leg, client, engine, http, body, expected, .. } => {
                self.dispatch(self.world_leg(leg), client, &engine, &http, (body, expected));
            }
            RouterEffect::Probe { probe, http, .. } => {
                let answers = self.answers_http(&http);
                self.tell(0, RouterInput::Probed { probe, answers, models: None }.into());
            }
            // Engines of the simulation answer legs with the cause.
            RouterEffect::LegCauses { .. } => {}
            RouterEffect::AskLoad { http } => self.ask_load(&http),
            RouterEffect::CancelLeg { leg } => self.cancel_leg(self.world_leg(leg)),
            RouterEffect::Answer { client, answer } => self.client_answered(client, &answer),
        }
        None
    }

    pub(super) fn prefill_effect(
        &mut self,
        (slot, cause): (u32, u64),
        effect: PrefillEffect,
    ) -> Option<MachineInput> {
        let (id, instance) = self.owner(slot);
        let seq = self.tracer.effect(self.now, id, cause, &effect);
        match effect {
            PrefillEffect::Control(command) => {
                return self.control_command(instance, slot, command);
            }
            PrefillEffect::Job(job) => self.job(instance, job, seq),
            PrefillEffect::Answer(answer) => {
                let who = self.who(instance);
                self.observer
                    .observe(self.now, &Observation::PrefillAnswer { who, answer: &answer });
                match self.host_of(instance) {
                    Some(host) => self.tell_payloads(host, PayloadInput::Prefill(answer), seq),
                    None => self.tell_engine(instance, EngineInput::Prefill(answer)),
                }
            }
            PrefillEffect::Directory(news) => {
                if let Some(host) = self.host_of(instance) {
                    self.tell_payloads(host, PayloadInput::PrefillPeer(news), seq);
                }
            }
            PrefillEffect::Violation(_)
            | PrefillEffect::Refused { .. }
            | PrefillEffect::SpeaksMoriio { .. }
            | PrefillEffect::Router(_) => {}
        }
        None
    }

    pub(super) fn decode_effect(
        &mut self,
        (slot, cause): (u32, u64),
        effect: DecodeEffect,
    ) -> Option<MachineInput> {
        let (id, instance) = self.owner(slot);
        let seq = self.tracer.effect(self.now, id, cause, &effect);
        match effect {
            DecodeEffect::Control(command) => {
                return self.control_command(instance, slot, command);
            }
            DecodeEffect::Job(job) => self.job(instance, job, seq),
            DecodeEffect::Answer(answer) => {
                let who = self.who(instance);
                self.observer
                    .observe(self.now, &Observation::DecodeAnswer { who, answer: &answer });
                self.stats.answered(self.now, instance, &answer);
                match self.host_of(instance) {
                    Some(host) => self.tell_payloads(host, PayloadInput::Decode(answer), seq),
                    None => self.tell_engine(instance, EngineInput::Decode(answer)),
                }
            }
            DecodeEffect::Directory(news) => {
                if let Some(host) = self.host_of(instance) {
                    self.tell_payloads(host, PayloadInput::DecodePeer(news), seq);
                }
            }
            DecodeEffect::Violation(_)
            | DecodeEffect::Refused { .. }
            | DecodeEffect::SpeaksMoriio { .. }
            | DecodeEffect::Router(_) => {}
        }
        None
    }

    pub(super) fn transfer_effect(
        &mut self,
        (slot, cause): (u32, u64),
        effect: TransferEffect,
    ) -> Option<MachineInput> {
        let (id, instance) = self.owner(slot);
        let rank = (slot - self.core_slot(instance) - 1) as u16;
        let seq = self.tracer.effect(self.now, id, cause, &effect);
        match effect {
            TransferEffect::Data(command) => self.data_command(instance, rank, slot, command, seq),
            TransferEffect::Report(report) => {
                self.tell_core(instance, rank, report, seq);
                None
            }
        }
    }

    /// Gives what the machine of a slot had its planes do to the networks.
    pub(super) fn flush(&mut self, slot: u32) {
        match self.machines[slot as usize].id {
            super::MachineId::Router => self.flush_router(),
            super::MachineId::Prefill(instance) | super::MachineId::Decode(instance) => {
                self.flush_control(instance);
            }
            super::MachineId::Transfer(instance, rank) => self.flush_data(instance, rank),
            super::MachineId::Payload(_) => {}
        }
    }

    /// Has a machine handle an input ahead of all that is due, as the actor does which it shares a
    /// process with, or which it is.
    fn follows(
        &mut self,
        slot: u32,
        incarnation: u32,
        input: MachineInput,
        cause: u64,
    ) -> MachineInput {
        self.follow.push_back(ReadyStep::Input { slot, incarnation, input: input.clone(), cause });
        input
    }

    pub(super) fn owner(&self, slot: u32) -> (super::MachineId, u16) {
        let actor = &self.machines[slot as usize];
        (actor.id, actor.instance.expect("only the router has no instance"))
    }

    fn tell_engine(&mut self, instance: u16, input: EngineInput) {
        let incarnation = self.instances[instance as usize].incarnation;
        self.post(LOCAL, SimEnvelope::Engine { instance, incarnation, input });
    }

    fn job(&mut self, instance: u16, job: TransferJob, cause: u64) {
        let who = self.who(instance);
        self.observer.observe(self.now, &Observation::Job { who, job: &job });
        if self.instances[instance as usize].is_whole {
            for rank in 0..self.instances[instance as usize].spec.tp {
                let (slot, job) = (self.rank_slot(instance, rank), job.clone());
                let (incarnation, input) = (who.incarnation, TransferInput::Job(job).into());
                self.follow.push_back(ReadyStep::Input { slot, incarnation, input, cause });
            }
            return;
        }
        self.post(LOCAL, SimEnvelope::Job { instance, incarnation: who.incarnation, job, cause });
    }

    /// Hands a job to all ranks; a slow one gets it later.
    pub(super) fn send_to_ranks(
        &mut self,
        instance: u16,
        incarnation: u32,
        job: TransferJob,
        cause: u64,
    ) {
        if !self.instances[instance as usize].is_current(incarnation) {
            return;
        }
        for rank in 0..self.instances[instance as usize].spec.tp {
            let input = TransferInput::Job(job.clone()).into();
            self.tell_rank(instance, rank, incarnation, input, cause);
        }
    }

    /// Gives an input to a transfer actor now, or later if its rank lags. Inputs keep their order,
    /// also when the lag ends.
    pub(super) fn tell_rank(
        &mut self,
        instance: u16,
        rank: u16,
        incarnation: u32,
        input: MachineInput,
        cause: u64,
    ) {
        let slot = self.rank_slot(instance, rank);
        let lag = self.observer.lag(instance, rank).unwrap_or(Nanos::ZERO);
        let is_whole = self.instances[instance as usize].is_whole;
        let late = &mut self.machines[slot as usize].late;
        if is_whole || (lag == Nanos::ZERO && *late < self.now) {
            return self.ready.push_back(ReadyStep::Input { slot, incarnation, input, cause });
        }
        *late = (*late).max(self.now + lag);
        let after = *late - self.now;
        self.post(after, SimEnvelope::Machine { slot, incarnation, input, cause });
    }

    fn tell_core(&mut self, instance: u16, rank: u16, report: TransferReport, cause: u64) {
        let who = self.who(instance);
        let from = SimRankId { who, rank };
        self.observer.observe(self.now, &Observation::Report { from, report: &report });
        let input = match self.instances[instance as usize].spec.role {
            Role::Prefill => PrefillInput::Report { rank, report }.into(),
            Role::Decode => DecodeInput::Report { rank, report }.into(),
        };
        let (slot, incarnation) = (self.core_slot(instance), who.incarnation);
        if self.instances[instance as usize].is_whole {
            return self.follow.push_back(ReadyStep::Input { slot, incarnation, input, cause });
        }
        self.post(LOCAL, SimEnvelope::Machine { slot, incarnation, input, cause });
    }

    fn data_command(
        &mut self,
        instance: u16,
        rank: u16,
        slot: u32,
        command: DataCommand,
        cause: u64,
    ) -> Option<MachineInput> {
        let who = self.who(instance);
        let from = SimRankId { who, rank };
        if let DataCommand::Quiesce { session, ticket } = command {
            self.observer.observe(self.now, &Observation::Quiesced { from, session, ticket });
        }
        let process = self.instances[instance as usize].process.as_mut()?;
        let plane = &mut process.ranks[usize::from(rank)];
        let submit = matches!(command, DataCommand::Submit { .. });
        let Some(refusal) = perform_data(plane, command) else {
            if submit {
                self.stats.posted();
            }
            return None;
        };
        if let DataRefusal::Submit { op, why } = &refusal {
            if *why == Refused::Busy {
                self.stats.refused();
            }
            self.observer.observe(self.now, &Observation::Refused { from, op: *op, why });
        }
        Some(self.follows(slot, who.incarnation, TransferInput::Refused(refusal).into(), cause))
    }

    /// Gives the calls of a data plane to the network.
    fn flush_data(&mut self, instance: u16, rank: u16) {
        let Some(process) = &mut self.instances[instance as usize].process else { return };
        let plane: &mut SimDataPlane = &mut process.ranks[usize::from(rank)];
        if !plane.has_calls() {
            return;
        }
        plane.take_calls(&mut self.calls);
        let ix = plane.ix();
        let Self { observer, planes, control, .. } = self;
        let cx = &mut StepContext::new(self.now, &mut self.queue, &mut self.outputs);
        self.dma.perform(ix, &mut self.calls, &mut WorldHooks { observer, planes, control }, cx);
    }

    fn control_command(
        &mut self,
        instance: u16,
        slot: u32,
        command: ControlCommand,
    ) -> Option<MachineInput> {
        let who = self.who(instance);
        if let ControlCommand::Dial { to, channel, .. } = &command
            && *channel == kvferry_engine::fabric::LinkKind::Handshake
        {
            let name = to.0.strip_prefix("sim://");
            let to = self.run.instances.iter().position(|spec| Some(spec.name.as_str()) == name);
            let to = to.map(|index| index as u16);
            self.observer.observe(self.now, &Observation::Dialled { from: who, to });
        }
        let command = self.in_new_role(instance, command);
        let process = self.instances[instance as usize].process.as_mut()?;
        let event = perform_control(&mut process.control, command)?;
        let input = self.on_control(slot, event);
        Some(self.follows(slot, who.incarnation, input, 0))
    }

    /// A control event as the input of the machine that has the plane.
    fn on_control(&self, slot: u32, event: ControlEvent) -> MachineInput {
        use super::MachineId;
        match self.machines[slot as usize].id {
            MachineId::Router => RouterInput::Control(event).into(),
            MachineId::Prefill(_) => PrefillInput::Control(event).into(),
            MachineId::Decode(_) => DecodeInput::Control(event).into(),
            MachineId::Transfer(..) | MachineId::Payload(_) => {
                unreachable!("neither transfer actors nor payload cores have a control plane")
            }
        }
    }

    /// Gives the calls of an instance's control plane to the network.
    pub(super) fn flush_control(&mut self, instance: u16) {
        let Some(process) = &mut self.instances[instance as usize].process else { return };
        let Self { net, net_calls, observer, planes, control, queue, net_outputs, .. } = self;
        let cx = &mut StepContext::new(self.now, queue, net_outputs);
        perform(
            &mut process.control,
            net,
            net_calls,
            &mut WorldHooks { observer, planes, control },
            cx,
        );
    }

    /// The same for the router's.
    pub(super) fn flush_router(&mut self) {
        let Self { net, net_calls, observer, planes, control, queue, net_outputs, router, .. } =
            self;
        let cx = &mut StepContext::new(self.now, queue, net_outputs);
        perform(
            &mut router.control,
            net,
            net_calls,
            &mut WorldHooks { observer, planes, control },
            cx,
        );
    }

    /// Hands on what the data network did.
    pub(super) fn data_outputs(&mut self, outputs: &mut Vec<DmaOutput>) {
        for output in outputs.drain(..) {
            match output {
                DmaOutput::Deliver { plane, message: news } => {
                    let SimRankId { who, rank } = self.planes[plane.0 as usize].at;
                    self.deliver_data(who, rank, news);
                }
                // Nobody sees what lands in a process that is dead.
                DmaOutput::Landed(landing) if !self.owner_lives(landing.target) => {}
                DmaOutput::Landed(landing) => {
                    self.observer.landed(self.now, &self.planes, &self.dma, &landing);
                }
                DmaOutput::Completed { plane, op, outcome } => {
                    let from = self.planes[plane.0 as usize].at;
                    self.stats.completed(&outcome);
                    if outcome == Completion::Done {
                        self.quiescence.moved(self.now);
                    }
                    let seen = Observation::Completed { from, op, outcome: &outcome };
                    self.observer.observe(self.now, &seen);
                }
                DmaOutput::Void { plane } => {
                    let at = self.planes[plane.0 as usize].at;
                    self.observer.observe(self.now, &Observation::Void { at });
                }
                DmaOutput::Fenced { plane, peer, fence_key } => {
                    let at = self.planes[plane.0 as usize].at;
                    let peer = self.planes[peer.0 as usize].at;
                    self.observer.observe(self.now, &Observation::Fenced { at, peer, fence_key });
                }
            }
        }
    }

    fn owner_lives(&self, plane: DataPlaneIx) -> bool {
        let SimRankId { who, .. } = self.planes[plane.0 as usize].at;
        self.instances[usize::from(who.instance)].is_current(who.incarnation)
    }

    fn deliver_data(&mut self, who: SimProcessId, rank: u16, news: DmaMessage) {
        let instance = &mut self.instances[usize::from(who.instance)];
        if instance.incarnation != who.incarnation {
            return;
        }
        let Some(process) = &mut instance.process else { return };
        let plane = &mut process.ranks[usize::from(rank)];
        plane.deliver(news);
        let mut events = std::mem::take(&mut self.stats.events);
        let _wake = plane.poll(self.now, &mut events);
        let slot = self.rank_slot(who.instance, rank);
        for event in events.drain(..) {
            if let DataEvent::Reset { .. } = event {
                self.drop_older_reset(slot);
            }
            if let DataEvent::Quiet { session, ticket } = &event {
                let from = SimRankId { who, rank };
                let seen = Observation::Quiet { from, session: *session, ticket: *ticket };
                self.observer.observe(self.now, &seen);
            }
            let input = TransferInput::Data(event).into();
            let incarnation = who.incarnation;
            self.ready.push_back(ReadyStep::Input { slot, incarnation, input, cause: 0 });
        }
        self.stats.events = events;
    }

    /// Drops what a machine has not heard yet of an earlier backend: of two between its turns it hears
    /// of the later one only.
    fn drop_older_reset(&mut self, slot: u32) {
        self.ready.retain(|step| match step {
            ReadyStep::Input { slot: of, input: MachineInput::Transfer(input), .. } => {
                *of != slot || !matches!(input, TransferInput::Data(DataEvent::Reset { .. }))
            }
            _ => true,
        });
    }

    /// Hands on what the control network did.
    pub(super) fn control_outputs(&mut self, outputs: &mut Vec<NetOutput>) {
        for output in outputs.drain(..) {
            let NetOutput::Deliver { plane, message: news, forged } = output;
            let who = self.control[plane.0 as usize];
            if let NetMessage::Event(ControlEvent::Frame { link, parts }) = &news {
                let from = self.net.peer(plane, *link).map(|ix| self.control[ix.0 as usize]);
                let from = from.filter(|_| !forged);
                self.observer.frame_arrived(self.now, from, who, parts);
            }
            self.deliver_control(who, news);
        }
    }

    fn deliver_control(&mut self, who: SimProcessId, news: NetMessage) {
        let mut incarnation = who.incarnation;
        let (slot, plane) = if who == SimProcessId::ROUTER {
            incarnation = self.router_incarnation();
            (0, &mut self.router.control)
        } else {
            let slot = self.core_slot(who.instance);
            let instance = &mut self.instances[usize::from(who.instance)];
            if instance.incarnation != who.incarnation {
                return;
            }
            let Some(process) = &mut instance.process else { return };
            (slot, &mut process.control)
        };
        plane.deliver(news);
        let mut events = Vec::new();
        let _wake = plane.poll(self.now, &mut events);
        for event in events {
            let input = self.on_control(slot, event);
            self.ready.push_back(ReadyStep::Input { slot, incarnation, input, cause: 0 });
        }
    }
}

fn perform(
    plane: &mut SimControlPlane,
    net: &mut ControlNetwork,
    calls: &mut NetCalls,
    hooks: &mut WorldHooks<'_>,
    cx: &mut NetContext<'_>,
) {
    if plane.has_calls() {
        plane.take_calls(calls);
        net.perform(plane.ix(), calls, hooks, cx);
    }
}

/// What the planes' networks ask the world: the observer decides.
struct WorldHooks<'a> {
    observer: &'a mut Observer,
    /// Owners of data planes and of control planes.
    planes: &'a [DataPlaneOwner],
    control: &'a [SimProcessId],
}

impl DmaHooks for WorldHooks<'_> {
    fn decide_op(&mut self, now: Nanos, op: &OpInfo<'_>) -> OpDecision {
        self.observer.submitted(now, self.planes, op)
    }

    fn register(&mut self, now: Nanos, plane: DataPlaneIx) -> Option<FabricError> {
        self.observer.registered(now, &self.planes[plane.0 as usize])
    }
}

impl NetHooks for WorldHooks<'_> {
    fn decide_frame(&mut self, now: Nanos, frame: &FrameInfo<'_>) -> FrameDecision {
        let [from, to] = [frame.from, frame.to].map(|plane| self.control[plane.0 as usize]);
        self.observer.frame_sent(now, from, to, frame)
    }
}
