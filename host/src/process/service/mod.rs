//! Parts of commands that serve or start processes: logs, signals, sockets, and values of arguments.

pub(crate) mod address;
mod dial;
mod listener;
pub(crate) mod logs;
pub(crate) mod memory;
mod program;
mod signals;

pub(crate) use dial::dial;
pub(crate) use kvferry_fabric_common::lock;
pub(crate) use listener::{PatientListener, open_files_max, raise_open_files};
pub use program::interpreted_by;
pub(crate) use program::this_program;
pub(crate) use signals::{ShutdownSignals, follow_parent};

use clap::ValueEnum;
use std::time::Duration;

/// As the command line has it.
pub(crate) fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Seconds of an argument such as 0.5.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is no number of seconds"))?;
    match seconds.is_finite() && (0.001..=86_400.0).contains(&seconds) {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => Err(format!("{text} is not from 0.001 to 86400 seconds")),
    }
}
