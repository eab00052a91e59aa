//! From what an engine says of itself to its protocol actors.

use super::config::OperatorConfig;
use super::proto::VERIFIES;
use super::rank::{RankPlan, SidecarRank};
use super::settings::{ConnectorSettings, TransferBackend, TransferPlacement};
use super::spec::{ServingEngine, ServingWorker, WorkerRegion};
use crate::instance::{
    ControlListeners, CounterSource, InstanceIdentity, InstanceTrust, ProtocolLimits, incarnations,
};
use kvferry_engine::actors::InstanceBuilder;
use kvferry_engine::core::Nanos;
use kvferry_engine::core::config::CoreConfig;
use kvferry_engine::core::ids::{EngineId, Incarnation};
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::moriio::MoriioConfig;
use kvferry_engine::fabric::{Endpoint, Memory, OwnMemory, bracketed};
use kvferry_fabric_host::HostConfig;
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::os::fd::IntoRawFd;
use std::sync::{Arc, Mutex};

/// An engine that is served.
pub(super) struct StartedEngine {
    /// Core and ranks, as far as they are in this process.
    pub(super) instance: InstanceBuilder,
    /// What it is to others.
    pub(super) own: InstanceIdentity,
    pub(super) engine: EngineId,
    pub(super) incarnation: Incarnation,
    /// How long others may read its blocks when the host has ended.
    pub(super) lease: Nanos,
    /// Of the planes of all ranks.
    pub(super) tallies: Vec<CounterSource>,
    /// Ranks whose transfer actors are in their workers.
    pub(super) worker_plans: Vec<RankPlan>,
    /// How the KV is reached.
    pub(super) memory: &'static str,
    /// Who is answered.
    pub(super) trust: InstanceTrust,
}

/// Refuses an engine that verifies KV and has a part which would pass over what has to be done for
/// it; `oldest` is the version of the local protocol that the oldest of them speaks.
pub(super) fn can_verify(engine: &ServingEngine, oldest: Option<u16>) -> Result<(), String> {
    let verify = engine.settings.verify;
    match oldest.filter(|version| *version < VERIFIES && !verify.is_off()) {
        None => Ok(()),
        Some(version) => Err(format!(
            "verify = {verify}: a part of the engine speaks version {version} of the local protocol, \
             which cannot verify KV; install one version of kvferry for all"
        )),
    }
}

/// Makes the machines of an engine and their planes.
///
/// # Errors
/// What cannot be served or had, and why.
pub(super) fn start(
    engine: &ServingEngine,
    (workers, operator): (&BTreeMap<u16, ServingWorker>, &OperatorConfig),
) -> Result<StartedEngine, String> {
    let settings = &engine.settings;
    let limits = settings.limits.clone().or(&operator.limits).limits()?;
    for key in settings.ignored_keys() {
        tracing::warn!(key, "has no meaning for host memory");
    }
    workers.values().try_for_each(|worker| reachable(settings.backend(), worker))?;
    let told = settings.trust(&operator.fabric);
    let trust =
        InstanceTrust::of(("host_ip", &settings.host_ip), &told).map_err(|why| why.to_string())?;
    let places = settings.places(ports(engine, trust)?, engine.tp);
    let listeners = ControlListeners::new(places, told.peers.secret_file.as_deref(), trust)?;
    let attention = workers.values().find_map(|worker| worker.attention.clone());
    // Nobody will know the engine by ports that it was not given.
    let state = operator.state.as_deref().filter(|_| settings.handshake_port != 0);
    let incarnation =
        incarnations::begin(&listeners.address.engine(), engine.last_incarnation, state);
    let config = core_config(engine, attention, (&listeners, trust), (incarnation, &limits))?;
    let ranks = (0..engine.tp).map(|rank| {
        let worker = workers.get(&rank).ok_or_else(|| format!("rank {rank} did not register"))?;
        rank_plan(engine, &config, worker, (&operator.fabric, &limits))
    });
    let plans = ranks.collect::<Result<Vec<_>, String>>()?;
    let (ranks, tallies, away) = match settings.transfer() {
        TransferPlacement::Sidecar => {
            let ready = plans.into_iter().map(RankPlan::parts);
            let ready = ready.collect::<Result<Vec<_>, String>>()?;
            let parts = ready.into_iter().map(|SidecarRank { parts, meter, .. }| (parts, meter));
            let (ranks, meters): (Vec<_>, Vec<_>) = parts.unzip();
            (ranks, meters.into_iter().map(CounterSource::Here).collect(), Vec::new())
        }
        TransferPlacement::Worker => {
            let told = plans.iter().map(|_| CounterSource::Reported(Arc::new(Mutex::default())));
            (Vec::new(), told.collect(), plans)
        }
    };
    let memory = memories(settings.backend(), workers);
    let own = identity(engine, &listeners, (incarnation, trust));
    let (role, mode) = (own.role, own.mode);
    tracing::info!(
        engine = &*config.engine.0,
        %role,
        %mode,
        handshake = &*listeners.handshake.0,
        notify = &*listeners.notify.0,
        ranks = engine.tp,
        groups = engine.groups.len(),
        backend = %settings.backend(),
        transfer = %settings.transfer(),
        verify = %settings.verify,
        memory,
        tcp = if told.peers.encrypt { "encrypted" } else { "plain" },
        "serving an engine"
    );
    let read = engine.role == Role::Prefill && engine.mode() == Mode::Pull;
    let lease = if read { config.settings.lease } else { Nanos::ZERO };
    let (engine, incarnation) = (config.engine.clone(), config.incarnation);
    let instance = InstanceBuilder::new(config).with_core(listeners.plane);
    let instance = ranks.into_iter().fold(instance, |instance, rank| rank.add_to(instance));
    Ok(StartedEngine {
        instance,
        own,
        engine,
        incarnation,
        lease,
        tallies,
        worker_plans: away,
        memory,
        trust,
    })
}

