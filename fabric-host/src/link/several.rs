//! A peer with several connections, some of which say or do what others do not.

use super::hostile::{
    deadline, dialling_by, is_dropped, receive, send, side_of, stranger, welcome,
};
use super::stream::{pack, pack_control};
use crate::config::DataPath;
use crate::proto::{HostControlMessage, HostRecord};
use crate::{HostConfig, HostPlane};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Completion, DataEvent, DataPlane, Direction, FabricError, Landed, OpId, PeerId, QuiesceTicket,
    SessionId, Submit,
};
use rustix::net::sockopt::set_socket_linger;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

const SESSION: SessionId = SessionId(2);
const TICKET: QuiesceTicket = QuiesceTicket(7);

/// Takes the hello of the next connection, and answers it.
fn greeted(listener: &TcpListener, answer: &HostControlMessage) -> (TcpStream, HostControlMessage) {
    let (mut stream, _) = listener.accept().unwrap();
    let hello = receive(&mut stream, deadline()).unwrap();
    send(&mut stream, answer, deadline()).unwrap();
    (stream, hello)
}

/// Polls until there is an event of some kind.
fn until(plane: &mut HostPlane, seen: &mut Vec<DataEvent>, which: impl Fn(&DataEvent) -> bool) {
    let end = deadline();
    while !seen.iter().any(&which) {
        assert!(Instant::now() < end, "{seen:?}");
        plane.poll(Nanos::ZERO, seen);
        std::thread::yield_now();
    }
}

/// Has the peer do something that waits for the plane, which is polled.
fn meanwhile<T: Send>(
    plane: &mut HostPlane,
    seen: &mut Vec<DataEvent>,
    peer: impl FnOnce() -> T + Send,
) -> T {
    std::thread::scope(|scope| {
        let peer = scope.spawn(peer);
        while !peer.is_finished() {
            plane.poll(Nanos::ZERO, seen);
            std::thread::yield_now();
        }
        peer.join().unwrap()
    })
}

/// Polls for a while in which something must not happen.
fn settle(plane: &mut HostPlane, seen: &mut Vec<DataEvent>) {
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(50) {
        plane.poll(Nanos::ZERO, seen);
        std::thread::yield_now();
    }
}

fn opened() -> Vec<u8> {
    let result = Ok((DataPath::Tcp, side_of(4_096), 0));
    pack_control(&HostControlMessage::Opened { session: SESSION.0, result })
}

fn with_two() -> HostConfig {
    HostConfig { streams: 2, connect_ms: 300_000, open_ms: 300_000, ..HostConfig::default() }
}

/// Takes what comes until the session is closed.
fn read_close(stream: &mut TcpStream) {
    let close = pack(&HostRecord::Close { session: SESSION.0 }.words());
    let mut got = Vec::new();
    while !got.windows(close.len()).any(|part| part == close) {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("it closes the session first");
        got.extend(byte);
    }
}

