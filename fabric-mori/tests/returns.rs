//! A plane whose MoRI cannot be started for a while, and one with a peer that does not answer.

mod common;

use common::world::{MoriTestWorld, REGION, faults, port};
use common::{MEMORY, config, serve_if_child};
use kvferry_engine::conformance::RemotePlane;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Completion, DataEvent, DataPlane, FabricError, Memory, OwnMemory, PeerId, QuiesceTicket,
    RegionDesc, RegionId, SessionId,
};
use kvferry_fabric_mori::{MoriBackend, MoriConfig};
use std::net::TcpListener;
use std::process::{Command, Stdio};

#[test]
fn again_over_the_older_layout() {
    common::again_over_the_older_layout();
}

/// The other process: this test, executed again.
#[test]
fn child() {
    serve_if_child();
}

/// Sets plane 0 up after a reset, and writes to plane 1.
fn serves_again(world: &mut MoriTestWorld, at: u64) {
    world.until_reset(0);
    world.forget(0);
    assert_eq!(world.plane(0).counters().without, 0);
    world.register(0);
    world.descs[1] = world.register_again(1);
    world.plane(1).disconnect(PeerId(0));
    world.connect(0, 1);
    let desc = world.descs[1].clone();
    world.open(1, 0, 1, &desc).expect("a session after the reset");
    let op = world.write(1, at);
    assert_eq!(world.finish(op), Completion::Done);
    assert!(world.has_landed(1, at));
}

/// Waits until the plane is without a backend.
fn is_without(world: &mut MoriTestWorld) {
    while world.plane(0).counters().without == 0 {
        world.pump();
    }
}

fn is_refused(world: &mut MoriTestWorld, session: u32, desc: &RegionDesc) {
    let cause = world.open(session, 0, 1, desc).expect_err("there is no backend");
    assert!(
        matches!(&cause, FabricError::Backend(why) if why.contains("no active RDMA device")),
        "{cause:?}"
    );
}

/// What MoRI itself does, too, where `KVFERRY_PORT_COMMAND` takes its port down: `./test --mori` runs
/// these then.
mod every_port {
    use super::*;

    #[test]
    fn a_port_that_flaps_is_waited_for() {
        let mut world = MoriTestWorld::star(2);
        for flap in 0..10_u64 {
            let in_flight: Vec<_> = (0..3).map(|n| world.write(1, n * 256)).collect();
            port(false);
            let op = world.write(1, 1_024);
            for op in in_flight {
                world.finish(op);
            }
            world.failure(op);
            is_without(&mut world);
            let desc = world.descs[1].clone();
            is_refused(&mut world, 50, &desc);
            world.plane(0).quiesce(SessionId(1), QuiesceTicket(flap));
            let quiet = DataEvent::Quiet { session: SessionId(1), ticket: QuiesceTicket(flap) };
            world.until_told(0, &quiet);
            world.assert_untouched(1, 50);
            port(true);
            serves_again(&mut world, 512 + flap * 8);
        }
        assert_eq!(world.plane(0).counters().resets, 10);
    }

    #[test]
    fn memory_that_comes_without_a_backend_is_not_refused() {
        let mut world = MoriTestWorld::star(2);
        port(false);
        let op = world.write(1, 0);
        world.failure(op);
        // One while the backend is being replaced, and one while there is none.
        for region in [RegionId(7), RegionId(8)] {
            // SAFETY: It is the memory of the plane, see `memory` of `MoriTestPlane`.
            let memory = Memory::Own(unsafe { OwnMemory::new(world.base(0), MEMORY) });
            world.plane(0).register(region, memory).expect("memory is taken");
            is_without(&mut world);
        }
        for _ in 0..200 {
            world.pump();
        }
        let refused =
            |event: &DataEvent| matches!(event, DataEvent::Registered { result: Err(_), .. });
        assert!(!world.seen(0).iter().any(refused), "{:?}", world.seen(0));
        port(true);
        serves_again(&mut world, 256);
    }

