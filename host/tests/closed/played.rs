//! Instances and strangers that the test plays.

use crate::fleet::{FleetHeartbeat, TestCluster, answering};
use crate::process::ServeProcess;
use crate::seen::{SeenInputs, read, seen_now, until};
use kvferry_engine::core::dialect::moriio::notify::write_failed;
use kvferry_engine::core::dialect::native::{self, ConnectionHeader, Frame, MessageKind};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::{Mode, Registration, Role};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;

/// An instance that answers every request so, once it was asked whether it is well.
pub(crate) fn answers(status: u16, body: &Value) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let at = listener.local_addr().expect("bound").to_string();
    let body = body.to_string();
    thread::spawn(move || {
        for mut client in listener.incoming().map_while(Result::ok) {
            let body = body.clone();
            thread::spawn(move || {
                let mut asked = Vec::new();
                let mut part = [0; 4096];
                while let Ok(count @ 1..) = client.read(&mut part) {
                    asked.extend_from_slice(&part[..count]);
                    let is_probe = asked.starts_with(b"GET");
                    if !(is_probe && asked.ends_with(b"\r\n\r\n") || asked.ends_with(b"}")) {
                        continue;
                    }
                    let (status, body) = if is_probe { (200, "{}") } else { (status, &*body) };
                    let len = body.len();
                    let answer = format!(
                        "HTTP/1.1 {status} x\r\ncontent-type: application/json\r\n\
                         content-length: {len}\r\n\r\n{body}"
                    );
                    asked.clear();
                    if client.write_all(answer.as_bytes()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    at
}

/// An instance at an address that is nothing but answers.
fn told(http: &str, role: Role) -> Registration {
    answering(http, role, Mode::Push, "tcp://127.0.0.1:1")
}

/// An answer that is whole.
fn completion() -> Value {
    json!({"id": "i", "object": "text_completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "text": "t", "finish_reason": "length", "logprobs": null}]})
}

/// An answer that says in which way an instance failed, or went without its KV.
fn failed(failure: &Value, is_error: bool) -> Value {
    let failed = json!({"failed": {"cause": "c", "why": "w", "failure": failure}});
    if is_error {
        return json!({"error": {"message": "m", "type": "t", "code": 500, "kvferry": failed}});
    }
    let mut answer = completion();
    answer["kvferry"] = failed;
    answer
}

/// Decodes that fail each in its way, or go without their KV, beside a prefill that is well.
pub(crate) fn failing(seen: &mut SeenInputs) {
    let cases = [
        (500, failed(&json!("EngineGone"), true), "LegFailedGone"),
        (500, failed(&json!("OtherLife"), true), "LegFailedLife"),
        (500, failed(&json!("Unreachable"), true), "LegFailedApart"),
        (500, failed(&json!("Stalled"), true), "LegFailedMoving"),
        (500, failed(&json!("PrefillEnded"), true), "LegFailedPrompt"),
        (500, json!({"error": {"message": "m", "type": "t", "code": 500}}), "LegFailedAnswer"),
        (503, json!({"error": {"message": "m", "type": "t", "code": 503}}), "LegFailedBusy"),
        (200, failed(&json!("PrefillEnded"), false), "LegRecomputed"),
        (200, failed(&json!("PeerSilent"), false), "LegRecomputedApart"),
    ];
    let p = answers(200, &completion());
    for (status, body, kind) in cases {
        let fleet = TestCluster::new(&["--retries", "0", "--queue-timeout", "0.001"]);
        let d = answers(status, &body);
        let _hearts = [(&p, Role::Prefill), (&d, Role::Decode)]
            .map(|(http, role)| FleetHeartbeat::beat(fleet.discovery(), told(http, role)));
        fleet.ready(2);
        let (status, body) = fleet.ask(1, &[]);
        assert_eq!(status == 200, kind.starts_with("LegRecomputed"), "{kind}: {body}");
        assert!(seen_now(&fleet, kind), "{kind}");
        read(seen, &fleet.router);
    }
}

/// A prefill is told that its decode has failed.
pub(crate) fn abandoned(seen: &mut SeenInputs) {
    let fleet = TestCluster::new(&["--retries", "0", "--queue-timeout", "0.001"]);
    let p = fleet.serve("prefill", "push", &[]);
    let d = answers(500, &failed(&json!("PrefillEnded"), true));
    let _heart = FleetHeartbeat::beat(fleet.discovery(), told(&d, Role::Decode));
    fleet.ready(2);
    assert!(fleet.ask(1, &[]).0 >= 500);
    until(seen, &p, "prefill", &["Abandon"]);
}

/// An instance that takes connections and says nothing.
pub(crate) fn silent(seen: &mut SeenInputs) {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let fleet = TestCluster::new(&[]);
    let http = silent.local_addr().expect("bound").to_string();
    let _heart = FleetHeartbeat::beat(fleet.discovery(), told(&http, Role::Prefill));
    // It is asked again.
    until(seen, &fleet.router, "router", &["ProbeLost", "Tick"]);
}

/// Who sends what instances do not send one another, or not to this role.
pub(crate) fn strangers(seen: &mut SeenInputs) {
    let fleet = TestCluster::new(&[]);
    let garbage = |to: &str| FleetHeartbeat::send(to, || b"\xff\xff".to_vec());
    let _at_router = garbage(fleet.discovery());
    until(seen, &fleet.router, "router", &["FrameOther"]);
    let (from, to) = (Incarnation(1), Incarnation(2));
    let envelope = ConnectionHeader { version: 2, from, to, session: 1 };
    let refuse =
        native::encode(&Frame::Refuse { envelope, engine: "e".into(), reason: "r".into() });
    // Nothing but the header.
    let begun = |kind: MessageKind| [&native::MAGIC[..], &[0, kind as u8]].concat();
    let (hello, welcome) = (begun(MessageKind::Hello), begun(MessageKind::Welcome));
    for (role, own) in [
        ("prefill", vec![("Refuse", refuse), ("Welcome", welcome)]),
        // As a prefill of vLLM 0.33.0 that does not write.
        ("decode", vec![("Hello", hello), ("MoriioFailed", write_failed(&"t".into()))]),
    ] {
        let process = ServeProcess::serve(&["--role", role, "--mode", "push"]);
        let at = process.text("handshake").trim_start_matches("tcp://");
        let _garbage = garbage(at);
        let _text = FleetHeartbeat::send(at, || b"pop_done_recv".to_vec());
        until(seen, &process, role, &["FrameOther", "MoriioText"]);
        for (kind, frame) in own {
            let _own = FleetHeartbeat::send(at, move || frame.clone());
            until(seen, &process, role, &[kind]);
        }
    }
}
