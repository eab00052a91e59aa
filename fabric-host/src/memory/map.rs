//! Memory files mapped into this process.

use crate::ring::AtomicU64;
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::os::fd::AsFd;
use std::sync::Arc;

/// Bytes whose pages are entered by one call.
const ENTERED_AT_A_TIME: usize = 64 << 20;

/// A mapping of a whole memory file.
#[derive(Debug)]
pub(crate) struct MemfdMapping {
    start: *mut u8,
    len: usize,
    /// None of its pages is missing in the file.
    whole: bool,
}

// SAFETY: The mapping stays where it is until this is dropped, on whichever thread.
unsafe impl Send for MemfdMapping {}
// SAFETY: Access is through raw pointers or atomics only.
unsafe impl Sync for MemfdMapping {}

impl MemfdMapping {
    /// Maps the first `len` bytes of a memory file that cannot shrink any more, so that no access
    /// can fault.
    ///
    /// # Errors
    /// What is wrong with the file, and the remedy.
    pub(crate) fn new(file: impl AsFd, len: u64, writable: bool) -> Result<MemfdMapping, String> {
        let file = file.as_fd();
        let seals = fcntl_get_seals(file).map_err(|why| format!("no memory file: {why}"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err("memory file that may shrink: seal it with F_SEAL_SHRINK".into());
        }
        let stat = fstat(file).map_err(|why| format!("memory file: {why}"))?;
        let (size, there) = (stat.st_size as u64, 512 * stat.st_blocks as u64);
        let bytes = usize::try_from(len).map_err(|_| "longer than an address space")?;
        if size < len || bytes == 0 {
            return Err(format!("memory file of {size} bytes where {len} were announced"));
        }
        let access = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: A new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, file, 0) }
            .map_err(|why| format!("mapping {len} bytes: {why}"))?;
        Ok(MemfdMapping { start: start.cast(), len: bytes, whole: there >= len })
    }

    /// Has the kernel enter the pages into our page table, if all are there, on a thread of its
    /// own: it takes a while, and is no more than help for the first copies.
    pub(crate) fn enter_pages(self: &Arc<Self>) {
        if !self.whole {
            return;
        }
        let map = self.clone();
        let enter = move || {
            for at in (0..map.len).step_by(ENTERED_AT_A_TIME) {
                let left = (map.len - at).min(ENTERED_AT_A_TIME);
                // SAFETY: Inside the mapping, none of whose bytes it changes.
                let entered =
                    unsafe { madvise(map.start.add(at).cast(), left, Advice::LinuxPopulateRead) };
                // An older kernel, or no memory: pages are entered when they are used.
                if entered.is_err() || Arc::strong_count(&map) == 1 {
                    return;
                }
            }
        };
        let _without = std::thread::Builder::new().name("kvferry-pages".into()).spawn(enter);
    }

    /// True if none of its pages was missing in the file when it was mapped.
    pub(crate) fn is_whole(&self) -> bool {
        self.whole
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

impl Drop for MemfdMapping {
    fn drop(&mut self) {
        // SAFETY: The range is this mapping, and no reference to it is left. It cannot fail.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::super::pool::sealed;
    use super::*;
    use std::time::{Duration, Instant};

    const LEN: u64 = 1 << 20;

    /// KiB of the mapping that are in the page table.
    fn entered(map: &MemfdMapping) -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").expect("this process");
        let head = format!("{:x}-", map.start() as u64);
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&head));
        let rss = lines.find_map(|line| line.strip_prefix("Rss:")).expect("the mapping");
        rss.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    #[test]
    fn pages_that_are_there_are_entered_and_holes_are_left() {
        let file = sealed("test", LEN).expect("a memory file");
        let holes = MemfdMapping::new(&file, LEN, true).expect("a mapping");
        assert!(!holes.whole);
        for at in (0..holes.len()).step_by(4_096) {
            // SAFETY: Inside the mapping.
            unsafe { holes.start().add(at).write_volatile(1) };
        }
        let map = Arc::new(MemfdMapping::new(&file, LEN, true).expect("a mapping"));
        assert_eq!(entered(&map), 0);
        map.enter_pages();
        let end = Instant::now() + Duration::from_secs(300);
        while entered(&map) < LEN / 1_024 {
            assert!(Instant::now() < end, "{} KiB were entered", entered(&map));
            std::thread::yield_now();
        }
    }
}
