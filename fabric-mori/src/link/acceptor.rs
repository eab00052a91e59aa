//! Accepts peers that ask for regions, and answers them.

use super::{MoriAcceptorMessage, MoriDiallerMessage, MoriHello, PURPOSE, receive, send};
use crate::access_control::MoriAccessControl;
use kvferry_fabric_common::{
    ConnectionHandler, ConnectionListener, ConnectionPlace, set_keepalive,
};
use kvferry_trust::ProofError;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Most lines of peers at a time.
const LINES_MAX: u32 = 1_024;

/// Each line has a thread of its own, which mostly sleeps.
struct MoriRegionService {
    access: Arc<MoriAccessControl>,
    dead_ms: u32,
}

impl ConnectionHandler for MoriRegionService {
    fn serve(&self, _socket: usize, line: OwnedFd, place: &ConnectionPlace) {
        let _over = serve(&line.into(), place, &self.access, self.dead_ms);
    }
}

/// Listens at an address; also at which port.
///
/// # Errors
/// Address, port and reason.
pub(crate) fn listen(
    host: Ipv4Addr,
    port: u16,
    access: Arc<MoriAccessControl>,
    dead_ms: u32,
) -> Result<(ConnectionListener, u16), String> {
    let fail = |why: std::io::Error| format!("cannot listen at {host}:{port}: {why}");
    let socket = TcpListener::bind((host, port)).map_err(fail)?;
    socket.set_nonblocking(true).map_err(fail)?;
    let bound = socket.local_addr().map_err(fail)?.port();
    let (names, acceptor) =
        (["kvferry-accept", "kvferry-line"], MoriRegionService { access, dead_ms });
    let listener = ConnectionListener::start(names, vec![socket.into()], LINES_MAX, acceptor);
    Ok((listener.map_err(fail)?, bound))
}

/// Serves a line until it ends.
fn serve(
    socket: &TcpStream,
    place: &ConnectionPlace,
    access: &MoriAccessControl,
    dead_ms: u32,
) -> std::io::Result<()> {
    set_keepalive(socket, dead_ms)?;
    socket.set_read_timeout(Some(Duration::from_millis(dead_ms.into())))?;
    let hello: MoriHello = receive(socket)?;
    if let Err(why) = check_dialler(socket, access, &hello)? {
        access.proof.warn_of_refusal(&access.key, &why);
        return send(socket, &MoriAcceptorMessage::Refused { why });
    }
    if !place.keep() {
        return Ok(());
    }
    socket.set_read_timeout(None)?;
    let line = access.admit(hello.to, &hello.who, hello.fence_key, socket.try_clone()?);
    let served = serve_asks(socket, access, line);
    if let Ok(line) = line {
        access.leave(line);
    }
    served
}

/// Proves to who said hello that this plane knows the secret, and has it do the same; why it is
/// refused.
fn check_dialler(
    socket: &TcpStream,
    access: &MoriAccessControl,
    hello: &MoriHello,
) -> std::io::Result<Result<(), String>> {
    let (answer, expected) =
        match access.proof.answer((PURPOSE, &hello.said()), hello.offer.as_ref()) {
            Ok(Some(exchange)) => exchange,
            Ok(None) => return Ok(Ok(())),
            Err(why) => return Ok(Err(why)),
        };
    send(socket, &MoriAcceptorMessage::Prove(answer))?;
    Ok(match receive(socket)? {
        MoriDiallerMessage::Proven(proof) => {
            expected.check(&proof).map(drop).map_err(|why| why.to_string())
        }
        _ => Err(ProofError::Wrong.to_string()),
    })
}

fn serve_asks(
    socket: &TcpStream,
    access: &MoriAccessControl,
    line: Result<u64, &'static str>,
) -> std::io::Result<()> {
    loop {
        match receive(socket)? {
            MoriDiallerMessage::Enter { session, name } => {
                let grant =
                    line.and_then(|line| access.enter(line, session, &name)).map_err(str::to_owned);
                send(socket, &MoriAcceptorMessage::Told { session, grant })?;
            }
            MoriDiallerMessage::Released { region } => {
                if let Ok(line) = line {
                    access.released(line, region);
                }
            }
            // It was proven, or there is nothing to prove.
            MoriDiallerMessage::Proven(_) => {}
        }
    }
}
