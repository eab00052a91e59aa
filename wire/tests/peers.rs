//! Peers that go, that are not what they should be, and addresses that are taken.

mod common;

use common::{PATIENCE, TestZmqPlane};
use kvferry_engine::core::Nanos;
use kvferry_engine::fabric::{ControlEvent, ControlPlane, Endpoint, LinkId, LinkKind, Refused};
use kvferry_trust::FleetProof;
use kvferry_wire::{SignedPlane, WireConfig, ZmqPlane};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

const LINK: LinkId = LinkId(7);

fn dial(from: &mut TestZmqPlane, to: &Endpoint) {
    from.plane.dial(LINK, to, LinkKind::Notify).unwrap();
    let up = ControlEvent::LinkUp { link: LINK, channel: LinkKind::Notify, from: None };
    from.wait_for(|event| *event == up);
}

#[test]
fn a_port_that_is_taken_is_an_error_with_the_address() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let ports = [(LinkKind::Notify, port)].into();
    let mut plane = ZmqPlane::new(WireConfig { ports, ..WireConfig::default() }).unwrap();
    let Err(Refused::Invalid(why)) = plane.listen(LinkKind::Notify) else {
        panic!("a taken port was listened on")
    };
    assert!(why.contains(&format!("tcp://127.0.0.1:{port}")), "{why}");
}

#[test]
fn plane_that_stops_listening_refuses_connections() {
    let config = WireConfig { host: "127.0.0.1".into(), ..WireConfig::default() };
    let plane = ZmqPlane::new(config).unwrap();
    let mut plane = SignedPlane::new(plane, FleetProof::open(None).unwrap());
    let at = plane.listen(LinkKind::Discovery).unwrap();
    let at = at.0.strip_prefix("tcp://").unwrap().to_owned();
    TcpStream::connect(&at).unwrap();
    plane.stop_listening();
    // The thread of the plane closes the port, as late as it has its turn.
    let start = Instant::now();
    while TcpStream::connect(&at).is_ok() {
        assert!(start.elapsed() < PATIENCE, "connections are still accepted");
        std::thread::yield_now();
    }
}

#[test]
fn the_end_of_a_process_ends_its_links_and_what_it_said_comes_before() {
    for dialler_goes in [true, false] {
        let (mut near, mut far) = (TestZmqPlane::new("127.0.0.1"), TestZmqPlane::new("127.0.0.1"));
        let to = far.plane.listen(LinkKind::Notify).unwrap();
        dial(&mut near, &to);
        near.plane.send(LINK, &[b"last words"]).unwrap();
        let inbound = match dialler_goes {
            true => {
                drop(near);
                far.next_frame().0
            }
            false => {
                let inbound = far.next_frame().0;
                far.plane.send(inbound, &[b"last words"]).unwrap();
                drop(far);
                assert_eq!(near.next_frame().0, LINK);
                near.wait_for(|event| *event == ControlEvent::LinkDown { link: LINK });
                assert_eq!(near.plane.send(LINK, &[b"x"]), Err(Refused::Gone));
                continue;
            }
        };
        far.wait_for(|event| *event == ControlEvent::LinkDown { link: inbound });
        assert_eq!(far.plane.send(inbound, &[b"x"]), Err(Refused::Gone));
    }
}

#[test]
fn what_was_queued_before_hanging_up_is_said() {
    let (mut near, mut far) = (TestZmqPlane::new("127.0.0.1"), TestZmqPlane::new("127.0.0.1"));
    let to = far.plane.listen(LinkKind::Notify).unwrap();
    let (mut sent, mut events) = (0_u32, Vec::new());
    let frame = |event: &ControlEvent| match event {
        ControlEvent::Frame { parts, .. } => Some(parts.clone()),
        _ => None,
    };
    // It is neither connected nor greeted when it is hung up. On a machine where that takes longer
    // than what is queued is kept for, nothing comes, and another one is tried.
    let parts = loop {
        if sent.is_multiple_of(100) {
            let link = LinkId(sent);
            near.plane.dial(link, &to, LinkKind::Notify).unwrap();
            near.plane.send(link, &[b"last words"]).unwrap();
            near.plane.hang_up(link);
        }
        sent += 1;
        far.plane.poll(Nanos::ZERO, &mut events);
        if let Some(parts) = events.iter().find_map(frame) {
            break parts;
        }
        std::thread::park_timeout(Duration::from_millis(10));
    };
    assert_eq!(parts, [b"last words"]);
}

#[test]
fn plane_that_stops_listening_refuses_dials_and_keeps_its_links() {
    let (mut near, mut far) = (TestZmqPlane::new("127.0.0.1"), TestZmqPlane::new("127.0.0.1"));
    let to = far.plane.listen(LinkKind::Notify).unwrap();
    dial(&mut near, &to);
    far.plane.stop_listening();
    let address = to.0.strip_prefix("tcp://").unwrap();
    // The thread of the plane gets to it in its own time.
    while TcpStream::connect(address).is_ok() {
        std::thread::park_timeout(Duration::from_millis(1));
    }
    near.plane.dial(LinkId(8), &to, LinkKind::Notify).unwrap();
    near.wait_for(|event| *event == ControlEvent::LinkDown { link: LinkId(8) });
    near.plane.send(LINK, &[b"still here"]).unwrap();
    let (inbound, parts) = far.next_frame();
    assert_eq!(parts, [b"still here"]);
    far.plane.send(inbound, &[b"me too"]).unwrap();
    assert_eq!(near.next_frame().1, [b"me too"]);
    far.plane.listen(LinkKind::Notify).expect("it may listen again");
}

