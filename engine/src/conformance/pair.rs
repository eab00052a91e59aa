//! Two real planes as a fixture.
#![allow(
    clippy::disallowed_types,
    reason = "planes that run by themselves do so by the real clock"
)]

use super::remote::{Remote, Served};
use super::rig::DataFixture;
use crate::core::time::Nanos;
use crate::fabric::{DataPlane, Memory};
use std::fmt;
use std::time::{Duration, Instant};

/// How long a round waits for news, every fourth time; else it only lets others run.
const ROUND: Duration = Duration::from_micros(20);

/// Plane 1 of a [`Pair`].
pub enum Second {
    /// In this process.
    Here(Box<dyn Served>),
    /// In one of its own.
    There(Remote),
}

impl Second {
    fn served(&mut self) -> &mut dyn Served {
        match self {
            Second::Here(served) => &mut **served,
            Second::There(remote) => remote,
        }
    }
}

/// Two planes that run by themselves; plane 0 is of this process.
pub struct Pair {
    first: Box<dyn Served>,
    second: Second,
    start: Instant,
    rounds: u64,
}

impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pair").finish_non_exhaustive()
    }
}

impl Pair {
    /// A fixture of two planes.
    pub fn new(first: Box<dyn Served>, second: Second) -> Pair {
        Pair { first, second, start: Instant::now(), rounds: 0 }
    }

    fn served(&mut self, index: usize) -> &mut dyn Served {
        if index == 0 { &mut *self.first } else { self.second.served() }
    }
}

impl DataFixture for Pair {
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
