//! `kvferry serve`: a prefill or decode instance without a model, over real planes.
//!
//! Its KV is a function of the token ids, and a decode answers with a digest of what it got, so
//! that wrong bytes show in the answer. `instance` is between HTTP (`http`) and the
//! protocol actor; `legs` reads what routers say of a transfer, `content` makes and checks the bytes.

mod args;
pub(crate) mod content;
mod http;
mod instance;
mod memory;
mod metrics;
mod openai;

pub(crate) use args::{FabricArg, ServeArgs};

use crate::cores::RankParts;
use crate::exit::{Exit, Stop};
use crate::legs::Own;
use crate::lives;
use crate::logs;
use crate::meters::{Meter, Tally};
use crate::plane::{Plane, PlaneConfig};
use crate::signals::Ends;
use crate::wiring::{Ears, Places};
use actix::{Addr, System};
use args::Plan;
use content::Kv;
use engine::actors::{Clock, HEARD, Planes, Port};
use engine::core::Nanos;
use engine::core::dialect::moriio::address::ZmqAddress;
use engine::core::ids::Incarnation;
use engine::core::instance::Instance;
use engine::core::message::Role;
use engine::core::moriio::{MoriioConfig, MoriioSettings};
use engine::core::station::CoreConfig;
use engine::fabric::{ControlPlane, Endpoint, bracketed};
use fabric_host::HostConfig;
use fabric_mori::MoriConfig;
use instance::{Drain, Host, Parts, Server};
use memory::Backing;
use metrics::Metrics;
use scenarios::decide;
use scenarios::engine::{Engine, EngineConfig};
use serde::Serialize;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;

/// Routers send legs for as long as they remember the last heartbeat: 5 s of vllm-router 0.1.17.
const LINGER: Duration = Duration::from_secs(6);

/// What the instance says on its standard output once it serves: one JSON object in one line.
#[derive(Serialize)]
struct Ready<'a> {
    role: Role,
    http: &'a str,
    handshake: &'a str,
    notify: &'a str,
    incarnation: u64,
}

/// Serves until it is told to stop.
pub(crate) fn command(args: &ServeArgs, out: &mut dyn Write) -> Result<Exit, Stop> {
    logs::start(&args.logs);
    let plan = args.plan()?;
    System::new().block_on(serve(args, &plan, out))
}

async fn serve(args: &ServeArgs, plan: &Plan, out: &mut dyn Write) -> Result<Exit, Stop> {
    let ends = Ends::new()?;
    let listener = listen(&args.host, args.http_port).await?;
    let port = listener.local_addr()?.port();
    let address = format!("{}:{port}", bracketed(&args.host));
    let ears = Ears::new(Places {
        host: ("--host", &args.host),
        handshake: ("--handshake-port", args.handshake_port),
        notify: ("--notify-port", args.notify_port),
    });
    let Ears { plane, handshake, notify, address: zmq } = ears.map_err(Stop::Input)?;
    // Nobody will know the instance by a port that it was not given.
    let state = args.state.clone().or_else(lives::own_folder).filter(|_| args.handshake_port != 0);
    let incarnation = lives::begin(&zmq.engine(), None, state.as_deref());
    let config = core_config(args, plan, zmq.clone(), &address, &handshake, incarnation);
    let ranks = (0..config.geometry.tp).map(|rank| rank_parts(args, plan, &config, rank));
    let ranks = ranks.collect::<Result<Vec<_>, Stop>>()?;
    let meters = ranks.iter().map(|rank| Tally::Here(rank.meter.clone())).collect();
    let (metrics, registry) = Metrics::new(meters);
    let own = Own {
        role: config.role,
        mode: config.mode,
        address: zmq,
        ports: MoriioSettings::default().ports,
    };
    let instance = start(plan, config, plane, ranks, metrics.clone())?;
    let shared = Arc::new(http::Shared {
        instance: instance.clone(),
        own,
        model: plan.model.name.clone(),
        registry,
        draining: AtomicBool::new(false),
        requests: AtomicU64::new(0),
    });
    let ready = Ready {
        role: plan.instance.role,
        http: &address,
        handshake: &handshake.0,
        notify: &notify.0,
        incarnation: incarnation.0,
    };
    writeln!(out, "{}", serde_json::to_string(&ready).expect("names and numbers"))?;
    out.flush()?;
    tracing::info!(http = address, handshake = &*handshake.0, notify = &*notify.0, "serving");
    let app = http::app(shared.clone());
    let stop = stopped(ends, instance.address().clone(), shared, metrics);
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    Ok(Exit::Held)
}

