//! Transfers without a session, waiting, and memory that is registered no more.

use crate::fake::{address, region, until};
use crate::{CompatTestRig, SIZE, failed, peer, remote};
use kvferry_engine::fabric::{
    Completion, DataEvent, Direction, FabricError, Landed, PeerId, SessionId,
};
use kvferry_mori_compat::{
    CompatEngineDesc, CompatError, CompatMemoryDesc, CompatRequest, CompatSettings,
    CompatStatusCode, CompatTransferStatus,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn rig() -> CompatTestRig {
    CompatTestRig::new(&CompatSettings::default())
}

impl CompatTestRig {
    fn requests(&self, remotes: &[CompatMemoryDesc]) -> Vec<CompatRequest> {
        let request = |remote: &CompatMemoryDesc| CompatRequest {
            local: self.local.clone(),
            remote: remote.clone(),
            local_offsets: vec![0],
            remote_offsets: vec![8],
            sizes: vec![8],
            uid: 1,
        };
        remotes.iter().map(request).collect()
    }

    fn post(&self, remotes: &[CompatMemoryDesc]) -> Vec<Arc<CompatTransferStatus>> {
        let posted = self.engine.post(Direction::Write, self.requests(remotes));
        posted.unwrap_or_else(|why| panic!("{why}"))
    }

    /// The session of each operation that was posted, in order.
    fn posted(&self) -> Vec<SessionId> {
        self.hand.seen().ops.iter().map(|(_, session, _)| *session).collect()
    }

    fn opened(&self) -> Vec<(SessionId, PeerId)> {
        self.hand.seen().opened.clone()
    }
}

fn other() -> CompatMemoryDesc {
    CompatMemoryDesc::unpack(&region("peer", 0x9000, SIZE)).expect("valid")
}

#[test]
fn a_session_is_kept_for_each_pair_of_regions() {
    let rig = rig();
    // One is the rig's.
    rig.post(&[remote(), other(), remote()]);
    rig.post(&[other(), remote()]);
    let opened: Vec<_> = rig.opened().into_iter().map(|(session, _)| session).collect();
    let [_, first, second] = opened[..] else { panic!("{opened:?}") };
    assert_eq!(rig.posted(), [first, second, first, second, first]);
}

#[test]
fn a_session_that_failed_is_opened_again() {
    let rig = rig();
    let status = &rig.post(&[remote()])[0];
    rig.hand.complete(rig.hand.op(0), failed(Landed::None));
    until(|| status.failed());
    let again = &rig.post(&[remote()])[0];
    assert_eq!(rig.opened().len(), 3);
    rig.hand.complete(rig.hand.op(1), Completion::Done);
    until(|| again.succeeded());
    let failed = rig.opened()[1].0;
    assert_eq!(rig.hand.seen().closed, [failed], "and the failed one is closed");

    let (_, peer) = rig.opened()[0];
    rig.hand.tell(DataEvent::PeerDown { peer });
    // By the next answer it is known.
    until(|| {
        let before = rig.opened().len();
        rig.post(&[remote()]);
        rig.opened().len() > before
    });
}

#[test]
fn nothing_is_posted_unless_all_can_be_reached() {
    let rig = rig();
    rig.hand.seen().refuse_open = Some(FabricError::Unreachable);
    let why = rig.engine.post(Direction::Write, rig.requests(&[remote()])).expect_err("refused");
    assert!(matches!(&why, CompatError::Plane(text) if text.contains("peer unreachable")), "{why}");
    assert!(rig.hand.seen().ops.is_empty());
}

#[test]
fn what_is_not_registered_is_a_bad_state() {
    let rig = rig();
    let nobodys = CompatMemoryDesc::unpack(&region("nobody", 0, 8)).expect("valid");
    let statuses = rig.post(&[nobodys, remote()]);
    assert_eq!(statuses[0].code(), CompatStatusCode::BadState);
    assert!(statuses[0].message().contains("register_remote_engine"), "{}", statuses[0].message());
    assert_eq!(statuses[1].code(), CompatStatusCode::InProgress);
}

#[test]
fn a_wait_ends_with_the_transfer_or_the_time() {
    let rig = rig();
    let status = rig.post(&[remote()]).remove(0);
    assert_eq!(status.wait_until(Instant::now()), CompatStatusCode::InProgress);
    let soon = Instant::now() + Duration::from_millis(1);
    assert_eq!(status.wait_until(soon), CompatStatusCode::InProgress);
    assert!(Instant::now() >= soon);
    std::thread::scope(|scope| {
        let late = Instant::now() + Duration::from_secs(300);
        let waited = &status;
        let waits = scope.spawn(move || waited.wait_until(late));
        rig.hand.complete(rig.hand.op(0), Completion::Done);
        assert_eq!(waits.join().expect("no panic"), CompatStatusCode::Success);
        assert!(Instant::now() < late);
    });
    let none = CompatTransferStatus::default();
    let late = Instant::now() + Duration::from_secs(300);
    assert_eq!(none.wait_until(late), CompatStatusCode::Init);
    assert!(Instant::now() < late && !none.failed() && !none.succeeded());
}

#[test]
fn memory_is_deregistered_once_nothing_uses_it() {
    let rig = rig();
    let status = rig.read(&[0]);
    rig.hand.seen().busy = true;
    std::thread::scope(|scope| {
        let ends = scope.spawn(|| rig.engine.deregister_memory(&rig.local));
        until(|| rig.hand.seen().asked > 0);
        assert!(!ends.is_finished());
        let ended = rig.opened()[0].0;
        assert_eq!(rig.hand.seen().closed, [ended], "what is under way is ended");
        let post = rig.read(&[0]);
        assert!(post.message().contains("its memory was deregistered"), "{}", post.message());
        rig.hand.seen().busy = false;
        rig.hand.complete(rig.hand.op(0), failed(Landed::None));
        ends.join().expect("no panic").unwrap_or_else(|why| panic!("{why}"));
    });
    until(|| status.failed());
    assert_eq!(rig.hand.seen().deregistered.len(), 1);
    let again = rig.engine.deregister_memory(&rig.local).expect_err("it is not").to_string();
    assert!(again.contains("is not registered here"), "{again}");
    assert_eq!(rig.post(&[remote()])[0].code(), CompatStatusCode::BadState);
}

#[test]
fn a_peer_is_forgotten_with_its_sessions() {
    let rig = rig();
    rig.post(&[remote()]);
    let moved = CompatEngineDesc::unpack(&address("peer", 9)).expect("valid");
    let why = rig.engine.deregister_remote_engine(&moved).expect_err("another").to_string();
    assert!(why.contains("the engine peer is not registered here"), "{why}");
    rig.engine.deregister_remote_engine(&peer(7)).unwrap_or_else(|why| panic!("{why}"));
    let closed = rig.hand.seen().closed.len();
    assert_eq!(closed, rig.opened().len());
    assert_eq!(rig.post(&[remote()])[0].code(), CompatStatusCode::BadState);
    rig.engine.register_remote_engine(&peer(7)).unwrap_or_else(|why| panic!("{why}"));
    assert_eq!(rig.post(&[remote()])[0].code(), CompatStatusCode::InProgress);
}
