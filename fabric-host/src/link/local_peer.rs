//! Who is at the other end of a local socket, as the kernel says it.

use crate::memory::PidfdProcess;
use crate::sys;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A process of this host that may take part in a local link.
#[derive(Debug)]
pub(crate) struct LocalPeer {
    pub(crate) process: Arc<PidfdProcess>,
    /// Readable when the process has ended. Opened anew and no copy: sessions may keep the process
    /// for longer than it is watched.
    pub(super) watch: OwnedFd,
    pub(crate) uid: u32,
}

impl LocalPeer {
    /// The peer of a socket, if it is of this user or of one of those.
    ///
    /// # Errors
    /// Why nothing is said to it, for itself.
    pub(super) fn new(socket: BorrowedFd<'_>, uids: &[u32]) -> Result<LocalPeer, String> {
        let (pid, uid) =
            sys::peer_credentials(socket).map_err(|why| format!("credentials: {why}"))?;
        let own = rustix::process::geteuid().as_raw();
        if uid != own && !uids.contains(&uid) {
            return Err(format!(
                "a process of user {uid} and a plane of user {own}: run both as one user, or name \
                 each other's in `uids`"
            ));
        }
        let open = || {
            PidfdProcess::of_peer(socket, pid)
                .map_err(|why| format!("process {pid} of the other side: {why}"))
        };
        Ok(LocalPeer { process: Arc::new(open()?), watch: open()?.handle, uid })
    }
}
