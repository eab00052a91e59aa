//! Registered memory.

use super::MemfdMapping;
use super::pool::claim_pool;
use crate::sys;
use kvferry_engine::fabric::{FabricError, Memory, RegionId};
use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate, fchmod, fstat};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

/// A process by more than its id.
#[derive(Debug)]
pub(crate) struct PidfdProcess {
    pub(crate) pid: u32,
    /// When it started, see [`sys::started`]; 0 where that cannot be read.
    pub(crate) started: u64,
    /// Readable once it has ended.
    pub(crate) handle: OwnedFd,
}

impl PidfdProcess {
    /// # Errors
    /// There is none, or no descriptor for it.
    pub(crate) fn open(pid: u32) -> Result<PidfdProcess, Errno> {
        let id = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
        let handle = pidfd_open(id, PidfdFlags::empty())?;
        Ok(PidfdProcess { pid, started: sys::started(pid).unwrap_or(0), handle })
    }

    /// The process at the other end of a Unix socket, of this id.
    ///
    /// # Errors
    /// It has ended, or there is no descriptor for it.
    pub(crate) fn of_peer(socket: BorrowedFd<'_>, pid: u32) -> Result<PidfdProcess, Errno> {
        match sys::peer_pidfd(socket) {
            Ok(handle) => Ok(PidfdProcess { pid, started: sys::started(pid).unwrap_or(0), handle }),
            Err(Errno::NOPROTOOPT) => {
                let now = sys::ticks_since_boot();
                let process = PidfdProcess::open(pid)?;
                // One that took its id since then is not meant.
                if process.started <= now { Ok(process) } else { Err(Errno::SRCH) }
            }
            Err(why) => Err(why),
        }
    }

    /// True if it has not ended. Asked after a copy it says that what was at the other side was it,
    /// and no successor of the same id.
    pub(crate) fn is_alive(&self) -> bool {
        sys::is_alive(&self.handle)
    }
}

/// How this process gets at memory.
#[derive(Clone, Debug)]
pub(crate) enum HostMemoryAccess {
    Here {
        /// Address of the first byte.
        base: u64,
        /// What keeps it mapped, if that is ours to do.
        #[allow(dead_code, reason = "kept for its drop")]
        map: Option<Arc<MemfdMapping>>,
    },
    /// By the kernel, in the address space of another process.
    There {
        process: Arc<PidfdProcess>,
        /// Address of the first byte there.
        base: u64,
    },
}

impl HostMemoryAccess {
    /// Address of the first byte in its address space.
    pub(crate) fn base(&self) -> u64 {
        match self {
            HostMemoryAccess::Here { base, .. } | HostMemoryAccess::There { base, .. } => *base,
        }
    }
}

/// Memory that is, or was, registered.
#[derive(Debug)]
pub(crate) struct HostRegion {
    pub(crate) id: RegionId,
    /// Unique in the life of the plane.
    pub(crate) token: u64,
    pub(crate) len: u64,
    pub(crate) reach: HostMemoryAccess,
    /// The memory file, for others to read.
    pub(crate) file: Option<OwnedFd>,
    /// The open memory of another process: shows to peers that this one may read it.
    pub(crate) proof: Option<OwnedFd>,
    alive: RwLock<bool>,
}

fn backend(text: String) -> FabricError {
    FabricError::Backend(text.into())
}

/// A descriptor of a memory file by which it can be read and not written, whoever gets it. It
/// cannot be opened again for more by another user.
fn for_readers(file: &OwnedFd) -> Result<OwnedFd, Errno> {
    let mode = fstat(file)?.st_mode;
    if mode & 0o077 != 0 {
        fchmod(file, Mode::from_raw_mode(mode & 0o700))?;
    }
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

impl HostRegion {
    /// Checks that the memory is there and maps it where it is a file.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub(crate) fn new(id: RegionId, token: u64, memory: Memory) -> Result<HostRegion, FabricError> {
        let (mut file, mut proof) = (None, None);
        let reach = match memory {
            Memory::Own(range) => {
                let base = range.base();
                match sys::probe_process(std::process::id(), base, range.len()) {
                    // Where the kernel does not say, the owner's word has to do.
                    Ok(()) | Err(Errno::PERM | Errno::NOSYS) => {
                        HostMemoryAccess::Here { base, map: None }
                    }
                    Err(_) => return Err(FabricError::LocalAccess),
                }
            }
            Memory::MemFd { fd, len } if fd >= 0 => {
                // SAFETY: It is not used beyond the copy that is made of it next. What is none is an
                // error; one of somebody else is copied as any code of this process can do by
                // /proc/self/fd, and used only if it is a memory file that cannot shrink.
                let theirs = unsafe { BorrowedFd::borrow_raw(fd) };
                let ours = fcntl_dupfd_cloexec(theirs, 0)
                    .map_err(|why| backend(format!("descriptor {fd}: {why}")))?;
                let pool =
                    claim_pool(&ours).map_err(|why| backend(format!("descriptor {fd}: {why}")));
                let map = match pool?.filter(|pool| pool.len() as u64 >= len) {
                    Some(pool) => pool,
                    None => {
                        let map = MemfdMapping::new(&ours, len, true);
                        Arc::new(map.map_err(|why| backend(format!("descriptor {fd}: {why}")))?)
                    }
                };
                if !map.is_whole() {
                    // Peers take no file with holes: to read one makes their memory of it.
                    fallocate(&ours, FallocateFlags::empty(), 0, len)
                        .map_err(|why| backend(format!("descriptor {fd}: {len} bytes: {why}")))?;
                }
                let theirs = for_readers(&ours)
                    .map_err(|why| backend(format!("descriptor {fd}, for readers: {why}")))?;
                file = Some(theirs);
                map.enter_pages();
                HostMemoryAccess::Here { base: map.start() as u64, map: Some(map) }
            }
            // What writes to other processes is not to write to this one.
            Memory::OtherProcess { pid, .. } if pid == std::process::id() => {
                return Err(backend(format!(
                    "memory of process {pid}, which is this one: register it as its own"
                )));
            }
            Memory::OtherProcess { pid, base, len } => {
                let process = PidfdProcess::open(pid)
                    .map_err(|why| backend(format!("process {pid}: {why}")))?;
                sys::probe_process(pid, base, len).map_err(|why| match why {
                    Errno::FAULT => FabricError::LocalAccess,
                    why => backend(format!(
                        "memory of process {pid}: {why}; cross-memory attach needs the same user \
                         and ptrace access, see /proc/sys/kernel/yama/ptrace_scope"
                    )),
                })?;
                // Without one, peers that would copy from it refuse, and say why.
                proof = std::fs::File::open(format!("/proc/{pid}/mem")).ok().map(OwnedFd::from);
                HostMemoryAccess::There { process: Arc::new(process), base }
            }
            other => return Err(backend(format!("{other:?} is not for this plane"))),
        };
        let (len, alive) = (memory.len(), RwLock::new(true));
        Ok(HostRegion { id, token, len, reach, file, proof, alive })
    }

    /// Keeps the region registered as long as the guard is held; none if it is not any more.
    pub(crate) fn hold(&self) -> Option<RwLockReadGuard<'_, bool>> {
        let guard = self.alive.read().unwrap_or_else(PoisonError::into_inner);
        guard.then_some(guard)
    }

    /// Ends all access through this process; returns when the chunk that is being copied is done.
    pub(crate) fn kill(&self) {
        *self.alive.write().unwrap_or_else(PoisonError::into_inner) = false;
    }
}
