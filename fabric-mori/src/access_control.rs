//! Who may reach our memory, as the acceptor and the plane see it.
//!
//! RDMA is revoked here: with the backend go the keys that peers have. xGMI is not: a peer has
//! mapped the memory and copies itself, whatever we do. So it is asked to leave, and has left when
//! its line ends, which it does by itself once it copies no more, or with its process.
//!
//! MoRI keeps the queue pairs of a peer that has left or has replaced its backend, polls them, and
//! has no call that drops them: they end with our backend. They are counted here, once for each
//! time that a line ends, or asks for the same session as before: that is of another backend of the
//! peer.

use crate::address::MoriMemoryKey;
use crate::event_queue::{MoriEventQueue, MoriWorkerEvent};
use crate::link::{MoriRegionGrant, ask_to_leave};
use crate::{MoriBackend, MoriConfig};
use kvferry_engine::fabric::{PeerId, RegionId};
use kvferry_fabric_common::{GuestList, PlaneIdentity, lock};
use kvferry_trust::FleetProof;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug)]
struct MoriInboundLink {
    who: PlaneIdentity,
    fence_key: u64,
    socket: TcpStream,
    /// Regions that it was told of.
    entered: BTreeSet<RegionId>,
    /// The session for which it asked last, but for those that go on in another backend of the
    /// peer.
    last: Option<u32>,
}

#[derive(Debug, Default)]
struct MoriAccessState {
    incarnation: u64,
    engine: Arc<[u8]>,
    /// Names of this incarnation, also those from before a rebuild.
    names: BTreeMap<MoriMemoryKey, RegionId>,
    regions: BTreeMap<RegionId, Arc<[u8]>>,
    guests: GuestList,
    links: BTreeMap<u64, MoriInboundLink>,
    next_line: u64,
    /// Identities and fence keys that MoRI's descriptors of this engine were given to.
    inside: BTreeSet<(PlaneIdentity, u64)>,
}

/// Shared by the plane, its posting thread and the acceptor.
#[derive(Debug)]
pub(crate) struct MoriAccessControl {
    state: Mutex<MoriAccessState>,
    /// A line has ended.
    left: Condvar,
    /// Ends of peers' queue pairs in this backend.
    dead_pairs: AtomicU64,
    /// At so many the plane is told; 0 is never.
    dead_pairs_max: u32,
    backend: MoriBackend,
    /// Name of this engine.
    pub(crate) key: String,
    pub(crate) proof: FleetProof,
    board: Arc<MoriEventQueue>,
}

impl MoriAccessControl {
    pub(crate) fn new(
        incarnation: u64,
        config: &MoriConfig,
        proof: FleetProof,
        board: Arc<MoriEventQueue>,
    ) -> MoriAccessControl {
        let MoriConfig { backend, open_door, dead_pairs_max, .. } = *config;
        let guests = GuestList::new(open_door);
        let state = MoriAccessState { incarnation, guests, ..MoriAccessState::default() };
        let state = Mutex::new(state);
        let (left, dead_pairs) = (Condvar::new(), AtomicU64::new(0));
        let key = config.key.clone();
        MoriAccessControl { state, left, dead_pairs, dead_pairs_max, backend, key, proof, board }
    }

