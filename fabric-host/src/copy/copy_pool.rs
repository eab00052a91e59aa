//! Long copies between two processes: the kernel moves about 5 GB/s per thread, memory takes more.
//! Whoever has such a copy to do lets others take pieces of it, does what nobody takes, and
//! returns when no piece is in work any more.

use crate::sys::{self, RANGES_MAX, range};
use kvferry_fabric_common::lock;
use libc::iovec;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Copies of fewer bytes are not worth the calls for their pieces.
const SHARED_MIN: u64 = 2 << 20;

/// Fewer bytes at a stretch wake nobody: that takes about 20 us of the one who wakes, and it can be
/// a millisecond until a core that slept does anything. Helpers that are awake help with less.
const WAKE_MIN: u64 = 16 << 20;

/// Two threads that copy shorter ranges hinder each other in the kernel more than they help: with
/// ranges of 4 KiB they were slower than one, with ranges of 16 KiB half as fast again.
const RANGE_MIN: u64 = 16 << 10;

/// Bytes of a piece, and so about 50 us to wait for the last one.
const PIECE_MAX: u64 = 256 << 10;

/// How long a helper looks for the next chunk of the same operation before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// Which way bytes go, seen from this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyDirection {
    /// From the other process.
    In,
    /// Into the other process.
    Out,
}

/// A copy in pieces.
#[derive(Debug)]
struct CopyJob {
    pid: u32,
    way: CopyDirection,
    local: Vec<iovec>,
    remote: Vec<iovec>,
    /// Where each piece begins and ends among the ranges.
    pieces: Vec<(usize, usize)>,
    progress: Mutex<CopyProgress>,
}

// SAFETY: Its addresses are given to the kernel alone, by `advance`, which only works on pieces
// that `CopyPool::copy` waits for; there the caller promises that the memory is there.
unsafe impl Send for CopyJob {}
// SAFETY: As above. No two threads get the same piece.
unsafe impl Sync for CopyJob {}

#[derive(Debug, Default)]
struct CopyProgress {
    /// Pieces that were taken.
    taken: usize,
    /// Those of them that are in work.
    working: usize,
    failed: bool,
}

/// The threads that help, and what there is to help with.
#[derive(Debug, Default)]
pub(crate) struct CopyPool {
    /// Threads beside the one that a copy belongs to.
    size: usize,
    queue: Mutex<CopyQueue>,
    bell: Condvar,
}

#[derive(Debug, Default)]
struct CopyQueue {
    jobs: VecDeque<Arc<CopyJob>>,
    asleep: usize,
    is_over: bool,
}

/// Copies ranges of so many bytes by one call; false if not all of them were.
///
/// # Safety
/// Inwards the local ranges are as [`sys::read_process`] asks for, outwards it is not this process.
unsafe fn call(
    pid: u32,
    way: CopyDirection,
    bytes: u64,
    local: &[iovec],
    remote: &[iovec],
) -> bool {
    let moved = match way {
        // SAFETY: The caller promises it.
        CopyDirection::In => unsafe { sys::read_process(pid, local, remote) },
        // SAFETY: The caller promises it.
        CopyDirection::Out => unsafe { sys::write_process(pid, local, remote) },
    };
    moved == Ok(bytes)
}

fn bytes(ranges: &[iovec]) -> u64 {
    ranges.iter().map(|range| range.iov_len as u64).sum()
}

impl CopyJob {
    /// Cuts the ranges into pieces.
    fn new(pid: u32, way: CopyDirection, local: &[iovec], remote: &[iovec]) -> CopyJob {
        let (mut locals, mut remotes) = (Vec::new(), Vec::new());
        let mut pieces = Vec::new();
        let (mut start, mut room) = (0, PIECE_MAX);
        for (here, there) in local.iter().zip(remote) {
            let (mut from, mut to) = (here.iov_base as u64, there.iov_base as u64);
            let mut left = here.iov_len as u64;
            while left > 0 {
                let len = left.min(room);
                locals.push(range(from, len));
                remotes.push(range(to, len));
                (from, to, left, room) = (from + len, to + len, left - len, room - len);
                if room == 0 || locals.len() - start == RANGES_MAX {
                    pieces.push((start, locals.len()));
                    (start, room) = (locals.len(), PIECE_MAX);
                }
            }
        }
        if start < locals.len() {
            pieces.push((start, locals.len()));
        }
        CopyJob { pid, way, local: locals, remote: remotes, pieces, progress: Mutex::default() }
    }

    /// Copies one piece; false if none is left.
    fn advance(&self) -> bool {
        let (from, to) = {
            let mut progress = lock(&self.progress);
            let Some(piece) = self.pieces.get(progress.taken).filter(|_| !progress.failed) else {
                return false;
            };
            progress.taken += 1;
            progress.working += 1;
            *piece
        };
        let (local, remote) = (&self.local[from..to], &self.remote[from..to]);
        // SAFETY: A job is made by `CopyPool::copy` alone, whose caller promises it until that
        // returns: not before the last piece that was taken is counted as done below.
        let done = unsafe { call(self.pid, self.way, bytes(local), local, remote) };
        let mut progress = lock(&self.progress);
        progress.working -= 1;
        progress.failed |= !done;
        true
    }

