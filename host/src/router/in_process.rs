//! A router in the process of a test, which owns the clock and plays clients and instances.

use super::http_adapter::RouterAddr;
use super::{RouterArgs, RunningRouter, prepare, start};
use clap::Parser;
use kvferry_engine::actors::Query;
use kvferry_engine::core::Nanos;
use kvferry_engine::core::router::Router;
use std::net::SocketAddr;
use tokio::sync::watch;

#[derive(Parser)]
struct InProcessArgs {
    #[command(flatten)]
    router: RouterArgs,
}

/// A router in the current actix system, until the system ends.
pub struct RouterInProcess {
    /// Address of the socket for clients.
    pub http: SocketAddr,
    /// Address of the socket for operators.
    pub admin: SocketAddr,
    running: RunningRouter,
    /// Keeps the listener for clients open.
    _stop: watch::Sender<bool>,
}

/// Requests, connections and memory that a router holds for clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldByRouter {
    /// Requests whose answer has not begun or not ended.
    pub requests: i64,
    /// Legs in flight.
    pub legs: u32,
    /// Open connections of clients.
    pub connections: i64,
    /// Bytes of requests and answers.
    pub memory: usize,
}

impl RouterInProcess {
    /// Starts a router with the options of `kvferry router`, at free ports of loopback.
    ///
    /// # Errors
    /// An option or an address that is not usable.
    pub fn start(options: &[&str]) -> Result<RouterInProcess, String> {
        let free = ["--listen", "--admin-addr", "--discovery"].map(|name| [name, "127.0.0.1:0"]);
        let line = ["router"].into_iter().chain(free.into_iter().flatten());
        let args = InProcessArgs::try_parse_from(line.chain(options.iter().copied()));
        let args = args.map_err(|why| why.to_string())?.router;
        let (bound, _, parts) = prepare(&args).map_err(|why| why.to_string())?;
        let address = |nth: usize| bound[nth].local_addr().map_err(|why| why.to_string());
        let (http, admin) = (address(0)?, address(1)?);
        let (_stop, stopped) = watch::channel(false);
        let started = start(&args, bound, parts, stopped).map_err(|why| why.to_string());
        let (running, serving) = started?;
        let _ends_with_the_system = actix::spawn(serving);
        Ok(RouterInProcess { http, admin, running, _stop })
    }

    /// Requests, legs, connections and memory that are held for clients now.
    pub async fn held(&self) -> HeldByRouter {
        let RunningRouter { handler, core, .. } = &self.running;
        HeldByRouter {
            requests: handler.metrics.in_flight.get(),
            legs: legs(core).await,
            connections: handler.metrics.clients.connections.get(),
            memory: handler.memory.held(),
        }
    }
}

/// Legs in flight, as the core counts them.
async fn legs(core: &RouterAddr) -> u32 {
    let count = |router: &Router| router.instances(Nanos::ZERO).map(|it| it.legs).sum();
    core.send(Query(Box::new(count))).await.unwrap_or_default()
}
