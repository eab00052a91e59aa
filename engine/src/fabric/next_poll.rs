//! When a plane has something to tell.

use crate::core::time::Nanos;

/// When to poll a plane again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextPoll {
    /// At once: there is more.
    Ready,
    /// When the waker is called, and at this time at the latest.
    At(Nanos),
    /// When the waker is called.
    External,
}

impl NextPoll {
    /// What two planes that are polled together wish.
    pub fn sooner(self, other: NextPoll) -> NextPoll {
        match (self, other) {
            (NextPoll::Ready, _) | (_, NextPoll::Ready) => NextPoll::Ready,
            (NextPoll::At(one), NextPoll::At(other)) => NextPoll::At(one.min(other)),
            (NextPoll::At(at), NextPoll::External) | (NextPoll::External, NextPoll::At(at)) => {
                NextPoll::At(at)
            }
            (NextPoll::External, NextPoll::External) => NextPoll::External,
        }
    }
}
