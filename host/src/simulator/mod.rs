//! The simulator's commands: scenarios are run, swept and replayed, in simulated time or as real
//! processes of this machine.

pub mod actors;
mod lists;
mod local_cluster;
mod outcome;
mod replay;
mod run;
mod scenario_files;
mod seed_run;
mod sweep;
mod table;

use crate::process::{CommandError, Exit};
use clap::Subcommand;
use std::io::Write;

/// The commands of this room.
#[derive(Debug, Subcommand)]
pub(crate) enum SimulatorCommand {
    /// Run scenarios and show what came out
    Run(run::RunArgs),
    /// Run one scenario with many seeds
    Sweep(sweep::SweepArgs),
    /// Play a recording to the protocol again and compare
    Replay(replay::ReplayArgs),
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
        SimulatorCommand::List(args) => lists::command(args, out),
    };
    Ok(Exit(verdict?.code()))
}
