//! Descriptors that are rung, and what of a copying thread others know: how to wake it.

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// A descriptor to be rung.
pub(crate) fn doorbell() -> Result<OwnedFd, Errno> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// Rings the doorbell of a thread of this or of another process.
pub(crate) fn ring(bell: BorrowedFd<'_>) {
    // It cannot overflow: each ring is heard before the next. If the peer broke it, it is its loss.
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

/// A thread, for others.
#[derive(Debug)]
pub(crate) struct WorkerHandle {
    bell: OwnedFd,
    pub(crate) asleep: AtomicBool,
}

impl WorkerHandle {
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn new() -> Result<WorkerHandle, Errno> {
        Ok(WorkerHandle { bell: doorbell()?, asleep: AtomicBool::new(false) })
    }

    /// The doorbell, for peers.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Wakes the thread if it sleeps.
    pub(crate) fn wake(&self) {
        if self.asleep.swap(false, Ordering::AcqRel) {
            ring(self.bell());
        }
    }
}
