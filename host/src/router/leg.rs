//! One leg: a request to an instance, and what becomes of it.

use super::args::HttpLimits;
use super::body_chain::BodyChain;
use super::client_words;
use super::error::{HttpError, RELAYED_MAX};
use super::memory_budget::{ByteCollector, ChargedBytes, MemoryCharge, MemoryRefusal};
use super::pool::{ConnectionPool, PooledBody, chain};
use super::retry_after::retry_after;
use super::sse;
use crate::instance::{ReportedFailure, find_failure};
use crate::needle::Needle;
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Limited};
use hyper::body::Body as _;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::http::uri::PathAndQuery;
use hyper::{Method, Request, StatusCode};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::Role;
use kvferry_engine::core::router::LegFailure;
use kvferry_engine::fabric::Endpoint;
use memchr::memmem;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::time::timeout;

/// Longest error answer that is kept, in bytes.
const ERROR_MAX: usize = RELAYED_MAX;

/// Why a leg failed.
#[derive(Clone, Debug)]
pub(crate) struct LegError {
    /// For the router core.
    pub(crate) failure: LegFailure,
    /// For the client, if nobody else does better.
    pub(crate) refusal: HttpError,
    /// True if the instance answered with an error that does not say why, as vLLM does where KV did
    /// not come.
    pub(crate) lacks_cause: bool,
}

impl LegError {
    /// The instance could not be reached, cut the connection, or was silent for too long.
    pub(crate) fn connection(role: Role, why: &str) -> LegError {
        let message = client_words::at_instance(role, why);
        LegError::new(LegFailure::Connection, HttpError::new(StatusCode::BAD_GATEWAY, &message))
    }

    /// The prefill answered that the leg was of no use.
    pub(crate) fn from_reported(heard: ReportedFailure) -> LegError {
        let status = StatusCode::BAD_GATEWAY;
        let refusal = reported(Role::Prefill, status, &heard);
        LegError::new(answered(status, heard.failure), refusal)
    }

    fn new(failure: LegFailure, refusal: HttpError) -> LegError {
        LegError { failure, refusal, lacks_cause: false }
    }

    /// The same error with the reason that the host of the instance has told.
    pub(crate) fn caused_by(self, role: Role, failure: Failure) -> LegError {
        let refusal = kv_failed(role, self.refusal.status, &failure);
        LegError::new(LegFailure::Instance(failure), refusal)
    }

    /// The same error if no reason came in time. An error with words of its own keeps them.
    pub(crate) fn without_cause(self, role: Role, waited: Duration) -> LegError {
        let status = self.refusal.status;
        let says_nothing = matches!(&*self.refusal.message(), "" | "Internal server error");
        let refusal = match says_nothing {
            true => {
                let status_code = status.as_u16();
                let text = client_words::without_cause(role, status_code, waited.as_millis());
                HttpError::new(status, &text)
            }
            false => self.refusal,
        };
        LegError::new(self.failure, refusal)
    }

    /// The instance takes no legs of this kind, for it has another role than it had or was said to
    /// have: of no concern to the client.
    fn misdirected(told: &HttpError) -> LegError {
        let failure = LegFailure::Answer(told.status.as_u16());
        let why = format!("the instance takes no such leg: {}", told.message());
        LegError::new(failure, HttpError::new(StatusCode::BAD_GATEWAY, &why))
    }

    /// The instance answered what is no answer.
    pub(crate) fn invalid_answer(role: Role, why: &str) -> LegError {
        let status = StatusCode::BAD_GATEWAY;
        let failure = LegFailure::Answer(status.as_u16());
        LegError::new(failure, HttpError::new(status, &client_words::at_instance(role, why)))
    }
}

/// Lack of memory is no fault of an instance, and another instance would not help.
impl From<MemoryRefusal> for LegError {
    fn from(why: MemoryRefusal) -> LegError {
        let refusal = why.error("the answer");
        LegError::new(LegFailure::Request(refusal.message().into()), refusal)
    }
}

/// Status and headers of an instance's answer.
#[derive(Debug)]
pub(crate) struct ResponseHead {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
}

/// What became of a leg.
pub(crate) enum LegResult {
    Whole(ResponseHead, ChargedBytes),
    Begun(ResponseHead, StreamBeginning),
    Failed(LegError),
}

/// A stream whose first event has arrived.
pub(crate) struct StreamBeginning {
    pub(crate) first: Bytes,
    pub(crate) body: PooledBody,
    /// Charge for incomplete events, which are kept until they are complete.
    pub(crate) memory: MemoryCharge,
}

