//! Checks that a data plane moves bytes in both directions after each kind of failure: by the same
//! session where it lives on, else by the next one between the same planes.

use super::data_harness::{DataFixture, DataHarness, FENCE_KEY, MEMORY, PEER, REGION, SESSION};
use super::data_limits::assert_serves;
use super::data_shutdown::{fence, renewed};
use crate::fabric::{
    Address, DataEvent, DigestBatch, DigestId, DigestParts, Direction, Memory, OwnMemory, PeerId,
    Refused, RegionDesc, RegionId, SessionId, Submit,
};

const END: u64 = MEMORY as u64;

/// Times that each failure comes back.
const ROUNDS: u32 = 3;

/// Ranges of which each makes a batch invalid.
const BAD: [(u64, u64, u64); 7] = [
    (END, 0, 1),
    (END - 1, 0, 2),
    (0, END - 1, 2),
    (0, 0, END + 1),
    (u64::MAX - 3, 0, 8),
    (0, u64::MAX - 3, 8),
    (8, 8, u64::MAX - 3),
];

pub(super) fn session_moves_bytes_after_each_invalid_batch(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    for direction in rig.directions() {
        for (bad, at) in BAD.into_iter().flat_map(|bad| [0, 1, 2].map(|at| (bad, at))) {
            let mut ranges = vec![(0, 0, 64), (128, 64, 64)];
            ranges.insert(at, bad);
            let refused = rig.submit(SESSION, direction, &ranges);
            assert!(matches!(refused, Err(Refused::Invalid(_))), "{bad:?}: {refused:?}");
            rig.assert_moves(SESSION, direction, &[(0, 64, 64), (200, 0, 32)]);
        }
        for (local, remote, len) in [(2, 1, 1), (1, 2, 1), (1, 1, 2), (0, 0, 1)] {
            let (local, remote, len) = (vec![0; local], vec![0; remote], vec![8; len]);
            let (local, remote, len, op) = (&local[..], &remote[..], &len[..], rig.next_op());
            let batch = Submit { op, session: SESSION, direction, local, remote, len };
            assert!(matches!(rig.plane(0).submit(batch), Err(Refused::Invalid(_))));
            assert_serves(&mut rig, SESSION);
        }
    }
}

pub(super) fn session_moves_bytes_after_each_refused_call(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    rig.register(0, REGION);
    let remote = rig.register(1, REGION);
    rig.connect(PEER, FENCE_KEY);
    rig.open(SESSION, PEER, &remote).expect("the session opens");
    let (memory, address) = (rig.fixture.memory(0), rig.plane(1).address());
    let foreign = Address((*b"another kind of plane").into());
    let garbage = RegionDesc((*b"not a descriptor").into());
    let empty = Memory::Own(OwnMemory::unproven(4_096, 0));
    let (other, nobody) = (SessionId(8), PeerId(99));
    for round in 0..ROUNDS {
        for call in 0..10 {
            let plane = rig.plane(0);
            let taken = match call {
                0 => plane.register(REGION, memory),
                1 => plane.register(RegionId(77), empty),
                2 => plane.deregister(RegionId(78)),
                3 => plane.connect(PEER, &address, FENCE_KEY),
                4 => plane.connect(PeerId(9), &foreign, FENCE_KEY),
                5 => plane.open(SESSION, REGION, PEER, &remote),
                6 => plane.open(other, RegionId(99), PEER, &remote),
                7 => plane.open(other, REGION, nobody, &remote),
                8 => plane.open(other, REGION, PEER, &garbage),
                _ => {
                    let mut parts = DigestParts::default();
                    parts.begin(1);
                    parts.push(END, 1);
                    plane.digest(DigestBatch { id: DigestId(1), region: REGION, parts })
                }
            };
            assert!(taken.is_err(), "call {call} of round {round} was taken");
            assert_serves(&mut rig, SESSION);
        }
        // What ends or keeps out nobody ends and keeps out nothing else.
        rig.plane(0).close(other);
        rig.plane(0).disconnect(nobody);
        rig.plane(0).fence(nobody);
        let answer = DataEvent::Fenced { peer: nobody };
        let answers = |rig: &DataHarness<'_>| rig.seen[0].iter().filter(|e| **e == answer).count();
        rig.until("Fenced", |rig| answers(rig) > round as usize);
        assert_serves(&mut rig, SESSION);
    }
}

