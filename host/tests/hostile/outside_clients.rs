//! Memory and time of the router that one client, or the answers to it, can use. Memory is that of
//! the process; times are compared within one run.

use crate::process::ServeProcess;
use crate::raw_instance::{PARAMS, RawInstance, decoded, prefilled};
use crate::rig::{PATIENCE, TestResponse, TestRouter};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::net::TcpStream;
use std::process::Child;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

/// A field of `/proc/PID/status`, in bytes.
fn memory(child: &Child, field: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kib: usize = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok()).unwrap();
    kib << 10
}

/// A router with a named prefill and a named decode.
async fn between(prefill: &RawInstance, decode: &RawInstance, options: &[&str]) -> TestRouter {
    let named = ["--prefill", &prefill.url, "--decode", &decode.url, "--connect-timeout", "300"];
    let router = TestRouter::start(&[&named, options].concat());
    router.ready(2).await;
    router
}

/// True if the client is served, or refused with a remedy.
fn is_served_or_refused(answer: &TestResponse) -> bool {
    answer.status == 200
        || [413, 429, 503].contains(&answer.status) && answer.error().contains("--")
}

/// Calls `ask` with a size and with eight times the size; returns the best times of both.
async fn times(mut ask: impl AsyncFnMut(usize)) -> [Duration; 2] {
    let mut best = [Duration::MAX; 2];
    for _ in 0..3 {
        for (best, size) in best.iter_mut().zip([4_000, 32_000]) {
            let start = Instant::now();
            ask(size).await;
            *best = start.elapsed().min(*best);
        }
    }
    best
}

/// Fails if the time is quadratic in the size: 64 times as long for 8 times the size.
fn assert_linear([few, many]: [Duration; 2]) {
    assert!(many < few * 24, "{few:?} for 4,000 keys, {many:?} for 32,000");
}

fn keys(count: usize) -> Map<String, Value> {
    (0..count).map(|n| (format!("key-{n}"), Value::Null)).collect()
}

#[tokio::test]
async fn time_of_a_body_is_linear_in_its_keys() {
    let router = TestRouter::start(&["--queue-timeout", "0.001"]);
    let plain = json!({"model": "m", "prompt": [1, 2], "max_tokens": 1});
    let grown = times(async |size| {
        let mut body = plain.as_object().unwrap().clone();
        body.extend(keys(size));
        router.post("/v1/completions", &body.into()).await;
    });
    assert_linear(grown.await);
    let grown = times(async |size| {
        let body = json!({"token_ids": [1, 2], "sampling_params": keys(size)});
        router.post("/inference/v1/generate", &body).await;
    });
    assert_linear(grown.await);
}

#[tokio::test]
async fn time_of_kv_transfer_params_is_linear_in_their_keys() {
    let prefill = RawInstance::start(|leg| {
        let leg: Value = serde_json::from_str(&leg.body).unwrap();
        let mut params: Map<String, Value> = serde_json::from_str(PARAMS).unwrap();
        params.extend(keys(leg["prompt"][0].as_u64().unwrap() as usize));
        prefilled(&Value::from(params).to_string())
    });
    let decode = RawInstance::start(|_| decoded());
    let router = between(&prefill, &decode, &["--retries", "0"]).await;
    let grown = times(async |size| {
        let body = json!({"model": "m", "prompt": [size], "max_tokens": 1});
        router.post("/v1/completions", &body).await;
    });
    assert_linear(grown.await);
}

#[tokio::test]
async fn samples_of_a_long_prompt_share_its_bytes() {
    let prefill = RawInstance::start(|_| prefilled(PARAMS));
    let decode = RawInstance::start(|_| decoded());
    let router = between(&prefill, &decode, &[]).await;
    let rest = memory(&router.child, "VmRSS");
    let body = json!({"model": "m", "prompt": "x".repeat(2 * MIB), "n": 64, "max_tokens": 1});
    let answer = router.post("/v1/completions", &body).await;
    assert!(is_served_or_refused(&answer), "{answer:?}");
    let grown = memory(&router.child, "VmHWM").saturating_sub(rest) / MIB;
    assert!(grown < 48, "{grown} MiB for a prompt of 2 MiB, with 64 samples");
}

#[tokio::test]
async fn answers_that_do_not_end_take_no_more_than_one_budget() {
    const REQUESTS: usize = 16;
    let prefill = RawInstance::start(|_| prefilled(PARAMS));
    let decode = RawInstance::start(|_| {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", 60 * MIB);
        let mut bytes = head.into_bytes();
        bytes.resize(bytes.len() + 24 * MIB, b' ');
        bytes
    });
    let limits = ["--bodies-max", "134217728", "--retries", "0"];
    let router = between(&prefill, &decode, &limits).await;
    let rest = memory(&router.child, "VmRSS");
    let body = json!({"model": "m", "prompt": "hello", "max_tokens": 1});
    let asking = async {
        let all = (0..REQUESTS).map(|_| router.post("/v1/completions", &body));
        for answer in futures_util::future::join_all(all).await {
            assert!(answer.status >= 400 && !answer.error().is_empty(), "{answer:?}");
        }
    };
    let sent = async {
        let start = Instant::now();
        while decode.answered.load(Ordering::Relaxed) < REQUESTS {
            assert!(start.elapsed() < PATIENCE, "the router does not read");
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = asking => {}
        () = sent => {}
    }
    let grown = memory(&router.child, "VmHWM").saturating_sub(rest) / MIB;
    assert!(grown < 192, "{grown} MiB for answers, where all bodies may take 128 MiB");
    assert_eq!(router.get_of_client("/health").await.status, 200);
}

#[test]
fn bodies_at_an_instance_share_one_budget() {
    const BODY: usize = 30 * MIB;
    let args = ["--role", "prefill", "--mode", "pull", "--http-port", "0"];
    let instance = ServeProcess::serve(&args);
    let rest = memory(&instance.child, "VmRSS");
    let mut request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n\
         content-type: application/json\r\ncontent-length: {BODY}\r\n\r\n"
    )
    .into_bytes();
    // All bytes but the last one, so that the requests stay pending.
    request.resize(request.len() + BODY - 1, b' ');
    let mut held = Vec::new();
    for _ in 0..20 {
        let mut stream = TcpStream::connect(instance.text("http")).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        if let Err(why) = stream.write_all(&request) {
            // The body of a refused request is not read.
            assert_ne!(why.kind(), std::io::ErrorKind::WouldBlock, "it neither reads nor closes");
        }
        held.push(stream);
    }
    let grown = memory(&instance.child, "VmHWM").saturating_sub(rest) / MIB;
    assert!(grown < 448, "{grown} MiB for 20 bodies of 30 MiB");
}
