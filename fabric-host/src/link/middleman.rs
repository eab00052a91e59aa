//! Somebody between two planes who has TLS with each of them, and forwards what they say.

use super::hostile::{Victim, deadline, dialling_with, is_dropped, secret_file, stranger, welcome};
use super::proof::said;
use super::stream::pack_control;
use super::tls_config::LinkTls;
use super::tls_greeting::TcpGreeting;
use crate::proto::HostControlMessage;
use crate::{HostConfig, HostPlane, PeerTrust};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{DataEvent, DataPlane};
use kvferry_trust::FleetSecret;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::PathBuf;

const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// Settings of a plane that encrypts, and the file that has to be there at its start.
fn encrypting(name: &str) -> (HostConfig, PathBuf) {
    let path = secret_file(name, SECRET);
    let trust =
        PeerTrust { secret_file: Some(path.clone()), encrypt: true, ..PeerTrust::default() };
    (HostConfig { trust, connect_ms: 300_000, open_ms: 300_000, ..HostConfig::default() }, path)
}

fn accepted(stream: TcpStream) -> TcpGreeting {
    let mut peer = TcpGreeting::new(stream, deadline());
    peer.accept(Some(&LinkTls::new().unwrap())).unwrap();
    peer
}

fn dialled(victim: &Victim) -> TcpGreeting {
    let mut peer = TcpGreeting::new(victim.dial(), deadline());
    peer.dial(&LinkTls::new().unwrap()).unwrap();
    peer
}

#[test]
fn who_has_tls_with_both_sides_is_refused_by_both() {
    let (config, secret) = encrypting("middleman");
    let victim = Victim::of(config.clone());
    let (mut plane, stream) = dialling_with(config, victim.location());
    fs::remove_file(secret).unwrap();
    let (mut near, mut far) = (accepted(stream), dialled(&victim));
    // The hello, and the proof of who was dialled.
    far.send(&near.receive().unwrap()).unwrap();
    near.send(&far.receive().unwrap()).unwrap();
    let said = near.receive().unwrap();
    let HostControlMessage::Refuse { why, .. } = &said else { panic!("it goes on with {said:?}") };
    assert!(why.contains("the proof of the fleet's secret is wrong"), "{why}");
    assert!(why.contains("somebody between"), "{why}");
    // Who was dialled is told, if who is between passes it on.
    far.send(&said).unwrap();
    let answer = far.receive().unwrap();
    let HostControlMessage::Refuse { why: told, .. } = &answer else { panic!("{answer:?}") };
    assert!(told.contains(why), "{told}");
    victim.until("refused", |counters| counters.refused == 1);
    victim.assert_untouched();
    let failed = failure(&mut plane);
    assert!(failed.contains("somebody between"), "{failed}");
}

/// Why the session was not opened.
fn failure(plane: &mut HostPlane) -> String {
    let mut events = Vec::new();
    loop {
        plane.poll(Nanos::ZERO, &mut events);
        for event in events.drain(..) {
            if let DataEvent::Opened { result, .. } = event {
                return result.expect_err("it is refused").to_string();
            }
        }
        std::thread::yield_now();
    }
}

/// What comes in place of TLS, or in the middle of it, is no reason to go on without.
#[test]
fn a_plane_that_encrypts_says_nothing_in_plain() {
    let answers: [(&[u8], &str); 4] = [
        (b"", "the peer closed in place of speaking TLS: does it have encrypt?"),
        (&pack_control(&welcome()), "answers TLS with something else: does it have encrypt?"),
        (&[0x16, 3, 3, 0, 4, 2, 0, 0, 0], "TLS: "),
        (&[0x15, 3, 3, 0, 2, 2, 40], "TLS: "),
    ];
    for (answer, said) in answers {
        let (config, secret) = encrypting("plain");
        let to = stranger(0);
        let (mut plane, mut stream) = dialling_with(config, to);
        fs::remove_file(secret).unwrap();
        let mut hello = [0; 3];
        stream.read_exact(&mut hello).unwrap();
        assert_eq!(hello, [0x16, 3, 1], "a record of a handshake of TLS");
        stream.write_all(answer).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let why = failure(&mut plane);
        assert!(why.contains(said), "{answer:?}: {why}");
        let mut rest = Vec::new();
        let _reset = stream.read_to_end(&mut rest);
        assert!(!rest.windows(5).any(|rest| rest == b"Hello"), "{}", rest.escape_ascii());
    }
}

/// Bytes that TLS did not encrypt end the link; they are not believed, and neither is an end that it
/// does not vouch for.
#[test]
fn what_was_changed_on_the_way_ends_the_link() {
    let (config, secret) = encrypting("changed-bytes");
    let victim = Victim::of(config);
    fs::remove_file(secret).unwrap();
    for n in 1..=2 {
        let (socket, _tls) = admitted(&victim).into_parts();
        let mut stream = TcpStream::from(socket);
        let record: &[u8] = if n == 1 { &[0x17, 3, 3, 0, 32] } else { &[9, 9, 9, 9, 9] };
        stream.write_all(record).unwrap();
        stream.write_all(&[7; 32]).unwrap();
        assert!(is_dropped(&mut stream));
        victim.until("corrupt", |counters| counters.corrupt == n);
    }
    victim.assert_untouched();
}

/// A connection by TLS that was let in.
fn admitted(victim: &Victim) -> TcpGreeting {
    let mut peer = dialled(victim);
    let fleet = FleetSecret::parse(SECRET).unwrap();
    let own = fleet.offer().unwrap();
    let mut hello = victim.hello();
    if let HostControlMessage::Hello { offer, .. } = &mut hello {
        *offer = Some(own.clone());
    }
    peer.send(&hello).unwrap();
    let HostControlMessage::Prove(answer) = peer.receive().unwrap() else {
        panic!("it is asked for a proof")
    };
    let said = said(&hello, peer.binding().unwrap());
    let (proof, _) = fleet.confirm(("host data plane, TLS", &said), &own, &answer).unwrap();
    peer.send(&HostControlMessage::Proven(proof)).unwrap();
    let welcome = peer.receive().unwrap();
    assert!(matches!(welcome, HostControlMessage::Sealed { .. }), "{welcome:?}");
    peer
}

/// TLS that stops in the middle of a handshake is waited for as long as a greeting, and no longer.
#[test]
fn a_handshake_that_stops_is_given_up() {
    let (config, secret) = encrypting("stops");
    let victim = Victim::of(HostConfig { connect_ms: 300, ..config });
    fs::remove_file(secret).unwrap();
    let hello = [0x16, 3, 1, 1, 0, 1, 0, 0, 252, 3, 3];
    for n in 1..=hello.len() {
        let mut stream = victim.dial();
        stream.write_all(&hello[..n]).unwrap();
        assert!(is_dropped(&mut stream), "{n} bytes");
    }
    victim.until("refused", |counters| counters.refused == hello.len() as u64);
    victim.assert_untouched();
}
