//! Checks of what a data plane says of bytes whose session, peer or backend ends, and of whom that costs
//! nothing.

use super::data_harness::{DataFixture, DataHarness, FENCE_KEY, MEMORY, PEER, REGION, SESSION};
use crate::fabric::{
    Completion, DataEvent, FenceScope, Landed, OpId, PeerId, QuiesceTicket, Refused, RegionDesc,
    SessionId,
};

/// Bytes of a write of [`DataHarness::writes`].
const WRITE: usize = 64;

/// Fills both memories, so that each byte of plane 1 tells whether it was written.
fn fresh(rig: &mut DataHarness<'_>, round: u32) -> [Vec<u8>; 2] {
    let from = vec![round as u8 | 1; MEMORY];
    let to = vec![0; MEMORY];
    rig.fixture.poke(0, 0, &from);
    rig.fixture.poke(1, 0, &to);
    [from, to]
}

/// Compares what landed of each write with what its outcome says.
fn assert_landed(rig: &mut DataHarness<'_>, ops: &[OpId], [from, to]: &[Vec<u8>; 2]) {
    let bytes = rig.bytes(1);
    for (n, op) in ops.iter().enumerate() {
        let range = n * WRITE..(n + 1) * WRITE;
        let expected = match rig.finish(*op) {
            Completion::Done | Completion::Failed { landed: Landed::All, .. } => from,
            Completion::Failed { landed: Landed::None, .. } => to,
            Completion::Failed { landed: Landed::Unknown, .. } => continue,
        };
        let outcome = rig.outcome(*op).expect("it ended");
        assert!(bytes[range.clone()] == expected[range], "write {n} is {outcome:?}");
    }
    let rest = ops.len() * WRITE..MEMORY;
    assert!(bytes[rest.clone()] == to[rest], "bytes landed that nobody wrote");
}

pub(super) fn outcomes_say_what_landed(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    rig.register(0, REGION);
    let remote = rig.register(1, REGION);
    rig.connect(PEER, FENCE_KEY);
    for (round, moment) in (0..40).step_by(3).map(Some).chain([None]).enumerate() {
        let (session, round) = (SessionId(round as u32), round as u32);
        rig.open(session, PEER, &remote).expect("the session opens");
        let memory = fresh(&mut rig, round);
        let ops = rig.writes(session, 8);
        match moment {
            Some(rounds) => (0..rounds).for_each(|_| rig.pump()),
            // What is done lands, though its session is closed before it was quiet.
            None => ops.iter().for_each(|op| assert_eq!(rig.finish(*op), Completion::Done)),
        }
        rig.plane(0).close(session);
        rig.quiesce(session, QuiesceTicket(u64::from(round)));
        assert_landed(&mut rig, &ops, &memory);
    }
}

/// Connects two peers and opens [`SESSION`] with [`PEER`]. Returns the session with the other one, and the
/// region of both.
fn two_peers(rig: &mut DataHarness<'_>) -> (SessionId, RegionDesc) {
    rig.register(0, REGION);
    let remote = rig.register(1, REGION);
    let (other, kept) = (PeerId(6), SessionId(8));
    rig.connect(PEER, FENCE_KEY);
    rig.connect(other, FENCE_KEY + 1);
    rig.open(SESSION, PEER, &remote).expect("the session opens");
    rig.open(kept, other, &remote).expect("a session with another peer opens");
    (kept, remote)
}

pub(super) fn disconnect_closes_the_sessions_of_one_peer(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    let (kept, remote) = two_peers(&mut rig);
    let (ended, spared) = (rig.writes(SESSION, 4), rig.writes(kept, 4));
    rig.plane(0).quiesce(SESSION, QuiesceTicket(1));
    rig.plane(0).disconnect(PEER);
    rig.plane(0).disconnect(PEER);
    rig.until("Quiet", |rig| rig.quiets(SESSION, QuiesceTicket(1)) > 0);
    assert!(ended.iter().all(|op| rig.completions(*op) == 1), "operations end before Quiet");
    for op in spared {
        assert_eq!(rig.finish(op), Completion::Done, "an operation with another peer");
    }
    rig.settle(kept);
    let refused = rig.plane(0).open(SessionId(9), REGION, PEER, &remote);
    assert!(matches!(refused, Err(Refused::Invalid(_))), "open with who is forgotten: {refused:?}");
    rig.assert_shut_out(SESSION);
    // Its id is free.
    rig.plane(1).disconnect(PEER);
    rig.connect(PEER, FENCE_KEY + 2);
    let again = SessionId(10);
    rig.open(again, PEER, &remote).expect("a session opens with a peer of the same id");
    let op = rig.writes(again, 1)[0];
    assert_eq!(rig.finish(op), Completion::Done);
    assert!(ended.iter().all(|op| rig.completions(*op) == 1), "an operation ended twice");
}

pub(super) fn fence_spares_others_and_own_operations(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::new(fixture);
    if rig.fixture.fence_scope() != FenceScope::Peer {
        return;
    }
    let (kept, _) = two_peers(&mut rig);
    let own = rig.writes(SESSION, 4);
    rig.plane(0).fence(PEER);
    rig.until("Fenced", |rig| rig.seen[0].contains(&DataEvent::Fenced { peer: PEER }));
    for op in own {
        assert_eq!(rig.finish(op), Completion::Done, "an own operation towards who was fenced");
    }
    let spared = rig.writes(kept, 4);
    rig.plane(1).fence(PEER);
    rig.until("Fenced", |rig| rig.seen[1].contains(&DataEvent::Fenced { peer: PEER }));
    for op in spared {
        assert_eq!(rig.finish(op), Completion::Done, "an operation of another peer");
    }
    let op = rig.writes(kept, 1)[0];
    assert_eq!(rig.finish(op), Completion::Done, "an operation of another peer, after the fence");
    // The id of who was fenced stays in use until it is disconnected.
    let address = rig.plane(0).address();
    let refused = rig.plane(1).connect(PEER, &address, FENCE_KEY + 2);
    assert!(matches!(refused, Err(Refused::Invalid(_))), "id of a fenced peer: {refused:?}");
    rig.plane(1).disconnect(PEER);
    rig.plane(1).connect(PEER, &address, FENCE_KEY + 2).expect("its id is free");
}
