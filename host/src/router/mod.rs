//! `kvferry router`: the router core behind HTTP and the discovery socket.
//!
//! The core ([`kvferry_engine::core::router`]) decides: pairs, retries, breaker, expiry, queue,
//! drain. Here is only what turns HTTP into its inputs and its effects into HTTP. Everything runs
//! on one thread: the core as an actor ([`kvferry_engine::actors`]) behind
//! [`http_adapter`], and a task for each connection and each leg.

mod access;
mod admin;
mod api;
mod args;
mod body;
mod body_chain;
mod client_stream;
mod client_words;
mod connections;
mod encoding;
mod error;
mod exchange;
mod fields;
mod handler;
mod headers;
mod http_adapter;
mod identity;
mod in_flight;
mod in_process;
mod instance_times;
mod json_scan;
mod lax;
mod leg;
mod load;
mod memory_budget;
mod merge;
mod metrics;
mod model_lists;
mod params;
mod passing;
mod paths;
mod pool;
mod probe;
mod prompts;
mod relay;
mod request_spans;
mod response_makers;
mod retry_after;
mod routed_request;
mod server;
mod sse;
mod static_instances;

pub(crate) use access::guarded;
pub(crate) use args::RouterArgs;
pub use in_process::{HeldByRouter, RouterInProcess};
pub(crate) use pool::chain;