    #[test]
    fn a_fence_is_answered_without_a_backend() {
        let mut world = MoriTestWorld::star(2);
        let desc = world.descs[0].clone();
        world.open(7, 1, 0, &desc).expect("plane 1 comes in");
        port(false);
        world.plane(0).fence(PeerId(1));
        world.until_told(0, &DataEvent::Fenced { peer: PeerId(1) });
        port(true);
        world.until_reset(0);
    }

    #[test]
    fn a_port_that_is_taken_meanwhile_is_waited_for() {
        let free = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let address = free.local_addr().expect("bound");
        drop(free);
        let settings = |n| MoriConfig {
            port: if n == 0 { address.port() } else { 0 },
            ..config(MoriBackend::Rdma)
        };
        let mut world = MoriTestWorld::new(2, settings).joined();
        // Without a backend nobody listens, and so anybody may.
        port(false);
        let op = world.write(1, 0);
        world.failure(op);
        is_without(&mut world);
        let taken = TcpListener::bind(address).expect("it is free");
        port(true);
        let tried = world.plane(0).counters().rebuilds + 3;
        while world.plane(0).counters().rebuilds < tried {
            world.pump();
        }
        assert_eq!(world.plane(0).counters().without, 1, "MoRI would end the process");
        drop(taken);
        serves_again(&mut world, 128);
    }
}

/// The same, as they run over MoRI itself.
#[test]
fn a_command_takes_the_port_down_and_up() {
    common::again_with_a_port_command("every_port", 28);
}

#[test]
fn a_port_that_flaps_amid_a_mend_is_waited_for() {
    let mut world = MoriTestWorld::star(3);
    // The mend waits for this one.
    faults("slow@1:600000;qp_error@2");
    let slow = world.write(2, 0);
    let broken = world.write(1, 0);
    world.failure(broken);
    port(false);
    world.failure(slow);
    is_without(&mut world);
    faults("");
    port(true);
    serves_again(&mut world, 256);
}

#[test]
fn children_do_not_keep_the_port() {
    let free = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let port = free.local_addr().expect("bound").port();
    drop(free);
    let settings =
        |n| MoriConfig { port: if n == 0 { port } else { 0 }, ..config(MoriBackend::Rdma) };
    let mut world = MoriTestWorld::new(2, settings).joined();
    // It lives for as long as its input is open.
    let child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
    let mut child = child.expect("cat runs");
    faults("qp_error@1");
    let op = world.write(1, 0);
    world.failure(op);
    world.quiesce(1);
    let desc = world.register_again(1);
    // Others of this machine may have the port for a moment, or a process that another test started
    // just when MoRI opened its socket. They end; the child does not.
    if world.open(2, 0, 1, &desc).is_err() {
        serves_again(&mut world, 256);
    }
    drop(child.stdin.take());
    child.wait().expect("it ends");
}

/// A plane in another process, which plane 0 has sessions with.
struct Far {
    remote: RemotePlane,
    sessions: Vec<SessionId>,
}

impl Far {
    fn new(world: &mut MoriTestWorld, peer: PeerId, sessions: impl Iterator<Item = u32>) -> Far {
        let (mut remote, desc) = world.far(peer, None);
        let sessions: Vec<_> = sessions.map(SessionId).collect();
        for session in &sessions {
            world.plane(0).open(*session, REGION, peer, &desc).expect("an open is taken");
            let opened = DataEvent::Opened { session: *session, result: Ok(()) };
            while !world.seen(0).contains(&opened) {
                remote.poll(Nanos(0), &mut Vec::new());
                world.pump();
            }
        }
        Far { remote, sessions }
    }
}

#[test]
fn a_peer_that_does_not_answer_holds_up_nobody_else() {
    let mut world = MoriTestWorld::star(3);
    let far = Far::new(&mut world, PeerId(9), 90..93);
    far.remote.stop();
    faults("qp_error@1");
    let op = world.write(1, 0);
    world.failure(op);
    let retried = world.write(2, 512);
    assert_eq!(world.finish(retried), Completion::Done);
    let silent = world.write(90, 0);
    assert_eq!(world.plane(0).counters().rebuilds, 1);
    // Whoever waits for the stopped one has no outcome yet, and others do.
    let next = world.write(2, 1_024);
    assert_eq!(world.finish(next), Completion::Done);
    let of_silent =
        |event: &DataEvent| matches!(event, DataEvent::Completed { op, .. } if *op == silent);
    assert!(!world.seen(0).iter().any(of_silent), "{:?}", world.seen(0));
    far.remote.go_on();
    assert_eq!(world.finish(silent), Completion::Done, "it waited for its session");
    assert_eq!(far.sessions.len(), 3);
    assert_eq!(world.plane(0).counters().rebuilds, 1);
}

