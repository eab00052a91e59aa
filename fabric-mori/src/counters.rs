//! What planes count.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a plane did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoriCounters {
    /// Operations that succeeded.
    pub operations: u64,
    /// Bytes that they moved.
    pub bytes: u64,
    /// Operations that were reported as failed.
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

/// [`MoriCounters`] that others read meanwhile.
#[derive(Debug, Default)]
pub(crate) struct MoriAtomicCounters {
    pub(crate) operations: MoriAtomicCounter,
    pub(crate) bytes: MoriAtomicCounter,
    pub(crate) failed: MoriAtomicCounter,
    pub(crate) rebuilds: MoriAtomicCounter,
    pub(crate) retried: MoriAtomicCounter,
    pub(crate) resets: MoriAtomicCounter,
    pub(crate) without: MoriAtomicCounter,
}

#[derive(Debug, Default)]
pub(crate) struct MoriAtomicCounter(AtomicU64);

impl MoriAtomicCounter {
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

impl MoriAtomicCounters {
    pub(crate) fn get(&self, dead_pairs: u64) -> MoriCounters {
        MoriCounters {
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
