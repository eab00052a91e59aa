//! The thread that accepts connections. Each is served by a thread of its own, and there are only
//! so many.

use crate::accept::{ACCEPT_PAUSE, AcceptFailures};
use crate::places::{ConnectionPlace, PlaceTable};
use crate::spawn;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::{SocketFlags, acceptfrom_with, sockopt};
use rustix::time::Timespec;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// What becomes of connections.
pub trait ConnectionHandler: Send + Sync + 'static {
    /// Serves a connection that came by the socket of this number. Until its place is kept, it has
    /// to make place for others, and is shut down.
    fn serve(&self, socket: usize, connection: OwnedFd, place: &ConnectionPlace);

    /// One was closed that no thread, or no place, was left for.
    fn turned_away(&self) {}
}

/// The thread that accepts, until this is dropped.
#[derive(Debug)]
pub struct ConnectionListener {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    served: Arc<PlaceTable>,
}

impl ConnectionListener {
    /// Accepts at sockets that listen and do not block, and serves at most so many connections at a
    /// time, those aside that made place for others and end. The threads are named `names`: who
    /// accepts, and who serve.
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
        let served = Arc::new(PlaceTable::new(most));
        let (heard, places, handler) = (stop.clone(), served.clone(), Arc::new(handler));
        let accept = move || {
            let mut failures = AcceptFailures::new(names[0]);
            while let Some(ready) = wait(&sockets, &heard) {
                let mut must_wait = false;
                for socket in ready {
                    match acceptfrom_with(&sockets[socket], SocketFlags::CLOEXEC) {
                        Ok((connection, from)) => {
                            let from = from.and_then(|from| SocketAddr::try_from(from).ok());
                            let place = places.enter(from, &connection);
                            begin(names[1], place, &handler, (socket, connection));
                        }
                        Err(why) => must_wait |= failures.must_wait(&why.into()),
                    }
                }
                if must_wait {
                    let pause = Timespec::try_from(ACCEPT_PAUSE).ok();
                    let _rung = poll(&mut [PollFd::new(&*heard, PollFlags::IN)], pause.as_ref());
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
        while !served.is_empty() {
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
    place: Option<ConnectionPlace>,
    handler: &Arc<impl ConnectionHandler>,
    (socket, connection): (usize, OwnedFd),
) {
    let Some(place) = place else { return handler.turned_away() };
    let by = handler.clone();
    let serve = move || by.serve(socket, connection, &place);
    if spawn(name, serve).is_err() {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::sync::mpsc::{Sender, channel};

    struct Panics(Sender<()>);

    impl ConnectionHandler for Panics {
        fn serve(&self, _: usize, _: OwnedFd, _: &ConnectionPlace) {
            let _heard = self.0.send(());
            panic!("on purpose");
        }
    }

    #[test]
    fn who_panics_gives_its_place_back() {
        let socket = TcpListener::bind("127.0.0.1:0").expect("a socket");
        socket.set_nonblocking(true).expect("it does not block");
        let at = socket.local_addr().expect("its address");
        let (tell, served) = channel();
        let names = ["listens", "panics"];
        let listener = ConnectionListener::start(names, vec![socket.into()], 1, Panics(tell))
            .expect("a listener");
        let _peer = TcpStream::connect(at).expect("a connection");
        served.recv().expect("it is served");
        listener.drain();
    }
}
