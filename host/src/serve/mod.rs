//! `kvferry serve`: a prefill or decode instance without a model, over real planes.
//!
//! Its KV is a function of the token ids, and a decode answers with a digest of what it got, so
//! that wrong bytes show in the answer. `instance` is between HTTP (`http`) and the protocol actor;
//! `legs` reads what routers say of a transfer, `kv_content` makes and checks the bytes.

mod args;
mod bodies;
mod http;
mod instance;
pub(crate) mod kv_content;
mod memory;
mod metrics;
mod openai;

pub(crate) use args::ServeArgs;

use crate::instance::{
    ControlListeners, CounterSource, FabricArg, InstanceIdentity, InstanceTrust, ListenAddresses,
    PlaneConfig, PlaneMeter, RankSetup, StartedPlane, TransferLog, incarnations, remedy,
};
use crate::process::{
    CommandError, Exit, PatientListener, ShutdownSignals, logs, raise_open_files,
};
use crate::router::guarded;
use crate::spans::SpanTracer;
use actix::{Addr, System};
use args::ServePlan;
use instance::{DrainInstance, InstanceActor, InstanceServer, ServerParts};
use kv_content::InstanceKv;
use kvferry_engine::actors::{InstanceBuilder, MailboxSender, monotonic_clock};
use kvferry_engine::core::config::CoreConfig;
use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::{Role, ServedModels};
use kvferry_engine::core::moriio::{MoriioConfig, MoriioSettings};
use kvferry_engine::fabric::{ControlPlane, Endpoint, bracketed};
use kvferry_fabric_host::{HostConfig, PeerTrust};
use kvferry_fabric_mori::MoriConfig;
use kvferry_scenarios::decide;
use kvferry_scenarios::engine::{EngineConfig, SimEngine};
use memory::Backing;
use metrics::InstanceMetrics;
use prometheus_client::registry::Registry;
use serde::Serialize;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;

/// Routers send legs for as long as they remember the last heartbeat: 5 s of vllm-router 0.1.17.
const LINGER: Duration = Duration::from_secs(6);

/// What the instance says on its standard output once it serves: one JSON object in one line.
#[derive(Serialize)]
struct ReadyLine<'a> {
    role: Role,
    http: &'a str,
    handshake: &'a str,
    notify: &'a str,
    incarnation: u64,
}

/// Serves until it is told to stop.
pub(crate) fn command(args: &ServeArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    logs::start(&args.logs);
    raise_open_files();
    let plan = args.plan()?;
    System::new().block_on(serve(args, &plan, out))
}

