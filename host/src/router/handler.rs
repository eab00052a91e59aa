//! Requests of clients that are served by a prefill and a decode.

use super::api::{Api, GenerationRequest};
use super::args::HttpSettings;
use super::body::{ClientBody, ClientGuard};
use super::encoding;
use super::error::HttpError;
use super::exchange::{ClientExchange, source_of};
use super::fields::JsonFields;
use super::headers::{self, ClientRequestId};
use super::http_adapter::{ClientEvent, HttpAdapter, MAILBOX, PartBody, SubmitRequest};
use super::leg::ResponseHead;
use super::memory_budget::{ByteCollector, MemoryBudget, MemoryCharge};
use super::merge::{self, PartAnswer, ShownId, StreamMerger};
use super::metrics::RouterMetrics;
use super::request_spans::{self, LegTracer};
use super::routed_request::RoutedRequest;
use crate::spans::{OpenSpan, SpanTracer, bounded};
use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Body as _;
use hyper::header::{CONTENT_TYPE, HeaderMap};
use hyper::{Request, StatusCode};
use kvferry_engine::actors::{Driver, MailboxSender};
use kvferry_engine::core::ids::ClientId;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Bytes of memory that the legs of one part take beside the body and the client's headers: their
/// edits, and headers of the router.
const LEG_BYTES: usize = 4 << 10;

pub(crate) struct RequestHandler {
    pub(crate) core: MailboxSender<Driver<HttpAdapter>>,
    pub(crate) settings: Arc<HttpSettings>,
    pub(crate) metrics: RouterMetrics,
    /// None unless a collector of spans is named.
    pub(crate) tracer: Option<SpanTracer>,
    pub(crate) next_client: AtomicU64,
    pub(crate) memory: Arc<MemoryBudget>,
    /// Clients are to come again by another connection, which another router may take.
    pub(crate) is_draining: AtomicBool,
}

impl RequestHandler {
    /// Serves one request on one of the paths.
    pub(crate) async fn serve(&self, api: Api, request: Request<Body>) -> Response {
        let headers = request.headers();
        let exchange = ClientExchange::begin(self, api.path(), headers, api.id_prefix());
        let mut span = self
            .tracer
            .as_ref()
            .map(|tracer| request_spans::begin(tracer, api, headers, exchange.id.as_str()));
        let answer = self.answer(api, &exchange.id, request, &mut span).await;
        if let Some(span) = span {
            request_spans::answered(span, answer.as_ref().map(Response::status));
        }
        exchange.finish(answer.map_err(|refusal| refusal.of(api)))
    }

    /// The answer, with the span of the request taken if that goes on as long as a stream.
    async fn answer(
        &self,
        api: Api,
        id: &ClientRequestId,
        request: Request<Body>,
        span: &mut Option<OpenSpan>,
    ) -> Result<Response, HttpError> {
        let (parts, body) = request.into_parts();
        let own = self.settings.authorization.as_ref();
        let headers = headers::to_engine(&parts.headers, own, &self.settings.identity)?;
        check_type(&parts.headers)?;
        let limits = &self.settings.limits;
        let (connection, source) = source_of(&parts.extensions);
        let mut memory = self.memory.charge(source);
        let body = self.body(body, &mut memory).await?;
        if let Some(connection) = connection {
            connection.begin();
        }
        let fields =
            JsonFields::parse(body).map_err(|why| HttpError::bad(&why.of("the body"), ""))?;
        let (asked, prompts) =
            GenerationRequest::read(api, fields, limits.prefix_tokens, limits.parts)?;
        // Each of the two legs has a copy of the headers.
        let of_part = LEG_BYTES + 2 * headers::bytes(&headers);
        let legs = memory.add(asked.parts.len() * of_part);
        legs.map_err(|why| why.error("the legs of the request"))?;
        let spans = self.leg_tracer(&asked, span.as_mut());
        let job = Arc::new(RoutedRequest::new((asked, memory), headers, id.clone(), spans));
        let (sender, events) = mpsc::channel(job.asked.parts.len() + 1);
        let client = ClientId(self.next_client.fetch_add(1, Ordering::Relaxed));
        let place = self.core.reserve().ok_or_else(overload)?;
        let guard = ClientGuard { core: self.core.address().clone(), client };
        self.core.post(SubmitRequest { client, job: job.clone(), prompts, events: sender }, place);
        let shown = ShownId::new(id.header());
        match job.asked.stream {
            true => streamed(&job, events, shown, (guard, span)).await,
            false => whole(&job.asked, events, shown, guard).await,
        }
    }

