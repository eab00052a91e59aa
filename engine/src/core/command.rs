//! What machines want of the planes, as values. [`crate::effects`] performs them.
//!
//! ```
//! use kvferry_engine::core::command::{Commands, ControlCommand, DataRefusal};
//! use kvferry_engine::fabric::{LinkId, OpId, Refused};
//!
//! let mut out = Vec::new();
//! let commands: &mut dyn Commands = &mut out;
//! commands.push(ControlCommand::HangUp { link: LinkId(3) });
//! assert_eq!(out, [ControlCommand::HangUp { link: LinkId(3) }]);
//! // What a plane does not take comes back with the reason.
//! let refusal = DataRefusal::Submit { op: OpId(1), why: Refused::Busy };
//! assert_eq!(refusal.why(), Refused::Busy);
//! ```

use super::layout::Slices;
use super::machine::Turn;
use crate::fabric::{
    Address, DigestBatch, DigestId, Direction, Endpoint, LinkId, LinkKind, Memory, OpId, PeerId,
    QuiesceTicket, Refused, RegionDesc, RegionId, SessionId,
};
use serde::{Deserialize, Serialize};

/// A call on a [`crate::fabric::ControlPlane`]. A refused `Dial` comes back as `LinkDown`; a
/// refused `Send` or `Reply` is a lost frame.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ControlCommand {
    Dial {
        /// Chosen by the machine.
        link: LinkId,
        to: Endpoint,
        channel: LinkKind,
    },
    /// Send one message of one part.
    Send {
        link: LinkId,
        frame: Vec<u8>,
    },
    /// Send one message of an empty part and this one.
    Reply {
        link: LinkId,
        frame: Vec<u8>,
    },
    HangUp {
        link: LinkId,
    },
}

/// Takes calls on a control plane, in order.
pub trait Commands {
    fn push(&mut self, command: ControlCommand);
}

impl Commands for Vec<ControlCommand> {
    fn push(&mut self, command: ControlCommand) {
        self.push(command);
    }
}

impl<E: From<ControlCommand>> Commands for Turn<'_, E> {
    fn push(&mut self, command: ControlCommand) {
        self.push(command);
    }
}

/// A call on a [`crate::fabric::DataPlane`], named and documented there. A refusal comes back as
/// [`DataRefusal`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DataCommand {
    Register { region: RegionId, memory: Memory },
    Connect { peer: PeerId, address: Address, fence_key: u64 },
    Disconnect { peer: PeerId },
    Open { session: SessionId, local: RegionId, peer: PeerId, remote: RegionDesc },
    Close { session: SessionId },
    Submit { op: OpId, session: SessionId, direction: Direction, slices: Slices },
    Digest(DigestBatch),
    Quiesce { session: SessionId, ticket: QuiesceTicket },
    Fence { peer: PeerId },
}

/// A call that was not taken.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DataRefusal {
    Register { region: RegionId, why: Refused },
    Connect { peer: PeerId, why: Refused },
    Open { session: SessionId, why: Refused },
    Submit { op: OpId, why: Refused },
    Digest { id: DigestId, why: Refused },
}

impl DataRefusal {
    /// Why it was not taken.
    pub fn why(self) -> Refused {
        match self {
            DataRefusal::Register { why, .. }
            | DataRefusal::Connect { why, .. }
            | DataRefusal::Open { why, .. }
            | DataRefusal::Submit { why, .. }
            | DataRefusal::Digest { why, .. } => why,
        }
    }
}
