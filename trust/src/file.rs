//! The file of a secret: who may read it, and that a changed one counts from the next proof on.

use crate::proof::FleetSecret;
use crate::reload::{ReloadedFiles, read_private};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The variable of the environment that names the file.
pub const VARIABLE: &str = "KVFERRY_SECRET_FILE";

/// A secret that is read anew when its file is changed, so that it is rotated without a restart: the
/// new secret is added to the file of every process as the second line, then made the first, then
/// the old one is taken out.
#[derive(Debug)]
pub struct SecretFile(ReloadedFiles<FleetSecret, 1>);

impl SecretFile {
    /// Reads a secret.
    ///
    /// # Errors
    /// A file that cannot be read, that others can read or change, or that has no secret in it;
    /// with its path and the remedy.
    pub fn open(path: &Path) -> Result<SecretFile, String> {
        ReloadedFiles::open([path.into()], read).map(SecretFile)
    }

    /// The secret as the file has it now. One that cannot be used does not count: what it had before
    /// stays in use, and `warn` is told why, once for each content.
    pub fn secret(&self, warn: impl FnOnce(&str)) -> Arc<FleetSecret> {
        self.0.value(warn)
    }

    /// The file that the environment names, if any.
    pub fn of_environment() -> Option<PathBuf> {
        std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from)
    }
}

fn read([path]: &[PathBuf; 1]) -> Result<FleetSecret, String> {
    let wrong = |why: String| format!("secret file {}: {why}", path.display());
    FleetSecret::parse(&read_private(path).map_err(wrong)?).map_err(wrong)
}
