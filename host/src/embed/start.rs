//! From what an engine says of itself to its protocol actors.

use super::drill::drilled;
use super::settings::Backend;
use super::spec::{Engine, Region, Worker};
use crate::cores::{Cores, Outlets, RankParts, host_plane};
use crate::legs::Own;
use crate::wiring::{Ears, born};
use engine::actors::Clock;
use engine::core::Nanos;
use engine::core::ids::EngineId;
use engine::core::message::{Mode, Role};
use engine::core::moriio::MoriioConfig;
use engine::core::station::CoreConfig;
use engine::fabric::{Endpoint, Memory, bracketed};
use fabric_host::{HostConfig, Meter};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::os::fd::IntoRawFd;
use std::sync::Arc;

/// An engine that is served.
pub(super) struct Started {
    pub(super) cores: Cores,
    /// What it is to others.
    pub(super) own: Own,
    pub(super) engine: EngineId,
    /// How long others may read its blocks when the host has ended.
    pub(super) lease: Nanos,
    /// Of the planes of all ranks.
    pub(super) meters: Vec<Meter>,
    /// How the KV is reached.
    pub(super) memory: &'static str,
}

/// Starts the actors of an engine.
///
/// # Errors
/// What cannot be served or had, and why.
pub(super) fn start(
    engine: &Engine,
    (workers, fabric): (&BTreeMap<u16, Worker>, &HostConfig),
    outlets: Outlets,
    clock: &Clock,
) -> Result<Started, String> {
    let settings = &engine.settings;
    for key in settings.idle() {
        tracing::warn!(key, "has no meaning for host memory");
    }
    let ears = Ears::new(&settings.host_ip, [settings.handshake_port, settings.notify_port])?;
    let config = core_config(engine, &ears)?;
    let ranks = (0..engine.tp).map(|rank| {
        let worker = workers.get(&rank).ok_or_else(|| format!("rank {rank} did not register"))?;
        rank_parts(engine, &config, worker, fabric)
    });
    let (ranks, meters) = ranks.collect::<Result<(Vec<_>, Vec<_>), String>>()?;
    let memory = memories(workers);
    let own = Own {
        role: engine.role,
        mode: engine.mode(),
        address: ears.address.clone(),
        ports: settings.moriio.ports,
    };
    tracing::info!(
        engine = &*config.engine.0,
        role = %engine.role,
        mode = %engine.mode(),
        handshake = &*ears.handshake.0,
        notify = &*ears.notify.0,
        ranks = engine.tp,
        backend = %Backend::Host,
        memory,
        "serving an engine"
    );
    let read = engine.role == Role::Prefill && engine.mode() == Mode::Pull;
    let lease = if read { config.settings.lease } else { Nanos::ZERO };
    let engine = config.engine.clone();
    let cores = Cores::start(config, ears.plane, ranks, outlets, clock);
    Ok(Started { cores, own, engine, lease, meters, memory })
}

fn core_config(engine: &Engine, ears: &Ears) -> Result<CoreConfig, String> {
    let settings = &engine.settings;
    let router = (!settings.proxy_ip.is_empty()).then(|| {
        let (host, port) = (&settings.proxy_ip, settings.proxy_ping_port);
        Endpoint::tcp(host, port)
    });
    let http = format!("{}:{}", bracketed(&settings.host_ip), settings.http_port);
    Ok(CoreConfig {
        engine: ears.address.engine(),
        incarnation: born(),
        role: engine.role,
        mode: engine.mode(),
        geometry: Arc::new(engine.geometry()?),
        http: Endpoint(http.into()),
        control: ears.handshake.clone(),
        dp: engine.dp,
        router,
        settings: Default::default(),
        channel: Default::default(),
        moriio: Some(MoriioConfig {
            address: ears.address.clone(),
            layer_names: engine.layer_names(),
            attn_backend: "CPU_ATTN".into(),
            settings: settings.moriio.clone(),
        }),
    })
}

fn rank_parts(
    engine: &Engine,
    core: &CoreConfig,
    worker: &Worker,
    fabric: &HostConfig,
) -> Result<(RankParts, Meter), String> {
    let layers = engine.layers(worker)?;
    let memory = worker.regions.iter().map(|region| memory(worker, region));
    let memory = memory.collect::<Result<Vec<_>, String>>()?;
    let settings = &engine.settings;
    let config = HostConfig { workers: settings.num_workers.into(), ..fabric.clone() };
    let plane = host_plane(core, worker.rank, &settings.host_ip, config)?;
    let meter = plane.meter();
    let plane = drilled(Box::new(plane))?;
    Ok((RankParts::new(core, worker.rank, plane, (memory, layers), None), meter))
}

/// How the workers' memory is reached.
fn memories(workers: &BTreeMap<u16, Worker>) -> &'static str {
    let mut regions = workers.values().flat_map(|worker| &worker.regions);
    match regions.all(|region| region.file.is_some()) {
        true => "memory files",
        false => "cross-memory attach",
    }
}

/// A worker's memory, as this process reaches it.
fn memory(worker: &Worker, region: &Region) -> Result<Memory, String> {
    let (pid, len) = (worker.pid, region.len);
    let Some(file) = region.file else {
        return Ok(Memory::OtherProcess { pid, base: region.base, len });
    };
    let path = format!("/proc/{pid}/fd/{file}");
    let opened = OpenOptions::new().read(true).write(true).open(&path);
    let file = opened.map_err(|why| format!("opening {path}, the KV of a worker: {why}"))?;
    // It stays open as long as the plane, which lives until the process ends.
    Ok(Memory::MemFd { fd: file.into_raw_fd(), len })
}
