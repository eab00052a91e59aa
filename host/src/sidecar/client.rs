//! The local socket, from the connector's side.

use super::codec::{MessageDecoder, encode_into};
use super::ownership;
use super::proto::{ClientIdentity, ConnectorHello, FRAME_MAX, FromHost, ToHost, VersionRange};
use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, Shutdown, recv, recvmsg, shutdown,
};
use serde::Serialize;
use std::io::{self, ErrorKind, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Bytes of the length in front of a frame.
const HEAD: usize = 4;

/// Bytes that are read at a time.
const CHUNK: usize = 1 << 16;

/// A connection to the host. Nothing waits but [`SidecarClient::wait`] and a host that does not
/// read.
#[derive(Debug)]
pub struct SidecarClient {
    stream: UnixStream,
    /// What came and is no whole frame yet.
    received: Vec<u8>,
    out: Vec<u8>,
    chunk: Box<[u8]>,
    reader: MessageDecoder,
    /// Oldest version that has all of the hello, and what earlier ones lack.
    needs: (u16, &'static str),
    /// A descriptor is to come with one of the first messages.
    awaits_descriptor: bool,
    descriptor: Option<OwnedFd>,
}

impl AsFd for SidecarClient {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl SidecarClient {
    /// Says hello to the host at a path.
    ///
    /// # Errors
    /// Nobody listens there, or somebody else (`PermissionDenied`), who was told nothing.
    pub fn connect(path: &Path, who: ClientIdentity) -> io::Result<SidecarClient> {
        let stream = ownership::connect(path)?;
        let (received, out) = (Vec::new(), Vec::new());
        let reader = MessageDecoder::new(VersionRange::OWN);
        let (chunk, needs) = (vec![0; CHUNK].into(), who.needs());
        let awaits_descriptor = matches!(who, ClientIdentity::Stage { .. });
        let descriptor = None;
        let mut link = SidecarClient {
            stream,
            received,
            out,
            chunk,
            reader,
            needs,
            awaits_descriptor,
            descriptor,
        };
        link.frame(&ConnectorHello::new(who))?;
        link.stream.write_all(&link.out)?;
        Ok(link)
    }

    /// Tells the host something.
    ///
    /// # Errors
    /// The host is gone.
    pub fn send(&mut self, message: &ToHost) -> io::Result<()> {
        self.send_all(std::slice::from_ref(message))
    }

    /// Tells the host several things at once, in order.
    ///
    /// # Errors
    /// The host is gone.
    pub fn send_all(&mut self, messages: &[ToHost]) -> io::Result<()> {
        self.out.clear();
        messages.iter().try_for_each(|message| self.frame(message))?;
        self.stream.write_all(&self.out)
    }

    /// Appends a message to what is to be written.
    fn frame(&mut self, message: &impl Serialize) -> io::Result<()> {
        let start = self.out.len();
        self.out.extend([0; HEAD]);
        encode_into(message, &mut self.out)?;
        let len = self.out.len() - start - HEAD;
        if len > FRAME_MAX {
            return Err(io::Error::other(format!("a message of {len} bytes")));
        }
        self.out[start..start + HEAD].copy_from_slice(&(len as u32).to_be_bytes());
        Ok(())
    }

    /// Has what is said fail when the host has read nothing for so long; else it waits for ever. After
    /// that nothing can be said any more.
    ///
    /// # Errors
    /// A time of zero.
    pub fn limit_writes(&self, patience: Duration) -> io::Result<()> {
        self.stream.set_write_timeout(Some(patience))
    }

    /// The descriptor that came with [`FromHost::Pool`]; once.
    pub fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptor.take()
    }

    /// Ends the connection, for the host and for who waits for its end.
    pub fn close(&self) {
        // A host that is gone has ended it.
        let _ = shutdown(&self.stream, Shutdown::Both);
    }

    /// What the host said since the last time.
    ///
    /// # Errors
    /// The host is gone; what it said before was taken.
    pub fn poll(&mut self, heard: &mut Vec<FromHost>) -> io::Result<()> {
        self.read(heard)
    }

    /// The same, after waiting for something.
    ///
    /// # Errors
    /// The host is gone, or silent for longer than `patience`.
    pub fn wait(&mut self, patience: Duration, heard: &mut Vec<FromHost>) -> io::Result<()> {
        let end = Instant::now() + patience;
        while heard.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            // A time of the socket's own would be rounded up to ticks of the kernel, of up to 10 ms.
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], Some(&left)) {
                Ok(_) | Err(Errno::INTR) => self.read(heard)?,
                Err(why) => return Err(why.into()),
            }
        }
        Ok(())
    }

    fn read(&mut self, heard: &mut Vec<FromHost>) -> io::Result<()> {
        loop {
            let read = match self.receive() {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => read,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(()),
                Err(why) => return Err(why.into()),
            };
            self.received.extend_from_slice(&self.chunk[..read]);
            self.frames(heard)?;
            if read < self.chunk.len() {
                return Ok(());
            }
        }
    }

    /// Bytes that are there, into the chunk; 0 at the end.
    fn receive(&mut self) -> Result<usize, Errno> {
        if !self.awaits_descriptor {
            return Ok(recv(&self.stream, &mut self.chunk[..], RecvFlags::DONTWAIT)?.0);
        }
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut with = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let into = &mut [IoSliceMut::new(&mut self.chunk)];
        let read = recvmsg(&self.stream, into, &mut with, flags)?.bytes;
        for message in with.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptor = descriptors.last();
                self.awaits_descriptor = self.descriptor.is_none();
            }
        }
        Ok(read)
    }

    /// The host says which versions it speaks.
    fn learn(&mut self, versions: VersionRange) -> io::Result<()> {
        self.reader.learn(versions);
        let agreed = versions.agree("the host").map_err(io::Error::other)?;
        let (oldest, lacks) = self.needs;
        if agreed >= oldest {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "the host speaks version {agreed} of the local protocol, which has no {lacks} install one \
             version of kvferry for both"
        )))
    }

    /// Takes the whole frames.
    fn frames(&mut self, heard: &mut Vec<FromHost>) -> io::Result<()> {
        let mut at = 0;
        while let Some(head) = self.received[at..].first_chunk::<HEAD>() {
            let len = u32::from_be_bytes(*head) as usize;
            if len > FRAME_MAX {
                return Err(io::Error::other(format!("a frame of {len} bytes")));
            }
            let Some(body) = self.received.get(at + HEAD..at + HEAD + len) else { break };
            let message = self.reader.read(body)?;
            if let Some(FromHost::Ready { versions, .. } | FromHost::Pool { versions, .. }) =
                &message
            {
                self.learn(*versions)?;
            }
            heard.extend(message);
            at += HEAD + len;
        }
        self.received.drain(..at);
        Ok(())
    }
}
