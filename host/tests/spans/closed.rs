//! Instances that move KV: what a router and they tell is one trace.

use crate::collector::{CollectorActs, ReceivedSpan, StubCollector};
use crate::fleet::{FleetHeartbeat, PATIENCE, PATIENT, TestCluster, registration};
use crate::process::{ServeProcess, post_with};
use kvferry_engine::core::message::{Mode, Role};
use serde_json::{Value, json};
use std::time::Instant;

/// Options by which a process sends spans.
fn sending(collector: &StubCollector) -> [&str; 2] {
    ["--otlp-endpoint", &collector.url]
}

fn prompt(seed: u32) -> Vec<u32> {
    (0..70).map(|of| (of * 7 + seed * 31) % 251).collect()
}

/// The one span of a name, and, of a transfer, of a role.
fn one<'a>(spans: &'a [ReceivedSpan], name: &str, role: &str) -> &'a ReceivedSpan {
    let is_it = |span: &&ReceivedSpan| {
        span.name == name && (role.is_empty() || span.attribute("kvferry.role") == role)
    };
    let found: Vec<_> = spans.iter().filter(is_it).collect();
    let [span] = found[..] else { panic!("{name} of {role}: {spans:#?}") };
    span
}

fn is_one_trace(spans: &[ReceivedSpan], mode: &str, stream: bool) {
    let request = one(spans, "request", "");
    assert_eq!((&*request.service, &*request.parent), ("kvferry-router", ""));
    assert_eq!(request.attribute("http.response.status_code"), "200");
    assert_eq!(request.events, if stream { &["first_token"][..] } else { &[] });
    let [prefill, decode] = ["prefill", "decode"].map(|role| {
        let leg = one(spans, &format!("{role} leg"), "");
        let transfer = one(spans, "transfer", role);
        assert_eq!((&leg.parent, &transfer.parent), (&request.id, &leg.id));
        assert_eq!((&*leg.service, &*transfer.service), ("kvferry-router", "kvferry-serve"));
        assert!(request.times.0 <= leg.times.0 && leg.times.0 <= transfer.times.0, "{spans:#?}");
        (leg, transfer)
    });
    for span in spans {
        assert_eq!((&span.trace, &span.error), (&request.trace, &None), "{span:#?}");
        assert_eq!(span.outcome(), "done", "{span:#?}");
    }
    let id = prefill.0.attribute("kvferry.transfer_id");
    for span in [prefill.0, prefill.1, decode.0, decode.1] {
        assert_eq!(span.attribute("kvferry.mode"), mode);
        assert_eq!(span.attribute("kvferry.transfer_id"), id);
    }
    assert!(!id.is_empty());
    let (moves, other) = if mode == "push" { (prefill.1, decode.1) } else { (decode.1, prefill.1) };
    assert!(moves.attribute("kvferry.bytes").parse::<u64>().is_ok_and(|bytes| bytes > 0));
    assert_eq!(other.attribute("kvferry.bytes"), "");
    let peer = prefill.0.attribute("kvferry.engine");
    assert_eq!(decode.1.attribute("kvferry.peer"), peer);
}

#[test]
fn a_request_with_its_legs_and_transfers_is_one_trace() {
    for mode in ["push", "pull"] {
        let collector = StubCollector::start(CollectorActs::Takes);
        let options = sending(&collector);
        let fleet = TestCluster::new(&options);
        let [url, at] = options;
        let _servers =
            ["prefill", "decode"].map(|role| fleet.serve(role, mode, &["--set", PATIENT, url, at]));
        fleet.ready(2);
        let mut seen = 0;
        for stream in [false, true] {
            let body =
                json!({"model": "m", "prompt": prompt(seen), "max_tokens": 4, "stream": stream});
            let (status, answer) = fleet.router.post("/v1/completions", "r", &body);
            assert_eq!(status, 200, "{answer}");
            let spans = collector.spans(seen as usize + 5);
            is_one_trace(&spans[seen as usize..], mode, stream);
            seen += 5;
        }
        // Told after the collector has answered.
        let name = "kvferry_router_spans_exported_total";
        let start = Instant::now();
        while fleet.metric(name) < 6 {
            assert!(start.elapsed() < PATIENCE, "{name} does not count");
        }
        assert_eq!(fleet.metric(name), 6);
    }
}

