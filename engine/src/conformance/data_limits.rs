//! Checks of a data plane at its limits, and of what still moves after each kind of failure.

use super::data_harness::{DataFixture, DataHarness, FENCE_KEY, MEMORY, PEER, REGION, SESSION};
use crate::fabric::{Completion, Direction, Refused, RegionId, SessionId};

const END: u64 = MEMORY as u64;

/// Counts of ranges around which planes split an operation: powers of two, and the 1,024 ranges that
/// one system call of Linux takes (`IOV_MAX`).
const COUNTS: [u64; 15] =
    [1, 2, 127, 128, 129, 255, 256, 257, 1_022, 1_023, 1_024, 1_025, 2_047, 2_048, 2_049];

/// Bytes from one range to the next, on both sides; no range is as long, so that no two are one.
const STRIDE: u64 = 5;

/// Lengths of a range around words, cache lines and pages.
const LENGTHS: [u64; 17] =
    [1, 2, 7, 8, 9, 63, 64, 65, 1_023, 1_024, 1_025, 4_095, 4_096, 4_097, 8_191, 8_192, 8_193];

/// Times that a failure comes back.
const ROUNDS: u32 = 3;

/// Moves a few ranges in each direction.
pub(super) fn assert_serves(rig: &mut DataHarness<'_>, session: SessionId) {
    let at_a_time = rig.plane(0).caps().slices_max.min(2) as usize;
    for direction in rig.directions() {
        for ranges in [(64, 512, 100), (1_000, 4_096, 64)].chunks(at_a_time) {
            rig.assert_moves(session, direction, ranges);
        }
    }
}

/// Ranges of one to four bytes, none of which goes on where another one ends.
fn scattered(count: u64) -> Vec<(u64, u64, u64)> {
    (0..count).map(|n| (n * STRIDE, END - (n + 1) * STRIDE, 1 + n % (STRIDE - 1))).collect()
}

pub(super) fn moves_any_number_of_ranges(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    let most = u64::from(rig.plane(0).caps().slices_max);
    let around = [most.saturating_sub(1), most];
    let is_possible = |count: &u64| (1..=most.min(END / STRIDE)).contains(count);
    let counts: Vec<u64> = COUNTS.into_iter().chain(around).filter(is_possible).collect();
    for direction in rig.directions() {
        for count in &counts {
            rig.assert_moves(SESSION, direction, &scattered(*count));
        }
    }
}

pub(super) fn moves_ranges_of_any_length(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    for direction in rig.directions() {
        for len in LENGTHS.into_iter().chain([END - 1, END]) {
            for (local, remote) in [(0, END - len), (END - len, 0)] {
                rig.assert_moves(SESSION, direction, &[(local, remote, len)]);
            }
        }
    }
}

pub(super) fn session_moves_bytes_after_each_refusal(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    let caps = rig.plane(0).caps();
    for _ in 0..ROUNDS {
        for direction in rig.directions() {
            let refused = rig.submit(SESSION, direction, &[(0, 0, 64), (END, 0, 1)]);
            assert!(matches!(refused, Err(Refused::Invalid(_))), "got {refused:?}");
            assert_serves(&mut rig, SESSION);
        }
        if caps.slices_max < 1 << 20 {
            let ranges = vec![(0, 0, 1); caps.slices_max as usize + 1];
            let refused = rig.submit(SESSION, Direction::Write, &ranges);
            assert!(matches!(refused, Err(Refused::Invalid(_))), "got {refused:?}");
            assert_serves(&mut rig, SESSION);
        }
        if caps.in_all.operations <= 100_000 {
            let mut ops = Vec::new();
            while let Ok(op) = rig.submit(SESSION, Direction::Write, &[(0, 0, 64)]) {
                ops.push(op);
            }
            for op in ops {
                assert_eq!(rig.finish(op), Completion::Done);
            }
            rig.settle(SESSION);
            assert_serves(&mut rig, SESSION);
        }
    }
}

pub(super) fn next_session_moves_bytes_after_each_failure(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    rig.register(0, REGION);
    rig.connect(PEER, FENCE_KEY);
    for round in 0..ROUNDS {
        let region = RegionId(20 + round);
        let [first, second, third] = [0, 1, 2].map(|n| SessionId(3 * round + n));
        let remote = rig.register(1, region);
        rig.open(first, PEER, &remote).expect("the session opens");
        assert_serves(&mut rig, first);
        let ops = rig.writes(first, 8);
        rig.plane(0).close(first);
        for op in ops {
            rig.finish(op);
        }
        rig.settle(first);
        rig.open(second, PEER, &remote).expect("a session opens after one that was closed");
        assert_serves(&mut rig, second);
        rig.plane(1).deregister(region).expect("only own operations keep a region");
        rig.assert_shut_out(second);
        // What failed may take the other direction along, but no later session.
        let remote = rig.register(1, region);
        rig.open(third, PEER, &remote).expect("a session opens after one whose memory went");
        assert_serves(&mut rig, third);
        rig.plane(0).close(third);
        rig.settle(third);
        rig.plane(1).deregister(region).expect("nothing uses it");
    }
}
