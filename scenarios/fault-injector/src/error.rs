//! What is wrong with a scenario or a trace, for the person who wrote it.

use std::fmt;
use std::sync::Arc;

/// A scenario or trace that cannot be used: where, what and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScenarioError {
    /// The file as it was named by the user.
    pub file: Arc<str>,
    /// Line, counted from 1; 0 if it is about the file as a whole.
    pub line: u32,
    pub what: String,
    /// What to do about it.
    pub remedy: String,
}

impl fmt::Display for ScenarioError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        write!(f, ": {}; {}", self.what, self.remedy)
    }
}

impl std::error::Error for ScenarioError {}
