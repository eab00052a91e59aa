//! Checks of what a data plane moves and takes.

use super::data_harness::{DataFixture, DataHarness, FENCE_KEY, MEMORY, PEER, REGION, SESSION};
use crate::fabric::{
    Address, Completion, Credits, DataEvent, DigestBatch, DigestId, DigestParts, Direction, Memory,
    OpId, OwnMemory, PeerId, Refused, RegionDesc, RegionId, SessionId, Submit, digest_of,
};

const END: u64 = MEMORY as u64;

fn assert_invalid<T: std::fmt::Debug>(result: Result<T, Refused>, what: &str) {
    assert!(matches!(result, Err(Refused::Invalid(_))), "{what}: got {result:?}");
}

pub(super) fn register_and_open_are_answered(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    rig.idle();
    let count = |rig: &DataHarness<'_>, plane: usize, yes: fn(&DataEvent) -> bool| {
        rig.seen[plane].iter().filter(|event| yes(event)).count()
    };
    for plane in 0..2 {
        let registered = count(&rig, plane, |e| matches!(e, DataEvent::Registered { .. }));
        assert_eq!(registered, 1, "one answer to register");
    }
    let opened = count(&rig, 0, |e| matches!(e, DataEvent::Opened { .. }));
    assert_eq!(opened, 1, "one answer to open");
    assert!(rig.plane(0).address() != rig.plane(1).address(), "addresses differ");
}

pub(super) fn caps_are_fixed(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    let before = [0, 1].map(|plane| rig.plane(plane).caps());
    rig.register(0, REGION);
    let remote = rig.register(1, REGION);
    rig.connect(PEER, FENCE_KEY);
    rig.open(SESSION, PEER, &remote).expect("the session opens");
    for op in rig.writes(SESSION, 8) {
        rig.finish(op);
        assert_eq!([0, 1].map(|plane| rig.plane(plane).caps()), before);
    }
}

pub(super) fn refused_calls_have_no_events_and_take_no_ids(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    rig.register(0, REGION);
    let remote = rig.register(1, REGION);
    let (other, second) = (PeerId(9), SessionId(8));
    let foreign = Address((*b"another kind of plane").into());
    let garbage = RegionDesc((*b"not a descriptor").into());
    let empty = Memory::Own(OwnMemory::unproven(4_096, 0));
    let before = rig.seen[0].len();
    assert_invalid(rig.plane(0).register(RegionId(77), empty), "empty region");
    assert_invalid(rig.plane(0).connect(other, &foreign, FENCE_KEY), "address of another kind");
    assert_invalid(rig.plane(0).open(second, REGION, other, &remote), "unknown peer");
    rig.connect(other, FENCE_KEY);
    assert_invalid(rig.plane(0).open(second, RegionId(99), other, &remote), "unknown region");
    assert_invalid(rig.plane(0).open(second, REGION, other, &garbage), "garbage descriptor");
    rig.idle();
    assert_eq!(rig.seen[0].len(), before, "an event of a refused call: {:?}", rig.seen[0]);
    rig.open(second, other, &remote).expect("a session opens under an id that was refused");
    rig.plane(0).close(second);
    rig.settle(second);
    rig.plane(0).deregister(REGION).expect("nothing uses it");
    rig.register(0, RegionId(77));
}

pub(super) fn moves_exactly_the_ranges(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    let ranges = [
        (0, END - 100, 100),
        (5_000, 7, 1),
        (1_024, 2_048, 512),
        (1_536, 2_560, 64),
        // These go on where the one before ends on one side only.
        (1_600, 3_000, 8),
        (109, 4_096, 777),
        (2_000, 4_873, 16),
    ];
    if rig.plane(0).caps().slices_max < ranges.len() as u32 {
        return;
    }
    for direction in rig.directions() {
        rig.assert_moves(SESSION, direction, &ranges);
    }
}

