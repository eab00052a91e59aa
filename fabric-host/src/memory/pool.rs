//! Memory that planes can share best: sealed memory files.

use super::MemfdMapping;
use kvferry_engine::fabric::Memory;
use kvferry_fabric_common::lock;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat,
    ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

/// Whether a pool is to have huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HugePages {
    /// Pages of the usual size.
    #[default]
    No,
    /// Reserved ones if there are, else what the kernel makes of the advice.
    Try,
    /// Reserved ones; without them there is no pool.
    Reserved,
}

/// Bytes of a reserved huge page.
const HUGE: u64 = 2 << 20;

/// A sealed memory file, mapped: memory of a process that allocates its own KV pool.
#[derive(Debug)]
pub struct MemfdPool {
    map: Arc<MemfdMapping>,
    file: OwnedFd,
    huge: u64,
}

/// A memory file of fixed size, for good.
pub(crate) fn sealed(name: &str, len: u64) -> Result<OwnedFd, String> {
    sealed_file(name, len, MemfdFlags::empty(), SealFlags::SEAL)
}

/// A memory file of fixed size.
pub(super) fn sealed_file(
    name: &str,
    len: u64,
    flags: MemfdFlags,
    seal: SealFlags,
) -> Result<OwnedFd, String> {
    let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create(name, flags).map_err(|why| format!("creating a memory file: {why}"))?;
    ftruncate(&file, len).map_err(|why| format!("memory file of {len} bytes: {why}"))?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | seal)
        .map_err(|why| format!("sealing a memory file: {why}"))?;
    Ok(file)
}

/// Has all bytes of a file be there. For huge pages on advice it comes after they were touched, as
/// it allocates ordinary ones.
fn allocate(file: &OwnedFd, len: u64) -> Result<(), String> {
    fallocate(file, FallocateFlags::empty(), 0, len)
        .map_err(|why| format!("memory file of {len} bytes: {why}; take a smaller pool"))
}

/// Device and number of a file.
type FileId = (u64, u64);

/// The pools of this process, which have the only mappings that write to their files once those are
/// registered.
static POOLS: Mutex<Vec<(FileId, Weak<MemfdMapping>)>> = Mutex::new(Vec::new());

fn file_id(file: &OwnedFd) -> Result<FileId, Errno> {
    let stat = fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// The mapping of the pool of this process that has a file, if one has it. From then on nobody maps
/// it for writing, writes it or punches holes into it any more, however it is opened.
pub(super) fn claim_pool(file: &OwnedFd) -> Result<Option<Arc<MemfdMapping>>, Errno> {
    let id = file_id(file)?;
    let found = lock(&POOLS).iter().find(|(known, _)| *known == id).map(|(_, map)| map.upgrade());
    let Some(map) = found.flatten() else { return Ok(None) };
    let seals = SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    if !fcntl_get_seals(file)?.contains(seals) {
        fcntl_add_seals(file, seals)?;
    }
    Ok(Some(map))
}

impl MemfdPool {
    /// Allocates `len` bytes, rounded up to whole pages, all zero and all there: every page is
    /// touched.
    ///
    /// # Errors
    /// Why there is no such pool, and what to do about it.
    pub fn new(len: u64, huge: HugePages) -> Result<MemfdPool, String> {
        let pool = MemfdPool::shared(len, huge)?;
        let id = file_id(&pool.file).map_err(|why| format!("memory file: {why}"))?;
        let mut pools = lock(&POOLS);
        pools.retain(|(_, map)| map.strong_count() > 0);
        pools.push((id, Arc::downgrade(&pool.map)));
        Ok(pool)
    }

    /// As [`MemfdPool::new`], for memory that other processes write as well: they can map its file
    /// for writing, also when it is registered.
    ///
    /// # Errors
    /// The same.
    pub fn shared(len: u64, huge: HugePages) -> Result<MemfdPool, String> {
        if len == 0 {
            return Err("a pool of 0 bytes: it has to have some".into());
        }
        let reserved = match huge {
            HugePages::No => None,
            HugePages::Try => MemfdPool::reserved(len).ok(),
            HugePages::Reserved => Some(MemfdPool::reserved(len).map_err(|why| {
                format!("{why}; reserve huge pages by /proc/sys/vm/nr_hugepages or take `try`")
            })?),
        };
        let (file, map) = match reserved {
            Some(pool) => pool,
            None => {
                let len = len.checked_next_multiple_of(4_096).ok_or("longer than can be")?;
                let none = MemfdFlags::empty();
                let file = sealed_file("kvferry-pool", len, none, SealFlags::empty())?;
                if huge == HugePages::No {
                    allocate(&file, len)?;
                }
                let map = MemfdMapping::new(&file, len, true)?;
                if huge == HugePages::Try {
                    // SAFETY: Advice on a mapping of ours changes none of its bytes. Whether it
                    // did anything is read below.
                    let _ =
                        unsafe { madvise(map.start().cast(), map.len(), Advice::LinuxHugepage) };
                }
                (file, map)
            }
        };
        for at in (0..map.len()).step_by(4_096) {
            // SAFETY: Inside the mapping, which nobody else knows yet.
            unsafe { map.start().add(at).write_volatile(0) };
        }
        if huge != HugePages::No {
            allocate(&file, map.len() as u64)?;
        }
        let huge = huge_bytes(map.start() as u64);
        Ok(MemfdPool { map: Arc::new(map), file, huge })
    }

    fn reserved(len: u64) -> Result<(OwnedFd, MemfdMapping), String> {
        let len = len.checked_next_multiple_of(HUGE).ok_or("longer than can be")?;
        let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let file = sealed_file("kvferry-pool", len, flags, SealFlags::empty())?;
        let map = MemfdMapping::new(&file, len, true)?;
        Ok((file, map))
    }

    /// What to register. The pool has to outlive the registration only in the sense that its bytes
    /// are there: planes keep the file open. From the registration on its file can be written by
    /// the mappings of this process alone.
    pub fn memory(&self) -> Memory {
        Memory::MemFd { fd: self.file.as_raw_fd(), len: self.map.len() as u64 }
    }

    /// The file, for processes that are to write the pool as well; a pool that is not
    /// [shared](MemfdPool::shared) they can write until it is registered.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The first byte.
    pub fn start(&self) -> *mut u8 {
        self.map.start()
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// False: there is no pool without bytes.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Bytes that are in huge pages, as the kernel accounts for them after all were touched.
    pub fn huge(&self) -> u64 {
        self.huge
    }
}

/// Bytes in huge pages of the mapping that starts at an address; advice that is taken need not
/// have done anything.
fn huge_bytes(start: u64) -> u64 {
    let Ok(smaps) = fs::read_to_string("/proc/self/smaps") else { return 0 };
    let head = format!("{start:x}-");
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&head)).skip(1);
    let fields = ["AnonHugePages:", "ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"];
    let of_next = |line: &str| line.split_whitespace().next().is_some_and(|w| !w.ends_with(':'));
    lines
        .by_ref()
        .take_while(|line| !of_next(line))
        .filter_map(|line| {
            let field = fields.iter().find(|field| line.starts_with(**field))?;
            line[field.len()..].split_whitespace().next()?.parse::<u64>().ok()
        })
        .sum::<u64>()
        * 1_024
}
