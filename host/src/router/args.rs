//! Arguments of `kvferry router`.

use crate::process::logs::LogArgs;
use clap::Args;

/// Arguments of `router`.
#[derive(Clone, Debug, Args)]
pub(crate) struct RouterArgs {
    /// Where clients connect; port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8000")]
    pub(crate) listen: String,
    /// Where instances register over ZeroMQ (proxy_ip and proxy_ping_port of vLLM's connector);
    /// port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:36367")]
    pub(crate) discovery: String,
    /// Print the start line as JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) logs: LogArgs,
    /// A registration that is not repeated for this many seconds is dropped
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    pub(crate) expiry: f64,
    /// Seconds that a new request waits for an instance
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    pub(crate) queue_timeout: f64,
    /// Requests that wait for an instance; more are refused
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub(crate) queue_size: u32,
    /// Requests in flight; more wait
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub(crate) requests_max: u32,
    /// Times that a transfer is sent again after a failure that the client has not seen
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub(crate) retries: u32,
    /// Transfers of one request: prompts times n
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) parts_max: u32,
    /// Seconds for a connection to an instance
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    pub(crate) connect_timeout: f64,
    /// Seconds until an instance begins to answer
    #[arg(long, value_name = "SECONDS", default_value_t = 1800.0)]
    pub(crate) answer_timeout: f64,
    /// Seconds that a stream may be silent
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0)]
    pub(crate) idle_timeout: f64,
    /// Seconds for requests in flight after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0)]
    pub(crate) drain_timeout: f64,
    /// Longest body of a request, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    pub(crate) body_max: usize,
    /// Connections of clients
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub(crate) connections_max: u32,
}
