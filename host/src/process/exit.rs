//! Exit codes and what ends a command early.

use super::LINES_MAX;
use kvferry_engine::text::printable_lines;
use std::fmt;
use std::io::{self, Write};

/// How a command ends: the exit code of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exit(pub(crate) u8);

impl Exit {
    pub(crate) const HELD: Exit = Exit(0);
    /// Of `doctor` on a machine that lacks something.
    #[cfg(feature = "full")]
    pub(crate) const UNFIT: Exit = Exit(1);
    /// The input cannot be used.
    pub(crate) const INVALID: Exit = Exit(2);
    /// What may never happen has happened: an invariant was violated, or bytes are wrong.
    #[cfg(feature = "full")]
    pub(crate) const CORRECTNESS: Exit = Exit(4);
    /// A thread panicked.
    pub(crate) const PANIC: Exit = Exit(6);
}

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

#[cfg(feature = "simulator")]
impl From<kvferry_scenarios::ScenarioError> for CommandError {
    fn from(error: kvferry_scenarios::ScenarioError) -> CommandError {
        CommandError::Input(error.to_string())
    }
}

impl From<io::Error> for CommandError {
    fn from(error: io::Error) -> CommandError {
        CommandError::Output(error)
    }
}

/// Tells the user on stderr what is wrong.
pub(crate) fn print_error(text: &str) {
    let _ = writeln!(io::stderr(), "error: {}", printable_lines(text, LINES_MAX));
}
