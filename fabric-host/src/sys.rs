//! System calls that take addresses.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

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
pub(crate) fn read_process(
    pid: u32,
    local: &[libc::iovec],
    remote: &[libc::iovec],
) -> Result<u64, Errno> {
    let (pid, flags) = (pid as libc::pid_t, 0);
    let (locals, remotes) = (local.len() as _, remote.len() as _);
    // SAFETY: The kernel checks every range of both processes; those of this one are registered
    // memory or a buffer of the caller.
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
    Ok(read_process(pid, &local, &[range(base, len)])? as usize)
}

/// Copies into another process; fewer bytes than asked for mean that a later range is bad.
pub(crate) fn write_process(
    pid: u32,
    local: &[libc::iovec],
    remote: &[libc::iovec],
) -> Result<u64, Errno> {
    let (pid, flags) = (pid as libc::pid_t, 0);
    let (locals, remotes) = (local.len() as _, remote.len() as _);
    // SAFETY: The kernel checks every range of both processes; nothing of this one is written.
    checked(unsafe {
        libc::process_vm_writev(pid, local.as_ptr(), locals, remote.as_ptr(), remotes, flags)
    })
}

/// Reads what can be had of both ends of a range of a process.
pub(crate) fn probe_process(pid: u32, base: u64, len: u64) -> Result<(), Errno> {
    for at in [base, base + (len - 1)] {
        let mut byte = 0_u8;
        let local = [range(&raw mut byte as u64, 1)];
        if read_process(pid, &local, &[range(at, 1)])? != 1 {
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

/// The process at the other end of a Unix socket, as this one sees it; none from elsewhere.
pub(crate) fn peer_process(socket: BorrowedFd<'_>) -> Option<u32> {
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: The buffer is as long as it is said to be.
    let failed = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut who).cast(),
            &raw mut len,
        )
    };
    (failed == 0 && who.pid > 0).then_some(who.pid as u32)
}

/// Sends from ranges of memory by a socket that does not block.
pub(crate) fn send_ranges(socket: BorrowedFd<'_>, ranges: &[libc::iovec]) -> Result<u64, Errno> {
    // SAFETY: An all-zero header is a valid one.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = ranges.as_ptr().cast_mut();
    header.msg_iovlen = ranges.len() as _;
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: The kernel checks the ranges and only reads them.
    checked(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, flags) })
}

/// Receives into ranges of memory by a socket that does not block.
pub(crate) fn receive_ranges(socket: BorrowedFd<'_>, ranges: &[libc::iovec]) -> Result<u64, Errno> {
    // SAFETY: An all-zero header is a valid one.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = ranges.as_ptr().cast_mut();
    header.msg_iovlen = ranges.len() as _;
    // SAFETY: The ranges are registered memory or a buffer of the caller.
    checked(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) })
}
