//! What the threads of a plane share: regions, who is let in, news for the owner.

use crate::config::{DataPath, HostConfig};
use crate::copy::{CopyBuffers, CopyPool, CopySlice};
use crate::descriptor::HostPlaneAddress;
use crate::doorbell::{OwnerBell, WorkerHandle};
use crate::link::{HostInboundLink, HostLinkKind, HostOutboundLink, HostReadSource, LinkTls};
use crate::memory::{HostRegion, RegistrationTable};
use crate::path::candidates;
use crate::proto::{HostCopyStatus, PathPolicy, SessionDenial};
use crate::ring::{AtomicU64 as Word, Producer};
use kvferry_engine::fabric::{FabricError, PeerId, RegionId, SessionId};
use kvferry_fabric_common::{GuestList, NewsQueue, PlaneIdentity, lock};
use kvferry_trust::FleetProof;
use rustix::event::epoll::EventFlags;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Operations of more bytes take longer than it takes to wake a thread: nobody stays awake for the
/// end of one, or for what may come after it.
pub(crate) const SHORT_MAX: u64 = 64 << 10;

/// Rounds with work before an owner that sleeps hears of outcomes: it would take the very core that
/// copies. A round is a chunk of each link.
const QUIET_ROUNDS: u32 = 4;

/// What rarely happens; completions have a ring of their own.
#[derive(Debug)]
pub(crate) enum HostWorkerEvent {
    /// Dialled links can be used, once the owner has given them to their threads, before which
    /// nothing that happens to them is told; or they could not be had.
    Dialled { dial: u64, result: Result<Vec<DialledLink>, HostDialError> },
    /// A link ended; `proven` if nothing sent by it can land any more.
    LinkDown { link: u64, proven: bool },
    /// Answer to an opening.
    Opened { session: SessionId, link: u64, result: Result<NegotiatedPaths, SessionDenial> },
    /// Nothing of the session lands by the link here (`local`) or at the peer any more.
    Closed { session: SessionId, link: u64, local: bool },
}

/// A link, and what its thread has to serve.
pub(crate) type DialledLink = (Arc<HostOutboundLink>, Box<dyn HostLinkDriver>);

/// Why there is no link.
#[derive(Debug)]
pub(crate) struct HostDialError {
    pub(crate) why: String,
    /// Nobody answered; else it was a refusal or ours.
    pub(crate) unreachable: bool,
    /// The plane that was meant has ended.
    pub(crate) gone: bool,
}

/// A session that can be used.
#[derive(Debug)]
pub(crate) struct NegotiatedPaths {
    /// How writes and reads go.
    pub(crate) write: DataPath,
    pub(crate) read: DataPath,
    /// For reads on this host.
    pub(crate) source: Option<Arc<HostReadSource>>,
}

/// What a thread is told.
#[derive(Debug)]
pub(crate) enum HostWorkerCommand {
    Add(u64, Box<dyn HostLinkDriver>),
    Remove(u64),
}

#[derive(Debug)]
struct HostAccessState {
    /// Live regions with their places in the registration table.
    regions: BTreeMap<RegionId, (Arc<HostRegion>, u32)>,
    registration_table: RegistrationTable,
    guests: GuestList,
    inbound: BTreeMap<u64, Arc<HostInboundLink>>,
    tokens: u64,
}

impl HostAccessState {
    /// Shuts out links of some kind.
    fn shut(&mut self, which: impl Fn(&HostInboundLink) -> bool) {
        self.inbound.retain(|_, link| {
            let its = which(link);
            if its {
                link.shut();
            }
            !its
        });
    }
}

/// Shared by the owner and all threads.
#[derive(Debug)]
pub(crate) struct HostPlaneShared {
    pub(crate) config: HostConfig,
    pub(crate) location: HostPlaneAddress,
    pub(crate) workers: Vec<Arc<WorkerHandle>>,
    commands: Vec<Mutex<Vec<HostWorkerCommand>>>,
    pub(crate) news: NewsQueue<HostWorkerEvent>,
    pub(crate) counts: HostAtomicCounters,
    pub(crate) stopping: AtomicBool,
    pub(crate) copy_pool: Arc<CopyPool>,
    state: Mutex<HostAccessState>,
    /// What the owner watches in place of its waker.
    bell: OnceLock<OwnerBell>,
    links: AtomicU64,
    pub(crate) proof: FleetProof,
    /// Encrypts what goes by TCP.
    pub(crate) tls: Option<LinkTls>,
}

