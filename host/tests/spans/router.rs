//! What a router says in headers, and what it tells of requests.

use crate::backend::{Act, ReceivedLeg, StubInstance};
use crate::collector::{CollectorActs, StubCollector};
use crate::rig::{TestResponse, TestRouter, completion, pair, streaming};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::header::HeaderValue;
use kvferry_engine::core::message::Mode;
use std::sync::{Arc, Mutex};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SPAN: &str = "00f067aa0ba902b7";

async fn traced(collector: &StubCollector) -> (TestRouter, StubInstance, StubInstance) {
    pair(Mode::Push, &["--otlp-endpoint", &collector.url]).await
}

fn with(router: &TestRouter, headers: &[(&'static str, &str)]) -> Request<Full<Bytes>> {
    let mut request = router.request("/v1/completions", completion().to_string());
    for (name, value) in headers {
        request.headers_mut().append(*name, HeaderValue::from_str(value).expect("a value"));
    }
    request
}

/// The legs of a request with these headers.
async fn legs(
    (router, p, d): &(TestRouter, StubInstance, StubInstance),
    headers: &[(&'static str, &str)],
) -> [ReceivedLeg; 2] {
    let response = TestRouter::read(router.call(with(router, headers)).await).await;
    assert_eq!(response.status, 200, "{response:?}");
    [p, d].map(|side| side.seen().pop().expect("a leg"))
}

/// Trace, span and flags.
fn fields(leg: &ReceivedLeg) -> (String, String, String) {
    let parent = leg.header("traceparent");
    let fields: Vec<_> = parent.split('-').map(str::to_owned).collect();
    let [version, trace, span, flags] = &fields[..] else { panic!("{parent:?}") };
    assert_eq!((&**version, trace.len(), span.len()), ("00", 32, 16), "{parent}");
    (trace.clone(), span.clone(), flags.clone())
}

#[tokio::test]
async fn without_a_collector_headers_pass_as_they_are() {
    let pair = pair(Mode::Push, &[]).await;
    let parent = format!("00-{TRACE}-{SPAN}-01");
    for parent in [&*parent, "no parent"] {
        let headers =
            [("traceparent", parent), ("tracestate", "a=1"), ("b3", "0"), ("baggage", "x=y")];
        for leg in legs(&pair, &headers).await {
            for (name, value) in headers {
                assert_eq!(leg.header(name), value, "{name}");
            }
        }
    }
    for leg in legs(&pair, &[]).await {
        assert!(leg.header("traceparent").is_empty());
        assert_eq!(leg.params().get("traceparent"), None);
    }
    assert!(!pair.0.get("/metrics").await.body.contains("_spans_"));
}

#[tokio::test]
async fn the_trace_of_a_client_goes_on_and_a_wrong_one_does_not() {
    let collector = StubCollector::start(CollectorActs::Takes);
    let pair = traced(&collector).await;
    let parent = format!("00-{TRACE}-{SPAN}-01");
    let more = format!("{parent}-more");
    let rows: [(&[_], bool); 4] = [
        (&[("traceparent", &*parent), ("tracestate", "a=1,b=2"), ("baggage", "x=y")], true),
        (&[], false),
        (&[("traceparent", &*more), ("tracestate", "a=1")], false),
        (&[("traceparent", &*parent), ("traceparent", &*parent)], false),
    ];
    for (nth, (headers, goes_on)) in rows.into_iter().enumerate() {
        let sent = legs(&pair, headers).await;
        let spans = collector.spans(3 * (nth + 1)).split_off(3 * nth);
        let request = spans.iter().find(|it| it.name == "request").expect("a request");
        let is_below = (&*request.trace, &*request.parent) == (TRACE, SPAN);
        assert_eq!(is_below, goes_on, "{headers:?} {request:?}");
        assert_eq!(request.parent.is_empty(), !goes_on, "{request:?}");
        for (leg, name) in sent.iter().zip(["prefill leg", "decode leg"]) {
            let span = spans.iter().find(|it| it.name == name).expect("a leg");
            let expected = (request.trace.clone(), span.id.clone(), "01".to_owned());
            assert_eq!((fields(leg), &span.parent), (expected, &request.id));
            assert_eq!(leg.params()["traceparent"], leg.header("traceparent"));
            let state = if goes_on { "a=1,b=2" } else { "" };
            assert_eq!(leg.header("tracestate"), state);
        }
    }
}

/// What its client does not sample is not sent, and instances hear the same.
#[tokio::test]
async fn a_trace_that_is_not_sampled_is_not_sent() {
    let collector = StubCollector::start(CollectorActs::Takes);
    let pair = traced(&collector).await;
    for flags in ["00", "01"] {
        let parent = format!("00-{TRACE}-{SPAN}-{flags}");
        for leg in legs(&pair, &[("traceparent", &parent)]).await {
            let (trace, span, told) = fields(&leg);
            assert_eq!((&*trace, &*told), (TRACE, flags));
            assert_ne!(span, SPAN);
        }
    }
    assert_eq!(pair.0.get("/metrics").await.body.matches("spans_dropped_total{").count(), 0);
    pair.0.signal("-TERM");
    assert_eq!(pair.0.exit(), Some(0));
    assert_eq!(collector.spans(3).len(), 3);
}

#[tokio::test]
async fn what_is_queued_is_sent_at_the_end() {
    let collector = StubCollector::start(CollectorActs::Takes);
    let options = ["--otlp-endpoint", &*collector.url];
    let hourly = |command: &mut std::process::Command| {
        command.env("OTEL_BSP_SCHEDULE_DELAY", "3600000").env("OTEL_SERVICE_NAME", "mine");
    };
    let router = TestRouter::start_with(&options, hourly);
    let refused: TestResponse = router.post("/v1/completions", &serde_json::json!({})).await;
    assert_eq!(refused.status, 400);
    router.signal("-TERM");
    assert_eq!(router.exit(), Some(0));
    let spans = collector.spans(1);
    assert_eq!((spans.len(), &*spans[0].service, spans[0].outcome()), (1, "mine", "refused"));
    assert_eq!(spans[0].attribute("http.response.status_code"), "400");
}

#[tokio::test]
async fn a_client_that_goes_has_a_request_that_was_cancelled() {
    let collector = StubCollector::start(CollectorActs::Takes);
    let (router, _p, d) = traced(&collector).await;
    let (tokens, receiver) = tokio::sync::mpsc::unbounded_channel();
    d.always(Act::Fed(Arc::new(Mutex::new(Some(receiver)))));
    tokens.send("data: {}\n\n".to_owned()).expect("it is fed");
    let mut answer = router.call(router.request("/v1/completions", streaming().to_string())).await;
    answer.body_mut().frame().await.expect("a frame").expect("of the stream");
    drop(answer);
    let until = move || {
        collector.until("all of it", |spans| {
            let has = |name| spans.iter().any(|span| span.name == name);
            has("request") && has("decode leg")
        })
    };
    // The runtime of the test has a connection to close.
    let spans = tokio::task::spawn_blocking(until).await.expect("no panic");
    for span in spans.iter().filter(|span| span.name != "prefill leg") {
        assert_eq!((span.outcome(), &*span.events), ("cancelled", &["first_token".to_owned()][..]));
    }
}

#[tokio::test]
async fn a_stream_that_breaks_off_is_a_request_that_failed() {
    let collector = StubCollector::start(CollectorActs::Takes);
    let (router, _p, d) = traced(&collector).await;
    d.always(Act::Broken(vec!["data: {}\n\n".into()]));
    let answer = router.post("/v1/completions", &streaming()).await;
    assert_eq!(answer.status, 200);
    let spans = collector.spans(3);
    for name in ["request", "decode leg"] {
        let span = spans.iter().find(|span| span.name == name).expect("a span");
        assert_eq!(span.outcome(), "failed", "{span:?}");
        assert!(span.error.is_some(), "{span:?}");
    }
}
