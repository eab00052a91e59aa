//! `kvferry host`: the protocol actors beside a serving engine.
//!
//! The connector in the engine's processes (scheduler and one worker per TP rank) talks to it over
//! a Unix socket ([`proto`], [`SidecarClient`]). It binds the ports of all ranks, has the core, and
//! moves the bytes of the workers' memory from outside; or the workers do, each with its transfer
//! actor inside ([`TransferAgent`]).

mod client;
mod codec;
pub(crate) mod config;
mod early;
mod export;
mod fault_injector;
mod gateway;
mod kernel_waiter;
mod last_error;
mod left_sockets;
mod metrics;
mod mori_settings;
mod mori_stages;
pub(crate) mod ownership;
mod payload_link;
mod pool_peers;
mod pool_settings;
pub mod proto;
pub mod rank;
pub mod settings;
mod socket;
pub mod spec;
mod stage_metrics;
mod stages;
mod start;
mod transfer_agent;

pub use client::SidecarClient;
pub(crate) use config::HostArgs;
pub(crate) use export::{ExportArgs, command as export_command};
pub use kvferry_fabric_mori::DeviceEvent;
pub use ownership::{prepare_socket_folder, try_socket};
pub use payload_link::{
    ArrivedPayload, LinkGauges, PayloadLink, PayloadOutcome, PoolOffer, ReservedSlot,
};
pub use transfer_agent::TransferAgent;

use crate::instance::{FailureNotice, answered_leg, incarnations};
pub use crate::instance::{PrefillOffer, record};
use crate::process::logs::{self, LogArgs};
use crate::process::{CommandError, Exit, ShutdownSignals, memory, raise_open_files};
use actix::Handler;
use config::{OperatorConfig, SidecarConfig};
use gateway::{DrainSidecar, Gateway};
use kvferry_engine::actors::{Clock, MailboxSender, monotonic_clock};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::payload::PayloadConfig;
use kvferry_fabric_host::{HugePages, MemfdPool};
use metrics::Scrape;
use pool_peers::PoolCores;
use pool_settings::PayloadSettings;
use serde_json::value::RawValue;
use socket::{ListeningSocket, ServesClients};
use stages::{StageActor, StageConfig, StageGateway, StageParts};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Logs to stderr from now on, in the form and from the level that this environment gives `kvferry
/// host`: for processes of the serving engine, whose stderr is the server's log.
pub fn log_to_stderr() {
    match HostArgs::default().resolve(std::env::vars_os()) {
        Ok(config) => logs::start(&config.logs),
        Err(why) => {
            logs::start(&LogArgs::default());
            tracing::warn!(%why, "logs as text from info on, since the configuration cannot be used");
        }
    }
}

/// Serves one engine until its connections end, or the stages of pipelines until none has been there
/// for long; or until SIGTERM or SIGINT.
pub(crate) fn command(args: &HostArgs) -> Result<Exit, CommandError> {
    let config = args.resolve(std::env::vars_os()).map_err(CommandError::Input)?;
    let Some(socket) = &config.socket else {
        let text = "no path for the connector's socket: give --socket PATH, KVFERRY_HOST_SOCKET, or \
            `socket` in the configuration file";
        return Err(CommandError::Input(text.into()));
    };
    logs::start(&config.logs);
    raise_open_files();
    // Not refused: a Kubernetes service "kvferry-host" sets variables like these for every pod.
    for variable in &config.strangers {
        tracing::warn!(variable, "the configuration has no such key");
    }
    // Nor are these: hosts with a pool and hosts without one may share a file or an environment.
    for key in &config.ignored {
        tracing::warn!(
            key,
            "the key is ignored: it is of a pool of payloads, and there is no payload_pool"
        );
    }
    actix::System::new().block_on(run(socket, &config))
}

