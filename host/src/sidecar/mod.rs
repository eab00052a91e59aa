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
mod metrics;
pub(crate) mod ownership;
pub mod proto;
pub mod rank;
pub mod record;
pub mod settings;
mod socket;
pub mod spec;
mod start;
mod transfer_agent;
mod transfer_log;

pub use client::SidecarClient;
pub(crate) use config::HostArgs;
pub(crate) use export::{ExportArgs, command as export_command};
pub use kvferry_fabric_mori::DeviceEvent;
pub use ownership::prepare_socket_folder;
pub use transfer_agent::TransferAgent;

use crate::instance::{FailureNotice, InstanceIdentity, incarnations};
use crate::process::logs::{self, LogArgs};
use crate::process::{CommandError, Exit, ShutdownSignals, raise_open_files};
use config::SidecarConfig;
use gateway::{DrainSidecar, Gateway};
use kvferry_engine::actors::monotonic_clock;
use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::TransferId;
use kvferry_engine::core::layout::BlockList;
use std::path::Path;
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

/// Serves one engine until its connections end, SIGTERM or SIGINT.
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
    actix::System::new().block_on(run(socket, &config))
}

async fn run(socket: &Path, config: &SidecarConfig) -> Result<Exit, CommandError> {
    let mut ends = ShutdownSignals::new()?;
    let place = socket::listen(socket).map_err(CommandError::Input)?;
    let scraped = metrics::listen(config.metrics.as_deref()).await.map_err(CommandError::Input)?;
    let (clock, begun_us) = (monotonic_clock(), incarnations::now_us());
    let (over, left) = oneshot::channel();
    let gateway = Gateway::start((clock, begun_us), config.operator.clone(), over);
    tracing::info!(socket = %socket.display(), "waiting for an engine");
    tokio::select! {
        () = socket::serve(&place.listener, gateway.clone()) => {}
        () = metrics::serve(scraped, gateway.address().clone()) => {}
        () = ends.recv() => {}
        _ = left => tracing::info!("the engine has left"),
    }
    // If it cannot be told, the registrations expire.
    let _ = gateway.address().send(DrainSidecar).await;
    Ok(Exit::HELD)
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

/// `kv_transfer_params` that a prefill at `address` answers a request with, in JSON.
///
/// # Errors
/// Parameters that peers could not read.
pub fn answer_params(
    address: &ZmqAddress,
    transfer: &str,
    blocks: Vec<Vec<u32>>,
) -> Result<String, String> {
    let blocks: Vec<BlockList> = blocks.into_iter().map(BlockList::new).collect();
    let params = InstanceIdentity::answer(address, &TransferId(transfer.into()), &blocks);
    let json = params.encode_answer().map_err(|why| why.to_string())?;
    String::from_utf8(json).map_err(|why| why.to_string())
}
