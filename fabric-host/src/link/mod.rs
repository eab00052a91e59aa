//! Connections between planes. Each has one side that initiates operations and one that serves
//! them; two planes that both initiate have two.

mod acceptor;
mod dial;
mod inbound;
mod local_initiator;
mod local_target;
mod outbound;
mod segment;
mod socket;
mod stream;
mod tcp_handshake;
mod tcp_initiator;
mod tcp_target;

#[cfg(all(test, not(feature = "loom")))]
mod hostile;
#[cfg(all(test, not(feature = "loom")))]
mod versions;

pub(crate) use acceptor::{HostAcceptor, HostListeners, listen};
pub(crate) use dial::{HostDialRequest, dial};
pub(crate) use inbound::HostInboundLink;
pub(crate) use outbound::{HostLinkEvent, HostOutboundLink, HostReadJob, HostReadSource};

use crate::worker::WorkerContext;
use rustix::event::epoll::EventFlags;
use std::os::fd::BorrowedFd;

/// What carries a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum HostLinkKind {
    /// Rings in memory that two processes of one host share.
    Local,
    Tcp,
}

/// Why a link ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostCloseReason {
    /// By us: fenced, forgotten or stopped.
    LocallyClosed,
    /// The peer closed it, or its process ended: it copies nothing of this link any more.
    Closed,
    /// The connection broke; what the peer does is not known.
    Lost,
    /// What came is not what a plane sends.
    Corrupt,
}

/// One side of a link, served by a thread.
pub(crate) trait HostLinkDriver: Send + std::fmt::Debug {
    /// Descriptors to watch, and for what.
    fn fds(&self) -> Vec<(BorrowedFd<'_>, EventFlags)>;

    /// Something happened at the descriptor of this index.
    fn ready(&mut self, index: usize);

    /// Does some work, at most one chunk of a copy; true if there was any.
    fn step(&mut self, cx: &mut WorkerContext) -> Result<bool, HostCloseReason>;

    /// True if it pays to look for more work for a while.
    fn spins(&self) -> bool {
        true
    }

    /// True if news come by a socket alone, and not by shared memory.
    fn is_by_socket(&self) -> bool {
        false
    }

    /// Announces that the thread is going to sleep; false if there is work.
    fn prepare_sleep(&mut self) -> bool;

    /// The link has ended.
    fn end(self: Box<Self>, cx: &mut WorkerContext, why: HostCloseReason);
}