impl HostPlaneShared {
    /// # Errors
    /// No memory for the registration table.
    pub(crate) fn new(
        config: HostConfig,
        location: HostPlaneAddress,
        workers: Vec<Arc<WorkerHandle>>,
        (proof, tls): (FleetProof, Option<LinkTls>),
    ) -> Result<HostPlaneShared, String> {
        let state = HostAccessState {
            regions: BTreeMap::new(),
            registration_table: RegistrationTable::new()?,
            guests: GuestList::new(config.open_door),
            inbound: BTreeMap::new(),
            tokens: 0,
        };
        let copy_pool = Arc::new(CopyPool::new(config.copiers as usize - 1));
        Ok(HostPlaneShared {
            copy_pool,
            config,
            location,
            commands: workers.iter().map(|_| Mutex::default()).collect(),
            workers,
            news: NewsQueue::default(),
            counts: HostAtomicCounters::default(),
            stopping: AtomicBool::new(false),
            state: Mutex::new(state),
            bell: OnceLock::new(),
            links: AtomicU64::new(0),
            proof,
            tls,
        })
    }

    /// A number for a link or a dial.
    pub(crate) fn fresh(&self) -> u64 {
        self.links.fetch_add(1, Ordering::Relaxed)
    }

    fn worker_number(&self, link: u64) -> usize {
        (link % self.workers.len() as u64) as usize
    }

    /// A number for a link beside others of the same peer: its thread has the fewest of them.
    pub(crate) fn fresh_link(&self, beside: impl Iterator<Item = u64>) -> u64 {
        let mut loads = vec![0_u32; self.workers.len()];
        beside.for_each(|link| loads[self.worker_number(link)] += 1);
        let least = loads.iter().min().copied();
        loop {
            let id = self.fresh();
            if Some(loads[self.worker_number(id)]) == least {
                return id;
            }
        }
    }

    /// A number for a link of a peer that dialled.
    pub(crate) fn fresh_inbound(&self, who: &PlaneIdentity) -> u64 {
        let state = lock(&self.state);
        let its = state.inbound.values().filter(|link| link.who == *who);
        self.fresh_link(its.map(|link| link.id))
    }

    /// The thread of a link.
    pub(crate) fn worker_of(&self, link: u64) -> &Arc<WorkerHandle> {
        &self.workers[self.worker_number(link)]
    }

    /// Tells the thread of a link.
    pub(crate) fn tell_worker(&self, link: u64, command: HostWorkerCommand) {
        let number = self.worker_number(link);
        lock(&self.commands[number]).push(command);
        self.workers[number].wake();
    }

    /// What a thread was told since it looked last.
    pub(crate) fn take_commands(&self, worker: usize) -> Vec<HostWorkerCommand> {
        std::mem::take(&mut *lock(&self.commands[worker]))
    }

    pub(crate) fn has_commands(&self, worker: usize) -> bool {
        !lock(&self.commands[worker]).is_empty()
    }

    pub(crate) fn rules(&self) -> PathPolicy {
        PathPolicy { paths: self.config.paths.clone(), slower: self.config.slower }
    }

    pub(crate) fn notify(&self, notice: HostWorkerEvent) {
        self.news.push(notice);
        self.wake();
    }

    /// Wakes the owner for what is in its ring or among the notices.
    pub(crate) fn wake(&self) {
        match self.bell() {
            Some(bell) => bell.ring(),
            None => self.news.wake(),
        }
    }

    /// What the owner watches, if it does.
    pub(crate) fn bell(&self) -> Option<&OwnerBell> {
        self.bell.get()
    }

