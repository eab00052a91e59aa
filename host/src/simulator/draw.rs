//! `draw`: the run that a seed draws, as a scenario file.

use crate::process::{CommandError, Overwrite};
use clap::Args;
use kvferry_scenarios::drawn;
use kvferry_sim::world::RunVerdict;
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `draw`.
#[derive(Debug, Args)]
pub(crate) struct DrawArgs {
    /// Scenario file
    pub(crate) file: PathBuf,
    /// The seed
    #[arg(long, value_name = "N")]
    pub(crate) seed: u64,
    /// File for the scenario; standard output if not given
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) overwrite: Overwrite,
}

/// Writes the scenario of a seed.
///
/// # Errors
/// A scenario that cannot be used, or a file that cannot be written.
pub(crate) fn command(args: &DrawArgs, out: &mut dyn Write) -> Result<RunVerdict, CommandError> {
    let text = drawn(&args.file, args.seed)?;
    let Some(path) = &args.out else {
        write!(out, "{text}")?;
        return Ok(RunVerdict::Held);
    };
    args.overwrite.write("--out", path, text)?;
    writeln!(out, "`kvferry run {}` plays it", path.display())?;
    Ok(RunVerdict::Held)
}
