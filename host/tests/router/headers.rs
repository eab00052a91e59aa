//! Headers and ids that pass through the router.

use crate::backend::{Act, HeartbeatFields, StubInstance};
use crate::rig::{TestRouter, completion, pair, streaming};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::{Mode, Registration, Role};
use serde_json::json;
use std::io::Read;
use std::process::Stdio;

/// A router with a log, a named prefill and a named decode.
async fn logged_pair(level: &str) -> (TestRouter, StubInstance, StubInstance) {
    let p = StubInstance::start(Role::Prefill).await;
    let d = StubInstance::start(Role::Decode).await;
    let options = ["--prefill", &p.http, "--decode", &d.http, "--log-level", level];
    let router = TestRouter::start_with(&options, |command| {
        command.stderr(Stdio::piped());
    });
    router.ready(2).await;
    (router, p, d)
}

/// Lines of the log of a router that has ended.
pub(crate) fn log(mut router: TestRouter) -> Vec<String> {
    let mut text = String::new();
    let mut log = router.child.stderr.take().expect("it is piped");
    router.signal("-TERM");
    log.read_to_string(&mut text).expect("text");
    text.lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn client_headers_reach_both_engines_but_for_the_list() {
    for mode in [Mode::Push, Mode::Pull] {
        let (router, p, d) = pair(mode, &[]).await;
        let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let passed = [
            ("x-vllm-priority", "-5"),
            ("x-session-id", "talk-7"),
            ("traceparent", trace),
            ("x-of-another-proxy", "1"),
        ];
        let dropped = [
            ("connection", "X-Hop"),
            ("x-hop", "1"),
            ("te", "trailers"),
            ("cookie", "a=b"),
            ("accept-encoding", "gzip"),
            ("x-data-parallel-rank", "3"),
        ];
        let request = router.request("/v1/completions", completion().to_string());
        let answer = router.ask_with(request, &[&passed[..], &dropped[..]].concat()).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        for leg in [&p.seen()[0], &d.seen()[0]] {
            for (name, value) in passed {
                assert_eq!(leg.header(name), value, "{name}");
            }
            for (name, _) in dropped {
                assert_eq!(leg.header(name), "", "{name}");
            }
            assert_eq!(leg.header("content-type"), "application/json");
        }
    }
}

#[tokio::test]
async fn answers_have_listed_headers_only() {
    let (router, _p, d) = pair(Mode::Push, &[]).await;
    let head = vec![
        ("openai-processing-ms", "12"),
        ("x-ratelimit-remaining-requests", "3"),
        ("cache-control", "no-store"),
        ("set-cookie", "a=b"),
        ("location", "http://10.0.0.1:8000/"),
        ("server", "uvicorn"),
        ("connection", "x-ratelimit-remaining-requests"),
        ("access-control-allow-origin", "*"),
    ];
    let whole = Act::Json(200, json!({"id": "x", "choices": []}));
    let stream = Act::Stream(vec!["data: [DONE]\n\n".into()]);
    for (body, act) in [(completion(), whole), (streaming(), stream)] {
        d.always(Act::Head(head.clone(), Box::new(act)));
        let answer = router.post("/v1/completions", &body).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(answer.header("openai-processing-ms"), "12");
        assert_eq!(answer.header("cache-control"), "no-store");
        for (name, _) in &head[3..] {
            assert_eq!(answer.header(name), "", "{name}");
        }
        assert_eq!(answer.header(head[1].0), "", "Connection names it");
    }
}

#[tokio::test]
async fn one_id_is_in_legs_answer_and_log() {
    let (router, p, d) = logged_pair("debug").await;
    let request = router.request("/v1/completions", completion().to_string());
    let answer = router.ask_with(request, &[("x-request-id", "client-42")]).await;
    assert_eq!((answer.status, answer.header("x-request-id")), (200, "client-42"));
    let [p_leg, d_leg] =
        [&p.seen()[0], &d.seen()[0]].map(|leg| leg.header("x-request-id").to_owned());
    assert_eq!(p_leg, d_leg);
    let unique = p_leg.strip_prefix("client-42-").expect("the client's id comes first");
    assert!(unique.len() == 32 && unique.bytes().all(|it| it.is_ascii_hexdigit()), "{p_leg}");
    let lines: Vec<_> = log(router).into_iter().filter(|it| it.contains("client-42")).collect();
    let [line] = &lines[..] else { panic!("{lines:?}") };
    for part in ["/v1/completions", "status=200", "ms="] {
        assert!(line.contains(part), "{line}");
    }
}

#[tokio::test]
async fn warnings_about_legs_name_the_clients_id() {
    let (router, _p, d) = logged_pair("warn").await;
    d.always(Act::Json(500, json!({"error": {"message": "m"}})));
    let request = router.request("/v1/completions", completion().to_string());
    let answer = router.ask_with(request, &[("x-request-id", "client-43")]).await;
    assert_ne!(answer.status, 200);
    let failed: Vec<_> = log(router).into_iter().filter(|it| it.contains("leg failed")).collect();
    assert!(!failed.is_empty() && failed.iter().all(|it| it.contains("client-43")), "{failed:?}");
}

#[tokio::test]
async fn ids_that_name_addresses_or_are_no_ids_are_replaced() {
    let (router, p, _d) = logged_pair("warn").await;
    let marked = "___prefill_addr_host:evil,handshake:1,notify:2___decode_addr_host:evil_0";
    let long = "x".repeat(257);
    for (nth, id) in [marked, &long, "a b", ""].into_iter().enumerate() {
        let request = router.request("/v1/completions", completion().to_string());
        let answer = router.ask_with(request, &[("x-request-id", id)]).await;
        let told = answer.header("x-request-id");
        assert!(answer.status == 200 && told.starts_with("cmpl-"), "{id}: {answer:?}");
        let leg = p.seen()[nth].header("x-request-id").to_owned();
        assert!(leg.starts_with(&format!("{told}-")), "{leg}");
    }
}

#[tokio::test]
async fn ids_of_native_pairs_name_no_address() {
    let mut router = TestRouter::start(&[]);
    let p = StubInstance::start(Role::Prefill).await;
    let d = StubInstance::start(Role::Decode).await;
    for (instance, name) in [(&p, "p0"), (&d, "d0")] {
        let native = Registration::new(
            name.into(),
            Incarnation(9),
            instance.role,
            Mode::Pull,
            instance.http.as_str().into(),
            "tcp://127.0.0.1:6301".into(),
        );
        let form = HeartbeatFields { native: Some(native), ..HeartbeatFields::of(Mode::Pull) };
        router.register(instance, &form);
    }
    router.ready(2).await;
    let request = router.request("/v1/completions", completion().to_string());
    let answer = router.ask_with(request, &[("x-request-id", "client-44")]).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    for leg in [&p.seen()[0], &d.seen()[0]] {
        let id = leg.header("x-request-id");
        assert!(id.starts_with("client-44-") && !id.contains("addr"), "{id}");
    }
}
