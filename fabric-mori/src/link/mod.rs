//! The door: where peers show their pass and are given the descriptors of regions. MoRI itself lets
//! in whoever knows a number, and does not tell of a peer's end; the line to its door does.

mod acceptor;
mod grant;
mod outbound;

pub(crate) use acceptor::MoriAcceptor;
pub(crate) use grant::MoriRegionGrant;
pub(crate) use outbound::{MoriDialRequest, MoriGrantResult, MoriLinkEvent, MoriOutboundLink};

use crate::address::{MoriMemoryKey, MoriPlaneIdentity};
use kvferry_engine::fabric::RegionId;
use rustix::net::sockopt;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Longest frame in bytes; a descriptor has below 1 KiB.
const FRAME_MAX: usize = 1 << 16;

/// First frame of who dials.
#[derive(Debug, Serialize, Deserialize)]
struct MoriHello {
    who: MoriPlaneIdentity,
    fence_key: u64,
    /// Incarnation that is meant.
    to: u64,
}

/// What the side that dials says.
#[derive(Debug, Serialize, Deserialize)]
enum MoriDiallerMessage {
    /// Asks for a region on behalf of a session.
    Enter { session: u32, name: MoriMemoryKey },
    /// Nothing of the sessions with a region is under way any more.
    Released { region: RegionId },
}

/// What the side that listens says.
#[derive(Debug, Serialize, Deserialize)]
enum MoriAcceptorMessage {
    /// The answer to [`MoriDiallerMessage::Enter`].
    Told { session: u32, grant: MoriGrantResult },
    /// End the sessions with a region and say when nothing of them is under way.
    Release { region: RegionId },
    /// End all sessions; the line is to be closed when nothing of them is under way any more.
    Leave,
}

/// Has a peer leave, or only one region.
pub(crate) fn ask_to_leave(socket: &TcpStream, region: Option<RegionId>) -> io::Result<()> {
    send(
        socket,
        &region
            .map_or(MoriAcceptorMessage::Leave, |region| MoriAcceptorMessage::Release { region }),
    )
}

fn send(mut socket: &TcpStream, value: &impl Serialize) -> io::Result<()> {
    let body = rmp_serde::to_vec(value).map_err(io::Error::other)?;
    let mut frame = (body.len() as u32).to_be_bytes().to_vec();
    frame.extend(body);
    socket.write_all(&frame)
}

fn receive<T: for<'a> Deserialize<'a>>(mut socket: &TcpStream) -> io::Result<T> {
    let mut len = [0; 4];
    socket.read_exact(&mut len)?;
    let len = u32::from_be_bytes(len) as usize;
    if len > FRAME_MAX {
        return Err(io::Error::other(format!("frame of {len} bytes")));
    }
    let mut body = vec![0; len];
    socket.read_exact(&mut body)?;
    rmp_serde::from_slice(&body).map_err(io::Error::other)
}

/// Has the kernel notice a host that is silent.
fn set_keepalive(socket: &TcpStream, dead: Duration) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let probe = (dead / 4).max(Duration::from_secs(1));
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, probe)?;
    sockopt::set_tcp_keepintvl(socket, probe)?;
    sockopt::set_tcp_keepcnt(socket, 3)?;
    sockopt::set_tcp_user_timeout(socket, dead.as_millis() as u32)?;
    Ok(())
}
