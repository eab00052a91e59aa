//! The acceptor: where peers show their fence key and are given the descriptors of regions. MoRI
//! itself lets in whoever knows a number, and does not tell of a peer's end; the line to its
//! acceptor does.

mod acceptor;
mod outbound;

pub(crate) use acceptor::listen;
pub(crate) use outbound::{MoriDialRequest, MoriGrantResult, MoriLinkEvent, MoriOutboundLink};

use crate::address::MoriMemoryKey;
use kvferry_engine::fabric::RegionId;
use kvferry_fabric_common::PlaneIdentity;
use kvferry_trust::{SecretAnswer, SecretConfirmation, SecretOffer};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

/// Longest frame in bytes; a descriptor has below 1 KiB.
const FRAME_MAX: usize = 1 << 16;

/// What a peer is told of a region: MoRI's descriptors of engine and memory, and which region that
/// is to its owner.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MoriRegionGrant {
    pub(crate) region: RegionId,
    pub(crate) engine: Arc<[u8]>,
    pub(crate) memory: Arc<[u8]>,
}

/// First frame of who dials.
#[derive(Debug, Serialize, Deserialize)]
struct MoriHello {
    who: PlaneIdentity,
    fence_key: u64,
    /// Incarnation that is meant.
    to: u64,
    /// From who has the fleet's secret: it is answered by [`MoriAcceptorMessage::Prove`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    offer: Option<SecretOffer>,
}

impl MoriHello {
    /// What both sides prove.
    fn said(&self) -> Vec<u8> {
        let MoriHello { who, fence_key, to, offer: _ } = self;
        rmp_serde::to_vec(&(who, fence_key, to)).expect("plain data always encodes")
    }
}

/// What the proof of the fleet's secret is for.
const PURPOSE: &str = "MoRI data plane";

/// What the side that dials says.
#[derive(Debug, Serialize, Deserialize)]
enum MoriDiallerMessage {
    /// Asks for a region on behalf of a session.
    Enter { session: u32, name: MoriMemoryKey },
    /// Nothing of the sessions with a region is under way any more.
    Released { region: RegionId },
    /// The proof of who said hello, before anything else.
    Proven(SecretConfirmation),
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
    /// The proof of who was said hello to.
    Prove(SecretAnswer),
    /// The dialler is not let in.
    Refused { why: String },
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
