//! A process with a control plane that listens, and strangers who dial it.

use crate::common::{PATIENCE, TestZmqPlane};
use kvferry_engine::fabric::{ControlEvent, ControlPlane, LinkKind};
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio, exit};

/// In the environment of the child.
const ROLE: &str = "KVFERRY_TEST_VICTIM";

/// In front of what the child says; the test harness speaks there, too.
const SAID: &str = "victim: ";

/// The body of the test `victim`: listens, and when it is told to, answers each message by their
/// number of bytes, or by its second part if it has one.
pub(crate) fn serve_if_child() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let mut ours = TestZmqPlane::new("127.0.0.1");
    let at = ours.plane.listen(LinkKind::Notify).expect("a free port");
    say(at.0.strip_prefix("tcp://").expect("an address"));
    if std::io::stdin().lines().next().is_none() {
        exit(0);
    }
    std::thread::spawn(|| {
        let _closed = std::io::stdin().lines().count();
        exit(0)
    });
    loop {
        let event = ours.wait_for(|event| !matches!(event, ControlEvent::LinkDown { .. }));
        if let ControlEvent::Frame { link, parts } = event {
            let bytes: usize = parts.iter().map(Vec::len).sum();
            let answer: &[u8] = if parts.len() > 1 { &parts[1] } else { &bytes.to_le_bytes() };
            // Who asked may be gone.
            let _gone = ours.plane.send(link, &[answer]);
        }
    }
}

fn say(what: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{SAID}{what}").and_then(|()| out.flush()).expect("the parent listens");
}

/// The process that listens.
pub(crate) struct ZmqVictim {
    child: Child,
    /// Closed at the end, by which it ends.
    told: Option<ChildStdin>,
    _said: BufReader<ChildStdout>,
    pub(crate) at: SocketAddr,
}

impl ZmqVictim {
    /// Listens, and takes no news until [`ZmqVictim::wake`].
    pub(crate) fn asleep() -> ZmqVictim {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "victim", "--nocapture"])
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts again");
        let told = child.stdin.take();
        let mut said = BufReader::new(child.stdout.take().expect("it is a pipe"));
        let mut line = String::new();
        let at = loop {
            line.clear();
            assert!(said.read_line(&mut line).expect("it speaks") > 0, "it ended");
            if let Some(at) = line.trim_end().strip_prefix(SAID) {
                break at.parse().expect("an address");
            }
        };
        ZmqVictim { child, told, _said: said, at }
    }

    pub(crate) fn awake() -> ZmqVictim {
        let mut victim = ZmqVictim::asleep();
        victim.wake();
        victim
    }

    pub(crate) fn wake(&mut self) {
        let told = self.told.as_mut().expect("until the end");
        told.write_all(b"wake\n").expect("it lives");
    }

    /// Most memory that it ever had, in MiB.
    pub(crate) fn peak_mib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("it lives");
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = peak.and_then(|peak| peak.trim().strip_suffix(" kB"));
        kib.and_then(|kib| kib.trim().parse::<u64>().ok()).expect("KiB") >> 10
    }
}

impl Drop for ZmqVictim {
    fn drop(&mut self) {
        self.told = None;
        let _ended = self.child.wait();
    }
}

/// A connection from an address of loopback, which says what it likes.
pub(crate) fn connect_from(from: [u8; 4], to: SocketAddr) -> TcpStream {
    let stream = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    bind(&stream, &SocketAddr::from((from, 0))).expect("all of 127.0.0.0/8 is this machine");
    connect(&stream, &to).expect("somebody listens");
    let stream = TcpStream::from(stream);
    stream.set_read_timeout(Some(PATIENCE)).expect("a time");
    assert_eq!(stream.local_addr().expect("its end").ip(), IpAddr::from(from));
    stream
}

/// What a DEALER says first: its greeting and `READY` (RFC 37).
pub(crate) fn dealer() -> Vec<u8> {
    let mut said = [&[0xff][..], &[0; 8], &[0x7f, 3, 1], b"NULL"].concat();
    said.resize(64, 0);
    said.extend(b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER");
    said
}

/// A connection that was greeted; it may say messages.
pub(crate) fn greeted_from(from: [u8; 4], to: SocketAddr) -> TcpStream {
    let mut stream = connect_from(from, to);
    stream.write_all(&dealer()).expect("it is heard");
    let mut heard = [0; 66];
    stream.read_exact(&mut heard).expect("a greeting and the begin of READY");
    let mut ready = vec![0; usize::from(heard[65])];
    stream.read_exact(&mut ready).expect("READY");
    assert!(ready.starts_with(b"\x05READY"), "{}", ready.escape_ascii());
    stream
}

/// A part of a message, as it is sent.
pub(crate) fn part(more: bool, bytes: usize) -> Vec<u8> {
    let mut part = vec![u8::from(more) | 2];
    part.extend((bytes as u64).to_be_bytes());
    part.resize(part.len() + bytes, 7);
    part
}

/// Says a message of so many bytes and hears that all of it came.
pub(crate) fn is_answered(stream: &mut TcpStream, bytes: usize) -> std::io::Result<()> {
    stream.write_all(&part(false, bytes))?;
    hears_answer(stream, bytes)
}

/// Hears that a message of so many bytes came.
pub(crate) fn hears_answer(stream: &mut TcpStream, bytes: usize) -> std::io::Result<()> {
    let mut answer = [0; 10];
    stream.read_exact(&mut answer)?;
    assert_eq!(answer[..2], [0, 8]);
    assert_eq!(answer[2..], bytes.to_le_bytes());
    Ok(())
}
