//! MoRI's sockets are kept from children: one that has inherited the socket that MoRI listens on
//! keeps its port from the next backend, and MoRI ends the process that cannot have it.

use rustix::fd::BorrowedFd;
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
use rustix::net::sockopt::socket_acceptconn;
use rustix::net::{SocketAddrV4, getsockname};
use std::fs;

/// Has the sockets that listen at an address closed in children that this process executes from
/// now on.
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
