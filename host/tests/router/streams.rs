//! B5, B9, B12: streams.

use crate::backend::{Act, StubInstance};
use crate::rig::{PATIENCE, TestRouter, pair, streaming};
use http_body_util::BodyExt;
use kvferry_engine::core::message::{Mode, Role};
use serde_json::json;
use std::sync::{Arc, Mutex};
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;

pub(crate) fn feed() -> (mpsc::UnboundedSender<String>, Act) {
    let (sender, receiver) = mpsc::unbounded_channel();
    (sender, Act::Fed(Arc::new(Mutex::new(Some(receiver)))))
}

pub(crate) fn event(text: &str) -> String {
    format!("data: {}\n\n", json!({"choices": [{"index": 0, "text": text}]}))
}

#[tokio::test]
async fn a_stream_is_neither_held_back_nor_changed() {
    let (router, p, d) = pair(Mode::Push, &[]).await;
    let (go, (tokens, fed)) = (Arc::new(Notify::new()), feed());
    p.always(Act::After(go.clone(), Box::new(Act::Json(200, json!({"id": "x"})))));
    d.always(fed);
    let request = router.request("/v1/completions", streaming().to_string());
    tokens.send(event("a")).unwrap();
    let mut answer = router.call(request).await;
    assert_eq!(answer.headers()["content-type"], "text/event-stream");
    // The prefill has not answered, and the next token has not been made.
    for text in ["a", "b", "c"] {
        if text != "a" {
            tokens.send(event(text)).unwrap();
        }
        let frame = timeout(PATIENCE, answer.body_mut().frame()).await.unwrap().unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), event(text));
    }
    go.notify_one();
    drop(tokens);
    assert!(timeout(PATIENCE, answer.body_mut().frame()).await.unwrap().is_none());
    let done = "kvferry_router_legs_total{role=\"decode\",outcome=\"done\"}";
    router.metric_reaches(done, 1).await;
}

/// An incomplete last event is passed on if events are not parsed, and dropped otherwise.
#[tokio::test]
async fn a_stream_that_breaks_inside_an_event_ends_with_one_that_can_be_read() {
    let (moriio, _p, d) = pair(Mode::Push, &[]).await;
    let (p, fixed) =
        (StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await);
    let by_name = TestRouter::start(&["--prefill", &p.http, "--decode", &fixed.http]);
    by_name.ready(2).await;
    for (router, d, passed) in [(&moriio, &d, &[][..]), (&by_name, &fixed, &["data: {\"choi"][..])]
    {
        d.always(Act::Broken(vec![event("a"), "data: {\"choi".into()]));
        let answer = router.post("/v1/completions", &streaming()).await;
        let events: Vec<_> = answer.body.split("\n\n").filter(|it| !it.is_empty()).collect();
        let (first, rest) = events.split_first().unwrap();
        let (rest, end) = rest.split_at(passed.len());
        assert_eq!((*first, rest), (event("a").trim_end(), passed));
        let error: serde_json::Value = serde_json::from_str(&end[0]["data: ".len()..]).unwrap();
        assert_eq!(error["error"]["code"], 502);
        assert_eq!(end[1..], ["data: [DONE]"]);
    }
}

#[tokio::test]
async fn a_silent_stream_is_given_up() {
    let (router, p, d) = pair(Mode::Push, &["--idle-timeout", "10"]).await;
    let (tokens, fed) = feed();
    d.always(fed);
    // An answer of the prefill would have the same limit.
    p.always(Act::Never);
    tokens.send(event("a")).unwrap();
    let answer = router.post("/v1/completions", &streaming()).await;
    let events = answer.events();
    assert_eq!(events.len(), 3);
    assert!(events[1]["error"]["message"].as_str().unwrap().contains("silent for"), "{events:?}");
}

#[tokio::test]
async fn before_the_first_token_a_stream_is_tried_again() {
    let (router, _p, d) = pair(Mode::Push, &[]).await;
    let tries = std::sync::atomic::AtomicUsize::new(0);
    d.on(move |_| match tries.fetch_add(1, std::sync::atomic::Ordering::SeqCst) {
        0 => Some(Act::Broken(Vec::new())),
        _ => None,
    });
    let answer = router.post("/v1/completions", &streaming()).await;
    assert_eq!(answer.events().len(), 4, "{answer:?}");
    assert_eq!(d.seen().len(), 2);
}

/// vLLM has begun the stream when it learns that it cannot serve: the error is its first event.
#[tokio::test]
async fn a_stream_that_begins_with_an_error_is_tried_again() {
    let (router, _p, d) = pair(Mode::Push, &[]).await;
    let tries = std::sync::atomic::AtomicUsize::new(0);
    let error = json!({"error": {"message": "m", "type": "t", "code": 500}});
    let error = format!("data: {error}\n\n");
    d.on(move |_| match tries.fetch_add(1, std::sync::atomic::Ordering::SeqCst) {
        0 => Some(Act::Stream(vec![error.clone(), "data: [DONE]\n\n".into()])),
        _ => None,
    });
    let answer = router.post("/v1/completions", &streaming()).await;
    assert_eq!((answer.status, answer.events().len()), (200, 4), "{answer:?}");
    assert_eq!(d.seen().len(), 2);
}

#[tokio::test]
async fn a_stream_that_begins_with_an_error_each_time_is_an_answer_with_it() {
    let (router, _p, d) = pair(Mode::Push, &["--retries", "1"]).await;
    let error = json!({"error": {"message": "no KV", "type": "t", "code": 500}});
    d.always(Act::Stream(vec![format!("data: {error}\n\n"), "data: [DONE]\n\n".into()]));
    let answer = router.post("/v1/completions", &streaming()).await;
    assert_eq!((answer.status, answer.error().as_str()), (500, "no KV"));
    assert_eq!(d.seen().len(), 2);
}

/// Both modes: the value of the prefill replaces that of a decode for which all is cached.
#[tokio::test]
async fn usage_tells_what_the_prefill_had_cached() {
    let usage = |cached: u64| {
        json!({"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": cached}})
    };
    let (router, p, d) = pair(Mode::Pull, &[]).await;
    let params = json!({"remote_block_ids": [[1]]});
    p.always(Act::Json(200, json!({"usage": usage(4), "kv_transfer_params": params})));
    d.always(Act::Json(200, json!({"choices": [], "usage": usage(9)})));
    let answer = router.ask().await.json();
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 4);
    let chunk = |value: serde_json::Value| format!("data: {value}\n\n");
    d.always(Act::Stream(vec![
        event("a"),
        chunk(json!({"choices": [], "usage": usage(9)})),
        "data: [DONE]\n\n".into(),
    ]));
    let events = router.post("/v1/completions", &streaming()).await.events();
    assert_eq!(events[1]["usage"]["prompt_tokens_details"]["cached_tokens"], 4);
    assert_eq!(events.len(), 3);
    let _: &TestRouter = &router;
}
