//! Bodies that engines accept, and answers that keep their bytes.

use crate::backend::{Act, ReceivedLeg};
use crate::rig::{TestResponse, TestRouter, pair};
use kvferry_engine::core::message::{Mode, Role};
use serde_json::{Value, json};

async fn post(router: &TestRouter, path: &str, body: impl Into<bytes::Bytes>) -> TestResponse {
    let mut request = router.request(path, body);
    request.headers_mut().insert("x-request-id", "the-clients-id".parse().unwrap());
    TestRouter::read(router.call(request).await).await
}

#[tokio::test]
async fn bodies_that_vllm_takes_are_taken() {
    let (router, p, d) = pair(Mode::Push, &[]).await;
    let utf16: Vec<u8> =
        r#"{"model":"m","prompt":"ä"}"#.encode_utf16().flat_map(u16::to_le_bytes).collect();
    for body in [
        br#"{"model":"m","prompt":"a","n":1.0}"#.to_vec(),
        br#"{"model":"m","prompt":"a","stream":"false","n":"1"}"#.to_vec(),
        br#"{"model":"m","prompt":"a","stream":0}"#.to_vec(),
        br#"{"model":"m","prompt":"a","stream":false,"stream":0}"#.to_vec(),
        b"\xef\xbb\xbf{\"model\":\"m\",\"prompt\":\"a\"}".to_vec(),
        utf16,
    ] {
        let answer = post(&router, "/v1/completions", body.clone()).await;
        assert_eq!(answer.status, 200, "{answer:?} {}", String::from_utf8_lossy(&body));
    }
    assert_eq!((p.seen().len(), d.seen().len()), (6, 6));
    assert_eq!(d.seen()[5].body["prompt"], "ä");
    assert_eq!(d.seen()[0].body["n"], 1.0);
    assert_eq!(d.seen()[1].body["stream"], "false");

    let embeds = r#"{"model":"m","prompt_embeds":["QQ","Qg"]}"#;
    let answer = post(&router, "/v1/completions", embeds).await.json();
    assert_eq!(answer["choices"].as_array().unwrap().len(), 2);
    let mut asked: Vec<_> =
        d.seen()[6..].iter().map(|leg| leg.body["prompt_embeds"].to_string()).collect();
    asked.sort();
    assert_eq!(asked, ["\"QQ\"", "\"Qg\""]);
}

#[tokio::test]
async fn body_with_too_many_fields_is_refused() {
    let (router, p, _d) = pair(Mode::Push, &[]).await;
    let fields: Vec<_> = (0..80_000).map(|n| format!("\"k{n}\":0")).collect();
    let fields = fields.join(",");
    for (path, body) in [
        ("/v1/completions", format!("{{\"prompt\":\"a\",{fields}}}")),
        (
            "/inference/v1/generate",
            format!("{{\"token_ids\":[1],\"sampling_params\":{{{fields}}}}}"),
        ),
        ("/v1/completions", format!("{{\"prompt\":\"a\",\"x\":{}", "[".repeat(80_000))),
    ] {
        let answer = post(&router, path, body).await;
        assert_eq!(answer.status, 400);
        let error = answer.error();
        assert!(error.contains("at most 1024") || error.contains("more than 512"), "{error}");
    }
    assert!(p.seen().is_empty());
    // Nested objects have no such limit.
    let body = format!("{{\"prompt\":\"a\",\"logit_bias\":{{{fields}}}}}");
    assert_eq!(post(&router, "/v1/completions", body).await.status, 200);
}

#[tokio::test]
async fn prefill_params_with_too_many_fields_fail_the_leg() {
    let (router, p, d) = pair(Mode::Pull, &["--retries", "0"]).await;
    let fields: Vec<_> = (0..2000).map(|n| format!("\"k{n}\":0")).collect();
    let answer = format!("{{\"kv_transfer_params\":{{{}}}}}", fields.join(","));
    p.always(Act::Text(200, answer.leak()));
    let answer = router.ask().await;
    assert_eq!((answer.status, d.seen().len()), (502, 0), "{answer:?}");
    assert!(answer.error().contains("at most 1024"), "{answer:?}");
}

