//! Exit codes and what ends a command early.

use kvferry_scenarios::ScenarioError;
use std::fmt;
use std::io;

/// How a command ends, by severity: over several scenarios the greatest wins.
pub(crate) use kvferry_sim::world::RunVerdict as Exit;

/// Exit code of `doctor` on a machine that lacks something.
pub(crate) const UNFIT: u8 = 1;

/// Why a command cannot go on.
#[derive(Debug)]
pub(crate) enum CommandError {
    /// The input cannot be used: what is wrong and what to do about it.
    Input(String),
    /// The result cannot be written.
    Output(io::Error),
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CommandError::Input(text) => f.write_str(text),
            CommandError::Output(why) => write!(f, "cannot write the result: {why}"),
        }
    }
}

impl From<ScenarioError> for CommandError {
    fn from(error: ScenarioError) -> CommandError {
        CommandError::Input(error.to_string())
    }
}

impl From<io::Error> for CommandError {
    fn from(error: io::Error) -> CommandError {
        CommandError::Output(error)
    }
}
