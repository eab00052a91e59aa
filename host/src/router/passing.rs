//! Requests that are passed to instances unchanged, by the table of [`paths`](super::paths).

use super::access::check_same_origin;
use super::api;
use super::client_words;
use super::error::HttpError;
use super::exchange::{ClientExchange, source_of};
use super::handler::RequestHandler;
use super::headers;
use super::leg::{self, REQUEST_ID};
use super::metrics::role_name;
use super::paths::{PassedPath, PathTarget};
use super::pool::{ConnectionPool, PooledBody, SendError, chain};
use crate::process::lock;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream;
use http_body_util::Full;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use hyper::header::{CONTENT_TYPE, HeaderMap};
use hyper::http::request::Parts;
use hyper::{Method, Request, StatusCode, Uri};
use kvferry_engine::actors::{Clock, Query};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::message::Role;
use kvferry_engine::core::router::{InstanceState, NAMED_MODELS_MAX, Router};
use kvferry_engine::fabric::Endpoint;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use std::collections::{BTreeMap, BTreeSet};
use std::future::ready;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep, timeout};

/// Instances that are tried for a request while they cannot be reached.
const TRIES: usize = 3;

/// Instances that are asked at a time if all are asked.
const ASKED_AT_ONCE: usize = 32;

/// Time for the answer of one instance among those of all, if `--answer-timeout` is not shorter.
const ANSWER_OF_ALL: Duration = Duration::from_secs(60);

/// Longest answer of one instance among those of all, in bytes.
const ANSWER_MAX: usize = 64 << 10;

/// Proxy for the paths that are passed on.
#[derive(Clone)]
pub(crate) struct PathProxy {
    pub(crate) handler: Arc<RequestHandler>,
    pool: ConnectionPool,
    clock: Clock,
    under_way: PassedRequests,
}

/// Number of passed requests under way at each instance; clones share the numbers.
#[derive(Clone, Default)]
struct PassedRequests(Arc<Mutex<BTreeMap<Endpoint, u32>>>);

/// A passed request, counted until it is dropped.
struct PassedRequest {
    all: PassedRequests,
    to: Endpoint,
}

impl PassedRequests {
    fn begin(&self, to: &Endpoint) -> PassedRequest {
        *lock(&self.0).entry(to.clone()).or_default() += 1;
        PassedRequest { all: self.clone(), to: to.clone() }
    }

    fn at(&self, to: &Endpoint) -> u32 {
        lock(&self.0).get(to).copied().unwrap_or_default()
    }
}

impl Drop for PassedRequest {
    fn drop(&mut self) {
        let mut all = lock(&self.all.0);
        if let Some(count) = all.get_mut(&self.to) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.to);
            }
        }
    }
}

/// Instances that a request for a model may be passed to.
enum ModelServers {
    /// The best one first: decodes before prefills, and of each role the least loaded first.
    Some(Vec<Endpoint>),
    /// No instance serves the model; the models that are served.
    NoModel(Vec<Arc<str>>),
}

fn servers(
    router: &Router,
    now: Nanos,
    model: Option<&str>,
    under_way: &PassedRequests,
) -> ModelServers {
    let (mut found, mut served, mut is_misnamed) = (Vec::new(), BTreeSet::new(), false);
    for it in router.instances(now) {
        if !matches!(it.state, InstanceState::Ready | InstanceState::Trial) {
            continue;
        }
        if let (Some(model), Some(models)) = (model, it.models)
            && !models.has(model)
        {
            is_misnamed = true;
            served.extend(models.iter().cloned());
            continue;
        }
        let load = u64::from(it.legs) + u64::from(under_way.at(it.http));
        found.push((it.role == Role::Prefill, load, it.http.clone()));
    }
    if found.is_empty() && is_misnamed {
        return ModelServers::NoModel(served.into_iter().take(NAMED_MODELS_MAX).collect());
    }
    found.sort();
    let mut known = BTreeSet::new();
    let found = found.into_iter().map(|(_, _, http)| http);
    ModelServers::Some(found.filter(|http| known.insert(http.clone())).collect())
}

/// Answer of one instance if all were asked.
#[derive(Serialize)]
struct ListedAnswer {
    http: Endpoint,
    role: &'static str,
    status: Option<u16>,
    /// JSON, or a string of what is not JSON.
    body: Option<Box<RawValue>>,
    error: Option<String>,
}

/// The answers of all, in the order of their addresses.
#[derive(Serialize)]
struct ListedAnswers {
    instances: Vec<ListedAnswer>,
}

/// The body as instances get it, and the model that it names. Only a JSON object has fields that
/// matter here: any other body stays as it is.
///
/// # Errors
/// An object that the router cannot read.
fn cleaned(body: Bytes) -> Result<(Bytes, Option<String>), HttpError> {
    if !body.trim_ascii_start().starts_with(b"{") {
        return Ok((body, None));
    }
    // A body that is changed is no longer than before, and the one before is gone then.
    let fields = api::passed_fields(body)?;
    Ok((fields.text().clone(), api::model_name(&fields)))
}