/// A decode that is killed and registered: its leg fails, and another one is sent elsewhere.
#[test]
fn each_try_has_a_leg() {
    let collector = StubCollector::start(CollectorActs::Takes);
    let options = sending(&collector);
    let fleet = TestCluster::new(&options);
    let serve = |role| fleet.serve(role, "push", &["--set", PATIENT, options[0], options[1]]);
    let _alive = ["prefill", "decode"].map(serve);
    let args = ["--role", "decode", "--mode", "push", "--set", PATIENT, options[0], options[1]];
    let mut dead = ServeProcess::serve(&args);
    // Its registration goes on, so that the router does not know that it has ended.
    let told = registration(&dead, Role::Decode, Mode::Push, dead.text("handshake"));
    let _heart = FleetHeartbeat::beat(fleet.discovery(), told);
    fleet.ready(3);
    dead.signal("KILL");
    dead.wait();
    let is_retried = |span: &ReceivedSpan| span.attribute("http.request.resend_count") == "1";
    let start = Instant::now();
    for nth in 0.. {
        let body = json!({"model": "m", "prompt": prompt(nth), "max_tokens": 1});
        let (status, answer) = fleet.router.post("/v1/completions", "r", &body);
        assert_eq!(status, 200, "{answer}");
        if fleet.metric("kvferry_router_retries_total") > 0 {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "the dead one gets no leg");
    }
    let spans = collector.until("a retry", |spans| {
        let retried = spans.iter().find(|span| is_retried(span));
        let is_whole = |retried: &ReceivedSpan| spans.iter().any(|it| it.id == retried.parent);
        retried.is_some_and(is_whole)
    });
    let retried = spans.iter().find(|span| is_retried(span)).expect("it was waited for");
    let request = spans.iter().find(|span| span.id == retried.parent).expect("the same");
    assert_eq!((&*request.name, request.outcome()), ("request", "done"));
    let legs: Vec<_> = spans.iter().filter(|span| span.parent == request.id).collect();
    let decodes: Vec<_> = legs.iter().filter(|leg| leg.name == "decode leg").collect();
    let [first, second] = decodes[..] else { panic!("{legs:#?}") };
    assert_eq!((first.outcome(), first.attribute("error.type")), ("failed", "connection"));
    assert_eq!(first.error.as_deref(), Some("connection failed"));
    assert_eq!((second.outcome(), &second.error), ("done", &None));
    assert_ne!(first.attribute("server.port"), second.attribute("server.port"));
    let transfers = [first, second].map(|leg| leg.attribute("kvferry.transfer_id"));
    assert_ne!(transfers[0], transfers[1]);
}

#[test]
fn a_request_that_fails_says_why() {
    let collector = StubCollector::start(CollectorActs::Takes);
    let options = sending(&collector);
    let fleet = TestCluster::new(&["--queue-timeout", "0.001", options[0], options[1]]);
    let body = json!({"model": "m", "prompt": prompt(1), "max_tokens": 1});
    let (status, answer) = fleet.router.post("/v1/completions", "r", &body);
    assert_eq!(status, 503, "{answer}");
    let spans = collector.spans(1);
    let request = one(&spans, "request", "");
    assert_eq!((request.outcome(), request.attribute("error.type")), ("failed", "503"));
    let why = request.error.as_deref().expect("a status");
    assert!(why.contains("no prefill and decode instance") && answer.contains(why), "{why}");
}

/// A decode whose prefill is not there.
#[test]
fn a_transfer_that_fails_says_why() {
    let collector = StubCollector::start(CollectorActs::Takes);
    let [url, at] = sending(&collector);
    let decode = ServeProcess::serve(&["--role", "decode", "--mode", "push", url, at]);
    let key = json!({"id": "tx-lost", "prompt": 0});
    let leg = json!({"key": key, "sibling": 0, "mode": "Push", "prefill": "127.0.0.1:1",
        "control": "tcp://127.0.0.1:1", "life": 1});
    let body = json!({"prompt": prompt(1), "max_tokens": 1,
        "kv_transfer_params": {"do_remote_prefill": true, "kvferry": leg}});
    let parent = "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let (status, answer) = post_with(decode.text("http"), "/v1/completions", parent, &body);
    assert_eq!(status, 500, "{answer}");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    let told = &answer["error"]["kvferry"]["failed"];
    let spans = collector.spans(1);
    let transfer = one(&spans, "transfer", "decode");
    assert_eq!(transfer.parent, "00f067aa0ba902b7");
    assert_eq!(
        (transfer.outcome(), transfer.attribute("kvferry.transfer_id")),
        ("failed", "tx-lost")
    );
    assert_eq!(transfer.attribute("error.type"), told["cause"].as_str().expect("a cause"));
    assert_eq!(transfer.error.as_deref(), told["why"].as_str());
}
