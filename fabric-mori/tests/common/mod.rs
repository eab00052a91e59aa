//! Planes under test, over the stand-in for MoRI.
#![allow(dead_code, reason = "each test binary uses some of it")]

pub(crate) mod world;

use kvferry_engine::conformance::{DataPlanePair, PlaneUnderTest, RemotePlane, SecondPlane};
use kvferry_engine::fabric::{
    Address, Caps, Credits, DataPlane, FenceScope, Memory, OwnMemory, Placement, PlaneTimeouts,
};
use kvferry_fabric_mori::{MoriBackend, MoriConfig, MoriMixedPlane, MoriPlane, PortCommand, Shim};
use mori_sys::ShimSearchPath;
use serde::{Deserialize, Serialize};
use std::process::Command;
use std::sync::Arc;

/// Whether a test can take ports down: the stand-in's always, those of a card by a command.
pub(crate) fn has_ports() -> bool {
    !is_installed() || PortCommand::of_environment().is_some()
}

/// Runs tests of this program again as on a machine with MoRI, which is the stand-in, and whose
/// ports a command takes down and up, as often at least.
pub(crate) fn again_with_a_port_command(tests: &str, calls_min: usize) {
    if !is_newest_stand_in() {
        return;
    }
    let name = format!("kvferry-ports-{}", std::process::id());
    let ports = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&ports).expect("a folder");
    // Says that it was called.
    let log = ports.join("called");
    let line = format!("echo called >>'{}'; '{}'", log.display(), mori_double::PORT_COMMAND);
    let mut again = Command::new(std::env::current_exe().expect("this program"));
    again
        .arg(tests)
        .env(WHICH, "installed")
        .env("KVFERRY_MORI_SHIM", mori_double::INSTALLS[1].shim);
    again.env("KVFERRY_PORT_COMMAND", line).env(PORTS, &ports);
    let output = again.output().expect("it runs");
    let calls = std::fs::read_to_string(&log).unwrap_or_default().lines().count();
    let _gone = std::fs::remove_dir_all(&ports);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(calls >= calls_min, "{calls} calls\n{text}");
}

/// Bytes that the suite wants of each plane.
pub(crate) const MEMORY: u64 = 1 << 14;

/// Says which MoRI: 9 and 15 are the stand-in's layouts, `installed` is what there is.
const WHICH: &str = "KVFERRY_TEST_MORI";

/// Runs all tests of this program again, over the stand-in's older layout: a process can have one
/// only.
pub(crate) fn again_over_the_older_layout() {
    if !is_newest_stand_in() {
        return;
    }
    let mut again = Command::new(std::env::current_exe().expect("this program"));
    let output = again.env(WHICH, "9").output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// True if neither MoRI itself is tested nor the stand-in's older layout.
pub(crate) fn is_newest_stand_in() -> bool {
    std::env::var_os(WHICH).is_none()
}

/// Whether it is no stand-in that is tested.
pub(crate) fn is_installed() -> bool {
    std::env::var(WHICH).is_ok_and(|which| which == "installed")
}

/// The shim of the MoRI that is tested.
pub(crate) fn shim() -> Arc<Shim> {
    let which = std::env::var(WHICH).unwrap_or_else(|_| "15".into());
    if is_installed() {
        return Shim::load(&ShimSearchPath::of_process()).expect("MoRI loads");
    }
    let mut installs = mori_double::INSTALLS.iter();
    let install = installs.find(|install| install.class.to_string() == which);
    let install = install.unwrap_or_else(|| panic!("{WHICH} is 9, 15 or installed"));
    let asked = Some(install.shim.into());
    Shim::load(&ShimSearchPath { asked, ..ShimSearchPath::default() }).expect("the stand-in loads")
}

/// No limit of a plane is as long as what a busy machine may take, so that none passes.
pub(crate) const NEVER: u32 = 600_000;

/// Folder that the stand-in looks into for ports that are down.
const PORTS: &str = "MORI_DOUBLE_PORTS";

/// Longest time of an operation: software RDMA retries without end while its port is down.
fn operation_ms() -> u32 {
    if is_installed() && std::env::var_os(PORTS).is_none() { 10_000 } else { NEVER }
}

/// Settings of a plane on a machine without devices. But for the drain before a rebuild its limits
/// never pass, and over MoRI itself that of operations.
pub(crate) fn config(backend: MoriBackend) -> MoriConfig {
    MoriConfig {
        backend,
        devices: false,
        operations_max: 64,
        operation_ms: operation_ms(),
        drain_ms: 50,
        open_ms: NEVER,
        dead_ms: NEVER,
        ..MoriConfig::default()
    }
}

/// What a child is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MoriTestSetup {
    pub(crate) config: MoriConfig,
    /// A plane over both backends, whatever the settings say.
    pub(crate) mixed: bool,
    pub(crate) memory: u64,
    /// What goes wrong in a process of its own.
    pub(crate) faults: Option<String>,
}

impl MoriTestSetup {
    /// A plane with these settings, and nothing that goes wrong.
    pub(crate) fn of(config: MoriConfig) -> MoriTestSetup {
        MoriTestSetup { config, mixed: false, memory: MEMORY, faults: None }
    }

    /// A plane over both backends, with `backend` between it and its peer. By its key it plays a
    /// node: `here` and `near` are of one, `far` is of another.
    pub(crate) fn mixed(key: &str, backend: MoriBackend) -> MoriTestSetup {
        let config = MoriConfig { key: key.into(), ..config(backend) };
        MoriTestSetup { mixed: true, ..MoriTestSetup::of(config) }
    }
}

