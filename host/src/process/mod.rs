//! What every command shares with the others: how it ends, its logs, signals and standard output,
//! and how results are laid out.

mod args;
mod exit;
pub(crate) mod logs;
mod progress;
mod signals;
mod stdout;

pub(crate) use args::{name, seconds};
pub(crate) use exit::{CommandError, Exit, print_error};
pub(crate) use progress::CliProgress;
pub(crate) use signals::{ShutdownSignals, follow_parent};
pub(crate) use stdout::StdoutGuard;

use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use comfy_table::{LineStyle, Row, Table, TableStyle};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, also after somebody panicked while holding it: no holder leaves anything half done.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lines around a table and below its header.
const RULED: TableStyle = UTF8_HORIZONTAL_ONLY.row_separator(LineStyle::none());

/// A table below its header, in lines.
pub(crate) fn ruled(header: impl Into<Row>) -> Table {
    let mut table = Table::new();
    table.load_style(RULED);
    table.set_header(header);
    table
}
