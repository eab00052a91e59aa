//! What the router refuses where too much is asked or fails, and prompts that need no prefill.

use crate::backend::Act;
use crate::rig::{PATIENCE, completion, pair, streaming};
use kvferry_engine::core::message::Mode;
use serde_json::json;
use tokio::time::timeout;

#[tokio::test]
async fn requests_above_the_limit_are_shed_with_429() {
    let (router, p, d) = pair(Mode::Push, &["--open-max", "1"]).await;
    d.always(Act::Never);
    let held = router.ask();
    let shed = async {
        p.arrival(1).await;
        d.arrival(1).await;
        for body in [completion(), streaming()] {
            let answer = router.post("/v1/completions", &body).await;
            assert_eq!((answer.status, answer.header("retry-after")), (429, "1"));
            assert!(answer.error().contains("--open-max"), "{answer:?}");
            assert_eq!(answer.json()["error"]["type"], "RateLimitError");
        }
        assert_eq!(router.metric("kvferry_router_shed_total").await, 2);
    };
    tokio::select! {
        answer = held => panic!("{answer:?}"),
        () = shed => {}
    }
    // Who held the place has gone.
    d.on(|_| None);
    let served = async { while router.ask().await.status != 200 {} };
    timeout(PATIENCE, served).await.expect("there is room again");
}

#[tokio::test]
async fn retries_beyond_the_budget_are_not_made() {
    let none = ["--retry-budget", "0", "--retries-per-second", "0"];
    let (router, _p, d) = pair(Mode::Push, &none).await;
    d.always(Act::Cut);
    let answer = router.ask().await;
    assert_eq!((answer.status, d.seen().len()), (502, 1), "{answer:?}");
    assert_eq!(router.metric("kvferry_router_retries_total").await, 0);
    assert_eq!(router.metric("kvferry_router_retries_refused_total").await, 1);
}

#[tokio::test]
async fn a_short_prompt_goes_to_a_decode_alone() {
    for mode in [Mode::Push, Mode::Pull] {
        let (router, p, d) = pair(mode, &["--direct-below", "50"]).await;
        for (nth, body) in [completion(), streaming()].iter().enumerate() {
            let answer = router.post("/v1/completions", body).await;
            assert_eq!(answer.status, 200, "{answer:?}");
            let leg = d.seen().pop().expect("a leg");
            assert!(leg.body.get("kv_transfer_params").is_none(), "{leg:?}");
            let id = format!("{}-", answer.header("x-request-id"));
            assert!(leg.header("x-request-id").starts_with(&id), "{leg:?}");
            assert_eq!((p.seen().len(), d.seen().len()), (0, nth + 1));
        }
        assert_eq!(router.metric("kvferry_router_direct_prompts_total").await, 2);
        let long = json!({"model": "m", "prompt": "hello ".repeat(100), "max_tokens": 5});
        assert_eq!(router.post("/v1/completions", &long).await.status, 200);
        assert_eq!((p.seen().len(), d.seen().len()), (1, 3));
        assert!(d.seen()[2].body.get("kv_transfer_params").is_some());
    }
}
