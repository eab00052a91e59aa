//! Greetings: blocking, each with a deadline.

use super::stream::{unpack_control, words_of};
use super::tls_greeting::TcpGreeting;
use super::{HostLinkKind, socket};
use crate::config::HostConfig;
use crate::proto::{CONTROL_MAX, HostControlMessage, HostRecord};
use kvferry_fabric_common::set_keepalive;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::RecvFlags;
use rustix::net::sockopt::{
    Timeout, set_socket_recv_buffer_size, set_socket_send_buffer_size, set_socket_timeout,
};
use rustls::Connection;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// A connection whose sides have not greeted each other yet.
pub(super) enum HandshakeSocket {
    Local(OwnedFd),
    Tcp(TcpGreeting),
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
                bound_within_host(&peer)?;
                HandshakeSocket::Tcp(TcpGreeting::new(peer, deadline))
            }
        })
    }

    pub(super) fn kind(&self) -> HostLinkKind {
        match self {
            HandshakeSocket::Local(_) => HostLinkKind::Local,
            HandshakeSocket::Tcp(_) => HostLinkKind::Tcp,
        }
    }

    /// What only the two ends of an encrypted connection have in common.
    pub(super) fn binding(&self) -> Result<Option<[u8; 32]>> {
        match self {
            HandshakeSocket::Local(_) => Ok(None),
            HandshakeSocket::Tcp(peer) => peer.binding(),
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
            HandshakeSocket::Tcp(peer) => peer.send(message),
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
            HandshakeSocket::Tcp(peer) => Ok((peer.receive()?, Vec::new())),
        }
    }

    /// Takes what the other side says first, whatever it is.
    pub(super) fn discard(&mut self) {
        let _whatever = match self {
            HandshakeSocket::Local(peer) => {
                let flags = RecvFlags::TRUNC;
                rustix::net::recv(peer, &mut [0_u8; 1], flags).map(|_| ()).map_err(Error::from)
            }
            HandshakeSocket::Tcp(peer) => peer.discard(),
        };
    }

    /// Its socket, which belongs to a thread from here on that does not wait for it, and the TLS over
    /// it.
    pub(super) fn unblock(self) -> Result<(OwnedFd, Option<Box<Connection>>)> {
        let (socket, tls) = match self {
            HandshakeSocket::Local(peer) => (peer, None),
            HandshakeSocket::Tcp(peer) => peer.into_parts(),
        };
        fcntl_setfl(&socket, fcntl_getfl(&socket)? | OFlags::NONBLOCK)?;
        Ok((socket, tls))
    }
}

/// Bytes that the kernel keeps at each end of a connection within a host; it takes twice as many.
const WITHIN_HOST: usize = 1 << 20;

/// Keeps what is under way within a host in the caches of its cores: by itself the kernel lets as
/// much gather as long lines need, which goes to memory and back.
fn bound_within_host(peer: &TcpStream) -> Result<()> {
    if peer.peer_addr()?.ip() == peer.local_addr()?.ip() {
        set_socket_send_buffer_size(peer, WITHIN_HOST)?;
        set_socket_recv_buffer_size(peer, WITHIN_HOST)?;
    }
    Ok(())
}

/// A connection over which nothing is waited for after a deadline.
pub(super) struct TimedSocket<'a>(pub(super) &'a mut TcpStream, pub(super) Instant);

impl TimedSocket<'_> {
    fn left(&self) -> Result<Duration> {
        let left = self.1.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for TimedSocket<'_> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        self.0.set_read_timeout(Some(self.left()?))?;
        self.0.read(into)
    }
}

impl Write for TimedSocket<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.0.set_write_timeout(Some(self.left()?))?;
        self.0.write(bytes)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

fn fill(peer: &mut impl Read, into: &mut [u8]) -> Result<()> {
    peer.read_exact(into).map_err(|why| match why.kind() {
        ErrorKind::UnexpectedEof => why.kind().into(),
        _ => why,
    })
}

/// Reads a control message, and not a byte more.
pub(super) fn read_message(peer: &mut impl Read) -> Result<HostControlMessage> {
    let wrong = || Error::new(ErrorKind::InvalidData, "no greeting of a host plane");
    let mut len = [0; 8];
    fill(peer, &mut len)?;
    let len = u64::from_le_bytes(len);
    if len == 0 || len > 1 + CONTROL_MAX as u64 / 8 {
        return Err(wrong());
    }
    let mut bytes = vec![0; 8 * len as usize];
    fill(peer, &mut bytes)?;
    let words: Vec<u64> = words_of(&bytes).collect();
    match HostRecord::decode(&words) {
        Some((HostRecord::Control { bytes }, rest)) => {
            unpack_control(bytes, rest, false).ok_or_else(wrong)
        }
        _ => Err(wrong()),
    }
}
