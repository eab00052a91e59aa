//! What waits in the event queue.

use crate::dma::DmaEvent;
use crate::net::NetEvent;
use engine::core::ids::LegId;
use engine::core::message::Job;
use scenarios::engine::EngineInput;

use super::actor::MachineInput;

/// An entry of the event queue. What belongs to a process carries its life: after a restart it is
/// void.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// Of the data network.
    Dma(DmaEvent),
    /// Of the control network.
    Net(NetEvent),
    /// A letter arrives.
    Letter(u32),
    /// A deadline of a machine.
    Tick {
        slot: u32,
        turn: u32,
    },
    /// The worker of an instance has computed some more layers of its step.
    Layers {
        instance: u16,
        life: u32,
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
    /// The fault engine has something to do.
    Fault,
    /// Is everything at rest?
    Check,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessEvent {
    Start,
}

impl From<DmaEvent> for Entry {
    fn from(event: DmaEvent) -> Entry {
        Entry::Dma(event)
    }
}

impl From<NetEvent> for Entry {
    fn from(event: NetEvent) -> Entry {
        Entry::Net(event)
    }
}

/// Something on its way between two parts of the world.
#[derive(Debug)]
pub(super) enum Letter {
    /// To a machine.
    Machine { slot: u32, life: u32, input: MachineInput, cause: u64 },
    /// To all transfer actors of an instance.
    Job { instance: u16, life: u32, job: Job, cause: u64 },
    /// To a serving engine.
    Engine { instance: u16, life: u32, input: EngineInput },
    /// A leg, to whatever process answers at its instance.
    Ask { instance: u16, leg: LegId, input: EngineInput },
    /// The connection of a leg broke.
    Broken { leg: LegId },
}

/// Letters under way.
#[derive(Debug, Default)]
pub(super) struct Letters {
    slots: Vec<Option<Letter>>,
    free: Vec<u32>,
}

impl Letters {
    pub(super) fn add(&mut self, letter: Letter) -> Entry {
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(letter);
                slot
            }
            None => {
                self.slots.push(Some(letter));
                self.slots.len() as u32 - 1
            }
        };
        Entry::Letter(slot)
    }

    pub(super) fn take(&mut self, slot: u32) -> Letter {
        self.free.push(slot);
        self.slots[slot as usize].take().expect("a letter arrives once")
    }

    pub(super) fn peek(&self, slot: u32) -> &Letter {
        self.slots[slot as usize].as_ref().expect("a letter arrives once")
    }

    /// Letters on their way.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}