#[derive(Debug)]
pub(crate) struct HttpLegRequest {
    pub(crate) to: Endpoint,
    pub(crate) role: Role,
    pub(crate) path: &'static str,
    pub(crate) headers: HeaderMap,
    pub(crate) body: BodyChain,
    /// The request id, if it names addresses of instances: answers must not show it.
    pub(crate) inner_id: Option<Arc<str>>,
    /// Charge for the answer.
    pub(crate) memory: MemoryCharge,
    /// Whether the answer is handed on as it comes.
    pub(crate) stream: bool,
}

/// The request of a leg, or why there is none.
pub(crate) type MadeLeg = Result<Box<HttpLegRequest>, String>;

/// Sends a leg and waits for its answer, or for the first bytes of a stream; charges both.
pub(crate) async fn run(
    pool: ConnectionPool,
    order: Box<HttpLegRequest>,
    limits: HttpLimits,
) -> LegResult {
    let (role, inner_id) = (order.role, order.inner_id.clone());
    match exchange(pool, order, limits).await {
        Ok(news) => news,
        Err(ExchangeError::Fault(mut fault)) => {
            fault.refusal.body = without_addresses(fault.refusal.body, inner_id.as_deref());
            LegResult::Failed(*fault)
        }
        Err(ExchangeError::Why(why)) => LegResult::Failed(LegError::connection(role, &why)),
    }
}

/// Removes the addresses of instances from an error: only the unique part of the id is left.
fn without_addresses(error: Bytes, inner_id: Option<&str>) -> Bytes {
    match inner_id {
        Some(id) if memmem::find(&error, id.as_bytes()).is_some() => {
            let unique = id.rsplit('_').next().unwrap_or_default();
            String::from_utf8_lossy(&error).replace(id, unique).into()
        }
        _ => error,
    }
}

enum ExchangeError {
    Fault(Box<LegError>),
    Why(String),
}

impl From<String> for ExchangeError {
    fn from(why: String) -> ExchangeError {
        ExchangeError::Why(why)
    }
}

impl From<MemoryRefusal> for ExchangeError {
    fn from(why: MemoryRefusal) -> ExchangeError {
        ExchangeError::Fault(Box::new(why.into()))
    }
}

async fn exchange(
    pool: ConnectionPool,
    order: Box<HttpLegRequest>,
    limits: HttpLimits,
) -> Result<LegResult, ExchangeError> {
    let HttpLegRequest { to, role, path, headers, body, stream, mut memory, inner_id: _ } = *order;
    let mut request = Request::new(body);
    *request.method_mut() = Method::POST;
    *request.uri_mut() = PathAndQuery::from_static(path).into();
    *request.headers_mut() = headers;
    let answer = timeout(limits.answer, pool.send(&to, request)).await;
    let answer = answer.map_err(|_| format!("no answer within {:?}", limits.answer))?;
    let (head, mut body) = answer?.into_parts();
    let head = ResponseHead { status: head.status, headers: head.headers };
    if !head.status.is_success() {
        let fault = refused((role, &head), body, limits, memory).await?;
        return Err(ExchangeError::Fault(Box::new(fault)));
    }
    if !stream {
        let whole = timeout(limits.idle, charged(body, memory)).await;
        let late = |_| format!("the answer took longer than {:?}", limits.idle);
        return Ok(LegResult::Whole(head, whole.map_err(late)??));
    }
    let mut first = StreamHead::default();
    while !first.is_whole() {
        let frame = timeout(limits.answer, body.frame()).await;
        let frame = frame.map_err(|_| format!("no token within {:?}", limits.answer))?;
        match frame {
            Some(frame) => {
                if let Ok(more) = frame.map_err(|why| chain(&why))?.into_data() {
                    memory.add(more.len())?;
                    first.add(&more);
                }
            }
            None if first.bytes.is_empty() => {
                return Err(ExchangeError::Why("the stream ended without a token".into()));
            }
            None => break,
        }
    }
    match first.error() {
        Some((status, error)) => {
            Err(ExchangeError::Fault(Box::new(fault(role, status, None, error))))
        }
        None => {
            let first = first.bytes.freeze();
            Ok(LegResult::Begun(head, StreamBeginning { first, body, memory }))
        }
    }
}

/// Receives an answer that is not streamed; its bytes are charged before they are kept.
async fn charged(
    mut body: PooledBody,
    mut memory: MemoryCharge,
) -> Result<ChargedBytes, ExchangeError> {
    let whole = body.size_hint().exact().and_then(|length| usize::try_from(length).ok());
    let mut all = ByteCollector::new(whole.unwrap_or(usize::MAX));
    while let Some(frame) = body.frame().await {
        if let Ok(more) = frame.map_err(|why| chain(&why))?.into_data() {
            all.add(more, &mut memory)?;
        }
    }
    Ok(ChargedBytes { bytes: all.finish(), memory })
}

