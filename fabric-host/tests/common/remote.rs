//! A host plane in another process.

use kvferry_engine::conformance::{PlaneUnderTest, RemotePlane};
use kvferry_engine::fabric::{
    Caps, Credits, DataPlane, FenceScope, Memory, OwnMemory, Placement, PlaneTimeouts,
};
use kvferry_fabric_host::{HostConfig, HostPlane, HugePages, MemfdPool};
use serde::{Deserialize, Serialize};

/// What a child is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct HostTestSetup {
    pub(crate) config: HostConfig,
    pub(crate) memory: u64,
    pub(crate) file: bool,
}

/// A plane of this process and its memory.
pub(crate) struct HostTestPlane {
    plane: HostPlane,
    bytes: HostTestMemory,
}

impl HostTestPlane {
    pub(crate) fn new(setup: HostTestSetup) -> HostTestPlane {
        let plane = HostPlane::new(setup.config).expect("a plane at loopback");
        HostTestPlane { plane, bytes: HostTestMemory::new(setup.memory, setup.file) }
    }
}

impl PlaneUnderTest for HostTestPlane {
    fn plane(&mut self) -> &mut dyn DataPlane {
        &mut self.plane
    }

    fn memory(&mut self) -> Memory {
        self.bytes.memory()
    }

    fn peek(&mut self, offset: u64, into: &mut [u8]) {
        self.bytes.peek(offset, into);
    }

    fn poke(&mut self, offset: u64, bytes: &[u8]) {
        self.bytes.poke(offset, bytes);
    }
}

/// The body of the test `child`.
pub(crate) fn serve_if_child() {
    kvferry_engine::conformance::serve_if_child(|setup: HostTestSetup| {
        Box::new(HostTestPlane::new(setup))
    });
}

/// Starts a process with a plane.
pub(crate) fn start(setup: &HostTestSetup) -> RemotePlane {
    let caps = Caps {
        read: true,
        write: true,
        slices_max: setup.config.slices_max,
        per_peer: Credits::UNLIMITED,
        in_all: Credits::of_operations(setup.config.operations_max),
        placement: Placement::OnCompletion,
        fence: FenceScope::Peer,
        patience: PlaneTimeouts::default(),
    };
    RemotePlane::start(setup, caps)
}

/// Memory of a plane under test.
pub(crate) struct HostTestMemory {
    own: Vec<u8>,
    pool: Option<MemfdPool>,
}

impl HostTestMemory {
    pub(crate) fn new(len: u64, file: bool) -> HostTestMemory {
        let pool = file.then(|| MemfdPool::new(len, HugePages::No).expect("a memory file"));
        let own = if file { Vec::new() } else { vec![0; len as usize] };
        HostTestMemory { own, pool }
    }

    pub(crate) fn memory(&mut self) -> Memory {
        match &self.pool {
            Some(pool) => pool.memory(),
            None => {
                let base = self.own.as_mut_ptr() as u64;
                // SAFETY: Tests drop their planes first, and look when nothing lands.
                Memory::Own(unsafe { OwnMemory::new(base, self.own.len() as u64) })
            }
        }
    }

    pub(crate) fn start(&mut self) -> *mut u8 {
        self.pool.as_ref().map_or(self.own.as_mut_ptr(), MemfdPool::start)
    }

    fn len(&self) -> u64 {
        self.pool.as_ref().map_or(self.own.len() as u64, MemfdPool::len)
    }

    pub(crate) fn peek(&mut self, offset: u64, into: &mut [u8]) {
        assert!(offset + into.len() as u64 <= self.len());
        // SAFETY: Inside the memory.
        unsafe {
            std::ptr::copy(self.start().add(offset as usize), into.as_mut_ptr(), into.len());
        }
    }

    pub(crate) fn poke(&mut self, offset: u64, bytes: &[u8]) {
        assert!(offset + bytes.len() as u64 <= self.len());
        // SAFETY: Inside the memory.
        unsafe {
            std::ptr::copy(bytes.as_ptr(), self.start().add(offset as usize), bytes.len());
        }
    }
}
