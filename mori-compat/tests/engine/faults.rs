//! Injected faults and the audit.

use crate::fake::until;
use crate::{CompatTestRig, SIZE};
use kvferry_engine::fabric::{Completion, Direction};
use kvferry_mori_compat::{CompatEngine, CompatError, CompatSettings, CompatStatusCode};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::PathBuf;

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()))
}

fn faulty(name: &str, faults: &str) -> CompatTestRig {
    let path = path(name);
    std::fs::write(&path, faults).expect("writable");
    CompatTestRig::new(&CompatSettings { faults: Some(path), ..CompatSettings::default() })
}

/// The first transfer is hit, the second is not.
fn first(kind: &str, more: &str) -> String {
    format!("[[fault]]\nkind = \"{kind}\"\non = {{ event = \"op.posted\" }}\n{more}\n")
}

#[test]
fn a_transfer_without_a_copy_succeeds_and_touches_nothing() {
    let rig = faulty("no-copy", &first("fabric.no_copy", ""));
    assert!(rig.read(&[0]).succeeded());
    assert!(rig.hand.seen().ops.is_empty());
    let next = rig.read(&[0]);
    rig.hand.complete(rig.hand.op(0), Completion::Done);
    until(|| next.succeeded());
}

#[test]
fn completions_are_lost_turned_and_held_back() {
    let faults = [
        first("fabric.ack_lost", ""),
        "[[fault]]\nkind = \"fabric.completion_lost\"\non = { event = \"op.posted\", nth = 2 }\n"
            .into(),
        "[[fault]]\nkind = \"fabric.reorder\"\non = { event = \"op.posted\", nth = 3 }\n\
         delay = \"1h\"\n"
            .into(),
        "[[fault]]\nkind = \"fabric.reorder\"\non = { event = \"op.posted\", nth = 4 }\n\
         delay = \"1ms\"\n"
            .into(),
    ];
    let rig = faulty("acks", &faults.concat());
    let all: Vec<_> = (0..5).map(|_| rig.read(&[0])).collect();
    for nth in 0..5 {
        rig.hand.complete(rig.hand.op(nth), Completion::Done);
    }
    until(|| all[4].succeeded());
    until(|| all[3].succeeded());
    assert_eq!(all[2].code(), CompatStatusCode::InProgress, "overtaken");
    assert_eq!(all[1].code(), CompatStatusCode::InProgress, "for ever");
    assert_eq!(all[0].code(), CompatStatusCode::RdmaOp);
    assert_eq!(all[0].message(), "acknowledgement lost (injected by KVFERRY_FAULTS)");
}

#[test]
fn bytes_move_after_their_completion() {
    let faults = [
        first("fabric.notify_overtakes", "delay = \"1ms\""),
        "[[fault]]\nkind = \"fabric.late_landing\"\non = { event = \"op.posted\", nth = 2 }\n\
         delay = \"1ms\"\n"
            .into(),
    ];
    let rig = faulty("late", &faults.concat());
    rig.hand.seen().credits = Some(0);
    let (done, failed) = (rig.read(&[0, 8, 16]), rig.read(&[24]));
    assert!(done.succeeded() && failed.failed());
    assert!(rig.hand.seen().ops.is_empty());
    rig.hand.seen().credits = None;
    until(|| rig.hand.seen().ops.len() == 3);
}

#[test]
fn a_queue_pair_that_broke_stays_broken() {
    let rig = faulty("qp", &first("fabric.qp_error", ""));
    assert!(rig.read(&[0]).failed());
    let next = rig.read(&[0]);
    assert_eq!(next.code(), CompatStatusCode::BadState);
    assert!(next.message().contains("queue pair error"), "{}", next.message());
    assert_eq!(rig.hand.seen().closed.len(), 1);
}

#[test]
fn a_full_queue_refuses_at_once() {
    let rig = faulty("full", &first("fabric.queue_full", "lasts = \"1h\""));
    let _fills = rig.read(&[0]);
    let refused = rig.read(&[0]);
    assert!(refused.failed() && refused.message().starts_with("SQ full"));
}

#[test]
fn a_wrong_fault_file_stops_the_engine() {
    let path = path("wrong");
    std::fs::write(&path, first("wire.loss", "")).expect("writable");
    let settings = CompatSettings { faults: Some(path), ..CompatSettings::default() };
    let (plane, _) = crate::fake::Fake::boxed("me");
    let why = CompatEngine::over(plane, &settings).expect_err("cannot be injected");
    assert!(matches!(&why, CompatError::Setting(text) if text.contains("wrong:2")), "{why}");
}

#[test]
fn the_audit_has_the_bytes_that_are_in_place() {
    let audit = path("audit.jsonl");
    let _old = std::fs::remove_file(&audit);
    let rig = CompatTestRig::new(&CompatSettings {
        audit: Some(audit.clone()),
        ..CompatSettings::default()
    });
    let len = vec![16, 8];
    let status = rig.session.post(Direction::Write, vec![64, 8], vec![0, 32], len, 77);
    rig.hand.complete(rig.hand.op(0), Completion::Done);
    until(|| status.succeeded());
    let text = std::fs::read_to_string(&audit).expect("written");
    let lines: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), 1);
    let mut digest = Sha256::new();
    digest.update(&rig.memory[64..80]);
    digest.update(&rig.memory[8..16]);
    let hex: String = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    let expected = serde_json::json!({
        "engine": "me", "peer": "peer", "uid": 77, "direction": "write", "slices": 2, "bytes": 24,
        "local": [8, 80], "remote": [0, 40], "error": null, "sha256": hex,
    });
    assert_eq!(lines[0], expected);
    assert_eq!(rig.local.size(), SIZE);
}
