//! One leg: a request to an instance, and what becomes of it.

use super::error::Refusal;
use super::pool::{Pool, Reply};
use super::settings::Limits;
use super::sse;
use crate::told::{self, Heard};
use bytes::Bytes;
use engine::core::error::Failure;
use engine::core::ids::EngineId;
use engine::core::router::LegFailure;
use engine::fabric::Endpoint;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::http::uri::PathAndQuery;
use hyper::{Method, Request, StatusCode};
use memchr::memmem;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::time::Duration;
use tokio::time::timeout;

/// Longest error answer that is kept, in bytes.
const ERROR_MAX: usize = 1 << 20;

/// Why a leg failed.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    /// For the router core.
    pub(crate) failure: LegFailure,
    /// For the client, if nobody else does better.
    pub(crate) refusal: Refusal,
}

impl Fault {
    /// The instance could not be reached, cut the connection, or was silent for too long.
    pub(crate) fn connection(to: &Endpoint, why: &str) -> Fault {
        let message = format!("instance {to}: {why}");
        let refusal = Refusal::new(StatusCode::BAD_GATEWAY, &message);
        Fault { failure: LegFailure::Connection, refusal }
    }

    /// The instance answered that the leg was of no use.
    pub(crate) fn told(heard: Heard, engine: &EngineId) -> Fault {
        let status = StatusCode::BAD_GATEWAY;
        let refusal = Refusal::new(status, &format!("prefill {engine}: {}", heard.why));
        Fault { failure: answered(status, heard.failure), refusal }
    }

    /// The instance answered what is no answer.
    pub(crate) fn nonsense(why: &str) -> Fault {
        let status = StatusCode::BAD_GATEWAY;
        let failure = LegFailure::Answer(status.as_u16());
        Fault { failure, refusal: Refusal::new(status, why) }
    }
}

/// Status and headers of an instance's answer.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
}

/// What became of a leg.
pub(crate) enum News {
    /// The whole answer.
    Whole(Head, Bytes),
    /// The beginning of a stream.
    Begun(Head, Bytes, Reply),
    Failed(Fault),
}

/// What is sent.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) to: Endpoint,
    pub(crate) path: &'static str,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// Whether the answer is handed on as it comes.
    pub(crate) stream: bool,
}

/// Sends a leg and waits for its answer, or for the first bytes of a stream.
pub(crate) async fn run(pool: Pool, order: Order, limits: Limits) -> News {
    let to = order.to.clone();
    match exchange(pool, order, limits).await {
        Ok(news) => news,
        Err(Lost::Fault(fault)) => News::Failed(*fault),
        Err(Lost::Why(why)) => News::Failed(Fault::connection(&to, &why)),
    }
}

enum Lost {
    Fault(Box<Fault>),
    Why(String),
}

impl From<String> for Lost {
    fn from(why: String) -> Lost {
        Lost::Why(why)
    }
}

async fn exchange(pool: Pool, order: Order, limits: Limits) -> Result<News, Lost> {
    let Order { to, path, headers, body, stream } = order;
    let mut request = Request::new(Full::new(body));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = PathAndQuery::from_static(path).into();
    *request.headers_mut() = headers;
    let answer = timeout(limits.answer, pool.send(&to, request)).await;
    let answer = answer.map_err(|_| format!("no answer within {:?}", limits.answer))?;
    let (head, mut body) = answer?.into_parts();
    let head = Head { status: head.status, headers: head.headers };
    if !head.status.is_success() {
        return Err(Lost::Fault(Box::new(refused(head.status, body, limits).await?)));
    }
    if !stream {
        let whole = collect(body, limits.answer_bytes, limits.idle).await?;
        return Ok(News::Whole(head, whole));
    }
    let mut first = Beginning::default();
    while !first.is_whole() {
        let frame = timeout(limits.answer, body.frame()).await;
        let frame = frame.map_err(|_| format!("no token within {:?}", limits.answer))?;
        match frame {
            Some(frame) => {
                if let Ok(more) = frame.map_err(|why| chain(&why))?.into_data() {
                    first.add(more);
                }
            }
            None if first.bytes.is_empty() => {
                return Err(Lost::Why("the stream ended without a token".into()));
            }
            None => break,
        }
    }
    match first.error() {
        Some((status, error)) => Err(Lost::Fault(Box::new(fault(status, error)))),
        None => Ok(News::Begun(head, first.bytes, body)),
    }
}

