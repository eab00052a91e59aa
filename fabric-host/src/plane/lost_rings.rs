//! What the owner watches is readable whenever there is something for it that it has not seen.

use super::HostPlane;
use crate::HostConfig;
use crate::config::DataPath;
use crate::link::{HostReadSource, ShmSegment};
use crate::memory::{HostMemoryAccess, MemfdMapping};
use crate::shared::{HostWorkerEvent, NegotiatedPaths};
use kvferry_engine::core::Nanos;
use kvferry_engine::fabric::{DataPlane, NextPoll, SessionId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Pieces of news, each of which comes when the owner has just taken the one before.
const ROUNDS: u64 = 20_000;

/// True as soon as somebody has rung, or false after a second.
fn is_rung(bell: &OwnedFd) -> bool {
    let second = Timespec { tv_sec: 1, tv_nsec: 0 };
    let rung = poll(&mut [PollFd::new(bell, PollFlags::IN)], Some(&second));
    rung.expect("a descriptor") > 0
}

fn source() -> HostReadSource {
    let (segment, file) = ShmSegment::create().expect("memory");
    HostReadSource {
        reach: HostMemoryAccess::Here { base: 0, map: None },
        len: 0,
        token: 0,
        place: 0,
        registration_table: Arc::new(MemfdMapping::new(&file, 8, false).expect("a mapping")),
        segment,
        cancelled: AtomicBool::new(false),
    }
}

#[test]
fn no_ring_is_heard_without_a_look_for_what_it_was() {
    let mut plane = HostPlane::new(HostConfig::default()).expect("a plane");
    let bell = plane.doorbell().expect("a doorbell").try_clone_to_owned().expect("a descriptor");
    let (hub, told) = (plane.hub.clone(), AtomicU64::new(0));
    let source = Arc::new(source());
    std::thread::scope(|scope| {
        let counted = source.clone();
        let teller = scope.spawn(|| {
            let counted = counted;
            for round in 1..=ROUNDS {
                let (write, read) = (DataPath::Tcp, DataPath::Tcp);
                let result = Ok(NegotiatedPaths { write, read, source: Some(counted.clone()) });
                // Nobody has this link: what comes by it is dropped as soon as it is looked at.
                hub.notify(HostWorkerEvent::Opened {
                    session: SessionId(9),
                    link: 1 << 60,
                    result,
                });
                told.store(round, Ordering::SeqCst);
                while Arc::strong_count(&counted) > 2 {
                    std::hint::spin_loop();
                }
            }
        });
        let mut events = Vec::new();
        let mut lost = None;
        while !teller.is_finished() {
            let next = plane.poll(Nanos::ZERO, &mut events);
            if next == NextPoll::Ready || is_rung(&bell) || teller.is_finished() {
                continue;
            }
            // However slow this machine is: what was told is seen, or rung for.
            let at = told.load(Ordering::SeqCst);
            let is_unseen = || Arc::strong_count(&source) > 2 && told.load(Ordering::SeqCst) == at;
            if is_unseen() && !is_rung(&bell) && is_unseen() {
                lost.get_or_insert(at);
            }
        }
        assert_eq!((lost, events), (None, Vec::new()), "the owner sleeps over news");
    });
}
