//! What the data planes that move real bytes have in common: what their owner has named and what is
//! in flight, who may come in, news of their threads, and the thread that accepts connections.
#![warn(missing_docs)]

mod accept;
mod access;
mod ledger;
mod listener;
mod news;
mod places;

pub use accept::{ACCEPT_PAUSE, AcceptFailures};
pub use access::{GuestList, PlaneIdentity, draw_incarnation};
pub use ledger::{
    LedgerOperation, LedgerRegion, LedgerSession, PlaneLedger, PlaneParts, SessionPhase, invalid,
    next_poll,
};
pub use listener::{ConnectionHandler, ConnectionListener, set_keepalive};
pub use news::NewsQueue;
pub use places::ConnectionPlace;

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

/// Locks, also what a thread left that panicked: nothing is half done while a lock is held.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread with a name.
///
/// # Errors
/// The system has none to give.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    Builder::new()
        .name(name.into())
        .spawn(work)
        .map_err(|why| io::Error::new(why.kind(), format!("thread: {why}")))
}
