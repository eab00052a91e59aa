//! Checks of how a data plane stops: quiet, close, fence, deregister, death.

use super::data_harness::{DataFixture, DataHarness, FENCE_KEY, PEER, REGION, SESSION};
use crate::fabric::{
    Completion, DataEvent, Direction, FenceScope, OpId, PeerId, QuiesceTicket, Refused, RegionDesc,
    RegionId, SessionId,
};

fn position(rig: &DataHarness<'_>, event: &DataEvent) -> usize {
    rig.seen[0].iter().position(|seen| seen == event).expect("it was seen")
}

fn last_completion(rig: &DataHarness<'_>, ops: &[OpId]) -> usize {
    let mine = |e: &DataEvent| matches!(e, DataEvent::Completed { op, .. } if ops.contains(op));
    rig.seen[0].iter().rposition(mine).expect("operations completed")
}

pub(super) fn quiet_answers_each_ticket_once(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    rig.plane(0).quiesce(SESSION, QuiesceTicket(1));
    let first = rig.writes(SESSION, 4);
    rig.plane(0).quiesce(SESSION, QuiesceTicket(2));
    rig.plane(0).quiesce(SESSION, QuiesceTicket(3));
    let second = rig.writes(SESSION, 4);
    rig.plane(0).quiesce(SESSION, QuiesceTicket(4));
    for op in first.iter().chain(&second) {
        assert_eq!(rig.finish(*op), Completion::Done);
    }
    for ticket in 1..=4 {
        rig.until("Quiet", |rig| rig.quiets(SESSION, QuiesceTicket(ticket)) > 0);
    }
    rig.idle();
    for ticket in 1..=4 {
        assert_eq!(rig.quiets(SESSION, QuiesceTicket(ticket)), 1, "answers to ticket {ticket}");
    }
    for (ticket, ops) in [(2, &first), (3, &first), (4, &second)] {
        let quiet = DataEvent::Quiet { session: SESSION, ticket: QuiesceTicket(ticket) };
        let after = position(&rig, &quiet) > last_completion(&rig, ops);
        assert!(after, "ticket {ticket} was answered before the operations ahead of it");
    }
}

pub(super) fn unknown_sessions_are_quiet(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    rig.quiesce(SessionId(99), QuiesceTicket(1));
    rig.plane(0).close(SESSION);
    rig.idle();
    rig.quiesce(SESSION, QuiesceTicket(2));
    rig.idle();
    assert_eq!(rig.quiets(SessionId(99), QuiesceTicket(1)), 1);
    assert_eq!(rig.quiets(SESSION, QuiesceTicket(2)), 1);
}

pub(super) fn close_fails_operations_then_is_quiet(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    let ops = rig.writes(SESSION, 16);
    rig.plane(0).quiesce(SESSION, QuiesceTicket(1));
    rig.plane(0).close(SESSION);
    rig.plane(0).close(SESSION);
    rig.plane(0).quiesce(SESSION, QuiesceTicket(2));
    for ticket in [QuiesceTicket(1), QuiesceTicket(2)] {
        rig.until("Quiet after close", |rig| rig.quiets(SESSION, ticket) > 0);
    }
    let quiet = DataEvent::Quiet { session: SESSION, ticket: QuiesceTicket(1) };
    assert!(ops.iter().all(|op| rig.completions(*op) == 1), "all operations end before Quiet");
    assert!(position(&rig, &quiet) > last_completion(&rig, &ops));
    rig.assert_untouched(1);
    assert!(ops.iter().all(|op| rig.completions(*op) == 1), "an operation ended twice");
    assert_eq!(rig.quiets(SESSION, QuiesceTicket(1)), 1);
}

pub(super) fn close_spares_other_sessions(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    rig.register(0, REGION);
    let remote = rig.register(1, REGION);
    rig.connect(PEER, FENCE_KEY);
    rig.open(SESSION, PEER, &remote).expect("the session opens");
    rig.open(SessionId(8), PEER, &remote).expect("a second session opens");
    rig.writes(SESSION, 4);
    let kept = rig.writes(SessionId(8), 4);
    rig.plane(0).close(SESSION);
    for op in kept {
        assert_eq!(rig.finish(op), Completion::Done);
    }
    let op = rig.writes(SessionId(8), 1)[0];
    assert_eq!(rig.finish(op), Completion::Done);
}

/// Has plane 1 fence a peer.
pub(super) fn fence(rig: &mut DataHarness<'_>, peer: PeerId) {
    rig.plane(1).fence(peer);
    let answer = DataEvent::Fenced { peer };
    rig.until("Fenced", |rig| rig.seen[1].contains(&answer));
}

/// Rounds after which something is cut off: before, amid and after the landing of its bytes.
fn moments() -> impl Iterator<Item = u32> {
    (0..40).step_by(3)
}

/// A descriptor of plane 1's memory that is good after a fence.
pub(super) fn renewed(rig: &mut DataHarness<'_>, remote: RegionDesc) -> RegionDesc {
    match rig.fixture.fence_scope() {
        FenceScope::Peer => return remote,
        FenceScope::Region => rig.plane(1).deregister(REGION).expect("nothing uses it"),
        FenceScope::Backend => {
            let resets = |rig: &DataHarness<'_>| {
                rig.seen[1].iter().filter(|e| matches!(e, DataEvent::Reset { .. })).count()
            };
            let fences =
                rig.seen[1].iter().filter(|e| matches!(e, DataEvent::Fenced { .. })).count();
            rig.until("Reset", |rig| resets(rig) >= fences);
        }
    }
    rig.register(1, REGION)
}

