//! B1 to B4: who gets traffic, and what is made of odd messages.

use crate::backend::{HeartbeatFields, StubInstance, frame};
use crate::rig::{PATIENCE, TestRouter, pair};
use kvferry_engine::core::message::{Mode, Role};
use serde_json::Value;
use std::net::TcpListener;
use std::process::Command;
use std::time::Instant;

// B1: expiry, probes, suspicion.

#[tokio::test]
async fn an_instance_that_is_silent_is_dropped() {
    let (mut router, _p, _d) = pair(Mode::Push, &["--expiry", "2"]).await;
    router.hush();
    // The prefill's heart beats, but not always in time where the machine is busy.
    let only_the_prefill = |all: &[Value]| all.len() == 1 && all[0]["role"] == "prefill";
    router.until("the decode expires", only_the_prefill).await;
    assert!(router.metric("kvferry_router_expired_total").await >= 1);
    assert_eq!(router.ask().await.status, 503);
}

#[tokio::test]
async fn an_instance_gets_traffic_only_after_a_probe() {
    let mut router = TestRouter::start(&["--queue-timeout", "0.001"]);
    let (p, d) =
        (StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await);
    p.health.lock().unwrap().0 = false;
    router.register(&p, &HeartbeatFields::of(Mode::Push));
    router.register(&d, &HeartbeatFields::of(Mode::Push));
    router.ready(1).await;
    let refused = router.ask().await;
    assert_eq!(refused.status, 503);
    assert!(refused.error().contains("/workers"), "{refused:?}");
    assert_eq!(refused.headers["retry-after"], "1");
    assert!(p.seen().is_empty() && d.seen().is_empty());
    p.health.lock().unwrap().0 = true;
    router.ready(2).await;
    assert_eq!(router.ask().await.status, 200);
}

// B2: validation, counted and listed.

/// What vllm-router takes although each request that it sends there fails.
const HARMFUL: [(&str, &str); 9] = [
    ("dp 1e6", "dp_size out of range"),
    ("tp 0", "tp_size out of range"),
    ("http scheme", "http_address that is not host:port"),
    ("http empty", "http_address that is not host:port"),
    ("http garbage", "http_address that is not host:port"),
    ("zmq empty", "zmq_address that is none"),
    ("zmq plain", "zmq_address that is none"),
    ("zmq newline", "host that is none"),
    ("zmq utf8", "host that is none"),
];

fn unhex(text: &Value) -> Vec<u8> {
    let text = text.as_str().unwrap();
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}

fn parts(case: &Value, good: &[u8]) -> Vec<Vec<u8>> {
    match (case.get("payload_hex"), case["name"].as_str().unwrap()) {
        (Some(hex), _) => vec![unhex(hex)],
        (None, "REQ style (empty delimiter)") => vec![Vec::new(), good.to_vec()],
        (None, "3 frames") => vec![good.to_vec(), b"x".to_vec(), b"y".to_vec()],
        (None, "big 1MB extra") => {
            let mut big = good.to_vec();
            big[0] += 1;
            big.extend([0xa1, b'x', 0xc6, 0, 0x10, 0, 0]);
            big.extend(vec![0; 1 << 20]);
            vec![big]
        }
        (None, name) => panic!("{name}"),
    }
}