/// The first bytes of a stream of events, up to the end of the first one that says something:
/// servers that have begun a stream tell in it what they would have answered instead.
#[derive(Default)]
struct Beginning {
    bytes: Bytes,
}

/// Longest beginning that is waited for, in bytes; errors are shorter.
const BEGINNING_MAX: usize = 64 << 10;

impl Beginning {
    fn add(&mut self, more: Bytes) {
        if self.bytes.is_empty() {
            self.bytes = more;
        } else {
            self.bytes = [&self.bytes[..], &more[..]].concat().into();
        }
    }

    /// The data of the first event that has some, if it is whole.
    fn data(&self) -> Option<&[u8]> {
        let mut rest = &self.bytes[..];
        loop {
            let lf = memmem::find(rest, b"\n\n").map(|at| at + 2);
            let crlf = memmem::find(rest, b"\r\n\r\n").map(|at| at + 4);
            let end = [lf, crlf].into_iter().flatten().min()?;
            if let Some(data) = sse::data(&rest[..end]) {
                return Some(data);
            }
            rest = &rest[end..];
        }
    }

    /// True if nothing more is needed to know whether it is an error.
    fn is_whole(&self) -> bool {
        let begins = self.bytes.trim_ascii_start();
        let is_events =
            begins.len() < 5 || begins.starts_with(b"data:") || begins.starts_with(b":");
        !begins.is_empty()
            && (!is_events || self.bytes.len() > BEGINNING_MAX || self.data().is_some())
    }

    /// The status and the words of an error.
    fn error(&self) -> Option<(StatusCode, Bytes)> {
        #[derive(Deserialize)]
        struct Event<'a> {
            #[serde(borrow)]
            error: Option<&'a RawValue>,
        }
        #[derive(Deserialize)]
        struct Error {
            code: Option<u16>,
        }
        let data = self.data()?;
        memmem::find(data, b"\"error\"")?;
        let Event { error } = serde_json::from_slice(data).ok()?;
        let error = error.filter(|error| error.get() != "null")?;
        let told = serde_json::from_str::<Error>(error.get()).ok().and_then(|error| error.code);
        let status = told.and_then(|code| StatusCode::from_u16(code).ok());
        let status = status.filter(|status| status.is_client_error() || status.is_server_error());
        let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Some((status, Bytes::copy_from_slice(data)))
    }
}

async fn refused(status: StatusCode, body: Reply, limits: Limits) -> Result<Fault, String> {
    Ok(fault(status, collect(body, ERROR_MAX, limits.idle).await?))
}

/// What the core is told of a leg that failed with this status and perhaps for this. Of a kind that
/// is unknown here nobody can say whose fault it is, so that it counts as an answer like others.
fn answered(status: StatusCode, told: Option<Failure>) -> LegFailure {
    match told {
        None | Some(Failure::Unknown(_)) => LegFailure::Answer(status.as_u16()),
        Some(failure) => LegFailure::Instance(failure),
    }
}

/// What an instance's error says. An instance of our own tells what is behind it.
fn fault(status: StatusCode, body: Bytes) -> Fault {
    let failure = match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => LegFailure::Busy,
        status if status.is_client_error() => LegFailure::Request(status.as_str().into()),
        status => answered(status, told::heard(&body).and_then(|heard| heard.failure)),
    };
    Fault { failure, refusal: Refusal::relayed(status, body) }
}

