//! Checks of a data plane at, one below and one above the limits that its capabilities state.

use super::data_harness::{DataFixture, DataHarness, MEMORY, SESSION};
use super::data_limits::assert_serves;
use crate::fabric::{Completion, Credits, Direction, OpId, Refused};

const END: u64 = MEMORY as u64;

/// Limits from this one on are not looked at: it would take too long to get there.
const FAR: u64 = 1 << 20;

/// Bytes from one range to the next; each has one byte.
const STRIDE: u64 = 3;

/// Most ranges that fit into the memory.
const RANGES: u64 = END / STRIDE - 1;

/// As many ranges of a byte, no two of which go on where another one ends. What is beyond those that fit
/// into the memory is empty ranges, among the others.
fn ranges(count: u64) -> Vec<(u64, u64, u64)> {
    let full = count.min(RANGES);
    let of = |n: u64| (n * STRIDE, END - (n + 1) * STRIDE, 1);
    // The n-th of all stands for the range up to which its share of the full ones goes.
    let at = |n: u64| n * full / count;
    (1..=count)
        .map(|n| if at(n) > at(n - 1) { of(at(n) - 1) } else { (at(n), END - at(n), 0) })
        .collect()
}

/// Submits an operation for which there has to be room.
fn take(
    rig: &mut DataHarness<'_>,
    direction: Direction,
    ranges: &[(u64, u64, u64)],
    what: &str,
) -> OpId {
    rig.submit(SESSION, direction, ranges)
        .unwrap_or_else(|refused| panic!("{direction:?}, {what}: {refused}"))
}

/// Waits for the end of operations, and moves bytes behind them.
fn finish(rig: &mut DataHarness<'_>, ops: Vec<OpId>) {
    for op in ops {
        assert_eq!(rig.finish(op), Completion::Done);
    }
    rig.settle(SESSION);
    assert_serves(rig, SESSION);
}

/// One operation more than there is credit for: the plane has no room, if nothing has ended meanwhile.
fn beyond(rig: &mut DataHarness<'_>, direction: Direction, more: &[(u64, u64, u64)]) -> Vec<OpId> {
    match rig.submit(SESSION, direction, more) {
        Ok(op) => vec![op],
        Err(refused) => {
            assert_eq!(refused, Refused::Busy, "{direction:?} beyond the credit");
            Vec::new()
        }
    }
}

/// Limits of what is in flight between the planes of the fixture.
fn credit(rig: &mut DataHarness<'_>) -> Credits {
    let caps = rig.plane(0).caps();
    caps.in_all.at_most(&caps.per_peer)
}

pub(super) fn operations_have_as_many_ranges_as_is_said(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    let most = u64::from(rig.plane(0).caps().slices_max);
    if most >= FAR {
        return;
    }
    for direction in rig.directions() {
        for count in [most - 1, most].into_iter().filter(|count| *count > 0) {
            rig.assert_moves(SESSION, direction, &ranges(count));
        }
        for one_more in [ranges(most + 1), vec![(0, 0, 0); most as usize + 1]] {
            let refused = rig.submit(SESSION, direction, &one_more);
            assert!(matches!(refused, Err(Refused::Invalid(_))), "{direction:?}: {refused:?}");
            assert_serves(&mut rig, SESSION);
        }
    }
}

pub(super) fn operations_are_taken_up_to_the_credit(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    let limit = u64::from(credit(&mut rig).operations);
    if limit >= FAR {
        return;
    }
    for direction in rig.directions() {
        for count in [limit - 1, limit] {
            let what = format!("{count} operations of {limit}");
            let one = |n: u64| [(n * 64 % END, n * 64 % END, 64)];
            let mut ops: Vec<OpId> =
                (0..count).map(|n| take(&mut rig, direction, &one(n), &what)).collect();
            if count == limit {
                ops.extend(beyond(&mut rig, direction, &one(limit)));
            }
            finish(&mut rig, ops);
        }
    }
}

pub(super) fn ranges_are_taken_up_to_the_credit(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    let (limit, caps) = (credit(&mut rig).ranges, rig.plane(0).caps());
    let each = u64::from(caps.slices_max).min(RANGES).min(limit);
    if limit >= FAR || limit.div_ceil(each) > u64::from(credit(&mut rig).operations) {
        return;
    }
    for direction in rig.directions() {
        for count in [limit - 1, limit] {
            let what = format!("{count} ranges of {limit}");
            let (mut ops, mut left) = (Vec::new(), count);
            while left > 0 {
                ops.push(take(&mut rig, direction, &ranges(left.min(each)), &what));
                left -= left.min(each);
            }
            if count == limit {
                ops.extend(beyond(&mut rig, direction, &ranges(1)));
            }
            finish(&mut rig, ops);
        }
    }
}

pub(super) fn bytes_are_taken_up_to_the_credit(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    let limit = credit(&mut rig).bytes;
    let each = END.min(limit);
    if limit >= FAR || limit.div_ceil(each) > u64::from(credit(&mut rig).operations) {
        return;
    }
    for direction in rig.directions() {
        for count in [limit - 1, limit] {
            let what = format!("{count} bytes of {limit}");
            let (mut ops, mut left) = (Vec::new(), count);
            while left > 0 {
                let len = left.min(each);
                ops.push(take(&mut rig, direction, &[(0, END - len, len)], &what));
                left -= len;
            }
            if count == limit {
                ops.extend(beyond(&mut rig, direction, &[(0, 0, 1)]));
            }
            finish(&mut rig, ops);
        }
    }
}
