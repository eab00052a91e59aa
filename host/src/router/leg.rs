//! One leg: a request to an instance, and what becomes of it.

use super::error::Refusal;
use super::pool::{Pool, Reply};
use super::settings::Limits;
use bytes::Bytes;
use engine::core::router::LegFailure;
use engine::fabric::Endpoint;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::http::uri::PathAndQuery;
use hyper::{Method, Request, StatusCode};
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
    loop {
        let frame = timeout(limits.answer, body.frame()).await;
        let frame = frame.map_err(|_| format!("no token within {:?}", limits.answer))?;
        match frame {
            Some(frame) => {
                if let Ok(first) = frame.map_err(|why| chain(&why))?.into_data()
                    && !first.is_empty()
                {
                    return Ok(News::Begun(head, first, body));
                }
            }
            None => return Err(Lost::Why("the stream ended without a token".into())),
        }
    }
}

async fn refused(status: StatusCode, body: Reply, limits: Limits) -> Result<Fault, String> {
    let body = collect(body, ERROR_MAX, limits.idle).await?;
    let refusal = Refusal::relayed(status, body);
    let failure = match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => LegFailure::Busy,
        status if status.is_client_error() => LegFailure::Request(status.as_str().into()),
        status => LegFailure::Answer(status.as_u16()),
    };
    Ok(Fault { failure, refusal })
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
