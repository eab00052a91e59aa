//! What the threads of a plane share: regions, who is let in, news for the owner.

use crate::config::{DataPath, HostConfig};
use crate::copy::CopyPool;
use crate::descriptor::{HostPlaneAddress, HostPlaneIdentity};
use crate::link::{HostInboundLink, HostLinkDriver, HostOutboundLink};
use crate::memory::{HostRegion, RegistrationTable};
use crate::path::candidates;
use crate::proto::{PathPolicy, SessionDenial};
use crate::sync::lock;
use crate::worker::{WorkerHandle, doorbell, ring};
use kvferry_engine::fabric::{FabricError, PeerId, RegionId, SessionId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Waker;

/// What rarely happens; completions have a ring of their own.
#[derive(Debug)]
pub(crate) enum HostWorkerEvent {
    /// A dialled link can be used, once the owner has given it to its thread: what happens to it
    /// is told after this.
    LinkUp { dial: u64, link: Arc<HostOutboundLink>, station: Box<dyn HostLinkDriver> },
    /// It could not be had; `gone` if that proves that the peer has ended.
    DialFailed { dial: u64, why: String, unreachable: bool, gone: bool },
    /// A link ended; `proven` if nothing sent by it can land any more.
    LinkDown { link: u64, proven: bool },
    /// Answer to an opening.
    Opened { session: SessionId, link: u64, result: Result<NegotiatedPaths, SessionDenial> },
    /// Nothing of the session lands here (`local`) or at the peer any more.
    Closed { session: SessionId, local: bool },
}

/// A session that can be used.
#[derive(Debug)]
pub(crate) struct NegotiatedPaths {
    /// How writes and reads go.
    pub(crate) write: DataPath,
    pub(crate) read: DataPath,
    /// For reads on this host.
    pub(crate) source: Option<Arc<crate::link::HostReadSource>>,
}

/// A peer as the owner named it.
#[derive(Debug, Default)]
struct HostPeerAccess {
    fence_keys: BTreeMap<PeerId, u64>,
    /// Passes that were fenced, for good.
    fenced: BTreeSet<u64>,
}

#[derive(Debug)]
struct HostAccessState {
    /// Live regions with their places in the roll.
    regions: BTreeMap<RegionId, (Arc<HostRegion>, u32)>,
    registration_table: RegistrationTable,
    guests: BTreeMap<HostPlaneIdentity, HostPeerAccess>,
    inbound: BTreeMap<u64, Arc<HostInboundLink>>,
    tokens: u64,
}

/// Shared by the owner and all threads.
#[derive(Debug)]
pub(crate) struct HostPlaneShared {
    pub(crate) config: HostConfig,
    pub(crate) location: HostPlaneAddress,
    pub(crate) workers: Vec<Arc<WorkerHandle>>,
    pub(crate) counts: HostAtomicCounters,
    pub(crate) stopping: AtomicBool,
    pub(crate) copy_pool: Arc<CopyPool>,
    state: Mutex<HostAccessState>,
    notices: Mutex<(Vec<HostWorkerEvent>, Option<Waker>)>,
    /// What the owner watches in place of its waker.
    bell: OnceLock<OwnedFd>,
    links: AtomicU64,
}

impl HostPlaneShared {
    /// # Errors
    /// No memory for the roll.
    pub(crate) fn new(
        config: HostConfig,
        location: HostPlaneAddress,
        workers: Vec<Arc<WorkerHandle>>,
    ) -> Result<HostPlaneShared, String> {
        let state = HostAccessState {
            regions: BTreeMap::new(),
            registration_table: RegistrationTable::new()?,
            guests: BTreeMap::new(),
            inbound: BTreeMap::new(),
            tokens: 0,
        };
        let crew = Arc::new(CopyPool::new(config.copiers as usize - 1));
        Ok(HostPlaneShared {
            copy_pool: crew,
            config,
            location,
            workers,
            counts: HostAtomicCounters::default(),
            stopping: AtomicBool::new(false),
            state: Mutex::new(state),
            notices: Mutex::default(),
            bell: OnceLock::new(),
            links: AtomicU64::new(0),
        })
    }

    /// A number for a link or a dial.
    pub(crate) fn fresh(&self) -> u64 {
        self.links.fetch_add(1, Ordering::Relaxed)
    }

    /// The thread of a link.
    pub(crate) fn worker_of(&self, link: u64) -> &Arc<WorkerHandle> {
        &self.workers[(link % self.workers.len() as u64) as usize]
    }

    pub(crate) fn rules(&self) -> PathPolicy {
        PathPolicy { paths: self.config.paths.clone(), slower: self.config.slower }
    }

    pub(crate) fn notify(&self, notice: HostWorkerEvent) {
        lock(&self.notices).0.push(notice);
        self.wake();
    }

    /// Wakes the owner for what is in its ring or among the notices.
    pub(crate) fn wake(&self) {
        if let Some(bell) = self.bell() {
            return ring(bell);
        }
        let waker = lock(&self.notices).1.clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn take_events(&self) -> Vec<HostWorkerEvent> {
        std::mem::take(&mut lock(&self.notices).0)
    }

    pub(crate) fn set_waker(&self, waker: Waker) {
        lock(&self.notices).1 = Some(waker);
    }

    /// What the owner watches, if it does.
    pub(crate) fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.bell.get().map(OwnedFd::as_fd)
    }

    /// Makes what the owner watches; none if the system has no descriptor left.
    pub(crate) fn make_bell(&self) -> Option<BorrowedFd<'_>> {
        if self.bell.get().is_none() {
            let _made_meanwhile = self.bell.set(doorbell().ok()?);
        }
        self.bell()
    }

    pub(crate) fn next_token(&self) -> u64 {
        let mut state = lock(&self.state);
        state.tokens += 1;
        state.tokens
    }

    /// Makes a region reachable.
    pub(crate) fn add_region(&self, region: &Arc<HostRegion>) -> Result<(), FabricError> {
        let mut state = lock(&self.state);
        let full = || FabricError::Backend("no more regions can be registered at a time".into());
        let place = state.registration_table.enter(region.token).ok_or_else(full)?;
        state.regions.insert(region.id, (region.clone(), place));
        Ok(())
    }

    /// Makes a region unreachable; no byte lands in it any more.
    pub(crate) fn remove_region(&self, id: RegionId) {
        let mut state = lock(&self.state);
        if let Some((region, place)) = state.regions.remove(&id) {
            state.registration_table.strike(place);
            drop(state);
            region.kill();
        }
    }

    /// A live region by what a peer knows of it.
    pub(crate) fn region(&self, id: u32, token: u64) -> Option<(Arc<HostRegion>, u32)> {
        let state = lock(&self.state);
        let (region, place) = state.regions.get(&RegionId(id))?;
        (region.token == token).then(|| (region.clone(), *place))
    }

    /// The file of the roll, to be sent to a peer.
    pub(crate) fn with_registration_table<T>(&self, f: impl FnOnce(&RegistrationTable) -> T) -> T {
        f(&lock(&self.state).registration_table)
    }

    /// Lets a peer in under a pass.
    pub(crate) fn grant_access(&self, who: &HostPlaneIdentity, peer: PeerId, fence_key: u64) {
        lock(&self.state).guests.entry(who.clone()).or_default().fence_keys.insert(peer, fence_key);
    }

    /// Voids the pass of a peer for good; nothing of it lands any more.
    pub(crate) fn fence(&self, who: &HostPlaneIdentity, fence_key: u64) {
        let mut state = lock(&self.state);
        state.guests.entry(who.clone()).or_default().fenced.insert(fence_key);
        Self::shut(&mut state, who, fence_key);
    }

    /// Forgets a peer. What was fenced stays so.
    pub(crate) fn revoke_access(&self, who: &HostPlaneIdentity, peer: PeerId) {
        let mut state = lock(&self.state);
        let Some(guest) = state.guests.get_mut(who) else { return };
        let Some(fence_key) = guest.fence_keys.remove(&peer) else { return };
        let still = guest.fence_keys.values().any(|other| *other == fence_key);
        if guest.fence_keys.is_empty() && guest.fenced.is_empty() {
            state.guests.remove(who);
        }
        if !still {
            Self::shut(&mut state, who, fence_key);
        }
    }

    fn shut(state: &mut HostAccessState, who: &HostPlaneIdentity, fence_key: u64) {
        state.inbound.retain(|_, link| {
            let its = link.who == *who && link.fence_key == fence_key;
            if its {
                link.shut();
            }
            !its
        });
    }

    /// Lets a link in; from here on a fence reaches it. Older links that the peer says have ended
    /// are shut first, whether it is let in or not.
    ///
    /// # Errors
    /// Why it is kept out.
    pub(crate) fn admit(&self, link: &Arc<HostInboundLink>, ends: &[u64]) -> Result<(), String> {
        let mut state = lock(&self.state);
        state.inbound.retain(|_, old| {
            let ended = old.who == link.who && ends.contains(&old.theirs);
            if ended {
                old.shut();
            }
            !ended
        });
        let guest = state.guests.get(&link.who);
        let fence_key = link.fence_key;
        if guest.is_some_and(|guest| guest.fenced.contains(&fence_key)) {
            return Err("fenced under this pass".into());
        }
        let invited = guest.is_some_and(|guest| guest.fence_keys.values().any(|p| *p == fence_key));
        if !(invited || self.config.open_door && fence_key == 0) {
            return Err("not connected to under this pass".into());
        }
        if state.inbound.len() >= self.config.links_max as usize {
            let most = self.config.links_max;
            return Err(format!("{most} links already: raise links_max"));
        }
        state.inbound.insert(link.id, link.clone());
        link.admit();
        Ok(())
    }

    /// Forgets a link that ended.
    pub(crate) fn dismiss(&self, link: u64) {
        lock(&self.state).inbound.remove(&link);
    }

    /// How a peer of another, or this, host is dialled.
    ///
    /// # Errors
    /// No path that it allows leads there.
    pub(crate) fn route(
        &self,
        peer: &HostPlaneAddress,
    ) -> Result<crate::link::HostLinkKind, String> {
        let rules = self.rules();
        let here = peer.node == self.location.node;
        let local =
            [DataPath::SharedMemory, DataPath::CrossMemory].iter().any(|p| self.config.allows(*p));
        if here && local {
            return Ok(crate::link::HostLinkKind::Local);
        }
        if !here {
            candidates(DataPath::Tcp, [&rules, &rules])?;
        }
        Ok(crate::link::HostLinkKind::Tcp)
    }
}