#[test]
fn plane_ends_though_its_peer_does_not_read() {
    let (mut near, mut far) = (TestZmqPlane::new("127.0.0.1"), TestZmqPlane::new("127.0.0.1"));
    let to = far.plane.listen(LinkKind::Notify).unwrap();
    dial(&mut near, &to);
    while near.plane.send(LINK, &[&[0; 8 << 10]]).is_ok() {}
    let (ended, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(near);
        ended.send(()).unwrap();
    });
    // Nobody takes what it said: `far` is not polled.
    end.recv_timeout(common::PATIENCE).expect("it waits for who does not read");
    drop(far);
}

#[test]
fn connection_that_does_not_say_what_it_is_ends() {
    let mut ours = TestZmqPlane::new("127.0.0.1");
    let to = ours.plane.listen(LinkKind::Notify).unwrap();
    let mut stream = TcpStream::connect(to.0.strip_prefix("tcp://").unwrap()).unwrap();
    stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    stream.write_all(&[0xff]).unwrap();
    let mut said = Vec::new();
    stream.read_to_end(&mut said).expect("it is closed after five seconds");
    assert!(said.starts_with(&[0xff]), "its own greeting: {said:?}");
}

#[test]
fn a_listener_that_never_answers_is_down_in_time() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = Endpoint::from(format!("tcp://{}", silent.local_addr().unwrap()).as_str());
    let dial = Duration::from_millis(50);
    let mut ours = TestZmqPlane::with(WireConfig { dial, ..WireConfig::default() });
    ours.plane.dial(LINK, &to, LinkKind::Notify).unwrap();
    let event = ours.wait_for(|_| true);
    assert_eq!(event, ControlEvent::LinkDown { link: LINK });
}

#[test]
fn garbage_costs_its_connection_only() {
    let mut ours = TestZmqPlane::new("127.0.0.1");
    let to = ours.plane.listen(LinkKind::Notify).unwrap();
    let address = to.0.strip_prefix("tcp://").unwrap().to_string();
    // Signature, version and mechanism as RFC 37 has them, then a frame of 2^63 bytes.
    let mut greeting = [&[0xff][..], &[0; 8], &[0x7f, 3, 1], b"NULL"].concat();
    greeting.resize(64, 0);
    let endless = [&greeting[..], &[2, 0x80, 0, 0, 0, 0, 0, 0, 0]].concat();
    let noise: Vec<u8> =
        (0..4096_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let cases: [&[u8]; 5] = [b"", b"GET / HTTP/1.1\r\n\r\n", &greeting[..10], &endless, &noise];
    for case in cases {
        let mut stream = TcpStream::connect(&address).unwrap();
        // libzmq may have closed it already.
        let _ = stream.write_all(case);
        let _ = stream.shutdown(Shutdown::Write);
        stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    }
    let mut peer = TestZmqPlane::new("127.0.0.1");
    dial(&mut peer, &to);
    peer.plane.send(LINK, &[b"a", b"b"]).unwrap();
    let (link, parts) = ours.next_frame();
    assert_eq!(parts, [b"a", b"b"]);
    ours.plane.send(link, &[b"c"]).unwrap();
    assert_eq!(peer.next_frame(), (LINK, vec![b"c".to_vec()]));
    let mut rest = Vec::new();
    ours.plane.poll(Nanos::ZERO, &mut rest);
    assert!(!rest.iter().any(|event| matches!(event, ControlEvent::Frame { .. })));
}

#[test]
fn a_reader_that_does_not_read_is_felt_by_the_sender() {
    let (mut near, mut far) = (TestZmqPlane::new("127.0.0.1"), TestZmqPlane::new("127.0.0.1"));
    let to = far.plane.listen(LinkKind::Notify).unwrap();
    dial(&mut near, &to);
    let (mut sent, mut refused) = (0_u32, 0_u32);
    // More than both sides hold and the system between them, unless a queue has no end.
    while refused < 2_000 {
        assert!(sent < 200_000, "somebody takes what nobody reads");
        match near.plane.send(LINK, &[&[0; 1_024]]) {
            Ok(()) => (sent, refused) = (sent + 1, 0),
            Err(why) => {
                assert_eq!(why, Refused::Busy);
                refused += 1;
                std::thread::park_timeout(Duration::from_micros(100));
            }
        }
    }
    for _ in 0..sent {
        far.next_frame();
    }
}

/// libzmq tells of the ends of connections on a thread that all sockets need; that thread waits for
/// ever if nobody is there to be told.
#[test]
fn links_that_end_on_both_sides_at_once_cost_no_other_link() {
    let rude = TcpListener::bind("127.0.0.1:0").unwrap();
    let gone = Endpoint::from(format!("tcp://{}", rude.local_addr().unwrap()).as_str());
    std::thread::spawn(move || {
        for stream in rude.incoming() {
            drop(stream);
        }
    });
    let (mut near, mut far) = (TestZmqPlane::new("127.0.0.1"), TestZmqPlane::new("127.0.0.1"));
    let to = far.plane.listen(LinkKind::Notify).unwrap();
    for nth in 0..2_000 {
        let link = LinkId(100 + nth);
        near.plane.dial(link, &gone, LinkKind::Notify).unwrap();
        if nth % 2 == 0 {
            near.wait_for(|event| *event == ControlEvent::LinkDown { link });
        } else {
            near.plane.hang_up(link);
        }
    }
    dial(&mut near, &to);
    near.plane.send(LINK, &[b"still here"]).unwrap();
    assert_eq!(far.next_frame().1, [b"still here"]);
}
