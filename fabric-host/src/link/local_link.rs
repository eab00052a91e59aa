//! The connection of a local link, as both of its sides have it.

use super::segment::ShmSegment;
use super::{LocalPeer, socket};
use crate::doorbell::{HeardBell, PeerBell};
use crate::memory::HostRegion;
use crate::proto::{HostControlMessage, PathPolicy};
use crate::shared::HostCloseReason;
use rustix::event::epoll::EventFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// What the peer of a local link is reached by.
#[derive(Debug)]
pub(super) struct LocalLinkHandles {
    socket: OwnedFd,
    pub(super) peer: LocalPeer,
    pub(super) bell: PeerBell,
    /// By what the peer rings our thread, if it does not ring the owner.
    heard: Option<HeardBell>,
    pub(super) segment: ShmSegment,
    pub(super) rules: PathPolicy,
    /// The peer may say more than this plane knows.
    later: bool,
    pub(super) readable: bool,
    /// The socket takes a message, as far as is known.
    pub(super) writable: bool,
    pub(super) ended: bool,
}

impl LocalLinkHandles {
    /// Of a peer that was greeted, which said its rules and whether it may say more than this plane
    /// knows.
    pub(super) fn new(
        (socket, peer): (OwnedFd, LocalPeer),
        (bell, heard): (PeerBell, Option<HeardBell>),
        segment: ShmSegment,
        (rules, later): (PathPolicy, bool),
    ) -> LocalLinkHandles {
        LocalLinkHandles {
            socket,
            peer,
            bell,
            heard,
            segment,
            rules,
            later,
            readable: true,
            writable: true,
            ended: false,
        }
    }

    /// See [`crate::shared::HostLinkDriver`].
    pub(super) fn fds(&self) -> Vec<(BorrowedFd<'_>, EventFlags)> {
        let socket = (self.socket.as_fd(), EventFlags::IN | EventFlags::OUT | EventFlags::ET);
        let heard = self.heard.as_ref().map(|bell| (bell.fd(), EventFlags::IN));
        [socket, (self.peer.watch.as_fd(), EventFlags::IN)].into_iter().chain(heard).collect()
    }

    /// Something happened at one of them.
    pub(super) fn ready(&mut self, index: usize) {
        match index {
            0 => (self.readable, self.writable) = (true, true),
            1 => self.ended = true,
            _ => self.heard.iter().for_each(HeardBell::hear),
        }
    }

    /// Sends a message with what it says of a region: its file, or what shows that this process may
    /// read it; false if the socket takes none.
    pub(super) fn send(
        &mut self,
        message: &HostControlMessage,
        region: Option<&Arc<HostRegion>>,
    ) -> Result<bool, HostCloseReason> {
        let along = match (message.side(), region) {
            (Some(side), Some(region)) if side.file => region.file.as_ref(),
            (Some(_), Some(region)) => region.proof.as_ref(),
            _ => None,
        };
        let fds: Vec<_> = along.iter().map(|file| file.as_fd()).collect();
        self.writable = socket::send(self.socket.as_fd(), message, &fds)?;
        Ok(self.writable)
    }

    /// The next message with the file that came along; none if there is none now.
    pub(super) fn receive(
        &mut self,
    ) -> Result<Option<(HostControlMessage, Option<OwnedFd>)>, HostCloseReason> {
        if !self.readable {
            return Ok(None);
        }
        let received = socket::receive(self.socket.as_fd(), self.later)?;
        self.readable = received.is_some();
        Ok(received.map(|(message, mut fds)| (message, fds.pop())))
    }
}