/// Operations and bytes of one path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathCount {
    /// Those that succeeded.
    pub operations: u64,
    /// Bytes that they moved.
    pub bytes: u64,
}

/// What a plane did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCounters {
    /// Own operations, by path in the order of [`DataPath::ALL`].
    pub initiated: [PathCount; 3],
    /// Writes of peers that landed here.
    pub served: [PathCount; 3],
    /// Connections that were not let in.
    pub refused: u64,
    /// Connections dropped because what came was no message of a plane.
    pub corrupt: u64,
}

#[derive(Debug, Default)]
pub(crate) struct AtomicPathCount {
    operations: AtomicU64,
    bytes: AtomicU64,
}

impl AtomicPathCount {
    pub(crate) fn add(&self, bytes: u64) {
        self.operations.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn get(&self) -> PathCount {
        PathCount {
            operations: self.operations.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct HostAtomicCounters {
    pub(crate) initiated: [AtomicPathCount; 3],
    pub(crate) served: [AtomicPathCount; 3],
    pub(crate) refused: AtomicU64,
    pub(crate) corrupt: AtomicU64,
}

impl HostAtomicCounters {
    pub(crate) fn get(&self) -> HostCounters {
        HostCounters {
            initiated: [0, 1, 2].map(|n| self.initiated[n].get()),
            served: [0, 1, 2].map(|n| self.served[n].get()),
            refused: self.refused.load(Ordering::Relaxed),
            corrupt: self.corrupt.load(Ordering::Relaxed),
        }
    }
}
