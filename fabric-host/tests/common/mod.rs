//! Two planes in one process, as a fixture of the conformance suite.

use engine::conformance::DataFixture;
use engine::core::time::Nanos;
use engine::fabric::{DataPlane, Memory};
use fabric_host::{HostConfig, HostPlane, HugePages, Path, Pool};
use std::time::{Duration, Instant};

/// Bytes that the suite wants of each plane.
const MEMORY: usize = 1 << 14;

/// Longest wait for news in one round.
const ROUND: Duration = Duration::from_micros(20);

/// A plane that takes one path only.
pub(crate) fn plane(path: Path) -> HostPlane {
    let config = HostConfig { paths: vec![path], operations_max: 256, ..HostConfig::default() };
    HostPlane::new(config).expect("a plane at loopback")
}

/// Two planes and their memory.
pub(crate) struct Pair {
    planes: [HostPlane; 2],
    own: [Vec<u8>; 2],
    pools: Option<[Pool; 2]>,
    start: Instant,
}

impl Pair {
    pub(crate) fn new(path: Path) -> Pair {
        let own = [vec![0; MEMORY], vec![0; MEMORY]];
        let pool = || Pool::new(MEMORY as u64, HugePages::No).expect("a memory file");
        let pools = (path == Path::SharedMemory).then(|| [pool(), pool()]);
        Pair { planes: [plane(path), plane(path)], own, pools, start: Instant::now() }
    }

    fn start_of(&mut self, index: usize) -> *mut u8 {
        match &self.pools {
            Some(pools) => pools[index].start(),
            None => self.own[index].as_mut_ptr(),
        }
    }
}

impl DataFixture for Pair {
    fn plane(&mut self, index: usize) -> &mut dyn DataPlane {
        &mut self.planes[index]
    }

    fn memory(&mut self, index: usize) -> Memory {
        match &self.pools {
            Some(pools) => pools[index].memory(),
            None => Memory::Own { base: self.start_of(index) as u64, len: MEMORY as u64 },
        }
    }

    fn peek(&mut self, index: usize, offset: u64, into: &mut [u8]) {
        assert!(offset as usize + into.len() <= MEMORY);
        // SAFETY: Inside the memory of the plane.
        unsafe {
            let from = self.start_of(index).add(offset as usize);
            std::ptr::copy(from, into.as_mut_ptr(), into.len());
        }
    }

    fn poke(&mut self, index: usize, offset: u64, bytes: &[u8]) {
        assert!(offset as usize + bytes.len() <= MEMORY);
        // SAFETY: Inside the memory of the plane.
        unsafe {
            let to = self.start_of(index).add(offset as usize);
            std::ptr::copy(bytes.as_ptr(), to, bytes.len());
        }
    }

    fn advance(&mut self) {
        std::thread::park_timeout(ROUND);
    }

    fn now(&mut self) -> Nanos {
        Nanos(self.start.elapsed().as_nanos() as u64)
    }
}
