//! B7, B11 and what is made of the requests themselves.

use crate::rig::{TestRouter, completion, fleet, pair};
use hyper::Request;
use kvferry_engine::core::message::Mode;
use serde_json::json;
use std::collections::BTreeSet;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

// B7: pairs are not locked in step, and nobody is asked beside.

#[tokio::test]
async fn all_pairs_are_used_without_side_calls() {
    let (router, ps, ds) = fleet(Mode::Push, 2, 2, &[]).await;
    for _ in 0..8 {
        assert_eq!(router.ask().await.status, 200);
    }
    let mut pairs = BTreeSet::new();
    for (nth, p) in ps.iter().enumerate() {
        for leg in p.seen() {
            assert_eq!(leg.path, "/v1/completions");
            let id = leg.header("x-request-id").to_owned();
            let met =
                ds.iter().position(|d| d.seen().iter().any(|it| it.header("x-request-id") == id));
            pairs.insert((nth, met.unwrap()));
        }
    }
    assert_eq!(pairs.len(), 4, "{pairs:?}");
    let legs: usize = ps.iter().chain(&ds).map(|it| it.seen().len()).sum();
    assert_eq!(legs, 16);
}

// B11: authorization.

#[tokio::test]
async fn the_clients_key_is_passed_on_and_goes_nowhere_else() {
    let (router, p, d) = pair(Mode::Push, &[]).await;
    let mut request = router.request("/v1/completions", completion().to_string());
    request.headers_mut().insert("authorization", "Bearer mine".parse().unwrap());
    assert_eq!(TestRouter::read(router.call(request).await).await.status, 200);
    assert_eq!(router.ask().await.status, 200);
    for backend in [&p, &d] {
        let legs = backend.seen();
        assert_eq!(legs[0].header("authorization"), "Bearer mine");
        assert!(!legs[1].headers.contains_key("authorization"));
        let health = backend.health.lock().unwrap();
        assert!(!health.1.is_empty() && health.1.iter().all(Option::is_none));
    }
}

#[tokio::test]
async fn a_key_of_the_router_replaces_the_clients() {
    let mut router = TestRouter::start_with(&[], |command| {
        command.env("OPENAI_API_KEY", "ours");
    });
    use crate::backend::{HeartbeatFields, StubInstance};
    use kvferry_engine::core::message::Role;
    let (p, d) =
        (StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await);
    router.register(&p, &HeartbeatFields::of(Mode::Push));
    router.register(&d, &HeartbeatFields::of(Mode::Push));
    d.waits_for([&p]);
    router.ready(2).await;
    let mut request = router.request("/v1/completions", completion().to_string());
    request.headers_mut().insert("authorization", "Bearer mine".parse().unwrap());
    assert_eq!(TestRouter::read(router.call(request).await).await.status, 200);
    for backend in [&p, &d] {
        assert_eq!(backend.seen()[0].header("authorization"), "Bearer ours");
        assert!(backend.health.lock().unwrap().1.iter().all(Option::is_none));
    }
}

#[tokio::test]
async fn wrong_requests_get_error_objects_and_go_nowhere() {
    let (router, p, _d) = pair(Mode::Push, &["--body-max", "2000"]).await;
    let long = json!({"prompt": "x".repeat(2000)}).to_string();
    for (path, body, status) in [
        ("/v1/completions", "{", 400),
        ("/v1/completions", "[]", 400),
        ("/v1/completions", "", 400),
        ("/v1/completions", "{\"prompt\": \"a\"} x", 400),
        ("/v1/completions", "{}", 400),
        ("/v1/completions", "{\"prompt\": []}", 400),
        ("/v1/completions", "{\"prompt\": \"a\", \"stream\": \"maybe\"}", 400),
        ("/v1/chat/completions", "{\"prompt\": \"a\"}", 400),
        ("/v1/completions", &long, 413),
        ("/v1/fine_tuning/jobs", "{}", 404),
    ] {
        let answer =
            TestRouter::read(router.call(router.request(path, body.to_owned())).await).await;
        assert_eq!(answer.status, status, "{path} {body}: {answer:?}");
        assert!(!answer.error().is_empty());
    }
    let mut request = router.request("/v1/completions", completion().to_string());
    request.headers_mut().insert("content-type", "text/plain".parse().unwrap());
    assert_eq!(TestRouter::read(router.call(request).await).await.status, 415);
    let answer = router.get("/v1/completions").await;
    assert_eq!((answer.status, answer.error().is_empty()), (405, false));
    let uri = format!("http://{}/workers", router.admin);
    let mut request: Request<http_body_util::Full<bytes::Bytes>> =
        Request::post(uri).body("{}".into()).unwrap();
    request.headers_mut().insert("content-type", "application/json".parse().unwrap());
    assert_eq!(TestRouter::read(router.call(request).await).await.status, 405);
    assert!(p.seen().is_empty());
}

/// What the router does not know survives byte by byte.
#[tokio::test]
async fn bodies_survive() {
    let (router, p, d) = pair(Mode::Push, &[]).await;
    let body = r#"{"prompt": "\u00e4\ud83d\ude00", "x": {"deep": [1.50, 1e300, {"y": null}]}, "max_tokens": 3, "big": 123456789012345678901234567890}"#;
    let answer = TestRouter::read(router.call(router.request("/v1/completions", body)).await).await;
    assert_eq!(answer.status, 200);
    for leg in [&p.seen()[0], &d.seen()[0]] {
        assert_eq!(leg.body["prompt"], "ä😀");
        assert_eq!(leg.body["x"]["deep"][1], 1e300);
    }
}

#[tokio::test]
async fn headers_are_bounded() {
    let router = TestRouter::start(&[]);
    let mut stream = TcpStream::connect(&router.http).await.unwrap();
    let head =
        format!("GET /health HTTP/1.1\r\nHost: localhost\r\nLong: {}\r\n\r\n", "x".repeat(200_000));
    // The router may answer before it has read all.
    let _ = stream.write_all(head.as_bytes()).await;
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 431");
    assert_eq!(router.get("/health").await.status, 200);
}