pub(super) fn next_session_moves_bytes_after_each_fence(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    rig.register(0, REGION);
    let mut remote = rig.register(1, REGION);
    for round in 0..ROUNDS {
        let (peer, session) = (PeerId(round), SessionId(round));
        rig.connect(peer, FENCE_KEY + u64::from(round));
        rig.open(session, peer, &remote).expect("a session opens under a new fence key");
        assert_serves(&mut rig, session);
        let ops = rig.writes(session, 8);
        fence(&mut rig, peer);
        for op in ops {
            rig.finish(op);
        }
        rig.assert_shut_out(session);
        remote = renewed(&mut rig, remote);
    }
}

pub(super) fn next_session_moves_bytes_after_a_wrong_pass(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    rig.register(0, REGION);
    let remote = rig.register(1, REGION);
    for round in 0..ROUNDS {
        let fence_key = FENCE_KEY + 10 * u64::from(round);
        let [wrong, right] = [0, 1].map(|n| (PeerId(2 * round + n), SessionId(2 * round + n)));
        rig.connect_with(wrong.0, [fence_key, fence_key + 1]);
        if rig.open(wrong.1, wrong.0, &remote).is_ok() {
            rig.assert_shut_out(wrong.1);
        }
        for plane in 0..2 {
            rig.plane(plane).disconnect(wrong.0);
        }
        rig.connect(right.0, fence_key + 2);
        rig.open(right.1, right.0, &remote).expect("a session opens under the right fence key");
        assert_serves(&mut rig, right.1);
        for plane in 0..2 {
            rig.plane(plane).disconnect(right.0);
        }
    }
}

pub(super) fn next_session_moves_bytes_after_own_memory_went(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    let remote = rig.register(1, REGION);
    rig.connect(PEER, FENCE_KEY);
    for round in 0..ROUNDS {
        rig.register(0, REGION);
        let session = SessionId(round);
        rig.open(session, PEER, &remote).expect("a session opens on memory that is new");
        assert_serves(&mut rig, session);
        let ops = rig.writes(session, 4);
        assert_eq!(rig.plane(0).deregister(REGION), Err(Refused::Busy));
        for op in ops {
            rig.finish(op);
        }
        // What was refused has changed nothing.
        rig.settle(session);
        assert_serves(&mut rig, session);
        rig.plane(0).deregister(REGION).expect("nothing uses it");
        let refused = rig.submit(session, Direction::Write, &[(0, 0, 64)]);
        assert!(refused.is_err(), "a session outlived its memory");
    }
}

pub(super) fn next_session_moves_bytes_after_a_disconnect(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    rig.register(0, REGION);
    let remote = rig.register(1, REGION);
    for round in 0..ROUNDS {
        let (peer, session) = (PeerId(round), SessionId(round));
        rig.connect(peer, FENCE_KEY + u64::from(round));
        rig.open(session, peer, &remote).expect("a session opens after a disconnect");
        assert_serves(&mut rig, session);
        let ops = rig.writes(session, 8);
        // The side that opened it first, or the other one.
        let first = round as usize % 2;
        rig.plane(first).disconnect(peer);
        for op in ops {
            rig.finish(op);
        }
        rig.plane(1 - first).disconnect(peer);
        // What has failed may land until then.
        rig.settle(session);
        rig.assert_shut_out(session);
    }
}

pub(super) fn next_session_moves_bytes_after_one_to_memory_that_went(
    fixture: &mut dyn DataFixture,
) {
    let mut rig = DataHarness::new(fixture);
    rig.register(0, REGION);
    rig.connect(PEER, FENCE_KEY);
    let mut gone = rig.register(1, REGION);
    for round in 0..ROUNDS {
        let [stale, good] = [0, 1].map(|n| SessionId(2 * round + n));
        rig.plane(1).deregister(REGION).expect("nothing uses it");
        let remote = rig.register(1, REGION);
        if rig.open(stale, PEER, &gone).is_ok() {
            rig.assert_shut_out(stale);
        }
        rig.open(good, PEER, &remote).expect("a session opens after one to memory that went");
        assert_serves(&mut rig, good);
        gone = remote;
    }
}