async fn listen(host: &str, port: u16) -> Result<TcpListener, Stop> {
    let address = format!("{}:{port}", bracketed(host));
    TcpListener::bind(&address).await.map_err(|why| {
        Stop::Input(format!("cannot listen at {address} (--host, --http-port): {why}"))
    })
}

fn core_config(
    args: &ServeArgs,
    plan: &Plan,
    zmq: ZmqAddress,
    http: &str,
    handshake: &Endpoint,
    incarnation: Incarnation,
) -> CoreConfig {
    let name = |layer: u16| args.layer_name.replace("{}", &layer.to_string()).into();
    CoreConfig {
        engine: zmq.engine(),
        incarnation,
        role: plan.instance.role,
        mode: plan.instance.mode,
        geometry: Arc::new(scenarios::geometry::geometry(&plan.model, &plan.instance)),
        http: Endpoint(http.into()),
        control: handshake.clone(),
        dp: (plan.instance.dp_rank, plan.instance.dp_size),
        router: args.proxy.as_ref().map(|proxy| Endpoint(format!("tcp://{proxy}").into())),
        settings: plan.limits.protocol.clone(),
        channel: plan.limits.channel.clone(),
        moriio: Some(MoriioConfig {
            address: zmq,
            layer_names: (0..plan.model.layers).map(name).collect(),
            attn_backend: "CPU_ATTN".into(),
            settings: MoriioSettings::default(),
        }),
    }
}

/// What a TP rank is started with.
struct Rank {
    parts: RankParts,
    meter: Meter,
    backing: Backing,
}

fn rank_parts(args: &ServeArgs, plan: &Plan, core: &CoreConfig, rank: u16) -> Result<Rank, Stop> {
    let config = match args.fabric {
        FabricArg::Host => {
            let slower = args.private_memory;
            PlaneConfig::Host(HostConfig { slower, ..HostConfig::default() })
        }
        FabricArg::Mori => PlaneConfig::Mori(MoriConfig::default()),
    };
    // MoRI takes memory of its own process only.
    let private = args.private_memory || args.fabric == FabricArg::Mori;
    let backing = Backing::new(plan, private).map_err(Stop::Input)?;
    let plane = config.start(core, rank, &args.host).map_err(Stop::Input)?;
    let Plane { plane, meter, .. } = plane;
    let kv = (vec![backing.memory()], backing.layers().to_vec());
    let parts = RankParts::new(core, rank, plane, kv, plan.limits.operations.clone());
    Ok(Rank { parts, meter, backing })
}

fn engine(plan: &Plan, incarnation: Incarnation) -> Result<Engine, Stop> {
    let id_seed = decide::mix(incarnation.0, u64::from(std::process::id()));
    let config = EngineConfig::new(&plan.model, &plan.instance, &plan.engine, Some(id_seed));
    Engine::new(config).map_err(|why| Stop::Input(why.to_string()))
}

/// Starts the actor: the machines and the server, beside the planes that they use.
fn start(
    plan: &Plan,
    config: CoreConfig,
    wire: Box<dyn ControlPlane>,
    ranks: Vec<Rank>,
    metrics: Metrics,
) -> Result<Port<Host>, Stop> {
    let engine = engine(plan, config.incarnation)?;
    let begun = Instant::now();
    let clock: Clock = Arc::new(move || Nanos(begun.elapsed().as_nanos() as u64));
    let geometry = (*config.geometry).clone();
    let (mut machines, mut planes) = (Instance::default(), Planes::new());
    machines.hear(HEARD);
    machines.add_core(config);
    planes.set_control(wire);
    let mut memories = Vec::with_capacity(ranks.len());
    let mut first = Vec::with_capacity(ranks.len());
    for rank in ranks {
        first.push(rank.parts.join(&mut machines, &mut planes));
        memories.push(rank.backing.into_rank());
    }
    let (layers, ranks) = (plan.model.layers, geometry.tp);
    let memory = Kv::new(geometry, memories);
    let parts = Parts { engine, memory, clock, layers, ranks, metrics };
    Ok(Server::start(parts, (machines, planes), first))
}

/// Ends when the process is told to stop and its legs are done: it unregisters first, because
/// routers go on sending for a while.
async fn stopped(
    mut ends: Ends,
    instance: Addr<Host>,
    shared: Arc<http::Shared>,
    metrics: Metrics,
) {
    ends.heard().await;
    tracing::info!("draining");
    instance.do_send(Drain);
    shared.draining.store(true, Ordering::Relaxed);
    tokio::time::sleep(LINGER).await;
    while metrics.open.get() > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
