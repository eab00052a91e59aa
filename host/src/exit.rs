//! Exit codes and what ends a command early.

use scenarios::ScenarioError;
use std::fmt;
use std::io;

/// How a command ends, by severity: over several scenarios the greatest wins.
pub(crate) use fabric_sim::world::Verdict as Exit;

/// Exit code of `doctor` on a machine that lacks something.
pub(crate) const UNFIT: u8 = 1;

/// Why a command cannot go on.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The input cannot be used: what is wrong and what to do about it.
    Input(String),
    /// The result cannot be written.
    Output(io::Error),
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stop::Input(text) => f.write_str(text),
            Stop::Output(why) => write!(f, "cannot write the result: {why}"),
        }
    }
}

impl From<ScenarioError> for Stop {
    fn from(error: ScenarioError) -> Stop {
        Stop::Input(error.to_string())
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Stop {
        Stop::Output(error)
    }
}
