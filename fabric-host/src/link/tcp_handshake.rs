//! Greetings by TCP: blocking, each with a deadline.

use super::stream::{pack_control, unpack_control};
use crate::proto::{CONTROL_MAX, HostControlMessage, HostRecord};
use rustix::net::sockopt;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// A host that is silent for so many milliseconds is dead; records are not held back.
pub(super) fn set_keepalive(peer: &TcpStream, dead_ms: u32) -> Result<()> {
    let quarter = Duration::from_secs((u64::from(dead_ms) / 4_000).max(1));
    peer.set_nodelay(true)?;
    sockopt::set_socket_keepalive(peer, true)?;
    sockopt::set_tcp_keepidle(peer, quarter)?;
    sockopt::set_tcp_keepintvl(peer, quarter)?;
    sockopt::set_tcp_keepcnt(peer, 3)?;
    sockopt::set_tcp_user_timeout(peer, dead_ms)?;
    Ok(())
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

/// Receives a control message.
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
    let words: Vec<u64> =
        bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    match HostRecord::decode(&words) {
        Some((HostRecord::Control { bytes }, rest)) => {
            unpack_control(bytes, rest, false).ok_or_else(wrong)
        }
        _ => Err(wrong()),
    }
}

/// Sends a control message.
pub(super) fn send(
    peer: &mut TcpStream,
    message: &HostControlMessage,
    deadline: Instant,
) -> Result<()> {
    peer.set_write_timeout(Some(left(deadline)?))?;
    peer.write_all(&pack_control(message))
}
