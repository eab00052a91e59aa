//! The thread that accepts connections. Each is served by a thread of its own, and there are only
//! so many.

use crate::spawn;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::{SocketFlags, accept_with, sockopt};
use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// What becomes of connections.
pub trait ConnectionHandler: Send + Sync + 'static {
    /// Serves a connection that came by the socket of this number.
    fn serve(&self, socket: usize, connection: OwnedFd);

    /// One was closed that no thread, or no place, was left for.
    fn turned_away(&self) {}
}

/// The thread that accepts, until this is dropped.
#[derive(Debug)]
pub struct ConnectionListener {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    served: Arc<AtomicU32>,
}

impl ConnectionListener {
    /// Accepts at sockets that listen and do not block, and serves at most so many connections at a
    /// time. The threads are named `names`: who accepts, and who serve.
    ///
    /// # Errors
    /// No thread or descriptor is left.
    pub fn start(
        names: [&'static str; 2],
        sockets: Vec<OwnedFd>,
        most: u32,
        handler: impl ConnectionHandler,
    ) -> io::Result<ConnectionListener> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let served = Arc::<AtomicU32>::default();
        let (heard, count, handler) = (stop.clone(), served.clone(), Arc::new(handler));
        let accept = move || {
            while let Some(ready) = wait(&sockets, &heard) {
                for socket in ready {
                    if let Ok(connection) = accept_with(&sockets[socket], SocketFlags::CLOEXEC) {
                        begin(names[1], (&count, most), &handler, (socket, connection));
                    }
                }
            }
        };
        let thread = Some(spawn(names[0], accept)?);
        Ok(ConnectionListener { stop, thread, served })
    }

    /// Accepts no more, and waits until nobody is served.
    pub fn drain(self) {
        let served = self.served.clone();
        drop(self);
        while served.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
    }
}

impl Drop for ConnectionListener {
    fn drop(&mut self) {
        let _rung = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

/// The sockets by which somebody came; none at the end.
fn wait(sockets: &[OwnedFd], stop: &OwnedFd) -> Option<Vec<usize>> {
    let watched = sockets.iter().chain([stop]);
    let mut polled: Vec<_> = watched.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    if poll(&mut polled, None).is_err() {
        return Some(Vec::new());
    }
    let is_ready = |at: &usize| !polled[*at].revents().is_empty();
    (!is_ready(&sockets.len())).then(|| (0..sockets.len()).filter(is_ready).collect())
}

fn begin(
    name: &str,
    (served, most): (&Arc<AtomicU32>, u32),
    handler: &Arc<impl ConnectionHandler>,
    (socket, connection): (usize, OwnedFd),
) {
    let is_full = served.fetch_add(1, Ordering::AcqRel) >= most;
    let (count, by) = (served.clone(), handler.clone());
    let serve = move || {
        by.serve(socket, connection);
        count.fetch_sub(1, Ordering::AcqRel);
    };
    if is_full || spawn(name, serve).is_err() {
        served.fetch_sub(1, Ordering::AcqRel);
        handler.turned_away();
    }
}

/// Has the kernel notice a host that is silent for so many milliseconds; what is written is not
/// held back.
///
/// # Errors
/// What the kernel says.
pub fn set_keepalive(socket: &TcpStream, dead_ms: u32) -> io::Result<()> {
    let quarter = Duration::from_secs((u64::from(dead_ms) / 4_000).max(1));
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, quarter)?;
    sockopt::set_tcp_keepintvl(socket, quarter)?;
    sockopt::set_tcp_keepcnt(socket, 3)?;
    sockopt::set_tcp_user_timeout(socket, dead_ms)?;
    Ok(())
}
