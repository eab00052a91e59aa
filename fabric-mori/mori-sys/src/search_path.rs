//! Where the shim may be, and what is said if it is nowhere.

use kvferry_mori_build::SHIM_FILE as FILE;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(crate) const VARIABLE: &str = "KVFERRY_MORI_SHIM";

/// Where the shim is looked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShimSearchPath {
    /// The one that is asked for: a library or its folder. Others are then not tried.
    pub asked: Option<PathBuf>,
    /// The folder of the executable.
    pub beside: Option<PathBuf>,
    /// After these one is taken from the user's cache, or compiled into it, for the MoRI that is
    /// installed.
    pub compiles: bool,
}

/// What led to a shim that was loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShimOrigin {
    /// It was asked for by name.
    Asked,
    /// It lies beside the program.
    Beside,
    /// An earlier process of this user, or root, has compiled it.
    Kept,
    /// The process that says so has compiled it, in this time.
    Compiled(Duration),
}

impl fmt::Display for ShimOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ShimOrigin::Asked => write!(f, "named by {VARIABLE}"),
            ShimOrigin::Beside => f.write_str("beside the program"),
            ShimOrigin::Kept => f.write_str("compiled earlier"),
            ShimOrigin::Compiled(took) => write!(f, "compiled now in {:.1} s", took.as_secs_f64()),
        }
    }
}

impl ShimSearchPath {
    /// `KVFERRY_MORI_SHIM`, the folder of the executable, and what is compiled for the MoRI that is
    /// installed.
    pub fn of_process() -> ShimSearchPath {
        let set = |value: &std::ffi::OsString| !value.is_empty();
        let executable = std::env::current_exe().ok();
        ShimSearchPath {
            asked: std::env::var_os(VARIABLE).filter(set).map(PathBuf::from),
            beside: executable.as_deref().and_then(Path::parent).map(Path::to_owned),
            compiles: true,
        }
    }

    /// The files, in the order in which they are tried.
    pub(crate) fn files(&self) -> Vec<(ShimOrigin, PathBuf)> {
        if let Some(asked) = &self.asked {
            let file = if asked.is_dir() { asked.join(FILE) } else { asked.clone() };
            return vec![(ShimOrigin::Asked, file)];
        }
        self.beside.iter().map(|dir| (ShimOrigin::Beside, dir.join(FILE))).collect()
    }

    /// Whether one is compiled where none of the files will do.
    pub(crate) fn falls_through(&self) -> bool {
        self.compiles && self.asked.is_none()
    }
}

/// A file that is no usable shim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShimLoadFailure {
    pub path: PathBuf,
    pub why: String,
}

/// Why there is no MoRI in this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShimUnavailable {
    pub tried: Vec<ShimLoadFailure>,
    /// Why none was compiled, if one would have been.
    pub not_compiled: Option<String>,
}

impl fmt::Display for ShimUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no usable shim for MoRI ({FILE})")?;
        for ShimLoadFailure { path, why } in &self.tried {
            write!(f, "\n  {}: {why}", path.display())?;
        }
        if let Some(why) = &self.not_compiled {
            write!(f, "\n  none was compiled: {}", why.trim_end().replace('\n', "\n    "))?;
        }
        write!(f, "\n{VARIABLE} can name one")
    }
}

impl std::error::Error for ShimUnavailable {}
