//! Exit codes and what ends a command early.

use fabric_sim::world::Verdict;
use scenarios::ScenarioError;
use serde::Serialize;
use std::fmt;
use std::io;

/// How a command ends, by severity: over several scenarios the greatest wins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Exit {
    /// Everything held.
    #[default]
    Held = 0,
    /// The input cannot be used.
    Invalid = 2,
    /// Something did not end or did not heal.
    Liveness = 3,
    /// Something wrong happened.
    Correctness = 4,
    /// The same scenario and seed gave two traces.
    NotDeterministic = 5,
    /// A panic or a failed assertion.
    Panic = 6,
}

impl Exit {
    /// The exit code of the process.
    pub(crate) const fn code(self) -> u8 {
        self as u8
    }

    /// One word for tables, the same as in JSON.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Exit::Held => "held",
            Exit::Invalid => "invalid",
            Exit::Liveness => "liveness",
            Exit::Correctness => "correctness",
            Exit::NotDeterministic => "not-deterministic",
            Exit::Panic => "panic",
        }
    }
}

impl From<Verdict> for Exit {
    fn from(verdict: Verdict) -> Exit {
        match verdict {
            Verdict::Held => Exit::Held,
            Verdict::Invalid => Exit::Invalid,
            Verdict::Liveness => Exit::Liveness,
            Verdict::Correctness => Exit::Correctness,
            Verdict::NotDeterministic => Exit::NotDeterministic,
            Verdict::Panic => Exit::Panic,
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

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
