//! Memory that the router uses for clients and instances.

use crate::backend::Act;
use crate::rig::{TestRouter, completion, pair};
use kvferry_engine::core::message::Mode;
use serde_json::json;
use std::fs;

const MIB: usize = 1 << 20;

/// Peak memory of the router, in bytes.
fn peak(router: &TestRouter) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", router.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

#[tokio::test]
async fn legs_of_one_request_share_its_body() {
    let (router, _p, d) = pair(Mode::Push, &["--parts-max", "64"]).await;
    let before = peak(&router);
    let body = json!({"model": "m", "prompt": "p".repeat(4 * MIB), "n": 64, "max_tokens": 1});
    let answer = router.post("/v1/completions", &body).await;
    assert_eq!((answer.status, d.seen().len()), (200, 64));
    // Each of 128 legs has the whole prompt.
    let grown = peak(&router) - before;
    assert!(grown < 128 * MIB, "{} MiB", grown / MIB);
}

#[tokio::test]
async fn answers_in_memory_are_bounded_for_one_address() {
    let memory = (16 * MIB).to_string();
    let (router, _p, d) =
        pair(Mode::Push, &["--body-max", "1048576", "--memory-max", &memory]).await;
    let answer = |length: usize| {
        Act::Text(200, format!("{{\"choices\":[],\"x\":\"{}\"}}", "x".repeat(length)).leak())
    };
    for (length, n, status) in [(9 * MIB, 1, 413), (5 * MIB, 4, 429)] {
        d.always(answer(length));
        let before = d.seen().len();
        let body = json!({"model": "m", "prompt": "p", "n": n});
        let refused = router.post("/v1/completions", &body).await;
        assert_eq!(refused.status, status, "{refused:?}");
        assert!(refused.error().contains("--memory-max"), "{refused:?}");
        assert!(d.seen().len() - before <= n, "a request that is too large is not sent again");
    }
    // The memory is freed, and no instance was blamed.
    d.always(answer(5 * MIB));
    for _ in 0..3 {
        let served = router.post("/v1/completions", &completion()).await;
        assert_eq!(served.status, 200, "{:.200}", served.body);
    }
    let refused = router.metric("kvferry_router_memory_refused_total").await;
    assert!(refused >= 2, "{refused}");
}

#[tokio::test]
async fn unfinished_events_of_streams_are_bounded_for_one_address() {
    let (router, _p, d) =
        pair(Mode::Push, &["--body-max", "1048576", "--memory-max", "8388608"]).await;
    let endless = format!("data: {{\"x\":\"{}", "x".repeat(MIB));
    let first = "data: {\"choices\":[]}\n\n".to_owned();
    d.always(Act::Stream(vec![first, endless]));
    let body = json!({"model": "m", "prompt": "p", "n": 8, "stream": true});
    let answer = router.post("/v1/completions", &body).await;
    assert!(answer.body.contains("--memory-max"), "{:.300}", answer.body);
}
