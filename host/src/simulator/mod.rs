//! The simulator's commands: scenarios are run, swept and replayed, in simulated time or as real
//! processes of this machine.

#[cfg(feature = "full")]
pub mod actors;
mod draw;
#[cfg(feature = "full")]
mod exported_page;
mod lists;
#[cfg(feature = "full")]
mod local_cluster;
mod outcome;
pub(crate) mod page;
mod products;
mod replay;
mod run;
mod scenario_files;
mod seed_run;
mod show;
mod shrink;
mod sweep;
mod table;
mod timeline;

use crate::process::{CommandError, Exit};
use clap::Subcommand;
use kvferry_sim::world::Recording;
use std::io::Write;
use std::path::Path;

/// The commands of this room.
#[derive(Debug, Subcommand)]
pub(crate) enum SimulatorCommand {
    /// Run scenarios and show what came out
    Run(run::RunArgs),
    /// Run one scenario with many seeds
    Sweep(sweep::SweepArgs),
    /// Play a recording to the protocol again and compare
    Replay(replay::ReplayArgs),
    /// Print messages, faults and landings of a recording
    Show(show::ShowArgs),
    /// Write the run that a seed draws as a scenario file
    Draw(draw::DrawArgs),
    /// Find the smallest scenario that fails as a seed does
    Shrink(shrink::ShrinkArgs),
    /// Print what scenario files can say
    List(lists::ListArgs),
}

/// Does what one of them is told.
///
/// # Errors
/// Input that cannot be used, or a result that cannot be written.
pub(crate) fn command(
    command: &SimulatorCommand,
    out: &mut dyn Write,
) -> Result<Exit, CommandError> {
    let verdict = match command {
        SimulatorCommand::Run(args) => run::command(args, out),
        SimulatorCommand::Sweep(args) => sweep::command(args, out),
        SimulatorCommand::Replay(args) => replay::command(args, out),
        SimulatorCommand::Show(args) => show::command(args, out),
        SimulatorCommand::Draw(args) => draw::command(args, out),
        SimulatorCommand::Shrink(args) => shrink::command(args, out),
        SimulatorCommand::List(args) => lists::command(args, out),
    };
    Ok(Exit(verdict?.code()))
}

#[cfg(feature = "full")]
pub(crate) use exported_page::export_page;
pub(crate) use show::time;

/// The recording in a file.
fn recording_file(path: &Path) -> Result<Recording, CommandError> {
    let name = path.display();
    const REMEDY: &str = "`kvferry run SCENARIO --record NEW_FILE` makes one";
    let bytes = std::fs::read(path).map_err(|why| {
        CommandError::Input(format!("{name}: cannot read the recording: {why}; {REMEDY}"))
    })?;
    let recording = Recording(bytes);
    match recording.read().map(|_| ()) {
        Ok(()) => Ok(recording),
        Err(why) => Err(CommandError::Input(format!("{name}: not a recording: {why}; {REMEDY}"))),
    }
}