pub(super) fn fence_keeps_the_pass_out(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    rig.register(0, REGION);
    let mut remote = rig.register(1, REGION);
    for (n, rounds) in (0..).zip(moments()) {
        let (peer, session, fence_key) = (PeerId(n), SessionId(2 * n), FENCE_KEY + u64::from(n));
        rig.connect(peer, fence_key);
        rig.open(session, peer, &remote).expect("the session opens");
        let ops = rig.writes(session, 8);
        (0..rounds).for_each(|_| rig.pump());
        fence(&mut rig, peer);
        rig.assert_untouched(1);
        for op in ops {
            rig.finish(op);
        }
        rig.assert_shut_out(session);
        rig.quiesce(session, QuiesceTicket(u64::from(n)));
        // Being let in again under the old fence key changes nothing.
        remote = renewed(&mut rig, remote);
        let address = rig.plane(0).address();
        rig.plane(1).disconnect(peer);
        rig.plane(1).connect(peer, &address, fence_key).expect("a peer connects");
        let again = SessionId(2 * n + 1);
        if rig.open(again, peer, &remote).is_ok() {
            rig.assert_shut_out(again);
        }
    }
    fence(&mut rig, PeerId(99));
}

pub(super) fn new_pass_lets_in_again(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    rig.register(0, REGION);
    let mut remote = rig.register(1, REGION);
    rig.connect(PEER, FENCE_KEY);
    rig.open(SESSION, PEER, &remote).expect("the session opens");
    fence(&mut rig, PEER);
    remote = renewed(&mut rig, remote);
    let (peer, session) = (PeerId(6), SessionId(8));
    rig.connect(peer, FENCE_KEY + 1);
    rig.open(session, peer, &remote).expect("a session under the new fence key opens");
    let expected = rig.bytes(0)[..64].to_vec();
    let op = rig.writes(session, 1)[0];
    assert_eq!(rig.finish(op), Completion::Done);
    rig.quiesce(session, QuiesceTicket(1));
    assert!(rig.bytes(1)[..64] == expected, "the new fence key moves bytes");
    rig.assert_shut_out(SESSION);
}

pub(super) fn wrong_pass_reaches_nothing(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    rig.register(0, REGION);
    let remote = rig.register(1, REGION);
    rig.connect_with(PEER, [FENCE_KEY, FENCE_KEY + 1]);
    if rig.open(SESSION, PEER, &remote).is_ok() {
        rig.assert_shut_out(SESSION);
    }
}

pub(super) fn deregister_waits_for_own_operations(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    let ops = rig.writes(SESSION, 4);
    assert_eq!(rig.plane(0).deregister(REGION), Err(Refused::Busy));
    for op in ops {
        assert_eq!(rig.finish(op), Completion::Done);
    }
    rig.plane(0).deregister(REGION).expect("nothing uses the region any more");
    let refused = rig.submit(SESSION, Direction::Read, &[(0, 0, 64)]);
    assert!(refused.is_err(), "submit on a region that is gone");
    rig.assert_untouched(0);
    rig.register(0, REGION);
}

pub(super) fn deregister_ends_remote_access(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    rig.register(0, REGION);
    rig.connect(PEER, FENCE_KEY);
    for (n, rounds) in (0..).zip(moments()) {
        let (region, session) = (RegionId(20), SessionId(n));
        let remote = rig.register(1, region);
        rig.open(session, PEER, &remote).expect("the session opens");
        let ops = rig.writes(session, 8);
        (0..rounds).for_each(|_| rig.pump());
        rig.plane(1).deregister(region).expect("only own operations keep a region");
        rig.assert_untouched(1);
        for op in ops {
            rig.finish(op);
        }
        rig.assert_shut_out(session);
        // The same id names a new region; what was known of the old one does not reach it.
        rig.register(1, region);
        let again = SessionId(n + 1_000);
        if rig.open(again, PEER, &remote).is_ok() {
            rig.assert_shut_out(again);
        }
        rig.plane(1).deregister(region).expect("nothing uses it");
    }
}

pub(super) fn peer_death_fails_operations(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    let mut ops = rig.writes(SESSION, 4);
    // What a real process did before its end is done.
    let early = if rig.fixture.runs_by_itself() { ops.len() } else { 0 };
    if !rig.fixture.kill() {
        return;
    }
    match rig.submit(SESSION, Direction::Write, &[(0, 0, 64)]) {
        Ok(op) => ops.push(op),
        Err(refused) => assert_eq!(refused, Refused::Gone),
    }
    for (n, op) in ops.iter().enumerate() {
        let outcome = rig.finish(*op);
        let done = outcome == Completion::Done;
        assert!(n < early || !done, "a write to a dead process succeeded");
    }
    rig.quiesce(SESSION, QuiesceTicket(1));
    rig.plane(0).close(SESSION);
    rig.quiesce(SESSION, QuiesceTicket(2));
    rig.plane(0).deregister(REGION).expect("nothing uses the region any more");
    assert!(ops.iter().all(|op| rig.completions(*op) == 1), "an operation ended twice");
}
