//! Clients that do not read their answers.

use crate::backend::Act;
use crate::rig::{PATIENCE, TestRouter, pair, streaming};
use kvferry_engine::core::message::Mode;
use std::time::Instant;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

/// A connection from an address of this machine, with these bytes sent.
async fn connect(router: &TestRouter, from: &str, request: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(from.parse().unwrap()).unwrap();
    let mut stream = socket.connect(router.http.parse().unwrap()).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

fn completions() -> String {
    let body = streaming().to_string();
    format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

#[tokio::test]
async fn streams_of_one_address_do_not_keep_others_out() {
    let (router, _p, d) = pair(Mode::Push, &["--connections-max", "4"]).await;
    d.always(Act::Never);
    let mut flood = Vec::new();
    for nth in 1..=4 {
        flood.push(connect(&router, "127.0.0.2:0", &completions()).await);
        timeout(PATIENCE, d.arrival(nth)).await.unwrap();
    }
    let health = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut answer = [0; 12];
    let mut other = connect(&router, "127.0.0.3:0", health).await;
    timeout(PATIENCE, other.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
    timeout(PATIENCE, d.given_up(1)).await.unwrap();
    // The address of the others gets no more of them.
    let mut more = connect(&router, "127.0.0.2:0", health).await;
    timeout(PATIENCE, more.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"HTTP/1.1 503");
}

#[tokio::test]
async fn a_client_that_does_not_read_loses_its_connection() {
    let (router, _p, d) = pair(Mode::Push, &["--write-timeout", "0.1"]).await;
    // More than the sockets of both sides can hold.
    let chunk = format!("data: {{\"text\": \"{}\"}}\n\n", "x".repeat(1 << 20));
    d.always(Act::Stream(vec![chunk; 64]));
    let _unread = connect(&router, "127.0.0.2:0", &completions()).await;
    timeout(PATIENCE, d.arrival(1)).await.unwrap();
    let start = Instant::now();
    while router.metric("kvferry_router_connections").await > 0 {
        assert!(start.elapsed() < PATIENCE, "it keeps its place");
    }
}
