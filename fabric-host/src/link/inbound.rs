//! A link of a peer, as far as the owner of this plane rules over it.

use super::segment::ShmSegment;
use crate::doorbell::WorkerHandle;
use kvferry_fabric_common::{PlaneIdentity, lock};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// A link that a peer dialled.
#[derive(Debug)]
pub(crate) struct HostInboundLink {
    pub(crate) id: u64,
    pub(crate) who: PlaneIdentity,
    pub(crate) fence_key: u64,
    /// The number that the peer gave it.
    pub(crate) theirs: u64,
    worker: Arc<WorkerHandle>,
    segment: Option<ShmSegment>,
    shut: AtomicBool,
    /// Held while bytes of the peer land.
    landing: Mutex<()>,
}

impl HostInboundLink {
    pub(crate) fn new(
        id: u64,
        (who, fence_key, theirs): (PlaneIdentity, u64, u64),
        worker: Arc<WorkerHandle>,
        segment: Option<ShmSegment>,
    ) -> HostInboundLink {
        let (shut, landing) = (AtomicBool::new(false), Mutex::new(()));
        HostInboundLink { id, who, fence_key, theirs, worker, segment, shut, landing }
    }

    /// Lets the peer in.
    pub(crate) fn admit(&self) {
        if let Some(segment) = &self.segment {
            segment.set_open(true);
        }
    }

    /// Shuts the peer out for good; returns when the chunk that is landing has landed.
    pub(crate) fn shut(&self) {
        self.shut.store(true, Ordering::SeqCst);
        if let Some(segment) = &self.segment {
            segment.set_open(false);
        }
        drop(lock(&self.landing));
        self.worker.wake();
    }

    pub(crate) fn is_shut(&self) -> bool {
        self.shut.load(Ordering::SeqCst)
    }

    /// Keeps the peer in as long as the guard is held; none if it is shut out.
    pub(crate) fn hold(&self) -> Option<MutexGuard<'_, ()>> {
        let guard = lock(&self.landing);
        (!self.is_shut()).then_some(guard)
    }
}