/// A request that can be sent to several instances.
#[derive(Clone)]
struct PassedOn {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
}

impl PassedOn {
    fn request(&self) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(self.body.clone()));
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        request.headers_mut().clone_from(&self.headers);
        request
    }
}

impl PathProxy {
    pub(crate) fn new(
        handler: Arc<RequestHandler>,
        pool: ConnectionPool,
        clock: Clock,
    ) -> PathProxy {
        PathProxy { handler, pool, clock, under_way: PassedRequests::default() }
    }

    /// Passes a request for a path of the table.
    pub(crate) async fn serve(&self, row: &'static PassedPath, request: Request<Body>) -> Response {
        let (parts, body) = request.into_parts();
        let exchange = ClientExchange::begin(&self.handler, row.path, &parts.headers, "req-");
        let answer = self.answer(row, &exchange, &parts, body).await;
        if let Err(refusal) = &answer
            && refusal.status.is_server_error()
        {
            tracing::warn!(
                request = exchange.id.as_str(),
                path = row.path,
                why = refusal.message(),
                "request could not be passed on"
            );
        }
        exchange.finish(answer)
    }

    async fn answer(
        &self,
        row: &'static PassedPath,
        exchange: &ClientExchange<'_>,
        parts: &Parts,
        body: Body,
    ) -> Result<Response, HttpError> {
        let handler = &*self.handler;
        let own = handler.settings.authorization.as_ref();
        let mut headers = headers::to_engine(&parts.headers, own, &handler.settings.identity)?;
        headers.insert(REQUEST_ID, exchange.id.header());
        if let Some(kind) = parts.headers.get(CONTENT_TYPE) {
            headers.insert(CONTENT_TYPE, kind.clone());
        }
        if row.target == PathTarget::All {
            check_same_origin(&parts.headers)?;
        }
        if row.target != PathTarget::All {
            self.check_open()?;
        }
        let (connection, source) = source_of(&parts.extensions);
        let mut memory = handler.memory.charge(source);
        let (body, model) = cleaned(handler.body(body, &mut memory).await?)?;
        if let Some(connection) = connection {
            connection.begin();
        }
        let path_and_query = parts.uri.path_and_query().cloned();
        let uri = path_and_query.map_or_else(|| Uri::from_static(row.path), Uri::from);
        let passed = PassedOn { method: parts.method.clone(), uri, headers, body };
        match row.target {
            PathTarget::One => {
                let to = self.servers(model).await?;
                self.to_one(&to, &passed).await
            }
            PathTarget::Maker => self.to_one(&[self.maker(parts.uri.path())?], &passed).await,
            PathTarget::All => self.to_all(&passed).await,
        }
    }

    /// # Errors
    /// More requests are open than the router takes.
    fn check_open(&self) -> Result<(), HttpError> {
        let most = i64::from(self.handler.settings.open_max);
        if most == 0 || self.handler.metrics.in_flight.get() <= most {
            return Ok(());
        }
        let message = format!(
            "the router has {most} requests open, as many as it takes (--open-max): send it again \
             later, or have the operator add instances"
        );
        Err(HttpError::new(StatusCode::TOO_MANY_REQUESTS, &message))
    }

