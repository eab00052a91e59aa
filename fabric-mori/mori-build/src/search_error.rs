//! Why there is no MoRI to compile for.

use std::fmt;
use std::path::PathBuf;

/// What the search ended with.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MoriSearchError {
    Nowhere {
        /// The places, each with what was wrong there.
        tried: Vec<String>,
    },
    /// One of two variables that only make sense together.
    Unpaired {
        /// The one that is set.
        set: &'static str,
        /// The one that is not.
        unset: &'static str,
    },
    /// One was found that cannot be used.
    Refused {
        library: PathBuf,
        /// What is wrong with it, and the remedy.
        why: String,
    },
}

impl MoriSearchError {
    /// Whether nobody asked for MoRI: nothing was set, and nothing was found, that is wrong.
    pub fn is_nowhere(&self) -> bool {
        matches!(self, MoriSearchError::Nowhere { .. })
    }
}

impl fmt::Display for MoriSearchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MoriSearchError::Nowhere { tried } => {
                writeln!(f, "{} and {} were not found; looked in", crate::HEADER, crate::LIBRARY)?;
                for place in tried {
                    writeln!(f, "  {place}")?;
                }
                f.write_str(
                    "set MORI_INCLUDE_DIR and MORI_LIB_DIR, or MORI_HOME to an installation or a \
                     source tree that was built, or MORI_PYTHON to a Python that has MoRI",
                )
            }
            MoriSearchError::Unpaired { set, unset } => {
                write!(f, "{set} is set and {unset} is not: set both or neither")
            }
            MoriSearchError::Refused { library, why } => write!(f, "{}: {why}", library.display()),
        }
    }
}

impl std::error::Error for MoriSearchError {}
