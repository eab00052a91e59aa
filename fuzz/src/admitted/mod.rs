//! Peers of a plane for host memory, by TCP and by the local socket, that were let in or are about
//! to be, and then say whatever they like: records and messages of each kind with any number in
//! them, descriptors of any kind, any word of the memory that is shared.
//!
//! All inputs of a process have the same plane, so that what one leaves behind meets the next.

#[path = "../../../fabric-host/tests/hostile/forged.rs"]
mod forged;
mod passed;
mod peer;
mod step;
mod tcp;
mod victim;

use arbitrary::{Arbitrary, Unstructured};
use kvferry_fabric_host::HostConfig;
use peer::{said_by_local, said_by_tcp};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use step::{PeerGreeting, PeerStep};
use victim::FuzzVictim;

/// Bytes of a region.
const LEN: u64 = 4_096;

/// Steps of one peer.
const STEPS_MAX: usize = 200;

/// A guard against waiting for ever.
const PATIENCE: Duration = Duration::from_secs(300);

/// Settings whose limits do not pass, however busy the machine is.
fn patient() -> HostConfig {
    let never = 600_000;
    HostConfig { connect_ms: never, open_ms: never, dead_ms: never, ..HostConfig::default() }
}

fn wait_for<T>(mut there: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(it) = there() {
            return it;
        }
        assert!(start.elapsed() < PATIENCE, "an honest peer is not served");
        std::thread::yield_now();
    }
}

/// Plays the peer that the bytes are; the first says by which way it comes.
///
/// # Panics
/// If a thread of the plane panics, a byte is written or sent that no peer was granted, or those
/// that keep to the protocol are not served any more.
pub fn run(data: &[u8]) {
    static VICTIM: Mutex<Option<FuzzVictim>> = Mutex::new(None);
    let Some((way, program)) = data.split_first() else { return };
    let mut program = Unstructured::new(program);
    let Ok(greeting) = PeerGreeting::arbitrary(&mut program) else { return };
    let mut steps = Vec::new();
    while !program.is_empty() && steps.len() < STEPS_MAX {
        let Ok(step) = PeerStep::arbitrary(&mut program) else { break };
        steps.push(step);
    }
    let mut victim = VICTIM.lock().unwrap_or_else(PoisonError::into_inner);
    let victim = victim.get_or_insert_with(FuzzVictim::new);
    victim.clear();
    if way.is_multiple_of(2) {
        said_by_tcp(victim, &greeting, &steps);
    } else {
        said_by_local(victim, &greeting, &steps);
    }
    victim.check();
}
