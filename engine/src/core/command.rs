//! What machines want of the planes, as values. [`crate::driver`] performs them.

use super::layout::Slices;
use super::machine::Outbox;
use crate::fabric::{
    Address, Channel, Direction, Endpoint, LinkId, Memory, OpId, PeerId, Refused, RegionDesc,
    RegionId, SessionId, Ticket,
};
use serde::{Deserialize, Serialize};

/// A call on a [`crate::fabric::ControlPlane`]. A refused `Dial` comes back as `LinkDown`; a
/// refused `Send` or `Reply` is a lost frame.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ControlCommand {
    /// Start connecting.
    Dial {
        /// Chosen by the machine.
        link: LinkId,
        /// Where to.
        to: Endpoint,
        /// What for.
        channel: Channel,
    },
    /// Send one message of one part.
    Send {
        /// The link.
        link: LinkId,
        /// The encoded frame.
        frame: Vec<u8>,
    },
    /// Send one message of an empty part and this one.
    Reply {
        /// The link.
        link: LinkId,
        /// The encoded frame.
        frame: Vec<u8>,
    },
    /// Close.
    HangUp {
        /// The link.
        link: LinkId,
    },
}

/// Takes calls on a control plane, in order.
pub trait Commands {
    /// Takes one more.
    fn push(&mut self, command: ControlCommand);
}

impl Commands for Vec<ControlCommand> {
    fn push(&mut self, command: ControlCommand) {
        self.push(command);
    }
}

impl<E: From<ControlCommand>> Commands for Outbox<E> {
    fn push(&mut self, command: ControlCommand) {
        self.push(command);
    }
}

/// A call on a [`crate::fabric::DataPlane`], named and documented there. A refusal comes back as
/// [`DataRefusal`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum DataCommand {
    Register { region: RegionId, memory: Memory },
    Deregister { region: RegionId },
    Connect { peer: PeerId, address: Address, pass: u64 },
    Disconnect { peer: PeerId },
    Open { session: SessionId, local: RegionId, peer: PeerId, remote: RegionDesc },
    Close { session: SessionId },
    Submit { op: OpId, session: SessionId, direction: Direction, slices: Slices },
    Quiesce { session: SessionId, ticket: Ticket },
    Fence { peer: PeerId },
}

/// A call that was not taken.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum DataRefusal {
    Register { region: RegionId, why: Refused },
    Connect { peer: PeerId, why: Refused },
    Open { session: SessionId, why: Refused },
    Submit { op: OpId, why: Refused },
}
