//! The HTTP side: OpenAI-shaped requests become legs.

use super::bodies::{HeldBody, ServeBodies};
use super::instance::{CancelLeg, InstanceActor, LegReply, NEWS_MAX, StartLeg, peer};
use super::kv_content;
use super::openai::{CompletionRequest, CompletionResponse, MISDIRECTED, failed, is_misdirected};
use crate::instance::{AnsweredLeg, InstanceIdentity, metrics_page};
use crate::spans::parent_of;
use actix::Addr;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::stream::{StreamExt, iter, unfold};
use kvferry_engine::actors::MailboxSender;
use kvferry_engine::core::ids::{EngineId, LegId, RequestId};
use kvferry_engine::core::message::PrefillLeg;
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::core::router::{LegBody, LegFailure};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::{Receiver, channel};

/// What the handlers share.
pub(super) struct HandlerState {
    pub(super) instance: MailboxSender<InstanceActor>,
    pub(super) own: InstanceIdentity,
    pub(super) model: String,
    /// The models that it takes requests for; empty for any.
    pub(super) served: Vec<String>,
    pub(super) registry: Registry,
    /// Transfers are traced.
    pub(super) is_traced: bool,
    pub(super) bodies: Arc<ServeBodies>,
    pub(super) draining: AtomicBool,
    pub(super) requests: AtomicU64,
}

pub(super) fn app(shared: Arc<HandlerState>) -> axum::Router {
    axum::Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .with_state(shared)
}

async fn health(State(shared): State<Arc<HandlerState>>) -> StatusCode {
    if shared.draining.load(Ordering::Relaxed) {
        StatusCode::SERVICE_UNAVAILABLE
    } else {
        StatusCode::OK
    }
}

async fn models(State(shared): State<Arc<HandlerState>>) -> Json<Value> {
    let models = shared.served.iter().chain(shared.served.is_empty().then_some(&shared.model));
    let card = |id| json!({"id": id, "object": "model", "owned_by": "kvferry"});
    let data: Vec<_> = models.map(card).collect();
    Json(json!({"object": "list", "data": data, "any_model": shared.served.is_empty()}))
}

async fn metrics(State(shared): State<Arc<HandlerState>>) -> Response {
    metrics_page(&shared.registry)
}

async fn completions(shared: State<Arc<HandlerState>>, headers: HeaderMap, body: Body) -> Response {
    serve(shared.0, &headers, body, false).await
}

async fn chat(shared: State<Arc<HandlerState>>, headers: HeaderMap, body: Body) -> Response {
    serve(shared.0, &headers, body, true).await
}

/// Tells the instance when a caller goes away.
struct LegGuard {
    instance: Addr<InstanceActor>,
    leg: Option<LegId>,
}

impl Drop for LegGuard {
    fn drop(&mut self) {
        if let Some(leg) = self.leg.take() {
            self.instance.do_send(CancelLeg(leg));
        }
    }
}

/// A request that is being served.
struct InFlightRequest {
    shared: Arc<HandlerState>,
    replies: Receiver<LegReply>,
    guard: LegGuard,
    id: RequestId,
    model: String,
    chat: bool,
    created: u64,
    tokens: u32,
    output: u32,
    transfer: AnsweredLeg,
    /// Whose KV it is to get.
    peer: Option<EngineId>,
    _body: HeldBody,
}

async fn serve(shared: Arc<HandlerState>, headers: &HeaderMap, body: Body, chat: bool) -> Response {
    let body = match shared.bodies.collect(body).await {
        Ok(body) => body,
        Err(refusal) => return refuse(refusal),
    };
    match begin(shared, headers, body, chat).await {
        Ok((serving, true)) => serving.stream(),
        Ok((serving, false)) => serving.whole().await,
        Err(failure) => refuse(failed(&failure, None)),
    }
}

fn unusable(why: String) -> LegFailure {
    LegFailure::Request(why.into())
}

