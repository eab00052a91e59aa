//! Performs the effects of machines on planes; the simulator and the actors share it.
//!
//! ```
//! use kvferry_engine::core::Nanos;
//! use kvferry_engine::core::command::ControlCommand;
//! use kvferry_engine::effects::perform_control;
//! use kvferry_engine::fabric::*;
//!
//! /// A plane without a network.
//! struct Unplugged;
//!
//! impl ControlPlane for Unplugged {
//!     fn listen(&mut self, _: LinkKind) -> Result<Endpoint, Refused> {
//!         Err(Refused::Gone)
//!     }
//!     fn dial(&mut self, _: LinkId, _: &Endpoint, _: LinkKind) -> Result<(), Refused> {
//!         Err(Refused::Gone)
//!     }
//!     fn send(&mut self, _: LinkId, _: &[&[u8]]) -> Result<(), Refused> {
//!         Err(Refused::Gone)
//!     }
//!     # fn hang_up(&mut self, _: LinkId) {}
//!     # fn set_waker(&mut self, _: std::task::Waker) {}
//!     # fn poll(&mut self, _: Nanos, _: &mut Vec<ControlEvent>) -> NextPoll { unreachable!() }
//!     // ...
//! }
//!
//! // What a machine hears of a dial that is refused is what it hears of a link that dies.
//! let link = LinkId(1);
//! let dial = ControlCommand::Dial { link, to: "tcp://a:1".into(), channel: LinkKind::Handshake };
//! assert_eq!(perform_control(&mut Unplugged, dial), Some(ControlEvent::LinkDown { link }));
//! ```

use crate::core::command::{ControlCommand, DataCommand, DataRefusal};
use crate::fabric::{ControlEvent, ControlPlane, DataPlane, Refused};

/// Calls the data plane. A refusal goes back to the machine that gave the command; a command
/// without refusal (`Close`, `Quiesce`, `Fence`, `Disconnect`) always is taken.
pub fn perform_data(plane: &mut dyn DataPlane, command: DataCommand) -> Option<DataRefusal> {
    match command {
        DataCommand::Register { region, memory } => {
            let refused = plane.register(region, memory).err();
            refused.map(|why| DataRefusal::Register { region, why })
        }
        DataCommand::Connect { peer, address, fence_key } => {
            let refused = plane.connect(peer, &address, fence_key).err();
            refused.map(|why| DataRefusal::Connect { peer, why })
        }
        DataCommand::Disconnect { peer } => {
            plane.disconnect(peer);
            None
        }
        DataCommand::Open { session, local, peer, remote } => {
            let refused = plane.open(session, local, peer, &remote).err();
            refused.map(|why| DataRefusal::Open { session, why })
        }
        DataCommand::Close { session } => {
            plane.close(session);
            None
        }
        DataCommand::Submit { op, session, direction, slices } => {
            let refused = plane.submit(slices.submit(op, session, direction)).err();
            refused.map(|why| DataRefusal::Submit { op, why })
        }
        DataCommand::Digest(batch) => {
            let id = batch.id;
            plane.digest(batch).err().map(|why| DataRefusal::Digest { id, why })
        }
        DataCommand::Quiesce { session, ticket } => {
            plane.quiesce(session, ticket);
            None
        }
        DataCommand::Fence { peer } => {
            plane.fence(peer);
            None
        }
    }
}

/// Calls the control plane. A refused `Dial` answers `LinkDown`. A refused `Send` is a lost frame:
/// the channel above retransmits it, and a link that is gone has told so or will.
pub fn perform_control(
    plane: &mut dyn ControlPlane,
    command: ControlCommand,
) -> Option<ControlEvent> {
    match command {
        ControlCommand::Dial { link, to, channel } => {
            let refused: Result<(), Refused> = plane.dial(link, &to, channel);
            refused.err().map(|_| ControlEvent::LinkDown { link })
        }
        ControlCommand::Send { link, frame } => {
            let _lost = plane.send(link, &[&frame]);
            None
        }
        ControlCommand::Reply { link, frame } => {
            let _lost = plane.send(link, &[&[], &frame]);
            None
        }
        ControlCommand::HangUp { link } => {
            plane.hang_up(link);
            None
        }
    }
}