    /// The outcome, when no piece is in work.
    fn outcome(&self) -> Option<bool> {
        let progress = lock(&self.progress);
        (progress.working == 0).then_some(!progress.failed)
    }
}

impl CopyPool {
    /// A pool whose other `size` threads are going to [`work`](CopyPool::work).
    pub(crate) fn new(size: usize) -> CopyPool {
        CopyPool { size, ..CopyPool::default() }
    }

    /// Copies ranges to or from another process, in a run of so many bytes; false if not all of
    /// those of the ranges were copied.
    ///
    /// # Safety
    /// Inwards the local ranges are as [`sys::read_process`] asks for, outwards it is not this
    /// process.
    pub(super) unsafe fn copy(
        &self,
        (pid, way, run): (u32, CopyDirection, u64),
        local: &[iovec],
        remote: &[iovec],
    ) -> bool {
        let bytes = bytes(local);
        let short = bytes < SHARED_MIN || bytes / (local.len() as u64) < RANGE_MIN;
        if self.size == 0 || short || !self.has_help(run) {
            // SAFETY: The caller promises the same.
            return unsafe { call(pid, way, bytes, local, remote) };
        }
        let job = Arc::new(CopyJob::new(pid, way, local, remote));
        let asleep = {
            let mut queue = lock(&self.queue);
            queue.jobs.push_back(job.clone());
            queue.asleep
        };
        if asleep > 0 && run >= WAKE_MIN {
            self.bell.notify_all();
        }
        while job.advance() {}
        self.forget(&job);
        loop {
            if let Some(done) = job.outcome() {
                return done;
            }
            // Somebody has the last piece in work, perhaps on this very core.
            std::thread::yield_now();
        }
    }

    /// True if somebody is awake, or the run long enough to wake somebody.
    fn has_help(&self, run: u64) -> bool {
        run >= WAKE_MIN || lock(&self.queue).asleep < self.size
    }

    fn forget(&self, job: &Arc<CopyJob>) {
        lock(&self.queue).jobs.retain(|other| !Arc::ptr_eq(other, job));
    }

    /// Helps until the end.
    pub(crate) fn work(&self) {
        while let Some(job) = self.next() {
            while job.advance() {}
            self.forget(&job);
        }
    }

    fn next(&self) -> Option<Arc<CopyJob>> {
        let start = Instant::now();
        while start.elapsed() < SPIN && lock(&self.queue).jobs.is_empty() {
            std::thread::yield_now();
        }
        let mut queue = lock(&self.queue);
        loop {
            if queue.is_over {
                return None;
            }
            if let Some(job) = queue.jobs.front() {
                return Some(job.clone());
            }
            queue.asleep += 1;
            queue = self.bell.wait(queue).unwrap_or_else(PoisonError::into_inner);
            queue.asleep -= 1;
        }
    }

    pub(crate) fn end(&self) {
        lock(&self.queue).is_over = true;
        self.bell.notify_all();
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Copies within this process, by its own id, and says what came.
    fn run(pool: &CopyPool, lens: &[usize], gap: usize) -> bool {
        let total: usize = lens.iter().map(|len| len + gap).sum();
        let source: Vec<u8> = (0..total).map(|at| (at * 7 + at / 251) as u8).collect();
        let mut target = vec![0_u8; total];
        let (mut local, mut remote, mut expected) = (Vec::new(), Vec::new(), vec![0_u8; total]);
        let mut at = 0;
        for len in lens {
            local.push(range(target.as_mut_ptr() as u64 + at as u64, *len as u64));
            remote.push(range(source.as_ptr() as u64 + at as u64, *len as u64));
            expected[at..at + len].copy_from_slice(&source[at..at + len]);
            at += len + gap;
        }
        let whole = (std::process::id(), CopyDirection::In, WAKE_MIN);
        // SAFETY: The ranges are in a vector of this function.
        unsafe { pool.copy(whole, &local, &remote) && target == expected }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn every_byte_is_copied_once_and_nothing_beside(
            lens in prop::collection::vec(1_usize..600_000, 1..12),
            gap in 0_usize..100,
            size in 0_usize..3,
        ) {
            let pool = CopyPool::new(size);
            std::thread::scope(|scope| {
                for _ in 0..size {
                    scope.spawn(|| pool.work());
                }
                let copied = run(&pool, &lens, gap);
                pool.end();
                prop_assert!(copied);
                Ok(())
            })?;
        }
    }

    #[test]
    fn who_gets_no_help_does_it_alone() {
        assert!(run(&CopyPool::new(1), &[3 << 20, 5], 1));
    }

    #[test]
    fn what_cannot_be_read_fails_the_whole_copy() {
        let pool = CopyPool::new(1);
        let mut target = vec![0_u8; 4 << 20];
        let local = [range(target.as_mut_ptr() as u64, target.len() as u64)];
        let remote = [range(4_096, target.len() as u64)];
        std::thread::scope(|scope| {
            scope.spawn(|| pool.work());
            let whole = (std::process::id(), CopyDirection::In, WAKE_MIN);
            // SAFETY: The range is a vector of this function.
            assert!(!unsafe { pool.copy(whole, &local, &remote) });
            pool.end();
        });
    }
}
