//! The engine over a plane that does what the test says.

mod fake;
mod faults;
mod requests;

use fake::{Fake, Hand, address, region, until};
use kvferry_engine::fabric::{Completion, DataEvent, Direction, FabricError, Landed, OwnMemory};
use kvferry_mori_compat::{
    CompatEngine, CompatEngineDesc, CompatError, CompatMemoryDesc, CompatSession, CompatSettings,
    CompatStatusCode, CompatTransferStatus,
};
use std::sync::Arc;
use std::time::Duration;

const SIZE: u64 = 4096;

/// An engine with one session to a peer named `peer`.
struct CompatTestRig {
    memory: Vec<u8>,
    hand: Hand,
    engine: CompatEngine,
    local: CompatMemoryDesc,
    session: CompatSession,
}

impl CompatTestRig {
    fn new(settings: &CompatSettings) -> CompatTestRig {
        let memory: Vec<u8> = (0..SIZE).map(|n| (n % 251) as u8).collect();
        let (plane, hand) = Fake::boxed("me");
        let engine = CompatEngine::over(plane, settings).unwrap_or_else(|why| panic!("{why}"));
        let local = engine
            // SAFETY: The rig has both, and drops the engine first or with it; the plane reaches
            // for nothing.
            .register_memory(unsafe { OwnMemory::new(memory.as_ptr() as u64, SIZE) })
            .unwrap_or_else(|why| panic!("{why}"));
        engine.register_remote_engine(&peer(7)).unwrap_or_else(|why| panic!("{why}"));
        let session =
            engine.create_session(&local, &remote()).unwrap_or_else(|why| panic!("{why}"));
        CompatTestRig { memory, hand, engine, local, session }
    }

    fn read(&self, slices: &[u64]) -> Arc<CompatTransferStatus> {
        let len = vec![8; slices.len()];
        self.session.post(Direction::Read, slices.to_vec(), slices.to_vec(), len, 5)
    }
}

fn peer(port: i32) -> CompatEngineDesc {
    CompatEngineDesc::unpack(&address("peer", port)).expect("valid")
}

fn remote() -> CompatMemoryDesc {
    CompatMemoryDesc::unpack(&region("peer", 0x1000, SIZE)).expect("valid")
}

fn failed(landed: Landed) -> Completion {
    Completion::Failed { cause: FabricError::QueuePair, landed }
}

#[test]
fn a_batch_is_done_when_all_of_its_operations_are() {
    let rig = CompatTestRig::new(&CompatSettings::default());
    let status = rig.read(&[0, 8, 16, 24, 32]);
    let ops: Vec<_> = rig.hand.seen().ops.iter().map(|(_, _, local)| local.clone()).collect();
    assert_eq!(ops, [vec![0, 8], vec![16, 24], vec![32]], "as many slices as the plane takes");
    for nth in [2, 0] {
        rig.hand.complete(rig.hand.op(nth), Completion::Done);
    }
    let other = rig.read(&[40]);
    rig.hand.complete(rig.hand.op(3), Completion::Done);
    until(|| other.succeeded());
    assert_eq!(status.code(), CompatStatusCode::InProgress);
    rig.hand.complete(rig.hand.op(1), Completion::Done);
    until(|| status.succeeded());
    assert_eq!(status.message(), "");
    assert!(rig.read(&[]).succeeded(), "nothing is done at once");
}

#[test]
fn a_failure_is_told_once_nothing_can_land_any_more() {
    let rig = CompatTestRig::new(&CompatSettings::default());
    let status = rig.read(&[0, 8, 16]);
    rig.hand.complete(rig.hand.op(0), failed(Landed::Unknown));
    rig.hand.complete(rig.hand.op(1), Completion::Done);
    until(|| !rig.hand.seen().tickets.is_empty());
    assert_eq!(status.code(), CompatStatusCode::InProgress);
    let (session, ticket) = rig.hand.seen().tickets[0];
    rig.hand.tell(DataEvent::Quiet { session, ticket });
    until(|| status.failed());
    assert_eq!((status.code(), status.message()), (CompatStatusCode::RdmaOp, "queue pair error"));

    let clean = rig.read(&[0]);
    rig.hand.complete(rig.hand.op(2), failed(Landed::None));
    until(|| clean.failed());
    assert_eq!(rig.hand.seen().tickets.len(), 1, "what left no byte needs no quiet");

    rig.hand.seen().quiet_at_once = true;
    let status = rig.read(&[0]);
    rig.hand.complete(rig.hand.op(3), failed(Landed::Unknown));
    until(|| status.failed());
}

#[test]
fn a_full_queue_is_waited_for_and_then_told_as_mori_does() {
    let settings = CompatSettings { backoff: Duration::ZERO, ..CompatSettings::default() };
    let rig = CompatTestRig::new(&settings);
    rig.hand.seen().credits = Some(0);
    let status = rig.read(&[0]);
    assert!(status.failed() && status.message().starts_with("SQ full"), "{}", status.message());

    let rig = CompatTestRig::new(&CompatSettings { backoff: Duration::from_secs(300), ..settings });
    rig.hand.seen().credits = Some(1);
    std::thread::scope(|scope| {
        let posting = scope.spawn(|| rig.read(&[0, 8, 16]));
        let first = rig.hand.op(0);
        rig.hand.seen().credits = Some(1);
        rig.hand.complete(first, Completion::Done);
        let status = posting.join().expect("no panic");
        rig.hand.complete(rig.hand.op(1), Completion::Done);
        until(|| status.succeeded());
    });
}

