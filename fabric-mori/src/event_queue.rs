//! What the threads of a plane tell its owner.

use crate::link::MoriLinkEvent;
use kvferry_engine::fabric::{FabricError, OpId, RegionId, SessionId};
use kvferry_fabric_common::NewsQueue;
use std::collections::BTreeSet;

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
pub(crate) type MoriEventQueue = NewsQueue<MoriWorkerEvent>;
