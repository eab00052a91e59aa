//! System calls that take addresses.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, OFlags, StatxFlags, fcntl_getfl, statx};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Ranges that one call takes.
pub(crate) const RANGES_MAX: usize = 1_024;

/// A range of memory.
pub(crate) fn range(base: u64, len: u64) -> libc::iovec {
    libc::iovec { iov_base: base as *mut libc::c_void, iov_len: len as usize }
}

fn checked(moved: isize) -> Result<u64, Errno> {
    if moved >= 0 {
        return Ok(moved as u64);
    }
    let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    Err(Errno::from_raw_os_error(error))
}

/// Copies from another process; fewer bytes than asked for mean that a later range is bad.
///
/// # Safety
/// What is mapped of the local ranges is memory that may be written, and that nobody has a
/// reference to.
pub(crate) unsafe fn read_process(
    pid: u32,
    local: &[libc::iovec],
    remote: &[libc::iovec],
) -> Result<u64, Errno> {
    let (pid, flags) = (pid as libc::pid_t, 0);
    let (locals, remotes) = (local.len() as _, remote.len() as _);
    // SAFETY: The lists are as long as they are said to be. The kernel checks that the ranges are
    // mapped; that those of this process may be written is the caller's promise.
    checked(unsafe {
        libc::process_vm_readv(pid, local.as_ptr(), locals, remote.as_ptr(), remotes, flags)
    })
}

/// Reads memory of a process by cross-memory attach, as planes do; how many bytes were had.
///
/// # Errors
/// As the kernel says it: no permission, no such process, or no memory there.
pub fn read_memory(pid: u32, base: u64, into: &mut [u8]) -> std::io::Result<usize> {
    let len = into.len() as u64;
    let local = [range(into.as_mut_ptr() as u64, len)];
    // SAFETY: The one range is a buffer that is borrowed for writing.
    Ok(unsafe { read_process(pid, &local, &[range(base, len)]) }? as usize)
}

/// Copies into another process; fewer bytes than asked for mean that a later range is bad.
///
/// # Safety
/// It is not this process, under none of its ids: what that has mapped is not this function's to
/// write.
pub(crate) unsafe fn write_process(
    pid: u32,
    local: &[libc::iovec],
    remote: &[libc::iovec],
) -> Result<u64, Errno> {
    let (pid, flags) = (pid as libc::pid_t, 0);
    let (locals, remotes) = (local.len() as _, remote.len() as _);
    // SAFETY: The lists are as long as they are said to be. Ranges of this process are only read,
    // and the kernel checks that they are mapped; those that are written are not of this process.
    checked(unsafe {
        libc::process_vm_writev(pid, local.as_ptr(), locals, remote.as_ptr(), remotes, flags)
    })
}

/// Reads what can be had of both ends of a range of a process.
pub(crate) fn probe_process(pid: u32, base: u64, len: u64) -> Result<(), Errno> {
    for at in [base, base + (len - 1)] {
        let mut byte = 0_u8;
        let local = [range(&raw mut byte as u64, 1)];
        // SAFETY: The one range is a variable of this function.
        if unsafe { read_process(pid, &local, &[range(at, 1)]) }? != 1 {
            return Err(Errno::FAULT);
        }
    }
    Ok(())
}

/// When a process was started, in clock ticks since boot: with its id a name of the process.
pub(crate) fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program may hold anything, a closing bracket included.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// True if the process behind the descriptor has not ended.
pub(crate) fn is_alive(process: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(process, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut polled, Some(&now)), Ok(0))
}

/// Reads an option of a socket into a value.
///
/// # Safety
/// Any bytes that the kernel writes there are a `T`.
unsafe fn socket_option<T>(
    socket: BorrowedFd<'_>,
    option: libc::c_int,
    mut value: T,
) -> Result<T, Errno> {
    let mut len = size_of::<T>() as libc::socklen_t;
    let (into, size) = ((&raw mut value).cast(), &raw mut len);
    // SAFETY: The buffer is as long as it is said to be.
    let failed =
        unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, into, size) };
    checked(failed as isize).map(|_| value)
}

/// Process and user at the other end of a Unix socket, as this process sees them: the process is 0
/// if it is in a namespace that is not seen from here.
pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> Result<(u32, u32), Errno> {
    let none = libc::ucred { pid: 0, uid: 0, gid: 0 };
    // SAFETY: Credentials are numbers.
    let who = unsafe { socket_option(socket, libc::SO_PEERCRED, none) }?;
    Ok((who.pid as u32, who.uid))
}

/// The process at the other end of a Unix socket, whatever became of its id.
///
/// # Errors
/// `NOPROTOOPT` of kernels before 6.5; that it has ended.
pub(crate) fn peer_pidfd(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    // SAFETY: A descriptor is a number.
    let fd: libc::c_int = unsafe { socket_option(socket, libc::SO_PEERPIDFD, -1) }?;
    // SAFETY: The kernel made it for this call.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Now, on the clock of [`started`].
pub(crate) fn ticks_since_boot() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    // SAFETY: It takes no address.
    let second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as u64;
    now.tv_sec as u64 * second + now.tv_nsec as u64 * second / 1_000_000_000
}

/// True if a descriptor is the open file of the memory of a process, which the kernel gives to
/// nobody who may not read that memory. It is asked nothing that a file system of the peer's own
/// would have to answer.
pub(crate) fn is_memory_of(proof: BorrowedFd<'_>, pid: u32) -> Result<bool, Errno> {
    let flags = fcntl_getfl(proof)?;
    if flags.contains(OFlags::PATH) || flags & OFlags::RWMODE == OFlags::WRONLY {
        return Ok(false);
    }
    let file = |of: BorrowedFd<'_>, path: &str, flags: AtFlags| {
        let flags = flags | AtFlags::STATX_DONT_SYNC;
        let found = statx(of, path, flags, StatxFlags::INO)?;
        Ok::<_, Errno>((found.stx_dev_major, found.stx_dev_minor, found.stx_ino))
    };
    let path = format!("/proc/{pid}/mem");
    Ok(file(proof, "", AtFlags::EMPTY_PATH)? == file(CWD, &path, AtFlags::empty())?)
}

/// Sends from ranges of memory by a socket that does not block.
pub(crate) fn send_ranges(socket: BorrowedFd<'_>, ranges: &[libc::iovec]) -> Result<u64, Errno> {
    // SAFETY: An all-zero header is a valid one.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = ranges.as_ptr().cast_mut();
    header.msg_iovlen = ranges.len() as _;
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: The list is as long as the header says. The kernel checks that the ranges are mapped,
    // and only reads them, which is no access of this program.
    checked(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, flags) })
}

/// Receives into ranges of memory by a socket that does not block.
///
/// # Safety
/// What is mapped of the ranges is memory that may be written, and that nobody has a reference to.
pub(crate) unsafe fn receive_ranges(
    socket: BorrowedFd<'_>,
    ranges: &[libc::iovec],
) -> Result<u64, Errno> {
    // SAFETY: An all-zero header is a valid one.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = ranges.as_ptr().cast_mut();
    header.msg_iovlen = ranges.len() as _;
    // SAFETY: The list is as long as the header says. The kernel checks that the ranges are mapped;
    // that they may be written is the caller's promise.
    checked(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) })
}
