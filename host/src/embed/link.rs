//! The local socket, from the connector's side.

use super::proto::{FRAME_MAX, FromHost, Hello, ToHost, VERSION, Who};
use serde::Serialize;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Bytes of the length in front of a frame.
const HEAD: usize = 4;

/// A connection to the host. Nothing waits but [`Link::wait`] and a host that does not read.
#[derive(Debug)]
pub struct Link {
    stream: UnixStream,
    /// What came and is no whole frame yet.
    received: Vec<u8>,
    out: Vec<u8>,
}

impl Link {
    /// Says hello to the host at a path.
    ///
    /// # Errors
    /// Nobody listens there.
    pub fn connect(path: &Path, who: Who) -> io::Result<Link> {
        let stream = UnixStream::connect(path)?;
        let mut link = Link { stream, received: Vec::new(), out: Vec::new() };
        link.write(&Hello { version: VERSION, who })?;
        Ok(link)
    }

    /// Tells the host something.
    ///
    /// # Errors
    /// The host is gone.
    pub fn send(&mut self, message: &ToHost) -> io::Result<()> {
        self.write(message)
    }

    fn write(&mut self, message: &impl Serialize) -> io::Result<()> {
        self.out.clear();
        self.out.extend([0; HEAD]);
        rmp_serde::encode::write(&mut self.out, message).map_err(io::Error::other)?;
        let len = self.out.len() - HEAD;
        if len > FRAME_MAX {
            return Err(io::Error::other(format!("a message of {len} bytes")));
        }
        self.out[..HEAD].copy_from_slice(&(len as u32).to_be_bytes());
        self.stream.set_nonblocking(false)?;
        self.stream.write_all(&self.out)
    }

    /// What the host said since the last time.
    ///
    /// # Errors
    /// The host is gone; what it said before was taken.
    pub fn poll(&mut self, heard: &mut Vec<FromHost>) -> io::Result<()> {
        self.stream.set_nonblocking(true)?;
        self.read(heard)
    }

    /// The same, after waiting for something.
    ///
    /// # Errors
    /// The host is gone, or silent for longer than `patience`.
    pub fn wait(&mut self, patience: Duration, heard: &mut Vec<FromHost>) -> io::Result<()> {
        let end = Instant::now() + patience;
        self.stream.set_nonblocking(false)?;
        while heard.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(Some(left))?;
            self.read(heard)?;
        }
        Ok(())
    }

    fn read(&mut self, heard: &mut Vec<FromHost>) -> io::Result<()> {
        let mut chunk = [0; 65_536];
        loop {
            let read = match self.stream.read(&mut chunk) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => read,
                Err(why) if why.kind() == ErrorKind::Interrupted => continue,
                Err(why) if matches!(why.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Ok(());
                }
                Err(why) => return Err(why),
            };
            self.received.extend_from_slice(&chunk[..read]);
            self.frames(heard)?;
            if read < chunk.len() {
                return Ok(());
            }
        }
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
            heard.push(rmp_serde::from_slice(body).map_err(io::Error::other)?);
            at += HEAD + len;
        }
        self.received.drain(..at);
        Ok(())
    }
}
