//! What the threads of a plane tell its owner.

use crate::link::MoriLinkEvent;
use kvferry_engine::fabric::{FabricError, OpId, RegionId, SessionId};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::task::Waker;

/// How a batch ended in MoRI.
#[derive(Debug)]
pub(crate) enum MoriBatchOutcome {
    Done,
    /// Its bytes may move until the backend is removed.
    Failed(FabricError),
    /// MoRI never had it.
    Unposted(FabricError),
}

/// One piece of news.
#[derive(Debug)]
pub(crate) enum MoriWorkerEvent {
    Registered {
        region: RegionId,
        result: Result<Vec<u8>, FabricError>,
    },
    Opened {
        session: SessionId,
        result: Result<(), FabricError>,
    },
    Ended {
        op: OpId,
        end: MoriBatchOutcome,
    },
    Line(MoriLinkEvent),
    /// The peer wanted these sessions to end.
    Closed {
        sessions: BTreeSet<SessionId>,
    },
    /// A peer that was inside has left.
    PeerLeft,
    /// The old backend is gone, and with it what was under way in it; `again` is posted anew once
    /// its sessions are open.
    Rebuilt {
        again: Vec<OpId>,
    },
    /// There is no backend any more. What was under way may still be, unless it is `quiet`.
    Broken {
        why: String,
        quiet: bool,
    },
}

/// Where news is left.
#[derive(Debug, Default)]
pub(crate) struct MoriEventQueue {
    news: Mutex<Vec<MoriWorkerEvent>>,
    waker: Mutex<Option<Waker>>,
}

impl MoriEventQueue {
    pub(crate) fn tell(&self, news: MoriWorkerEvent) {
        self.news.lock().unwrap_or_else(PoisonError::into_inner).push(news);
        self.wake();
    }

    pub(crate) fn wake(&self) {
        if let Some(waker) = &*self.waker.lock().unwrap_or_else(PoisonError::into_inner) {
            waker.wake_by_ref();
        }
    }

    /// Swaps what is new for an empty list.
    pub(crate) fn take(&self, into: &mut Vec<MoriWorkerEvent>) {
        into.clear();
        std::mem::swap(into, &mut self.news.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn set_waker(&self, waker: Waker) {
        *self.waker.lock().unwrap_or_else(PoisonError::into_inner) = Some(waker);
    }
}
