//! The connection of a local link, as both of its sides have it.

use super::segment::ShmSegment;
use super::socket;
use crate::memory::{HostRegion, PidfdProcess};
use crate::proto::{HostControlMessage, PathPolicy};
use crate::shared::HostCloseReason;
use crate::sys;
use rustix::event::epoll::EventFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// What the peer of a local link is reached by.
#[derive(Debug)]
pub(super) struct LocalLinkHandles {
    socket: OwnedFd,
    /// Readable when the process has ended; none for a process of another namespace. A descriptor
    /// of its own: sessions may keep the process for longer than it is watched.
    watch: Option<OwnedFd>,
    pub(super) process: Option<Arc<PidfdProcess>>,
    pub(super) bell: OwnedFd,
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
        socket: OwnedFd,
        bell: OwnedFd,
        segment: ShmSegment,
        (rules, later): (PathPolicy, bool),
    ) -> LocalLinkHandles {
        let process =
            sys::peer_process(socket.as_fd()).and_then(|pid| PidfdProcess::open(pid).ok());
        let watch = process.as_ref().and_then(|process| PidfdProcess::open(process.pid).ok());
        LocalLinkHandles {
            socket,
            watch: watch.map(|process| process.handle),
            process: process.map(Arc::new),
            bell,
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
        let watch = self.watch.as_ref().map(|fd| (fd.as_fd(), EventFlags::IN));
        std::iter::once(socket).chain(watch).collect()
    }

    /// Something happened at one of them.
    pub(super) fn ready(&mut self, index: usize) {
        match index {
            0 => (self.readable, self.writable) = (true, true),
            _ => self.ended = true,
        }
    }

    /// Sends a message with the file of a region, if it has one; false if the socket takes none.
    pub(super) fn send(
        &mut self,
        message: &HostControlMessage,
        region: Option<&Arc<HostRegion>>,
    ) -> Result<bool, HostCloseReason> {
        let file = region.and_then(|region| region.file.as_ref());
        let fds: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
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