pub(super) fn digests_its_own_memory(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    if !rig.plane(0).digests() {
        return;
    }
    let bytes = rig.bytes(0);
    let parts: [(u64, &[(u64, u64)]); 5] = [
        (7, &[(0, END)]),
        (8, &[(END - 100, 100), (5_000, 7), (1, 0)]),
        (9, &[(5_000, 7), (END - 100, 100)]),
        (9, &[]),
        (7, &[(3, 1)]),
    ];
    let (mut asked, mut expected) = (DigestParts::default(), Vec::new());
    // More than is done between two polls.
    for (seed, ranges) in parts.repeat(400) {
        asked.begin(seed);
        let mut part = Vec::new();
        for (from, len) in ranges {
            asked.push(*from, *len);
            part.extend_from_slice(&bytes[*from as usize..(from + len) as usize]);
        }
        expected.push(digest_of(seed, &part));
    }
    let id = DigestId(1);
    let batch = DigestBatch { id, region: REGION, parts: asked };
    rig.plane(0).digest(batch).expect("a good batch is taken");
    let is_answer = |event: &&DataEvent| matches!(event, DataEvent::Digested { .. });
    rig.until("digests", |rig| rig.seen[0].iter().any(|event| is_answer(&event)));
    rig.idle();
    let answers: Vec<_> = rig.seen[0].iter().filter(is_answer).cloned().collect();
    assert_eq!(answers, [DataEvent::Digested { id, result: Ok(expected) }]);
    for (region, from, len) in [(RegionId(99), 0, 1), (REGION, END, 1), (REGION, 8, u64::MAX)] {
        let mut parts = DigestParts::default();
        parts.begin(1);
        parts.push(from, len);
        let batch = DigestBatch { id: DigestId(2), region, parts };
        assert_invalid(rig.plane(0).digest(batch), "a digest of what is not registered");
    }
    assert!(rig.bytes(0) == bytes, "a digest changed its memory");
}

pub(super) fn refuses_bad_batches(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    let before = [rig.bytes(0), rig.bytes(1)];
    let caps = rig.plane(0).caps();
    for direction in [Direction::Write, Direction::Read] {
        let able = if direction == Direction::Write { caps.write } else { caps.read };
        if !able {
            let refused = rig.submit(SESSION, direction, &[(0, 0, 1)]);
            assert!(matches!(refused, Err(Refused::Unsupported(_))), "got {refused:?}");
            continue;
        }
        for (range, what) in [
            ((END, 0, 1), "local range past the end"),
            ((END - 1, 0, 2), "local range across the end"),
            ((0, END - 1, 2), "remote range across the end"),
            ((0, 0, END + 1), "length past both ends"),
            ((u64::MAX - 3, 0, 8), "local range that wraps"),
            ((0, u64::MAX - 3, 8), "remote range that wraps"),
            ((8, 8, u64::MAX - 3), "length that wraps"),
        ] {
            assert_invalid(rig.submit(SESSION, direction, &[(0, 0, 64), range]), what);
        }
        for (local, remote, len) in [(2, 1, 1), (1, 2, 1), (1, 1, 2), (0, 0, 1)] {
            let (local, remote, len) = (vec![0; local], vec![0; remote], vec![8; len]);
            let (local, remote, len, op) = (&local[..], &remote[..], &len[..], rig.next_op());
            let batch = Submit { op, session: SESSION, direction, local, remote, len };
            assert_invalid(rig.plane(0).submit(batch), "lists of different length");
        }
        if caps.slices_max < 1 << 20 {
            let ranges = vec![(0, 0, 1); caps.slices_max as usize + 1];
            assert_invalid(rig.submit(SESSION, direction, &ranges), "too many slices");
            let op = rig.submit(SESSION, direction, &[(0, 0, 0)].repeat(caps.slices_max as usize));
            assert_eq!(rig.finish(op.expect("as many slices as allowed")), Completion::Done);
        }
    }
    let completed = rig.seen[0].len();
    rig.idle();
    assert_eq!(rig.seen[0].len(), completed, "an event of a refused batch");
    assert!([rig.bytes(0), rig.bytes(1)] == before, "a refused batch moved bytes");
}

pub(super) fn refuses_dead_sessions(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    rig.plane(0).close(SESSION);
    for session in [SESSION, SessionId(99)] {
        let refused = rig.submit(session, Direction::Write, &[(0, 0, 8)]);
        assert_eq!(refused, Err(Refused::Gone), "submit on session {session}");
    }
    rig.assert_untouched(1);
}

