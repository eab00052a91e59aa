//! The page of a recording for `kvferry export`.

use super::{page, recording_file};
use crate::process::{CommandError, Exit, Overwrite};
use kvferry_engine::core::Nanos;
use std::io::Write;
use std::path::Path;

/// Writes the page of a recording in a file; it opens at a time, or else where the run went wrong.
///
/// # Errors
/// The file is not a recording, or the page exists or cannot be written.
pub(crate) fn export_page(
    recording: &Path,
    html: &Path,
    at: Option<Nanos>,
    overwrite: Overwrite,
    out: &mut dyn Write,
) -> Result<Exit, CommandError> {
    overwrite.check("--html", html)?;
    page::write(&recording_file(recording)?, html, at, overwrite)?;
    writeln!(out, "{}: a browser opens it", html.display())?;
    Ok(Exit::HELD)
}