async fn serve(
    args: &ServeArgs,
    plan: &ServePlan,
    out: &mut dyn Write,
) -> Result<Exit, CommandError> {
    let ends = ShutdownSignals::new()?;
    let trust = args.trust()?;
    let places = ListenAddresses {
        host: ("--host", &args.host),
        handshake: ("--handshake-port", args.handshake_port),
        notify: ("--notify-port", args.notify_port),
        ranks: plan.instance.tp,
    };
    let admitted = InstanceTrust::of(places.host, &trust)
        .map_err(|why| CommandError::Input(why.to_string()))?;
    let listener = listen(&args.host, args.http_port).await?;
    let port = listener.local_addr()?.port();
    let address = format!("{}:{port}", bracketed(&args.host));
    let listeners = ControlListeners::new(places, trust.peers.secret_file.as_deref(), admitted);
    let ControlListeners { plane, handshake, notify, address: zmq, proof } =
        listeners.map_err(CommandError::Input)?;
    // Nobody will know the instance by a port that it was not given.
    let state =
        args.state.clone().or_else(incarnations::own_folder).filter(|_| args.handshake_port != 0);
    let incarnation = incarnations::begin(&zmq.engine(), None, state.as_deref());
    let closed = admitted.moriio_closed(&zmq.engine());
    let known_as = (zmq.clone(), &*address, &handshake, closed);
    let config = core_config(args, plan, known_as, incarnation);
    let ranks =
        (0..config.geometry.tp).map(|rank| rank_parts(args, plan, (&config, &trust.peers), rank));
    let ranks = ranks.collect::<Result<Vec<_>, CommandError>>()?;
    let meters = ranks.iter().map(|rank| CounterSource::Here(rank.meter.clone())).collect();
    let (metrics, mut registry) = InstanceMetrics::new(meters, admitted);
    let (tracer, transfers) = traced(args, &address, &config, &mut registry)?.unzip();
    let own = InstanceIdentity {
        role: config.role,
        mode: config.mode,
        address: zmq,
        ports: MoriioSettings::default().ports,
        tp: plan.instance.tp,
        control: handshake.clone(),
        incarnation,
        moriio_peers: admitted.moriio_peers,
        moriio_only: args.moriio_only,
        proof,
    };
    let instance = start(plan, config, plane, ranks, (metrics.clone(), transfers))?;
    let shared = Arc::new(http::HandlerState {
        instance: instance.clone(),
        own,
        model: plan.model.name.clone(),
        served: args.served_model_name.clone(),
        registry,
        is_traced: tracer.is_some(),
        bodies: bodies::ServeBodies::new(args.bodies_max),
        draining: AtomicBool::new(false),
        requests: AtomicU64::new(0),
    });
    let ready = ReadyLine {
        role: plan.instance.role,
        http: &address,
        handshake: &handshake.0,
        notify: &notify.0,
        incarnation: incarnation.0,
    };
    writeln!(out, "{}", serde_json::to_string(&ready).expect("names and numbers"))?;
    out.flush()?;
    tracing::info!(http = address, handshake = &*handshake.0, notify = &*notify.0, "serving");
    let app = guarded(http::app(shared.clone()), listener.local_addr()?);
    let stop = stopped(ends, instance.address().clone(), shared, metrics);
    let listener = PatientListener::new(listener, "requests");
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    tracer.iter().for_each(SpanTracer::finish);
    Ok(Exit::HELD)
}

/// What begins spans, and what has one made of each transfer, if a collector is named.
fn traced(
    args: &ServeArgs,
    address: &str,
    config: &CoreConfig,
    registry: &mut Registry,
) -> Result<Option<(SpanTracer, TransferLog)>, CommandError> {
    let tracer = args.spans.tracer("kvferry-serve", address, registry)?;
    Ok(tracer.map(|tracer| {
        // It keeps none but those under way.
        let transfers = TransferLog::new(config.role, config.mode, config.geometry.tp, 1);
        (tracer.clone(), transfers.with_spans(tracer))
    }))
}

async fn listen(host: &str, port: u16) -> Result<TcpListener, CommandError> {
    let address = format!("{}:{port}", bracketed(host));
    TcpListener::bind(&address).await.map_err(|why| {
        let remedy = remedy(&address, &why);
        let text = format!("cannot listen at {address} (--host, --http-port): {why}; {remedy}");
        CommandError::Input(text)
    })
}

fn core_config(
    args: &ServeArgs,
    plan: &ServePlan,
    (zmq, http, handshake, closed): (ZmqAddress, &str, &Endpoint, Option<Arc<str>>),
    incarnation: Incarnation,
) -> CoreConfig {
    let name = |layer: u16| args.layer_name.replace("{}", &layer.to_string()).into();
    let (role, engine) = (plan.instance.role, zmq.engine());
    let geometry = kvferry_scenarios::geometry::geometry(&plan.model, &plan.instance);
    CoreConfig {
        mode: plan.instance.mode,
        http: Endpoint(http.into()),
        dp: (plan.instance.dp_rank, plan.instance.dp_size),
        router: args.proxy.as_ref().map(|proxy| Endpoint(format!("tcp://{proxy}").into())),
        settings: plan.limits.protocol.clone(),
        channel: plan.limits.channel.clone(),
        verify: args.verify,
        models: served_models(&args.served_model_name),
        moriio: Some(MoriioConfig {
            address: zmq,
            layer_names: (0..plan.model.layers).map(name).collect(),
            attn_backend: "CPU_ATTN".into(),
            settings: MoriioSettings { only: args.moriio_only, ..MoriioSettings::default() },
            closed,
        }),
        ..CoreConfig::new(role, engine, incarnation, geometry, handshake.clone())
    }
}

