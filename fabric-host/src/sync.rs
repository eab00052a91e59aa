//! Atomics of the standard library, or of loom where the rings are checked by it; and locks.

#[cfg(feature = "loom")]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, also what a thread left that panicked: nothing is half done while a lock is held.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