async fn begin(
    shared: Arc<HandlerState>,
    headers: &HeaderMap,
    (body, held): (Vec<u8>, HeldBody),
    chat: bool,
) -> Result<(InFlightRequest, bool), LegFailure> {
    let body = CompletionRequest::parse(&body).map_err(unusable)?;
    let tokens = body.tokens(chat).map_err(unusable)?;
    let number = shared.requests.fetch_add(1, Ordering::Relaxed);
    let named = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    let id: RequestId = named.map_or_else(|| format!("kvferry-{number}"), str::to_string).into();
    let (output, stream) = (body.output(), body.stream.unwrap_or(false));
    let model = body.model.clone();
    if let Some(model) = model.as_ref().filter(|_| !shared.served.is_empty())
        && !shared.served.contains(model)
    {
        return Err(unusable(format!("the model `{model}` is not served here")));
    }
    let params = body.kv_transfer_params.as_deref();
    if is_misdirected(shared.own.role, params) {
        return Err(LegFailure::Answer(MISDIRECTED));
    }
    let leg = shared.own.leg(&id, params, output);
    let leg = leg.map_err(unusable)?;
    let (sender, news) = channel(NEWS_MAX);
    let transfer = match &leg {
        LegBody::Prefill { transfer: PrefillLeg { key, moriio, .. }, .. } => {
            let names_decode = moriio.as_ref().is_some_and(|moriio| moriio.peer.is_some());
            AnsweredLeg { key: key.clone(), names_decode }
        }
        LegBody::Decode { transfer, .. } => {
            AnsweredLeg { key: transfer.key.clone(), names_decode: false }
        }
    };
    let (prompt, prompt_hash) = (kv_content::prompt(&tokens), PromptHash::of_tokens(&tokens));
    let output = if matches!(leg, LegBody::Prefill { .. }) { 1 } else { output };
    let peer = peer(&leg);
    let place = shared.instance.reserve().ok_or(LegFailure::Busy { retry_after: None })?;
    let (body, leg) = (leg, LegId(number + 1));
    let parent = if shared.is_traced { parent_of(headers) } else { None };
    let (request, replies) = (id.clone(), sender);
    let start = StartLeg { leg, request, prompt, prompt_hash, body, parent, replies };
    shared.instance.post(start, place);
    let serving = InFlightRequest {
        guard: LegGuard { instance: shared.instance.address().clone(), leg: Some(leg) },
        replies: news,
        id,
        model: model.unwrap_or_else(|| shared.model.clone()),
        chat,
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        tokens: tokens.len() as u32,
        output,
        transfer,
        peer,
        shared,
        _body: held,
    };
    Ok((serving, stream))
}

fn refuse((status, body): (u16, Value)) -> Response {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (status, Json(body)).into_response()
}

impl InFlightRequest {
    fn answer(&self) -> CompletionResponse<'_> {
        CompletionResponse {
            id: &self.id.0,
            model: &self.model,
            chat: self.chat,
            created: self.created,
            prompt_tokens: self.tokens,
            completion_tokens: self.output,
        }
    }

    async fn whole(mut self) -> Response {
        loop {
            match self.replies.recv().await {
                Some(LegReply::First(_)) => {}
                Some(LegReply::Done(kv, blocks)) => {
                    self.guard.leg = None;
                    let params = (!blocks.is_empty()).then(|| {
                        let json = self.shared.own.offer().params(&self.transfer, &blocks).ok()?;
                        serde_json::from_str(&json).ok()
                    });
                    let answer = self.answer().whole(&kv.digest, &kv, params.flatten());
                    return Json(answer).into_response();
                }
                Some(LegReply::Failed(failure)) => {
                    self.guard.leg = None;
                    return refuse(failed(&failure, self.peer.as_ref()));
                }
                None => return refuse(failed(&LegFailure::Connection, None)),
            }
        }
    }

    /// The first token has the digest, the last event the usage.
    fn stream(self) -> Response {
        let events = unfold((Some(self), true), |(serving, first)| async move {
            let mut serving = serving?;
            let news = serving.replies.recv().await;
            let (events, next) = serving.events(news, first);
            Some((iter(events), (next.then_some(serving), false)))
        });
        Sse::new(events.flatten()).into_response()
    }

    /// The events that tell the news, and whether there will be more.
    fn events(
        &mut self,
        news: Option<LegReply>,
        first: bool,
    ) -> (Vec<Result<Event, Infallible>>, bool) {
        let Some(news) = news else { return (Vec::new(), false) };
        match news {
            LegReply::First(kv) => {
                (vec![event(&self.answer().chunk(&kv.digest, Some(&kv), false))], true)
            }
            LegReply::Done(kv, _) => {
                self.guard.leg = None;
                let text = if first { &*kv.digest } else { "" };
                let last = event(&self.answer().chunk(text, Some(&kv), true));
                (vec![last, Ok(Event::default().data("[DONE]"))], false)
            }
            LegReply::Failed(failure) => {
                self.guard.leg = None;
                (vec![event(&failed(&failure, self.peer.as_ref()).1)], false)
            }
        }
    }
}

