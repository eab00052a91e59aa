//! The thread on which MoRI connects sessions, which takes seconds where a peer does not answer.
//! Posts go on beside it; what changes MoRI's engine waits until one connection is made.

use crate::desk::{Held, Order, Remote};
use crate::mori::{Engine, Fault, Session};
use engine::fabric::{Cause, RegionId, SessionId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A connection that failed after this long was not answered; others to the same peer would not be
/// either.
const UNANSWERED: Duration = Duration::from_millis(500);

/// MoRI's descriptor of a peer's engine.
type Peer = Arc<[u8]>;

/// MoRI's engine with all that is not to be called at the same time.
///
/// Sessions go before regions, and both before the engine, which the order of the fields says.
#[derive(Debug, Default)]
pub(crate) struct Mori {
    /// What was connected, or why not, since the owner looked last.
    opened: Vec<(SessionId, Result<Session, Cause>)>,
    pub(crate) regions: BTreeMap<RegionId, Held>,
    peers: BTreeSet<Peer>,
    pub(crate) engine: Option<Engine>,
}

/// What is to be connected.
#[derive(Debug, Default)]
struct Queue {
    asks: VecDeque<(SessionId, Remote)>,
    /// Peers that did not answer the last time; all others come first.
    silent: BTreeSet<Peer>,
    /// The owner wants MoRI to itself.
    is_held: bool,
    is_over: bool,
}

impl Queue {
    fn next(&mut self) -> Option<(SessionId, Remote)> {
        let answers =
            |(_, remote): &(SessionId, Remote)| !self.silent.contains(&remote.grant.engine);
        let at = self.asks.iter().position(answers).unwrap_or(0);
        self.asks.remove(at)
    }

    /// Takes out what is to be connected with a peer.
    fn all_of(&mut self, peer: &Peer) -> Vec<SessionId> {
        let its = |(_, remote): &(SessionId, Remote)| remote.grant.engine == *peer;
        let ids = self.asks.iter().filter(|ask| its(ask)).map(|(id, _)| *id).collect();
        self.asks.retain(|ask| !its(ask));
        ids
    }
}

/// Shared by the thread and its owner.
#[derive(Debug, Default)]
pub(crate) struct Opener {
    mori: Mutex<Mori>,
    queue: Mutex<Queue>,
    more: Condvar,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mori {
    pub(crate) fn engine(&self) -> Result<&Engine, Fault> {
        self.engine.as_ref().ok_or_else(|| Fault::of("engine", "there is none"))
    }

    fn connect(&mut self, to: &Remote) -> Result<Session, Fault> {
        if !self.peers.contains(&to.grant.engine) {
            self.engine()?.add_peer(&to.grant.engine)?;
            self.peers.insert(to.grant.engine.clone());
        }
        let held = self.regions.get(&to.region);
        let held = held.ok_or_else(|| Fault::of("session", "its region is not registered"))?;
        self.engine()?.session(&held.region, &to.grant.memory)
    }

    /// What was connected, or why not, since the last time.
    pub(crate) fn opened(&mut self) -> Vec<(SessionId, Result<Session, Cause>)> {
        std::mem::take(&mut self.opened)
    }

    /// Ends the engine. The memory that it knew, for the next one.
    pub(crate) fn end(&mut self) -> Vec<(RegionId, engine::fabric::Memory)> {
        self.opened.clear();
        let regions = std::mem::take(&mut self.regions);
        self.peers.clear();
        let memories = regions.into_iter().map(|(id, held)| (id, held.memory)).collect();
        self.engine = None;
        memories
    }
}

impl Opener {
    /// Has a session connected; [`Order::Opened`] follows.
    pub(crate) fn ask(&self, session: SessionId, remote: Remote) {
        let mut queue = lock(&self.queue);
        queue.asks.retain(|(id, _)| *id != session);
        queue.asks.push_back((session, remote));
        self.more.notify_one();
    }

    /// Has MoRI to itself, which waits for a connection that is being made.
    pub(crate) fn alone<R>(&self, work: impl FnOnce(&mut Mori) -> R) -> R {
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

    /// The thread. Ends with [`Opener::stop`].
    pub(crate) fn run(&self, orders: &Sender<Order>) {
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
                let _told = orders.send(Order::Opened);
            }
        }
    }

    fn connect_next(&self) -> bool {
        let mut mori = lock(&self.mori);
        let Some((session, remote)) = lock(&self.queue).next() else { return false };
        let start = Instant::now();
        let result = mori.connect(&remote).map_err(|fault| match fault.is_system() {
            true => Cause::Unreachable,
            false => Cause::Backend(fault.to_string().into()),
        });
        let mut queue = lock(&self.queue);
        let peer = &remote.grant.engine;
        match &result {
            Err(cause) if *cause == Cause::Unreachable || start.elapsed() > UNANSWERED => {
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
