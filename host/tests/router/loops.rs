//! A router that is named as its own instance.

use crate::backend::{HeartbeatFields, StubInstance, frame};
use crate::rig::{PATIENCE, TestRouter, completion, pair};
use http_body_util::Full;
use hyper::Request;
use kvferry_engine::core::message::{Mode, Role};
use serde_json::Value;
use std::time::Instant;

/// Waits until the router lists an address as its own.
async fn until_rejected(router: &TestRouter, http: &str) {
    let start = Instant::now();
    loop {
        let told = router.get("/registrations/rejected").await.json();
        let is_own = |it: &Value| it["from"] == http && it["reason"] == "own address";
        if told["last"].as_array().expect("a list").iter().any(is_own) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{told}");
    }
}

#[tokio::test]
async fn a_router_named_as_its_own_instance_is_rejected() {
    let d = StubInstance::start(Role::Decode).await;
    let name = format!("kvferry-loops-{}.json", std::process::id());
    let file = std::env::temp_dir().join(name);
    std::fs::write(&file, "{}").unwrap();
    let router = TestRouter::start(&["--static-instances", file.to_str().unwrap()]);
    // Its port is known now.
    let both =
        serde_json::json!({"prefill": [format!("http://{}", router.http)], "decode": [d.http]});
    std::fs::write(&file, both.to_string()).unwrap();
    until_rejected(&router, &router.http).await;
    router.ready(1).await;
    let workers = router.workers().await;
    let own = workers.iter().find(|it| it["http"] == *router.http).expect("it is listed");
    assert_eq!(own["state"], "unproven");
    assert!(own["unreachable"].as_str().expect("a text").contains("this router itself"), "{own}");
    assert_eq!(router.get("/readiness").await.status, 503);
    assert_eq!(router.ask().await.status, 503);
    std::fs::remove_file(file).unwrap();
}

#[tokio::test]
async fn a_router_registered_as_its_own_instance_is_rejected() {
    let mut router = TestRouter::start(&[]);
    let d = StubInstance::start(Role::Decode).await;
    let own = router.http.clone();
    let form = HeartbeatFields::of(Mode::Push);
    router.send(vec![vec![frame(Role::Prefill, &own, &form)]]);
    router.register(&d, &form);
    router.ready(1).await;
    until_rejected(&router, &own).await;
    assert_eq!(router.get("/readiness").await.status, 503);
}

#[tokio::test]
async fn a_leg_that_comes_back_is_answered_508() {
    let (router, p, d) = pair(Mode::Push, &[]).await;
    assert_eq!(router.ask().await.status, 200);
    let health = router.get("/health").await;
    let nonce = health.header("x-kvferry-router");
    for leg in [&p.seen()[0], &d.seen()[0]] {
        assert_eq!((leg.header("x-kvferry-router"), nonce.len()), (nonce, 16));
    }
    for path in ["/v1/completions", "/tokenize"] {
        let request = router.request(path, completion().to_string());
        let passed = format!("1234, {nonce}");
        let answer = router.ask_with(request, &[("x-kvferry-router", &passed)]).await;
        assert_eq!(answer.status, 508, "{path}: {answer:?}");
        assert!(answer.error().contains("http_port"), "{answer:?}");
    }
    let uri = format!("http://{}/v1/models", router.http);
    let asked = Request::get(uri).body(Full::default()).unwrap();
    let answer = router.ask_with(asked, &[("x-kvferry-router", nonce)]).await;
    assert_eq!(answer.status, 508, "{answer:?}");
    // Of another router it goes on.
    let request = router.request("/v1/completions", completion().to_string());
    let answer = router.ask_with(request, &[("x-kvferry-router", "1234")]).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(p.seen()[1].header("x-kvferry-router"), format!("1234,{nonce}"));
    assert_eq!(p.seen().len(), 2);
}