    fn leg_tracer(
        &self,
        asked: &GenerationRequest,
        span: Option<&mut OpenSpan>,
    ) -> Option<LegTracer> {
        let (tracer, span) = self.tracer.clone().zip(span)?;
        if let Some(model) = &asked.model {
            span.set("gen_ai.request.model", bounded(model).to_owned());
        }
        span.set("kvferry.parts", asked.parts.len() as i64);
        Some(LegTracer { tracer, request: span.context().clone() })
    }

    /// Reads the whole body; its bytes are charged to `memory`.
    pub(super) async fn body(
        &self,
        body: Body,
        memory: &mut MemoryCharge,
    ) -> Result<Bytes, HttpError> {
        let limits = &self.settings.limits;
        let collected = timeout(limits.body, self.collect(body, memory)).await;
        let body = collected.map_err(|_| {
            let message = format!("the body did not come within {:?}", limits.body);
            HttpError::new(StatusCode::REQUEST_TIMEOUT, &message)
        })??;
        let extra = encoding::extra_bytes(&body);
        memory.add(extra).map_err(|why| why.error("the body"))?;
        let text = encoding::to_utf8(body);
        if extra > 0 {
            // The original body is freed. A smaller charge is always granted.
            let _ = memory.set(extra);
        }
        text.map_err(|why| HttpError::bad(&format!("the body: {why}"), ""))
    }

    async fn collect(&self, mut body: Body, memory: &mut MemoryCharge) -> Result<Bytes, HttpError> {
        let most = self.settings.limits.body_bytes;
        let too_long = || {
            let message = format!("the body is longer than {most} bytes, the limit of --body-max");
            HttpError::new(StatusCode::PAYLOAD_TOO_LARGE, &message)
        };
        let hint = body.size_hint();
        if hint.lower() > most as u64 {
            return Err(too_long());
        }
        let whole = hint.exact().map_or(most, |exact| exact as usize);
        let mut all = ByteCollector::new(whole);
        while let Some(frame) = body.frame().await {
            let frame =
                frame.map_err(|why| HttpError::bad(&format!("the body broke off: {why}"), ""))?;
            let Ok(more) = frame.into_data() else { continue };
            if all.len() + more.len() > most {
                return Err(too_long());
            }
            all.add(more, memory).map_err(|why| why.error("the body"))?;
        }
        Ok(all.finish())
    }
}

fn overload() -> HttpError {
    let message = format!(
        "overload: most of {MAILBOX} places for requests that wait for the router are taken; try again"
    );
    HttpError::new(StatusCode::SERVICE_UNAVAILABLE, &message)
}

fn check_type(headers: &HeaderMap) -> Result<(), HttpError> {
    let told = headers.get(CONTENT_TYPE).and_then(|told| told.to_str().ok()).unwrap_or("");
    let kind = told.split(';').next().unwrap_or("").trim();
    if kind.eq_ignore_ascii_case("application/json") || kind.ends_with("+json") {
        return Ok(());
    }
    let message = format!("content-type is {told:?}: send application/json");
    Err(HttpError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, &message))
}

fn lost() -> HttpError {
    HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, "the router lost the request")
}

fn response(head: ResponseHead, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = head.status;
    *response.headers_mut() = headers::to_client(&head.headers);
    response
}

async fn whole(
    asked: &GenerationRequest,
    mut events: mpsc::Receiver<ClientEvent>,
    shown: ShownId,
    _guard: ClientGuard,
) -> Result<Response, HttpError> {
    let mut first = None;
    let mut answers: Vec<Option<PartAnswer>> = asked.parts.iter().map(|_| None).collect();
    loop {
        match events.recv().await.ok_or_else(lost)? {
            ClientEvent::Part { part, head, body: PartBody::Whole(body), facts } => {
                let counts_prompt = asked.parts[part].sample == 0;
                answers[part] = Some(PartAnswer { body, counts_prompt, facts });
                first.get_or_insert(head);
            }
            ClientEvent::Part { .. } => return Err(lost()),
            ClientEvent::Ended(ended) => break ended?,
        }
    }
    let answers: Option<Vec<PartAnswer>> = answers.into_iter().collect();
    let (Some(head), Some(answers)) = (first, answers) else { return Err(lost()) };
    let body = merge::whole(answers, &shown)
        .map_err(|why| HttpError::new(StatusCode::BAD_GATEWAY, &why))?;
    Ok(response(head, Body::new(body)))
}