#[test]
fn wrong_calls_fail_and_post_nothing() {
    let rig = CompatTestRig::new(&CompatSettings::default());
    let status = rig.session.post(Direction::Write, vec![0, 8], vec![0], vec![8, 8], 1);
    assert_eq!(status.code(), CompatStatusCode::InvalidArgs);
    assert!(status.message().contains("2 local and 1 remote offsets for 2 sizes"));
    assert!(rig.hand.seen().ops.is_empty());

    let stranger = CompatMemoryDesc::unpack(&region("nobody", 0, 8)).expect("valid");
    let why = rig.engine.create_session(&rig.local, &stranger).expect_err("no such peer");
    assert!(why.to_string().contains("register_remote_engine"), "{why}");
    let why = rig.engine.create_session(&remote(), &remote()).expect_err("not ours");
    assert!(why.to_string().contains("not registered here"), "{why}");
    let other = CompatEngineDesc::unpack(&address("other", 0)).expect("valid");
    let why = rig.engine.register_remote_engine(&other).expect_err("another fabric");
    assert!(matches!(&why, CompatError::Plane(text) if text.contains("both sides")), "{why}");
    assert!(CompatEngineDesc::unpack(b"\x00").is_err() && CompatMemoryDesc::unpack(b"").is_err());
}

#[test]
fn a_session_that_cannot_be_opened_says_why() {
    let rig = CompatTestRig::new(&CompatSettings::default());
    rig.hand.seen().refuse_open = Some(FabricError::Unreachable);
    let why = rig.engine.create_session(&rig.local, &remote()).expect_err("unreachable");
    assert_eq!(why.to_string(), "me: cannot open a session with peer: peer unreachable");
    assert_eq!(rig.hand.seen().closed.len(), 1);
}

#[test]
fn a_peer_with_another_address_is_another_peer() {
    let rig = CompatTestRig::new(&CompatSettings::default());
    rig.engine.register_remote_engine(&peer(7)).expect("the same again");
    assert!(rig.hand.seen().closed.is_empty());
    rig.engine.register_remote_engine(&peer(8)).expect("restarted");
    let status = rig.read(&[0]);
    assert_eq!(status.code(), CompatStatusCode::BadState);
    assert!(status.message().contains("came back with another address"), "{}", status.message());
    let fresh = rig.engine.create_session(&rig.local, &remote()).expect("to the new one");
    let status = fresh.post(Direction::Write, vec![0], vec![0], vec![8], 1);
    rig.hand.complete(rig.hand.op(0), Completion::Done);
    until(|| status.succeeded());
}

#[test]
fn a_session_is_closed_when_its_transfers_are_over() {
    let CompatTestRig { hand, session, engine, memory, .. } =
        CompatTestRig::new(&CompatSettings::default());
    let status = session.post(Direction::Read, vec![0], vec![0], vec![8], 1);
    drop(session);
    assert!(hand.seen().closed.is_empty());
    hand.complete(hand.op(0), Completion::Done);
    until(|| status.succeeded());
    assert_eq!(hand.seen().closed.len(), 1);
    drop((engine, memory));
}

#[test]
fn what_is_under_way_fails_with_its_engine() {
    let CompatTestRig { session, engine, .. } = CompatTestRig::new(&CompatSettings::default());
    let post = || session.post(Direction::Read, vec![0], vec![0], vec![8], 1);
    let status = post();
    drop(engine);
    assert_eq!(
        (status.code(), status.message()),
        (CompatStatusCode::BadState, "the engine was closed")
    );
    assert!(post().message().contains("the engine is closed"));
}

#[test]
fn where_others_reach_it_an_engine_needs_a_secret_or_a_word() {
    // Kept for documentation: no machine has it.
    let start = |settings: &CompatSettings| {
        CompatEngine::start("me", "192.0.2.1", 0, 1, settings).expect_err("it is not here")
    };
    let mut settings = CompatSettings::default();
    let why = start(&settings).to_string();
    assert!(why.contains("host = 192.0.2.1: others reach this address"), "{why}");
    assert!(
        why.contains("KVFERRY_SECRET_FILE") && why.contains("KVFERRY_INSECURE_NETWORK=1"),
        "{why}"
    );
    settings.fabric.trust.insecure_network = true;
    let why = start(&settings).to_string();
    assert!(why.contains("cannot listen at 192.0.2.1"), "{why}");
}

#[test]
fn a_peer_that_deals_with_no_such_engines_is_heard() {
    let said = "10.0.0.1:6301 deals with none: its moriio_peers true lets them in";
    let why = CompatEngineDesc::unpack(said.as_bytes()).expect_err("no address").to_string();
    assert!(why.contains(&format!("the peer says: {said}")), "{why}");
}
