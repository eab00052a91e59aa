//! Servers that say how busy they are with the requests of others.

use crate::backend::{Act, StubInstance};
use crate::rig::{PATIENCE, TestRouter, fleet};
use kvferry_engine::core::message::Mode;
use serde_json::json;
use std::time::Instant;

fn page(running: u32, capacity: u32, usage: f64) -> String {
    format!(
        "# TYPE vllm:num_requests_running gauge\n\
         vllm:num_requests_running{{engine=\"0\",model_name=\"m\"}} {running}.0\n\
         vllm:num_requests_waiting{{engine=\"0\",model_name=\"m\"}} {capacity}.0\n\
         vllm:num_requests_waiting_by_reason{{engine=\"0\",reason=\"capacity\"}} {capacity}.0\n\
         vllm:kv_cache_usage_perc{{engine=\"0\",model_name=\"m\"}} {usage}\n"
    )
}

/// Asks until as many requests in a row as there are instances twice over are served, all by one.
async fn all_go_to(router: &TestRouter, wanted: &StubInstance) {
    let start = Instant::now();
    let mut in_a_row = 0;
    while in_a_row < 4 {
        let before = wanted.seen().len();
        assert_eq!(router.ask().await.status, 200);
        in_a_row = if wanted.seen().len() > before { in_a_row + 1 } else { 0 };
        assert!(start.elapsed() < PATIENCE, "others get requests, too");
    }
}

#[tokio::test]
async fn who_is_busy_with_requests_of_others_is_passed_over() {
    let (router, _p, d) = fleet(Mode::Push, 1, 2, &["--scrape-load", "0.3"]).await;
    // A queue, no room, and more requests than the other has.
    for (busy, free) in [
        (page(2, 3, 0.5), page(2, 0, 0.5)),
        (page(2, 0, 0.99), page(40, 0, 0.5)),
        (page(9, 0, 0.5), page(1, 0, 0.5)),
    ] {
        for (first, second) in [(0, 1), (1, 0)] {
            d[first].says(&busy);
            d[second].says(&free);
            all_go_to(&router, &d[second]).await;
        }
    }
    d[0].says(&page(3, 2, 0.25));
    router
        .until("the load is listed", |workers| {
            workers.iter().any(|it| {
                let load = &it["load"];
                it["http"] == d[0].http
                    && (&load["running"], &load["queued"], &load["busy"])
                        == (&json!(3), &json!(2), &json!(true))
                    && load["kv_cache_usage"] == 0.25
            })
        })
        .await;
    router.metric_reaches("kvferry_router_busy_instances{role=\"decode\"}", 1).await;
    router.metric_reaches("kvferry_router_load_scrapes_total{outcome=\"answered\"}", 2).await;
    // The prefill has no such page.
    router.metric_reaches("kvferry_router_load_scrapes_total{outcome=\"failed\"}", 1).await;
    assert!(router.get("/").await.body.contains("its requests and waiting"));
}

#[tokio::test]
async fn who_says_nothing_of_use_is_served_as_before() {
    let (router, p, d) = fleet(Mode::Push, 1, 2, &["--scrape-load", "0.05"]).await;
    let endless = "x".repeat(5 << 20);
    let acts =
        [Act::Never, Act::Cut, Act::Stream(vec![endless]), Act::Text(200, "\n{} 1 \u{fffd}\n")];
    for (act, failed) in acts.into_iter().zip(1..) {
        for it in p.iter().chain(&d) {
            *it.metrics.lock().unwrap() = act.clone();
        }
        let name = "kvferry_router_load_scrapes_total{outcome=\"failed\"}";
        let before = router.metric(name).await;
        router.metric_reaches(name, before + failed).await;
        assert_eq!(router.ask().await.status, 200);
    }
    d[0].says(&page(u32::MAX, u32::MAX, 1e9));
    d[1].says("vllm:num_requests_running -1\nvllm:num_requests_running 1e300\n");
    router.metric_reaches("kvferry_router_load_scrapes_total{outcome=\"answered\"}", 2).await;
    for _ in 0..4 {
        assert_eq!(router.ask().await.status, 200);
    }
}

#[tokio::test]
async fn nobody_is_asked_unless_the_operator_wants_it() {
    let (router, _p, d) = fleet(Mode::Push, 1, 2, &[]).await;
    d[0].says(&page(9, 9, 1.0));
    for _ in 0..4 {
        assert_eq!(router.ask().await.status, 200);
    }
    assert_eq!(d[0].seen().len(), 2);
    assert!(router.workers().await.iter().all(|it| it["load"].is_null()));
}
