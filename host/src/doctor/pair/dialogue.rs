//! What two doctors tell each other: one JSON value per line, each of which is answered before the
//! next one.

use super::interface::NetworkInterface;
use kvferry_trust::{SecretAnswer, SecretConfirmation, SecretOffer};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Bytes of a line at most.
const LINE_MAX: usize = 64 << 10;

/// Bytes that are sent in one go where it is tried whether large segments arrive: some hundred of
/// those of jumbo frames.
pub(super) const BULK: usize = 1 << 20;

/// How long an answer may take that needs no work.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// Ports that are tried for one side at most.
pub(super) const PORTS_MAX: usize = 8;

pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What each side says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct DoctorHello {
    /// Its version.
    pub(super) kvferry_doctor: String,
    /// The address that its planes tell others.
    pub(super) host_ip: String,
    /// Planes of equal node share memory.
    pub(super) node: String,
    /// That the connection goes by, if the kernel tells.
    pub(super) interface: Option<NetworkInterface>,
    /// `host`, `mori-rdma`.
    pub(super) backend: String,
    /// What it listens at, or somebody of its machine, by name.
    pub(super) ports: Vec<NamedPort>,
}

/// A port of the host that says it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NamedPort {
    pub(super) name: String,
    pub(super) port: u16,
}

/// The first line of the one that connects.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct DoctorGreeting {
    pub(super) hello: DoctorHello,
    /// If it has a secret.
    pub(super) offer: Option<SecretOffer>,
}

/// The answer to that.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct DoctorWelcome {
    pub(super) hello: DoctorHello,
    pub(super) proof: DoctorProof,
}

/// What the one that waits says of the other's secret.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum DoctorProof {
    /// Neither has one.
    None,
    Answer(SecretAnswer),
    /// Why all else is refused.
    Refused(String),
}

/// What the one that connects asks for.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum DoctorRequest {
    Confirm(SecretConfirmation),
    /// Nanoseconds since 1970 by its clock.
    Clock,
    /// Connect to each of these ports of mine.
    Reach(Vec<NamedPort>),
    /// Take [`BULK`] bytes that follow, and say so.
    Take,
    /// Send [`BULK`] bytes after the answer.
    Give,
    /// Start a process that the bytes of a rate go to and come from.
    Bench(DataRoute),
    Done,
}

/// Which way the bytes of a rate are to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum DataRoute {
    SharedMemory,
    Tcp,
    /// By the backend of MoRI that both have.
    Mori,
}

/// The answers to [`DoctorRequest`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum DoctorResponse {
    Confirmed(Result<(), String>),
    Clock(u64),
    Reached(Result<Vec<PortTrial>, String>),
    Took,
    Given,
    /// The address that it waits at, or why there is none.
    Bench(Result<String, String>),
    Done,
}

/// What came of a connection to a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PortTrial {
    pub(super) name: String,
    pub(super) address: String,
    pub(super) failure: Option<ConnectFailure>,
}

/// Why there is no connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum ConnectFailure {
    /// The host answers, and nobody listens.
    Refused,
    /// Nothing answers.
    Silent,
    Other(String),
}

impl From<io::Error> for ConnectFailure {
    fn from(why: io::Error) -> ConnectFailure {
        match why.kind() {
            ErrorKind::ConnectionRefused => ConnectFailure::Refused,
            ErrorKind::TimedOut | ErrorKind::WouldBlock => ConnectFailure::Silent,
            _ => ConnectFailure::Other(why.to_string()),
        }
    }
}

/// What both sides prove the secret over.
pub(super) const PURPOSE: &str = "doctor";

/// All that was said before the proof.
pub(super) fn proven(greeting: &DoctorHello, welcome: &DoctorHello) -> Vec<u8> {
    serde_json::to_vec(&(greeting, welcome)).expect("texts and numbers")
}

/// An end of the connection.
pub(super) struct DoctorConnection {
    reader: BufReader<TcpStream>,
}

impl DoctorConnection {
    /// # Errors
    /// The connection takes no options.
    pub(super) fn new(stream: TcpStream) -> io::Result<DoctorConnection> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(DoctorConnection { reader: BufReader::new(stream) })
    }

    pub(super) fn stream(&self) -> &TcpStream {
        self.reader.get_ref()
    }

    /// # Errors
    /// It does not go out.
    pub(super) fn send(&mut self, what: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(what).map_err(io::Error::other)?;
        line.push(b'\n');
        self.reader.get_mut().write_all(&line)
    }

    /// The next line, within this time, however it comes.
    ///
    /// # Errors
    /// It does not come, or is another thing.
    pub(super) fn recv<T: DeserializeOwned>(&mut self, within: Duration) -> io::Result<T> {
        let until = Instant::now() + within;
        let mut line = Vec::new();
        while !line.ends_with(b"\n") {
            // A time of zero would be none.
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
            self.stream().set_read_timeout(Some(left))?;
            let part = self.reader.fill_buf().map_err(|why| silent(why, within))?;
            if part.is_empty() {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            let len = part.iter().position(|byte| *byte == b'\n').map_or(part.len(), |at| at + 1);
            line.extend_from_slice(&part[..len]);
            self.reader.consume(len);
            if line.len() > LINE_MAX {
                return Err(io::Error::other("a line that does not end"));
            }
        }
        Ok(serde_json::from_slice(&line)?)
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// The other side is gone, or says another thing.
    pub(super) fn ask(
        &mut self,
        what: &DoctorRequest,
        within: Duration,
    ) -> io::Result<DoctorResponse> {
        self.send(what)?;
        self.recv(within)
    }

    /// Sends [`BULK`] bytes.
    ///
    /// # Errors
    /// They do not go out.
    pub(super) fn send_bulk(&mut self) -> io::Result<()> {
        let sent = self.reader.get_mut().write_all(&vec![0x5a; BULK]);
        sent.map_err(|why| silent(why, PATIENCE))
    }

    /// Takes [`BULK`] bytes.
    ///
    /// # Errors
    /// They do not come.
    pub(super) fn recv_bulk(&mut self) -> io::Result<()> {
        self.stream().set_read_timeout(Some(PATIENCE))?;
        let mut bytes = vec![0; BULK];
        self.reader.read_exact(&mut bytes).map_err(|why| silent(why, PATIENCE))
    }
}

/// The kernel's word for a time that has passed tells nobody anything.
fn silent(why: io::Error, within: Duration) -> io::Error {
    match why.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            let text = format!("nothing came within {} s", within.as_secs());
            io::Error::new(ErrorKind::TimedOut, text)
        }
        _ => why,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread;

    #[test]
    fn a_line_that_comes_byte_by_byte_has_no_more_time() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let mut from =
            TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let (to, _) = listener.accept().expect("it connects");
        // Until the other end is gone.
        let slow = thread::spawn(move || {
            while from.write_all(b" ").is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
        });
        let mut line = DoctorConnection::new(to).expect("a connection");
        let said = line.recv::<DoctorRequest>(Duration::from_millis(30));
        assert_eq!(said.expect_err("no line").kind(), ErrorKind::TimedOut);
        drop(line);
        slow.join().expect("it ends");
    }
}
