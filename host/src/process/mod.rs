//! What every command shares with the others: how it ends, its logs, signals and standard output,
//! values of arguments, and how results are laid out.

pub(crate) mod address;
mod dial;
mod exit;
mod listener;
pub(crate) mod logs;
pub(crate) mod memory;
mod output_file;
mod panic_exit;
mod program;
mod progress;
mod signals;
mod stdout;

pub(crate) use dial::dial;
pub(crate) use exit::{CommandError, Exit, print_error};
pub(crate) use kvferry_fabric_common::lock;
pub(crate) use listener::{PatientListener, open_files_max, raise_open_files};
pub(crate) use output_file::Overwrite;
pub(crate) use panic_exit::exit_on_panic;
pub use program::interpreted_by;
pub(crate) use program::this_program;
pub(crate) use progress::CliProgress;
pub(crate) use signals::{ShutdownSignals, follow_parent};
pub(crate) use stdout::StdoutGuard;

use clap::ValueEnum;
use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use comfy_table::{LineStyle, Row, Table, TableStyle};
use std::time::Duration;

/// Most characters of one message on standard error, which may quote what peers send.
pub(crate) const LINES_MAX: usize = 64 << 10;

/// Lines around a table and below its header.
const RULED: TableStyle = UTF8_HORIZONTAL_ONLY.row_separator(LineStyle::none());

/// A table below its header, in lines.
pub(crate) fn ruled(header: impl Into<Row>) -> Table {
    let mut table = Table::new();
    table.load_style(RULED);
    table.set_header(header);
    table
}

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
