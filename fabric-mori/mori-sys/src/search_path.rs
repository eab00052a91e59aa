//! Where the shim may be, and what is said if it is nowhere.

use std::fmt;
use std::path::{Path, PathBuf};

const FILE: &str = "libkf_mori_shim.so";
const VARIABLE: &str = "KVFERRY_MORI_SHIM";

/// Where the shim is looked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShimSearchPath {
    /// The one that is asked for: a library or its folder. Others are then not tried.
    pub asked: Option<PathBuf>,
    /// The folder of the executable.
    pub beside: Option<PathBuf>,
    /// The one that was compiled with this crate.
    pub built: Option<PathBuf>,
}

impl ShimSearchPath {
    /// `KVFERRY_MORI_SHIM`, the folder of the executable, and what was compiled with this crate.
    pub fn of_process() -> ShimSearchPath {
        let set = |value: &std::ffi::OsString| !value.is_empty();
        let executable = std::env::current_exe().ok();
        ShimSearchPath {
            asked: std::env::var_os(VARIABLE).filter(set).map(PathBuf::from),
            beside: executable.as_deref().and_then(Path::parent).map(Path::to_owned),
            built: ShimSearchPath::compiled(),
        }
    }

    /// The shim that was compiled with this crate.
    pub fn compiled() -> Option<PathBuf> {
        let path = env!("KF_MORI_SHIM_BUILT");
        (!path.is_empty()).then(|| PathBuf::from(path))
    }

    /// What the shim was compiled for, or why none was.
    pub fn compiled_note() -> &'static str {
        include_str!(concat!(env!("OUT_DIR"), "/note.txt"))
    }

    /// The files, in the order in which they are tried.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        if let Some(asked) = &self.asked {
            return vec![if asked.is_dir() { asked.join(FILE) } else { asked.clone() }];
        }
        self.beside.iter().map(|dir| dir.join(FILE)).chain(self.built.clone()).collect()
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
    /// Why no shim was compiled with this crate, if none was and one would have been tried.
    pub not_built: Option<String>,
}

impl fmt::Display for ShimUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no usable shim for MoRI ({FILE})")?;
        for ShimLoadFailure { path, why } in &self.tried {
            write!(f, "\n  {}: {why}", path.display())?;
        }
        if let Some(why) = &self.not_built {
            write!(f, "\n  none was built: {}", why.trim_end().replace('\n', "\n    "))?;
        }
        write!(f, "\n{VARIABLE} can name one")
    }
}

impl std::error::Error for ShimUnavailable {}
