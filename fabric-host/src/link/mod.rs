//! Connections between planes. Each has one side that initiates operations and one that serves
//! them; two planes that both initiate have two.

mod dial;
mod greet;
mod greeting;
mod inbound;
mod local_in;
mod local_out;
mod out;
mod segment;
mod socket;
mod stream;
mod tcp_in;
mod tcp_out;

#[cfg(all(test, not(feature = "loom")))]
mod hostile;
#[cfg(all(test, not(feature = "loom")))]
mod versions;

pub(crate) use dial::{Dial, dial};
pub(crate) use greet::{Ears, Listener, listen};
pub(crate) use inbound::Inbound;
pub(crate) use out::{Heard, OutLink, Read, Source};

use crate::worker::Cx;
use rustix::event::epoll::EventFlags;
use std::os::fd::BorrowedFd;

/// What carries a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Rings in memory that two processes of one host share.
    Local,
    /// A TCP connection.
    Tcp,
}

/// Why a link ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// By us: fenced, forgotten or stopped.
    Ours,
    /// The peer closed it, or its process ended: it copies nothing of this link any more.
    Closed,
    /// The connection broke; what the peer does is not known.
    Lost,
    /// What came is not what a plane sends.
    Corrupt,
}

/// One side of a link, served by a thread.
pub(crate) trait Station: Send + std::fmt::Debug {
    /// Descriptors to watch, and for what.
    fn fds(&self) -> Vec<(BorrowedFd<'_>, EventFlags)>;

    /// Something happened at the descriptor of this index.
    fn ready(&mut self, index: usize);

    /// Does some work, at most one chunk of a copy; true if there was any.
    fn step(&mut self, cx: &mut Cx) -> Result<bool, End>;

    /// True if it pays to look for more work for a while.
    fn spins(&self) -> bool {
        true
    }

    /// True if news come by a socket alone, and not by shared memory.
    fn is_by_socket(&self) -> bool {
        false
    }

    /// Announces that the thread is going to sleep; false if there is work.
    fn doze(&mut self) -> bool;

    /// The link has ended.
    fn end(self: Box<Self>, cx: &mut Cx, why: End);
}
