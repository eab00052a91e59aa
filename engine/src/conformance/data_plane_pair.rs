//! Two real planes as a fixture.
#![allow(
    clippy::disallowed_types,
    reason = "planes that run by themselves do so by the real clock"
)]

use super::data_harness::DataFixture;
use super::remote_plane::{PlaneUnderTest, RemotePlane};
use crate::core::time::Nanos;
use crate::fabric::{DataPlane, FenceScope, Memory};
use std::fmt;
use std::time::{Duration, Instant};

/// Time for which a round waits for news: each one if a plane is polled in another process, else every
/// fourth. The others only let others run.
const ROUND: Duration = Duration::from_micros(20);

/// Longest time for which others run on a machine that has nothing else to do.
const OTHERS: Duration = Duration::from_millis(1);

/// Rounds that all wait after others ran for longer: on a busy machine a thread that sleeps is back
/// long before one that yields.
const BUSY_ROUNDS: u64 = 1000;

/// Plane 1 of a [`DataPlanePair`].
pub enum SecondPlane {
    /// In the process of the test.
    Here(Box<dyn PlaneUnderTest>),
    /// In a process of its own.
    There(RemotePlane),
}

impl SecondPlane {
    fn served(&mut self) -> &mut dyn PlaneUnderTest {
        match self {
            SecondPlane::Here(served) => &mut **served,
            SecondPlane::There(remote) => remote,
        }
    }
}

/// Two planes that run by themselves; plane 0 is of this process.
pub struct DataPlanePair {
    first: Box<dyn PlaneUnderTest>,
    second: SecondPlane,
    /// What a fence of the first by the second revokes, if that is not all that it can.
    fence: Option<FenceScope>,
    start: Instant,
    rounds: u64,
    /// The round until which all wait.
    busy: u64,
}

impl fmt::Debug for DataPlanePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataPlanePair").finish_non_exhaustive()
    }
}

impl DataPlanePair {
    /// A fixture of two planes.
    pub fn new(first: Box<dyn PlaneUnderTest>, second: SecondPlane) -> DataPlanePair {
        DataPlanePair { first, second, fence: None, start: Instant::now(), rounds: 0, busy: 0 }
    }

    /// The same where a fence between them revokes no more than this.
    pub fn fencing(self, fence: FenceScope) -> DataPlanePair {
        DataPlanePair { fence: Some(fence), ..self }
    }

    fn served(&mut self, index: usize) -> &mut dyn PlaneUnderTest {
        if index == 0 { &mut *self.first } else { self.second.served() }
    }
}

impl DataFixture for DataPlanePair {
    fn plane(&mut self, index: usize) -> &mut dyn DataPlane {
        self.served(index).plane()
    }

    fn memory(&mut self, index: usize) -> Memory {
        self.served(index).memory()
    }

    fn peek(&mut self, index: usize, offset: u64, into: &mut [u8]) {
        self.served(index).peek(offset, into);
    }

    fn poke(&mut self, index: usize, offset: u64, bytes: &[u8]) {
        self.served(index).poke(offset, bytes);
    }

    fn advance(&mut self) {
        self.rounds += 1;
        let is_far = matches!(self.second, SecondPlane::There(_));
        if is_far || self.rounds.is_multiple_of(4) || self.rounds < self.busy {
            std::thread::park_timeout(ROUND);
            return;
        }
        let start = Instant::now();
        std::thread::yield_now();
        if start.elapsed() > OTHERS {
            self.busy = self.rounds + BUSY_ROUNDS;
        }
    }

    fn suspicion(&self) -> usize {
        match self.second {
            SecondPlane::Here(_) => 2_000,
            // A round takes as long as four.
            SecondPlane::There(_) => 500,
        }
    }

    fn now(&mut self) -> Nanos {
        Nanos(self.start.elapsed().as_nanos() as u64)
    }

    fn runs_by_itself(&self) -> bool {
        true
    }

    fn fence_scope(&mut self) -> FenceScope {
        self.fence.unwrap_or_else(|| self.plane(1).caps().fence)
    }

    fn backend(&mut self, there: bool) -> bool {
        self.first.backend(there)
    }

    fn kill(&mut self) -> bool {
        match &mut self.second {
            SecondPlane::Here(_) => false,
            SecondPlane::There(remote) => {
                remote.kill();
                true
            }
        }
    }
}
