//! What the router tells about itself, and what it asks an instance on a client's behalf.

use super::body_chain::BodyChain;
use super::error::HttpError;
use super::handler::RequestHandler;
use super::identity::ROUTER;
use super::leg::{self, JSON};
use super::metrics::{role_name, state_name};
use super::model_lists::ModelLists;
use super::pool::ConnectionPool;
use super::probe::MODELS_BYTES;
use super::static_instances::StaticSources;
use crate::instance::metrics_page;
use axum::body::Body;
use axum::response::{Html, IntoResponse, Response};
use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{AUTHORIZATION, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderMap};
use hyper::{Request, StatusCode, Uri};
use kvferry_engine::actors::Query;
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::router::{Dialects, InstanceState, RejectReason, Router, RouterCounters};
use kvferry_engine::core::{Machine, Nanos};
use kvferry_engine::fabric::Endpoint;
use kvferry_engine::source::PeerSource;
use prometheus_client::registry::Registry;
use serde::Serialize;
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Time for an instance to list its models.
const PATIENCE: Duration = Duration::from_secs(5);

/// Instances that are asked for their models for one client.
const ASKED_MAX: usize = 8;

/// Pairs that are listed as not fitting.
const MISFITS_MAX: usize = 64;

/// What the handlers here need.
#[derive(Clone)]
pub(crate) struct Admin {
    pub(crate) handler: Arc<RequestHandler>,
    pub(crate) pool: ConnectionPool,
    pub(crate) statics: Arc<StaticSources>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) clock: kvferry_engine::actors::Clock,
}

/// An instance as it is listed.
#[derive(Serialize)]
struct ListedInstance {
    engine: String,
    role: &'static str,
    http: Endpoint,
    zmq: Option<String>,
    transfer_mode: &'static str,
    native: bool,
    /// The operator named it, and it says nothing of itself.
    #[serde(rename = "static")]
    is_static: bool,
    dp_rank: u16,
    dp_size: u16,
    tp_size: u16,
    state: &'static str,
    /// True if it can serve now, as `/readiness` counts.
    serves: bool,
    /// Why the last connection to it was none.
    unreachable: Option<String>,
    age_seconds: f64,
    in_flight_legs: u32,
    in_flight_tokens: u64,
    /// Legs that it takes at a time, if it refused one as busy.
    legs_max: Option<u32>,
    /// What its server said of its load, if it is asked for that.
    load: Option<ListedLoad>,
    #[serde(skip)]
    is: (Role, Mode, InstanceState),
    /// None if it may serve any.
    models: Option<Vec<Arc<str>>>,
    #[serde(skip)]
    dialects: Dialects,
}

/// What a server said of its load, as it is listed.
#[derive(Serialize)]
struct ListedLoad {
    running: u32,
    waiting: u32,
    queued: u32,
    kv_cache_usage: f64,
    age_seconds: f64,
    /// Others are taken.
    busy: bool,
}

/// A registration that was not taken, as it is listed.
#[derive(Serialize)]
struct ListedRejection {
    from: String,
    reason: String,
    why: String,
    age_seconds: f64,
}

/// Two instances that are not paired, as they are listed.
#[derive(Serialize)]
struct ListedMismatch {
    prefill: String,
    decode: String,
    why: String,
}

struct RouterSnapshot {
    workers: Vec<ListedInstance>,
    rejected: Vec<ListedRejection>,
    misfits: Vec<ListedMismatch>,
    counters: RouterCounters,
    waiting: u32,
    failures: u32,
    draining: bool,
}

fn seconds(span: Nanos) -> f64 {
    span.0 as f64 / 1e9
}

/// Reason why an instance that is this router itself is rejected.
const OWN_ADDRESS: &str = "this router itself answers there: correct --prefill, --decode, or \
                           http_port of the connector";