use self::access::AccessRules;
use self::admin::Admin;
use self::api::APIS;
use self::args::{HttpSettings, ShutdownTimes};
use self::connections::ConnectionTable;
use self::error::HttpError;
use self::handler::RequestHandler;
use self::http_adapter::{HttpAdapter, MAILBOX, ReleaseInstances, RouterAddr};
use self::memory_budget::MemoryBudget;
use self::metrics::{ClientMeters, RouterMetrics};
use self::passing::PathProxy;
use self::paths::{PASSED, PathTarget, passed};
use self::pool::ConnectionPool;
use self::server::ServedListener;
use self::static_instances::StaticSources;
use crate::instance::remedy;
use crate::process::{
    CommandError, Exit, PatientListener, ShutdownSignals, logs, open_files_max, raise_open_files,
};
use crate::spans::SpanTracer;
use crate::tls::ServerCertificate;
use axum::Router;
use axum::body::Body;
use axum::routing::{get, on, post};
use hyper::header::HeaderMap;
use hyper::{Request, StatusCode};
use kvferry_engine::actors::{Clock, Input, MailboxSender};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::router::{RouterConfig, RouterInput};
use kvferry_engine::fabric::{ControlPlane, Endpoint, LinkKind, bracketed};
use kvferry_wire::{SignedPlane, WireConfig, ZmqPlane};
use prometheus_client::registry::Registry;
use std::io::{self, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// Connections of operators at a time.
const ADMIN_CONNECTIONS: usize = 64;

/// Descriptors for operators and for the router itself.
const FILES_KEPT: u64 = 128;

/// Runs the router until SIGTERM or SIGINT.
///
/// # Errors
/// An argument or an address that cannot be used.
pub(crate) fn command(args: &RouterArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    logs::start(&args.logs);
    raise_open_files();
    let (bound, discovery, parts) = prepare(args)?;
    let tracer = parts.tracer.clone();
    announce(args, [bound[0].local_addr()?, bound[1].local_addr()?], &discovery, out)?;
    actix::System::new().block_on(run(args, bound, parts))?;
    if let Some(tracer) = tracer {
        tracer.finish();
    }
    Ok(Exit::HELD)
}

/// Opens the sockets for clients and operators, and makes the address for registrations and the
/// parts of a router from these arguments.
fn prepare(
    args: &RouterArgs,
) -> Result<([std::net::TcpListener; 2], Endpoint, RouterParts), CommandError> {
    let settings = args.settings()?;
    let config = args.config(&settings.proof)?;
    let times = args.shutdown()?;
    let statics = args.statics.sources(args.legs_ca.is_some())?;
    let certificate = args.tls.certificate().map_err(CommandError::Input)?;
    let pool = ConnectionPool::new(settings.limits.connect, args.leg_authorities()?);
    let (plane, discovery) = discovery(&args.discovery)?;
    let plane = SignedPlane::new(plane, settings.proof.clone());
    let mut plane = if config.require_signed { plane.demanding() } else { plane };
    let bound = [listen("--listen", &args.listen)?, listen("--admin-addr", &args.admin_addr)?];
    plane.set_waker(std::task::Waker::noop().clone());
    let (metrics, mut registry) = RouterMetrics::new();
    let http = bound[0].local_addr()?;
    let tracer = args.spans.tracer("kvferry-router", &http.to_string(), &mut registry)?;
    let is_tls = certificate.is_some();
    let admin = bound[1].local_addr()?;
    let access = [args.access.for_clients(http, is_tls), args.access.for_operators(admin)];
    let metrics = (metrics, registry);
    let parts = RouterParts {
        plane,
        config,
        settings,
        statics,
        pool,
        certificate,
        access,
        times,
        tracer,
        metrics,
    };
    Ok((bound, discovery, parts))
}

/// A socket that listens at the address of an option.
fn listen(option: &str, text: &str) -> Result<std::net::TcpListener, CommandError> {
    let at = resolve(option, text)?;
    std::net::TcpListener::bind(at)
        .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
        .map_err(|why| {
            let text = format!("{option} {text}: cannot listen: {why}; {}", remedy(text, &why));
            CommandError::Input(text)
        })
}

/// Connections of clients, so that descriptors are left: of those beyond [`FILES_KEPT`] a client has
/// a quarter, the legs of a request each with one prompt two, and who registers the rest.
fn clients_max(args: &RouterArgs) -> usize {
    let wanted = args.connections_max as usize;
    let Some(files) = open_files_max() else { return wanted };
    let most = usize::try_from(files.saturating_sub(FILES_KEPT) / 4).unwrap_or(usize::MAX).max(1);
    if most < wanted {
        tracing::warn!(
            connections = most,
            files,
            "fewer connections of clients than \
            --connections-max, for want of descriptors; raise the hard limit of open files (ulimit \
            -n), or lower --connections-max"
        );
    }
    most.min(wanted)
}

fn announce(
    args: &RouterArgs,
    [http, admin]: [SocketAddr; 2],
    discovery: &Endpoint,
    out: &mut dyn Write,
) -> io::Result<()> {
    let pid = std::process::id();
    if args.json {
        let line = serde_json::json!({
            "event": "listening", "http": http.to_string(), "admin": admin.to_string(),
            "discovery": discovery, "pid": pid,
        });
        writeln!(out, "{line}")?;
    } else {
        writeln!(out, "listening http={http} admin={admin} discovery={discovery} pid={pid}")?;
    }
    out.flush()
}

/// What a router is made of, beside its sockets.
struct RouterParts {
    plane: SignedPlane<ZmqPlane>,
    config: RouterConfig,
    settings: HttpSettings,
    statics: StaticSources,
    pool: ConnectionPool,
    /// What is shown to clients, if they are served over TLS.
    certificate: Option<ServerCertificate>,
    /// Rules of the two listeners.
    access: [Arc<AccessRules>; 2],
    times: ShutdownTimes,
    tracer: Option<SpanTracer>,
    metrics: (RouterMetrics, Registry),
}

/// A router whose tasks run in the current actix system.
struct RunningRouter {
    handler: Arc<RequestHandler>,
    core: RouterAddr,
    /// Keeps the listener for operators open during a drain, so that they can watch it.
    _operators: watch::Sender<bool>,
}

/// Starts a router; the future serves clients until `stopped`.
fn start(
    args: &RouterArgs,
    [clients, operators]: [std::net::TcpListener; 2],
    parts: RouterParts,
    stopped: watch::Receiver<bool>,
) -> io::Result<(RunningRouter, impl Future<Output = ()> + use<>)> {
    let RouterParts { plane, config, settings, statics, pool, certificate, .. } = parts;
    let clients = PatientListener::new(TcpListener::from_std(clients)?, "clients");
    let operators = PatientListener::new(TcpListener::from_std(operators)?, "operators");
    let clock = clock();
    let (metrics, registry) = parts.metrics;
    let write_timeout = settings.write_timeout;
    let settings = Arc::new(settings);
    let expiry = Duration::from_nanos(config.expiry.0);
    let router = kvferry_engine::core::router::Router::new(config, Incarnation(rand::random()));
    let core = HttpAdapter::start(
        router,
        plane,
        clock.clone(),
        pool.clone(),
        settings.clone(),
        metrics.clone(),
    );
    let handler = Arc::new(RequestHandler {
        core: MailboxSender::new(core.clone(), MAILBOX),
        settings,
        metrics: metrics.clone(),
        tracer: parts.tracer,
        next_client: AtomicU64::default(),
        memory: MemoryBudget::new(args.memory_max, metrics.memory_refused.clone()),
        is_draining: AtomicBool::default(),
    });
    let statics = statics.start(core.clone(), expiry);
    let proxy = PathProxy::new(handler.clone(), pool.clone(), clock.clone());
    let admin = Admin { handler: handler.clone(), pool, statics, registry: registry.into(), clock };
    let listener = |listener, app, table, meters, access| ServedListener {
        listener,
        app,
        table,
        certificate: None,
        meters,
        access,
        write_timeout,
    };
    let [table, admin_table] = [clients_max(args), ADMIN_CONNECTIONS].map(ConnectionTable::new);
    let [access, admin_access] = parts.access;
    let client_app = app(handler.clone(), &admin, &proxy);
    let serving = listener(clients, client_app, table, metrics.clients, access);
    let serving = ServedListener { certificate: certificate.map(Arc::new), ..serving };
    let (admin_app, meters) = (admin_app(&admin, &proxy), ClientMeters::default());
    let telling = listener(operators, admin_app, admin_table, meters, admin_access);
    let (_operators, never) = watch::channel(false);
    let _ends_with_the_system = actix::spawn(server::serve(telling, never));
    Ok((RunningRouter { handler, core, _operators }, server::serve(serving, stopped)))
}

async fn run(
    args: &RouterArgs,
    bound: [std::net::TcpListener; 2],
    parts: RouterParts,
) -> io::Result<()> {
    let mut ends = ShutdownSignals::new()?;
    let times = parts.times;
    let (stop, stopped) = watch::channel(false);
    let (running, serving) = start(args, bound, parts, stopped)?;
    let RunningRouter { handler, core, .. } = &running;
    let mut serving = std::pin::pin!(serving);
    tokio::select! {
        () = serving.as_mut() => {}
        () = ends.recv() => {}
    }
    handler.is_draining.store(true, Ordering::Relaxed);
    tokio::select! {
        () = serving.as_mut() => {}
        () = let_go(core, times.delay, &mut ends) => {}
    }
    tracing::info!("draining: requests in flight are finished, no new ones are taken");
    core.do_send(Input(RouterInput::Drain));
    // The receiver lives as long as `serving`.
    let _ = stop.send(true);
    match tokio::time::timeout(times.drain, serving).await {
        Ok(()) => tracing::info!("drained"),
        Err(_) => tracing::warn!(?times.drain, "requests were cut off by --drain-timeout"),
    }
    Ok(())
}

/// Time since this call by tokio's clock, which a test can stop.
fn clock() -> Clock {
    let start = tokio::time::Instant::now();
    Arc::new(move || Nanos(start.elapsed().as_nanos() as u64))
}

/// Has instances register with another router, and waits for the time in which clients are to find
/// that, too.
async fn let_go(core: &RouterAddr, delay: Duration, ends: &mut ShutdownSignals) {
    core.do_send(ReleaseInstances);
    if delay > Duration::ZERO {
        tracing::info!(?delay, "draining: instances are let go, new requests are still served");
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = ends.recv() => {}
        }
    }
}

