//! A thread that ends by a panic ends its process, with a line.

use std::process::{Command, Stdio, exit};
use std::thread;

/// Set in a process of these tests that is to run the program and to panic beside it.
const PLANTED: &str = "KVFERRY_TEST_PANIC";

/// Not a test of its own: the process that the next one starts.
#[test]
fn planted() {
    if std::env::var_os(PLANTED).is_none() {
        return;
    }
    let socket = std::env::temp_dir().join(format!("kvferry-panics-{}.sock", std::process::id()));
    let args = ["kvferry".into(), "host".into(), "--socket".into(), socket.clone().into()];
    thread::spawn(|| kvferry::main(args));
    // When it listens, the program has begun.
    while std::os::unix::net::UnixStream::connect(&socket).is_err() {
        thread::yield_now();
    }
    // It has no time to do so itself.
    for left in [socket.clone(), socket.with_extension("sock.lock")] {
        std::fs::remove_file(left).expect("it is there");
    }
    let other = thread::Builder::new().name("kvferry-other".into());
    let _ended = other.spawn(|| panic!("on\npurpose")).expect("a thread").join();
    // The process goes on.
    exit(0);
}

#[test]
fn a_panic_in_any_thread_ends_the_process_with_a_line() {
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args(["--exact", "panics::planted", "--nocapture"]).env(PLANTED, "1");
    let ended = child.stdin(Stdio::null()).output().expect("it runs");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(6), "{said}");
    let line = said.lines().find(|line| line.contains("panicked")).unwrap_or_default();
    assert!(line.starts_with("error: thread 'kvferry-other' panicked at"), "{said}");
    assert!(line.contains("panics.rs:") && line.contains("on purpose"), "{said}");
}