/// `own` are addresses of instances at which the router found itself.
fn state(
    router: &Router,
    pool: &ConnectionPool,
    own: &[(Endpoint, Duration)],
    now: Nanos,
) -> RouterSnapshot {
    let workers = router.instances(now).map(|it| ListedInstance {
        engine: it.engine.to_string(),
        role: role_name(it.role),
        http: it.http.clone(),
        zmq: it.zmq.map(ToString::to_string),
        transfer_mode: match it.mode {
            Mode::Push => "push",
            Mode::Pull => "pull",
        },
        native: it.dialects.native,
        is_static: it.dialects.is_static(),
        dp_rank: it.dp_rank,
        dp_size: it.dp_size,
        tp_size: it.tp,
        state: state_name(it.state),
        serves: it.state.serves(),
        unreachable: pool.failure(it.http).or_else(|| {
            own.iter().any(|(http, _)| http == it.http).then(|| OWN_ADDRESS.to_owned())
        }),
        age_seconds: seconds(it.age),
        in_flight_legs: it.legs,
        in_flight_tokens: it.tokens,
        legs_max: it.legs_max,
        load: it.load.map(|(load, age)| ListedLoad {
            running: load.running,
            waiting: load.waiting,
            queued: load.queued,
            kv_cache_usage: f64::from(load.kv_cache) / 1000.0,
            age_seconds: seconds(age),
            busy: it.busy,
        }),
        is: (it.role, it.mode, it.state),
        models: it.models.map(|models| models.iter().cloned().collect()),
        dialects: it.dialects,
    });
    let rejected = router.rejections().map(|it| ListedRejection {
        from: it.from.to_string(),
        reason: it.reason.to_string(),
        why: match it.reason {
            RejectReason::Unlisted => {
                format!("{} is not listed: name it in --instances of the router", it.from)
            }
            _ => it.why.to_string(),
        },
        age_seconds: seconds(now - it.at),
    });
    let rejected = rejected.chain(own.iter().map(|(http, age)| ListedRejection {
        from: http.to_string(),
        reason: "own address".into(),
        why: OWN_ADDRESS.into(),
        age_seconds: age.as_secs_f64(),
    }));
    let misfits = router.misfits().map(|(prefill, decode, why)| ListedMismatch {
        prefill: prefill.to_string(),
        decode: decode.to_string(),
        why: why.to_string(),
    });
    let gauges = router.gauges();
    RouterSnapshot {
        misfits: misfits.collect(),
        workers: workers.collect(),
        rejected: rejected.collect(),
        counters: router.counters().clone(),
        waiting: gauges.queued,
        failures: gauges.failures,
        draining: router.is_draining(),
    }
}

fn listed(misfits: &[ListedMismatch]) -> &[ListedMismatch] {
    &misfits[..misfits.len().min(MISFITS_MAX)]
}

fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => {
            let mut response = (status, body).into_response();
            response.headers_mut().insert(CONTENT_TYPE, JSON);
            response
        }
        Err(why) => {
            HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, &why.to_string()).into_response()
        }
    }
}

/// A page that shows what the paths here tell, and asks them again every two seconds.
pub(super) fn status_page() -> Response {
    let policy = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src \
                  'unsafe-inline'; frame-ancestors 'none'";
    ([(CONTENT_SECURITY_POLICY, policy)], Html(include_str!("status.html"))).into_response()
}

impl RouterSnapshot {
    fn serving(&self, role: Role) -> impl Iterator<Item = &ListedInstance> {
        self.workers.iter().filter(move |it| it.is.0 == role && it.serves)
    }

    /// True if a prefill and a decode that fit each other can serve now.
    fn is_ready(&self) -> bool {
        let apart: BTreeSet<(&str, &str)> =
            self.misfits.iter().map(|it| (&*it.prefill, &*it.decode)).collect();
        let fit = |prefill: &ListedInstance, decode: &ListedInstance| {
            prefill.is.1 == decode.is.1
                && decode.dialects.meet(prefill.dialects)
                && !apart.contains(&(&*prefill.engine, &*decode.engine))
        };
        let has_decode = |prefill| self.serving(Role::Decode).any(|decode| fit(prefill, decode));
        !self.draining && self.serving(Role::Prefill).any(has_decode)
    }
}

impl Admin {
    async fn state(&self) -> Result<RouterSnapshot, HttpError> {
        let (now, pool) = ((self.clock)(), self.pool.clone());
        let own = self.handler.settings.identity.found();
        let look = Query(Box::new(move |router: &Router| state(router, &pool, &own, now)));
        let gone = |_| HttpError::new(StatusCode::SERVICE_UNAVAILABLE, "the router is stopping");
        self.handler.core.address().send(look).await.map_err(gone)
    }

    /// Whether there is a pair of instances of one mode that can serve, and which do not fit.
    pub(crate) async fn readiness(&self) -> Response {
        self.whether_ready(true).await
    }

    /// The same for clients, who are not told who does not fit.
    pub(crate) async fn client_readiness(&self) -> Response {
        self.whether_ready(false).await
    }

    async fn whether_ready(&self, with_misfits: bool) -> Response {
        let state = match self.state().await {
            Ok(state) => state,
            Err(refusal) => return refusal.into_response(),
        };
        let ready = state.is_ready();
        let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let mut told = serde_json::json!({
            "status": match (state.draining, ready) {
                (true, _) => "draining",
                (false, true) => "ready",
                (false, false) => "no pair",
            },
            "ready": ready,
            "draining": state.draining,
            "prefill": state.serving(Role::Prefill).count(),
            "decode": state.serving(Role::Decode).count(),
        });
        if with_misfits {
            told["misfits"] = serde_json::json!(listed(&state.misfits));
        }
        json(status, &told)
    }