/// Paths that only operators are told.
const ADMIN_PATHS: [&str; 4] = ["/workers", "/list_workers", "/registrations/rejected", "/metrics"];

/// A handler of what is told without a body.
macro_rules! told {
    ($admin:expr, $what:ident) => {{
        let admin = $admin.clone();
        get(move || {
            let admin = admin.clone();
            async move { admin.$what().await }
        })
    }};
}

/// What clients may ask.
fn app(handler: Arc<RequestHandler>, admin: &Admin, proxy: &PathProxy) -> Router {
    let mut app = Router::new();
    for api in APIS {
        let handler = handler.clone();
        let serve = move |request: Request<Body>| {
            let handler = handler.clone();
            async move { handler.serve(api, request).await }
        };
        app = app.route(api.path(), post(serve));
    }
    let models = admin.clone();
    let models = get(move |client: HeaderMap| {
        let admin = models.clone();
        async move { admin.models(client).await }
    });
    app = app.route("/readiness", told!(admin, client_readiness)).route("/v1/models", models);
    with_common(with_passed(app, proxy, false), &proxy.handler)
}

/// Adds the paths that are passed on to instances.
fn with_passed(app: Router, proxy: &PathProxy, to_operators: bool) -> Router {
    passed(to_operators).fold(app, |app, row| {
        let proxy = proxy.clone();
        let serve = move |request: Request<Body>| {
            let proxy = proxy.clone();
            async move { proxy.serve(row, request).await }
        };
        app.route(row.path, on(row.method.filter(), serve))
    })
}

