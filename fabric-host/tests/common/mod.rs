//! Planes under test.
#![allow(dead_code, reason = "each test binary uses some of it")]

pub(crate) mod remote;

use kvferry_engine::conformance::{DataPlanePair, SecondPlane};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{DataEvent, DataPlane};
use kvferry_fabric_host::{DataPath, HostConfig};
use remote::{HostTestPlane, HostTestSetup, start};
use std::time::{Duration, Instant};

/// The next event of a plane, of which there is one at a time.
pub(crate) fn next(plane: &mut dyn DataPlane) -> DataEvent {
    let end = Instant::now() + Duration::from_secs(300);
    let mut events = Vec::new();
    while events.is_empty() {
        assert!(Instant::now() < end, "no event");
        plane.poll(Nanos::ZERO, &mut events);
        std::thread::yield_now();
    }
    assert_eq!(events.len(), 1, "{events:?}");
    events.remove(0)
}

/// Bytes that the suite wants of each plane.
const MEMORY: u64 = 1 << 14;

/// Settings whose limits do not pass, however busy the machine is.
pub(crate) fn patient() -> HostConfig {
    let never = 600_000;
    HostConfig { connect_ms: never, open_ms: never, dead_ms: never, ..HostConfig::default() }
}

/// Settings of a plane that takes one path only.
pub(crate) fn config(path: DataPath) -> HostConfig {
    HostConfig { paths: vec![path], operations_max: 256, ..patient() }
}

fn setup(path: DataPath) -> HostTestSetup {
    HostTestSetup { config: config(path), memory: MEMORY, file: path == DataPath::SharedMemory }
}

fn local(setup: HostTestSetup) -> Box<HostTestPlane> {
    Box::new(HostTestPlane::new(setup))
}

/// Both in this process.
pub(crate) fn here(path: DataPath) -> DataPlanePair {
    DataPlanePair::new(local(setup(path)), SecondPlane::Here(local(setup(path))))
}

/// The second in a process of its own.
pub(crate) fn apart(path: DataPath) -> DataPlanePair {
    DataPlanePair::new(local(setup(path)), SecondPlane::There(start(&setup(path))))
}

/// The second in a process of its own; no read is copied by the thread that asks for it.
pub(crate) fn by_threads(path: DataPath) -> DataPlanePair {
    let mut first = setup(path);
    first.config.inline_max = 0;
    DataPlanePair::new(local(first), SecondPlane::There(start(&setup(path))))
}
