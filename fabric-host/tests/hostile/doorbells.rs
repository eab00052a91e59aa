//! Doorbells by which a peer would stop the thread that copies for all.

use crate::forged::{AttackedPlane, ForgedMessage, PATIENCE, hear, own_memory, say, write_record};
use kvferry_fabric_host::HostPlane;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::channel;

/// A blocking pipe that is full.
fn full_pipe() -> (OwnedFd, OwnedFd) {
    let (read, write) = rustix::pipe::pipe().expect("a pipe");
    let flags = rustix::fs::fcntl_getfl(&write).expect("flags");
    let waits_not = flags | rustix::fs::OFlags::NONBLOCK;
    rustix::fs::fcntl_setfl(&write, waits_not).expect("flags");
    while rustix::io::write(&write, &[0; 4_096]).is_ok() {}
    rustix::fs::fcntl_setfl(&write, flags).expect("flags");
    (read, write)
}

/// A blocking eventfd that is full.
fn full_eventfd() -> OwnedFd {
    let full = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).expect("room for it");
    full
}

/// The plane ends, as it does for SIGTERM, though its peers are still there.
fn assert_ends(plane: HostPlane) {
    let (tell, ended) = channel();
    std::thread::spawn(move || {
        drop(plane);
        let _heard = tell.send(());
    });
    ended.recv_timeout(PATIENCE).expect("the plane waits for a thread that a peer holds");
}

/// Has the plane ring for an answer, if it let the peer in; then others are served, and it ends.
fn hold(bell: &OwnedFd) {
    let victim = AttackedPlane::of_own_memory();
    let (socket, mut segment, answer) = victim.greet(std::process::id(), bell.as_fd());
    if let ForgedMessage::Refuse { why, .. } = &answer {
        assert!(why.contains("a doorbell that is no pipe"), "{why}");
        assert_eq!(victim.plane.counters().refused, 1);
    } else {
        segment.sleep();
        // Refused, as there is no such session, and answered.
        segment.push(&write_record(1, 1, true, 1, 8));
        let start = std::time::Instant::now();
        while !segment.is_rung_for() {
            assert!(start.elapsed() < PATIENCE, "nobody rings");
            std::thread::yield_now();
        }
    }
    let (at, (tell, served)) = (victim.at.clone(), channel());
    std::thread::spawn(move || {
        let (other, _segment) = at.enter();
        let _heard = tell.send(at.open(&other, own_memory(&[1; 8]), None));
    });
    let served = served.recv_timeout(PATIENCE);
    assert!(served.is_ok(), "another peer is not served");
    assert_ends(victim.plane);
    drop((socket, segment));
}

#[test]
fn a_full_pipe_for_a_doorbell_stops_nobody() {
    let (_read, write) = full_pipe();
    hold(&write);
}

#[test]
fn a_full_eventfd_for_a_doorbell_stops_nobody() {
    hold(&full_eventfd());
}

/// It is named as a pipe is, and opened anew it may wait as its file system likes.
#[test]
fn a_file_named_like_a_pipe_is_no_doorbell() {
    let path = std::env::temp_dir().join(format!("pipe:[{}]", std::process::id()));
    let file = std::fs::File::create(&path).expect("a file");
    let victim = AttackedPlane::of_own_memory();
    let (_socket, _segment, answer) = victim.greet(std::process::id(), file.as_fd());
    std::fs::remove_file(path).expect("it is there");
    let ForgedMessage::Refuse { why, .. } = answer else { panic!("{answer:?}") };
    assert!(why.contains("a doorbell that is no pipe"), "{why}");
}

/// Planes of older versions send an eventfd.
#[test]
fn a_local_peer_of_an_older_version_is_told_which_one_it_needs() {
    let victim = AttackedPlane::of_own_memory();
    let ForgedMessage::Hello { from, to, pass, link, ends, rules, .. } =
        victim.hello(std::process::id())
    else {
        panic!("no hello")
    };
    let (version, newest) = (2, Some(3));
    let hello = ForgedMessage::Hello { version, from, to, pass, link, ends, rules, newest };
    let (socket, bell) = (victim.connect(), full_eventfd());
    say(&socket, &hello, &[bell.as_fd(), bell.as_fd()]);
    let (answer, _) = hear(&socket).expect("an answer");
    let why = answer.why();
    assert!(why.contains("version 4") && why.contains("3 at most"), "{why}");
}
