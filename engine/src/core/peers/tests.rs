//! What happens at the end of numbers that peers can drive up.

use super::{CONNECTION_MAX, LocalEngine, PeerEvent, PeerTurn, Peers};
use crate::core::channel::{ChannelConfig, capability};
use crate::core::error::Failure;
use crate::core::ids::{ConnectionId, Incarnation};
use crate::core::layout::Geometry;
use crate::core::message::Role;
use crate::core::time::Nanos;
use crate::fabric::{ControlEvent, LinkId, LinkKind};
use std::sync::Arc;

fn peers(role: Role) -> Peers {
    let me = LocalEngine {
        engine: "me".into(),
        incarnation: Incarnation(1),
        role,
        geometry: Arc::new(Geometry::new("m", 1, Vec::new())),
        capabilities: capability::PULL,
    };
    Peers::new(ChannelConfig::default(), me, false)
}

#[test]
fn what_peers_do_wrong_is_counted_up_to_the_end_of_numbers() {
    let mut peers = peers(Role::Prefill);
    (peers.violations, peers.stale) = (u32::MAX - 1, u32::MAX);
    let (mut commands, mut events) = (Vec::new(), Vec::new());
    let turn = &mut PeerTurn { now: Nanos::ZERO, commands: &mut commands, events: &mut events };
    for link in 0..3 {
        let link = LinkId(LinkId::INBOUND | link);
        let up = ControlEvent::LinkUp { link, channel: LinkKind::Handshake, from: None };
        peers.control(up, turn);
        let frame = ControlEvent::Frame { link, parts: vec![vec![1, 2, 3]] };
        peers.control(frame, turn);
    }
    assert_eq!(peers.gauges().violations, u32::MAX);
}

#[test]
fn ids_of_links_come_again_but_those_in_use() {
    let mut peers = peers(Role::Decode);
    peers.ranks = Some(Vec::new());
    let (mut commands, mut events) = (Vec::new(), Vec::new());
    let turn = &mut PeerTurn { now: Nanos::ZERO, commands: &mut commands, events: &mut events };
    assert_eq!(peers.fresh_link(), LinkId(1));
    peers.reach(&"a".into(), &"tcp://there".into(), None, turn);
    assert!(peers.links.contains_key(&LinkId(2)));
    peers.next_link = LinkId::MORIIO - 2;
    let links = [(); 3].map(|()| peers.next_link().0);
    assert_eq!(links, [LinkId::MORIIO - 1, 3, 4]);
}

#[test]
fn slots_that_are_used_up_are_overload_and_never_used_again() {
    let mut peers = peers(Role::Decode);
    peers.last_id = CONNECTION_MAX - 3;
    let (mut commands, mut events) = (Vec::new(), Vec::new());
    let turn = &mut PeerTurn { now: Nanos::ZERO, commands: &mut commands, events: &mut events };
    let engines = ["a", "b", "c", "d", "e"];
    let connections = engines.map(|engine| {
        let (engine, endpoint) = (engine.into(), "tcp://there".into());
        peers.reach(&engine, &endpoint, None, turn).0
    });
    let last = CONNECTION_MAX;
    assert_eq!(connections, [last - 2, last - 1, last, last, last]);
    assert!(!ConnectionId(last).is_moriio());
    let down = |connection: &u32| {
        let (connection, failure) = (ConnectionId(*connection), Failure::Overload);
        PeerEvent::Down { connection, failure, unacked_releases: None }
    };
    let downs: Vec<PeerEvent> = connections[1..].iter().map(down).collect();
    assert_eq!(events, downs, "the first is the last to come about");
}