/// What is tested.
pub(crate) enum MoriTested {
    One(Box<MoriPlane>),
    Mixed(Box<MoriMixedPlane>),
}

/// A plane and its memory, which is a GPU's for xGMI: to the stand-in that is a word.
pub(crate) struct MoriTestPlane {
    pub(crate) plane: MoriTested,
    bytes: Vec<u8>,
    /// It is the card of this process that its peer is reached by.
    by_card: bool,
}

impl MoriTestPlane {
    pub(crate) fn new(setup: &MoriTestSetup) -> MoriTestPlane {
        if let Some(spec) = &setup.faults {
            world::faults(spec);
        }
        let config = setup.config.clone();
        let by_card = config.backend == MoriBackend::Rdma && has_ports();
        let plane = match setup.mixed {
            true => {
                world::nodes();
                let plane = MoriMixedPlane::with_shim(shim(), config);
                MoriTested::Mixed(Box::new(plane.expect("a plane")))
            }
            false => {
                let plane = MoriPlane::with_shim(shim(), config);
                MoriTested::One(Box::new(plane.expect("a plane")))
            }
        };
        MoriTestPlane { plane, bytes: vec![0; setup.memory as usize], by_card }
    }

    pub(crate) fn address(&self) -> Address {
        match &self.plane {
            MoriTested::One(plane) => plane.address(),
            MoriTested::Mixed(plane) => plane.address(),
        }
    }
}

impl PlaneUnderTest for MoriTestPlane {
    fn plane(&mut self) -> &mut dyn DataPlane {
        match &mut self.plane {
            MoriTested::One(plane) => &mut **plane,
            MoriTested::Mixed(plane) => &mut **plane,
        }
    }

    fn memory(&mut self) -> Memory {
        let (base, len) = (self.bytes.as_mut_ptr() as u64, self.bytes.len() as u64);
        // SAFETY: The plane is dropped first, and a test looks at the bytes when nothing lands.
        let range = unsafe { OwnMemory::new(base, len) };
        match &self.plane {
            MoriTested::One(plane) if plane.config().backend == MoriBackend::Rdma => {
                Memory::Own(range)
            }
            _ => Memory::Device { range, device: 0 },
        }
    }

    fn peek(&mut self, offset: u64, into: &mut [u8]) {
        let from = &self.bytes[offset as usize..offset as usize + into.len()];
        // SAFETY: Inside the vector, which others may write to meanwhile.
        unsafe { std::ptr::copy(from.as_ptr(), into.as_mut_ptr(), into.len()) };
    }

    fn backend(&mut self, there: bool) -> bool {
        if self.by_card {
            world::port(there);
        }
        self.by_card
    }

    fn poke(&mut self, offset: u64, bytes: &[u8]) {
        self.bytes[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
    }
}

/// The body of the test `child`.
pub(crate) fn serve_if_child() {
    kvferry_engine::conformance::serve_if_child(|setup: MoriTestSetup| {
        Box::new(MoriTestPlane::new(&setup))
    });
}

/// Starts a process with a plane.
pub(crate) fn start(setup: &MoriTestSetup) -> RemotePlane {
    let caps = Caps {
        read: true,
        write: true,
        slices_max: setup.config.slices_max,
        per_peer: Credits::UNLIMITED,
        in_all: Credits::of_operations(setup.config.operations_max),
        placement: Placement::OnCompletion,
        fence: fence(setup.config.backend),
        patience: PlaneTimeouts::default(),
    };
    RemotePlane::start(setup, caps)
}

fn setup(backend: MoriBackend) -> MoriTestSetup {
    MoriTestSetup::of(config(backend))
}

fn local(backend: MoriBackend) -> Box<MoriTestPlane> {
    Box::new(MoriTestPlane::new(&setup(backend)))
}

/// Two planes over both backends, of one node or of two.
fn mixed(backend: MoriBackend) -> [MoriTestSetup; 2] {
    let second = if backend == MoriBackend::Xgmi { "near" } else { "far" };
    ["here", second].map(|key| MoriTestSetup::mixed(key, backend))
}

/// What a fence revokes between planes with this backend between them.
fn fence(backend: MoriBackend) -> FenceScope {
    match backend {
        MoriBackend::Rdma => FenceScope::Backend,
        MoriBackend::Xgmi => FenceScope::Peer,
    }
}

/// Both in this process, with both backends and this one between them.
pub(crate) fn mixed_here(backend: MoriBackend) -> DataPlanePair {
    let [first, second] = mixed(backend).map(|setup| Box::new(MoriTestPlane::new(&setup)));
    DataPlanePair::new(first, SecondPlane::Here(second)).fencing(fence(backend))
}

/// The second in a process of its own.
pub(crate) fn mixed_apart(backend: MoriBackend) -> DataPlanePair {
    let [first, second] = mixed(backend);
    let first = Box::new(MoriTestPlane::new(&first));
    DataPlanePair::new(first, SecondPlane::There(start(&second)))
}

/// Both in this process.
pub(crate) fn here(backend: MoriBackend) -> DataPlanePair {
    DataPlanePair::new(local(backend), SecondPlane::Here(local(backend)))
}

/// The second in a process of its own.
pub(crate) fn apart(backend: MoriBackend) -> DataPlanePair {
    DataPlanePair::new(local(backend), SecondPlane::There(start(&setup(backend))))
}
