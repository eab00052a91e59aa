//! Planes under test.
#![allow(dead_code, reason = "each test binary uses some of it")]

pub(crate) mod remote;

use engine::conformance::{Pair, Second};
use fabric_host::{HostConfig, Path};
use remote::{Local, Setup, start};

/// Bytes that the suite wants of each plane.
const MEMORY: u64 = 1 << 14;

/// Settings of a plane that takes one path only.
/// Settings whose limits do not pass, however busy the machine is.
pub(crate) fn patient() -> HostConfig {
    let never = 600_000;
    HostConfig { connect_ms: never, open_ms: never, dead_ms: never, ..HostConfig::default() }
}

pub(crate) fn config(path: Path) -> HostConfig {
    HostConfig { paths: vec![path], operations_max: 256, ..patient() }
}

fn setup(path: Path) -> Setup {
    Setup { config: config(path), memory: MEMORY, file: path == Path::SharedMemory }
}

fn local(setup: Setup) -> Box<Local> {
    Box::new(Local::new(setup))
}

/// Both in this process.
pub(crate) fn here(path: Path) -> Pair {
    Pair::new(local(setup(path)), Second::Here(local(setup(path))))
}

/// The second in a process of its own.
pub(crate) fn apart(path: Path) -> Pair {
    Pair::new(local(setup(path)), Second::There(start(&setup(path))))
}

/// The second in a process of its own; no read is copied by the thread that asks for it.
pub(crate) fn by_threads(path: Path) -> Pair {
    let mut first = setup(path);
    first.config.inline_max = 0;
    Pair::new(local(first), Second::There(start(&setup(path))))
}