async fn streamed(
    job: &RoutedRequest,
    mut events: mpsc::Receiver<ClientEvent>,
    shown: ShownId,
    (guard, span): (ClientGuard, &mut Option<OpenSpan>),
) -> Result<Response, HttpError> {
    let asked = &job.asked;
    let (part, head, body, facts) = match events.recv().await.ok_or_else(lost)? {
        ClientEvent::Part { part, head, body, facts } => (part, head, body, facts),
        ClientEvent::Ended(Err(refusal)) => return Err(refusal),
        ClientEvent::Ended(Ok(())) => return Err(lost()),
    };
    // A single stream is parsed only if something has to be added or removed.
    let is_edited = asked.is_split()
        || facts.cached.is_some()
        || facts.inner_id.is_some()
        || matches!(asked.api, Api::Responses | Api::Messages);
    let merger = is_edited.then(|| {
        let counts_prompt = asked.parts.iter().map(|part| part.sample == 0);
        StreamMerger::new(counts_prompt, shown, &job.memory)
    });
    let mut span = span.take();
    if let Some(span) = &mut span {
        request_spans::streaming(span, head.status);
    }
    let mut streams = ClientBody::new(asked, events, merger, (guard, span));
    streams.add(part, body, facts);
    Ok(response(head, Body::new(streams)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::args::HttpLimits;
    use crate::router::pool::ConnectionPool;
    use kvferry_engine::core::Nanos;
    use kvferry_engine::core::ids::Incarnation;
    use kvferry_engine::core::router::{Router, RouterConfig};
    use kvferry_trust::FleetProof;
    use kvferry_wire::{SignedPlane, WireConfig, ZmqPlane};
    use prometheus_client::metrics::counter::Counter;
    use std::time::Duration;

    /// A router without instances that answers at once and has `places` in its mailbox.
    fn handler(places: usize) -> RequestHandler {
        let (short, most) = (Duration::from_secs(300), 1 << 20);
        let limits = HttpLimits {
            connect: short,
            answer: short,
            idle: short,
            body_bytes: most,
            body: short,
            parts: 8,
            prefix_tokens: 16,
        };
        let proof = FleetProof::open(None).expect("no secret");
        let settings = Arc::new(HttpSettings::open(limits));
        let config = RouterConfig { wait_max: Nanos::ZERO, ..RouterConfig::default() };
        let router = Router::new(config, Incarnation(1));
        let (plane, metrics) = (ZmqPlane::new(WireConfig::default()), RouterMetrics::new().0);
        let clock: kvferry_engine::actors::Clock = Arc::new(|| Nanos(1));
        let plane = SignedPlane::new(plane.expect("a plane"), proof);
        let pool = ConnectionPool::new(short, None);
        let core =
            HttpAdapter::start(router, plane, clock, pool, settings.clone(), metrics.clone());
        RequestHandler {
            core: MailboxSender::new(core, places),
            settings,
            metrics,
            tracer: None,
            next_client: AtomicU64::default(),
            memory: MemoryBudget::new(1 << 24, Counter::default()),
            is_draining: AtomicBool::default(),
        }
    }

    async fn asked(handler: &RequestHandler) -> (Response, String) {
        let request = Request::post("/v1/completions").header(CONTENT_TYPE, "application/json");
        let body = Body::from(r#"{"model": "m", "prompt": "p"}"#);
        let response =
            handler.serve(Api::Completions, request.body(body).expect("a request")).await;
        let (head, body) = response.into_parts();
        let text = body.collect().await.expect("a body").to_bytes();
        (Response::from_parts(head, Body::empty()), String::from_utf8_lossy(&text).into_owned())
    }

    #[test]
    fn a_request_that_finds_the_routers_mailbox_full_is_told_overload() {
        actix::System::new().block_on(async {
            let handler = handler(8);
            let taken: Vec<_> = std::iter::from_fn(|| handler.core.reserve()).collect();
            assert_eq!(taken.len(), 6, "a quarter is kept");
            let (response, text) = asked(&handler).await;
            let again = response.headers().get(hyper::header::RETRY_AFTER);
            assert_eq!(
                (response.status(), again.is_some()),
                (StatusCode::SERVICE_UNAVAILABLE, true)
            );
            assert!(text.contains("overload"), "{text}");
            drop(taken);
            for _ in 0..9 {
                let (response, text) = asked(&handler).await;
                assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
                assert!(text.contains("no prefill and decode instance"), "{text}");
            }
        });
    }
}
