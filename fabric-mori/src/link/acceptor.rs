//! Our side of the door.

use super::{MoriAcceptorMessage, MoriDiallerMessage, MoriHello, receive, send, set_keepalive};
use crate::access_control::MoriAccessControl;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Most lines of peers at a time.
const LINES_MAX: usize = 1_024;

/// The thread that accepts; each line has a thread of its own, which mostly sleeps.
#[derive(Debug)]
pub(crate) struct MoriAcceptor {
    port: u16,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl MoriAcceptor {
    /// Listens at an address.
    ///
    /// # Errors
    /// Address, port and reason.
    pub(crate) fn open(
        host: Ipv4Addr,
        port: u16,
        gate: Arc<MoriAccessControl>,
        dead: Duration,
    ) -> Result<MoriAcceptor, String> {
        let fail = |why: std::io::Error| format!("cannot listen at {host}:{port}: {why}");
        let socket = TcpListener::bind((host, port)).map_err(fail)?;
        socket.set_nonblocking(true).map_err(fail)?;
        let port = socket.local_addr().map_err(fail)?.port();
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|why| fail(why.into()))?;
        let stop = Arc::new(stop);
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("kvferry-door".into())
            .spawn(move || accept(&socket, &stopped, &gate, dead))
            .map_err(fail)?;
        Ok(MoriAcceptor { port, stop, thread: Some(thread) })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for MoriAcceptor {
    fn drop(&mut self) {
        let _woken = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

fn accept(socket: &TcpListener, stop: &OwnedFd, gate: &Arc<MoriAccessControl>, dead: Duration) {
    let lines = Arc::new(AtomicUsize::new(0));
    loop {
        let mut fds = [PollFd::new(socket, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        let _interrupted = poll(&mut fds, None);
        if !fds[1].revents().is_empty() {
            return;
        }
        let Ok((line, _)) = socket.accept() else { continue };
        if lines.fetch_add(1, Ordering::Relaxed) >= LINES_MAX {
            lines.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let (gate, count) = (gate.clone(), lines.clone());
        let serve = move || {
            let _over = serve(&line, &gate, dead);
            count.fetch_sub(1, Ordering::Relaxed);
        };
        if std::thread::Builder::new().name("kvferry-line".into()).spawn(serve).is_err() {
            lines.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Serves a line until it ends.
fn serve(socket: &TcpStream, gate: &MoriAccessControl, dead: Duration) -> std::io::Result<()> {
    socket.set_nonblocking(false)?;
    set_keepalive(socket, dead)?;
    socket.set_read_timeout(Some(dead))?;
    let hello: MoriHello = receive(socket)?;
    socket.set_read_timeout(None)?;
    let line = gate.admit(hello.to, &hello.who, hello.fence_key, socket.try_clone()?);
    let served = serve_asks(socket, gate, line);
    if let Ok(line) = line {
        gate.leave(line);
    }
    served
}

fn serve_asks(
    socket: &TcpStream,
    gate: &MoriAccessControl,
    line: Result<u64, &'static str>,
) -> std::io::Result<()> {
    loop {
        match receive(socket)? {
            MoriDiallerMessage::Enter { session, name } => {
                let grant =
                    line.and_then(|line| gate.enter(line, session, &name)).map_err(str::to_owned);
                send(socket, &MoriAcceptorMessage::Told { session, grant })?;
            }
            MoriDiallerMessage::Released { region } => {
                if let Ok(line) = line {
                    gate.released(line, region);
                }
            }
        }
    }
}
