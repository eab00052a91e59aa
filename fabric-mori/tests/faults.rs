//! What MoRI does wrong, and how it ends.

mod common;

use common::world::{MoriTestWorld, faults};
use common::{NEVER, config, serve_if_child};
use kvferry_engine::fabric::{
    Completion, DataEvent, DataPlane, FabricError, PeerId, Refused, SessionId,
};
use kvferry_fabric_mori::{MoriBackend, MoriConfig, MoriError, MoriPlane};
use std::net::TcpListener;

#[test]
fn again_over_the_older_layout() {
    common::again_over_the_older_layout();
}

/// The other process: this test, executed again.
#[test]
fn child() {
    serve_if_child();
}

/// A fault in the first post: its cause, and all is well afterwards.
fn fails_with(spec: &str, expected: impl Fn(&FabricError) -> bool) {
    fails_within(config(MoriBackend::Rdma).operation_ms, spec, expected);
}

/// The same where operations have so many milliseconds.
fn fails_within(operation_ms: u32, spec: &str, expected: impl Fn(&FabricError) -> bool) {
    let settings = |_| MoriConfig { operation_ms, ..config(MoriBackend::Rdma) };
    let mut world = MoriTestWorld::new(2, settings).joined();
    faults(spec);
    let op = world.write(1, 0);
    let cause = world.failure(op);
    assert!(expected(&cause), "{spec}: {cause:?}");
    // The session takes no more and is quiet, once the plane is mended.
    world.quiesce(1);
    world.assert_untouched(1, 200);
    let counters = world.plane(0).counters();
    assert_eq!((counters.rebuilds, counters.resets, counters.failed), (1, 0, 1), "{spec}");
    assert!(!world.seen(0).iter().any(|event| matches!(event, DataEvent::Reset { .. })), "{spec}");
    assert_mended(&mut world, 1, operation_ms < NEVER);
}

/// A new session with the same peer works. Where operations are `hurried` one may be late, and the
/// next session is tried.
fn assert_mended(world: &mut MoriTestWorld, mut session: u32, hurried: bool) {
    loop {
        let desc = world.register_again(1);
        world.plane(0).close(SessionId(session));
        session += 100;
        world.open(session, 0, 1, &desc).expect("a new session opens");
        let op = world.write(session, 512);
        match world.finish(op) {
            Completion::Failed { cause: FabricError::AckTimeout, .. } if hurried => {
                world.quiesce(session)
            }
            outcome => {
                assert_eq!(outcome, Completion::Done);
                assert!(world.has_landed(1, 512));
                return;
            }
        }
    }
}

#[test]
fn a_dead_queue_pair_is_replaced() {
    fails_with("qp_error@1", |cause| {
        matches!(
            cause,
            FabricError::Backend(_) | FabricError::QueuePair | FabricError::RemoteAccess
        )
    });
}

#[test]
fn a_lost_acknowledgement_is_unknown() {
    fails_with("ack_lost@1", |cause| *cause == FabricError::AckTimeout);
}

#[test]
fn a_lost_completion_ends_by_deadline() {
    fails_within(1_000, "lost@1", |cause| *cause == FabricError::AckTimeout);
}

#[test]
fn bytes_that_land_late_land_before_quiet_or_never() {
    fails_with("late@1:300", |_| true);
}

#[test]
fn a_full_send_queue_is_no_back_pressure() {
    fails_with("sq_full@1:60", |cause| *cause == FabricError::QueueFull);
}

#[test]
fn exceptions_end_the_operation() {
    fails_with("throw@1", |cause| matches!(cause, FabricError::Backend(_)));
    fails_with("throw_other@1", |cause| matches!(cause, FabricError::Backend(_)));
}

#[test]
fn other_peers_notice_nothing() {
    let mut world = MoriTestWorld::star(3);
    // It would be there only after the test's own patience, but is posted anew at once.
    faults("slow@1:600000;qp_error@2");
    let slow = world.write(2, 0);
    let broken = world.write(1, 0);
    world.failure(broken);
    assert_eq!(world.finish(slow), Completion::Done, "posted anew");
    assert!(world.has_landed(2, 0));
    let counters = world.plane(0).counters();
    assert_eq!((counters.rebuilds, counters.retried, counters.resets), (1, 1, 0));
    // Its session goes on.
    let next = world.write(2, 1_024);
    assert_eq!(world.finish(next), Completion::Done);
    assert!(world.has_landed(2, 1_024));
}

