//! The TCP bytes of a whole handshake between two engines of vLLM 0.32.0 (libzmq 4.3.5), played to
//! either side of ours.

mod common;

use common::TestZmqPlane;
use kvferry_engine::fabric::{ControlEvent, ControlPlane, Endpoint, LinkId, LinkKind};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

const RECORDED: &str = include_str!("fixtures/zmtp_handshake_stream.json");

/// Signature, version, rest of the greeting: libzmq sends each when it has seen the one before of
/// the other side, and does not take them all at once.
const GREETING: [usize; 3] = [10, 1, 53];

/// What the dialler said, and what the listener.
fn recorded() -> [Vec<u8>; 2] {
    let fixture: serde_json::Value = serde_json::from_str(RECORDED).expect("the fixture is JSON");
    ["dialler_to_listener_hex", "listener_to_dialler_hex"].map(|key| {
        let hex = fixture[key].as_str().expect("bytes are hex");
        let digits = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex digits");
        (0..hex.len()).step_by(2).map(digits).collect()
    })
}

/// The ZMTP frames behind the greeting: flags and contents (RFC 37).
fn frames(mut stream: &[u8]) -> Vec<(u8, Vec<u8>)> {
    stream = &stream[64..];
    let mut frames = Vec::new();
    while let [flags, rest @ ..] = stream {
        let (len, rest) = match flags & 2 {
            0 => (usize::from(rest[0]), &rest[1..]),
            _ => (u64::from_be_bytes(rest[..8].try_into().unwrap()) as usize, &rest[8..]),
        };
        frames.push((*flags, rest[..len].to_vec()));
        stream = &rest[len..];
    }
    frames
}

/// Plays one side of a connection; returns what the other side said, as much as was recorded.
fn play(mut stream: TcpStream, mine: &[u8], others: usize) -> Vec<u8> {
    stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let mut heard = Vec::new();
    let mut read = |stream: &mut TcpStream, count: usize| {
        let from = heard.len();
        heard.resize(from + count, 0);
        stream.read_exact(&mut heard[from..]).expect("the other side goes on");
    };
    let mut sent = 0;
    for part in GREETING {
        stream.write_all(&mine[sent..sent + part]).unwrap();
        read(&mut stream, part);
        sent += part;
    }
    stream.write_all(&mine[sent..]).unwrap();
    read(&mut stream, others - sent);
    heard
}

#[test]
fn a_recorded_dialler_gets_the_recorded_answer() {
    let [dialler, listener] = recorded();
    let mut ours = TestZmqPlane::new("127.0.0.1");
    let to = ours.plane.listen(LinkKind::Handshake).unwrap();
    let stream = TcpStream::connect(to.0.strip_prefix("tcp://").unwrap()).unwrap();
    let (mine, others) = (dialler.clone(), listener.len());
    let player = std::thread::spawn(move || play(stream, &mine, others));
    let (link, parts) = ours.next_frame();
    assert_eq!(parts, [frames(&dialler)[1].1.clone()]);
    let answers: Vec<_> = frames(&listener)[1..].iter().map(|(_, bytes)| bytes.clone()).collect();
    for answer in answers.chunks(2) {
        let parts: Vec<&[u8]> = answer.iter().map(Vec::as_slice).collect();
        ours.plane.send(link, &parts).unwrap();
    }
    let heard = player.join().expect("the player ends");
    assert_eq!(heard[64..], listener[64..]);
}

#[test]
fn a_recorded_listener_hears_the_recorded_dialler() {
    let [dialler, listener] = recorded();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = Endpoint::from(format!("tcp://{}", server.local_addr().unwrap()).as_str());
    let (mine, others) = (listener.clone(), dialler.len());
    let player = std::thread::spawn(move || play(server.accept().unwrap().0, &mine, others));
    let (mut ours, link) = (TestZmqPlane::new("127.0.0.1"), LinkId(1));
    ours.plane.dial(link, &to, LinkKind::Handshake).unwrap();
    let up = ControlEvent::LinkUp { link, channel: LinkKind::Handshake, from: None };
    ours.wait_for(|event| *event == up);
    ours.plane.send(link, &[&frames(&dialler)[1].1]).unwrap();
    let answers: Vec<_> = frames(&listener)[1..].iter().map(|(_, bytes)| bytes.clone()).collect();
    for answer in answers.chunks(2) {
        assert_eq!(ours.next_frame(), (link, answer.to_vec()));
    }
    let heard = player.join().expect("the player ends");
    assert_eq!(heard[64..], dialler[64..]);
}
