//! The socket of a TCP link that does not block, and what is encrypted over it.

use super::tls_records::{RECORD_EXTRA, RECORD_HEAD, RECORD_PLAIN_MAX, RecordKeys, RecordSender};
use crate::sys;
use rustix::io::Errno;
use rustls::Connection;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Bytes that are encrypted, or received to be decrypted, in one step.
const STEP: usize = 256 << 10;

/// A socket by which records go.
#[derive(Debug)]
pub(super) struct TcpLinkSocket {
    socket: OwnedFd,
    encrypted: Option<Box<EncryptedLink>>,
}

impl TcpLinkSocket {
    /// # Errors
    /// The handshake is not over.
    pub(super) fn new(
        socket: OwnedFd,
        tls: Option<Box<Connection>>,
    ) -> Result<TcpLinkSocket, rustls::Error> {
        let encrypted = tls.map(|tls| EncryptedLink::new(tls).map(Box::new)).transpose()?;
        Ok(TcpLinkSocket { socket, encrypted })
    }

    /// Sends from ranges of memory. What is encrypted counts as sent, and is sent by
    /// [`TcpLinkSocket::flush`] where the socket takes no more.
    ///
    /// # Safety
    /// The ranges are memory that is mapped; somebody may write it meanwhile.
    pub(super) unsafe fn send_ranges(&mut self, ranges: &[libc::iovec]) -> Result<u64, Errno> {
        match &mut self.encrypted {
            None => sys::send_ranges(self.socket.as_fd(), ranges),
            // SAFETY: The caller promises it.
            Some(link) => unsafe { link.send_ranges(self.socket.as_fd(), ranges) },
        }
    }

    /// Receives into ranges of memory; 0 where the peer closed.
    ///
    /// # Errors
    /// `BADMSG` for what the peer did not encrypt.
    ///
    /// # Safety
    /// The ranges are memory that is mapped, may be written, and that nobody has a reference to.
    pub(super) unsafe fn receive_ranges(&mut self, ranges: &[libc::iovec]) -> Result<u64, Errno> {
        match &mut self.encrypted {
            // SAFETY: The caller promises it.
            None => unsafe { sys::receive_ranges(self.socket.as_fd(), ranges) },
            // SAFETY: As above.
            Some(link) => unsafe { link.receive_ranges(self.socket.as_fd(), ranges) },
        }
    }

    /// Bytes that one call takes at most.
    pub(super) fn step(&self) -> u64 {
        if self.encrypted.is_some() { STEP as u64 } else { u64::MAX }
    }

    /// True if there is something encrypted that was not sent.
    pub(super) fn is_unsent(&self) -> bool {
        self.encrypted.as_ref().is_some_and(|link| link.sent < link.out.len())
    }

    /// Sends what was encrypted.
    pub(super) fn flush(&mut self) -> Result<(), Errno> {
        match &mut self.encrypted {
            None => Ok(()),
            Some(link) => link.flush(self.socket.as_fd()),
        }
    }
}

impl AsFd for TcpLinkSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for TcpLinkSocket {
    fn drop(&mut self) {
        // Only so does the peer believe that it was this side that closed.
        if let Some(link) = &mut self.encrypted {
            let _whatever_is_taken = link.close(self.socket.as_fd());
        }
    }
}

/// A connection whose handshake is over.
#[derive(Debug)]
struct EncryptedLink {
    /// What the keys are from.
    tls: Box<Connection>,
    sending: RecordKeys,
    receiving: RecordKeys,
    /// Records, of which so many bytes were sent.
    out: Vec<u8>,
    sent: usize,
    input: Vec<u8>,
    /// What of `input` was received and not opened, and what was opened and not taken.
    unopened: Range<usize>,
    opened: Range<usize>,
    /// The peer said that it closes.
    is_closed: bool,
}

impl EncryptedLink {
    fn new(tls: Box<Connection>) -> Result<EncryptedLink, rustls::Error> {
        let (own, other) = match &*tls {
            Connection::Client(_) => (RecordSender::Dialler, RecordSender::Acceptor),
            Connection::Server(_) => (RecordSender::Acceptor, RecordSender::Dialler),
        };
        Ok(EncryptedLink {
            sending: RecordKeys::new(&tls, own)?,
            receiving: RecordKeys::new(&tls, other)?,
            tls,
            out: Vec::new(),
            sent: 0,
            input: Vec::new(),
            unopened: 0..0,
            opened: 0..0,
            is_closed: false,
        })
    }

    fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        while self.sent < self.out.len() {
            let rest = &self.out[self.sent..];
            let rest = [sys::range(rest.as_ptr() as u64, rest.len() as u64)];
            self.sent += sys::send_ranges(socket, &rest)? as usize;
        }
        Ok(())
    }

    /// A record of nothing is the last one.
    fn close(&mut self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        self.flush(socket)?;
        (self.sent, self.out) = (0, vec![0; RECORD_HEAD]);
        self.sending.seal(&self.tls, &mut self.out, 0).map_err(|_| Errno::IO)?;
        self.flush(socket)
    }

    /// # Safety
    /// As for [`TcpLinkSocket::send_ranges`].
    unsafe fn send_ranges(
        &mut self,
        socket: BorrowedFd<'_>,
        ranges: &[libc::iovec],
    ) -> Result<u64, Errno> {
        self.flush(socket)?;
        self.out.clear();
        self.sent = 0;
        let wanted = ranges.iter().map(|range| range.iov_len).sum::<usize>().min(STEP);
        self.out.reserve(wanted + (wanted / RECORD_PLAIN_MAX + 1) * RECORD_EXTRA);
        let (mut taken, mut ranges) = (0, ranges.iter().copied());
        let mut range = ranges.next();
        while taken < STEP && range.is_some() {
            let (at, mut room) = (self.out.len(), RECORD_PLAIN_MAX);
            self.out.resize(at + RECORD_HEAD, 0);
            while room > 0
                && let Some(from) = &mut range
            {
                let len = from.iov_len.min(room);
                // SAFETY: The caller promises that it is mapped, and there is room: it was reserved.
                // Somebody may write there, so no reference to it is made.
                unsafe {
                    let end = self.out.as_mut_ptr().add(self.out.len());
                    std::ptr::copy_nonoverlapping(from.iov_base.cast::<u8>(), end, len);
                    self.out.set_len(self.out.len() + len);
                    from.iov_base = from.iov_base.byte_add(len);
                }
                from.iov_len -= len;
                (room, taken) = (room - len, taken + len);
                if from.iov_len == 0 {
                    range = ranges.next();
                }
            }
            if room == RECORD_PLAIN_MAX {
                // A record of nothing says something.
                self.out.truncate(at);
            } else {
                self.sending.seal(&self.tls, &mut self.out, at).map_err(|_| Errno::IO)?;
            }
        }
        match self.flush(socket) {
            Ok(()) | Err(Errno::AGAIN | Errno::INTR) => Ok(taken as u64),
            Err(why) => Err(why),
        }
    }

    /// # Safety
    /// As for [`TcpLinkSocket::receive_ranges`].
    unsafe fn receive_ranges(
        &mut self,
        socket: BorrowedFd<'_>,
        ranges: &[libc::iovec],
    ) -> Result<u64, Errno> {
        let mut received = 0;
        for range in ranges {
            let mut at = 0;
            while at < range.iov_len {
                if self.opened.is_empty() && !self.open(received > 0, socket)? {
                    return Ok(received);
                }
                let bytes = &self.input[self.opened.clone()];
                let len = bytes.len().min(range.iov_len - at);
                // SAFETY: The caller promises it of the range, and `at` is inside.
                unsafe {
                    let to = range.iov_base.cast::<u8>().add(at);
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, len);
                }
                self.opened.start += len;
                (received, at) = (received + len as u64, at + len);
            }
        }
        Ok(received)
    }

    /// Opens the next record, of what is there or else is received; false at the end, and where
    /// there is none and `some` were opened before.
    fn open(&mut self, some: bool, socket: BorrowedFd<'_>) -> Result<bool, Errno> {
        loop {
            if self.is_closed {
                return Ok(false);
            }
            let front = &mut self.input[self.unopened.clone()];
            let opened = self.receiving.open(&self.tls, front).map_err(|_| Errno::BADMSG)?;
            let Some((bytes, len)) = opened else {
                if some {
                    return Ok(false);
                }
                self.receive(socket)?;
                continue;
            };
            let start = self.unopened.start;
            self.opened = start + bytes.start..start + bytes.end;
            self.unopened.start += len;
            if !bytes.is_empty() {
                return Ok(true);
            }
            self.is_closed = true;
        }
    }

    fn receive(&mut self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        // A record that is there in part is shorter than this.
        self.input.resize(STEP, 0);
        self.input.copy_within(self.unopened.clone(), 0);
        self.unopened = 0..self.unopened.len();
        let room = &mut self.input[self.unopened.end..];
        let room = [sys::range(room.as_mut_ptr() as u64, room.len() as u64)];
        // SAFETY: A buffer of our own, which nothing else looks at meanwhile.
        match unsafe { sys::receive_ranges(socket, &room)? } {
            // An end that the peer does not vouch for says nothing of what it still does.
            0 => Err(Errno::CONNRESET),
            count => {
                self.unopened.end += count as usize;
                Ok(())
            }
        }
    }
}
