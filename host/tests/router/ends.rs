//! B14: clients that go, and the end of the router.

use crate::backend::Act;
use crate::rig::{PATIENCE, TestRouter, completion, pair, streaming};
use http_body_util::BodyExt;
use kvferry_engine::core::message::Mode;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::timeout;

async fn raw(router: &TestRouter, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(&router.http).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn a_client_that_goes_takes_its_legs_along() {
    for body in [completion(), streaming()] {
        let (router, p, d) = pair(Mode::Push, &[]).await;
        p.always(Act::Never);
        d.always(Act::Never);
        let client = raw(&router, &body.to_string()).await;
        p.arrival(1).await;
        d.arrival(1).await;
        drop(client);
        p.given_up(1).await;
        d.given_up(1).await;
        let left = async { while router.metric("kvferry_router_in_flight").await != 0 {} };
        timeout(PATIENCE, left).await.expect("nobody is in flight");
        let (router, p, d) = pair(Mode::Pull, &[]).await;
        p.always(Act::Never);
        let client = raw(&router, &body.to_string()).await;
        p.arrival(1).await;
        drop(client);
        p.given_up(1).await;
        assert!(d.seen().is_empty(), "the decode never heard of it");
    }
}

#[tokio::test]
async fn a_client_that_goes_within_its_stream_frees_the_decode() {
    let (router, _p, d) = pair(Mode::Push, &[]).await;
    let (tokens, receiver) = tokio::sync::mpsc::unbounded_channel();
    d.always(Act::Fed(Arc::new(std::sync::Mutex::new(Some(receiver)))));
    tokens.send("data: {}\n\n".to_owned()).unwrap();
    let mut answer = router.call(router.request("/v1/completions", streaming().to_string())).await;
    answer.body_mut().frame().await.unwrap().unwrap();
    drop(answer);
    // The decode's connection is closed: at some time nobody takes its tokens any more.
    timeout(PATIENCE, tokens.closed()).await.expect("the decode is left");
    router.until("legs end", |all| all.iter().all(|it| it["in_flight_legs"] == 0)).await;
}

#[tokio::test]
async fn sigterm_lets_requests_finish() {
    let (router, p, d) = pair(Mode::Push, &[]).await;
    let go = Arc::new(Notify::new());
    let answer = Act::Json(200, serde_json::json!({"id": "late"}));
    d.always(Act::After(go.clone(), Box::new(answer)));
    let end = async {
        p.arrival(1).await;
        d.arrival(1).await;
        router.signal("-TERM");
        // No new connections, once it has heard of it.
        while TcpStream::connect(&router.http).await.is_ok() {}
        go.notify_one();
    };
    let (answer, ()) = tokio::join!(router.ask(), end);
    assert_eq!((answer.status, &answer.json()["id"]), (200, &"late".into()));
    assert_eq!(router.exit(), Some(0));
}

#[tokio::test]
async fn a_request_that_is_not_whole_at_sigterm_is_refused() {
    let (router, p, _d) = pair(Mode::Push, &[]).await;
    let body = completion().to_string();
    let mut stream = TcpStream::connect(&router.http).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Expect: 100-continue\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    // Its head was taken before.
    let mut said = [0; 25];
    stream.read_exact(&mut said).await.unwrap();
    assert_eq!(&said, b"HTTP/1.1 100 Continue\r\n\r\n");
    router.signal("-TERM");
    while TcpStream::connect(&router.http).await.is_ok() {}
    stream.write_all(body.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    assert!(p.seen().is_empty(), "no leg was sent");
    assert_eq!(router.exit(), Some(0));
}

#[tokio::test]
async fn what_does_not_finish_is_cut_off_after_its_time() {
    let (router, p, d) = pair(Mode::Push, &["--drain-timeout", "0.2"]).await;
    d.always(Act::Never);
    let client = raw(&router, &completion().to_string()).await;
    p.arrival(1).await;
    router.signal("-TERM");
    assert_eq!(router.exit(), Some(0));
    drop(client);
}

#[tokio::test]
async fn a_router_that_is_to_end_says_so_and_serves_for_its_delay() {
    let (router, p, d) = pair(Mode::Push, &["--shutdown-delay", "3600"]).await;
    let ready = router.get("/readiness").await;
    assert_eq!((ready.status, &ready.json()["status"]), (200, &"ready".into()));
    assert!(!router.ask().await.headers.contains_key("connection"));
    let go = Arc::new(Notify::new());
    let late = Act::Json(200, serde_json::json!({"id": "late"}));
    d.always(Act::After(go.clone(), Box::new(late)));
    let before = p.seen().len();
    let (held, ()) = tokio::join!(router.ask(), async {
        p.arrival(before + 1).await;
        d.arrival(before + 1).await;
        router.signal("-TERM");
        let start = std::time::Instant::now();
        while router.get("/readiness").await.status == 200 {
            assert!(start.elapsed() < PATIENCE, "it does not drain");
        }
        for told in [router.get("/readiness").await, router.get_of_client("/readiness").await] {
            assert_eq!((told.status, &told.json()["status"]), (503, &"draining".into()));
            assert_eq!(told.json()["draining"], true);
        }
        assert_eq!(router.get("/liveness").await.status, 200);
        // Nobody can register any more; a new router may have the place.
        while TcpStream::connect(router.discovery_address()).await.is_ok() {}
        d.on(|_| None);
        let fresh = router.ask().await;
        assert_eq!((fresh.status, fresh.header("connection")), (200, "close"));
        // A second one ends the delay.
        router.signal("-TERM");
        while TcpStream::connect(&router.http).await.is_ok() {}
        go.notify_one();
    });
    assert_eq!((held.status, &held.json()["id"]), (200, &"late".into()));
    assert_eq!(router.exit(), Some(0));
}

#[test]
fn a_delay_that_is_none_is_refused() {
    for delay in ["-1", "0.0001", "1e9", "NaN"] {
        let option = format!("--shutdown-delay={delay}");
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_kvferry"))
            .args(["router", &option])
            .output()
            .expect("the program starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("--shutdown-delay") && said.contains("give 0.001"), "{said}");
    }
}
