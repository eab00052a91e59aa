//! Copies within a host: plain ones, and those that the kernel does between two processes.

mod copy_pool;
mod slices;

pub(crate) use copy_pool::CopyPool;
pub(crate) use slices::{CHUNK_MAX, CopySlice, SliceCursor, all_inside, cut};

use crate::memory::{HostMemoryAccess, PidfdProcess};
use crate::sys::range;
use copy_pool::CopyDirection;
use std::sync::Arc;

/// Which side did not let itself be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyFault {
    Source,
    Destination,
}

/// Buffers that are used again and again.
#[derive(Debug)]
pub(crate) struct CopyBuffers {
    copy_pool: Arc<CopyPool>,
    local: Vec<libc::iovec>,
    remote: Vec<libc::iovec>,
    bounce: Vec<u8>,
    /// Bytes that the kernel copied for this thread since it last had nothing to do.
    spell: u64,
    /// The process that had not ended after the last copy, since then: id and start.
    alive: Option<(u32, u64)>,
}

// SAFETY: No address in the buffers is used after the call that put it there.
unsafe impl Send for CopyBuffers {}

/// Copies one chunk of an operation of so many `bytes`.
///
/// # Safety
/// The ranges of the chunk are inside `from` and `to`. Of the two, what is memory of this process
/// is mapped until this returns, `to` may be written, and nobody has a reference to it.
pub(crate) unsafe fn copy(
    (chunk, bytes): (&[CopySlice], u64),
    from: &HostMemoryAccess,
    to: &HostMemoryAccess,
    scratch: &mut CopyBuffers,
) -> Result<(), CopyFault> {
    match (from, to) {
        (HostMemoryAccess::Here { base: from, .. }, HostMemoryAccess::Here { base: to, .. }) => {
            for slice in chunk {
                let (from, to) = ((from + slice.from) as *const u8, (to + slice.to) as *mut u8);
                // SAFETY: The caller promises that both ranges are mapped, and the second may be
                // written. `copy` and not `copy_nonoverlapping`: a session may lead from a region
                // to itself.
                unsafe { std::ptr::copy(from, to, slice.len as usize) };
            }
            Ok(())
        }
        (HostMemoryAccess::There { process, base }, HostMemoryAccess::Here { base: here, .. }) => {
            scratch.fill(chunk, |slice| here + slice.to, |slice| base + slice.from);
            // SAFETY: The local ranges are those of the chunk in `to`.
            unsafe { scratch.call(process, CopyDirection::In, bytes) }
        }
        (HostMemoryAccess::Here { base: here, .. }, HostMemoryAccess::There { process, base }) => {
            scratch.fill(chunk, |slice| here + slice.from, |slice| base + slice.to);
            // SAFETY: The local ranges are those of the chunk in `from`, and are read.
            unsafe { scratch.call(process, CopyDirection::Out, bytes) }
        }
        (HostMemoryAccess::There { .. }, HostMemoryAccess::There { .. }) => {
            let mut bounce = std::mem::take(&mut scratch.bounce);
            let packed_bytes = chunk.iter().map(|slice| slice.len).sum::<u64>() as usize;
            bounce.resize(packed_bytes.max(bounce.len()), 0);
            let middle = HostMemoryAccess::Here { base: bounce.as_mut_ptr() as u64, map: None };
            let mut at = 0;
            let mut packed = |slice: &CopySlice| {
                at += slice.len;
                at - slice.len
            };
            let offsets: Vec<u64> = chunk.iter().map(&mut packed).collect();
            let with = |f: fn(&CopySlice, u64) -> CopySlice| -> Vec<CopySlice> {
                chunk.iter().zip(&offsets).map(|(slice, at)| f(slice, *at)).collect()
            };
            let into = with(|slice, at| CopySlice { to: at, ..*slice });
            let out = with(|slice, at| CopySlice { from: at, ..*slice });
            // SAFETY: The offsets of the middle add up to the length that the buffer has, and
            // nobody else has it.
            let done = unsafe {
                copy((&into, bytes), from, &middle, scratch)
                    .and_then(|()| copy((&out, bytes), &middle, to, scratch))
            };
            scratch.bounce = bounce;
            done
        }
    }
}

impl CopyBuffers {
    /// Empty, for a thread whose long copies the pool shares.
    pub(crate) fn new(pool: Arc<CopyPool>) -> CopyBuffers {
        CopyBuffers {
            copy_pool: pool,
            local: Vec::new(),
            remote: Vec::new(),
            bounce: Vec::new(),
            spell: 0,
            alive: None,
        }
    }

    /// The thread has nothing to do.
    pub(crate) fn rest(&mut self) {
        (self.spell, self.alive) = (0, None);
    }

    fn fill(
        &mut self,
        chunk: &[CopySlice],
        local: impl Fn(&CopySlice) -> u64,
        remote: impl Fn(&CopySlice) -> u64,
    ) {
        self.local.clear();
        self.local.extend(chunk.iter().map(|slice| range(local(slice), slice.len)));
        self.remote.clear();
        self.remote.extend(chunk.iter().map(|slice| range(remote(slice), slice.len)));
    }

    /// # Safety
    /// Inwards the local ranges are as [`CopyPool::copy`] asks for.
    unsafe fn call(
        &mut self,
        process: &PidfdProcess,
        way: CopyDirection,
        bytes: u64,
    ) -> Result<(), CopyFault> {
        let run = bytes.max(self.spell);
        self.spell += self.local.iter().map(|range| range.iov_len as u64).sum::<u64>();
        // The kernel is told an id. It may be that of a process which came later: not if the one
        // that is meant has not ended, neither ahead of the copy, so that nothing of it is read or
        // written, nor after it.
        // For the next piece of a run of reads the end of the last one is ahead.
        let id = Some((process.pid, process.started));
        let is_known = way == CopyDirection::In && self.alive == id;
        let done = (is_known || process.is_alive())
            // SAFETY: The ranges are the caller's promise; a `PidfdProcess` that is written to is
            // not this process, see `HostRegion::new`.
            && unsafe { self.copy_pool.copy((process.pid, way, run), &self.local, &self.remote) }
            && process.is_alive();
        self.alive = id.filter(|_| done);
        match (done, way) {
            (true, _) => Ok(()),
            (false, CopyDirection::In) => Err(CopyFault::Source),
            (false, CopyDirection::Out) => Err(CopyFault::Destination),
        }
    }
}
