//! Parts that all commands share: exit codes and errors, standard output, files that a command writes,
//! and tables of results.

mod exit;
mod output_file;
mod panic_exit;
mod progress;
#[cfg(feature = "full")]
mod service;
mod stdout;

pub(crate) use exit::{CommandError, Exit, print_error};
pub(crate) use output_file::Overwrite;
pub(crate) use panic_exit::exit_on_panic;
pub(crate) use progress::CliProgress;
#[cfg(feature = "full")]
pub use service::interpreted_by;
#[cfg(feature = "full")]
pub(crate) use service::*;
pub(crate) use stdout::StdoutGuard;

use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use comfy_table::{LineStyle, Row, Table, TableStyle};

/// Error of something that a build without the feature is told to do: names the build that can.
#[cfg(not(all(feature = "full", feature = "simulator")))]
pub(crate) fn without(what: &str, feature: &str) -> CommandError {
    CommandError::Input(format!(
        "{what}: this kvferry was built without its feature `{feature}`; \
         `cargo build --release -p kvferry --features full` makes one that has all, and so has the \
         package that pip installs"
    ))
}

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
