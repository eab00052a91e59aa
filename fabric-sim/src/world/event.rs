//! What waits in the event queue.

use crate::dma::DmaEvent;
use crate::net::NetEvent;
use kvferry_engine::core::ids::LegId;
use kvferry_engine::core::message::TransferJob;
use kvferry_engine::core::payload::{PayloadAnswer, PayloadClient};
use kvferry_scenarios::engine::EngineInput;

use super::actor::MachineInput;
use super::stages::StageEvent;

/// An entry of the event queue. What belongs to a process carries its incarnation: after a restart
/// it is void.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SimEvent {
    /// Of the data network.
    Dma(DmaEvent),
    /// Of the control network.
    Net(NetEvent),
    Envelope(u32),
    /// A deadline of a machine.
    Tick {
        slot: u32,
        generation: u32,
    },
    /// The worker of an instance has computed some more layers of its step.
    Layers {
        instance: u16,
        incarnation: u32,
    },
    /// The next request of the workload.
    Arrive,
    /// A client goes away.
    ClientGone {
        client: u32,
    },
    Process {
        instance: u16,
        what: ProcessEvent,
    },
    /// Something that a stage does.
    Stage(StageEvent),
    /// The fault engine has something to do.
    Fault,
    /// Is everything at rest?
    Check,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessEvent {
    Start,
    /// It may have ended its legs and begin in its other role.
    Switch,
}

impl From<DmaEvent> for SimEvent {
    fn from(event: DmaEvent) -> SimEvent {
        SimEvent::Dma(event)
    }
}

impl From<NetEvent> for SimEvent {
    fn from(event: NetEvent) -> SimEvent {
        SimEvent::Net(event)
    }
}

/// Something on its way between two parts of the world.
#[derive(Debug)]
pub(super) enum SimEnvelope {
    Machine {
        slot: u32,
        incarnation: u32,
        input: MachineInput,
        cause: u64,
    },
    /// To all transfer actors of an instance.
    Job {
        instance: u16,
        incarnation: u32,
        job: TransferJob,
        cause: u64,
    },
    /// To a serving engine.
    Engine {
        instance: u16,
        incarnation: u32,
        input: EngineInput,
    },
    /// A leg, to whatever process answers at its instance.
    Ask {
        instance: u16,
        leg: LegId,
        input: EngineInput,
    },
    /// The connection of a leg broke.
    Broken {
        leg: LegId,
    },
    /// To a process of a stage.
    Stage {
        host: u16,
        client: PayloadClient,
        answer: PayloadAnswer,
    },
}
