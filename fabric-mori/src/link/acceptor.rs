//! Our side of the door.

use super::{MoriAcceptorMessage, MoriDiallerMessage, MoriHello, receive, send};
use crate::access_control::MoriAccessControl;
use kvferry_fabric_common::{
    ConnectionHandler, ConnectionListener, ConnectionPlace, set_keepalive,
};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Most lines of peers at a time.
const LINES_MAX: u32 = 1_024;

/// Each line has a thread of its own, which mostly sleeps.
struct MoriDoor {
    gate: Arc<MoriAccessControl>,
    dead_ms: u32,
}

impl ConnectionHandler for MoriDoor {
    fn serve(&self, _socket: usize, line: OwnedFd, place: &ConnectionPlace) {
        let _over = serve(&line.into(), place, &self.gate, self.dead_ms);
    }
}

/// Listens at an address; also at which port.
///
/// # Errors
/// Address, port and reason.
pub(crate) fn listen(
    host: Ipv4Addr,
    port: u16,
    gate: Arc<MoriAccessControl>,
    dead_ms: u32,
) -> Result<(ConnectionListener, u16), String> {
    let fail = |why: std::io::Error| format!("cannot listen at {host}:{port}: {why}");
    let socket = TcpListener::bind((host, port)).map_err(fail)?;
    socket.set_nonblocking(true).map_err(fail)?;
    let bound = socket.local_addr().map_err(fail)?.port();
    let (names, door) = (["kvferry-door", "kvferry-line"], MoriDoor { gate, dead_ms });
    let listener = ConnectionListener::start(names, vec![socket.into()], LINES_MAX, door);
    Ok((listener.map_err(fail)?, bound))
}

/// Serves a line until it ends.
fn serve(
    socket: &TcpStream,
    place: &ConnectionPlace,
    gate: &MoriAccessControl,
    dead_ms: u32,
) -> std::io::Result<()> {
    set_keepalive(socket, dead_ms)?;
    socket.set_read_timeout(Some(Duration::from_millis(dead_ms.into())))?;
    let hello: MoriHello = receive(socket)?;
    if !place.keep() {
        return Ok(());
    }
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