pub(super) fn completes_each_operation_once(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    let count = u64::from(rig.plane(0).caps().in_all.operations.min(64));
    let post = |rig: &mut DataHarness<'_>, n: u64| {
        rig.submit(SESSION, Direction::Write, &[(n * 64, n * 64, 64)]).expect("below the limit")
    };
    let ops: Vec<OpId> = (0..count).map(|n| post(&mut rig, n)).collect();
    for op in &ops {
        assert_eq!(rig.finish(*op), Completion::Done);
    }
    rig.idle();
    assert!(ops.iter().all(|op| rig.completions(*op) == 1), "an operation completed twice");
}

pub(super) fn busy_is_back_pressure(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    let caps = rig.plane(0).caps();
    let limit = caps.in_all.at_most(&caps.per_peer);
    let one = Credits { operations: 1, ranges: 2, bytes: 64 };
    if u64::from(limit.operations).min(limit.ranges / 2).min(limit.bytes / 64) > 100_000 {
        return;
    }
    let (mut ops, mut used) = (Vec::new(), Credits::default());
    let refused = loop {
        match rig.submit(SESSION, Direction::Write, &[(0, 0, 32), (64, 64, 32)]) {
            Ok(op) => ops.push(op),
            Err(refused) => break refused,
        }
        assert!(limit.fits(&used, &one), "{used:?} in flight, and one more: beyond {limit:?}");
        used.add(&one);
    };
    assert_eq!(refused, Refused::Busy);
    assert!(!ops.is_empty(), "Busy while nothing is in flight: no event would end it");
    let busy = OpId(ops.len() as u64 + 1);
    let before = rig.seen[0].len();
    rig.until("event after Busy", |rig| rig.seen[0].len() > before);
    ops.push(rig.submit(SESSION, Direction::Write, &[(0, 0, 64)]).expect("room after an event"));
    for op in ops {
        assert_eq!(rig.finish(op), Completion::Done);
    }
    rig.idle();
    assert_eq!(rig.completions(busy), 0, "a refused operation completed");
}

pub(super) fn ids_in_use_are_invalid(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    rig.register(0, REGION);
    let remote = rig.register(1, REGION);
    let (memory, address) = (rig.fixture.memory(0), rig.plane(1).address());
    let empty = Memory::Own(OwnMemory::unproven(4_096, 0));
    assert_invalid(rig.plane(0).register(REGION, memory), "region id in use");
    assert_invalid(rig.plane(0).register(RegionId(77), empty), "empty region");
    assert_invalid(rig.plane(0).deregister(RegionId(78)), "unknown region");
    rig.connect(PEER, FENCE_KEY);
    assert_invalid(rig.plane(0).connect(PEER, &address, FENCE_KEY), "peer id in use");
    let foreign = Address((*b"another kind of plane").into());
    assert_invalid(rig.plane(0).connect(PeerId(9), &foreign, FENCE_KEY), "address of another kind");
    rig.open(SESSION, PEER, &remote).expect("the session opens");
    assert_invalid(rig.plane(0).open(SESSION, REGION, PEER, &remote), "session id in use");
    let other = SessionId(8);
    let garbage = RegionDesc((*b"not a descriptor").into());
    assert_invalid(rig.plane(0).open(other, RegionId(99), PEER, &remote), "unknown region");
    assert_invalid(rig.plane(0).open(other, REGION, PeerId(99), &remote), "unknown peer");
    assert_invalid(rig.plane(0).open(other, REGION, PEER, &garbage), "garbage descriptor");
    let op = rig.submit(SESSION, Direction::Write, &[(0, 0, 64)]).expect("a good batch is taken");
    let (local, remote, len) = (&[0][..], &[0][..], &[64][..]);
    let direction = Direction::Write;
    let twice = Submit { op, session: SESSION, direction, local, remote, len };
    assert_invalid(rig.plane(0).submit(twice), "operation id in use");
    assert_eq!(rig.finish(op), Completion::Done);
}

pub(super) fn empty_operations_complete(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    let before = [rig.bytes(0), rig.bytes(1)];
    let none: &[(u64, u64, u64)] = &[];
    for ranges in [none, &[(0, 0, 0)], &[(END, END, 0), (5, 9, 0)]] {
        let op = rig.submit(SESSION, Direction::Write, ranges).expect("an empty batch is taken");
        assert_eq!(rig.finish(op), Completion::Done);
    }
    assert!([rig.bytes(0), rig.bytes(1)] == before, "an empty operation moved bytes");
}
