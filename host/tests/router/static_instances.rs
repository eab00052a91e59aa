//! Instances that the operator names: in arguments, in a file, in DNS.

use crate::backend::{Act, HeartbeatFields, StubInstance};
use crate::rig::{PATIENCE, TestRouter, completion, streaming};
use kvferry_engine::core::message::{Mode, Role};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

fn url(instance: &StubInstance) -> String {
    format!("http://{}", instance.http)
}

/// What a source of static instances says of itself.
async fn source(router: &TestRouter, begins: &str) -> Value {
    let told = router.get("/workers").await.json()["static"].clone();
    let all = told.as_array().expect("a list");
    let one = all.iter().find(|it| it["source"].as_str().expect("text").starts_with(begins));
    one.unwrap_or_else(|| panic!("{told}")).clone()
}

/// Waits until a source says why it names nothing new, or that it does again.
async fn until_trouble(router: &TestRouter, begins: &str, wanted: Option<&str>) {
    let start = Instant::now();
    loop {
        let told = source(router, begins).await;
        match (told["error"].as_str(), wanted) {
            (None, None) => return,
            (Some(error), Some(wanted)) if error.contains(wanted) => return,
            _ => assert!(start.elapsed() < PATIENCE, "{told}"),
        }
    }
}

/// Waits until exactly these serve.
async fn serving(router: &TestRouter, wanted: &[&StubInstance]) {
    let mut wanted: Vec<&str> = wanted.iter().map(|it| &*it.http).collect();
    wanted.sort_unstable();
    let are = |all: &[Value]| {
        let mut ready: Vec<&str> = all.iter().filter_map(|it| it["http"].as_str()).collect();
        ready.sort_unstable();
        ready == wanted && all.iter().all(|it| it["state"] == "ready" && it["static"] == true)
    };
    router.until("they serve", are).await;
}

#[tokio::test]
async fn static_pairs_get_the_legs_of_nixl() {
    let (p, d) =
        (StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await);
    let answer = json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[3, 1], []],
        "remote_engine_id": "e\"x", "remote_host": "h", "remote_port": 5600, "tp_size": 4,
        "remote_request_id": "r", "new": {"z": [1.5, null], "a": 18_446_744_073_709_551_615_u64},
    });
    let told = answer.clone();
    p.on(move |_| Some(Act::Json(200, json!({"choices": [], "kv_transfer_params": told}))));
    let mut router = TestRouter::start(&["--prefill", &url(&p), "--decode", &d.http]);
    serving(&router, &[&p, &d]).await;
    assert_eq!(router.get("/readiness").await.status, 200);
    for (nth, body) in [completion(), streaming()].iter().enumerate() {
        assert_eq!(router.post("/v1/completions", body).await.status, 200);
        let [p_leg, d_leg] = [&p.seen()[nth], &d.seen()[nth]];
        let nobody = json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null,
        });
        assert_eq!((p_leg.params(), d_leg.params()), (&nobody, &answer));
        assert_eq!(p_leg.header("x-request-id"), d_leg.header("x-request-id"));
        assert_eq!((&p_leg.body["max_tokens"], &p_leg.body["min_tokens"]), (&json!(1), &json!(1)));
        assert_eq!((&p_leg.body["stream"], &d_leg.body["max_tokens"]), (&json!(false), &json!(5)));
        assert_eq!([p_leg, d_leg].map(|leg| leg.header("x-data-parallel-rank")), ["", ""]);
    }
    // What the prefill does not hand over, the decode computes.
    for (nth, answer) in
        [json!({"choices": []}), json!({"kv_transfer_params": null})].into_iter().enumerate()
    {
        p.always(Act::Json(200, answer));
        assert_eq!(router.ask().await.status, 200);
        assert!(d.seen()[2 + nth].body.get("kv_transfer_params").is_none());
    }
    assert_eq!(router.metric("kvferry_router_unread_prefills_total").await, 2);
    p.always(Act::Json(200, json!({"kv_transfer_params": ["no object"]})));
    let refused = router.ask().await;
    assert_eq!((refused.status, d.seen().len()), (502, 4), "{refused:?}");
    // Others that read are of another dialect.
    let other = StubInstance::start(Role::Decode).await;
    router.register(&other, &HeartbeatFields::of(Mode::Pull));
    router.ready(3).await;
    let mut alone = TestRouter::start(&["--prefill", &url(&p)]);
    alone.register(&other, &HeartbeatFields::of(Mode::Pull));
    alone.ready(2).await;
    assert_eq!(alone.get("/readiness").await.status, 503);
}

