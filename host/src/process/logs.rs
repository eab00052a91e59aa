//! Structured logs on stderr.

use clap::{Args, ValueEnum};
use std::io;
use tracing::level_filters::LevelFilter;

/// What is logged, and how.
#[derive(Clone, Debug, Args)]
pub(crate) struct LogArgs {
    /// Form of the log, which goes to stderr
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub(crate) log_format: LogFormat,
    /// Least severity that is logged: off, error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub(crate) log_level: LevelFilter,
}

/// How lines of the log look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

impl Default for LogArgs {
    fn default() -> LogArgs {
        LogArgs { log_format: LogFormat::Text, log_level: LevelFilter::INFO }
    }
}

/// Logs from now on.
pub(crate) fn start(args: &LogArgs) {
    let builder = tracing_subscriber::fmt()
        .with_max_level(args.log_level)
        .with_target(false)
        .with_writer(io::stderr);
    // Fails only if there is a subscriber already, as in tests within one process.
    let _ = match args.log_format {
        LogFormat::Text => builder.with_ansi(false).try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
}