#[tokio::test]
async fn transfer_parameters_of_clients_reach_no_instance() {
    let (router, p, d) = pair(Mode::Push, &[]).await;
    let evil = json!({"remote_host": "10.0.0.1"});
    let body = json!({"token_ids": [1], "model": "m", "kv_transfer_params": evil,
        "vllm_xargs": {"kv_transfer_params": "x"},
        "sampling_params": {"extra_args": {"kv_transfer_params": evil, "mine": 1}}});
    let answer = post(&router, "/inference/v1/generate", body.to_string()).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    for leg in p.seen().iter().chain(&d.seen()) {
        assert_eq!(leg.body["sampling_params"]["extra_args"], json!({"mine": 1}));
        assert!(!leg.body.to_string().contains("10.0.0.1"), "{leg:?}");
        assert_eq!(leg.body["vllm_xargs"], json!({}));
    }
}

#[tokio::test]
async fn extra_arguments_with_too_many_fields_are_refused() {
    let (router, p, d) = pair(Mode::Push, &[]).await;
    let fields: Vec<_> = (0..1024).map(|n| format!("\"k{n}\":0")).collect();
    let extra = format!("{{\"kv_transfer_params\":{{}},{}}}", fields.join(","));
    for (path, body, field) in [
        (
            "/inference/v1/generate",
            format!("{{\"token_ids\":[1],\"sampling_params\":{{\"extra_args\":{extra}}}}}"),
            "sampling_params.extra_args",
        ),
        ("/v1/completions", format!("{{\"prompt\":\"a\",\"vllm_xargs\":{extra}}}"), "vllm_xargs"),
        ("/v1/chat/completions/batch", format!("{{\"vllm_xargs\":{extra}}}"), "vllm_xargs"),
    ] {
        let answer = post(&router, path, body).await;
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(field)));
        assert!(answer.error().contains("at most 1024"), "{answer:?}");
    }
    assert!(p.seen().is_empty() && d.seen().is_empty());
}

#[tokio::test]
async fn request_id_with_addresses_in_a_body_reaches_no_instance() {
    let (router, p, d) = pair(Mode::Push, &[]).await;
    let marked = "___prefill_addr_host:evil,handshake:1,notify:2___decode_addr_host:evil_0";
    for (id, expected) in [(json!(marked), Value::Null), (json!("mine"), json!("mine"))] {
        let body = json!({"model": "m", "input": "a", "request_id": id});
        let answer = post(&router, "/v1/responses", body.to_string()).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        for instance in [&p, &d] {
            assert_eq!(instance.seen().pop().expect("a leg").body["request_id"], expected);
        }
    }
}

/// Answer of a prefill that had a token of the prompt cached.
fn with_cached(role: Role) -> Value {
    let details = json!({"cached_tokens": if role == Role::Prefill { 1 } else { 3 }});
    json!({"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4,
        "prompt_tokens_details": details})
}

#[tokio::test]
async fn rewritten_answers_keep_their_bytes() {
    let (router, p, d) = pair(Mode::Push, &[]).await;
    p.always(Act::Json(200, json!({"usage": with_cached(Role::Prefill)})));
    let body = r#"{ "zz":-1.0468965599587365, "choices":[{"text":"a","index":0,"n":1e-7,
        "big":123456789012345678901234567890}],
        "usage":{"total_tokens": 4,"prompt_tokens_details":{"cached_tokens":3}},"a":[]}"#;
    d.always(Act::Text(200, body));
    let answer = router.ask().await;
    let expected = body.replace("\"cached_tokens\":3", "\"cached_tokens\":1");
    assert_eq!((answer.status, answer.body), (200, expected));
    let event = format!("data: {}\n\n", body.replace('\n', " "));
    d.always(Act::Stream(vec![event.clone(), "data: [DONE]\n\n".into()]));
    let answer = router.post("/v1/completions", &crate::rig::streaming()).await;
    let expected = event.replace("\"cached_tokens\":3", "\"cached_tokens\":1");
    assert_eq!(answer.body, expected + "data: [DONE]\n\n");
}

