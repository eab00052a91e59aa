//! What planes count.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a plane did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Operations that succeeded.
    pub operations: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Backends that were made anew.
    pub rebuilds: u64,
    /// Operations that were posted anew after that, with other peers than the one it was for.
    pub retried: u64,
    /// Rebuilds that peers had to be told of.
    pub resets: u64,
    /// 1 while there is no backend because MoRI cannot be started, 0 otherwise.
    pub without: u64,
    /// How often queue pairs of peers have ended in this backend, which keeps them.
    pub dead_pairs: u64,
}

/// [`Counters`] that others read meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) operations: Count,
    pub(crate) bytes: Count,
    pub(crate) failed: Count,
    pub(crate) rebuilds: Count,
    pub(crate) retried: Count,
    pub(crate) resets: Count,
    pub(crate) without: Count,
}

#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, to: u64) {
        self.0.store(to, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counts {
    pub(crate) fn get(&self, dead_pairs: u64) -> Counters {
        Counters {
            operations: self.operations.get(),
            bytes: self.bytes.get(),
            failed: self.failed.get(),
            rebuilds: self.rebuilds.get(),
            retried: self.retried.get(),
            resets: self.resets.get(),
            without: self.without.get(),
            dead_pairs,
        }
    }
}