    /// Instances that serve a model, the best first, and at least one.
    async fn servers(&self, model: Option<String>) -> Result<Vec<Endpoint>, HttpError> {
        let (now, under_way) = ((self.clock)(), self.under_way.clone());
        let asked = model.clone();
        let look = move |router: &Router| servers(router, now, model.as_deref(), &under_way);
        match self.look(look).await? {
            ModelServers::Some(to) if !to.is_empty() => Ok(to),
            ModelServers::Some(_) => Err(HttpError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "no instance is ready; /workers of --admin-addr has what is registered",
            )),
            ModelServers::NoModel(served) => {
                Err(HttpError::no_model(&asked.unwrap_or_default(), &served))
            }
        }
    }

    async fn look<R: Send + 'static>(
        &self,
        look: impl FnOnce(&Router) -> R + Send + 'static,
    ) -> Result<R, HttpError> {
        let asked = self.handler.core.address().send(Query(Box::new(look))).await;
        asked.map_err(|_| HttpError::new(StatusCode::SERVICE_UNAVAILABLE, "the router is stopping"))
    }

    /// The instance that made the response in the path.
    fn maker(&self, path: &str) -> Result<Endpoint, HttpError> {
        let id = path.split('/').nth(3).unwrap_or_default();
        self.handler.settings.makers.maker(id).ok_or_else(|| {
            let shown: String = path.chars().take(200).collect();
            let message = format!(
                "{shown}: this router has passed on no response of that id, or too many since"
            );
            HttpError::new(StatusCode::NOT_FOUND, &message)
        })
    }

    /// Passes it to the first of these that can be reached. A request that an instance may have
    /// got goes to another one only if it changes nothing.
    async fn to_one(&self, to: &[Endpoint], passed: &PassedOn) -> Result<Response, HttpError> {
        let limits = &self.handler.settings.limits;
        let mut trouble = String::new();
        for to in to.iter().take(TRIES) {
            let under_way = self.under_way.begin(to);
            let sent = timeout(limits.answer, self.pool.try_send(to, passed.request())).await;
            match sent {
                Ok(Ok(answer)) => {
                    let (head, body) = answer.into_parts();
                    let silence = Box::pin(sleep(limits.idle));
                    let body =
                        PassedBody { body, silence, idle: limits.idle, _under_way: under_way };
                    let mut response = Response::new(Body::new(body));
                    *response.status_mut() = head.status;
                    *response.headers_mut() = headers::to_client(&head.headers);
                    return Ok(response);
                }
                Ok(Err(SendError { why, is_unsent })) => {
                    tracing::debug!(%to, why, "a request was not passed on");
                    trouble = format!("the instance: {}", client_words::without_addresses(&why));
                    if !is_unsent && passed.method != Method::GET {
                        break;
                    }
                }
                Err(_) => {
                    tracing::debug!(%to, "a passed request got no answer");
                    trouble = format!("the instance: no answer within {:?}", limits.answer);
                    break;
                }
            }
        }
        Err(HttpError::new(StatusCode::BAD_GATEWAY, &trouble))
    }

    /// Passes the request to all instances that have answered a probe.
    async fn to_all(&self, passed: &PassedOn) -> Result<Response, HttpError> {
        let now = (self.clock)();
        let all = self
            .look(move |router: &Router| {
                let mut all = BTreeMap::new();
                for it in router.instances(now).filter(|it| it.state != InstanceState::Lost) {
                    let known = all.entry(it.http.clone()).or_insert((it.role, it.state));
                    if known.1 == InstanceState::Unproven {
                        *known = (it.role, it.state);
                    }
                }
                all
            })
            .await?;
        let asked = all.into_iter().map(|(http, (role, state))| {
            let (proxy, passed) = (self.clone(), passed.clone());
            // A task, which goes on if the operator does not wait for the answer.
            actix::spawn(async move { proxy.one_of_all(http, role, state, &passed).await })
        });
        let asked = stream::iter(asked).buffer_unordered(ASKED_AT_ONCE);
        let answered = asked.filter_map(|answer| ready(answer.ok()));
        let mut answers: Vec<ListedAnswer> = answered.collect().await;
        answers.sort_by(|one, other| one.http.cmp(&other.http));
        let is_ok = |it: &ListedAnswer| it.status.is_some_and(|it| (200..300).contains(&it));
        let status = match (answers.is_empty(), answers.iter().all(is_ok)) {
            (true, _) => StatusCode::SERVICE_UNAVAILABLE,
            (false, true) => StatusCode::OK,
            (false, false) => StatusCode::BAD_GATEWAY,
        };
        Ok((status, axum::Json(ListedAnswers { instances: answers })).into_response())
    }

    async fn one_of_all(
        &self,
        http: Endpoint,
        role: Role,
        state: InstanceState,
        passed: &PassedOn,
    ) -> ListedAnswer {
        let limits = &self.handler.settings.limits;
        let asked = async {
            // A stranger may have registered it.
            if state == InstanceState::Unproven {
                return Err("not asked: it has not answered GET /health yet".to_owned());
            }
            let (head, body) = self.pool.send(&http, passed.request()).await?.into_parts();
            Ok((head.status.as_u16(), leg::collect(body, ANSWER_MAX, limits.idle).await?))
        };
        let patience = limits.answer.min(ANSWER_OF_ALL);
        let asked = timeout(patience, asked).await;
        let asked = asked.unwrap_or_else(|_| Err(format!("no answer within {patience:?}")));
        let (status, body, error) = match asked {
            Ok((status, body)) => {
                let text = || to_raw_value(&String::from_utf8_lossy(&body)).ok();
                (Some(status), serde_json::from_slice(&body).ok().or_else(text), None)
            }
            Err(why) => (None, None, Some(why)),
        };
        ListedAnswer { http, role: role_name(role), status, body, error }
    }
}

/// Body of an instance's answer on its way to the client. It ends if the instance is silent for too
/// long.
struct PassedBody {
    body: PooledBody,
    silence: Pin<Box<Sleep>>,
    idle: Duration,
    _under_way: PassedRequest,
}

impl HttpBody for PassedBody {
    type Data = Bytes;
    type Error = String;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, String>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            let next = Instant::now() + self.idle;
            self.silence.as_mut().reset(next);
            return Poll::Ready(frame.map(|frame| frame.map_err(|why| chain(&why))));
        }
        let idle = self.idle;
        let silent = self.silence.as_mut().poll(context);
        silent.map(|()| Some(Err(format!("the instance was silent for {idle:?}"))))
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
