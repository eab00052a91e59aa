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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::layout::Slices;
    use crate::core::time::Nanos;
    use crate::fabric::*;
    use std::task::Waker;

    /// A plane that refuses what can be refused, and the calls that it got.
    #[derive(Default)]
    struct RefusingPlane {
        calls: Vec<String>,
    }

    impl RefusingPlane {
        fn refuse(&mut self, call: String) -> Result<(), Refused> {
            self.calls.push(call);
            Err(Refused::Busy)
        }
    }

    impl DataPlane for RefusingPlane {
        fn caps(&self) -> Caps {
            unreachable!("nobody asks")
        }
        fn address(&self) -> Address {
            unreachable!("nobody asks")
        }
        fn register(&mut self, region: RegionId, _: Memory) -> Result<(), Refused> {
            self.refuse(format!("register {region:?}"))
        }
        fn deregister(&mut self, _: RegionId) -> Result<(), Refused> {
            unreachable!("no machine does")
        }
        fn connect(&mut self, peer: PeerId, _: &Address, fence_key: u64) -> Result<(), Refused> {
            self.refuse(format!("connect {peer:?} {fence_key}"))
        }
        fn disconnect(&mut self, peer: PeerId) {
            self.calls.push(format!("disconnect {peer:?}"));
        }
        fn open(
            &mut self,
            session: SessionId,
            local: RegionId,
            peer: PeerId,
            _: &RegionDesc,
        ) -> Result<(), Refused> {
            self.refuse(format!("open {session:?} {local:?} {peer:?}"))
        }
        fn close(&mut self, session: SessionId) {
            self.calls.push(format!("close {session:?}"));
        }
        fn submit(&mut self, batch: Submit<'_>) -> Result<(), Refused> {
            self.refuse(format!("submit {:?} {:?}", batch.op, batch.session))
        }
        fn quiesce(&mut self, session: SessionId, ticket: QuiesceTicket) {
            self.calls.push(format!("quiesce {session:?} {ticket:?}"));
        }
        fn fence(&mut self, peer: PeerId) {
            self.calls.push(format!("fence {peer:?}"));
        }
        fn set_waker(&mut self, _: Waker) {}
        fn doorbell(&mut self) -> Option<std::os::fd::BorrowedFd<'_>> {
            None
        }
        fn poll(&mut self, _: Nanos, _: &mut Vec<DataEvent>) -> NextPoll {
            unreachable!("nobody polls")
        }
    }

    impl ControlPlane for RefusingPlane {
        fn listen(&mut self, _: LinkKind) -> Result<Endpoint, Refused> {
            unreachable!("no machine does")
        }
        fn dial(&mut self, link: LinkId, to: &Endpoint, _: LinkKind) -> Result<(), Refused> {
            self.refuse(format!("dial {link:?} {to}"))
        }
        fn send(&mut self, link: LinkId, parts: &[&[u8]]) -> Result<(), Refused> {
            self.refuse(format!("send {link:?} {parts:?}"))
        }
        fn hang_up(&mut self, link: LinkId) {
            self.calls.push(format!("hang up {link:?}"));
        }
        fn set_waker(&mut self, _: Waker) {}
        fn poll(&mut self, _: Nanos, _: &mut Vec<ControlEvent>) -> NextPoll {
            unreachable!("nobody polls")
        }
    }

    #[test]
    fn each_refusal_of_a_data_plane_comes_back_with_its_id() {
        let (region, peer, session, op) = (RegionId(1), PeerId(2), SessionId(3), OpId(4));
        let (memory, why) = (Memory::Own(OwnMemory::unproven(0, 64)), Refused::Busy);
        let remote = RegionDesc([1].into());
        let mut slices = Slices::default();
        slices.push(0, 0, 8);
        let (id, parts) = (DigestId(5), DigestParts::default());
        let commands = [
            (
                DataCommand::Register { region, memory },
                Some(DataRefusal::Register { region, why: why.clone() }),
            ),
            (
                DataCommand::Connect { peer, address: Address([1].into()), fence_key: 6 },
                Some(DataRefusal::Connect { peer, why: why.clone() }),
            ),
            (
                DataCommand::Open { session, local: region, peer, remote },
                Some(DataRefusal::Open { session, why: why.clone() }),
            ),
            (
                DataCommand::Submit { op, session, direction: Direction::Write, slices },
                Some(DataRefusal::Submit { op, why }),
            ),
            (DataCommand::Quiesce { session, ticket: QuiesceTicket(7) }, None),
            (DataCommand::Close { session }, None),
            (DataCommand::Fence { peer }, None),
            (DataCommand::Disconnect { peer }, None),
        ];
        let mut plane = RefusingPlane::default();
        let count = commands.len();
        for (command, refusal) in commands {
            assert_eq!(perform_data(&mut plane, command), refusal);
        }
        assert_eq!(plane.calls.len(), count, "{:?}", plane.calls);
        // A plane without digests says so.
        let digest = DataCommand::Digest(DigestBatch { id, region, parts });
        let refused = perform_data(&mut plane, digest);
        assert!(
            matches!(refused, Some(DataRefusal::Digest { id: DigestId(5), .. })),
            "{refused:?}"
        );
    }

    #[test]
    fn refused_dial_is_a_link_that_is_down_and_refused_frame_is_lost() {
        let (mut plane, link) = (RefusingPlane::default(), LinkId(1));
        let (to, channel, frame) = ("tcp://a:1".into(), LinkKind::Handshake, vec![7]);
        let dial = ControlCommand::Dial { link, to, channel };
        assert_eq!(perform_control(&mut plane, dial), Some(ControlEvent::LinkDown { link }));
        for command in [
            ControlCommand::Send { link, frame: frame.clone() },
            ControlCommand::Reply { link, frame },
            ControlCommand::HangUp { link },
        ] {
            assert_eq!(perform_control(&mut plane, command), None);
        }
        let of_link = format!("{link:?}");
        let said = [
            format!("dial {of_link} tcp://a:1"),
            format!("send {of_link} [[7]]"),
            // As a ROUTER socket frames what it answers to a REQ socket.
            format!("send {of_link} [[], [7]]"),
            format!("hang up {of_link}"),
        ];
        assert_eq!(plane.calls, said);
    }
}