#[tokio::test]
async fn a_static_instance_that_died_is_asked_until_it_answers() {
    let p = StubInstance::start(Role::Prefill).await;
    let (mut one, two) =
        (StubInstance::start(Role::Decode).await, StubInstance::start(Role::Decode).await);
    let urls = [&p, &one, &two].map(url);
    let options = ["--prefill", &urls[0], "--decode", &urls[1], "--decode", &urls[2]];
    let router = TestRouter::start(&options);
    serving(&router, &[&p, &one, &two]).await;
    one.die();
    let start = Instant::now();
    let is_out = |all: &[Value]| all.iter().any(|it| it["state"] == "unproven");
    while !is_out(&router.workers().await) {
        assert_eq!(router.ask().await.status, 200);
        assert!(start.elapsed() < PATIENCE);
    }
    for _ in 0..4 {
        assert_eq!(router.ask().await.status, 200);
    }
    assert!(is_out(&router.workers().await), "it takes no legs");
    let again = StubInstance::start_at(Role::Decode, &one.http).await.unwrap();
    serving(&router, &[&p, &again, &two]).await;
    while again.seen().is_empty() {
        assert_eq!(router.ask().await.status, 200);
        assert!(start.elapsed() < PATIENCE);
    }
}

/// A file that is gone with the test.
struct TestFile(PathBuf);

impl TestFile {
    fn new(ending: &str, text: &str) -> TestFile {
        let name = format!("kvferry-static-{}-{ending}", std::process::id());
        let file = TestFile(std::env::temp_dir().join(name));
        file.write(text);
        file
    }

    /// Replaces it, as Kubernetes does.
    fn write(&self, text: &str) {
        let next = self.0.with_extension("next");
        std::fs::write(&next, text).unwrap();
        std::fs::rename(&next, &self.0).unwrap();
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for TestFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[tokio::test]
async fn a_file_is_read_anew_and_a_broken_one_changes_nothing() {
    let p = StubInstance::start(Role::Prefill).await;
    let (one, two) =
        (StubInstance::start(Role::Decode).await, StubInstance::start(Role::Decode).await);
    let toml = |decode: &StubInstance| {
        format!("prefill = [\"{}\"]\ndecode = [\"{}\"]\n", url(&p), url(decode))
    };
    let file = TestFile::new("anew.toml", &toml(&one));
    let router = TestRouter::start(&["--static-instances", file.path()]);
    serving(&router, &[&p, &one]).await;
    file.write(&toml(&two));
    serving(&router, &[&p, &two]).await;
    assert_eq!(router.ask().await.status, 200);
    assert_eq!((one.seen().len(), two.seen().len()), (0, 1));
    let up =
        format!("kvferry_router_static_source_up{{source=\"--static-instances {}\"}}", file.path());
    assert_eq!(router.metric(&up).await, 1);
    for (text, says) in [
        ("prefill = [", "lists `prefill` and `decode`"),
        ("prefil = []", "unknown field `prefil`"),
        ("prefill = [\"ftp://x:1\"]", "ftp://x:1: scheme ftp"),
    ] {
        file.write(text);
        until_trouble(&router, "--static-instances", Some(says)).await;
        assert_eq!(router.metric(&up).await, 0);
    }
    std::fs::remove_file(&file.0).unwrap();
    until_trouble(&router, "--static-instances", Some("cannot be read")).await;
    serving(&router, &[&p, &two]).await;
    assert_eq!(router.ask().await.status, 200);
    file.write(&toml(&one));
    until_trouble(&router, "--static-instances", None).await;
    serving(&router, &[&p, &one]).await;
    let json = json!({"prefill": [url(&p)], "decode": [url(&two)]}).to_string();
    let file = TestFile::new("one.json", &json);
    let router = TestRouter::start(&["--static-instances", file.path()]);
    serving(&router, &[&p, &two]).await;
}

#[tokio::test]
async fn instances_of_a_name_serve() {
    let p = StubInstance::start(Role::Prefill).await;
    let d = StubInstance::start(Role::Decode).await;
    let port = d.http.rsplit_once(':').unwrap().1;
    // It has more than one address where there is IPv6.
    let name = format!("localhost:{port}");
    let router = TestRouter::start(&["--prefill", &url(&p), "--decode-dns", &name]);
    let serves = |all: &[Value]| {
        all.iter().any(|it| it["http"] == d.http.as_str() && it["state"] == "ready")
    };
    router.until("it serves", serves).await;
    assert_eq!(router.ask().await.status, 200);
    assert_eq!(d.seen().len(), 1);
    assert_eq!(source(&router, "--decode-dns").await["error"], Value::Null);
}

#[test]
fn what_names_nobody_ends_the_start_with_one_error() {
    let bad = TestFile::new("bad.toml", "prefill = 1");
    for (option, value, says) in [
        ("--prefill", "http://p", "starts"),
        ("--prefill", "ftp://p:1", "scheme ftp"),
        ("--decode", "https://d:1", "--legs-ca FILE"),
        ("--static-instances", "/no/such/file", "cannot be read"),
        ("--static-instances", bad.path(), "lists `prefill` and `decode`"),
        ("--prefill-dns", "name", "give NAME:PORT"),
        ("--dns-period", "0", "give 0.001"),
    ] {
        if says == "starts" {
            drop(TestRouter::start(&[option, value]));
            continue;
        }
        let mut program = Command::new(env!("CARGO_BIN_EXE_kvferry"));
        program.arg("router").args([option, value]);
        for own in ["--discovery", "--listen", "--admin-addr"] {
            program.args([own, "127.0.0.1:0"]);
        }
        let ended = program.output().unwrap();
        let err = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(2), "{option} {value}: {err}");
        assert!(err.contains(option) && err.contains(value) && err.contains(says), "{err}");
    }
}
