//! Memory files mapped into this process.

use crate::sync::AtomicU64;
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::os::fd::AsFd;

/// A mapping of a whole memory file.
#[derive(Debug)]
pub(crate) struct Map {
    start: *mut u8,
    len: usize,
}

// SAFETY: The mapping stays where it is for the life of `Map`, whoever holds it.
unsafe impl Send for Map {}
// SAFETY: Access is through raw pointers or atomics only.
unsafe impl Sync for Map {}

impl Map {
    /// Maps the first `len` bytes of a memory file that cannot shrink any more, so that no access
    /// can fault.
    ///
    /// # Errors
    /// What is wrong with the file, and the remedy.
    pub(crate) fn new(file: impl AsFd, len: u64, writable: bool) -> Result<Map, String> {
        let file = file.as_fd();
        let seals = fcntl_get_seals(file).map_err(|why| format!("no memory file: {why}"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err("memory file that may shrink: seal it with F_SEAL_SHRINK".into());
        }
        let size = fstat(file).map_err(|why| format!("memory file: {why}"))?.st_size as u64;
        let bytes = usize::try_from(len).map_err(|_| "longer than an address space")?;
        if size < len || bytes == 0 {
            return Err(format!("memory file of {size} bytes where {len} were announced"));
        }
        let access = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: A new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, file, 0) }
            .map_err(|why| format!("mapping {len} bytes: {why}"))?;
        Ok(Map { start: start.cast(), len: bytes })
    }

    /// The first byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The mapping as words.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: Mappings are page-aligned and live as long as `self`; any bytes are a word.
        unsafe { std::slice::from_raw_parts(self.start.cast::<AtomicU64>(), self.len / 8) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: The range is this mapping, and no reference to it is left. It cannot fail.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}