#[test]
fn peers_inside_are_told_of_a_rebuild() {
    let mut world = MoriTestWorld::star(3);
    let desc = world.descs[0].clone();
    world.open(7, 2, 0, &desc).expect("plane 2 comes in");
    let before = world.plane(0).address();
    faults("qp_error@1");
    let op = world.write(1, 0);
    world.failure(op);
    let address = world.until(0, "Reset", |event| match event {
        DataEvent::Reset { address } => Some(address.clone()),
        _ => None,
    });
    assert!(address != before && address == world.plane(0).address(), "a new incarnation");
    world.until_told(2, &DataEvent::PeerDown { peer: PeerId(0) });
    // All ids are free again.
    world.register(0);
    let desc = world.register_again(1);
    world.plane(1).disconnect(PeerId(0));
    world.connect(0, 1);
    world.open(1, 0, 1, &desc).expect("a session after the reset");
    let op = world.write(1, 256);
    assert_eq!(world.finish(op), Completion::Done);
    assert!(world.has_landed(1, 256));
}

#[test]
fn a_restarted_peer_is_another_one() {
    let mut world = MoriTestWorld::star(2);
    world.replace(1, config(MoriBackend::Rdma));
    world.until_told(0, &DataEvent::PeerDown { peer: PeerId(1) });
    let desc = world.register(1);
    world.plane(0).disconnect(PeerId(1));
    world.connect(0, 1);
    world.open(9, 0, 1, &desc).expect("a session with the new one");
    let op = world.write(9, 64);
    assert_eq!(world.finish(op), Completion::Done);
    assert!(world.has_landed(1, 64));
}

#[test]
fn a_peer_that_aborts_is_an_error() {
    let mut world = MoriTestWorld::rdma(1);
    world.register(0);
    let (_far, desc) = world.far(PeerId(1), Some("pin_remote@1".into()));
    assert!(world.open(1, 0, 1, &desc).is_err(), "MoRI ends the peer when it is to pin");
    world.until_told(0, &DataEvent::PeerDown { peer: PeerId(1) });
    assert_eq!(world.plane(0).counters().rebuilds, 0, "nothing was under way");
}

#[test]
fn what_would_end_the_process_is_an_error() {
    let _alone = MoriTestWorld::rdma(0);
    let taken = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let port = taken.local_addr().expect("bound").port();
    let refused = |config: MoriConfig| MoriPlane::with_shim(common::shim(), config).err();
    let busy = refused(MoriConfig { port, ..config(MoriBackend::Rdma) });
    assert!(
        matches!(&busy, Some(MoriError::Preflight(text)) if text.contains(&port.to_string())),
        "{busy:?}"
    );
    let foreign = refused(MoriConfig {
        host: "192.0.2.1".into(),
        insecure_network: true,
        ..config(MoriBackend::Rdma)
    });
    assert!(foreign.is_some_and(|why| why.to_string().contains("192.0.2.1")));
    let name = refused(MoriConfig { host: "localhost".into(), ..config(MoriBackend::Rdma) });
    assert!(matches!(name, Some(MoriError::Config(_))));
    let bare = refused(MoriConfig { devices: true, ..config(MoriBackend::Rdma) });
    assert!(
        matches!(&bare, Some(MoriError::Preflight(text)) if text.contains("to do:")),
        "{bare:?}"
    );
}

#[test]
fn an_operation_of_a_dead_session_is_refused() {
    let mut world = MoriTestWorld::star(2);
    faults("qp_error@1");
    let op = world.write(1, 0);
    world.failure(op);
    let lists = &[0][..];
    let (session, op) = (SessionId(1), kvferry_engine::fabric::OpId(99));
    let direction = kvferry_engine::fabric::Direction::Write;
    let batch = kvferry_engine::fabric::Submit {
        op,
        session,
        direction,
        local: lists,
        remote: lists,
        len: &[8],
    };
    assert_eq!(world.plane(0).submit(batch), Err(Refused::Gone));
}

#[test]
fn mori_s_own_time_outs_are_those_of_the_plane() {
    let _world = MoriTestWorld::rdma(1);
    for (name, value) in [
        ("MORI_IO_CP_TIMEOUT_MS", u64::from(NEVER)),
        ("MORI_IO_SQ_BACKOFF_TIMEOUT_US", u64::from(NEVER) * 1_000),
    ] {
        assert_eq!(std::env::var(name), Ok(value.to_string()), "{name}");
    }
}