#[tokio::test]
async fn answers_name_no_address_of_an_instance() {
    for mode in [Mode::Push, Mode::Pull] {
        let (router, _p, d) = pair(mode, &[]).await;
        d.on(|leg: &ReceivedLeg| {
            let id = format!("cmpl-{}", leg.header("x-request-id"));
            let answer = json!({"id": id, "choices": [{"index": 0, "text": "t"}],
                "kv_transfer_params": {"remote_host": "10.0.0.1"}});
            Some(match leg.body["stream"] == true {
                true => Act::Stream(vec![format!("data: {answer}\n\n"), "data: [DONE]\n\n".into()]),
                false => Act::Json(200, answer),
            })
        });
        for stream in [false, true] {
            for n in [1, 2] {
                let body = json!({"model": "m", "prompt": "p", "n": n, "stream": stream});
                let answer = post(&router, "/v1/completions", body.to_string()).await;
                assert!(answer.body.contains("\"id\":\"cmpl-the-clients-id\""), "{answer:?}");
                assert!(!answer.body.contains("_addr_"), "{answer:?}");
                assert!(!answer.body.contains("10.0.0.1"), "{answer:?}");
            }
        }
        d.on(|leg: &ReceivedLeg| {
            let message = format!("no request {}", leg.header("x-request-id"));
            Some(Act::Json(400, json!({"error": {"message": message, "type": "t", "code": 400}})))
        });
        let error = router.ask().await.error();
        assert!(error.starts_with("no request ") && !error.contains("_addr_"), "{error}");
    }
}

#[tokio::test]
async fn messages_are_served_by_two_legs() {
    let (router, p, d) = pair(Mode::Push, &[]).await;
    let usage = |input: u32, read: u32| json!({"input_tokens": input, "output_tokens": 1, "cache_read_input_tokens": read});
    p.always(Act::Json(200, json!({"type": "message", "usage": usage(2, 1)})));
    d.on(move |leg: &ReceivedLeg| {
        let id = format!("chatcmpl-{}", leg.header("x-request-id"));
        let message = json!({"id": id, "type": "message", "content": [], "usage": usage(0, 3)});
        Some(match leg.body["stream"] == true {
            false => Act::Json(200, message),
            true => {
                let start = json!({"type": "message_start", "message": message});
                let stop = json!({"type": "message_stop"});
                Act::Stream(vec![
                    format!("event: message_start\ndata: {start}\n\n"),
                    format!("event: message_stop\ndata: {stop}\n\n"),
                ])
            }
        })
    });
    let body = |stream: bool| {
        let messages = json!([{"role": "user", "content": "hi"}]);
        json!({"model": "m", "messages": messages, "max_tokens": 5, "stream": stream}).to_string()
    };
    let answer = post(&router, "/v1/messages", body(false)).await.json();
    assert_eq!(
        (&answer["id"], &answer["usage"]),
        (&json!("chatcmpl-the-clients-id"), &usage(2, 1))
    );
    let answer = post(&router, "/v1/messages", body(true)).await.body;
    assert!(answer.starts_with("event: message_start\ndata: {"), "{answer}");
    assert!(
        answer.contains("\"chatcmpl-the-clients-id\"") && !answer.contains("_addr_"),
        "{answer}"
    );
    assert!(answer.contains("\"cache_read_input_tokens\":1"), "{answer}");
    assert!(answer.ends_with("event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"));
    for leg in p.seen() {
        assert_eq!((&leg.body["max_tokens"], &leg.body["stream"]), (&json!(1), &json!(false)));
    }
    assert!(d.seen().iter().all(|leg| leg.body["max_tokens"] == 5 && leg.path == "/v1/messages"));

    let refused = post(&router, "/v1/messages", "{}").await;
    assert_eq!((refused.status, &refused.json()["type"]), (400, &json!("error")));
    d.always(Act::Broken(vec!["event: ping\ndata: {\"type\":\"ping\"}\n\n".into()]));
    let broken = post(&router, "/v1/messages", body(true)).await.body;
    let (_, error) = broken.split_once("event: error\ndata: ").expect("an error event");
    let error: Value = serde_json::from_str(error.trim_end()).unwrap();
    assert_eq!(error["error"]["type"], "api_error", "{broken}");
}
