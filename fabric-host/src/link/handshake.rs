//! Greetings: blocking, each with a deadline.

use super::stream::{pack_control, unpack_control, words_of};
use super::{HostLinkKind, socket};
use crate::config::HostConfig;
use crate::proto::{CONTROL_MAX, HostControlMessage, HostRecord};
use kvferry_fabric_common::set_keepalive;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::RecvFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// A connection whose sides have not greeted each other yet.
pub(super) enum HandshakeSocket {
    Local(OwnedFd),
    /// Until when it has to be greeted.
    Tcp(TcpStream, Instant),
}

impl HandshakeSocket {
    /// A connection over which nothing is waited for longer than a greeting may take.
    pub(super) fn new(
        kind: HostLinkKind,
        socket: OwnedFd,
        (config, deadline): (&HostConfig, Instant),
    ) -> Result<Self> {
        Ok(match kind {
            HostLinkKind::Local => {
                for way in [Timeout::Recv, Timeout::Send] {
                    set_socket_timeout(&socket, way, Some(config.connect()))?;
                }
                HandshakeSocket::Local(socket)
            }
            HostLinkKind::Tcp => {
                let peer = TcpStream::from(socket);
                set_keepalive(&peer, config.dead_ms)?;
                HandshakeSocket::Tcp(peer, deadline)
            }
        })
    }

    pub(super) fn kind(&self) -> HostLinkKind {
        match self {
            HandshakeSocket::Local(_) => HostLinkKind::Local,
            HandshakeSocket::Tcp(..) => HostLinkKind::Tcp,
        }
    }

    /// Sends a message, locally with descriptors.
    pub(super) fn send(
        &mut self,
        message: &HostControlMessage,
        fds: &[BorrowedFd<'_>],
    ) -> Result<()> {
        match self {
            HandshakeSocket::Local(peer) => match socket::send(peer.as_fd(), message, fds) {
                Ok(_) => Ok(()),
                Err(_) => Err(Error::other("no answer to the hello")),
            },
            HandshakeSocket::Tcp(peer, deadline) => send(peer, message, *deadline),
        }
    }

    /// Receives a message, locally with descriptors.
    pub(super) fn receive(&mut self) -> Result<(HostControlMessage, Vec<OwnedFd>)> {
        match self {
            HandshakeSocket::Local(peer) => match socket::receive(peer.as_fd(), false) {
                Ok(Some(received)) => Ok(received),
                Ok(None) => Err(Error::other("no answer to the hello in time")),
                Err(_) => Err(Error::other("no answer to the hello")),
            },
            HandshakeSocket::Tcp(peer, deadline) => Ok((receive(peer, *deadline)?, Vec::new())),
        }
    }

    /// Takes what the other side says first, whatever it is.
    pub(super) fn discard(&mut self) {
        let _whatever = match self {
            HandshakeSocket::Local(peer) => {
                let flags = RecvFlags::TRUNC;
                rustix::net::recv(peer, &mut [0_u8; 1], flags).map(|_| ()).map_err(Error::from)
            }
            HandshakeSocket::Tcp(peer, deadline) => receive(peer, *deadline).map(|_| ()),
        };
    }

    /// From here on it belongs to a thread that does not wait for it.
    pub(super) fn unblock(self) -> Result<OwnedFd> {
        let socket = match self {
            HandshakeSocket::Local(peer) => peer,
            HandshakeSocket::Tcp(peer, _) => peer.into(),
        };
        fcntl_setfl(&socket, fcntl_getfl(&socket)? | OFlags::NONBLOCK)?;
        Ok(socket)
    }
}

fn left(deadline: Instant) -> Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

fn fill(peer: &mut TcpStream, mut into: &mut [u8], deadline: Instant) -> Result<()> {
    while !into.is_empty() {
        peer.set_read_timeout(Some(left(deadline)?))?;
        match peer.read(into) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => into = &mut into[count..],
            Err(why) if why.kind() == ErrorKind::Interrupted => {}
            Err(why) => return Err(why),
        }
    }
    Ok(())
}

/// Receives a control message by TCP.
pub(super) fn receive(peer: &mut TcpStream, deadline: Instant) -> Result<HostControlMessage> {
    let wrong = || Error::new(ErrorKind::InvalidData, "no greeting of a host plane");
    let mut len = [0; 8];
    fill(peer, &mut len, deadline)?;
    let len = u64::from_le_bytes(len);
    if len == 0 || len > 1 + CONTROL_MAX as u64 / 8 {
        return Err(wrong());
    }
    let mut bytes = vec![0; 8 * len as usize];
    fill(peer, &mut bytes, deadline)?;
    let words: Vec<u64> = words_of(&bytes).collect();
    match HostRecord::decode(&words) {
        Some((HostRecord::Control { bytes }, rest)) => {
            unpack_control(bytes, rest, false).ok_or_else(wrong)
        }
        _ => Err(wrong()),
    }
}

/// Sends a control message by TCP.
pub(super) fn send(
    peer: &mut TcpStream,
    message: &HostControlMessage,
    deadline: Instant,
) -> Result<()> {
    peer.set_write_timeout(Some(left(deadline)?))?;
    peer.write_all(&pack_control(message))
}
