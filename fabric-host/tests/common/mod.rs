//! Planes under test.
#![allow(dead_code, reason = "each test binary uses some of it")]

pub(crate) mod remote;

use kvferry_engine::conformance::{DataPlanePair, SecondPlane};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{DataEvent, DataPlane};
use kvferry_fabric_host::{DataPath, HostConfig, PeerTrust};
use remote::{HostTestPlane, HostTestSetup, start};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
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

/// A path, and whether what goes by it is encrypted, which it may be by TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TestWay {
    pub(crate) path: DataPath,
    encrypt: bool,
}

impl From<DataPath> for TestWay {
    fn from(path: DataPath) -> TestWay {
        TestWay { path, encrypt: false }
    }
}

impl TestWay {
    pub(crate) const ENCRYPTED: TestWay = TestWay { path: DataPath::Tcp, encrypt: true };

    pub(crate) fn all() -> impl Iterator<Item = TestWay> {
        DataPath::ALL.map(TestWay::from).into_iter().chain([TestWay::ENCRYPTED])
    }

    /// Settings of a plane that takes this way only.
    pub(crate) fn of(self, config: HostConfig) -> HostConfig {
        let secret_file = self.encrypt.then(secret);
        let trust = PeerTrust { secret_file, encrypt: self.encrypt, ..PeerTrust::default() };
        HostConfig { paths: vec![self.path], trust, ..config }
    }
}

/// The file of a secret that all tests have, also in other processes.
fn secret() -> PathBuf {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("secret");
    write_secrets(&file, &["00112233445566778899aabbccddeeff"]);
    file
}

/// Puts a file with secrets in its place, whole.
pub(crate) fn write_secrets(file: &Path, secrets: &[&str]) {
    let (process, thread) = (std::process::id(), std::thread::current().id());
    let new = file.with_extension(format!("{process}-{thread:?}"));
    fs::write(&new, secrets.join("\n")).expect("a file");
    fs::set_permissions(&new, Permissions::from_mode(0o400)).expect("its mode");
    fs::rename(&new, file).expect("it is in its place");
}

/// Settings of a plane that takes one way only.
pub(crate) fn config(way: impl Into<TestWay>) -> HostConfig {
    way.into().of(HostConfig { operations_max: 256, ..patient() })
}

fn setup(way: TestWay) -> HostTestSetup {
    let file = way.path == DataPath::SharedMemory;
    HostTestSetup { config: config(way), memory: MEMORY, file }
}

fn local(setup: HostTestSetup) -> Box<HostTestPlane> {
    Box::new(HostTestPlane::new(setup))
}

/// Both in this process.
pub(crate) fn here(way: impl Into<TestWay>) -> DataPlanePair {
    let way = way.into();
    DataPlanePair::new(local(setup(way)), SecondPlane::Here(local(setup(way))))
}

/// The second in a process of its own.
pub(crate) fn apart(way: impl Into<TestWay>) -> DataPlanePair {
    let way = way.into();
    DataPlanePair::new(local(setup(way)), SecondPlane::There(start(&setup(way))))
}

/// The second in a process of its own; no read is copied by the thread that asks for it.
pub(crate) fn by_threads(way: impl Into<TestWay>) -> DataPlanePair {
    let way = way.into();
    let mut first = setup(way);
    first.config.inline_max = 0;
    DataPlanePair::new(local(first), SecondPlane::There(start(&setup(way))))
}
