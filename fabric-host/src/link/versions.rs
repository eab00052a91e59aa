//! Peers that speak another version of the protocol.

use super::hostile::{
    MARK, Victim, answered, deadline, dialling, is_dropped, receive, rules, send, slice, stranger,
    write,
};
use super::stream::{pack, pack_message};
use crate::proto::{HostControlMessage, HostCopyStatus, HostRecord, OLDEST, PathPolicy, VERSION};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::DataPlane;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// A message that there is in a later version only.
#[derive(serde::Serialize)]
enum Later {
    News { what: Vec<u64> },
}

/// It as a record.
fn later(words: u64) -> Vec<u8> {
    let message = Later::News { what: (0..words).map(|word| u64::MAX - word).collect() };
    pack_message(rmp_serde::to_vec_named(&message).expect("plain data"))
}

#[test]
fn messages_of_a_later_version_are_skipped_and_those_of_none_are_not() {
    let mut victim = Victim::new();
    victim.newest = VERSION + 1;
    let mut stream = victim.enter();
    for words in [0, 3, 200] {
        stream.write_all(&later(words)).unwrap();
    }
    // It goes on as if they had not been.
    stream.write_all(&write(9, &[slice(0, 0, 8)])).unwrap();
    stream.write_all(&[MARK; 8]).unwrap();
    let done = HostRecord::Done { op: 1, status: HostCopyStatus::Done };
    assert_eq!(answered(&mut stream), done.words());
    // More than a message may have, a known one that is none, and records of no version are damage.
    let damaged = pack_message(b"\x81\xa4Open\xff\xff".to_vec());
    for (n, bytes) in [later(2_000), damaged, pack(&[99 << 56, 1])].iter().enumerate() {
        let mut stream = victim.enter();
        stream.write_all(bytes).unwrap();
        assert!(is_dropped(&mut stream), "{n}");
        victim.until("corrupt", |counters| counters.corrupt == n as u64 + 1);
    }
    // Who speaks this version says none.
    let victim = Victim::new();
    let mut stream = victim.enter();
    stream.write_all(&later(3)).unwrap();
    assert!(is_dropped(&mut stream));
    victim.until("corrupt", |counters| counters.corrupt == 1);
    victim.assert_untouched();
}

/// A hello as planes of version 2 say it: by place, without what is new.
fn hello_of_version_2(victim: &Victim) -> Vec<u8> {
    #[derive(serde::Serialize)]
    enum Version2 {
        Hello(u32, Vec<u8>, (String, u64), u64, u64, Vec<u64>, PathPolicy),
    }
    let who = &victim.location().who;
    let to = (who.key.to_string(), who.incarnation);
    let from = stranger(0).encode().0.to_vec();
    let hello = Version2::Hello(2, from, to, 0, 0, Vec::new(), rules());
    pack_message(rmp_serde::to_vec(&hello).expect("plain data"))
}

#[test]
fn a_plane_of_version_2_is_let_in_and_served() {
    let victim = Victim::new();
    let mut stream = victim.dial();
    stream.write_all(&hello_of_version_2(&victim)).unwrap();
    let welcome = receive(&mut stream, deadline()).unwrap();
    let HostControlMessage::Welcome { version: Some((2, VERSION)), .. } = welcome else {
        panic!("{welcome:?}")
    };
    victim.open(&mut stream);
    stream.write_all(&write(9, &[slice(0, 0, 8)])).unwrap();
    stream.write_all(&[1; 8]).unwrap();
    answered(&mut stream);
    assert_eq!(victim.bytes[..9], [1, 1, 1, 1, 1, 1, 1, 1, MARK]);
}

/// Who lets a plane in speaks version 2, or chooses a version that was not offered.
#[test]
fn who_is_dialled_may_speak_version_2_and_none_that_was_not_offered() {
    let dialled = |version| {
        let (mut plane, mut stream) = dialling();
        let hello = receive(&mut stream, deadline()).unwrap();
        let HostControlMessage::Hello { version: OLDEST, newest: Some(VERSION), .. } = hello else {
            panic!("{hello:?}")
        };
        let welcome = HostControlMessage::Welcome { rules: rules(), version };
        send(&mut stream, &welcome, deadline()).unwrap();
        // It opens the session, or hangs up.
        let is_told = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut events = Vec::new();
                while !is_told.load(Ordering::Acquire) {
                    plane.poll(Nanos::ZERO, &mut events);
                    std::thread::yield_now();
                }
            });
            let told = receive(&mut stream, deadline()).ok();
            is_told.store(true, Ordering::Release);
            told
        })
    };
    for version in [None, Some((2, 2)), Some((VERSION, VERSION + 9))] {
        let opens = dialled(version);
        assert!(matches!(opens, Some(HostControlMessage::Open { .. })), "{version:?}: {opens:?}");
    }
    for version in [(1, 1), (VERSION + 1, VERSION + 1), (0, u32::MAX), (u32::MAX, 0)] {
        assert_eq!(dialled(Some(version)), None, "{version:?}");
    }
}
