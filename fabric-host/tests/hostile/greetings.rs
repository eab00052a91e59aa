//! Connections that say nothing.

use crate::common::remote::HostTestMemory;
use crate::common::{next, patient};
use kvferry_engine::fabric::{DataEvent, DataPlane, PeerId, RegionDesc, RegionId, SessionId};
use kvferry_fabric_host::{DataPath, HostConfig, HostPlane};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, Command, Stdio, exit};

/// In the environment of the process that connects: the port.
const PORT: &str = "KVFERRY_TEST_IDLE_PORT";

/// What it says when all its connections are there.
const CONNECTED: &str = "idle: connected";

/// Fewer than a process may have files, and more than greetings at a time.
const IDLE: usize = 960;

/// A process with connections to a port that say nothing.
struct IdleProcess {
    child: Child,
    /// Closed at the end, by which it ends.
    told: Option<ChildStdin>,
}

impl IdleProcess {
    fn connected_to(port: u16) -> IdleProcess {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "greetings::idle_process", "--nocapture"])
            .env(PORT, port.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts again");
        let told = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().expect("it is a pipe")).lines();
        let is_connected = |line: std::io::Result<String>| line.is_ok_and(|it| it == CONNECTED);
        assert!(lines.into_iter().any(is_connected), "it ended");
        IdleProcess { child, told }
    }
}

impl Drop for IdleProcess {
    fn drop(&mut self) {
        self.told = None;
        let _ended = self.child.wait();
    }
}

/// What [`IdleProcess`] starts.
#[test]
fn idle_process() {
    let Ok(port) = std::env::var(PORT) else { return };
    let port: u16 = port.parse().expect("a port");
    let idle: Vec<_> = (0..IDLE).map(|_| TcpStream::connect(("127.0.0.1", port))).collect();
    assert!(idle.iter().all(Result::is_ok), "it listens");
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{CONNECTED}").and_then(|()| out.flush()).expect("the parent listens");
    let _closed = std::io::stdin().lines().count();
    exit(0);
}

fn register(plane: &mut HostPlane, bytes: &mut HostTestMemory) -> RegionDesc {
    plane.register(RegionId(1), bytes.memory()).expect("memory is taken");
    match next(plane) {
        DataEvent::Registered { result: Ok(desc), .. } => desc,
        other => panic!("{other:?}"),
    }
}

/// Greetings have as long as they like: who is let in is so because others made place.
#[test]
fn who_says_nothing_makes_place_for_who_does() {
    let plane = |paths: &[DataPath]| {
        let config = HostConfig { open_door: true, paths: paths.into(), ..patient() };
        HostPlane::new(config).expect("a plane at loopback")
    };
    let mut far = plane(&DataPath::ALL);
    let mut theirs = HostTestMemory::new(4_096, true);
    let desc = register(&mut far, &mut theirs);
    let _idle = IdleProcess::connected_to(far.port());
    let mut refused = Vec::new();
    for nth in 0..12 {
        let paths: &[DataPath] = if nth % 2 == 0 { &[DataPath::Tcp] } else { &DataPath::ALL };
        let (mut near, mut ours) = (plane(paths), HostTestMemory::new(4_096, true));
        register(&mut near, &mut ours);
        near.connect(PeerId(2), &far.address(), 0).expect("a peer");
        near.open(SessionId(3), RegionId(1), PeerId(2), &desc).expect("an open is taken");
        match next(&mut near) {
            DataEvent::Opened { result: Ok(()), .. } => {}
            DataEvent::Opened { result: Err(why), .. } => refused.push((nth, why)),
            other => panic!("{other:?}"),
        }
    }
    assert!(refused.is_empty(), "peers of 12 that were not let in: {refused:?}");
}