/// What operators may ask.
fn admin_app(admin: &Admin, proxy: &PathProxy) -> Router {
    let [workers, list, rejected, metrics] = ADMIN_PATHS;
    let app = Router::new()
        .route("/", get(|| async { admin::status_page() }))
        .route("/readiness", told!(admin, readiness))
        .route(workers, told!(admin, workers))
        .route(list, told!(admin, workers))
        .route(rejected, told!(admin, rejected))
        .route(metrics, told!(admin, metrics));
    with_common(with_passed(app, proxy, true), &proxy.handler)
}

/// True if a path is served to operators only.
fn is_of_operators(path: &str) -> bool {
    ADMIN_PATHS.contains(&path)
        || PASSED.iter().any(|row| row.target == PathTarget::All && row.path == path)
}

fn with_common(app: Router, handler: &RequestHandler) -> Router {
    let (name, nonce) = handler.settings.identity.header();
    app.route("/health", get(move || async move { ([(name, nonce)], "OK") }))
        .route("/liveness", get("OK"))
        .fallback(|request: Request<Body>| async move {
            let path = shown(&request);
            let message = match is_of_operators(request.uri().path()) {
                true => format!("{path} is served at the address of --admin-addr, and not here"),
                false => format!("no such path: {path}; docs/router.md lists those that there are"),
            };
            HttpError::new(StatusCode::NOT_FOUND, &message)
        })
        .method_not_allowed_fallback(|request: Request<Body>| async move {
            let message = format!("{} is not taken on {}", request.method(), shown(&request));
            HttpError::new(StatusCode::METHOD_NOT_ALLOWED, &message)
        })
}

/// The path of a request, cut to the length that an error shows.
fn shown(request: &Request<Body>) -> String {
    request.uri().path().chars().take(200).collect()
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
    // A plane gives less detail about why it cannot listen.
    drop(listen("--discovery", &all)?);
    let host = bracketed(&at.ip().to_string()).into_owned();
    let ports = (at.port() > 0).then_some((LinkKind::Discovery, at.port()));
    let config = WireConfig { host, ports: ports.into_iter().collect(), ..WireConfig::default() };
    let mut plane = ZmqPlane::new(config)?;
    let bound = plane
        .listen(LinkKind::Discovery)
        .map_err(|why| CommandError::Input(format!("--discovery {text}: {why}")))?;
    Ok((plane, bound))
}
