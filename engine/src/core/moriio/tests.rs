//! What happens at the end of numbers that peers can drive up.

use super::*;
use crate::core::dialect::moriio::address::ZmqAddress;
use crate::core::dialect::moriio::ports::ParallelSizes;

fn peers() -> MoriioPeers {
    let config = MoriioConfig {
        address: ZmqAddress::parse("host:127.0.0.1,handshake:1,notify:2").expect("an address"),
        layer_names: Vec::new(),
        attn_backend: "CPU_ATTN".into(),
        settings: MoriioSettings::default(),
        closed: None,
    };
    let geometry = Arc::new(Geometry::new("m", 1, Vec::new()));
    let mut peers = MoriioPeers::new(config, (Role::Decode, Mode::Push), geometry);
    peers.ranks = Some(Vec::new());
    peers
}

fn peer(port: u16) -> MoriioLeg {
    let text = format!("host:127.0.0.1,handshake:{port},notify:2");
    let peer = MoriioRemote {
        address: ZmqAddress::parse(&text).expect("an address"),
        hosts: vec!["127.0.0.1".into()],
        dp_size: 1,
        dp_rank: 0,
        shape: ParallelSizes { dp_size_local: 0, tp_size: 1 },
    };
    MoriioLeg { peer: Some(peer), ..MoriioLeg::default() }
}

#[test]
fn slots_of_moriio_peers_that_are_used_up_are_overload() {
    let mut peers = peers();
    peers.last_id = CONNECTION_MAX - 2;
    let (mut commands, mut events) = (Vec::new(), Vec::new());
    let turn = &mut PeerTurn { now: Nanos::ZERO, commands: &mut commands, events: &mut events };
    let connections = [10, 20, 30].map(|port| peers.connection_of(&peer(port), turn));
    let last = ConnectionId(ConnectionId::MORIIO | (CONNECTION_MAX - 1));
    assert_eq!(connections, [last, NOBODY, NOBODY]);
    assert!(connections.iter().all(|connection| connection.is_moriio() && *connection != READERS));
    let down =
        PeerEvent::Down { connection: NOBODY, failure: Failure::Overload, unacked_releases: None };
    assert_eq!(events, [down.clone(), down]);
}

#[test]
fn what_finds_no_room_takes_no_slot() {
    let mut peers = peers();
    peers.config.settings.peers_max = 0;
    let (mut commands, mut events) = (Vec::new(), Vec::new());
    let turn = &mut PeerTurn { now: Nanos::ZERO, commands: &mut commands, events: &mut events };
    for port in 10..20 {
        peers.connection_of(&peer(port), turn);
    }
    assert_eq!((peers.last_id, events.len()), (0, 10));
}

#[test]
fn ids_of_links_come_again_but_those_in_use() {
    let mut peers = peers();
    let (mut commands, mut events) = (Vec::new(), Vec::new());
    let turn = &mut PeerTurn { now: Nanos::ZERO, commands: &mut commands, events: &mut events };
    peers.connection_of(&peer(10), turn);
    peers.notify("tcp://there:1".into(), Vec::new(), turn);
    peers.next_link = LinkId::MORIIO - 2;
    let links = [(); 3].map(|()| peers.fresh_link());
    let own = |number| LinkId(LinkId::MORIIO | number);
    assert_eq!(links, [own(LinkId::MORIIO - 1), own(3), own(4)]);
    assert!(links.iter().all(|link| peers.is_own(*link)));
}
