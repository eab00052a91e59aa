//! What MoRI leaves to the process around it: sockets that children must not inherit, and who hears
//! how the process ended.

use crate::mori::Shim;
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
use rustix::net::sockopt::socket_acceptconn;
use rustix::net::{SocketAddrV4, getsockname};
use rustix::pipe::{PipeFlags, pipe_with};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::{fs, io};

/// Both ends, open until the process ends: for reading and for writing.
static PIPE: OnceLock<(OwnedFd, OwnedFd)> = OnceLock::new();

/// A pipe that gets one line when the process ends while MoRI is up: how it ends, and the last call
/// into MoRI. Who opens it by `/proc/PID/fd/N` can read it after the end.
///
/// # Errors
/// The system has no pipe to give.
pub fn last_error_pipe() -> io::Result<BorrowedFd<'static>> {
    if PIPE.get().is_none() {
        // Another thread may be first.
        let _taken = PIPE.set(pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?);
    }
    Ok(PIPE.get().expect("it was made").0.as_fd())
}

/// Has MoRI's end told there, if somebody asked for it.
pub(crate) fn install_last_error(shim: &Shim) {
    if let Some((_, end)) = PIPE.get() {
        // SAFETY: The descriptor is open until the process ends.
        unsafe { (shim.functions.kf_last_words)(end.as_raw_fd()) };
    }
}

/// Has the sockets that listen at an address closed in children that this process executes from
/// now on: one that has inherited the socket that MoRI listens on keeps its port from the next
/// backend, and MoRI ends the process that cannot have it.
pub(crate) fn set_close_on_exec(at: SocketAddrV4) {
    let entries = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    for number in numbers {
        // SAFETY: It is not used beyond the loop. If it was closed meanwhile, or is another one by
        // now, the calls say so.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        let is_it = || Some(socket_acceptconn(fd).ok()? && listens_at(fd)? == at);
        if is_it() == Some(true)
            && let Ok(flags) = fcntl_getfd(fd)
        {
            let _kept = fcntl_setfd(fd, flags | FdFlags::CLOEXEC);
        }
    }
}

fn listens_at(fd: BorrowedFd<'_>) -> Option<SocketAddrV4> {
    SocketAddrV4::try_from(getsockname(fd).ok()?).ok()
}