    pub(crate) async fn workers(&self) -> Response {
        match self.state().await {
            Ok(state) => {
                let named = self.statics.list();
                json(
                    StatusCode::OK,
                    &serde_json::json!({ "workers": state.workers, "static": named }),
                )
            }
            Err(refusal) => refusal.into_response(),
        }
    }

    /// Registrations that were not taken, and pairs that are not made.
    pub(crate) async fn rejected(&self) -> Response {
        match self.state().await {
            Ok(state) => {
                let counts = &state.counters.rejected;
                let total: u64 = counts.values().sum();
                let rejected = serde_json::json!({
                    "total": total, "last": state.rejected, "misfits": listed(&state.misfits),
                });
                json(StatusCode::OK, &rejected)
            }
            Err(refusal) => refusal.into_response(),
        }
    }

    /// The page for Prometheus.
    pub(crate) async fn metrics(&self) -> Response {
        match self.state().await {
            Ok(state) => {
                let instances = state
                    .workers
                    .iter()
                    .map(|it| (it.is.0, it.is.2, it.load.as_ref().is_some_and(|load| load.busy)));
                let there = state.workers.iter().map(|it| (it.is.0, &*it.engine));
                self.handler.metrics.times.retain(there);
                self.handler.metrics.update_static(&self.statics.list());
                self.handler.metrics.update_readiness(state.is_ready());
                let gauges = (state.waiting, state.failures);
                self.handler.metrics.update(&state.counters, instances, gauges);
                metrics_page(&self.registry)
            }
            Err(refusal) => refusal.into_response(),
        }
    }

    /// The models of all instances, as these list them.
    pub(crate) async fn models(&self, client: HeaderMap) -> Response {
        match self.ask_for_models(&client).await {
            Ok(response) => response,
            Err(refusal) => refusal.into_response(),
        }
    }

    /// Asks instances until each model that is known to be served is in a list.
    async fn ask_for_models(&self, client: &HeaderMap) -> Result<Response, HttpError> {
        let settings = &self.handler.settings;
        let mut headers = HeaderMap::from_iter([(ROUTER, settings.identity.appended(client)?)]);
        let key = settings.authorization.as_ref().or_else(|| client.get(AUTHORIZATION));
        headers.extend(key.map(|key| (AUTHORIZATION, key.clone())));
        let state = self.state().await?;
        let mut ready: Vec<_> = state.workers.iter().filter(|it| it.serves).collect();
        ready.sort_by_key(|it| (it.is.0 == Role::Prefill, it.in_flight_legs));
        let mut why =
            "no instance is ready; /workers of --admin-addr has what is registered".to_owned();
        // The lists are short, so all clients that ask for them share one account.
        let mut memory = self.handler.memory.charge(PeerSource::new(Ipv4Addr::UNSPECIFIED.into()));
        let (mut lists, mut asked) = (ModelLists::default(), 0);
        for worker in &ready {
            if asked >= ASKED_MAX || !lists.misses(worker.models.as_deref()) {
                continue;
            }
            asked += 1;
            let answer = timeout(PATIENCE, self.models_of(worker, &headers)).await;
            match answer.unwrap_or_else(|_| Err(format!("no answer within {PATIENCE:?}"))) {
                Ok((status, body)) => {
                    memory.add(body.len()).map_err(|why| why.error("the list of models"))?;
                    lists.add(status, body);
                }
                Err(said) => why = format!("instance {}: {said}", worker.http),
            }
        }
        for worker in ready {
            lists.name(worker.models.as_deref());
        }
        let (status, body) = lists
            .into_answer()
            .ok_or_else(|| HttpError::new(StatusCode::SERVICE_UNAVAILABLE, &why))?;
        let body = Body::new(BodyChain::from(body).holding(vec![memory]));
        let mut response = (status, body).into_response();
        response.headers_mut().insert(CONTENT_TYPE, JSON);
        Ok(response)
    }

    async fn models_of(
        &self,
        worker: &ListedInstance,
        headers: &HeaderMap,
    ) -> Result<(StatusCode, Bytes), String> {
        let mut request = Request::new(Full::<Bytes>::default());
        *request.uri_mut() = Uri::from_static("/v1/models");
        request.headers_mut().clone_from(headers);
        let answer = self.pool.send(&worker.http, request).await?;
        let (head, body) = answer.into_parts();
        if head.status.is_server_error() {
            return Err(format!("status {}", head.status));
        }
        let limits = &self.handler.settings.limits;
        let body = leg::collect(body, MODELS_BYTES, limits.idle).await?;
        Ok((head.status, body))
    }
}
