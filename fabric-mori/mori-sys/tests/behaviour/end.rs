//! What is said when a process ends inside MoRI.

use super::rig::{ShimFaultGuard, ShimTestNode, pair, shim};
use mori_sys::Direction;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};

/// Runs a test again, in a process in which it does the part that ends; what that said.
fn child(test: &str) -> (ExitStatus, String) {
    let mut again = Command::new(std::env::current_exe().expect("a path"));
    again.args([test, "--exact", "--nocapture"]).env("KF_CHILD", "1");
    let output = again.output().expect("it runs");
    (output.status, String::from_utf8_lossy(&output.stderr).into_owned())
}

fn is_child() -> bool {
    std::env::var_os("KF_CHILD").is_some()
}

#[test]
fn the_last_call_is_named_when_mori_exits() {
    if is_child() {
        let _faults = ShimFaultGuard::set("exit@1");
        let (near, _far) = pair(ShimTestNode::rdma, -1);
        let status = near.take();
        near.post(0, Direction::WRITE, &[[0, 0, 8], [8, 8, 8]], status).expect("it never returns");
    }
    let (status, said) = child("behaviour::end::the_last_call_is_named_when_mori_exits");
    let line = "kvferry: the process exits with status 255 with 2 MoRI engine(s) up; last call into \
                MoRI: IOEngineSession::BatchWrite, under way\n";
    assert!(status.code() == Some(255) && said.contains(line), "{status} {said}");
    assert_eq!(said.matches("kvferry:").count(), 1, "{said}");
}

#[test]
fn the_last_call_is_named_when_mori_aborts() {
    if is_child() {
        let _faults = ShimFaultGuard::set("pin@1");
        pair(ShimTestNode::rdma, -1);
    }
    let (status, said) = child("behaviour::end::the_last_call_is_named_when_mori_aborts");
    let line = "kvferry: the process aborts with 2 MoRI engine(s) up; last call into MoRI: \
                IOEngine::CreateSession, under way\n";
    assert!(status.signal() == Some(6) && said.contains(line), "{status} {said}");
    assert_eq!(said.matches("kvferry:").count(), 1, "{said}");
}

#[test]
fn who_survives_is_told_the_last_words() {
    if is_child() {
        // SAFETY: Any number is taken; this one is the end of a pipe.
        unsafe { (shim().functions.kf_last_words)(std::io::stdout().as_raw_fd()) };
        let _node = ShimTestNode::rdma();
        std::process::exit(3);
    }
    let mut again = Command::new(std::env::current_exe().expect("a path"));
    again.args(["behaviour::end::who_survives_is_told_the_last_words", "--exact", "--nocapture"]);
    again.env("KF_CHILD", "1").stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = again.spawn().expect("it runs");
    let mut said = String::new();
    child.stdout.take().expect("a pipe").read_to_string(&mut said).expect("text");
    assert_eq!(child.wait().expect("a child").code(), Some(3));
    assert!(
        said.contains("kvferry: the process exits with status 3 with 1 MoRI engine(s)"),
        "{said}"
    );
}

#[test]
fn an_engine_that_is_left_behind_is_named() {
    if is_child() {
        let _node = ShimTestNode::rdma();
        std::process::exit(3);
    }
    let (status, said) = child("behaviour::end::an_engine_that_is_left_behind_is_named");
    let line = "with 1 MoRI engine(s) up; last call into MoRI: IOEngine::CreateBackend(RDMA), \
                returned\n";
    assert!(status.code() == Some(3) && said.contains(line), "{status} {said}");
}

#[test]
fn an_orderly_end_says_nothing() {
    if is_child() {
        drop(pair(ShimTestNode::rdma, -1));
        std::process::exit(4);
    }
    let (status, said) = child("behaviour::end::an_orderly_end_says_nothing");
    assert!(status.code() == Some(4) && !said.contains("kvferry:"), "{status} {said}");
}
