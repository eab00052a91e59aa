//! What the threads of a plane share: regions, who is let in, news for the owner.

use crate::config::{HostConfig, Path};
use crate::copy::Crew;
use crate::descriptor::{Identity, Location};
use crate::link::{Inbound, OutLink, Station};
use crate::memory::{Region, Roll};
use crate::path::candidates;
use crate::proto::{Denial, Rules};
use crate::sync::lock;
use crate::worker::{WorkerHandle, doorbell, ring};
use engine::fabric::{Cause, PeerId, RegionId, SessionId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Waker;

/// What rarely happens; completions have a ring of their own.
#[derive(Debug)]
pub(crate) enum Notice {
    /// A dialled link can be used, once the owner has given it to its thread: what happens to it
    /// is told after this.
    LinkUp { dial: u64, link: Arc<OutLink>, station: Box<dyn Station> },
    /// It could not be had; `gone` if that proves that the peer has ended.
    DialFailed { dial: u64, why: String, unreachable: bool, gone: bool },
    /// A link ended; `proven` if nothing sent by it can land any more.
    LinkDown { link: u64, proven: bool },
    /// Answer to an opening.
    Opened { session: SessionId, link: u64, result: Result<Lane, Denial> },
    /// Nothing of the session lands here (`local`) or at the peer any more.
    Closed { session: SessionId, local: bool },
}

/// A session that can be used.
#[derive(Debug)]
pub(crate) struct Lane {
    /// How writes and reads go.
    pub(crate) write: Path,
    pub(crate) read: Path,
    /// For reads on this host.
    pub(crate) source: Option<Arc<crate::link::Source>>,
}

/// A peer as the owner named it.
#[derive(Debug, Default)]
struct Guest {
    passes: BTreeMap<PeerId, u64>,
    /// Passes that were fenced, for good.
    fenced: BTreeSet<u64>,
}

#[derive(Debug)]
struct State {
    /// Live regions with their places in the roll.
    regions: BTreeMap<RegionId, (Arc<Region>, u32)>,
    roll: Roll,
    guests: BTreeMap<Identity, Guest>,
    inbound: BTreeMap<u64, Arc<Inbound>>,
    tokens: u64,
}

/// Shared by the owner and all threads.
#[derive(Debug)]
pub(crate) struct Hub {
    pub(crate) config: HostConfig,
    pub(crate) location: Location,
    pub(crate) workers: Vec<Arc<WorkerHandle>>,
    pub(crate) counts: Counts,
    pub(crate) stopping: AtomicBool,
    pub(crate) crew: Arc<Crew>,
    state: Mutex<State>,
    notices: Mutex<(Vec<Notice>, Option<Waker>)>,
    /// What the owner watches in place of its waker.
    bell: OnceLock<OwnedFd>,
    links: AtomicU64,
}

impl Hub {
    /// # Errors
    /// No memory for the roll.
    pub(crate) fn new(
        config: HostConfig,
        location: Location,
        workers: Vec<Arc<WorkerHandle>>,
    ) -> Result<Hub, String> {
        let state = State {
            regions: BTreeMap::new(),
            roll: Roll::new()?,
            guests: BTreeMap::new(),
            inbound: BTreeMap::new(),
            tokens: 0,
        };
        let crew = Arc::new(Crew::new(config.copiers as usize - 1));
        Ok(Hub {
            crew,
            config,
            location,
            workers,
            counts: Counts::default(),
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

    pub(crate) fn rules(&self) -> Rules {
        Rules { paths: self.config.paths.clone(), slower: self.config.slower }
    }

    pub(crate) fn notify(&self, notice: Notice) {
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

    pub(crate) fn take_notices(&self) -> Vec<Notice> {
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
    pub(crate) fn add_region(&self, region: &Arc<Region>) -> Result<(), Cause> {
        let mut state = lock(&self.state);
        let full = || Cause::Backend("no more regions can be registered at a time".into());
        let place = state.roll.enter(region.token).ok_or_else(full)?;
        state.regions.insert(region.id, (region.clone(), place));
        Ok(())
    }

    /// Makes a region unreachable; no byte lands in it any more.
    pub(crate) fn remove_region(&self, id: RegionId) {
        let mut state = lock(&self.state);
        if let Some((region, place)) = state.regions.remove(&id) {
            state.roll.strike(place);
            drop(state);
            region.kill();
        }
    }

    /// A live region by what a peer knows of it.
    pub(crate) fn region(&self, id: u32, token: u64) -> Option<(Arc<Region>, u32)> {
        let state = lock(&self.state);
        let (region, place) = state.regions.get(&RegionId(id))?;
        (region.token == token).then(|| (region.clone(), *place))
    }

    /// The file of the roll, to be sent to a peer.
    pub(crate) fn with_roll<T>(&self, f: impl FnOnce(&Roll) -> T) -> T {
        f(&lock(&self.state).roll)
    }

    /// Lets a peer in under a pass.
    pub(crate) fn invite(&self, who: &Identity, peer: PeerId, pass: u64) {
        lock(&self.state).guests.entry(who.clone()).or_default().passes.insert(peer, pass);
    }

    /// Voids the pass of a peer for good; nothing of it lands any more.
    pub(crate) fn fence(&self, who: &Identity, pass: u64) {
        let mut state = lock(&self.state);
        state.guests.entry(who.clone()).or_default().fenced.insert(pass);
        Self::shut(&mut state, who, pass);
    }

    /// Forgets a peer. What was fenced stays so.
    pub(crate) fn uninvite(&self, who: &Identity, peer: PeerId) {
        let mut state = lock(&self.state);
        let Some(guest) = state.guests.get_mut(who) else { return };
        let Some(pass) = guest.passes.remove(&peer) else { return };
        let still = guest.passes.values().any(|other| *other == pass);
        if guest.passes.is_empty() && guest.fenced.is_empty() {
            state.guests.remove(who);
        }
        if !still {
            Self::shut(&mut state, who, pass);
        }
    }

    fn shut(state: &mut State, who: &Identity, pass: u64) {
        state.inbound.retain(|_, link| {
            let its = link.who == *who && link.pass == pass;
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
    pub(crate) fn admit(&self, link: &Arc<Inbound>, ends: &[u64]) -> Result<(), String> {
        let mut state = lock(&self.state);
        state.inbound.retain(|_, old| {
            let ended = old.who == link.who && ends.contains(&old.theirs);
            if ended {
                old.shut();
            }
            !ended
        });
        let guest = state.guests.get(&link.who);
        let pass = link.pass;
        if guest.is_some_and(|guest| guest.fenced.contains(&pass)) {
            return Err("fenced under this pass".into());
        }
        let invited = guest.is_some_and(|guest| guest.passes.values().any(|p| *p == pass));
        if !(invited || self.config.open_door && pass == 0) {
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
    pub(crate) fn route(&self, peer: &Location) -> Result<crate::link::Kind, String> {
        let rules = self.rules();
        let here = peer.node == self.location.node;
        let local = [Path::SharedMemory, Path::CrossMemory].iter().any(|p| self.config.allows(*p));
        if here && local {
            return Ok(crate::link::Kind::Local);
        }
        if !here {
            candidates(Path::Tcp, [&rules, &rules])?;
        }
        Ok(crate::link::Kind::Tcp)
    }
}

/// Operations and bytes of one path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathCount {
    /// Operations that succeeded.
    pub operations: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What a plane did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Own operations, by path in the order of [`Path::ALL`].
    pub initiated: [PathCount; 3],
    /// Writes of peers that landed here.
    pub served: [PathCount; 3],
    /// Connections that were not let in.
    pub refused: u64,
    /// Connections dropped because what came was no message of a plane.
    pub corrupt: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Count {
    operations: AtomicU64,
    bytes: AtomicU64,
}

impl Count {
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
pub(crate) struct Counts {
    pub(crate) initiated: [Count; 3],
    pub(crate) served: [Count; 3],
    pub(crate) refused: AtomicU64,
    pub(crate) corrupt: AtomicU64,
}

impl Counts {
    pub(crate) fn get(&self) -> Counters {
        Counters {
            initiated: [0, 1, 2].map(|n| self.initiated[n].get()),
            served: [0, 1, 2].map(|n| self.served[n].get()),
            refused: self.refused.load(Ordering::Relaxed),
            corrupt: self.corrupt.load(Ordering::Relaxed),
        }
    }
}
