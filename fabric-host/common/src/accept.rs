//! What becomes of failures to accept connections.

use rustix::io::Errno;
use std::io;
use std::time::{Duration, Instant};

/// Pause after the system had no descriptor or memory for a connection, which stays at the socket.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Failures less than this apart are told once.
const EPISODE: Duration = Duration::from_secs(60);

/// Failures to accept at a socket, of which an episode is told once.
#[derive(Debug)]
pub struct AcceptFailures {
    what: &'static str,
    last: Option<Instant>,
}

impl AcceptFailures {
    /// Nothing has failed yet; `what` is listened for, in words for the log.
    pub const fn new(what: &'static str) -> AcceptFailures {
        AcceptFailures { what, last: None }
    }

    /// Accepting failed. True if another try would fail the same way unless [`ACCEPT_PAUSE`] passes.
    pub fn must_wait(&mut self, why: &io::Error) -> bool {
        let errno = Errno::from_io_error(why);
        // Nobody is there, or not any more.
        let is_of_peer =
            [Errno::AGAIN, Errno::INTR, Errno::CONNABORTED, Errno::CONNRESET, Errno::PROTO];
        if errno.is_some_and(|errno| is_of_peer.contains(&errno)) {
            return false;
        }
        let remedy = match errno {
            Some(Errno::MFILE) => {
                "raise the hard limit of open files before the start: ulimit -n (docker: --ulimit \
                 nofile=N, systemd: LimitNOFILE=N)"
            }
            Some(Errno::NFILE) => "raise the limit of the machine: sysctl -w fs.file-max=N",
            _ => "free memory of this machine",
        };
        let now = Instant::now();
        if self.last.replace(now).is_none_or(|last| now - last > EPISODE) {
            let what = self.what;
            tracing::warn!(what, %why, remedy, "cannot accept a connection; it waits until that is over");
        }
        true
    }
}
