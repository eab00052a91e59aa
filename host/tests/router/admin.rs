//! B10: what the router tells about itself.

use crate::backend::{Act, HeartbeatFields, StubInstance};
use crate::rig::{PATIENCE, TestRouter, pair};
use kvferry_engine::core::message::{Mode, Role};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::sync::Notify;

#[tokio::test]
async fn readiness_comes_from_the_registry() {
    let mut router = TestRouter::start(&[]);
    assert_eq!(router.get("/health").await.status, 200);
    assert_eq!(router.get("/liveness").await.status, 200);
    let (p, d) =
        (StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await);
    router.register(&p, &HeartbeatFields::of(Mode::Push));
    router.ready(1).await;
    let answer = router.get("/readiness").await;
    assert_eq!((answer.status, &answer.json()["prefill"]), (503, &json!(1)));
    // Of the other mode: no pair.
    let other = StubInstance::start(Role::Decode).await;
    router.register(&other, &HeartbeatFields::of(Mode::Pull));
    router.ready(2).await;
    assert_eq!(router.get("/readiness").await.status, 503);
    router.register(&d, &HeartbeatFields::of(Mode::Push));
    router.ready(3).await;
    assert_eq!(router.get("/readiness").await.status, 200);
}

#[tokio::test]
async fn readiness_ends_with_the_registration_connection_of_the_only_decode() {
    let (mut router, _p, _d) = pair(Mode::Push, &[]).await;
    assert_eq!(router.metric("kvferry_router_ready").await, 1);
    // The decode registered last; its registration does not expire here.
    router.hush();
    let state_of = |workers: &[Value], role: &str| {
        workers.iter().find(|it| it["role"] == role).map(|it| it["state"].clone())
    };
    let is_cut = |workers: &[Value]| state_of(workers, "decode") == Some(json!("disconnected"));
    router.until("disconnected", is_cut).await;
    let answer = router.get("/readiness").await;
    let told = answer.json();
    assert_eq!((answer.status, &told["status"]), (503, &json!("no pair")));
    assert_eq!((&told["prefill"], &told["decode"]), (&json!(1), &json!(0)));
    assert_eq!(router.get_of_client("/readiness").await.status, 503);
    let workers = router.workers().await;
    let serves =
        |role: &str| workers.iter().filter(|it| it["role"] == role && it["serves"] == true).count();
    assert_eq!((serves("prefill"), serves("decode")), (1, 0));
    assert_eq!(router.metric("kvferry_router_ready").await, 0);
    let instances = "kvferry_router_instances{role=\"decode\",state=";
    assert_eq!(router.metric(&format!("{instances}\"disconnected\"}}")).await, 1);
    assert_eq!(router.metric(&format!("{instances}\"ready\"}}")).await, 0);
}

#[tokio::test]
async fn models_come_from_an_instance() {
    let (router, _p, mut d) = pair(Mode::Push, &[]).await;
    let answer = router.get("/v1/models").await.json();
    assert_eq!(answer["data"][0]["id"], "fake-model");
    // If one does not answer, another is asked.
    d.die();
    assert_eq!(router.get("/v1/models").await.status, 200);
    let nobody = TestRouter::start(&[]);
    let answer = nobody.get("/v1/models").await;
    assert_eq!(answer.status, 503);
    assert!(answer.error().contains("no instance is ready"));
}

#[tokio::test]
async fn workers_are_listed_with_what_they_do() {
    let mut router = TestRouter::start(&[]);
    let (p, d) =
        (StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await);
    router.register(&p, &HeartbeatFields { dp: 2, tp: 4, ..HeartbeatFields::of(Mode::Push) });
    router.register(&d, &HeartbeatFields { tp: 2, ..HeartbeatFields::of(Mode::Push) });
    router.ready(3).await;
    p.always(Act::Never);
    d.always(Act::Never);
    let asked = router.ask();
    let look = async {
        p.arrival(1).await;
        d.arrival(1).await;
        router.workers().await
    };
    let workers = tokio::select! {
        answer = asked => panic!("{answer:?}"),
        workers = look => workers,
    };
    let of =
        |role: &str| -> Vec<&Value> { workers.iter().filter(|it| it["role"] == role).collect() };
    let (prefills, decodes) = (of("prefill"), of("decode"));
    assert_eq!((prefills.len(), decodes.len()), (2, 1));
    let legs: u64 = prefills.iter().map(|it| it["in_flight_legs"].as_u64().unwrap()).sum();
    assert_eq!((legs, decodes[0]["in_flight_legs"].as_u64()), (1, Some(1)));
    let decode = decodes[0];
    assert_eq!(decode["http"], d.http);
    assert_eq!(decode["zmq"], "host:127.0.0.1,handshake:7301,notify:62005");
    assert_eq!((&decode["transfer_mode"], &decode["state"]), (&json!("push"), &json!("ready")));
    assert_eq!(
        (&prefills[1]["dp_rank"], &prefills[1]["dp_size"], &prefills[1]["tp_size"]),
        (&json!(1), &json!(2), &json!(4))
    );
    assert!(decode["age_seconds"].as_f64().unwrap() < PATIENCE.as_secs_f64());
    assert_eq!(router.get("/list_workers").await.status, 200);
}

#[tokio::test]
async fn metrics_count() {
    let (router, _p, d) = pair(Mode::Push, &[]).await;
    let prefilled = "kvferry_router_legs_total{role=\"prefill\",outcome=\"done\"}";
    for nth in 1..=3 {
        // A prefill that answers after the decode is no longer asked.
        let go = Arc::new(Notify::new());
        d.always(Act::After(go.clone(), Box::new(Act::Json(200, json!({"id": "x"})))));
        let prefill_first = async {
            router.metric_reaches(prefilled, nth).await;
            go.notify_one();
        };
        tokio::join!(router.ask(), prefill_first);
    }
    let counts = [
        ("kvferry_router_requests_total{path=\"/v1/completions\",code=\"200\"}", 3),
        (prefilled, 3),
        ("kvferry_router_legs_total{role=\"decode\",outcome=\"done\"}", 3),
        ("kvferry_router_instances{role=\"prefill\",state=\"ready\"}", 1),
        ("kvferry_router_in_flight", 0),
    ];
    for (name, count) in counts {
        assert_eq!(router.metric(name).await, count, "{name}");
    }
    let page = router.get("/metrics").await;
    assert!(page.body.ends_with("# EOF\n"));
}

#[tokio::test]
async fn the_status_page_asks_for_what_the_router_tells() {
    let (router, _p, _d) = pair(Mode::Push, &[]).await;
    let page = router.get("/").await;
    assert_eq!((page.status, page.header("content-type")), (200, "text/html; charset=utf-8"));
    assert!(
        page.header("content-security-policy")
            .starts_with("default-src 'none'; connect-src 'self'")
    );
    assert!(!page.body.contains("://"), "it needs nothing from elsewhere");
    // What instances say of themselves is not to be read as HTML.
    assert!(!page.body.contains("innerHTML"));
    let asked =
        page.body.split_once("Promise.all([").and_then(|(_, rest)| rest.split_once("].map"));
    let asked: Vec<_> =
        asked.expect("it asks").0.split(", ").map(|it| it.trim_matches('"')).collect();
    assert_eq!(asked, ["readiness", "workers", "registrations/rejected", "metrics"]);
    for path in asked {
        assert_eq!(router.get(&format!("/{path}")).await.status, 200, "{path}");
    }
    // Clients have no such page.
    assert_eq!(router.get_of_client("/").await.status, 404);
}
