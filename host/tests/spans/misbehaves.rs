//! Collectors that are gone, slow or hostile cost spans and nothing else.

use crate::collector::{CollectorActs, StubCollector};
use crate::rig::{PATIENCE, TestRouter, pair};
use kvferry_engine::core::message::Mode;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::Instant;

const NOT_EXPORTED: &str = "kvferry_router_spans_dropped_total{cause=\"not_exported\"}";
const QUEUE_FULL: &str = "kvferry_router_spans_dropped_total{cause=\"queue_full\"}";

#[tokio::test]
async fn a_collector_that_never_answers_costs_spans_and_nothing_else() {
    let collector = StubCollector::start(CollectorActs::Silent);
    let options = ["--otlp-endpoint", &*collector.url];
    // It would be waited for longer than a test waits for anything.
    let patient = |command: &mut Command| {
        let variables = [
            ("OTEL_BSP_MAX_QUEUE_SIZE", "8"),
            ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "600000"),
        ];
        command.envs(variables);
    };
    let router = TestRouter::start_with(&options, patient);
    for _ in 0..20 {
        let answer = router.post("/v1/completions", &serde_json::json!({})).await;
        assert_eq!(answer.status, 400);
    }
    assert_eq!(router.metric(QUEUE_FULL).await, 12, "eight wait");
    router.signal("-TERM");
    assert_eq!(router.exit(), Some(0));
}

#[tokio::test]
async fn spans_that_no_collector_takes_are_counted() {
    let gone = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = gone.local_addr().expect("it is bound");
    drop(gone);
    let refuses =
        [400, 429, 503].map(|status| StubCollector::start(CollectorActs::Refuses(status)));
    let babbles = StubCollector::start(CollectorActs::Babbles);
    let mut urls = vec![format!("http://{address}"), babbles.url.clone()];
    urls.extend(refuses.iter().map(|it| it.url.clone()));
    for url in urls {
        let (router, _p, _d) = pair(Mode::Push, &["--otlp-endpoint", &url]).await;
        assert_eq!(router.ask().await.status, 200);
        let start = Instant::now();
        while router.metric(NOT_EXPORTED).await < 3 {
            assert!(start.elapsed() < PATIENCE, "{url}: they are not counted");
        }
        assert_eq!(router.metric("kvferry_router_spans_exported_total").await, 0, "{url}");
        assert_eq!(router.ask().await.status, 200);
    }
}

/// How a router ends that is not to start.
fn refusal(args: &[&str], variables: &[(&str, &str)]) -> String {
    let mut router = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    router.args(["router", "--listen", "127.0.0.1:0", "--admin-addr", "127.0.0.1:0"]);
    router.args(["--discovery", "127.0.0.1:0"]).args(args).envs(variables.iter().copied());
    let mut router =
        router.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let mut line = String::new();
    let out = router.stdout.take().expect("a pipe");
    BufReader::new(out).read_line(&mut line).expect("a pipe can be read");
    if !line.is_empty() {
        router.kill().expect("it runs");
    }
    let output = router.wait_with_output().expect("it ends");
    assert_eq!((&*line, output.status.code()), ("", Some(2)), "{args:?} {variables:?}");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn a_setting_that_cannot_be_used_is_an_error_at_the_start() {
    let told = refusal(&["--otlp-endpoint", "collector:4318"], &[]);
    assert!(told.contains("--otlp-endpoint collector:4318: "), "{told}");
    assert!(told.contains("give the URL"), "{told}");
    let all = "OTEL_EXPORTER_OTLP_ENDPOINT";
    let own = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
    for (endpoint, url, name, value) in [
        (all, "http://h", all, "https://h"),
        (all, "http://h", "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        (own, "http://h/v1/traces", "OTEL_TRACES_SAMPLER", "some"),
        (all, "http://h", "OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        (all, "http://h", "OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
    ] {
        let told = refusal(&[], &[(endpoint, url), (name, value)]);
        assert!(told.contains(&format!("{name} {value}: ")), "{told}");
    }
}