/// All of a body; silence between its parts and its length are bounded.
pub(crate) async fn collect<B>(body: B, bytes: usize, idle: Duration) -> Result<Bytes, String>
where
    B: hyper::body::Body<Data = Bytes> + Unpin,
    B::Error: std::error::Error + Send + Sync + 'static,
{
    let whole = timeout(idle, Limited::new(body, bytes).collect()).await;
    let whole = whole.map_err(|_| format!("the answer took longer than {idle:?}"))?;
    Ok(whole.map_err(|why| chain(&*why))?.to_bytes())
}

/// An error and what it is due to, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(why) = cause {
        text += ": ";
        text += &why.to_string();
        cause = why.source();
    }
    text
}

/// Headers of a client that legs carry on, beside its authorization.
pub(crate) const TRACE: [HeaderName; 6] = [
    HeaderName::from_static("traceparent"),
    HeaderName::from_static("tracestate"),
    HeaderName::from_static("baggage"),
    HeaderName::from_static("b3"),
    HeaderName::from_static("x-b3-traceid"),
    HeaderName::from_static("x-b3-spanid"),
];

/// The id that both legs of a transfer carry.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The DP rank that a leg is for.
pub(crate) const DP_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// `application/json`.
pub(crate) const JSON: HeaderValue = HeaderValue::from_static("application/json");

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(parts: &[&'static str]) -> (usize, Option<(u16, String)>) {
        let mut first = Beginning::default();
        let mut taken = 0;
        for part in parts {
            if first.is_whole() {
                break;
            }
            first.add(Bytes::from_static(part.as_bytes()));
            taken += 1;
        }
        let error = first.error();
        (taken, error.map(|(status, _)| (status.as_u16(), "error".into())))
    }

    #[test]
    fn a_failure_of_an_unknown_kind_is_an_answer_like_others() {
        for (told, failure) in [
            (r#""Stalled""#, LegFailure::Instance(Failure::Stalled)),
            (r#""NextYears""#, LegFailure::Answer(502)),
            ("null", LegFailure::Answer(502)),
        ] {
            let failed = format!(r#"{{"failed":{{"cause":"c","why":"w","failure":{told}}}}}"#);
            let answer = format!(r#"{{"kvferry":{failed}}}"#);
            let heard = told::heard(answer.as_bytes()).expect("it is told");
            assert_eq!(Fault::told(heard, &"p0".into()).failure, failure, "{told}");
            let error = format!(r#"{{"error":{answer}}}"#);
            assert_eq!(fault(StatusCode::BAD_GATEWAY, error.into()).failure, failure, "{told}");
        }
    }

    #[test]
    fn a_stream_that_begins_with_an_error_is_one() {
        let error = |status: u16| Some((status, "error".to_string()));
        let whole = "data: {\"error\": {\"message\": \"m\", \"code\": 503}}\n\n";
        assert_eq!(begin(&[whole, "data: [DONE]\n\n"]), (1, error(503)));
        let cut = ["data: {\"err", "or\": {\"message\": \"m\"}}", "\n\n", "data: [DONE]\n\n"];
        assert_eq!(begin(&cut), (3, error(500)));
        assert_eq!(begin(&[": ping\n\n", "\n", whole]), (3, error(503)));
        let odd = "data: {\"error\": {\"code\": 200}}\r\n\r\n";
        assert_eq!(begin(&[odd]), (1, error(500)));
    }

    #[test]
    fn a_stream_that_begins_with_a_token_is_not_held_back() {
        let token = "data: {\"choices\": [{\"text\": \"\\\"error\\\"\"}], \"error\": null}\n\n";
        assert_eq!(begin(&[token, "more"]), (1, None));
        assert_eq!(begin(&["not json", "more"]), (1, None));
        assert_eq!(begin(&["{\"error\": 1}", "more"]), (1, None));
        let mut first = Beginning::default();
        first.add(vec![b':'; BEGINNING_MAX + 1].into());
        assert!(first.is_whole() && first.error().is_none());
    }
}
