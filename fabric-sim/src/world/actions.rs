//! What the fault engine asks of the world.

use super::Simulation;
use super::event::{ProcessEvent, SimEnvelope, SimEvent};
use crate::faults::{FaultAction, ROUTER};
use kvferry_engine::core::decode::DecodeInput;
use kvferry_engine::core::ids::ClientId;
use kvferry_engine::core::message::Role;
use kvferry_engine::core::payload::PayloadInput;
use kvferry_engine::core::prefill::PrefillInput;
use kvferry_engine::core::router::RouterInput;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{ControlEvent, LinkId};
use kvferry_scenarios::engine::EngineInput;

impl Simulation {
    /// Keeps an entry in the queue for the next thing that the fault engine has to do.
    pub(super) fn plan_faults(&mut self) {
        let Some(at) = self.observer.faults.deadline() else { return };
        if self.fault_at.is_none_or(|planned| at < planned) {
            self.fault_at = Some(at);
            self.queue.push(at, SimEvent::Fault);
        }
    }

    pub(super) fn fault_due(&mut self) {
        self.fault_at = None;
        self.observer.faults.tick(self.now);
        self.plan_faults();
    }

    pub(super) fn perform_action(&mut self, action: FaultAction) {
        match action {
            FaultAction::KillSessions { a, b } => {
                self.kill_sessions(a, b);
                self.kill_sessions(b, a);
            }
            FaultAction::QueueFull { instance, full } => self.queue_full(instance, full),
            FaultAction::Port { instance, rank, down } => self.port(instance, rank, down),
            FaultAction::LinkRate { from, to, divided_by } => self.link_rate(from, to, divided_by),
            FaultAction::Cut { from, to, cut } => self.cut(from, to, cut),
            FaultAction::Crash { instance, back_after, becomes } => {
                self.crash(instance);
                self.interrupt_switch(instance);
                for part in self.parts(instance) {
                    self.instances[usize::from(part)].returns = back_after.is_some();
                }
                if let Some(after) = back_after {
                    self.instances[usize::from(instance)].becomes = becomes.map(|spec| *spec);
                    let what = ProcessEvent::Start;
                    self.queue.push(self.now + after, SimEvent::Process { instance, what });
                }
            }
            FaultAction::CrashRouter { back_after } => self.crash_router(back_after),
            FaultAction::CutLeg { instance, noticed } => self.cut_leg(instance, noticed),
            FaultAction::ClockBack { instance } => {
                self.instances[usize::from(instance)].incarnation_number /= 2;
            }
            FaultAction::Drain { instance } => self.drain(instance),
            FaultAction::SwitchRole { instance, registers } => self.switch(instance, registers),
            FaultAction::EndSwitch { instance } => self.end_switch(instance),
            FaultAction::Pause { instance: ROUTER, paused } => self.pause_router(paused),
            FaultAction::Pause { instance, paused } => self.set_paused(instance, paused),
            FaultAction::Preempt { instance } => {
                self.engine_input(instance, EngineInput::PreemptOne);
            }
            FaultAction::StaleRegistration { instance, after } => {
                self.register_again(instance, after);
            }
            FaultAction::Race { instance, at, done_first } => self.race(instance, at, done_first),
            FaultAction::Abort { client, after, both } => self.abort(client, after, both),
        }
    }

    /// An instance that is neither down nor stands still says that it takes no more legs.
    pub(super) fn drain(&mut self, index: u16) {
        let instance = &self.instances[usize::from(index)];
        if instance.process.is_none() || instance.paused {
            return;
        }
        if let Some(host) = self.host_of(index) {
            return self.tell(self.payload_slot(host), PayloadInput::Drain.into());
        }
        let input = match instance.spec.role {
            Role::Prefill => PrefillInput::Drain.into(),
            Role::Decode => DecodeInput::Drain.into(),
        };
        self.tell(self.core_slot(index), input);
    }

    fn kill_sessions(&mut self, a: u16, b: u16) {
        let (from, to) = (self.data_planes(a), self.data_planes(b));
        self.with_dma(|dma, cx| {
            for (plane, peer) in from.iter().flat_map(|a| to.iter().map(|b| (*a, *b))) {
                dma.kill_sessions((plane, peer), cx);
            }
        });
    }

    fn queue_full(&mut self, instance: u16, full: bool) {
        let planes = self.data_planes(instance);
        self.with_dma(|dma, cx| {
            planes.into_iter().for_each(|plane| dma.set_queue_full(plane, full, cx));
        });
    }

    fn port(&mut self, instance: u16, rank: Option<u16>, down: bool) {
        let planes = (0..).zip(self.data_planes(instance));
        self.with_dma(|dma, cx| {
            for (_, plane) in planes.filter(|(at, _)| rank.is_none_or(|rank| rank == *at)) {
                match down {
                    true => dma.lose_backend(plane, cx),
                    false => dma.gain_backend(plane, cx),
                }
            }
        });
    }

    fn link_rate(&mut self, from: u16, to: u16, divided_by: u32) {
        let [a, b] = [from, to].map(|index| &self.instances[usize::from(index)]);
        let near = a.node == b.node;
        let network = &self.run.network;
        let port = if near { network.node_bandwidth } else { network.bandwidth };
        let all = port.saturating_mul(u64::from(a.spec.tp.min(b.spec.tp)));
        let rate = (divided_by > 1).then(|| (all / u64::from(divided_by)).max(1));
        let nodes = (a.node, b.node);
        self.with_dma(|dma, cx| dma.set_link_rate(nodes, rate, cx));
    }

    /// Frames are cut by the fault engine itself, pair by pair.
    fn cut(&mut self, from: u16, to: u16, cut: bool) {
        if from != ROUTER && to != ROUTER {
            let [a, b] = [from, to].map(|index| self.instances[usize::from(index)].node);
            self.with_dma(|dma, cx| dma.set_cut((a, b), cut, cx));
        }
    }

    fn register_again(&mut self, instance: u16, after: Nanos) {
        let parts = self.observer.registrations[usize::from(instance)].clone();
        if parts.is_empty() {
            return;
        }
        let event = ControlEvent::Frame { link: LinkId(LinkId::INBOUND), parts };
        let input = RouterInput::Control(event).into();
        let incarnation = self.router_incarnation();
        self.post(after, SimEnvelope::Machine { slot: 0, incarnation, input, cause: 0 });
    }

    fn abort(&mut self, client: Option<ClientId>, after: Nanos, both: bool) {
        let Some(client) = client.or_else(|| self.clients.newest()) else { return };
        if both {
            for (leg, instance) in self.legs.of(client) {
                let incarnation = self.instances[usize::from(instance)].incarnation;
                let input = EngineInput::CancelLeg { leg };
                self.post(after, SimEnvelope::Engine { instance, incarnation, input });
            }
        }
        let client = client.0 as u32;
        self.queue.push(self.now + after, SimEvent::ClientGone { client });
    }

    fn pause_router(&mut self, paused: bool) {
        let router = &mut self.router;
        if std::mem::replace(&mut router.paused, paused) == paused {
            return;
        }
        for entry in std::mem::take(&mut router.held) {
            self.queue.push(self.now, entry);
        }
        let control = self.router.control.ix();
        self.with_net(|net, cx| net.set_paused(control, paused, cx));
    }
}