    /// Makes what the owner watches; none if the system has no descriptor left.
    pub(crate) fn make_bell(&self) -> Option<&OwnerBell> {
        if self.bell.get().is_none() {
            let _made_meanwhile = self.bell.set(OwnerBell::new().ok()?);
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

    /// The file of the registration table, to be sent to a peer.
    pub(crate) fn with_registration_table<T>(&self, f: impl FnOnce(&RegistrationTable) -> T) -> T {
        f(&lock(&self.state).registration_table)
    }

    /// Lets a peer in under a fence key.
    pub(crate) fn grant_access(&self, who: &PlaneIdentity, peer: PeerId, fence_key: u64) {
        lock(&self.state).guests.invite(who, peer, fence_key);
    }

    /// Voids the fence key of a peer for good; nothing of it lands any more.
    pub(crate) fn fence(&self, who: &PlaneIdentity, fence_key: u64) {
        let mut state = lock(&self.state);
        state.guests.fence(who, fence_key);
        state.shut(|link| link.who == *who && link.fence_key == fence_key);
    }

    /// Forgets a peer. What was fenced stays so.
    pub(crate) fn revoke_access(&self, who: &PlaneIdentity, peer: PeerId) {
        let mut state = lock(&self.state);
        if let Some(fence_key) = state.guests.disinvite(who, peer) {
            state.shut(|link| link.who == *who && link.fence_key == fence_key);
        }
    }

    /// Lets a link in; from here on a fence reaches it. Older links that the peer says have ended
    /// are shut first, whether it is let in or not.
    ///
    /// # Errors
    /// Why it is kept out.
    pub(crate) fn admit(&self, link: &Arc<HostInboundLink>, ends: &[u64]) -> Result<(), String> {
        let mut state = lock(&self.state);
        state.shut(|old| old.who == link.who && ends.contains(&old.theirs));
        if state.guests.is_fenced(&link.who, link.fence_key) {
            return Err("fenced under this fence key".into());
        }
        if !state.guests.is_invited(&link.who, link.fence_key) {
            return Err("not connected to under this fence key".into());
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
    pub(crate) fn route(&self, peer: &HostPlaneAddress) -> Result<HostLinkKind, String> {
        let rules = self.rules();
        let here = peer.node == self.location.node;
        let local =
            [DataPath::SharedMemory, DataPath::CrossMemory].iter().any(|p| self.config.allows(*p));
        if here && local {
            return Ok(HostLinkKind::Local);
        }
        if !here {
            candidates(DataPath::Tcp, [&rules, &rules])?;
        }
        Ok(HostLinkKind::Tcp)
    }
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

/// Completions on their way to the owner.
pub(crate) type CompletionProducer = Producer<Arc<[Word]>>;

/// What a link needs to take a step.
pub(crate) struct WorkerContext {
    pub(crate) hub: Arc<HostPlaneShared>,
    pub(crate) scratch: CopyBuffers,
    pub(crate) chunk: Vec<CopySlice>,
    pub(crate) record: Vec<u64>,
    pub(crate) bounce: Vec<u8>,
    outcomes: CompletionProducer,
    /// Outcomes of operations that were closed before, for which no room was kept.
    late: VecDeque<[u64; 2]>,
    /// Rounds since outcomes were passed on that the owner may not know of.
    unannounced_rounds: Option<u32>,
}

impl WorkerContext {
    pub(crate) fn new(hub: Arc<HostPlaneShared>, outcomes: CompletionProducer) -> WorkerContext {
        WorkerContext {
            scratch: CopyBuffers::new(hub.copy_pool.clone()),
            hub,
            chunk: Vec::new(),
            record: Vec::new(),
            bounce: Vec::new(),
            outcomes,
            late: VecDeque::new(),
            unannounced_rounds: None,
        }
    }

    /// Tells the owner how an operation ended.
    pub(crate) fn complete(&mut self, op: u64, status: HostCopyStatus) {
        self.late.push_back([op, status as u64]);
        self.flush();
    }

    /// Tells the owner that a link which this plane dialled has ended.
    pub(crate) fn link_down(&self, link: u64, why: HostCloseReason) {
        if why == HostCloseReason::Corrupt {
            self.hub.counts.corrupt.fetch_add(1, Ordering::Relaxed);
        }
        let proven = why == HostCloseReason::Closed;
        self.hub.notify(HostWorkerEvent::LinkDown { link, proven });
    }

    /// Passes on what had no room; the owner rings when there is some.
    pub(crate) fn flush(&mut self) {
        while let Some(outcome) = self.late.front() {
            match self.outcomes.push(outcome) {
                Ok(true) => _ = self.unannounced_rounds.get_or_insert(0),
                // The owner is of this process and breaks nothing.
                Ok(false) | Err(_) => break,
            }
            self.late.pop_front();
        }
    }

    /// Wakes the owner for outcomes, unless there is more to do first.
    pub(crate) fn tell(&mut self, idle: bool) {
        let Some(rounds) = &mut self.unannounced_rounds else { return };
        *rounds += 1;
        if idle || *rounds >= QUIET_ROUNDS {
            self.unannounced_rounds = None;
            if self.outcomes.must_wake() {
                self.hub.wake();
            }
        }
    }
}

/// Operations and bytes of one path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathCount {
    /// Those that ended well.
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
