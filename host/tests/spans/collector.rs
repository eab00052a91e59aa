//! A collector that is played: it takes OTLP over HTTP, or misbehaves.

use crate::rig::PATIENCE;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Instant;

/// A span as the collector got it.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedSpan {
    pub(crate) service: String,
    pub(crate) name: String,
    pub(crate) trace: String,
    pub(crate) id: String,
    /// Empty for one without.
    pub(crate) parent: String,
    pub(crate) attributes: BTreeMap<String, String>,
    pub(crate) events: Vec<String>,
    /// What went wrong, if something did.
    pub(crate) error: Option<String>,
    /// When it began and ended, in nanoseconds since 1970.
    pub(crate) times: (u64, u64),
}

impl ReceivedSpan {
    /// An attribute; nothing if it is not there.
    pub(crate) fn attribute(&self, key: &str) -> &str {
        self.attributes.get(key).map_or("", String::as_str)
    }

    pub(crate) fn outcome(&self) -> &str {
        self.attribute("kvferry.outcome")
    }
}

type ReceivedSpans = Arc<(Mutex<Vec<ReceivedSpan>>, Condvar)>;

/// What a collector does with what it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CollectorActs {
    Takes,
    /// It reads, and answers nothing.
    Silent,
    /// It answers with this status.
    Refuses(u16),
    /// It answers without end.
    Babbles,
}

pub(crate) struct StubCollector {
    pub(crate) url: String,
    spans: ReceivedSpans,
}

impl StubCollector {
    pub(crate) fn start(acts: CollectorActs) -> StubCollector {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("it is bound"));
        let spans = ReceivedSpans::default();
        let kept = spans.clone();
        // It ends with the test.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, kept) = (stream.expect("a connection"), kept.clone());
                thread::spawn(move || serve(stream, acts, &kept));
            }
        });
        StubCollector { url, spans }
    }

    /// What it has, once that is as wanted.
    pub(crate) fn until(
        &self,
        what: &str,
        is_so: impl Fn(&[ReceivedSpan]) -> bool,
    ) -> Vec<ReceivedSpan> {
        let (spans, changed) = &*self.spans;
        let (start, mut spans) = (Instant::now(), spans.lock().expect("no panic"));
        while !is_so(&spans) {
            let left = PATIENCE.checked_sub(start.elapsed());
            let left = left.unwrap_or_else(|| panic!("{what}: {spans:#?}"));
            spans = changed.wait_timeout(spans, left).expect("no panic").0;
        }
        spans.clone()
    }

    /// Waits for so many spans.
    pub(crate) fn spans(&self, count: usize) -> Vec<ReceivedSpan> {
        self.until("spans", |spans| spans.len() >= count)
    }
}

/// Answers requests until the connection ends.
fn serve(stream: TcpStream, acts: CollectorActs, spans: &ReceivedSpans) {
    let mut out = stream.try_clone().expect("a descriptor");
    let mut stream = BufReader::new(stream);
    while let Some(body) = request(&mut stream) {
        let answer = match acts {
            CollectorActs::Silent => continue,
            CollectorActs::Takes => {
                let request = ExportTraceServiceRequest::decode(&body[..]).expect("OTLP");
                let (kept, changed) = &**spans;
                kept.lock().expect("no panic").extend(read(request));
                changed.notify_all();
                "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_owned()
            }
            CollectorActs::Refuses(status) => {
                format!("HTTP/1.1 {status} No\r\nretry-after: 100000\r\ncontent-length: 0\r\n\r\n")
            }
            CollectorActs::Babbles => {
                let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
                let chunk = [b"10000\r\n", &[b'x'; 0x10000][..], b"\r\n"].concat();
                let _ = out.write_all(head);
                while out.write_all(&chunk).is_ok() {}
                return;
            }
        };
        // Who asked may have gone.
        let _ = out.write_all(answer.as_bytes());
    }
}

/// The body of the next request; none if there is none.
fn request(stream: &mut BufReader<TcpStream>) -> Option<Vec<u8>> {
    let (mut line, mut length) = (String::new(), 0);
    if stream.read_line(&mut line).ok()? == 0 {
        return None;
    }
    assert!(line.starts_with("POST /v1/traces "), "{line}");
    loop {
        line.clear();
        stream.read_line(&mut line).ok()?;
        let line = line.trim_end().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().expect("a length");
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    Some(body)
}

fn read(request: ExportTraceServiceRequest) -> Vec<ReceivedSpan> {
    let mut all = Vec::new();
    for resource in request.resource_spans {
        let of = attributes(&resource.resource.expect("a resource").attributes);
        for scope in resource.scope_spans {
            all.extend(scope.spans.into_iter().map(|span| received(&of["service.name"], span)));
        }
    }
    all
}

fn received(service: &str, span: Span) -> ReceivedSpan {
    let status = span.status.unwrap_or_default();
    ReceivedSpan {
        service: service.to_owned(),
        name: span.name,
        trace: hex(&span.trace_id),
        id: hex(&span.span_id),
        parent: hex(&span.parent_span_id),
        attributes: attributes(&span.attributes),
        events: span.events.into_iter().map(|event| event.name).collect(),
        error: (status.code == 2).then_some(status.message),
        times: (span.start_time_unix_nano, span.end_time_unix_nano),
    }
}

fn attributes(list: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |value: &Option<AnyValue>| match value.as_ref().and_then(|it| it.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        other => panic!("neither text nor number: {other:?}"),
    };
    list.iter().map(|pair| (pair.key.clone(), text(&pair.value))).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes everything");
        text
    })
}
