//! TLS of the router's clients and legs.

use crate::backend::{HeartbeatFields, StubInstance};
use crate::certificates::{EXPIRED, OTHER_NAME, PemFolder, SignedKey, TestAuthority};
use crate::rig::{PATIENCE, TestRouter, completion, streaming};
use kvferry_engine::core::message::{Mode, Role};
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

fn router(flags: &[String]) -> TestRouter {
    TestRouter::start(&flags.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Registers a prefill and a decode.
async fn instances(router: &mut TestRouter) -> (StubInstance, StubInstance) {
    let pair = (StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await);
    pair.1.waits_for([&pair.0]);
    for it in [&pair.0, &pair.1] {
        router.register(it, &HeartbeatFields::of(Mode::Push));
    }
    pair
}

/// Waits until all instances are said to be unreachable for this.
async fn unreachable(router: &TestRouter, why: &str) {
    let said = |it: &serde_json::Value| it["unreachable"].as_str().unwrap_or("").contains(why);
    let all = |them: &[serde_json::Value]| them.len() == 2 && them.iter().all(said);
    router.until(why, all).await;
}

#[tokio::test]
async fn clients_are_served_over_tls_whole_and_streamed() {
    let (folder, authority) = (PemFolder::new("clients"), TestAuthority::OURS);
    let mut router = router(&folder.show(&authority.local));
    let _pair = instances(&mut router).await;
    router.ready(2).await;
    let mut client = authority.client(&router).await;
    assert_eq!(client.get("/health").await.status, 200);
    let whole = client.post("/v1/completions", completion().to_string()).await;
    assert_eq!(whole.status, 200, "{whole:?}");
    assert_eq!(whole.json()["choices"][0]["text"], "from D");
    let streamed = client.post("/v1/completions", streaming().to_string()).await;
    assert_eq!(streamed.events().last().unwrap(), "[DONE]", "{streamed:?}");
    assert_eq!(streamed.events().len(), 4);
    assert_eq!(router.metric("kvferry_router_handshakes_failed_total").await, 0);
}

#[tokio::test]
async fn a_client_without_tls_is_told_so_at_once() {
    let (folder, authority) = (PemFolder::new("plain"), TestAuthority::OURS);
    let router = router(&folder.show(&authority.local));
    let mut plain = TcpStream::connect(&router.http).await.unwrap();
    plain.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    let mut told = String::new();
    timeout(PATIENCE, plain.read_to_string(&mut told)).await.unwrap().unwrap();
    assert!(told.starts_with("HTTP/1.1 400") && told.contains("https://"), "{told}");
    // What only looks like TLS gets an alert, if anything, and the end.
    let mut odd = TcpStream::connect(&router.http).await.unwrap();
    odd.write_all(&[0x16; 64]).await.unwrap();
    let mut told = Vec::new();
    // The end may come as a reset.
    let _ = timeout(PATIENCE, odd.read_to_end(&mut told)).await.unwrap();
    assert!(told.len() < 16, "{told:?}");
    router.metric_reaches("kvferry_router_handshakes_failed_total", 2).await;
}

#[tokio::test]
async fn a_certificate_is_replaced_without_a_restart_and_a_bad_one_is_not_taken() {
    let folder = PemFolder::new("rotation");
    let (old, new) = (TestAuthority::OURS, TestAuthority::OTHER);
    let flags = folder.show(&old.local);
    let log = folder.path("log");
    let stderr = fs::File::create(&log).unwrap();
    let options: Vec<_> = flags.iter().map(String::as_str).collect();
    let router = TestRouter::start_with(&options, |command| {
        command.stderr(stderr);
    });
    let mut before = old.client(&router).await;
    assert!(new.connect(&router).await.is_err(), "the old one is shown");
    folder.show(&new.local);
    assert_eq!(new.client(&router).await.get("/health").await.status, 200);
    assert!(old.connect(&router).await.is_err(), "the new one is shown");
    assert_eq!(before.get("/health").await.status, 200, "who is connected stays");
    for bad in ["no certificate", ""] {
        folder.write("cert.pem", bad);
        assert_eq!(new.client(&router).await.get("/health").await.status, 200);
    }
    folder.write("cert.pem", old.local.cert);
    assert_eq!(new.client(&router).await.get("/health").await.status, 200);
    let said = fs::read_to_string(&log).unwrap();
    assert_eq!(said.matches("the certificate before it stays in use").count(), 3, "{said}");
    assert!(said.contains(&folder.path("cert.pem")) && said.contains("no certificate"), "{said}");
}

#[tokio::test]
async fn legs_are_tls_to_instances_that_prove_who_they_are() {
    let (folder, authority) = (PemFolder::new("legs"), TestAuthority::OURS);
    let ca = folder.write("ca.pem", authority.pem);
    let mut router = router(&["--legs-ca".into(), ca]);
    let (p, d) = instances(&mut router).await;
    for it in [&p, &d] {
        it.tls.send_replace(Some(authority.local.acceptor()));
    }
    router.ready(2).await;
    const TIMES: usize = 20;
    let before = [&p, &d].map(|it| it.accepted.load(Ordering::Relaxed));
    for _ in 0..TIMES {
        assert_eq!(router.ask().await.status, 200);
    }
    let streamed = router.post("/v1/completions", &streaming()).await;
    assert_eq!(streamed.events().last().unwrap(), "[DONE]", "{streamed:?}");
    assert_eq!(router.get("/v1/models").await.status, 200);
    // One for all requests, unless the machine is slow.
    for (it, before) in [&p, &d].into_iter().zip(before) {
        assert_eq!(it.seen().len(), TIMES + 1);
        let accepted = it.accepted.load(Ordering::Relaxed) - before;
        assert!(accepted < TIMES, "{accepted} connections for {TIMES} requests");
    }
    // A certificate of somebody else.
    let other = TestAuthority::OTHER;
    d.tls.send_replace(Some(other.local.acceptor()));
    let refused = router.ask().await;
    assert_eq!(refused.status, 502, "{refused:?}");
    let why = refused.error();
    assert!(why.starts_with("the decode instance: ") && why.contains("certificate"), "{why}");
    assert!(!why.contains(&d.http), "{why}");
    assert!(why.contains("UnknownIssuer") && why.contains("--legs-ca"), "{why}");
    assert_eq!(d.seen().len(), TIMES + 1, "it got no request");
}

#[tokio::test]
async fn an_instance_of_unknown_authority_gets_nothing_until_that_is_in_the_file() {
    let folder = PemFolder::new("authority");
    let (ours, others) = (TestAuthority::OURS, TestAuthority::OTHER);
    let ca = folder.write("ca.pem", others.pem);
    let mut router = router(&["--legs-ca".into(), ca, "--queue-timeout".into(), "0.001".into()]);
    let (p, d) = instances(&mut router).await;
    for it in [&p, &d] {
        it.tls.send_replace(Some(ours.local.acceptor()));
    }
    unreachable(&router, "UnknownIssuer; --legs-ca has no authority that signed it").await;
    let refused = router.ask().await;
    assert_eq!(refused.status, 503);
    assert!(refused.error().contains("/workers"), "{refused:?}");
    assert!(p.seen().is_empty() && d.seen().is_empty());
    // A bad file is not taken, a good one at once.
    folder.write("ca.pem", "none");
    folder.write("ca.pem", &[others.pem, ours.pem].concat());
    router.ready(2).await;
    assert_eq!(router.ask().await.status, 200);
    assert!(router.workers().await.iter().all(|it| it["unreachable"].is_null()));
}

#[tokio::test]
async fn a_certificate_for_another_host_is_not_taken() {
    let (folder, authority) = (PemFolder::new("names"), TestAuthority::OURS);
    let ca = folder.write("ca.pem", authority.pem);
    let mut router = router(&["--legs-ca".into(), ca]);
    let (p, d) = instances(&mut router).await;
    for it in [&p, &d] {
        it.tls.send_replace(Some(OTHER_NAME.acceptor()));
    }
    unreachable(&router, "not valid for name \"127.0.0.1\"").await;
    unreachable(&router, "decode.example").await;
    unreachable(&router, "subjectAltName").await;
    assert!(p.health.lock().unwrap().1.is_empty(), "nobody was asked");
}

#[tokio::test]
async fn what_is_wrong_with_a_certificate_is_logged_once_however_often_it_is_tried() {
    let (folder, authority) = (PemFolder::new("expired"), TestAuthority::OURS);
    let ca = folder.write("ca.pem", authority.pem);
    let log = folder.path("log");
    let stderr = fs::File::create(&log).unwrap();
    let mut router = TestRouter::start_with(&["--legs-ca", &ca], |command| {
        command.stderr(stderr);
    });
    let d = StubInstance::start(Role::Decode).await;
    d.tls.send_replace(Some(EXPIRED.acceptor()));
    router.register(&d, &HeartbeatFields::of(Mode::Push));
    let tried = |_: &[serde_json::Value]| d.accepted.load(Ordering::Relaxed) >= 5;
    router.until("it is tried again", tried).await;
    let why = router.workers().await[0]["unreachable"].as_str().unwrap().to_owned();
    assert!(why.contains("it expired at Unix time 999993600; renew it"), "{why}");
    let said = fs::read_to_string(&log).unwrap();
    assert_eq!(said.matches("an instance is not verified").count(), 1, "{said}");
}

#[tokio::test]
async fn an_instance_without_tls_is_not_asked_without_it() {
    let (folder, authority) = (PemFolder::new("fallback"), TestAuthority::OURS);
    let ca = folder.write("ca.pem", authority.pem);
    let mut router = router(&["--legs-ca".into(), ca, "--queue-timeout".into(), "0.001".into()]);
    let (p, d) = instances(&mut router).await;
    unreachable(&router, "--legs-ca has all instances speak TLS: start vLLM with").await;
    assert_eq!(router.ask().await.status, 503);
    for it in [&p, &d] {
        assert!(it.seen().is_empty() && it.health.lock().unwrap().1.is_empty());
    }
}

/// What a router says that does not start with these flags.
fn refused(flags: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.arg("router");
    for at in ["--listen", "--admin-addr", "--discovery"] {
        command.args([at, "127.0.0.1:0"]);
    }
    command.args(flags).stdin(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A line, or the end.
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    if !line.is_empty() {
        child.kill().unwrap();
    }
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(2), "{flags:?}: {line}");
    String::from_utf8(ended.stderr).unwrap()
}

#[test]
fn files_that_cannot_be_used_end_the_start_with_their_names_and_a_remedy() {
    let (folder, authority) = (PemFolder::new("start"), TestAuthority::OURS);
    let SignedKey { cert, key } = authority.local;
    let (cert, key) = (folder.write("cert.pem", cert), folder.write("key.pem", key));
    let (absent, empty) = (folder.path("absent.pem"), folder.write("empty.pem", ""));
    let broken = folder.write("broken.pem", "-----BEGIN CERTIFICATE-----\n!\n-----END");
    let other = folder.write("other.pem", TestAuthority::OTHER.local.key);
    let open = folder.write("open.pem", &fs::read_to_string(&key).unwrap());
    fs::set_permissions(&open, Permissions::from_mode(0o644)).unwrap();
    let cases: [(&str, &str, &str, &str); 7] = [
        (&absent, &key, &absent, "cannot be read"),
        (&empty, &key, &empty, "no certificate in PEM; give one"),
        (&broken, &key, &broken, "openssl x509"),
        (&cert, &absent, &absent, "cannot be read"),
        (&cert, &cert, &cert, "no private key in PEM; give one"),
        (&cert, &other, &other, "not the key of the certificate"),
        (&cert, &open, &open, "others may read or change it (mode 644); chmod 400 it"),
    ];
    for (cert, key, file, why) in cases {
        let said = refused(&["--tls-cert", cert, "--tls-key", key]);
        assert!(said.contains(file) && said.contains(why), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    for (file, why) in [(&absent, "cannot be read"), (&empty, "no certificate in PEM; give one")] {
        let said = refused(&["--legs-ca", file]);
        assert!(
            said.contains("--legs-ca") && said.contains(&**file) && said.contains(why),
            "{said}"
        );
    }
    assert!(refused(&["--tls-cert", &cert]).contains("--tls-key"));
    assert!(refused(&["--tls-key", &key]).contains("--tls-cert"));
}