fn served_models(names: &[String]) -> Option<Arc<ServedModels>> {
    let names: Vec<Arc<str>> = names.iter().map(|name| name.as_str().into()).collect();
    (!names.is_empty()).then(|| Arc::new(ServedModels { names, adapters: Vec::new() }))
}

/// What a TP rank is started with.
struct ServeRank {
    parts: RankSetup,
    meter: PlaneMeter,
    backing: Backing,
}

fn rank_parts(
    args: &ServeArgs,
    plan: &ServePlan,
    (core, trust): (&CoreConfig, &PeerTrust),
    rank: u16,
) -> Result<ServeRank, CommandError> {
    let trust = trust.clone();
    let config = match args.fabric {
        FabricArg::Host => {
            let slower = args.private_memory;
            PlaneConfig::Host(HostConfig { slower, trust, ..HostConfig::default() })
        }
        FabricArg::Mori => {
            PlaneConfig::mori(MoriConfig::default(), trust).map_err(CommandError::Input)?
        }
    };
    // MoRI takes memory of its own process only.
    let private = args.private_memory || args.fabric == FabricArg::Mori;
    let backing = Backing::new(plan, private).map_err(CommandError::Input)?;
    let plane = config.start(core, rank, &args.host).map_err(CommandError::Input)?;
    let StartedPlane { plane, meter, .. } = plane;
    let kv = (vec![backing.memory()], backing.layers().to_vec());
    let parts = RankSetup { rank, plane, kv, settings: plan.limits.operations.clone() };
    Ok(ServeRank { parts, meter, backing })
}

fn engine(plan: &ServePlan, incarnation: Incarnation) -> Result<SimEngine, CommandError> {
    let id_seed = decide::mix(incarnation.0, u64::from(std::process::id()));
    let config = EngineConfig::new(&plan.model, &plan.instance, &plan.engine, Some(id_seed));
    SimEngine::new(config).map_err(|why| CommandError::Input(why.to_string()))
}

/// Starts the actor: the machines and the server, beside the planes that they use.
fn start(
    plan: &ServePlan,
    config: CoreConfig,
    wire: Box<dyn ControlPlane>,
    ranks: Vec<ServeRank>,
    (metrics, transfers): (InstanceMetrics, Option<TransferLog>),
) -> Result<MailboxSender<InstanceActor>, CommandError> {
    let engine = engine(plan, config.incarnation)?;
    let clock = monotonic_clock();
    let geometry = (*config.geometry).clone();
    let mut instance = InstanceBuilder::new(config).with_core(wire);
    let mut memories = Vec::with_capacity(ranks.len());
    for rank in ranks {
        instance = rank.parts.add_to(instance);
        memories.push(rank.backing.into_rank());
    }
    let (layers, ranks) = (plan.model.layers, geometry.tp);
    let memory = InstanceKv::new(geometry, memories);
    let parts = ServerParts { engine, memory, clock, layers, ranks, metrics, transfers };
    Ok(InstanceServer::start(parts, instance))
}

/// Ends when the process is told to stop and its legs are done: it unregisters first, because
/// routers go on sending for a while.
async fn stopped(
    mut ends: ShutdownSignals,
    instance: Addr<InstanceActor>,
    shared: Arc<http::HandlerState>,
    metrics: InstanceMetrics,
) {
    ends.recv().await;
    tracing::info!("draining");
    instance.do_send(DrainInstance);
    shared.draining.store(true, Ordering::Relaxed);
    tokio::time::sleep(LINGER).await;
    while metrics.open.get() > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
