//! Bodies and answers that the router leaves unchanged: numbers, lax types, headers of instances.

use crate::raw_instance::{PARAMS, RawInstance, decoded, json, prefilled};
use crate::rig::{TestResponse, TestRouter};
use serde_json::json;

/// A router between a prefill with cached tokens and a decode that sends this answer.
async fn between(answer: fn() -> Vec<u8>) -> (TestRouter, [RawInstance; 2]) {
    let prefill = RawInstance::start(|_| prefilled(PARAMS));
    let instances = [prefill, RawInstance::start(move |_| answer())];
    let [p, d] = [&instances[0].url, &instances[1].url];
    let router = TestRouter::start(&["--prefill", p, "--decode", d]);
    router.ready(2).await;
    (router, instances)
}

/// Numbers that do not fit a double, in unusual forms, and keys that are not sorted.
const NUMBERS: &str = r#"{"zeta":[-1.0468965599587365,0.10000000000000000555,1E-7,-0.0],"alpha":123456789012345678901234567890}"#;

#[tokio::test]
async fn numbers_of_an_answer_reach_the_client_unchanged() {
    let (router, _instances) = between(|| {
        let usage = r#"{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6,"prompt_tokens_details":{"cached_tokens":5}}"#;
        let choice = format!(r#"{{"index":0,"text":"x","logprobs":{NUMBERS}}}"#);
        json("", &format!(r#"{{"id":"x","choices":[{choice}],"usage":{usage}}}"#))
    })
    .await;
    for samples in [1, 2] {
        let body = json!({"model": "m", "prompt": "a", "n": samples});
        let answer = router.post("/v1/completions", &body).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(answer.body.matches(NUMBERS).count(), samples, "{}", answer.body);
    }
}

#[tokio::test]
async fn numbers_of_a_stream_reach_the_client_unchanged() {
    let (router, _instances) = between(|| {
        let event = format!(
            r#"data: {{"id":"x","choices":[{{"index":0,"text":"x","logprobs":{NUMBERS}}}]}}"#
        );
        let body = format!("{event}\n\ndata: [DONE]\n\n");
        let len = body.len();
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream";
        format!("{head}\r\ncontent-length: {len}\r\n\r\n{body}").into()
    })
    .await;
    let body = json!({"model": "m", "prompt": "a", "n": 2, "stream": true});
    let answer = router.post("/v1/completions", &body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.body.matches(NUMBERS).count(), 2, "{}", answer.body);
}

#[tokio::test]
async fn bodies_that_engines_take_are_served() {
    let (router, [prefill, decode]) = between(decoded).await;
    let bodies = [
        r#"{"model":"m","prompt":"a","n":1.0}"#,
        r#"{"model":"m","prompt":"a","stream":"false"}"#,
        r#"{"model":"m","prompt":"a","stream":0}"#,
        r#"{"model":"m","prompt_embeds":["QUJD","QUJD"]}"#,
        r#"{"model":"m","prompt":"a","logit_bias":{"5":-Infinity}}"#,
        "\u{feff}{\"model\":\"m\",\"prompt\":\"a\"}",
    ];
    let mut refused = Vec::new();
    for body in bodies {
        let answer = TestRouter::read(router.call(router.request("/v1/completions", body)).await);
        let TestResponse { status, body: text, .. } = answer.await;
        if status != 200 {
            refused.push((body, status, text));
        }
    }
    assert!(refused.is_empty(), "{refused:#?}");
    // Unchanged: engines accept it, and JSON has no other form for it.
    let has =
        |it: &RawInstance| it.legs.lock().unwrap().iter().any(|leg| leg.body.contains("-Infinity"));
    assert!(has(&prefill) && has(&decode));
}

#[tokio::test]
async fn a_list_of_too_many_prompts_is_refused_for_the_prompts() {
    let (router, _instances) = between(decoded).await;
    let body = json!({"model": "m", "prompt": vec!["p"; 129]});
    let answer = router.post("/v1/completions", &body).await;
    if answer.status != 200 {
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("prompt")));
        assert!(answer.error().contains("--parts-max"), "{answer:?}");
    }
}

#[tokio::test]
async fn headers_of_an_instance_s_own_connection_do_not_reach_the_client() {
    let (router, _instances) = between(|| {
        let headers = "connection: x-own, keep-alive\r\nx-own: 1\r\nkeep-alive: timeout=5\r\n\
            set-cookie: a=b\r\nlocation: http://10.0.0.1/\r\nserver: uvicorn\r\n";
        json(headers, r#"{"id":"x","choices":[{"index":0,"text":"from decode"}]}"#)
    })
    .await;
    let answer = router.post("/v1/completions", &json!({"model": "m", "prompt": "a"})).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    for name in ["x-own", "keep-alive", "set-cookie", "location"] {
        assert_eq!(answer.header(name), "", "{name}: {answer:?}");
    }
    assert_eq!(answer.header("content-type"), "application/json");
}