/// The first bytes of a stream of events, up to the end of the first one that says something:
/// servers that have begun a stream tell in it what they would have answered instead.
#[derive(Default)]
struct StreamHead {
    bytes: BytesMut,
    /// Offset of the first byte that is not white space.
    begin: usize,
    /// Offset of the first incomplete event.
    event: usize,
    /// No event ends before this offset.
    searched: usize,
    /// Data of the first event that has some, without the opening event of a chat.
    data: Option<Range<usize>>,
}

/// True for data that only open a chat: the role of what follows, or the empty message of `/v1/messages`. vLLM
/// sends them together with the first token or the error.
fn is_opening(data: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct OpeningEvent<'a> {
        r#type: Option<&'a str>,
        #[serde(default)]
        choices: Vec<OpeningChoice>,
    }
    #[derive(Deserialize)]
    struct OpeningChoice {
        #[serde(default)]
        delta: serde_json::Map<String, serde_json::Value>,
    }
    static ROLE: Needle = Needle::new("\"role\"");
    let Some(_) = ROLE.find(data) else { return false };
    let Ok(event) = serde_json::from_slice::<OpeningEvent<'_>>(data) else { return false };
    let says_role_only = |choice: &OpeningChoice| {
        let mut others = choice.delta.iter().filter(|(key, _)| *key != "role");
        choice.delta.contains_key("role") && others.all(|(_, it)| it.is_null() || it == "")
    };
    event.r#type == Some("message_start")
        || !event.choices.is_empty() && event.choices.iter().all(says_role_only)
}

/// Longest beginning that is waited for, in bytes; errors are shorter.
const BEGINNING_MAX: usize = 64 << 10;

impl StreamHead {
    fn add(&mut self, more: &[u8]) {
        self.bytes.extend_from_slice(more);
        let spaces = self.bytes[self.begin..].iter().take_while(|it| it.is_ascii_whitespace());
        self.begin += spaces.count();
        while self.data.is_none()
            && let Some(end) = sse::event_end(&self.bytes, self.searched)
        {
            let data = sse::data_range(&self.bytes[self.event..end]);
            let data = data.map(|data| self.event + data.start..self.event + data.end);
            self.data = data.filter(|data| !is_opening(&self.bytes[data.clone()]));
            (self.event, self.searched) = (end, end);
        }
        self.searched = sse::search_from(self.searched, self.bytes.len());
    }

    /// True if nothing more is needed to know whether it is an error.
    fn is_whole(&self) -> bool {
        let begins = &self.bytes[self.begin..];
        let fields: [&[u8]; 3] = [b"data:", b":", b"event:"];
        let is_events = begins.len() < 6 || fields.iter().any(|field| begins.starts_with(field));
        self.bytes.len() > BEGINNING_MAX
            || !begins.is_empty() && (!is_events || self.data.is_some())
    }

    /// The status and the words of an error.
    fn error(&self) -> Option<(StatusCode, Bytes)> {
        #[derive(Deserialize)]
        struct ErrorEvent<'a> {
            #[serde(borrow)]
            error: Option<&'a RawValue>,
        }
        #[derive(Deserialize)]
        struct ErrorCode {
            code: Option<u16>,
        }
        let data = &self.bytes[self.data.clone()?];
        static ERROR: Needle = Needle::new("\"error\"");
        ERROR.find(data)?;
        let ErrorEvent { error } = serde_json::from_slice(data).ok()?;
        let error = error.filter(|error| error.get() != "null")?;
        let told = serde_json::from_str::<ErrorCode>(error.get()).ok().and_then(|error| error.code);
        let status = told.and_then(|code| StatusCode::from_u16(code).ok());
        let status = status.filter(|status| status.is_client_error() || status.is_server_error());
        let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Some((status, Bytes::copy_from_slice(data)))
    }
}

