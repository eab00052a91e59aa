//! Finds an installed MoRI and compiles kvferry's C shim for exactly that one.
//!
//! MoRI has no C interface and no version: its classes are laid out by the headers, and differ
//! between versions whose libraries export the same names. So headers and library have to be found
//! together, and what was compiled is tied to the library's build id.

mod compile;
mod elf;
mod installation;
mod python;
mod search;
mod search_error;
mod sources;
mod version;

pub use compile::{CompileError, SHIM_FILE, arguments, compile};
pub use installation::{MoriInstallation, MoriSearchRule};
pub use search::search;
pub use search_error::MoriSearchError;
pub use sources::sources_digest;

/// The environment variables that the search and the compilation read: a build script that does
/// either has to be run again when one changes.
pub const WATCHED: [&str; 7] = [
    "MORI_INCLUDE_DIR",
    "MORI_LIB_DIR",
    "MORI_HOME",
    "MORI_PYTHON",
    "ROCM_PATH",
    "CXX",
    "CXXFLAGS",
];

/// The library that MoRI-IO is in.
pub(crate) const LIBRARY: &str = "libmori_io.so";
/// A library that it needs, where an installation has it.
pub(crate) const APPLICATION: &str = "libmori_application.so";
/// The header that the shim includes.
pub(crate) const HEADER: &str = "mori/io/engine.hpp";
