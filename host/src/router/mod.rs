//! `kvferry router`: the router core behind HTTP and the discovery socket.
//!
//! The core ([`kvferry_engine::core::router`]) decides: pairs, retries, breaker, expiry, queue,
//! drain. Here is only what turns HTTP into its inputs and its effects into HTTP. Everything runs
//! on one thread: the core as an actor ([`kvferry_engine::actors`]) behind
//! [`http_adapter`], and a task for each connection and each leg.

mod admin;
mod api;
mod args;
mod body;
mod error;
mod fields;
mod handler;
mod http_adapter;
mod leg;
mod merge;
mod metrics;
mod params;
mod pool;
mod probe;
mod relay;
mod server;
mod sse;

pub(crate) use args::RouterArgs;

use self::admin::Admin;
use self::api::APIS;
use self::args::{HttpSettings, seconds};
use self::error::HttpError;
use self::handler::RequestHandler;
use self::http_adapter::{HttpAdapter, MAILBOX};
use self::metrics::RouterMetrics;
use self::pool::ConnectionPool;
use crate::process::{CommandError, Exit, ShutdownSignals, logs};
use axum::Router;
use axum::body::Body;
use axum::routing::{get, post};
use hyper::header::HeaderMap;
use hyper::{Request, StatusCode};
use kvferry_engine::actors::{Input, MailboxSender, monotonic_clock};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::router::{RouterConfig, RouterInput};
use kvferry_engine::fabric::{ControlPlane, Endpoint, LinkKind, bracketed};
use kvferry_wire::{WireConfig, ZmqPlane};
use std::io::{self, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// Runs the router until SIGTERM or SIGINT.
///
/// # Errors
/// An argument or an address that cannot be used.
pub(crate) fn command(args: &RouterArgs, out: &mut impl Write) -> Result<Exit, CommandError> {
    logs::start(&args.logs);
    let settings = args.settings()?;
    let config = args.config()?;
    let drain = seconds("--drain-timeout", args.drain_timeout)?;
    let (mut plane, discovery) = discovery(&args.discovery)?;
    let listen = resolve("--listen", &args.listen)?;
    let bound = std::net::TcpListener::bind(listen)
        .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
        .map_err(|why| {
            CommandError::Input(format!("--listen {}: cannot listen: {why}", args.listen))
        })?;
    let http = bound.local_addr()?;
    plane.set_waker(std::task::Waker::noop().clone());
    announce(args, http, &discovery, out)?;
    actix::System::new().block_on(run(args, bound, Box::new(plane), config, settings, drain))?;
    Ok(Exit::HELD)
}

fn announce(
    args: &RouterArgs,
    http: SocketAddr,
    discovery: &Endpoint,
    out: &mut impl Write,
) -> io::Result<()> {
    let pid = std::process::id();
    if args.json {
        let line = serde_json::json!({
            "event": "listening", "http": http.to_string(), "discovery": discovery, "pid": pid,
        });
        writeln!(out, "{line}")?;
    } else {
        writeln!(out, "listening http={http} discovery={discovery} pid={pid}")?;
    }
    out.flush()
}

async fn run(
    args: &RouterArgs,
    bound: std::net::TcpListener,
    plane: Box<dyn ControlPlane>,
    config: RouterConfig,
    settings: HttpSettings,
    drain: Duration,
) -> io::Result<()> {
    let mut ends = ShutdownSignals::new()?;
    let listener = TcpListener::from_std(bound)?;
    let clock = monotonic_clock();
    let (metrics, registry) = RouterMetrics::new();
    let pool = ConnectionPool::new(settings.limits.connect);
    let settings = Arc::new(settings);
    let router = kvferry_engine::core::router::Router::new(config, Incarnation(rand::random()));
    let core = HttpAdapter::start(
        router,
        plane,
        clock.clone(),
        pool.clone(),
        settings.clone(),
        metrics.clone(),
    );
    let next_client = AtomicU64::default();
    let handler = Arc::new(RequestHandler {
        core: MailboxSender::new(core.clone(), MAILBOX),
        settings,
        metrics: metrics.clone(),
        next_client,
    });
    let admin = Admin { handler: handler.clone(), pool, registry: registry.into(), clock };
    let (stop, stopped) = watch::channel(false);
    let serving = server::serve(
        listener,
        app(handler, admin),
        args.connections_max as usize,
        metrics,
        stopped,
    );
    let mut serving = std::pin::pin!(serving);
    tokio::select! {
        () = serving.as_mut() => {}
        () = ends.recv() => {}
    }
    tracing::info!("draining: requests in flight are finished, no new ones are taken");
    core.do_send(Input(RouterInput::Drain));
    // The receiver lives as long as `serving`.
    let _ = stop.send(true);
    let drained = tokio::time::timeout(drain, serving).await.is_ok();
    match drained {
        true => tracing::info!("drained"),
        false => tracing::warn!(?drain, "requests were cut off by --drain-timeout"),
    }
    Ok(())
}

fn app(handler: Arc<RequestHandler>, admin: Admin) -> Router {
    let mut app = Router::new();
    for api in APIS {
        let handler = handler.clone();
        let serve = move |request: Request<Body>| {
            let handler = handler.clone();
            async move { handler.serve(api, request).await }
        };
        app = app.route(api.path(), post(serve));
    }
    macro_rules! told {
        ($what:ident) => {{
            let admin = admin.clone();
            get(move || {
                let admin = admin.clone();
                async move { admin.$what().await }
            })
        }};
    }
    let models = admin.clone();
    let models = get(move |client: HeaderMap| {
        let admin = models.clone();
        async move { admin.models(client).await }
    });
    app.route("/health", get("OK"))
        .route("/liveness", get("OK"))
        .route("/readiness", told!(readiness))
        .route("/workers", told!(workers))
        .route("/list_workers", told!(workers))
        .route("/registrations/rejected", told!(rejected))
        .route("/metrics", told!(metrics))
        .route("/v1/models", models)
        .fallback(|request: Request<Body>| async move {
            let message = format!("no such path: {}", request.uri().path());
            HttpError::new(StatusCode::NOT_FOUND, &message)
        })
        .method_not_allowed_fallback(|request: Request<Body>| async move {
            let message = format!("{} is not taken on {}", request.method(), request.uri().path());
            HttpError::new(StatusCode::METHOD_NOT_ALLOWED, &message)
        })
}

/// The address of an argument `host:port`.
fn resolve(option: &str, text: &str) -> Result<SocketAddr, CommandError> {
    let wrong = |why: String| {
        CommandError::Input(format!("{option} {text}: {why}; give HOST:PORT, IPv6 in brackets"))
    };
    let mut found = text.to_socket_addrs().map_err(|why| wrong(why.to_string()))?;
    found.next().ok_or_else(|| wrong("host without an address".into()))
}

/// The plane that listens for registrations, and where.
fn discovery(text: &str) -> Result<(ZmqPlane, Endpoint), CommandError> {
    // As vLLM's and ZeroMQ's documents have it.
    let all = text.replacen("*:", "0.0.0.0:", usize::from(text.starts_with("*:")));
    let at = resolve("--discovery", &all)?;
    let host = bracketed(&at.ip().to_string()).into_owned();
    let ports = (at.port() > 0).then_some((LinkKind::Discovery, at.port()));
    let config = WireConfig { host, ports: ports.into_iter().collect(), ..WireConfig::default() };
    let mut plane = ZmqPlane::new(config)?;
    let bound = plane
        .listen(LinkKind::Discovery)
        .map_err(|why| CommandError::Input(format!("--discovery {text}: {why}")))?;
    Ok((plane, bound))
}
