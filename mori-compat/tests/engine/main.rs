//! The engine over a plane that does what the test says.

mod drills;
mod fake;

use engine::fabric::{Cause, DataEvent, Direction, Landed, Outcome};
use fake::{Fake, Hand, address, region, until};
use mori_compat::{Code, Engine, EngineDesc, Error, MemoryDesc, Session, Settings, Status};
use std::sync::Arc;
use std::time::Duration;

const SIZE: u64 = 4096;

/// An engine with one session to a peer named `peer`.
struct Rig {
    memory: Vec<u8>,
    hand: Hand,
    engine: Engine,
    local: MemoryDesc,
    session: Session,
}

impl Rig {
    fn new(settings: &Settings) -> Rig {
        let memory: Vec<u8> = (0..SIZE).map(|n| (n % 251) as u8).collect();
        let (plane, hand) = Fake::boxed("me");
        let engine = Engine::over(plane, settings).unwrap_or_else(|why| panic!("{why}"));
        let local = engine
            .register_memory(memory.as_ptr() as u64, SIZE)
            .unwrap_or_else(|why| panic!("{why}"));
        engine.register_remote_engine(&peer(7)).unwrap_or_else(|why| panic!("{why}"));
        let session =
            engine.create_session(&local, &remote()).unwrap_or_else(|why| panic!("{why}"));
        Rig { memory, hand, engine, local, session }
    }

    fn read(&self, slices: &[u64]) -> Arc<Status> {
        let len = vec![8; slices.len()];
        self.session.post(Direction::Read, slices.to_vec(), slices.to_vec(), len, 5)
    }
}

fn peer(port: i32) -> EngineDesc {
    EngineDesc::unpack(&address("peer", port)).expect("valid")
}

fn remote() -> MemoryDesc {
    MemoryDesc::unpack(&region("peer", 0x1000, SIZE)).expect("valid")
}

fn failed(landed: Landed) -> Outcome {
    Outcome::Failed { cause: Cause::QueuePair, landed }
}

#[test]
fn a_batch_is_done_when_all_of_its_operations_are() {
    let rig = Rig::new(&Settings::default());
    let status = rig.read(&[0, 8, 16, 24, 32]);
    let ops: Vec<_> = rig.hand.seen().ops.iter().map(|(_, _, local)| local.clone()).collect();
    assert_eq!(ops, [vec![0, 8], vec![16, 24], vec![32]], "as many slices as the plane takes");
    for nth in [2, 0] {
        rig.hand.complete(rig.hand.op(nth), Outcome::Done);
    }
    let other = rig.read(&[40]);
    rig.hand.complete(rig.hand.op(3), Outcome::Done);
    until(|| other.succeeded());
    assert_eq!(status.code(), Code::InProgress);
    rig.hand.complete(rig.hand.op(1), Outcome::Done);
    until(|| status.succeeded());
    assert_eq!(status.message(), "");
    assert!(rig.read(&[]).succeeded(), "nothing is done at once");
}

#[test]
fn a_failure_is_told_once_nothing_can_land_any_more() {
    let rig = Rig::new(&Settings::default());
    let status = rig.read(&[0, 8, 16]);
    rig.hand.complete(rig.hand.op(0), failed(Landed::Unknown));
    rig.hand.complete(rig.hand.op(1), Outcome::Done);
    until(|| !rig.hand.seen().tickets.is_empty());
    assert_eq!(status.code(), Code::InProgress);
    let (session, ticket) = rig.hand.seen().tickets[0];
    rig.hand.tell(DataEvent::Quiet { session, ticket });
    until(|| status.failed());
    assert_eq!((status.code(), status.message()), (Code::RdmaOp, "queue pair error"));

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
    let settings = Settings { backoff: Duration::ZERO, ..Settings::default() };
    let rig = Rig::new(&settings);
    rig.hand.seen().credits = Some(0);
    let status = rig.read(&[0]);
    assert!(status.failed() && status.message().starts_with("SQ full"), "{}", status.message());

    let rig = Rig::new(&Settings { backoff: Duration::from_secs(300), ..settings });
    rig.hand.seen().credits = Some(1);
    std::thread::scope(|scope| {
        let posting = scope.spawn(|| rig.read(&[0, 8, 16]));
        let first = rig.hand.op(0);
        rig.hand.seen().credits = Some(1);
        rig.hand.complete(first, Outcome::Done);
        let status = posting.join().expect("no panic");
        rig.hand.complete(rig.hand.op(1), Outcome::Done);
        until(|| status.succeeded());
    });
}

