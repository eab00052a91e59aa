//! The thread on which MoRI connects sessions, which takes seconds where a peer does not answer.
//! Posts go on beside it; what changes MoRI's engine waits until one connection is made.

use crate::engine_thread::{MoriEngineCommand, MoriRegisteredMemory, MoriSessionTarget};
use crate::mori::{MoriCallError, MoriEngineHandle, MoriSessionHandle};
use kvferry_engine::fabric::{FabricError, Memory, RegionId, SessionId};
use kvferry_fabric_common::lock;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A connection that failed after this long was not answered; others to the same peer would not be
/// either.
const UNANSWERED: Duration = Duration::from_millis(500);

/// MoRI's descriptor of a peer's engine.
type PackedEngineDesc = Arc<[u8]>;

/// MoRI's engine with all that is not to be called at the same time.
///
/// Sessions go before regions, and both before the engine, which the order of the fields says.
#[derive(Debug, Default)]
pub(crate) struct MoriEngineState {
    /// What was connected, or why not, since the owner looked last.
    opened: Vec<(SessionId, Result<MoriSessionHandle, FabricError>)>,
    pub(crate) regions: BTreeMap<RegionId, MoriRegisteredMemory>,
    peers: BTreeSet<PackedEngineDesc>,
    pub(crate) engine: Option<MoriEngineHandle>,
}

/// What is to be connected.
#[derive(Debug, Default)]
struct MoriConnectQueue {
    asks: VecDeque<(SessionId, MoriSessionTarget)>,
    /// Peers that did not answer the last time; all others come first.
    silent: BTreeSet<PackedEngineDesc>,
    /// The owner wants MoRI to itself.
    is_held: bool,
    is_over: bool,
}

impl MoriConnectQueue {
    fn next(&mut self) -> Option<(SessionId, MoriSessionTarget)> {
        let answers = |(_, remote): &(SessionId, MoriSessionTarget)| {
            !self.silent.contains(&remote.grant.engine)
        };
        let at = self.asks.iter().position(answers).unwrap_or(0);
        self.asks.remove(at)
    }

    /// Takes out what is to be connected with a peer.
    fn all_of(&mut self, peer: &PackedEngineDesc) -> Vec<SessionId> {
        let its = |(_, remote): &(SessionId, MoriSessionTarget)| remote.grant.engine == *peer;
        let ids = self.asks.iter().filter(|ask| its(ask)).map(|(id, _)| *id).collect();
        self.asks.retain(|ask| !its(ask));
        ids
    }
}

/// Shared by the thread and its owner.
#[derive(Debug, Default)]
pub(crate) struct MoriSessionOpener {
    mori: Mutex<MoriEngineState>,
    queue: Mutex<MoriConnectQueue>,
    more: Condvar,
}

impl MoriEngineState {
    pub(crate) fn engine(&self) -> Result<&MoriEngineHandle, MoriCallError> {
        self.engine.as_ref().ok_or_else(|| MoriCallError::of("engine", "there is none"))
    }

    fn connect(&mut self, to: &MoriSessionTarget) -> Result<MoriSessionHandle, MoriCallError> {
        if !self.peers.contains(&to.grant.engine) {
            self.engine()?.add_peer(&to.grant.engine)?;
            self.peers.insert(to.grant.engine.clone());
        }
        let held = self.regions.get(&to.region);
        let held =
            held.ok_or_else(|| MoriCallError::of("session", "its region is not registered"))?;
        self.engine()?.session(&held.region, &to.grant.memory)
    }

    /// What was connected, or why not, since the last time.
    pub(crate) fn opened(&mut self) -> Vec<(SessionId, Result<MoriSessionHandle, FabricError>)> {
        std::mem::take(&mut self.opened)
    }

    /// Ends the engine. The memory that it knew, for the next one.
    pub(crate) fn end(&mut self) -> Vec<(RegionId, Memory)> {
        self.opened.clear();
        let regions = std::mem::take(&mut self.regions);
        self.peers.clear();
        let memories = regions.into_iter().map(|(id, held)| (id, held.memory)).collect();
        self.engine = None;
        memories
    }
}

impl MoriSessionOpener {
    /// Has a session connected; [`MoriEngineCommand::Opened`] follows.
    pub(crate) fn ask(&self, session: SessionId, remote: MoriSessionTarget) {
        let mut queue = lock(&self.queue);
        queue.asks.retain(|(id, _)| *id != session);
        queue.asks.push_back((session, remote));
        self.more.notify_one();
    }

    /// Has MoRI to itself, which waits for a connection that is being made.
    pub(crate) fn with_exclusive<R>(&self, work: impl FnOnce(&mut MoriEngineState) -> R) -> R {
        lock(&self.queue).is_held = true;
        let result = work(&mut lock(&self.mori));
        lock(&self.queue).is_held = false;
        self.more.notify_one();
        result
    }

    /// Connects none of those that wait.
    pub(crate) fn clear(&self) {
        lock(&self.queue).asks.clear();
    }

    pub(crate) fn stop(&self) {
        lock(&self.queue).is_over = true;
        self.more.notify_one();
    }

    /// The thread. Ends with [`MoriSessionOpener::stop`].
    pub(crate) fn run(&self, orders: &Sender<MoriEngineCommand>) {
        loop {
            let mut queue = lock(&self.queue);
            while !queue.is_over && (queue.is_held || queue.asks.is_empty()) {
                queue = self.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
            if queue.is_over {
                return;
            }
            drop(queue);
            if self.connect_next() {
                // The owner ends after this thread only.
                let _told = orders.send(MoriEngineCommand::Opened);
            }
        }
    }

    fn connect_next(&self) -> bool {
        let mut mori = lock(&self.mori);
        let Some((session, remote)) = lock(&self.queue).next() else { return false };
        let start = Instant::now();
        let result = mori.connect(&remote).map_err(|fault| match fault.is_system() {
            true => FabricError::Unreachable,
            false => FabricError::Backend(fault.to_string().into()),
        });
        let mut queue = lock(&self.queue);
        let peer = &remote.grant.engine;
        match &result {
            Err(cause) if *cause == FabricError::Unreachable || start.elapsed() > UNANSWERED => {
                queue.silent.insert(peer.clone());
                let others = queue.all_of(peer).into_iter().map(|id| (id, Err(cause.clone())));
                mori.opened.extend(others);
            }
            _ => drop(queue.silent.remove(peer)),
        }
        mori.opened.push((session, result));
        true
    }
}
