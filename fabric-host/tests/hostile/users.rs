//! Who is greeted at the local socket, and whose memory a peer may offer.

use crate::common::patient;
use crate::common::remote::{HostTestSetup, start};
use crate::forged::{AttackedPlane, ForgedMessage, ForgedRegion, bell, own_memory};
use kvferry_engine::conformance::PlaneUnderTest;
use kvferry_engine::fabric::{Memory, OwnMemory};
use kvferry_fabric_host::{HostConfig, PeerTrust};
use std::os::fd::AsFd;

/// A user that is nobody's.
const STRANGER: u32 = 54_321;

/// Does something as another user: the thread alone becomes it. None where that needs root.
fn as_stranger<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    let (keep, stranger) = (-1_i64, i64::from(STRANGER));
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: The raw call changes the user of this thread alone, which ends with `work`.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, keep, stranger, keep) };
            (changed == 0).then(work)
        });
        thread.join().expect("the thread")
    })
}

#[test]
fn another_user_is_refused_and_told_so() {
    let victim = AttackedPlane::of_own_memory();
    let at = &*victim;
    let greet = || {
        let (bell, _) = bell();
        at.greet(std::process::id(), bell.as_fd()).2
    };
    let Some(answer) = as_stranger(greet) else { return };
    let why = answer.why();
    assert!(why.contains("user 54321") && why.contains("`uids`"), "{why}");
    assert_eq!(victim.plane.counters().refused, 1);
    // Who is of this user is greeted.
    victim.enter();
}

#[test]
fn a_user_that_is_configured_is_greeted_but_its_memory_is_not_read() {
    let config = HostConfig {
        trust: PeerTrust { uids: vec![STRANGER], ..PeerTrust::default() },
        ..patient()
    };
    let bytes = Box::leak(vec![7_u8; 4_096].into_boxed_slice());
    let (base, len) = (bytes.as_mut_ptr() as u64, bytes.len() as u64);
    // SAFETY: It is never freed, and nobody writes it.
    let memory = Memory::Own(unsafe { OwnMemory::new(base, len) });
    let victim = AttackedPlane::new(config, memory);
    let (at, own) = (&*victim, own_memory(bytes));
    let open = || {
        let (socket, _segment) = at.enter();
        at.open(&socket, own, None).0
    };
    let Some(answer) = as_stranger(open) else { return };
    let why = answer.why();
    assert!(why.contains("user 54321"), "{why}");
}

#[test]
fn a_peer_that_names_another_process_as_itself_is_refused() {
    let victim = AttackedPlane::of_own_memory();
    let (bell, _) = bell();
    let (_, _, answer) = victim.greet(1, bell.as_fd());
    let why = answer.why();
    let own = format!("process {}", std::process::id());
    assert!(why.contains("process 1") && why.contains(&own), "{why}");
    assert_eq!(victim.plane.counters().refused, 1);
}

/// When a process was started, which anybody can read.
fn started(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
    let (_, rest) = stat.rsplit_once(')').expect("a name");
    rest.split_whitespace().nth(19).expect("a start").parse().expect("a number")
}

#[test]
fn memory_of_a_process_that_the_peer_may_not_read_is_no_source() {
    let config = HostConfig { open_door: true, ..patient() };
    let mut other = start(&HostTestSetup { config, memory: 8_192, file: false });
    let Memory::Own(range) = other.memory() else { panic!("own memory") };
    let (base, len) = (range.base(), range.len());
    let victim = AttackedPlane::of_own_memory();
    let (socket, _segment) = victim.enter();
    let process = Some((other.pid(), started(other.pid())));
    let local = ForgedRegion { base, len, process, file: false };
    let path = |file: &str| format!("/proc/{}/{file}", other.pid());
    // The file of its memory, unopened; one that anybody may open; that of another process.
    let unopened = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
    let none = rustix::fs::Mode::empty();
    let unopened = rustix::fs::open(path("mem"), unopened, none).expect("a path");
    let status = std::fs::File::open(path("status")).expect("a status").into();
    let own = std::fs::File::open("/proc/self/mem").expect("own memory").into();
    for file in [None, Some(&unopened), Some(&status), Some(&own)] {
        let file = file.map(|file: &std::os::fd::OwnedFd| file.as_fd());
        let (answer, _) = victim.open(&socket, local.clone(), file);
        let why = answer.why();
        assert!(why.contains(&format!("process {}", other.pid())), "{why}");
    }
    // Its own it may offer.
    let bytes = [1; 8_192];
    let (answer, _) = victim.open(&socket, own_memory(&bytes), None);
    assert!(matches!(answer, ForgedMessage::Opened { result: Ok(_), .. }), "{answer:?}");
}