/// Error text of an answer; a long one is cut.
async fn refused(
    (role, head): (Role, &ResponseHead),
    mut body: PooledBody,
    limits: HttpLimits,
    mut memory: MemoryCharge,
) -> Result<LegError, ExchangeError> {
    let mut all = ByteCollector::new(ERROR_MAX);
    let collected = timeout(limits.idle, async {
        while let Some(frame) = body.frame().await {
            let Ok(mut more) = frame.map_err(|why| chain(&why))?.into_data() else { continue };
            more.truncate(ERROR_MAX - all.len());
            all.add(more, &mut memory)?;
            if all.len() == ERROR_MAX {
                break;
            }
        }
        Ok::<(), ExchangeError>(())
    });
    let late = |_| format!("the error answer took longer than {:?}", limits.idle);
    collected.await.map_err(late)??;
    let again = retry_after(&head.headers, SystemTime::now());
    Ok(fault(role, head.status, again, all.finish()))
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
fn fault(role: Role, status: StatusCode, again: Option<Duration>, body: Bytes) -> LegError {
    if status == StatusCode::MISDIRECTED_REQUEST {
        return LegError::misdirected(&HttpError::relayed(status, body));
    }
    let told = find_failure(&body);
    let failure = match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            LegFailure::Busy { retry_after: again.map(|span| Nanos(span.as_nanos() as u64)) }
        }
        status if status.is_client_error() => LegFailure::Request(status.as_str().into()),
        status => answered(status, told.as_ref().and_then(|heard| heard.failure.clone())),
    };
    let lacks_cause = status == StatusCode::INTERNAL_SERVER_ERROR && told.is_none();
    let refusal = match told {
        Some(heard) => reported(role, status, &heard),
        None => HttpError::relayed(status, body),
    };
    LegError { failure, refusal: refusal.or_retry_after(again), lacks_cause }
}

/// What an instance of this role said of a leg's KV, for the client.
fn reported(role: Role, status: StatusCode, heard: &ReportedFailure) -> HttpError {
    match &heard.failure {
        None | Some(Failure::Unknown(_)) => {
            HttpError::new(status, &client_words::at_instance(role, &heard.why))
        }
        Some(failure) => kv_failed(role, status, failure),
    }
}

fn kv_failed(role: Role, status: StatusCode, failure: &Failure) -> HttpError {
    let message = client_words::kv_failure(role, failure);
    HttpError::kv_failed(status, failure.kind(), &message)
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

/// The id that both legs of a transfer carry.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The DP rank that a leg is for.
pub(crate) const DP_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

pub(crate) const JSON: HeaderValue = HeaderValue::from_static("application/json");

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(parts: &[&'static str]) -> (usize, Option<(u16, String)>) {
        let mut first = StreamHead::default();
        let mut taken = 0;
        for part in parts {
            if first.is_whole() {
                break;
            }
            first.add(part.as_bytes());
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
            let heard = find_failure(answer.as_bytes()).expect("it is told");
            assert_eq!(LegError::from_reported(heard).failure, failure, "{told}");
            let error = format!(r#"{{"error":{answer}}}"#);
            assert_eq!(
                fault(Role::Decode, StatusCode::BAD_GATEWAY, None, error.into()).failure,
                failure,
                "{told}"
            );
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
    fn a_chat_that_opens_with_its_role_begins_with_what_follows() {
        let role = "data: {\"choices\": [{\"index\": 0, \"delta\": {\"role\": \"assistant\", \"content\": \"\", \
                    \"reasoning\": null}, \"finish_reason\": null}]}\n\n";
        let message = "event: message_start\ndata: {\"type\": \"message_start\", \"message\": {\"role\": \"assistant\"}}\n\n";
        let error = "data: {\"error\": {\"message\": \"m\", \"code\": 500}}\n\n";
        let token = "data: {\"choices\": [{\"delta\": {\"content\": \"a\"}}]}\n\n";
        for opening in [role, message] {
            assert_eq!(begin(&[opening, error, token]), (2, Some((500, "error".into()))));
            assert_eq!(begin(&[opening, token, error]), (2, None));
        }
        let with_content =
            "data: {\"choices\": [{\"delta\": {\"role\": \"assistant\", \"content\": \"a\"}}]}\n\n";
        assert_eq!(begin(&[with_content, error]), (1, None));
    }

    #[test]
    fn a_stream_that_begins_with_a_token_is_not_held_back() {
        let token = "data: {\"choices\": [{\"text\": \"\\\"error\\\"\"}], \"error\": null}\n\n";
        assert_eq!(begin(&[token, "more"]), (1, None));
        assert_eq!(begin(&["not json", "more"]), (1, None));
        assert_eq!(begin(&["{\"error\": 1}", "more"]), (1, None));
        let mut first = StreamHead::default();
        first.add(&vec![b':'; BEGINNING_MAX + 1]);
        assert!(first.is_whole() && first.error().is_none());
        let mut spaces = StreamHead::default();
        spaces.add(&vec![b'\n'; BEGINNING_MAX + 1]);
        assert!(spaces.is_whole() && spaces.error().is_none());
    }
}
