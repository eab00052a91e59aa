//! Who is believed at the router's discovery socket where there is a secret.

use crate::backend::{HeartbeatFields, StubInstance, frame};
use crate::network::{LoggedInstance, reached_by_others, serve_as};
use crate::program::ProgramFolder;
use crate::rig::{PATIENCE, TestRouter};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::{Mode, Registration, Role};
use serde_json::Value;
use std::fs::{Permissions, set_permissions};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, Mutex};
use std::time::Instant;

const OURS: &str = "0123456789abcdef0123456789abcdef";
const THEIRS: &str = "fedcba9876543210fedcba9876543210";

fn secret(folder: &ProgramFolder, name: &str, text: &str) -> String {
    let path = folder.write(name, text);
    set_permissions(&path, Permissions::from_mode(0o400)).expect("its mode");
    path
}

/// An instance that registers at `discovery`.
fn registered(role: &str, discovery: &str, more: &[&str]) -> LoggedInstance {
    let at = discovery.strip_prefix("tcp://").expect("a TCP endpoint");
    serve_as(role, "127.0.0.1", &[&["--proxy", at], more].concat())
}

/// Waits until a registration was turned down for this reason; of whom, and why.
async fn turned_down(router: &TestRouter, reason: &str) -> (String, String) {
    let start = Instant::now();
    loop {
        let rejected = router.get("/registrations/rejected").await.json();
        let all = rejected["last"].as_array().unwrap();
        if let Some(found) = all.iter().find(|it| it["reason"] == reason) {
            let text = |key: &str| found[key].as_str().unwrap().to_owned();
            return (text("from"), text("why"));
        }
        assert!(start.elapsed() < PATIENCE, "{reason}: {rejected}");
    }
}

/// Waits for a line of an instance.
fn logged(instance: &LoggedInstance, said: &str) {
    while !instance.2.recv().expect("it goes on").contains(said) {}
}

/// A registration that anybody can make up.
fn made_up(engine: &str, role: Role, http: &str) -> Vec<u8> {
    let control = "tcp://127.0.0.1:6301".into();
    let newest = Incarnation(1 << 60);
    let native = Registration {
        sequence: 1 << 60,
        ..Registration::new(engine.into(), newest, role, Mode::Push, http.into(), control)
    };
    frame(role, http, &HeartbeatFields { native: Some(native), ..HeartbeatFields::of(Mode::Push) })
}

#[tokio::test]
async fn a_fleet_that_signs_is_served_and_others_are_named() {
    let folder = ProgramFolder::new("signed-fleet");
    let ours = secret(&folder, "ours", OURS);
    let mut router = TestRouter::start(&["--secret-file", &ours, "--require-signed"]);
    let known = ["--secret-file", &*ours];
    let _fleet = ["prefill", "decode"].map(|role| registered(role, &router.discovery, &known));
    router.ready(2).await;
    let stranger = StubInstance::start(Role::Prefill).await;
    router.register(&stranger, &HeartbeatFields::of(Mode::Push));
    router.send(vec![vec![made_up("evil", Role::Decode, "127.0.0.1:9")]]);
    let (from, why) = turned_down(&router, "not signed").await;
    assert!(from == stranger.http || from == "127.0.0.1:9", "{from}: {why}");
    router.ready(2).await;
    assert!(stranger.seen().is_empty());
    let name = "kvferry_router_registrations_rejected_total{reason=\"not signed\"}";
    assert!(router.metric(name).await >= 1);
}

#[tokio::test]
async fn who_knows_another_secret_or_none_is_refused_on_both_sides() {
    let folder = ProgramFolder::new("signed-refused");
    let (ours, theirs) = (secret(&folder, "ours", OURS), secret(&folder, "theirs", THEIRS));
    let router = TestRouter::start(&["--secret-file", &ours, "--require-signed"]);
    let other = registered("prefill", &router.discovery, &["--secret-file", &theirs]);
    let (_, why) = turned_down(&router, "wrong signature").await;
    assert!(why.contains("different secrets"), "{why}");
    logged(&other, "the router says: the two sides have different secrets");
    let none = registered("decode", &router.discovery, &[]);
    turned_down(&router, "not signed").await;
    logged(&none, "the router says: a proof of the fleet's secret is demanded here");
    assert!(router.workers().await.is_empty());
}

#[tokio::test]
async fn both_secrets_are_taken_while_they_are_changed() {
    let folder = ProgramFolder::new("signed-rotated");
    let both = secret(&folder, "both", &format!("{OURS}\n{THEIRS}\n"));
    let router = TestRouter::start(&["--secret-file", &both, "--require-signed"]);
    let files = [secret(&folder, "ours", OURS), secret(&folder, "theirs", THEIRS)];
    let _fleet = [("prefill", &files[0]), ("decode", &files[1])]
        .map(|(role, file)| registered(role, &router.discovery, &["--secret-file", file]));
    router.ready(2).await;
}

