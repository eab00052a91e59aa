//! The router's death: it forgets everything, and all its connections end.

use super::actor::{MachineConfig, MachineId};
use super::event::{ProcessEvent, SimEvent};
use super::{ReadyStep, Simulation, build};
use crate::faults::ROUTER;
use crate::observation::SimProcessId;
use kvferry_engine::core::ids::{Incarnation, LegId};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{ControlPlane, LinkKind};
use kvferry_scenarios::decide::DecisionKey;

/// Each router numbers its legs from 0; in the world those of the next one begin here.
const LEGS: u32 = 40;

impl Simulation {
    /// Of which router the one that lives or lived last is.
    pub(super) fn router_incarnation(&self) -> u32 {
        self.machines[0].incarnation
    }

    /// The number of a leg of the router in the world.
    pub(super) fn world_leg(&self, leg: LegId) -> LegId {
        LegId(leg.0 | u64::from(self.router_incarnation()) << LEGS)
    }

    /// The number that the router has given to a leg.
    pub(super) fn router_leg(leg: LegId) -> LegId {
        LegId(leg.0 & ((1 << LEGS) - 1))
    }

    /// The router dies and starts again after a while. Its clients get no answer, and the instances see
    /// their callers leave.
    pub(super) fn crash_router(&mut self, back_after: Nanos) {
        if std::mem::replace(&mut self.router.is_down, true) {
            return;
        }
        let key = DecisionKey::new(self.run.seed, "process.detection").actor(u64::from(ROUTER));
        let key = key.nth(u64::from(self.router_incarnation()));
        let detected = self.run.network.control_latency.draw(&key) + Nanos::from_us(100);
        let control = self.router.control.ix();
        self.with_net(|net, cx| net.crash(control, Some(detected), cx));
        if std::mem::take(&mut self.machines[0].alive) {
            self.ready.push_back(ReadyStep::Stop(0));
        }
        self.cancel_all_legs();
        self.clients_unanswered();
        let what = ProcessEvent::Start;
        self.queue.push(self.now + back_after, SimEvent::Process { instance: ROUTER, what });
    }

    /// The next router starts; whoever asked meanwhile asks now.
    pub(super) fn start_router(&mut self) {
        let life = self.router_incarnation() + 1;
        let mut control = self.net.add_plane(build::ROUTER, build::router_node(&self.run));
        control.listen(LinkKind::Discovery).expect("a new plane listens to nothing");
        self.control.push(SimProcessId::ROUTER);
        self.router.control = control;
        self.router.is_down = false;
        self.restart_machine(0, MachineId::Router, life);
        self.flush_router();
        let incarnation = Incarnation(1 + self.options.wall + u64::from(life));
        let config = Box::new(self.run.router.config.clone());
        self.ready.push_back(ReadyStep::Start(0, MachineConfig::Router(config, incarnation)));
        for entry in std::mem::take(&mut self.router.held) {
            self.queue.push(self.now, entry);
        }
    }
}