/// What an engine is to its peers and to who sends it legs.
fn identity(
    engine: &ServingEngine,
    listeners: &ControlListeners,
    (incarnation, trust): (Incarnation, InstanceTrust),
) -> InstanceIdentity {
    // What is written for a decode that speaks MoRIIO has one group.
    let fits = engine.mode() == Mode::Pull || engine.groups.len() == 1;
    InstanceIdentity {
        role: engine.role,
        mode: engine.mode(),
        address: listeners.address.clone(),
        ports: engine.settings.moriio.ports,
        tp: engine.tp,
        control: listeners.handshake.clone(),
        incarnation,
        moriio_peers: trust.moriio_peers && fits,
        moriio_only: false,
        proof: listeners.proof.clone(),
    }
}

/// The ports for handshakes and notices of the first TP rank: each DP rank has as many as it has TP
/// ranks, and takes them where there are peers that speak MoRIIO.
fn ports(engine: &ServingEngine, trust: InstanceTrust) -> Result<[u16; 2], String> {
    let ConnectorSettings { handshake_port, notify_port, .. } = engine.settings;
    let offset = engine.dp.0.checked_mul(engine.tp);
    let of_rank = |(key, port): (&str, u16)| match port {
        0 => Ok(0),
        port => offset.and_then(|offset| port.checked_add(offset)).ok_or_else(|| {
            format!(
                "{key} {port}: DP rank {} has a port above 65535; give a smaller one",
                engine.dp.0
            )
        }),
    };
    let apart = handshake_port.abs_diff(notify_port);
    let (ranks, tp) = (engine.dp.1, engine.tp.max(1));
    let are_given = handshake_port != 0 && notify_port != 0;
    let meet = match trust.moriio_peers {
        true => apart < ranks.saturating_mul(tp),
        false => apart.is_multiple_of(tp) && apart / tp < ranks,
    };
    if are_given && meet {
        return Err(format!(
            "notify_port = {notify_port}: {ranks} DP ranks of {tp} TP ranks take ports from there and \
             from handshake_port = {handshake_port}, and two take the same; put them {} apart",
            u32::from(ranks) * u32::from(tp)
        ));
    }
    Ok([of_rank(("handshake_port", handshake_port))?, of_rank(("notify_port", notify_port))?])
}

fn core_config(
    engine: &ServingEngine,
    attention: Option<Arc<str>>,
    (listeners, trust): (&ControlListeners, InstanceTrust),
    (incarnation, limits): (Incarnation, &ProtocolLimits),
) -> Result<CoreConfig, String> {
    let settings = &engine.settings;
    let router = (!settings.proxy_ip.is_empty()).then(|| {
        let (host, port) = (&settings.proxy_ip, settings.proxy_ping_port);
        Endpoint::tcp(host, port)
    });
    let http = format!("{}:{}", bracketed(settings.http_host()), settings.http_port);
    let (name, geometry) = (listeners.address.engine(), engine.geometry()?);
    Ok(CoreConfig {
        mode: engine.mode(),
        http: Endpoint(http.into()),
        dp: engine.dp,
        router,
        settings: limits.protocol.clone(),
        channel: limits.channel.clone(),
        verify: settings.verify,
        moriio: Some(MoriioConfig {
            address: listeners.address.clone(),
            layer_names: engine.layer_names(),
            // Peers do not look at it.
            attn_backend: attention.unwrap_or_default(),
            settings: settings.moriio.clone(),
            closed: trust.moriio_closed(&listeners.address.engine()),
        }),
        ..CoreConfig::new(engine.role, name, incarnation, geometry, listeners.handshake.clone())
    })
}

