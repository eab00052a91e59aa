//! S3: who gets prompts and the operator's key, and who can keep others from registering.

use crate::backend::{BackendHeartbeat, HeartbeatFields, StubInstance, frame};
use crate::rig::{PATIENCE, TestRouter};
use kvferry_engine::core::message::{Mode, Role};
use std::time::Instant;

/// Waits until a registration was turned down for this reason; why it was.
async fn turned_down(router: &TestRouter, reason: &str) -> String {
    let start = Instant::now();
    loop {
        let rejected = router.get("/registrations/rejected").await.json();
        let all = rejected["last"].as_array().unwrap();
        if let Some(found) = all.iter().find(|it| it["reason"] == reason) {
            return found["why"].as_str().unwrap().to_owned();
        }
        let workers = router.workers().await;
        assert!(workers.iter().all(|it| it["state"] != "ready"), "taken: {workers:?}");
        assert!(start.elapsed() < PATIENCE, "{rejected}");
    }
}

/// Without a list the key stays on this machine: an address that leads here, and is not loopback.
#[tokio::test]
async fn a_stranger_gets_neither_the_key_nor_a_prompt() {
    let mut router = TestRouter::start_with(&[], |command| {
        command.env("OPENAI_API_KEY", "ours");
    });
    let form = HeartbeatFields::of(Mode::Push);
    let (p, d) =
        (StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await);
    for stranger in [&p, &d] {
        let http = stranger.http.replace("127.0.0.1", "0.0.0.0");
        router.send(vec![vec![frame(stranger.role, &http, &form)]]);
    }
    let why = turned_down(&router, "not listed").await;
    assert!(why.contains("--instances"), "{why}");
    assert_eq!(router.ask().await.status, 503);
    assert!(p.seen().is_empty() && d.seen().is_empty());
}

#[tokio::test]
async fn listed_instances_are_taken_and_others_are_not() {
    let (p, d, stranger) = (
        StubInstance::start(Role::Prefill).await,
        StubInstance::start(Role::Decode).await,
        StubInstance::start(Role::Prefill).await,
    );
    let list = format!("{},{}", p.http, d.http);
    let mut router = TestRouter::start_with(&["--instances", &list], |command| {
        command.env("OPENAI_API_KEY", "ours");
    });
    let form = HeartbeatFields::of(Mode::Push);
    router.register(&stranger, &form);
    turned_down(&router, "not listed").await;
    router.register(&p, &form);
    router.register(&d, &form);
    d.waits_for([&p]);
    router.ready(2).await;
    assert_eq!(router.ask().await.status, 200);
    assert_eq!(d.seen()[0].header("authorization"), "Bearer ours");
    assert!(stranger.seen().is_empty());
}

#[tokio::test]
async fn one_address_cannot_lock_out_the_instances_of_others() {
    let mut router = TestRouter::start(&[]);
    let form = HeartbeatFields::of(Mode::Push);
    let fake = |n: u16| vec![frame(Role::Prefill, &format!("127.0.0.2:{}", 2_000 + n), &form)];
    let source = router.discovery.replacen("tcp://", "tcp://127.0.0.2:0;", 1);
    let _fakes = BackendHeartbeat::beat(&source, (0..1_200).map(fake).collect());
    let start = Instant::now();
    loop {
        // At last those that are beyond what is left.
        let rejected = router.get("/registrations/rejected").await.json();
        if rejected["total"].as_u64().unwrap() >= 100 {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "{rejected}");
    }
    let (p, d) =
        (StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await);
    router.register(&p, &form);
    router.register(&d, &form);
    router.ready(2).await;
    let rejected = router.get("/registrations/rejected").await.json();
    let last = rejected["last"].as_array().unwrap().last().unwrap();
    assert_eq!(last["reason"], "share of its address is full", "{last}");
    assert!(last["why"].as_str().unwrap().contains("127.0.0.2"), "{last}");
}
