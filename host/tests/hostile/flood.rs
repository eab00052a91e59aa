//! S10: what clients may take of the router, and what is left for others.

use crate::backend::Act;
use crate::limit_files;
use crate::rig::{PATIENCE, TestRouter, completion, pair};
use kvferry_engine::core::message::Mode;
use std::fs;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

/// Another address of this machine than the one of the usual client.
const STRANGER: &str = "127.0.0.2:0";

/// A connection of a stranger.
pub(crate) async fn connect_as_stranger(router: &TestRouter) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(STRANGER.parse().unwrap()).unwrap();
    let to: SocketAddr = router.http.parse().unwrap();
    timeout(PATIENCE, socket.connect(to)).await.expect("a connection").unwrap()
}

fn head(bytes: usize) -> String {
    format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {bytes}\r\n\r\n"
    )
}

#[tokio::test]
async fn the_limit_of_open_files_is_raised_at_the_start() {
    let router = TestRouter::start_with(&[], |command| limit_files(command, 128, false));
    let limits = fs::read_to_string(format!("/proc/{}/limits", router.child.id())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let words: Vec<_> = line.split_whitespace().collect();
    assert_eq!(words[3], words[4], "{line}");
}

/// As many as a process with few descriptors cannot have, in a backlog that takes them all.
pub(crate) async fn flood(router: &TestRouter, said: &[u8]) -> Vec<TcpStream> {
    let mut idle = Vec::new();
    for _ in 0..350 {
        let mut stream = connect_as_stranger(router).await;
        // The router may have closed it.
        let _ = stream.write_all(said).await;
        idle.push(stream);
    }
    idle
}

#[tokio::test]
async fn idle_sockets_hide_neither_clients_nor_admin() {
    let slow = head(1000);
    // Silence, a header that does not end, and a body that does not come.
    for said in ["", "GET /health HTTP/1.1\r\n", &*slow] {
        let router = TestRouter::start_with(&[], |command| limit_files(command, 256, true));
        let _idle = flood(&router, said.as_bytes()).await;
        for path in ["/health", "/readiness", "/workers", "/registrations/rejected", "/metrics"] {
            let status = router.get(path).await.status;
            assert!(status == 200 || path == "/readiness", "{said:?} {path}: {status}");
        }
        assert_eq!(router.ask().await.status, 503, "it is heard, and nobody is ready");
    }
}

#[tokio::test]
async fn who_floods_closes_its_own_connections_first() {
    let router = TestRouter::start(&["--connections-max", "8"]);
    let mut quiet = TcpStream::connect(&router.http).await.unwrap();
    let request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut answer = [0; 12];
    quiet.write_all(request).await.unwrap();
    quiet.read_exact(&mut answer).await.unwrap();
    let mut idle = Vec::new();
    for _ in 0..40 {
        idle.push(connect_as_stranger(&router).await);
    }
    // The first one was closed for a later one, so the router has seen them.
    assert_eq!(timeout(PATIENCE, idle[0].read(&mut answer)).await.unwrap().unwrap_or(0), 0);
    // What is left of the first answer, and the second one.
    quiet.write_all(request).await.unwrap();
    let mut rest = String::new();
    while rest.matches("200 OK").count() < 1 {
        let mut more = [0; 256];
        let got = timeout(PATIENCE, quiet.read(&mut more)).await.unwrap().unwrap();
        assert!(got > 0, "it was closed");
        rest += &String::from_utf8_lossy(&more[..got]);
    }
}

#[tokio::test]
async fn connections_beyond_the_limit_that_are_all_in_use_are_refused_with_a_reason() {
    let (router, p, d) = pair(Mode::Push, &["--connections-max", "1"]).await;
    d.always(Act::Never);
    p.always(Act::Never);
    let body = completion().to_string();
    let mut busy = TcpStream::connect(&router.http).await.unwrap();
    busy.write_all((head(body.len()) + &body).as_bytes()).await.unwrap();
    d.arrival(1).await;
    let mut late = TcpStream::connect(&router.http).await.unwrap();
    let mut told = String::new();
    timeout(PATIENCE, late.read_to_string(&mut told)).await.unwrap().unwrap();
    assert!(told.starts_with("HTTP/1.1 503") && told.contains("--connections-max"), "{told}");
    assert!(router.metric("kvferry_router_connections_refused_total").await >= 1);
}

#[tokio::test]
async fn bodies_of_one_address_leave_memory_for_others() {
    const MIB: usize = 1 << 20;
    let options = ["--body-max", "1048576", "--memory-max", "4194304"];
    let (router, _p, _d) = pair(Mode::Push, &options).await;
    // All but the last byte, so that they stay.
    let mut held = Vec::new();
    for _ in 0..8 {
        let mut stream = connect_as_stranger(&router).await;
        let mut said = head(MIB).into_bytes();
        said.resize(said.len() + MIB - 1, b' ');
        let (mut reads, mut writes) = stream.split();
        let mut told = String::new();
        tokio::select! {
            // It is taken, or refused: then nobody reads the rest.
            _ = writes.write_all(&said) => {}
            _ = reads.read_to_string(&mut told) => {}
        }
        held.push((stream, told));
    }
    // A client of another address has room.
    let mut body = completion();
    body["prompt"] = "x".repeat(MIB - 10_000).into();
    let answer = router.post("/v1/completions", &body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    // Of one address half of it at most.
    let mut refused = 0;
    for (mut stream, mut told) in held {
        if told.is_empty() {
            stream.write_all(b" ").await.ok();
            let _ = timeout(PATIENCE, stream.read_to_string(&mut told)).await.unwrap();
        }
        refused += usize::from(told.starts_with("HTTP/1.1 429"));
        assert!(!told.starts_with("HTTP/1.1 429") || told.contains("--memory-max"), "{told}");
    }
    assert!(refused >= 1, "nothing was refused");
}

#[tokio::test]
async fn a_body_that_is_said_to_be_too_long_is_not_read() {
    let router = TestRouter::start(&["--body-max", "1000"]);
    let mut stream = TcpStream::connect(&router.http).await.unwrap();
    stream.write_all(head(1001).as_bytes()).await.unwrap();
    let mut told = [0; 12];
    timeout(PATIENCE, stream.read_exact(&mut told)).await.unwrap().unwrap();
    assert_eq!(&told, b"HTTP/1.1 413");
}

#[tokio::test]
async fn what_operators_ask_for_is_not_told_to_clients() {
    let router = TestRouter::start(&[]);
    for path in ["/workers", "/list_workers", "/registrations/rejected", "/metrics"] {
        assert_eq!(router.get(path).await.status, 200, "{path}");
        let answer = router.get_of_client(path).await;
        assert_eq!(answer.status, 404, "{path}: {answer:?}");
        assert!(answer.error().contains("--admin-addr"), "{answer:?}");
    }
    for path in ["/health", "/liveness"] {
        assert_eq!(router.get(path).await.status, 200, "{path}");
        assert_eq!(router.get_of_client(path).await.status, 200, "{path}");
    }
}