#[test]
fn a_session_is_open_by_all_its_connections_and_quiet_when_none_can_land_anything() {
    let (listener, mut plane) = dialling_by(with_two(), stranger(0));
    let (mut first, hello) = greeted(&listener, &welcome());
    let (mut second, _) = greeted(&listener, &welcome());
    let HostControlMessage::Hello { link: broken, .. } = hello else { panic!("{hello:?}") };
    let mut seen = Vec::new();
    for stream in [&mut first, &mut second] {
        settle(&mut plane, &mut seen);
        assert!(!seen.iter().any(|event| matches!(event, DataEvent::Opened { .. })), "{seen:?}");
        let open = meanwhile(&mut plane, &mut seen, || receive(stream, deadline()).unwrap());
        assert!(matches!(open, HostControlMessage::Open { .. }), "{open:?}");
        stream.write_all(&opened()).unwrap();
    }
    let is_open = DataEvent::Opened { session: SESSION, result: Ok(()) };
    until(&mut plane, &mut seen, |event| *event == is_open);
    // One by each connection.
    for op in [OpId(4), OpId(5)] {
        let (session, direction) = (SESSION, Direction::Write);
        let (local, remote, len) = (&[0][..], &[0][..], &[8][..]);
        plane.submit(Submit { op, session, direction, local, remote, len }).unwrap();
    }
    set_socket_linger(&first, Some(Duration::ZERO)).unwrap();
    drop(first);
    until(&mut plane, &mut seen, |event| matches!(event, DataEvent::PeerDown { .. }));
    for op in [OpId(4), OpId(5)] {
        let (cause, landed) = (FabricError::PeerGone, Landed::Unknown);
        let failed = DataEvent::Completed { op, outcome: Completion::Failed { cause, landed } };
        assert!(seen.contains(&failed), "{seen:?}");
    }
    plane.close(SESSION);
    plane.quiesce(SESSION, TICKET);
    let quiet = DataEvent::Quiet { session: SESSION, ticket: TICKET };
    // The peer says that nothing comes by the second any more; the first it may still copy from.
    read_close(&mut second);
    second.write_all(&pack(&HostRecord::Closed { session: SESSION.0 }.words())).unwrap();
    settle(&mut plane, &mut seen);
    assert!(!seen.contains(&quiet), "{seen:?}");
    let (_proof, hello) = greeted(&listener, &welcome());
    let HostControlMessage::Hello { ends, .. } = hello else { panic!("{hello:?}") };
    assert_eq!(ends, [broken]);
    until(&mut plane, &mut seen, |event| *event == quiet);
    let downs = seen.iter().filter(|event| **event == DataEvent::PeerDown { peer: PeerId(1) });
    assert_eq!(downs.count(), 1);
    // Nobody needs the second any more.
    assert!(is_dropped(&mut second));
}

#[test]
fn a_session_that_one_connection_is_denied_is_closed_at_the_other() {
    let (listener, mut plane) = dialling_by(with_two(), stranger(0));
    let (mut first, _) = greeted(&listener, &welcome());
    let (mut second, _) = greeted(&listener, &welcome());
    let mut seen = Vec::new();
    meanwhile(&mut plane, &mut seen, || receive(&mut first, deadline()).unwrap());
    first.write_all(&opened()).unwrap();
    // An answer that comes after the denial would be answered by itself.
    settle(&mut plane, &mut seen);
    meanwhile(&mut plane, &mut seen, || {
        receive(&mut second, deadline()).unwrap();
        let (why, tcp) = ("too many of them".into(), false);
        let result = Err(crate::proto::SessionDenial { why, tcp });
        let denied = HostControlMessage::Opened { session: SESSION.0, result };
        second.write_all(&pack_control(&denied)).unwrap();
        read_close(&mut first);
    });
    let failed = Err(FabricError::Backend("too many of them".into()));
    let answer = DataEvent::Opened { session: SESSION, result: failed };
    until(&mut plane, &mut seen, |event| *event == answer);
}

#[test]
fn the_others_end_with_one_that_breaks_when_no_session_has_them() {
    let (listener, mut plane) = dialling_by(with_two(), stranger(0));
    let (first, _) = greeted(&listener, &welcome());
    let (mut second, _) = greeted(&listener, &welcome());
    plane.close(SESSION);
    let mut seen = Vec::new();
    drop(first);
    until(&mut plane, &mut seen, |event| matches!(event, DataEvent::PeerDown { .. }));
    // What it said before its session was closed comes first.
    assert!(is_dropped(&mut second));
}

#[test]
fn a_connection_that_is_refused_fails_them_all_with_its_reason() {
    let (listener, mut plane) = dialling_by(with_two(), stranger(0));
    let (mut first, _) = greeted(&listener, &welcome());
    let why = "2 links already: raise links_max";
    greeted(&listener, &HostControlMessage::Refuse { why: why.into(), over: false });
    let mut seen = Vec::new();
    until(&mut plane, &mut seen, |event| matches!(event, DataEvent::Opened { .. }));
    let DataEvent::Opened { result: Err(cause), .. } = &seen[seen.len() - 1] else {
        panic!("{seen:?}")
    };
    assert!(cause.to_string().contains(why), "{cause}");
    assert!(is_dropped(&mut first), "the other one is closed");
}