/// One after the other, each from an instance of its own, to one router: none ends the listener.
#[tokio::test]
async fn odd_registrations_get_their_verdicts_and_end_nothing() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../engine/tests/moriio/fixtures/registrations_edge_cases.json"
    );
    let fixture: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 40);
    let good = unhex(&cases[0]["payload_hex"]);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let mut router = TestRouter::start(&[]);
        // The second message is handled after the first.
        let decode = frame(Role::Decode, "127.0.0.1:9", &HeartbeatFields::of(Mode::Push));
        router.send(vec![parts(case, &good), vec![decode]]);
        let decodes = |workers: &[Value]| workers.iter().any(|it| it["role"] == "decode");
        router.until("the decode is listed", decodes).await;
        let harmful = HARMFUL.iter().find(|(harmful, _)| *harmful == name).map(|(_, why)| *why);
        // Modes may differ (B4).
        // Longer than a link may send before a proof: its connection is cut.
        let is_cut = name == "big 1MB extra";
        let taken = (case["accepted"] == true && harmful.is_none() && !is_cut)
            || name == "mode READ(mismatch)";
        let workers = router.workers().await;
        let prefills: Vec<_> = workers.iter().filter(|it| it["role"] == "prefill").collect();
        assert_eq!(prefills.len(), usize::from(taken), "{name}: {workers:?}");
        let rejected = router.get("/registrations/rejected").await.json();
        assert_eq!(rejected["total"].as_u64() == Some(0), taken || is_cut, "{name}: {rejected}");
        if let Some(last) = rejected["last"].as_array().unwrap().last() {
            assert!(last["age_seconds"].is_f64() && last["from"].is_string(), "{last}");
            let expected = harmful.map_or("not a registration", |_| "unusable address or size");
            assert_eq!(last["reason"], expected, "{name}");
            assert!(harmful.is_none_or(|why| last["why"] == why), "{name}: {last}");
        }
    }
}

#[tokio::test]
async fn rejections_name_the_sender() {
    let mut router = TestRouter::start(&[]);
    let mut bad = frame(Role::Prefill, "10.1.2.3:8000", &HeartbeatFields::of(Mode::Push));
    let at = bad.windows(5).position(|it| it == b"host:").unwrap();
    bad[at] = b'x';
    router.send(vec![vec![bad], vec![b"?".to_vec()]]);
    let start = Instant::now();
    let rejected = loop {
        // They are sent again every second, and the first ones are listed first.
        let rejected = router.get("/registrations/rejected").await.json();
        if rejected["total"].as_u64() >= Some(2) {
            break rejected;
        }
        assert!(start.elapsed() < PATIENCE);
    };
    assert_eq!(rejected["last"][0]["from"], "10.1.2.3:8000");
    // Who does not say where it serves is named by its connection.
    let from = rejected["last"][1]["from"].as_str().unwrap();
    assert!(from.starts_with("at tcp://127.0.0.1:"), "{from}");
    let name = "kvferry_router_registrations_rejected_total{reason=\"unusable address or size\"}";
    assert!(router.metric(name).await >= 1);
}

// B3: the discovery socket.

#[test]
fn an_address_that_cannot_be_listened_at_is_fatal_and_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let _held = TcpListener::bind(&taken);
    let holder = zmq::Context::new();
    let socket = holder.socket(zmq::ROUTER).unwrap();
    socket.bind("tcp://127.0.0.1:*").unwrap();
    let held = socket.get_last_endpoint().unwrap().unwrap();
    let held = held.strip_prefix("tcp://").unwrap();
    for (option, value, says) in [
        ("--discovery", held, "Address already in use"),
        ("--listen", held, "cannot listen"),
        ("--discovery", "127.0.0.1", "give HOST:PORT"),
        ("--discovery", "127.0.0.1:99999", "give HOST:PORT"),
        ("--listen", "no.such.host.invalid:1", "give HOST:PORT"),
        ("--admin-addr", held, "cannot listen"),
    ] {
        let mut program = Command::new(env!("CARGO_BIN_EXE_kvferry"));
        program.arg("router");
        for own in ["--discovery", "--listen", "--admin-addr"] {
            program.args([own, if own == option { value } else { "127.0.0.1:0" }]);
        }
        let ended = program.output().unwrap();
        let err = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(2), "{option} {value}: {err}");
        assert!(err.contains(option) && err.contains(value) && err.contains(says), "{err}");
    }
}