/// The name and the HTTP address of an instance are public.
#[tokio::test]
async fn what_is_signed_is_not_replaced_by_what_is_not() {
    let folder = ProgramFolder::new("signed-kept");
    let ours = secret(&folder, "ours", OURS);
    let mut router = TestRouter::start(&["--secret-file", &ours, "--allow-unsigned"]);
    // Who is there before is no obstacle, whatever it says of itself.
    let _p = registered("prefill", &router.discovery, &["--secret-file", &ours]);
    router.ready(1).await;
    let before = router.workers().await.remove(0);
    let text = |key: &str| before[key].as_str().unwrap().to_owned();
    let (engine, http) = (text("engine"), text("http"));
    for name in [&*engine, "evil"] {
        router.send(vec![vec![made_up(name, Role::Prefill, &http)]]);
        let (from, _) = turned_down(&router, "not signed, and a signed instance is there").await;
        assert_eq!(from, http);
        router.hush();
    }
    let after = router.workers().await;
    assert_eq!(after.len(), 1, "{after:?}");
    assert_eq!((&after[0]["engine"], &after[0]["state"]), (&before["engine"], &"ready".into()));
    assert_eq!(router.metric("kvferry_router_replaced_total").await, 0);
}

/// Passes on what is said between an instance and the router, and keeps what the instance says.
fn overhear(router: &str) -> (String, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = format!("tcp://{}", listener.local_addr().expect("bound"));
    let (router, heard) = (router.to_owned(), Arc::<Mutex<Vec<u8>>>::default());
    let kept = heard.clone();
    std::thread::spawn(move || {
        let (mut near, _) = listener.accept().expect("an instance");
        let mut far = TcpStream::connect(router).expect("the router listens");
        let (mut back, mut to_near) =
            (far.try_clone().expect("a descriptor"), near.try_clone().expect("a descriptor"));
        std::thread::spawn(move || std::io::copy(&mut back, &mut to_near));
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = near.read(&mut bytes) {
            kept.lock().expect("no panic").extend_from_slice(&bytes[..count]);
            far.write_all(&bytes[..count]).expect("the router reads");
        }
        let _gone = far.shutdown(Shutdown::Both);
    });
    (at, heard)
}

#[tokio::test]
async fn what_was_overheard_registers_nobody() {
    let folder = ProgramFolder::new("signed-replayed");
    let ours = secret(&folder, "ours", OURS);
    let router = TestRouter::start(&["--secret-file", &ours, "--require-signed", "--expiry", "2"]);
    let at = router.discovery.strip_prefix("tcp://").expect("TCP").to_owned();
    let (relay, heard) = overhear(&at);
    let instance = registered("prefill", &relay, &["--secret-file", &ours]);
    router.until("it is there", |workers| workers.len() == 1).await;
    drop(instance);
    router.until("it has left", <[Value]>::is_empty).await;
    let bytes = heard.lock().expect("no panic").clone();
    assert!(bytes.windows(13).any(|text| text == b"kvferry_proof"), "nothing was signed");
    let mut stranger = TcpStream::connect(&at).expect("the router listens");
    stranger.write_all(&bytes).expect("it reads");
    turned_down(&router, "wrong signature").await;
    assert!(router.workers().await.is_empty());
}

#[tokio::test]
async fn the_key_of_the_operator_goes_to_who_is_signed() {
    let Some(own) = reached_by_others() else { return };
    let folder = ProgramFolder::new("signed-key");
    let ours = secret(&folder, "ours", OURS);
    let mut router = TestRouter::start_with(&["--secret-file", &ours], |command| {
        command.env("OPENAI_API_KEY", "ours");
    });
    router.send(vec![vec![made_up("evil", Role::Prefill, &format!("{own}:9"))]]);
    turned_down(&router, "not signed").await;
    // Nor one at loopback.
    router.send(vec![vec![made_up("near", Role::Prefill, "127.0.0.1:9")]]);
    let near = |all: &[Value]| all.iter().any(|it| it["from"] == "127.0.0.1:9");
    let start = std::time::Instant::now();
    while !near(router.get("/registrations/rejected").await.json()["last"].as_array().unwrap()) {
        assert!(start.elapsed() < PATIENCE, "it is not refused");
    }
    let at = router.discovery.strip_prefix("tcp://").expect("TCP").to_owned();
    let _p = serve_as("prefill", &own, &["--proxy", &at, "--secret-file", &ours]);
    router.ready(1).await;
}

/// With a secret, unsigned instances get no requests unless a flag allows it.
#[tokio::test]
async fn secret_implies_signed_registrations() {
    let folder = ProgramFolder::new("signed-implied");
    let ours = secret(&folder, "ours", OURS);
    let mut router = TestRouter::start(&["--secret-file", &ours]);
    router.send(vec![vec![made_up("evil", Role::Prefill, "127.0.0.1:9")]]);
    turned_down(&router, "not signed").await;
    assert!(router.workers().await.is_empty());
    let mut router = TestRouter::start(&["--secret-file", &ours, "--allow-unsigned"]);
    router.send(vec![vec![made_up("known", Role::Prefill, "127.0.0.1:9")]]);
    router.until("it is there", |workers| workers.len() == 1).await;
}

#[test]
fn signatures_are_not_required_without_a_secret_to_check_them_by() {
    let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_kvferry"));
    program.args(["router", "--require-signed", "--listen", "127.0.0.1:0"]);
    let ended = program.env_remove("KVFERRY_SECRET_FILE").output().expect("the program starts");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(2), "{said}");
    assert!(said.contains("--require-signed") && said.contains("--secret-file"), "{said}");
}
