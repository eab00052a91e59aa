//! One plane with peers of its node and of others, by xGMI and by RDMA.

use super::common::world::{MoriTestWorld, PASS, REGION, port};
use super::common::{MEMORY, MoriTestSetup, config, is_installed, mixed_apart, mixed_here, shim};
use super::{PORT, data_plane};
use kvferry_engine::fabric::{
    Address, Completion, DataEvent, DataPlane, FabricError, Memory, OwnMemory, PeerId, Refused,
    RegionDesc, RegionId, SessionId,
};
use kvferry_fabric_mori::{MoriBackend, MoriConfig, MoriCounterReader, MoriMixedPlane};
use std::sync::PoisonError;

fn conforms(backend: MoriBackend, apart: bool) {
    let _alone = PORT.lock().unwrap_or_else(PoisonError::into_inner);
    data_plane(&mut || match apart {
        false => Box::new(mixed_here(backend)),
        true => Box::new(mixed_apart(backend)),
    });
}

#[test]
fn both_conform_with_a_peer_of_the_node() {
    conforms(MoriBackend::Xgmi, false);
}

#[test]
fn both_conform_with_a_peer_of_another_node() {
    conforms(MoriBackend::Rdma, false);
}

#[test]
fn both_conform_with_a_process_of_the_node() {
    conforms(MoriBackend::Xgmi, true);
}

#[test]
fn both_conform_with_a_process_of_another_node() {
    conforms(MoriBackend::Rdma, true);
}

/// Plane 0 has both, and so have 1, of its node, and 2, of another one; 3 has RDMA alone.
fn world() -> MoriTestWorld {
    let setup = |plane| match plane {
        3 => MoriTestSetup::of(MoriConfig { key: "old".into(), ..config(MoriBackend::Rdma) }),
        _ => MoriTestSetup::mixed(["here", "near", "far"][plane], MoriBackend::Rdma),
    };
    MoriTestWorld::of(4, setup).joined()
}

/// Operations of plane 0 by RDMA and by xGMI.
fn operations(world: &mut MoriTestWorld) -> [u64; 2] {
    world.mixed(0).meters().map(|meter: MoriCounterReader| meter.read().operations)
}

fn is_reset(event: &DataEvent) -> bool {
    matches!(event, DataEvent::Reset { .. })
}

/// Writes from plane 0 to another one; it lands.
fn reaches(world: &mut MoriTestWorld, session: u32, plane: usize, offset: u64) {
    let op = world.write(session, offset);
    assert_eq!(world.finish(op), Completion::Done);
    assert!(world.has_landed(plane, offset), "plane {plane}");
}

/// Opens a session from another plane to plane 0.
fn comes_in(world: &mut MoriTestWorld, plane: usize) {
    let desc = world.descs[0].clone();
    world.open(70 + plane as u32, plane, 0, &desc).expect("it comes in");
}

#[test]
fn each_peer_has_its_path() {
    let _alone = PORT.lock().unwrap_or_else(PoisonError::into_inner);
    let mut world = world();
    let backends = world.mixed(0).meters().map(|meter| meter.backend());
    assert_eq!(backends, [MoriBackend::Rdma, MoriBackend::Xgmi]);
    for (session, counted) in [(1, [0, 1]), (2, [1, 1]), (3, [2, 1]), (1, [2, 2])] {
        reaches(&mut world, session, session as usize, u64::from(session) * 512);
        assert_eq!(operations(&mut world), counted, "session {session}");
    }
    let bytes = world.mixed(0).meters().map(|meter| meter.read().bytes);
    assert_eq!(bytes, [256, 256]);
}

#[test]
fn a_fence_over_xgmi_disturbs_nobody_else() {
    let _alone = PORT.lock().unwrap_or_else(PoisonError::into_inner);
    let mut world = world();
    for plane in 1..4 {
        comes_in(&mut world, plane);
    }
    let far = world.write(2, 0);
    world.data(0).fence(PeerId(1));
    world.until_told(0, &DataEvent::Fenced { peer: PeerId(1) });
    world.until_told(1, &DataEvent::PeerDown { peer: PeerId(0) });
    assert_eq!(world.finish(far), Completion::Done);
    reaches(&mut world, 2, 2, 1_024);
    reaches(&mut world, 3, 3, 2_048);
    // Our own sessions towards it are not what a fence is about.
    reaches(&mut world, 1, 1, 512);
    assert!(!world.seen(0).iter().any(is_reset), "{:?}", world.seen(0));
    for plane in [2, 3] {
        let down = DataEvent::PeerDown { peer: PeerId(0) };
        assert!(!world.seen(plane).contains(&down), "plane {plane}");
    }
}

#[test]
fn a_reset_is_of_both_and_all_are_served_again() {
    let _alone = PORT.lock().unwrap_or_else(PoisonError::into_inner);
    let mut world = world();
    for plane in 1..4 {
        comes_in(&mut world, plane);
    }
    let before = world.data(0).address();
    world.data(0).fence(PeerId(2));
    world.until_told(0, &DataEvent::Fenced { peer: PeerId(2) });
    world.until_reset(0);
    let address = world.data(0).address();
    assert!(world.seen(0).contains(&DataEvent::Reset { address: address.clone() }));
    assert_ne!(address, before);
    for plane in 1..4 {
        world.until_told(plane, &DataEvent::PeerDown { peer: PeerId(0) });
        world.assert_untouched(plane, 20);
        world.data(plane).disconnect(PeerId(0));
    }
    world.forget(0);
    // All ids are free, and no descriptor of before is good.
    let old = world.descs[0].clone();
    world.descs[0] = world.register(0);
    for plane in 1..4 {
        world.connect(0, plane);
        let (session, desc) = (plane as u32, world.descs[plane].clone());
        world.open(session, 0, plane, &desc).expect("a session after the reset");
        reaches(&mut world, session, plane, 512);
        assert!(world.open(80 + session, plane, 0, &old).is_err(), "a descriptor outlived a reset");
    }
    assert!(!world.seen(0).iter().any(is_reset), "one was enough");
}