#[test]
fn wrong_calls_fail_and_post_nothing() {
    let rig = Rig::new(&Settings::default());
    let status = rig.session.post(Direction::Write, vec![0, 8], vec![0], vec![8, 8], 1);
    assert_eq!(status.code(), Code::InvalidArgs);
    assert!(status.message().contains("2 local and 1 remote offsets for 2 sizes"));
    assert!(rig.hand.seen().ops.is_empty());

    let stranger = MemoryDesc::unpack(&region("nobody", 0, 8)).expect("valid");
    let why = rig.engine.create_session(&rig.local, &stranger).expect_err("no such peer");
    assert!(why.to_string().contains("register_remote_engine"), "{why}");
    let why = rig.engine.create_session(&remote(), &remote()).expect_err("not ours");
    assert!(why.to_string().contains("not registered here"), "{why}");
    let other = EngineDesc::unpack(&address("other", 0)).expect("valid");
    let why = rig.engine.register_remote_engine(&other).expect_err("another fabric");
    assert!(matches!(&why, Error::Plane(text) if text.contains("both sides")), "{why}");
    assert!(EngineDesc::unpack(b"\x00").is_err() && MemoryDesc::unpack(b"").is_err());
}

#[test]
fn a_session_that_cannot_be_opened_says_why() {
    let rig = Rig::new(&Settings::default());
    rig.hand.seen().refuse_open = Some(Cause::Unreachable);
    let why = rig.engine.create_session(&rig.local, &remote()).expect_err("unreachable");
    assert_eq!(why.to_string(), "me: cannot open a session with peer: peer unreachable");
    assert_eq!(rig.hand.seen().closed.len(), 1);
}

#[test]
fn a_peer_with_another_address_is_another_peer() {
    let rig = Rig::new(&Settings::default());
    rig.engine.register_remote_engine(&peer(7)).expect("the same again");
    assert!(rig.hand.seen().closed.is_empty());
    rig.engine.register_remote_engine(&peer(8)).expect("restarted");
    let status = rig.read(&[0]);
    assert_eq!(status.code(), Code::BadState);
    assert!(status.message().contains("came back with another address"), "{}", status.message());
    let fresh = rig.engine.create_session(&rig.local, &remote()).expect("to the new one");
    let status = fresh.post(Direction::Write, vec![0], vec![0], vec![8], 1);
    rig.hand.complete(rig.hand.op(0), Outcome::Done);
    until(|| status.succeeded());
}

#[test]
fn a_session_is_closed_when_its_transfers_are_over() {
    let Rig { hand, session, engine, memory, .. } = Rig::new(&Settings::default());
    let status = session.post(Direction::Read, vec![0], vec![0], vec![8], 1);
    drop(session);
    assert!(hand.seen().closed.is_empty());
    hand.complete(hand.op(0), Outcome::Done);
    until(|| status.succeeded());
    assert_eq!(hand.seen().closed.len(), 1);
    drop((engine, memory));
}

#[test]
fn what_is_under_way_fails_with_its_engine() {
    let Rig { session, engine, .. } = Rig::new(&Settings::default());
    let post = || session.post(Direction::Read, vec![0], vec![0], vec![8], 1);
    let status = post();
    drop(engine);
    assert_eq!((status.code(), status.message()), (Code::BadState, "the engine was closed"));
    assert!(post().message().contains("the engine is closed"));
}
