//! Listening sockets of a process that may run out of descriptors.

use kvferry_fabric_common::{ACCEPT_PAUSE, AcceptFailures};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;
use std::net::SocketAddr;
use tokio::net::{TcpListener, TcpStream};

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
                Err(why) if self.failures.must_wait(&why) => tokio::time::sleep(ACCEPT_PAUSE).await,
                Err(_) => {}
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
