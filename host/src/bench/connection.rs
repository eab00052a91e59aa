//! The connection of two sides, and what they tell each other: one JSON value per line.

use super::batch::BatchShape;
use crate::process::CommandError;
use kvferry_engine::fabric::{Address, RegionDesc};
use rustix::net::sockopt;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread::{self, Thread};
use std::time::Duration;

/// Bytes of a line at most; descriptors of planes have below 8 KiB.
const LINE_MAX: u64 = 1 << 20;

/// The version of this program, which both sides have.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What each side says first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct BenchHello {
    pub(super) kvferry_bench: String,
    /// `host`, `mori-rdma` or `mori-xgmi`.
    pub(super) backend: String,
    pub(super) address: Address,
    pub(super) region: RegionDesc,
    /// Bytes of the region.
    pub(super) len: u64,
    /// It is memory of the host.
    pub(super) of_host: bool,
    /// Under which the sides connect; chosen by the one that measures.
    #[serde(rename = "pass")]
    pub(super) fence_key: u64,
}

impl BenchHello {
    pub(super) fn version() -> String {
        VERSION.into()
    }

    /// Reads what the other side said.
    ///
    /// # Errors
    /// Why the two cannot measure together, and what to do.
    pub(super) fn of_other(line: &str, our_backend: &str) -> Result<BenchHello, String> {
        let value: Value = serde_json::from_str(line).unwrap_or_default();
        // Before all else: other versions may say other things.
        let Some(version) = value["kvferry_bench"].as_str() else {
            return Err("is no `kvferry bench`".into());
        };
        if version != VERSION {
            return Err(format!(
                "is kvferry {version} and this side {VERSION}: run the same on both"
            ));
        }
        let hello = BenchHello::deserialize(&value)
            .map_err(|why| format!("says what is unknown: {why}"))?;
        let theirs = &hello.backend;
        match theirs == our_backend {
            true => Ok(hello),
            false => Err(format!(
                "moves bytes by {theirs} and this side by {our_backend}: give both the same --fabric and --backend"
            )),
        }
    }
}

/// What the side that measures asks for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum BenchRequest {
    /// Fill the remote ranges of the first batch, each with the pattern of its own place.
    Fill(BatchShape, u64),
    /// Whether these ranges have the pattern of the local ranges' places.
    Compare(BatchShape, u64),
}

/// What the other one says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum BenchResponse {
    Done,
    /// The first byte that is wrong.
    Wrong(u64),
    Failed(String),
}

/// One end. A thread reads, and wakes the thread that made the line.
#[derive(Debug)]
pub(super) struct BenchConnection {
    stream: TcpStream,
    received: Receiver<io::Result<String>>,
    is_over: Arc<AtomicBool>,
    pub(super) peer: SocketAddr,
}

impl BenchConnection {
    pub(super) fn new(stream: TcpStream) -> io::Result<BenchConnection> {
        stream.set_nodelay(true)?;
        keep_alive(&stream)?;
        let peer = stream.peer_addr()?;
        let is_over = Arc::new(AtomicBool::new(false));
        // A peer that talks on and on waits.
        let (tell, heard) = mpsc::sync_channel(4);
        let reader = LineReader { tell, is_over: is_over.clone(), owner: thread::current() };
        let from = stream.try_clone()?;
        thread::Builder::new().name("bench-line".into()).spawn(move || reader.run(from))?;
        Ok(BenchConnection { stream, received: heard, is_over, peer })
    }

    /// # Errors
    /// The connection is over.
    pub(super) fn send(&self, what: &impl Serialize) -> Result<(), CommandError> {
        let mut line = serde_json::to_vec(what).map_err(io::Error::other)?;
        line.push(b'\n');
        (&self.stream).write_all(&line).map_err(|why| self.ended(&why.to_string()))
    }

    /// The next line, if there is one.
    ///
    /// # Errors
    /// The connection is over.
    pub(super) fn try_recv(&self) -> Result<Option<String>, CommandError> {
        match self.received.try_recv() {
            Ok(Ok(line)) => Ok(Some(line)),
            Ok(Err(why)) => Err(self.ended(&why.to_string())),
            Err(mpsc::TryRecvError::Empty) => Ok(None),
            Err(mpsc::TryRecvError::Disconnected) => Err(self.ended("it is closed")),
        }
    }

    /// # Errors
    /// The connection is over, whatever is still to be read.
    pub(super) fn check(&self) -> Result<(), CommandError> {
        match self.is_over.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(self.ended("it is closed")),
        }
    }

    fn ended(&self, why: &str) -> CommandError {
        CommandError::Input(format!(
            "the other side, {}, has ended its connection ({why})",
            self.peer
        ))
    }
}

impl Drop for BenchConnection {
    fn drop(&mut self) {
        // Ends the thread; the other side may have gone first.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// A host that is cut off says nothing any more, and nothing is said for as long as rows take.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(5))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5))?;
    Ok(sockopt::set_tcp_keepcnt(stream, 3)?)
}

struct LineReader {
    tell: SyncSender<io::Result<String>>,
    is_over: Arc<AtomicBool>,
    owner: Thread,
}

impl LineReader {
    fn run(self, stream: TcpStream) {
        let mut reader = BufReader::new(stream);
        loop {
            let mut line = String::new();
            let read = reader.by_ref().take(LINE_MAX).read_line(&mut line);
            let heard = match read {
                Ok(0) => break,
                Ok(_) if line.ends_with('\n') => Ok(line),
                Ok(_) => Err(io::Error::other("a line that does not end")),
                Err(why) => Err(why),
            };
            let is_last = heard.is_err();
            // The owner may be gone.
            let taken = self.tell.send(heard);
            self.owner.unpark();
            if is_last || taken.is_err() {
                break;
            }
        }
        self.is_over.store(true, Ordering::Release);
        drop(self.tell);
        self.owner.unpark();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Value {
        let address = Address([1].as_slice().into());
        let region = RegionDesc([2].as_slice().into());
        let (kvferry_bench, backend) = (BenchHello::version(), "host".into());
        let hello = BenchHello {
            kvferry_bench,
            backend,
            address,
            region,
            len: 3,
            of_host: true,
            fence_key: 4,
        };
        serde_json::to_value(hello).expect("it is written")
    }

    #[test]
    fn others_are_told_from_ours() {
        assert!(BenchHello::of_other(&hello().to_string(), "host").is_ok());
        let with = |key: &str, value: Value| {
            let mut hello = hello();
            hello[key] = value;
            BenchHello::of_other(&hello.to_string(), "host").expect_err(key)
        };
        assert!(with("kvferry_bench", "0.0.9".into()).contains("is kvferry 0.0.9"));
        assert!(with("kvferry_bench", Value::Null).contains("is no `kvferry bench`"));
        assert!(with("backend", "mori-rdma".into()).contains("by mori-rdma and this side by host"));
        assert!(with("address", "x".into()).contains("says what is unknown"));
        assert!(BenchHello::of_other("GET / HTTP/1.1", "host").is_err());
    }
}