#[test]
fn a_reset_waits_for_who_is_in_memory_that_xgmi_has_mapped() {
    let _alone = PORT.lock().unwrap_or_else(PoisonError::into_inner);
    let mut world = world();
    comes_in(&mut world, 2);
    let setup = MoriTestSetup::mixed("near", MoriBackend::Xgmi);
    let (mut near, _) = world.apart(PeerId(9), &setup);
    let desc = world.descs[0].clone();
    near.open(SessionId(1), REGION, PeerId(0), &desc).expect("an open is taken");
    let mut told = Vec::new();
    while !told.contains(&DataEvent::Opened { session: SessionId(1), result: Ok(()) }) {
        near.poll(Default::default(), &mut told);
        world.pump();
    }
    near.stop();
    world.data(0).fence(PeerId(2));
    world.until_told(0, &DataEvent::Fenced { peer: PeerId(2) });
    // By now RDMA has long been reset.
    for _ in 0..2_000 {
        world.pump();
    }
    assert!(!world.seen(0).iter().any(is_reset), "its copies may land yet");
    let cause = world.open(60, 0, 2, &desc).expect_err("the owner is answered meanwhile");
    assert!(matches!(cause, FabricError::Backend(_)), "{cause:?}");
    near.go_on();
    world.until_reset(0);
}

#[test]
fn a_region_is_there_once_both_have_it() {
    let _alone = PORT.lock().unwrap_or_else(PoisonError::into_inner);
    let mut world = world();
    port(false);
    let op = world.write(2, 0);
    world.failure(op);
    let missing =
        |world: &mut MoriTestWorld| world.mixed(0).meters().map(|meter| meter.read().without);
    while missing(&mut world) != [1, 0] {
        world.pump();
    }
    // What is of the node goes on.
    reaches(&mut world, 1, 1, 512);
    world.forget(0);
    // SAFETY: It is the memory of the plane, see `memory` of `MoriTestPlane`.
    let range = unsafe { OwnMemory::new(world.base(0), MEMORY) };
    let memory = Memory::Device { range, device: 0 };
    world.data(0).register(RegionId(7), memory).expect("memory is taken");
    for _ in 0..500 {
        world.pump();
    }
    let answered = |event: &DataEvent| matches!(event, DataEvent::Registered { .. });
    assert!(!world.seen(0).iter().any(answered), "{:?}", world.seen(0));
    port(true);
    world.until_reset(0);
    world.forget(0);
    world.register(0);
}

/// The address of a plane of another node with the node's name in it that plane 0 has.
fn lie(address: &Address) -> Address {
    let mut bytes = address.0.to_vec();
    let (truth, name) = (b"node-b", b"node-a");
    let all: Vec<usize> =
        (0..bytes.len() - truth.len()).filter(|at| bytes[*at..].starts_with(truth)).collect();
    assert_eq!(all.len(), 2, "of both engines");
    for at in all {
        bytes[at..at + name.len()].copy_from_slice(name);
    }
    Address(bytes.into())
}

#[test]
fn who_lies_about_its_node_is_an_error_and_not_a_reason_for_the_other_path() {
    let _alone = PORT.lock().unwrap_or_else(PoisonError::into_inner);
    let mut world = world();
    world.data(0).disconnect(PeerId(2));
    let address = lie(&world.data(2).address());
    world.data(0).connect(PeerId(2), &address, PASS).expect("a peer connects");
    let desc = world.descs[2].clone();
    let cause = world.open(20, 0, 2, &desc).expect_err("they are of two nodes");
    let FabricError::Backend(why) = &cause else { panic!("{cause:?}") };
    assert!(why.contains("xGMI to far,") && why.contains("`backend` to mori-rdma"), "{why}");
    let plain: RegionDesc = world.descs[3].clone();
    let refused = world.data(0).open(SessionId(21), REGION, PeerId(2), &plain);
    assert!(matches!(&refused, Err(Refused::Invalid(why)) if why.contains("without xGMI")));
    reaches(&mut world, 1, 1, 512);
    reaches(&mut world, 3, 3, 1_024);
    assert!(!world.seen(0).iter().any(is_reset));
}

#[test]
fn what_xgmi_cannot_do_is_refused() {
    let _alone = PORT.lock().unwrap_or_else(PoisonError::into_inner);
    let mut world = world();
    // SAFETY: It is the memory of the plane, see `memory` of `MoriTestPlane`.
    let memory = Memory::Own(unsafe { OwnMemory::new(world.base(0), MEMORY) });
    let refused = world.data(0).register(RegionId(7), memory);
    assert!(
        matches!(&refused, Err(Refused::Unsupported(why)) if why.contains("`backend` to mori-rdma")),
        "{refused:?}"
    );
    let config = MoriConfig { door_port: u16::MAX, ..config(MoriBackend::Rdma) };
    let refused = MoriMixedPlane::with_shim(shim(), config).expect_err("xGMI has no port");
    assert!(refused.to_string().contains("door_port = 65535"), "{refused}");
    assert!(!is_installed(), "these are for the stand-in");
}