async fn run(socket: &Path, config: &SidecarConfig) -> Result<Exit, CommandError> {
    let place = socket::listen(socket).map_err(CommandError::Input)?;
    let clock = monotonic_clock();
    let (over, left) = oneshot::channel();
    let Some(payloads) = &config.payloads else {
        let about = (clock, incarnations::now_us());
        let gateway = Gateway::start(about, config.operator.clone(), over);
        tracing::info!(socket = %socket.display(), "waiting for an engine");
        return attend(config, (&place, gateway), left).await;
    };
    let gateway = stage_gateway(payloads, clock, (&config.operator, over));
    let gateway = gateway.map_err(CommandError::Input)?;
    tracing::info!(socket = %socket.display(), pool = payloads.pool, "waiting for stages");
    attend(config, (&place, gateway), left).await
}

/// Serves connections until they are over or the host is told to end.
async fn attend<A>(
    config: &SidecarConfig,
    (place, actor): (&ListeningSocket, MailboxSender<A>),
    over: oneshot::Receiver<()>,
) -> Result<Exit, CommandError>
where
    A: ServesClients + Handler<Scrape> + Handler<DrainSidecar>,
{
    let mut ends = ShutdownSignals::new()?;
    let scraped = metrics::listen(config.metrics.as_deref()).await.map_err(CommandError::Input)?;
    let address = actor.address().clone();
    tokio::select! {
        () = socket::serve(&place.listener, actor) => {}
        () = metrics::serve(scraped, address.clone().recipient()) => {}
        () = ends.recv() => {}
        _ = over => tracing::info!("{} has left", A::OF),
    }
    // If it cannot be told, the registrations expire.
    let _ = address.send(DrainSidecar).await;
    Ok(Exit::HELD)
}

/// The actor of a host with a pool.
fn stage_gateway(
    settings: &PayloadSettings,
    clock: Clock,
    (operator, over): (&OperatorConfig, oneshot::Sender<()>),
) -> Result<MailboxSender<StageActor>, String> {
    let &PayloadSettings { pool: bytes, hold, idle, ref peers, ref mori } = settings;
    // The kernel would take memory from others, and at last end a process.
    if let Some(free) = memory::available().filter(|free| *free < bytes) {
        return Err(format!(
            "payload_pool = {bytes}: {free} bytes of memory are available; give a smaller pool"
        ));
    }
    let mori = mori.as_ref().map(|mori| mori.listen(&operator.fabric)).transpose()?;
    let pool = MemfdPool::shared(bytes, HugePages::Try);
    let pool = Arc::new(pool.map_err(|why| format!("payload_pool = {bytes}: {why}"))?);
    let incarnation = Incarnation::begin(incarnations::now_us(), None);
    let memory = (pool.descriptor().as_raw_fd(), pool.len());
    let cores = peers.as_ref().map(|at| PoolCores::new(at, incarnation, memory, operator));
    let payloads = PayloadConfig { pool: pool.len(), hold, ..PayloadConfig::default() };
    let config = StageConfig { payloads, incarnation, pool_asked: bytes, idle };
    let parts = StageParts { pool, cores: cores.transpose()?, mori };
    Ok(StageGateway::start(clock, (config, parts), over))
}

/// `kv_transfer_params` that tell the router why KV did not come or was not handed over, in JSON.
pub fn failed_params(failure: &Failure) -> String {
    params(&FailureNotice::new(failure, None))
}

/// The same of a leg that cannot be used.
pub fn unusable_params(why: &str) -> String {
    params(&FailureNotice::unusable(why))
}

fn params(told: &FailureNotice) -> String {
    serde_json::json!({ "kvferry": told.object() }).to_string()
}

/// `kv_transfer_params` that a prefill answers a request with that came with `params`, in JSON.
///
/// # Errors
/// Parameters that are none, or that peers could not read.
pub fn answer_params(
    offer: &PrefillOffer,
    (request, params): (&str, &str),
    blocks: Vec<Vec<u32>>,
) -> Result<String, String> {
    let blocks: Vec<BlockList> = blocks.into_iter().map(BlockList::new).collect();
    let params: &RawValue = serde_json::from_str(params).map_err(|why| why.to_string())?;
    offer.params(&answered_leg(&request.into(), params)?, &blocks)
}