    fn state(&self) -> MutexGuard<'_, MoriAccessState> {
        lock(&self.state)
    }

    pub(crate) fn incarnation(&self) -> u64 {
        self.state().incarnation
    }

    /// From now on peers are told of this engine, in which nobody is yet.
    pub(crate) fn engine_is(&self, desc: Arc<[u8]>) {
        let mut state = self.state();
        state.engine = desc;
        if self.backend == MoriBackend::Rdma {
            state.inside.clear();
            self.dead_pairs.store(0, Ordering::Relaxed);
        }
    }

    /// How often queue pairs of peers have ended in this backend.
    pub(crate) fn dead_pairs(&self) -> u64 {
        self.dead_pairs.load(Ordering::Relaxed)
    }

    /// True if the backend had better be replaced while nothing is under way: so many queue pairs
    /// of peers have ended in it, and no peer is connected, or twice as many have.
    pub(crate) fn wants_rebuild(&self) -> bool {
        let (dead, most) = (self.dead_pairs(), u64::from(self.dead_pairs_max));
        let visited = || self.state().links.values().any(|line| line.last.is_some());
        most > 0 && dead >= most && (dead >= 2 * most || !visited())
    }

    fn pairs_died(&self) {
        if self.backend == MoriBackend::Rdma {
            let dead = self.dead_pairs.fetch_add(1, Ordering::Relaxed) + 1;
            if self.dead_pairs_max > 0 && dead >= self.dead_pairs_max.into() {
                self.board.tell(MoriWorkerEvent::PeerLeft);
            }
        }
    }

    pub(crate) fn add_region(&self, region: RegionId, name: MoriMemoryKey, desc: Arc<[u8]>) {
        let mut state = self.state();
        state.names.insert(name, region);
        state.regions.insert(region, desc);
    }

    pub(crate) fn remove_region(&self, region: RegionId) {
        let mut state = self.state();
        state.regions.remove(&region);
        state.names.retain(|_, named| *named != region);
    }

    pub(crate) fn grant_access(&self, who: &PlaneIdentity, peer: PeerId, fence_key: u64) {
        self.state().guests.invite(who, peer, fence_key);
    }

    pub(crate) fn revoke_access(&self, who: &PlaneIdentity, peer: PeerId) {
        self.state().guests.disinvite(who, peer);
    }

    /// Voids a fence key. True if who has it may have reached memory by it.
    pub(crate) fn fence(&self, who: &PlaneIdentity, fence_key: u64) -> bool {
        let mut state = self.state();
        let key = (who.clone(), fence_key);
        let inside = state.inside.contains(&key);
        let its = |line: &MoriInboundLink| line.who == key.0 && line.fence_key == key.1;
        match self.backend {
            MoriBackend::Xgmi if inside => state.ask_to_leave(None, its),
            _ => state.hang_up(its),
        }
        state.guests.fence(who, fence_key);
        inside
    }

    /// True if who has this fence key may reach memory.
    pub(crate) fn is_inside(&self, who: &PlaneIdentity, fence_key: u64) -> bool {
        self.state().inside.contains(&(who.clone(), fence_key))
    }

    /// True if peers lose what they have by the end of this backend.
    pub(crate) fn is_anyone_inside(&self) -> bool {
        self.backend == MoriBackend::Rdma && !self.state().inside.is_empty()
    }

    /// Lets nobody in any more, and has all leave who are in.
    pub(crate) fn expel(&self) {
        let mut state = self.state();
        state.guests.disinvite_all();
        state.ask_to_leave(None, |_| true);
    }

    /// Who may reach memory.
    pub(crate) fn insiders(&self) -> Vec<Arc<str>> {
        self.state().inside.iter().map(|(who, _)| who.key.clone()).collect()
    }

    /// Has all leave a region that the backend cannot keep out. False if one has not after
    /// `patience`.
    pub(crate) fn drain_region(&self, region: RegionId, patience: Duration) -> bool {
        if self.backend == MoriBackend::Rdma {
            return true;
        }
        let entered = |line: &MoriInboundLink| line.entered.contains(&region);
        let mut state = self.state();
        state.ask_to_leave(Some(region), entered);
        let until = Instant::now() + patience;
        while state.links.values().any(entered) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.left.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// A line says that it has left a region.
    pub(crate) fn released(&self, line: u64, region: RegionId) {
        if let Some(line) = self.state().links.get_mut(&line) {
            line.entered.remove(&region);
        }
        self.left.notify_all();
    }

    /// A new incarnation: all that peers know is void, and they are told so by the end of their
    /// lines.
    pub(crate) fn renew(&self, incarnation: u64) {
        let mut state = self.state();
        state.hang_up(|_| true);
        state.incarnation = incarnation;
        state.names.clear();
        state.regions.clear();
        state.guests.disinvite_all();
        state.inside.clear();
    }

    /// Lets a line in.
    pub(crate) fn admit(
        &self,
        to: u64,
        who: &PlaneIdentity,
        fence_key: u64,
        socket: TcpStream,
    ) -> Result<u64, &'static str> {
        let mut state = self.state();
        if to != state.incarnation {
            return Err("that incarnation is over");
        }
        if state.guests.is_fenced(who, fence_key) {
            return Err("this fence key was fenced");
        }
        let id = state.next_line;
        state.next_line += 1;
        let entered = BTreeSet::new();
        let line = MoriInboundLink { who: who.clone(), fence_key, socket, entered, last: None };
        state.links.insert(id, line);
        Ok(id)
    }

    /// The descriptors of a region for a session of who is on a line.
    pub(crate) fn enter(
        &self,
        line: u64,
        session: u32,
        name: &MoriMemoryKey,
    ) -> Result<MoriRegionGrant, &'static str> {
        let state = &mut *self.state();
        let Some(line) = state.links.get_mut(&line) else {
            return Err("this fence key was fenced");
        };
        if !state.guests.is_invited(&line.who, line.fence_key) {
            return Err("this fence key is not known");
        }
        let region = *state.names.get(name).ok_or("no such region")?;
        let memory = state.regions.get(&region).ok_or("no such region")?.clone();
        line.entered.insert(region);
        if line.last == Some(session) {
            self.pairs_died();
        }
        line.last = line.last.max(Some(session));
        state.inside.insert((line.who.clone(), line.fence_key));
        Ok(MoriRegionGrant { region, engine: state.engine.clone(), memory })
    }

    /// A line has ended.
    pub(crate) fn leave(&self, line: u64) {
        let mut state = self.state();
        let Some(gone) = state.links.remove(&line) else { return };
        if gone.last.is_some() {
            self.pairs_died();
        }
        let same =
            |line: &MoriInboundLink| line.who == gone.who && line.fence_key == gone.fence_key;
        if self.backend == MoriBackend::Xgmi && !state.links.values().any(same) {
            state.inside.remove(&(gone.who, gone.fence_key));
            self.board.tell(MoriWorkerEvent::PeerLeft);
        }
        self.left.notify_all();
    }
}

impl MoriAccessState {
    fn ask_to_leave(&self, region: Option<RegionId>, whose: impl Fn(&MoriInboundLink) -> bool) {
        for line in self.links.values().filter(|line| whose(line)) {
            // A line that is broken has left, or will have.
            let _asked = ask_to_leave(&line.socket, region);
        }
    }

    fn hang_up(&mut self, whose: impl Fn(&MoriInboundLink) -> bool) {
        self.links.retain(|_, line| {
            let over = whose(line);
            if over {
                let _gone = line.socket.shutdown(Shutdown::Both);
            }
            !over
        });
    }
}
