//! Planes under test, over the stand-in for MoRI.
#![allow(dead_code, reason = "each test binary uses some of it")]

pub(crate) mod world;

use engine::conformance::{DataFixture, Remote, Served};
use engine::core::time::Nanos;
use engine::fabric::{Caps, DataPlane, FenceScope, Memory, Placement};
use fabric_mori::{Backend, MoriConfig, MoriPlane, Shim};
use mori_sys::Places;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes that the suite wants of each plane.
pub(crate) const MEMORY: u64 = 1 << 14;

/// How long a round waits for news, every fourth time; else it only lets others run.
const ROUND: Duration = Duration::from_micros(20);

/// The shim of one of the stand-in's two layouts, or of the MoRI that is installed. A process can have
/// one only; `./test` runs all with either layout.
pub(crate) fn shim() -> Arc<Shim> {
    let which = std::env::var("KVFERRY_TEST_MORI").unwrap_or_else(|_| "15".into());
    if which == "installed" {
        return Shim::load(&Places::of_process()).expect("MoRI loads");
    }
    let mut installs = mori_double::INSTALLS.iter();
    let install = installs.find(|install| install.class.to_string() == which);
    let install = install.expect("KVFERRY_TEST_MORI is 9, 15 or installed");
    let asked = Some(install.shim.into());
    Shim::load(&Places { asked, ..Places::default() }).expect("the stand-in loads")
}

/// Settings of a plane on a machine without devices, with deadlines that tests wait for.
pub(crate) fn config(backend: Backend) -> MoriConfig {
    MoriConfig {
        backend,
        devices: false,
        operations_max: 64,
        operation_ms: 1_000,
        drain_ms: 50,
        open_ms: 5_000,
        ..MoriConfig::default()
    }
}

/// What a child is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) config: MoriConfig,
    pub(crate) memory: u64,
    /// What goes wrong in a process of its own.
    pub(crate) faults: Option<String>,
}

/// A plane and its memory, which is a GPU's for xGMI: to the stand-in that is a word.
pub(crate) struct Local {
    pub(crate) plane: MoriPlane,
    bytes: Vec<u8>,
}

impl Local {
    pub(crate) fn new(setup: &Setup) -> Local {
        if let Some(spec) = &setup.faults {
            world::faults(spec);
        }
        let plane =
            MoriPlane::with_shim(shim(), setup.config.clone()).expect("a plane at loopback");
        Local { plane, bytes: vec![0; setup.memory as usize] }
    }
}

impl Served for Local {
    fn plane(&mut self) -> &mut dyn DataPlane {
        &mut self.plane
    }

    fn memory(&mut self) -> Memory {
        let (base, len) = (self.bytes.as_mut_ptr() as u64, self.bytes.len() as u64);
        match self.plane.config().backend {
            Backend::Rdma => Memory::Own { base, len },
            Backend::Xgmi => Memory::Device { base, len, device: 0 },
        }
    }

    fn peek(&mut self, offset: u64, into: &mut [u8]) {
        let from = &self.bytes[offset as usize..offset as usize + into.len()];
        // SAFETY: Inside the vector, which others may write to meanwhile.
        unsafe { std::ptr::copy(from.as_ptr(), into.as_mut_ptr(), into.len()) };
    }

    fn poke(&mut self, offset: u64, bytes: &[u8]) {
        self.bytes[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
    }
}

/// The body of the test `child`.
pub(crate) fn serve_if_child() {
    engine::conformance::serve_if_child(|setup: Setup| Box::new(Local::new(&setup)));
}

/// Starts a process with a plane.
pub(crate) fn start(setup: &Setup) -> Remote {
    let caps = Caps {
        read: true,
        write: true,
        operations_max: setup.config.operations_max,
        slices_max: setup.config.slices_max,
        placement: Placement::OnCompletion,
        fence: match setup.config.backend {
            Backend::Rdma => FenceScope::Backend,
            Backend::Xgmi => FenceScope::Peer,
        },
    };
    Remote::start(setup, caps)
}

enum Second {
    Here(Box<Local>),
    There(Remote),
}

/// Plane 0 is of this process, plane 1 of this or of another one.
pub(crate) struct Pair {
    first: Local,
    second: Second,
    start: Instant,
    rounds: u64,
}

impl Pair {
    /// Both in this process.
    pub(crate) fn here(backend: Backend) -> Pair {
        let setup = Setup { config: config(backend), memory: MEMORY, faults: None };
        Pair::with(&setup, Second::Here(Box::new(Local::new(&setup))))
    }

    /// The second in a process of its own.
    pub(crate) fn apart(backend: Backend) -> Pair {
        let setup = Setup { config: config(backend), memory: MEMORY, faults: None };
        Pair::with(&setup, Second::There(start(&setup)))
    }

    fn with(setup: &Setup, second: Second) -> Pair {
        Pair { first: Local::new(setup), second, start: Instant::now(), rounds: 0 }
    }
}

impl DataFixture for Pair {
    fn plane(&mut self, index: usize) -> &mut dyn DataPlane {
        match (index, &mut self.second) {
            (0, _) => &mut self.first.plane,
            (_, Second::Here(local)) => &mut local.plane,
            (_, Second::There(remote)) => remote,
        }
    }

    fn memory(&mut self, index: usize) -> Memory {
        match (index, &mut self.second) {
            (0, _) => self.first.memory(),
            (_, Second::Here(local)) => local.memory(),
            (_, Second::There(remote)) => remote.memory(),
        }
    }

    fn peek(&mut self, index: usize, offset: u64, into: &mut [u8]) {
        match (index, &mut self.second) {
            (0, _) => self.first.peek(offset, into),
            (_, Second::Here(local)) => local.peek(offset, into),
            (_, Second::There(remote)) => remote.peek(offset, into),
        }
    }

    fn poke(&mut self, index: usize, offset: u64, from: &[u8]) {
        match (index, &mut self.second) {
            (0, _) => self.first.poke(offset, from),
            (_, Second::Here(local)) => local.poke(offset, from),
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
            Second::Here(_) => false,
            Second::There(remote) => {
                remote.kill();
                true
            }
        }
    }
}