fn event(value: &Value) -> Result<Event, Infallible> {
    Ok(Event::default().data(value.to_string()))
}

#[cfg(test)]
mod tests {
    use super::super::args::ServeArgs;
    use super::super::instance::{InstanceServer, ServerParts};
    use super::super::kv_content::InstanceKv;
    use super::super::memory::Backing;
    use super::super::metrics::InstanceMetrics;
    use super::*;
    use crate::instance::InstanceTrust;
    use clap::Parser;
    use kvferry_engine::actors::{Clock, InstanceBuilder};
    use kvferry_engine::core::Nanos;
    use kvferry_engine::core::config::CoreConfig;
    use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
    use kvferry_engine::core::ids::Incarnation;
    use kvferry_engine::core::message::{Mode, Role};
    use kvferry_trust::NetworkTrust;

    #[derive(Parser)]
    struct ServeCli {
        #[command(flatten)]
        args: ServeArgs,
    }

    /// A decode with two blocks, and with `places` in its mailbox.
    fn shared(places: usize) -> Arc<HandlerState> {
        let line = "serve --role decode --mode push --blocks 2 --private-memory";
        let plan = ServeCli::parse_from(line.split(' ')).args.plan().expect("an instance");
        let engine = super::super::engine(&plan, Incarnation(1)).expect("an engine");
        let geometry = kvferry_scenarios::geometry::geometry(&plan.model, &plan.instance);
        let rank = Backing::new(&plan, true).expect("memory").into_rank();
        let trust = InstanceTrust {
            network: NetworkTrust::Loopback,
            moriio_peers: true,
            is_verifying: false,
        };
        let (metrics, registry) = InstanceMetrics::new(Vec::new(), trust);
        let clock: Clock = Arc::new(|| Nanos(1));
        let core = CoreConfig::new(Role::Decode, "d", Incarnation(1), geometry.clone(), "".into());
        let (memory, layers) = (InstanceKv::new(geometry, vec![rank]), plan.model.layers);
        let parts =
            ServerParts { engine, memory, clock, layers, ranks: 1, metrics, transfers: None };
        let host = InstanceServer::start(parts, InstanceBuilder::new(core));
        let text = "host:127.0.0.1,handshake:1,notify:2";
        let address = ZmqAddress::parse(text).expect("an address");
        Arc::new(HandlerState {
            instance: MailboxSender::new(host.address().clone(), places),
            own: InstanceIdentity::open(Role::Decode, Mode::Push, address),
            model: "m".into(),
            served: Vec::new(),
            registry,
            is_traced: false,
            bodies: ServeBodies::new(1 << 20),
            draining: AtomicBool::new(false),
            requests: AtomicU64::new(0),
        })
    }

    /// Asks with a prompt that no block is left for.
    async fn asked(shared: &Arc<HandlerState>) -> (StatusCode, String) {
        let body = json!({"prompt": vec![7; 100], "max_tokens": 1}).to_string();
        let answer = serve(shared.clone(), &HeaderMap::new(), body.into(), false).await;
        let status = answer.status();
        let text = axum::body::to_bytes(answer.into_body(), 1 << 20).await.expect("a body");
        (status, String::from_utf8_lossy(&text).into_owned())
    }

    #[test]
    fn a_leg_that_finds_the_mailbox_of_an_instance_full_is_told_overload() {
        actix::System::new().block_on(async {
            let shared = shared(8);
            let taken: Vec<_> = std::iter::from_fn(|| shared.instance.reserve()).collect();
            assert_eq!(taken.len(), 6, "a quarter is kept");
            let (status, text) = asked(&shared).await;
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
            assert!(text.contains("overload") && text.contains("try again"), "{text}");
            drop(taken);
            for _ in 0..9 {
                let (status, text) = asked(&shared).await;
                assert_eq!(status, StatusCode::BAD_REQUEST, "{text}");
            }
        });
    }
}
