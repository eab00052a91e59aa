//! Structured logs on stderr.

use tracing_subscriber::filter::LevelFilter;

/// Variable with the least level that is logged: `error`, `warn`, `info`, `debug` or `trace`.
const LEVEL: &str = "KVFERRY_LOG";

/// Logs from now on, as JSON objects in lines, from the level that `KVFERRY_LOG` says (`info`).
pub(crate) fn start() {
    let level = std::env::var(LEVEL).ok().and_then(|level| level.parse().ok());
    let logs = tracing_subscriber::fmt().json().with_writer(std::io::stderr);
    // Only a second call could fail.
    let _ = logs.with_max_level(level.unwrap_or(LevelFilter::INFO)).try_init();
}
