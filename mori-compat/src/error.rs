//! Errors of calls; what happens to an accepted transfer is in its status.

use std::fmt;

/// Why a call failed. The text names what, where and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompatError {
    /// An environment variable or a file that it names is wrong.
    Setting(String),
    /// An argument is wrong.
    Argument(String),
    /// The data plane did not do it.
    Plane(String),
}

impl fmt::Display for CompatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CompatError::Setting(text) | CompatError::Argument(text) | CompatError::Plane(text) => {
                f.write_str(text)
            }
        }
    }
}

impl std::error::Error for CompatError {}
