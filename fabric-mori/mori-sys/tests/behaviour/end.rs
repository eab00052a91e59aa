//! What is said when a process ends inside MoRI.

use super::rig::{Faults, Node, pair};
use mori_sys::Direction;
use std::process::Command;

/// Runs a test again, in a process in which it does the part that ends; what that said.
fn child(test: &str) -> (Option<i32>, String) {
    let mut again = Command::new(std::env::current_exe().expect("a path"));
    again.args([test, "--exact", "--nocapture"]).env("KF_CHILD", "1");
    let output = again.output().expect("it runs");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn is_child() -> bool {
    std::env::var_os("KF_CHILD").is_some()
}

#[test]
fn the_last_call_is_named_when_mori_exits() {
    if is_child() {
        let _faults = Faults::set("exit@1");
        let (near, _far) = pair(Node::rdma, -1);
        let status = near.take();
        near.post(0, Direction::WRITE, &[[0, 0, 8], [8, 8, 8]], status).expect("it never returns");
    }
    let (code, said) = child("behaviour::end::the_last_call_is_named_when_mori_exits");
    let line = "kvferry: the process exits with 2 MoRI engine(s) up; last call into MoRI: \
                IOEngineSession::BatchWrite, under way\n";
    assert!(code == Some(255) && said.contains(line), "{code:?} {said}");
    assert_eq!(said.matches("kvferry:").count(), 1, "{said}");
}

#[test]
fn an_engine_that_is_left_behind_is_named() {
    if is_child() {
        let _node = Node::rdma();
        std::process::exit(3);
    }
    let (code, said) = child("behaviour::end::an_engine_that_is_left_behind_is_named");
    let line = "with 1 MoRI engine(s) up; last call into MoRI: IOEngine::CreateBackend(RDMA), \
                returned\n";
    assert!(code == Some(3) && said.contains(line), "{code:?} {said}");
}

#[test]
fn an_orderly_end_says_nothing() {
    if is_child() {
        drop(pair(Node::rdma, -1));
        std::process::exit(4);
    }
    let (code, said) = child("behaviour::end::an_orderly_end_says_nothing");
    assert!(code == Some(4) && !said.contains("kvferry:"), "{code:?} {said}");
}
