//! The greeting of a TCP connection, over TLS where both sides encrypt. Which of the two is spoken
//! is told from its first bytes, so that a side of the other kind hears in plain why it is refused;
//! nobody goes on in plain because of that.

use super::handshake::{TimedSocket, read_message};
use super::stream::pack_control;
use super::tls_config::{LinkTls, channel_binding};
use crate::proto::HostControlMessage;
use rustls::Connection;
use std::fmt::Display;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::Instant;

/// Why a dialler that does not encrypt is refused.
const PLAIN_HELLO: &str = "tcp is encrypted here, and the hello is not: \
    set encrypt on both sides or on neither";

/// Why one that does is.
const TLS_HELLO: &str = "tcp is not encrypted here, and the hello is: \
    set encrypt on both sides or on neither";

/// Bytes that tell a handshake or an alert of TLS from a greeting: of the length of one, which is in
/// words and little-endian, the third is zero.
const FIRST: usize = 3;

/// Bytes ahead of those of a TLS record; the last two are their number.
const RECORD_HEAD: usize = 5;

fn tls_error(why: impl Display) -> Error {
    Error::other(format!("TLS: {why}"))
}

/// A TCP connection whose sides have not greeted each other yet.
pub(super) struct TcpGreeting {
    peer: TcpStream,
    /// Until when it has to be greeted.
    deadline: Instant,
    /// What was read to tell what is spoken, and is to be read again.
    first: Vec<u8>,
    tls: Option<Box<Connection>>,
}

impl TcpGreeting {
    pub(super) fn new(peer: TcpStream, deadline: Instant) -> TcpGreeting {
        TcpGreeting { peer, deadline, first: Vec::new(), tls: None }
    }

    /// Its socket, and the TLS over it.
    pub(super) fn into_parts(self) -> (OwnedFd, Option<Box<Connection>>) {
        (self.peer.into(), self.tls)
    }

    fn plain(&mut self) -> impl Read {
        let first = std::io::Cursor::new(std::mem::take(&mut self.first));
        first.chain(TimedSocket(&mut self.peer, self.deadline))
    }

    /// True if the other side speaks TLS.
    fn peek(&mut self) -> Result<bool> {
        let mut first = [0; FIRST];
        if self.first.is_empty() {
            TimedSocket(&mut self.peer, self.deadline).read_exact(&mut first)?;
            self.first = first.into();
        }
        Ok(matches!(*self.first, [0x15 | 0x16, 3, 1..=4]))
    }

    /// Shakes hands with who dialled, if this side encrypts.
    ///
    /// # Errors
    /// What to answer; nothing where the connection ended or says what it may not.
    pub(super) fn accept(
        &mut self,
        tls: Option<&LinkTls>,
    ) -> std::result::Result<(), Option<String>> {
        let is_tls = self.peek().map_err(|_| None)?;
        match tls {
            Some(tls) if is_tls => {
                let tls = tls.accept().map_err(|_| None)?;
                self.shake_hands(tls).map_err(|_| None)
            }
            None if !is_tls => Ok(()),
            Some(_) => Err(Some(PLAIN_HELLO.into())),
            None => Err(Some(TLS_HELLO.into())),
        }
    }

    /// Shakes hands with who was dialled.
    ///
    /// # Errors
    /// It speaks no TLS, or none that fits.
    pub(super) fn dial(&mut self, tls: &LinkTls) -> Result<()> {
        let mut tls = tls.dial().map_err(tls_error)?;
        let mut peer = TimedSocket(&mut self.peer, self.deadline);
        while tls.wants_write() {
            tls.write_tls(&mut peer)?;
        }
        let is_tls = self.peek().map_err(|why| match why.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => {
                Error::other("the peer closed in place of speaking TLS: does it have encrypt?")
            }
            _ => why,
        })?;
        if is_tls {
            return self.shake_hands(tls);
        }
        Err(Error::other(match read_message(&mut self.plain()) {
            Ok(HostControlMessage::Refuse { why, .. }) => format!("refused: {why}"),
            _ => "the peer answers TLS with something else: does it have encrypt?".into(),
        }))
    }

    fn shake_hands(&mut self, mut tls: Connection) -> Result<()> {
        // What was read already is the beginning of what there is.
        let mut first = &*std::mem::take(&mut self.first);
        while !first.is_empty() {
            tls.read_tls(&mut first)?;
        }
        let mut peer = TimedSocket(&mut self.peer, self.deadline);
        while tls.is_handshaking() {
            tls.complete_io(&mut peer).map_err(|why| match why.kind() {
                ErrorKind::InvalidData => tls_error(why),
                _ => why,
            })?;
        }
        while tls.wants_write() {
            tls.write_tls(&mut peer)?;
        }
        self.tls = Some(Box::new(tls));
        Ok(())
    }

    /// See [`channel_binding`]; none if it is not encrypted.
    pub(super) fn binding(&self) -> Result<Option<[u8; 32]>> {
        let tls = self.tls.as_deref();
        tls.map(channel_binding).transpose().map_err(tls_error)
    }

    pub(super) fn send(&mut self, message: &HostControlMessage) -> Result<()> {
        let bytes = pack_control(message);
        let mut peer = TimedSocket(&mut self.peer, self.deadline);
        let Some(tls) = &mut self.tls else { return peer.write_all(&bytes) };
        tls.writer().write_all(&bytes)?;
        while tls.wants_write() {
            tls.write_tls(&mut peer)?;
        }
        Ok(())
    }

    pub(super) fn receive(&mut self) -> Result<HostControlMessage> {
        let Some(tls) = &mut self.tls else { return read_message(&mut self.plain()) };
        read_message(&mut Decrypted { tls, peer: TimedSocket(&mut self.peer, self.deadline) })
    }

    /// Takes what the other side says first, whatever it is; no hands were shaken.
    pub(super) fn discard(&mut self) -> Result<()> {
        if !self.peek()? {
            return self.receive().map(|_| ());
        }
        let mut from = self.plain();
        let mut head = [0; RECORD_HEAD];
        from.read_exact(&mut head)?;
        let [.., high, low] = head;
        let left = u64::from(u16::from_be_bytes([high, low]));
        std::io::copy(&mut from.take(left), &mut std::io::sink()).map(|_| ())
    }
}

/// What a peer says over TLS.
struct Decrypted<'a> {
    tls: &'a mut Connection,
    peer: TimedSocket<'a>,
}

impl Read for Decrypted<'_> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        loop {
            match self.tls.reader().read(into) {
                Err(why) if why.kind() == ErrorKind::WouldBlock => {}
                other => return other,
            }
            self.tls.read_tls(&mut self.peer)?;
            self.tls.process_new_packets().map_err(tls_error)?;
        }
    }
}
