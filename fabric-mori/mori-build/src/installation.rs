//! A MoRI that the shim can be compiled for.

use crate::search_error::MoriSearchError;
use crate::{APPLICATION, HEADER, LIBRARY, version};
use std::fmt;
use std::path::{Path, PathBuf};

/// What led to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MoriSearchRule {
    /// The caller gave both folders.
    Explicit,
    /// `MORI_INCLUDE_DIR` and `MORI_LIB_DIR`.
    Variables,
    /// `MORI_HOME`.
    Home,
    /// The package that a Python has.
    Python,
}

impl fmt::Display for MoriSearchRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MoriSearchRule::Explicit => "given",
            MoriSearchRule::Variables => "by MORI_INCLUDE_DIR and MORI_LIB_DIR",
            MoriSearchRule::Home => "by MORI_HOME",
            MoriSearchRule::Python => "as a Python package",
        })
    }
}

/// Headers and library of one MoRI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoriInstallation {
    /// What led to it.
    pub rule: MoriSearchRule,
    /// Folders of headers, in their order: MoRI's, those of what MoRI brings along, HIP's.
    pub includes: Vec<PathBuf>,
    /// Folders of libraries: that of `library`, and that of `libmori_application.so` if another.
    pub library_dirs: Vec<PathBuf>,
    /// `libmori_io.so`, without symbolic links.
    pub library: PathBuf,
    /// Whether there is a `libmori_application.so` to link to.
    pub application: bool,
    /// `build-id:` or `sha256:` and hexadecimal digits of the library.
    pub identity: String,
    /// Fields of a packed `MemoryDesc`, by what the library exports: 9 or 15.
    pub layout: u32,
}

impl MoriInstallation {
    /// The MoRI of a folder that has `mori/io/engine.hpp` and one that has `libmori_io.so`. HIP's
    /// headers are those of the system, or a stand-in.
    pub fn explicit(
        include: impl AsRef<Path>,
        lib: impl AsRef<Path>,
    ) -> Result<MoriInstallation, MoriSearchError> {
        let mut tried = Vec::new();
        let found = MoriInstallation::pair(
            MoriSearchRule::Explicit,
            include.as_ref(),
            &[lib.as_ref()],
            &mut tried,
        )?;
        found.ok_or(MoriSearchError::Nowhere { tried })
    }

    /// Headers with the first library of several folders; what is not there goes to `tried`.
    pub(crate) fn pair(
        rule: MoriSearchRule,
        include: &Path,
        libs: &[&Path],
        tried: &mut Vec<String>,
    ) -> Result<Option<MoriInstallation>, MoriSearchError> {
        let mut absent = |path: PathBuf| tried.push(format!("{}: not there", path.display()));
        let header = include.join(HEADER);
        let headers = header.is_file();
        if !headers {
            absent(header);
        }
        let dir = libs.iter().find(|dir| dir.join(LIBRARY).is_file());
        if dir.is_none() {
            libs.iter().for_each(|dir| absent(dir.join(LIBRARY)));
        }
        match dir {
            Some(dir) if headers => MoriInstallation::vetted(rule, include, dir).map(Some),
            _ => Ok(None),
        }
    }

    fn vetted(
        rule: MoriSearchRule,
        include: &Path,
        dir: &Path,
    ) -> Result<MoriInstallation, MoriSearchError> {
        let library = dir.join(LIBRARY);
        let refused = |why| MoriSearchError::Refused { library: library.clone(), why };
        let real = |path: &Path| path.canonicalize().map_err(|why| refused(why.to_string()));
        let inspected = version::inspect(&library).map_err(refused)?;
        let dir = real(dir)?;
        // A source tree has the two libraries in sibling folders.
        let sibling = dir.parent().map(|parent| parent.join("application"));
        let application = [Some(dir.clone()), sibling]
            .into_iter()
            .flatten()
            .find(|dir| dir.join(APPLICATION).is_file());
        let mut library_dirs = vec![dir];
        library_dirs.extend(application.clone().filter(|other| *other != library_dirs[0]));
        let mut includes = vec![real(include)?];
        // Of an installed package and of a source tree alike.
        let msgpack = include.join("../3rdparty/msgpack-c/include");
        if msgpack.join("msgpack.hpp").is_file() {
            includes.push(real(&msgpack)?);
        }
        Ok(MoriInstallation {
            rule,
            includes,
            library_dirs,
            library: real(&library)?,
            application: application.is_some(),
            identity: inspected.identity,
            layout: inspected.layout,
        })
    }
}

impl fmt::Display for MoriInstallation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MoRI at {}, found {}, {}", self.library.display(), self.rule, self.identity)
    }
}