#[test]
fn a_peer_that_never_answers_loses_its_sessions_and_nothing_else() {
    let settings = |_| MoriConfig { open_ms: 2_000, ..config(MoriBackend::Rdma) };
    let mut world = MoriTestWorld::new(3, settings).joined();
    let far = Far::new(&mut world, PeerId(9), 90..93);
    far.remote.stop();
    faults("qp_error@1");
    let op = world.write(1, 0);
    world.failure(op);
    let silent = world.write(91, 0);
    assert_eq!(world.failure(silent), FabricError::Unreachable);
    world.quiesce(91);
    let next = world.write(2, 1_024);
    assert_eq!(world.finish(next), Completion::Done);
    assert_eq!(world.plane(0).counters().rebuilds, 1, "nothing of it was with MoRI");
    far.remote.go_on();
}

fn dead_pairs(world: &mut MoriTestWorld, at: usize) -> u64 {
    world.plane(at).counters().dead_pairs
}

/// Has plane 0 replace its backend, and plane 1 know it.
fn mends(world: &mut MoriTestWorld, session: u32) {
    let desc = world.descs[1].clone();
    world.open(session, 0, 1, &desc).expect("a session opens");
    let rebuilds = world.plane(0).counters().rebuilds;
    faults("qp_error@1");
    let op = world.write(session, 0);
    world.failure(op);
    world.quiesce(session);
    assert_eq!(world.plane(0).counters().rebuilds, rebuilds + 1);
}

#[test]
fn queue_pairs_that_ended_are_counted_until_the_backend_is_replaced() {
    let settings = |_| MoriConfig { dead_pairs_max: 3, ..config(MoriBackend::Rdma) };
    let mut world = MoriTestWorld::new(3, settings).joined();
    for mend in 0..5_u32 {
        mends(&mut world, 10 + mend);
        let dead = u64::from(mend) + 1;
        while [1, 2].map(|at| dead_pairs(&mut world, at)) != [dead; 2] {
            world.pump();
        }
    }
    for at in [1, 2] {
        // Plane 0 is still connected to it.
        assert_eq!(world.plane(at).counters().rebuilds, 0);
    }
    assert_eq!(dead_pairs(&mut world, 0), 0, "nobody was there");
    mends(&mut world, 15);
    for at in [1, 2] {
        world.until_reset(at);
        assert_eq!(dead_pairs(&mut world, at), 0);
    }
}

#[test]
fn a_worn_backend_is_replaced_once_nobody_is_connected() {
    let settings = |_| MoriConfig { dead_pairs_max: 2, ..config(MoriBackend::Rdma) };
    let mut world = MoriTestWorld::new(2, settings).joined();
    mends(&mut world, 10);
    world.plane(0).disconnect(PeerId(1));
    world.until_reset(1);
    assert_eq!((world.plane(1).counters().rebuilds, dead_pairs(&mut world, 1)), (1, 0));
}

#[test]
fn peers_do_not_have_a_backend_replaced_again_and_again() {
    let settings = |_| MoriConfig { dead_pairs_max: 1, ..config(MoriBackend::Rdma) };
    let mut world = MoriTestWorld::new(2, settings).joined();
    world.plane(0).disconnect(PeerId(1));
    world.until_reset(1);
    world.descs[1] = world.register(1);
    for dead in 1..=3 {
        world.connect(0, 1);
        let (session, desc) = (20 + dead, world.descs[1].clone());
        world.open(session, 0, 1, &desc).expect("the session opens");
        world.plane(0).disconnect(PeerId(1));
        world.plane(1).disconnect(PeerId(0));
        while dead_pairs(&mut world, 1) < u64::from(dead) {
            world.pump();
        }
    }
    assert_eq!(world.plane(1).counters().rebuilds, 1);
}