#[tokio::test]
async fn the_discovery_socket_listens_at_names_and_ipv6() {
    let mut all = vec!["localhost:0", "*:0"];
    if TcpListener::bind("[::1]:0").is_ok() {
        all.push("[::1]:0");
    }
    for address in all {
        let mut router = TestRouter::start(&["--discovery", address]);
        router.discovery = router.discovery.replace("0.0.0.0", "127.0.0.1");
        let p = StubInstance::start(Role::Prefill).await;
        router.register(&p, &HeartbeatFields::of(Mode::Push));
        router.ready(1).await;
    }
}

// B4: the transfer mode is each instance's own.

#[tokio::test]
async fn modes_live_side_by_side_and_are_not_paired() {
    let mut router = TestRouter::start(&[]);
    let mut backends = Vec::new();
    for mode in [Mode::Push, Mode::Pull] {
        for role in [Role::Prefill, Role::Decode] {
            let backend = StubInstance::start(role).await;
            router.register(&backend, &HeartbeatFields::of(mode));
            if (mode, role) == (Mode::Push, Role::Decode) {
                backend.waits_for(&backends);
            }
            backends.push(backend);
        }
    }
    router.ready(4).await;
    for _ in 0..8 {
        assert_eq!(router.ask().await.status, 200);
    }
    let count = |nth: usize| backends[nth].seen().len();
    assert_eq!((count(0), count(2)), (count(1), count(3)));
    assert!(count(0) > 0 && count(2) > 0);
    for leg in backends[3].seen() {
        assert_eq!(leg.params()["remote_engine_id"], "engine-P", "a READ decode has the answer");
    }
}

#[tokio::test]
async fn a_mode_is_gone_with_its_last_instance() {
    let (mut router, _p, _d) = pair(Mode::Push, &["--expiry", "2"]).await;
    router.hush();
    router.hush();
    router.until("all expire", <[Value]>::is_empty).await;
    let (p, d) =
        (StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await);
    router.register(&p, &HeartbeatFields::of(Mode::Pull));
    router.register(&d, &HeartbeatFields::of(Mode::Pull));
    // Where the machine is busy these may expire too, until their hearts beat again.
    let start = Instant::now();
    while router.ask().await.status != 200 {
        assert!(start.elapsed() < PATIENCE, "the new mode is not served");
    }
}

// Native instances speak MoRIIO's heartbeat, too.

#[tokio::test]
async fn native_pairs_get_their_legs_in_both_forms() {
    use kvferry_engine::core::ids::Incarnation;
    use kvferry_engine::core::message::{DecodeLeg, PrefillLeg, Registration};
    for mode in [Mode::Push, Mode::Pull] {
        let mut router = TestRouter::start(&[]);
        let (p, d) =
            (StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await);
        for (backend, name) in [(&p, "p0"), (&d, "d0")] {
            let native = Registration {
                tp: 2,
                ..Registration::new(
                    name.into(),
                    Incarnation(9),
                    backend.role,
                    mode,
                    backend.http.as_str().into(),
                    "tcp://127.0.0.1:6301".into(),
                )
            };
            router.register(
                backend,
                &HeartbeatFields { native: Some(native), ..HeartbeatFields::of(mode) },
            );
        }
        if mode == Mode::Push {
            d.waits_for([&p]);
        }
        router.ready(2).await;
        assert!(router.workers().await.iter().all(|it| it["native"] == true));
        assert_eq!(router.ask().await.status, 200);
        let (p_leg, d_leg) = (&p.seen()[0], &d.seen()[0]);
        let prefill: PrefillLeg =
            serde_json::from_value(p_leg.params()["kvferry"].clone()).unwrap();
        let decode: DecodeLeg = serde_json::from_value(d_leg.params()["kvferry"].clone()).unwrap();
        assert_eq!(prefill.key, decode.key);
        assert_eq!(
            (prefill.incarnation, decode.incarnation),
            (Some(Incarnation(9)), Some(Incarnation(9)))
        );
        assert_eq!((&*decode.prefill.0, prefill.mode, decode.mode), ("p0", mode, mode));
        assert_eq!(p_leg.params()["transfer_id"], d_leg.params()["transfer_id"]);
    }
}
