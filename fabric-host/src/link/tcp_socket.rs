//! The socket of a TCP link that does not block, and the TLS over it.

use super::handshake::GreetedSocket;
use crate::sys;
use rustix::io::Errno;
use rustls::Connection;
use std::io::{BufRead, Error, ErrorKind, IoSlice, Result as IoResult, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Bytes that are encrypted, or received to be decrypted, in one step.
const STEP: usize = 256 << 10;

/// A socket by which records go.
#[derive(Debug)]
pub(super) struct TcpLinkSocket {
    socket: OwnedFd,
    tls: Option<Box<EncryptedLink>>,
}

impl TcpLinkSocket {
    pub(super) fn new((socket, tls): GreetedSocket) -> TcpLinkSocket {
        let tls = tls.map(|mut tls| {
            // There is never more than one step.
            tls.set_buffer_limit(None);
            Box::new(EncryptedLink { tls, plain: Vec::new(), input: Vec::new(), read: 0..0 })
        });
        TcpLinkSocket { socket, tls }
    }

    /// Sends from ranges of memory. What is encrypted counts as sent, and is sent by
    /// [`TcpLinkSocket::flush`] where the socket takes no more.
    pub(super) fn send_ranges(&mut self, ranges: &[libc::iovec]) -> Result<u64, Errno> {
        match &mut self.tls {
            None => sys::send_ranges(self.socket.as_fd(), ranges),
            Some(tls) => tls.send_ranges(self.socket.as_fd(), ranges),
        }
    }

    /// Receives into ranges of memory; 0 where the peer closed.
    ///
    /// # Errors
    /// `BADMSG` for what the peer did not encrypt.
    pub(super) fn receive_ranges(&mut self, ranges: &[libc::iovec]) -> Result<u64, Errno> {
        match &mut self.tls {
            None => sys::receive_ranges(self.socket.as_fd(), ranges),
            Some(tls) => tls.receive_ranges(self.socket.as_fd(), ranges),
        }
    }

    /// True if there is something encrypted that was not sent.
    pub(super) fn is_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.tls.wants_write())
    }

    /// Sends what was encrypted.
    pub(super) fn flush(&mut self) -> Result<(), Errno> {
        match &mut self.tls {
            None => Ok(()),
            Some(tls) => tls.flush(self.socket.as_fd()),
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
        if let Some(tls) = &mut self.tls {
            tls.tls.send_close_notify();
            let _whatever_is_taken = tls.flush(self.socket.as_fd());
        }
    }
}

#[derive(Debug)]
struct EncryptedLink {
    tls: Box<Connection>,
    plain: Vec<u8>,
    input: Vec<u8>,
    /// What of `input` TLS has not taken.
    read: std::ops::Range<usize>,
}

impl EncryptedLink {
    fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        while self.tls.wants_write() {
            self.tls.write_tls(&mut PollingSocket(socket)).map_err(errno)?;
        }
        Ok(())
    }

    fn send_ranges(
        &mut self,
        socket: BorrowedFd<'_>,
        ranges: &[libc::iovec],
    ) -> Result<u64, Errno> {
        self.flush(socket)?;
        self.plain.clear();
        for range in ranges {
            let len = range.iov_len.min(STEP - self.plain.len());
            let from = range.iov_base.cast::<u8>();
            self.plain.reserve(len);
            // SAFETY: The range is of memory that its holder keeps mapped, or of a buffer of the
            // caller, and room for it was made. Somebody may write there: no reference is made.
            unsafe {
                std::ptr::copy(from, self.plain.as_mut_ptr().add(self.plain.len()), len);
                self.plain.set_len(self.plain.len() + len);
            }
        }
        self.tls.writer().write_all(&self.plain).map_err(errno)?;
        match self.flush(socket) {
            Ok(()) | Err(Errno::AGAIN) => Ok(self.plain.len() as u64),
            Err(why) => Err(why),
        }
    }

    fn receive_ranges(
        &mut self,
        socket: BorrowedFd<'_>,
        ranges: &[libc::iovec],
    ) -> Result<u64, Errno> {
        let (mut received, mut at) = (0, 0);
        let mut ranges = ranges.iter().filter(|range| range.iov_len > 0);
        let Some(mut range) = ranges.next() else { return Ok(0) };
        loop {
            match self.tls.reader().fill_buf() {
                Ok([]) => return Ok(received),
                Ok(bytes) => {
                    let len = bytes.len().min(range.iov_len - at);
                    // SAFETY: As where it is sent from, and `at` is inside of the range.
                    unsafe {
                        let to = range.iov_base.cast::<u8>().add(at);
                        std::ptr::copy(bytes.as_ptr(), to, len);
                    }
                    self.tls.reader().consume(len);
                    (received, at) = (received + len as u64, at + len);
                    if at == range.iov_len {
                        let Some(next) = ranges.next() else { return Ok(received) };
                        (range, at) = (next, 0);
                    }
                }
                Err(_) => match self.fill(socket) {
                    Ok(()) => {}
                    // It is said again.
                    Err(_) if received > 0 => return Ok(received),
                    Err(why) => return Err(why),
                },
            }
        }
    }

    /// Has TLS take some of what is there.
    fn fill(&mut self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        if self.read.is_empty() {
            self.input.resize(STEP, 0);
            let into = [sys::range(self.input.as_mut_ptr() as u64, STEP as u64)];
            self.read = match sys::receive_ranges(socket, &into)? {
                // An end that TLS does not vouch for says nothing of what the peer still does.
                0 => return Err(Errno::CONNRESET),
                count => 0..count as usize,
            };
        }
        let taken = self.tls.read_tls(&mut &self.input[self.read.clone()]);
        self.read.start += taken.map_err(|_| Errno::BADMSG)?;
        self.tls.process_new_packets().map(|_| ()).map_err(|_| Errno::BADMSG)
    }
}

fn errno(why: Error) -> Errno {
    match why.kind() {
        ErrorKind::WouldBlock => Errno::AGAIN,
        ErrorKind::Interrupted => Errno::INTR,
        _ => Errno::IO,
    }
}

/// What TLS writes to.
struct PollingSocket<'a>(BorrowedFd<'a>);

impl Write for PollingSocket<'_> {
    fn write(&mut self, bytes: &[u8]) -> IoResult<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> IoResult<usize> {
        let range = |bytes: &IoSlice<'_>| sys::range(bytes.as_ptr() as u64, bytes.len() as u64);
        let ranges: Vec<_> = bytes.iter().map(range).collect();
        Ok(sys::send_ranges(self.0, &ranges)? as usize)
    }

    fn flush(&mut self) -> IoResult<()> {
        Ok(())
    }
}
