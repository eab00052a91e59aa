//! `replay`: a recording is played to the protocol again.

use crate::process::{CommandError, print_error};
use crate::simulator::recording_file;
use crate::simulator::seed_run::{guarded, quiet_panics};
use crate::simulator::table::grouped;
use clap::Args;
use kvferry_sim::replay::{ReplayError, ReplaySummary, replay};
use kvferry_sim::world::RunVerdict;
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `replay`.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// What `run --record` wrote
    pub(crate) recording: PathBuf,
}

/// Replays a recording and says whether the protocol does the same again.
///
/// # Errors
/// A file that is no recording, or output that cannot be written.
pub(crate) fn command(args: &ReplayArgs, out: &mut dyn Write) -> Result<RunVerdict, CommandError> {
    let name = args.recording.display();
    let recording = recording_file(&args.recording)?;
    quiet_panics();
    match guarded(|| replay(&recording)) {
        Ok(Ok(ReplaySummary { scenario, seed, inputs, effects })) => {
            let (inputs, effects) = (grouped(inputs), grouped(effects));
            writeln!(out, "{scenario} seed {seed}: {inputs} inputs, the same {effects} effects")?;
            Ok(RunVerdict::Held)
        }
        Ok(Err(why @ ReplayError::Differs { .. })) => {
            print_error(&format!("{name}: {why}"));
            Ok(RunVerdict::NotDeterministic)
        }
        Ok(Err(why)) => Err(CommandError::Input(format!("{name}: {why}"))),
        Err(text) => {
            print_error(&format!("{name}: {text}"));
            Ok(RunVerdict::Panic)
        }
    }
}