fn rank_plan(
    engine: &ServingEngine,
    core: &CoreConfig,
    worker: &ServingWorker,
    (fabric, limits): (&HostConfig, &ProtocolLimits),
) -> Result<RankPlan, String> {
    let settings = &engine.settings;
    let memory = worker.regions.iter().map(|region| match settings.transfer() {
        TransferPlacement::Sidecar => memory(worker, region),
        TransferPlacement::Worker => Ok(own_memory(settings.backend(), region)),
    });
    Ok(RankPlan {
        core: core.clone(),
        rank: worker.rank,
        host: settings.host_ip.clone(),
        plane: settings.plane(fabric)?,
        memory: memory.collect::<Result<Vec<_>, String>>()?,
        layers: engine.layers(worker)?,
        operations: limits.operations.clone(),
    })
}

/// How the workers' memory is reached by other processes.
fn memories(backend: TransferBackend, workers: &BTreeMap<u16, ServingWorker>) -> &'static str {
    if backend != TransferBackend::Host {
        return "registered with MoRI";
    }
    let mut regions = workers.values().flat_map(|worker| &worker.regions);
    match regions.all(|region| region.file.is_some()) {
        true => "memory files",
        false => "cross-memory attach",
    }
}

/// Whether what moves the bytes can do so with a worker's memory.
fn reachable(backend: TransferBackend, worker: &ServingWorker) -> Result<(), String> {
    let mut devices = worker.regions.iter().map(|region| region.device);
    let (wrong, remedy) = match backend {
        TransferBackend::Host => (devices.find(Option::is_some), "mori-rdma, mori-xgmi or mori"),
        TransferBackend::MoriRdma => (None, ""),
        TransferBackend::MoriXgmi | TransferBackend::Mori => {
            (devices.find(Option::is_none), "mori-rdma, or host")
        }
    };
    match wrong {
        None => Ok(()),
        Some(device) => {
            let at = device.map_or("of the host".into(), |device| format!("of GPU {device}"));
            let rank = worker.rank;
            Err(format!(
                "rank {rank} has its KV in memory {at}, which backend {backend} does not move: set \
                 `backend` to {remedy}"
            ))
        }
    }
}

/// A worker's memory, as the worker reaches it.
fn own_memory(
    backend: TransferBackend,
    &WorkerRegion { base, len, file, device }: &WorkerRegion,
) -> Memory {
    match (backend, file, device) {
        (TransferBackend::Host, Some(fd), None) => Memory::MemFd { fd, len },
        (_, _, Some(device)) => Memory::Device { range: OwnMemory::unproven(base, len), device },
        _ => Memory::Own(OwnMemory::unproven(base, len)),
    }
}

/// A worker's memory, as this process reaches it.
fn memory(worker: &ServingWorker, region: &WorkerRegion) -> Result<Memory, String> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_a_backend_does_not_move_is_refused() {
        let worker = |device| {
            let region = WorkerRegion { base: 0x1000, len: 64, file: None, device };
            ServingWorker {
                rank: 1,
                pid: 1,
                regions: vec![region],
                tensors: Vec::new(),
                attention: None,
            }
        };
        for (backend, device, remedy) in [
            (TransferBackend::Host, None, None),
            (TransferBackend::Host, Some(3), Some("of GPU 3, which backend host does not move")),
            (TransferBackend::MoriRdma, None, None),
            (TransferBackend::MoriRdma, Some(0), None),
            (
                TransferBackend::MoriXgmi,
                None,
                Some("of the host, which backend mori-xgmi does not move"),
            ),
            (TransferBackend::MoriXgmi, Some(0), None),
            (TransferBackend::Mori, None, Some("of the host, which backend mori does not move")),
            (TransferBackend::Mori, Some(0), None),
        ] {
            let said = reachable(backend, &worker(device)).err();
            match (&said, remedy) {
                (None, None) => {}
                (Some(said), Some(remedy)) if said.contains(remedy) => {}
                _ => panic!("{backend} {device:?}: {said:?}"),
            }
        }
        let region = &worker(Some(2)).regions[0];
        let expected = Memory::Device { range: OwnMemory::unproven(0x1000, 64), device: 2 };
        assert_eq!(own_memory(TransferBackend::MoriXgmi, region), expected);
    }
}
