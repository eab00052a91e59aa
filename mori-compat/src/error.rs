//! Errors of calls; what happens to an accepted transfer is in its status.

use std::fmt;

/// Why a call failed. The text names what, where and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// An environment variable or a file that it names is wrong.
    Setting(String),
    /// An argument is wrong.
    Argument(String),
    /// The data plane did not do it.
    Plane(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Setting(text) | Error::Argument(text) | Error::Plane(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Error {}
