//! A data plane whose backend goes and comes back, as MoRI's when a port flaps.

use super::data_harness::{DataFixture, DataHarness, FENCE_KEY, REGION};
use super::data_limits::assert_serves;
use crate::fabric::{
    DataEvent, Direction, OpId, PeerId, QuiesceTicket, Refused, RegionDesc, SessionId,
};

/// How often it goes.
const FLAPS: u32 = 5;

/// Rounds between two flaps in which nobody polls.
const FLAP_ROUNDS: u32 = 200;

fn resets(rig: &DataHarness<'_>, plane: usize) -> usize {
    rig.seen[plane].iter().filter(|event| matches!(event, DataEvent::Reset { .. })).count()
}

/// Writes until the session takes nothing more; what it took.
fn write_until_gone(rig: &mut DataHarness<'_>, session: SessionId) -> Vec<OpId> {
    let mut ops = Vec::new();
    loop {
        match rig.submit(session, Direction::Write, &[(0, 0, 64), (128, 64, 64)]) {
            Ok(op) => ops.push(op),
            Err(Refused::Busy) => rig.pump(),
            Err(Refused::Gone) => return ops,
            Err(other) => panic!("expected Gone, got {other:?}"),
        }
    }
}

/// Memory of plane 1 under a descriptor that it has not given out.
fn fresh(rig: &mut DataHarness<'_>) -> RegionDesc {
    // Unless a reset has done so already.
    let _registered = rig.plane(1).deregister(REGION);
    rig.register(1, REGION)
}

/// While there is no backend everything is answered, and nothing moves.
fn answers_without(
    rig: &mut DataHarness<'_>,
    (session, peer): (SessionId, PeerId),
    remote: &RegionDesc,
) {
    rig.quiesce(session, QuiesceTicket(1));
    rig.assert_untouched(1);
    let other = SessionId(session.0 + 1);
    assert!(rig.open(other, peer, remote).is_err(), "there is no backend to open anything");
    rig.plane(0).close(other);
    rig.plane(0).fence(peer);
    rig.until("Fenced", |rig| rig.seen[0].contains(&DataEvent::Fenced { peer }));
}

pub(super) fn a_backend_that_is_gone_is_replaced(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    rig.register(0, REGION);
    let mut remote = rig.register(1, REGION);
    for flap in 0..FLAPS {
        let (peer, session) = (PeerId(flap), SessionId(2 * flap));
        rig.connect(peer, FENCE_KEY + u64::from(flap));
        rig.open(session, peer, &remote).expect("the session opens");
        assert_serves(&mut rig, session);
        if !rig.fixture.backend(false) {
            return;
        }
        let ops = write_until_gone(&mut rig, session);
        for op in &ops {
            rig.finish(*op);
        }
        answers_without(&mut rig, (session, peer), &remote);
        rig.fixture.backend(true);
        rig.until("Reset", |rig| resets(rig, 0) > flap as usize);
        let again = rig.submit(session, Direction::Write, &[(0, 0, 64)]);
        assert!(again.is_err(), "a session outlived its backend");
        assert!(ops.iter().all(|op| rig.completions(*op) == 1), "an operation ended twice");
        rig.register(0, REGION);
        rig.plane(1).disconnect(peer);
        remote = fresh(&mut rig);
    }
}

pub(super) fn one_poll_reports_one_reset_at_most(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    rig.register(0, REGION);
    let before = rig.plane(0).address();
    for there in [false, true, false, true] {
        if !rig.fixture.backend(there) {
            return;
        }
        // The owner of the plane does nothing meanwhile.
        (0..FLAP_ROUNDS).for_each(|_| rig.fixture.advance());
    }
    rig.idle();
    if rig.fixture.runs_by_itself() {
        // Its backend may be replaced at this moment.
        return;
    }
    let last = rig.seen[0].iter().rev().find_map(|event| match event {
        DataEvent::Reset { address } => Some(address.clone()),
        _ => None,
    });
    let address = rig.plane(0).address();
    assert_eq!(last.unwrap_or(before), address, "the last reset names the backend that there is");
}
