//! Listening sockets of a process that may run out of descriptors.

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};

/// Pause after the system had no descriptor for a connection.
const BREATH: Duration = Duration::from_millis(50);

/// Failures less than this apart are told once.
const EPISODE: Duration = Duration::from_secs(60);

/// Lets this process open as many files as it may: each connection takes a descriptor.
pub(crate) fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    let raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    tracing::debug!(from = ?limit.current, to = ?limit.maximum, ?raised,
        "raised the limit of open files");
}

/// Files that this process may have open; none if there is no limit.
pub(crate) fn open_files_max() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// What to do if accepting fails: wait, and tell once per episode.
#[derive(Debug)]
pub(crate) struct AcceptFailures {
    /// What is listened for.
    what: &'static str,
    last: Option<Instant>,
}

impl AcceptFailures {
    pub(crate) fn new(what: &'static str) -> AcceptFailures {
        AcceptFailures { what, last: None }
    }

    /// Accepting failed. Waits where another try would fail the same way.
    pub(crate) async fn failed(&mut self, why: &io::Error) {
        if is_of_peer(why) {
            return;
        }
        let now = Instant::now();
        if self.last.replace(now).is_none_or(|last| now - last > EPISODE) {
            tracing::warn!(what = self.what, %why, remedy = remedy(why),
                "cannot accept a connection; it waits until that is over");
        }
        tokio::time::sleep(BREATH).await;
    }
}

/// The connection ended before it was accepted.
fn is_of_peer(why: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(why.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

fn remedy(why: &io::Error) -> &'static str {
    match Errno::from_io_error(why) {
        Some(Errno::MFILE) => {
            "raise the hard limit of open files before the start: ulimit -n (docker: --ulimit \
             nofile=N, systemd: LimitNOFILE=N)"
        }
        Some(Errno::NFILE) => "raise the limit of the machine: sysctl -w fs.file-max=N",
        _ => "free memory of this machine",
    }
}

/// Listens for TCP, and waits where there is no descriptor for a connection.
#[derive(Debug)]
pub(crate) struct PatientListener {
    listener: TcpListener,
    failures: AcceptFailures,
}

impl PatientListener {
    /// `what` is listened for, in words for the log.
    pub(crate) fn new(listener: TcpListener, what: &'static str) -> PatientListener {
        PatientListener { listener, failures: AcceptFailures::new(what) }
    }

    /// The next connection and whence it came.
    pub(crate) async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok(accepted) => return accepted,
                Err(why) => self.failures.failed(&why).await,
            }
        }
    }
}

impl axum::serve::Listener for PatientListener {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        PatientListener::accept(self).await
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}
