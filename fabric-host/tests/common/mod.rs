//! Planes under test.
#![allow(dead_code, reason = "each test binary uses some of it")]

pub(crate) mod remote;

use engine::conformance::{DataFixture, Remote};
use engine::core::time::Nanos;
use engine::fabric::{DataPlane, Memory};
use fabric_host::{HostConfig, HostPlane, Path};
use remote::{Bytes, Setup, start};
use std::time::{Duration, Instant};

/// Bytes that the suite wants of each plane.
const MEMORY: u64 = 1 << 14;

/// How long a round waits for news, every fourth time; else it only lets others run.
const ROUND: Duration = Duration::from_micros(20);

/// Settings of a plane that takes one path only.
pub(crate) fn config(path: Path) -> HostConfig {
    HostConfig { paths: vec![path], operations_max: 256, ..HostConfig::default() }
}

/// Plane 0 is of this process, plane 1 of this or of another one.
enum Second {
    Here(Box<HostPlane>, Bytes),
    There(Remote),
}

/// Two planes and their memory.
pub(crate) struct Pair {
    first: HostPlane,
    bytes: Bytes,
    second: Second,
    start: Instant,
    rounds: u64,
}

impl Pair {
    /// Both in this process.
    pub(crate) fn here(path: Path) -> Pair {
        let file = path == Path::SharedMemory;
        let second = HostPlane::new(config(path)).expect("a plane at loopback");
        Pair::with(path, Second::Here(Box::new(second), Bytes::new(MEMORY, file)))
    }

    /// The second in a process of its own.
    pub(crate) fn apart(path: Path) -> Pair {
        let file = path == Path::SharedMemory;
        let setup = Setup { config: config(path), memory: MEMORY, file };
        Pair::with(path, Second::There(start(&setup)))
    }

    /// The second in a process of its own; no read is copied by the thread that asks for it.
    pub(crate) fn by_threads(path: Path) -> Pair {
        let mut pair = Pair::apart(path);
        let config = HostConfig { inline_max: 0, ..config(path) };
        pair.first = HostPlane::new(config).expect("a plane at loopback");
        pair
    }

    fn with(path: Path, second: Second) -> Pair {
        let first = HostPlane::new(config(path)).expect("a plane at loopback");
        let bytes = Bytes::new(MEMORY, path == Path::SharedMemory);
        Pair { first, bytes, second, start: Instant::now(), rounds: 0 }
    }
}

impl DataFixture for Pair {
    fn plane(&mut self, index: usize) -> &mut dyn DataPlane {
        match (index, &mut self.second) {
            (0, _) => &mut self.first,
            (_, Second::Here(plane, _)) => &mut **plane,
            (_, Second::There(remote)) => remote,
        }
    }

    fn memory(&mut self, index: usize) -> Memory {
        match (index, &mut self.second) {
            (0, _) => self.bytes.memory(),
            (_, Second::Here(_, bytes)) => bytes.memory(),
            (_, Second::There(remote)) => remote.memory(),
        }
    }

    fn peek(&mut self, index: usize, offset: u64, into: &mut [u8]) {
        match (index, &mut self.second) {
            (0, _) => self.bytes.peek(offset, into),
            (_, Second::Here(_, bytes)) => bytes.peek(offset, into),
            (_, Second::There(remote)) => remote.peek(offset, into),
        }
    }

    fn poke(&mut self, index: usize, offset: u64, from: &[u8]) {
        match (index, &mut self.second) {
            (0, _) => self.bytes.poke(offset, from),
            (_, Second::Here(_, bytes)) => bytes.poke(offset, from),
            (_, Second::There(remote)) => remote.poke(offset, from),
        }
    }

    fn advance(&mut self) {
        self.rounds += 1;
        if self.rounds.is_multiple_of(4) {
            std::thread::park_timeout(ROUND);
        } else {
            std::thread::yield_now();
        }
    }

    fn now(&mut self) -> Nanos {
        Nanos(self.start.elapsed().as_nanos() as u64)
    }

    fn runs_by_itself(&self) -> bool {
        true
    }

    fn kill(&mut self) -> bool {
        match &mut self.second {
            Second::Here(..) => false,
            Second::There(remote) => {
                remote.kill();
                true
            }
        }
    }
}
