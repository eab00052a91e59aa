//! Files that a command writes for its user.

use super::CommandError;
use clap::Args;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::Path;

/// The argument that lets files be overwritten.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct Overwrite {
    /// Overwrite files that exist
    #[arg(long)]
    pub(crate) force: bool,
}

impl Overwrite {
    /// Fails if the file of an option exists and must not be overwritten. Called before a long run.
    ///
    /// # Errors
    /// Names the option, the file and the remedy.
    pub(crate) fn check(self, option: &str, path: &Path) -> Result<(), CommandError> {
        match !self.force && path.symlink_metadata().is_ok_and(|file| file.is_file()) {
            true => Err(refused(option, path, &ErrorKind::AlreadyExists.into())),
            false => Ok(()),
        }
    }

    /// Writes the file of an option.
    ///
    /// # Errors
    /// The file exists and must not be overwritten, or it cannot be written.
    pub(crate) fn write(
        self,
        option: &str,
        path: &Path,
        bytes: impl AsRef<[u8]>,
    ) -> Result<(), CommandError> {
        let written = self.open(path).and_then(|mut file| file.write_all(bytes.as_ref()));
        written.map_err(|why| refused(option, path, &why))
    }

    fn open(self, path: &Path) -> std::io::Result<File> {
        // A device such as /dev/stdout has no content to lose.
        let is_new = !self.force && path.metadata().map_or(true, |file| file.is_file());
        let mut options = OpenOptions::new();
        match is_new {
            true => options.write(true).create_new(true),
            false => options.write(true).create(true).truncate(true),
        };
        options.open(path)
    }
}

fn refused(option: &str, path: &Path, why: &std::io::Error) -> CommandError {
    let path = path.display();
    CommandError::Input(match why.kind() {
        ErrorKind::AlreadyExists => {
            format!(
                "{option} {path}: the file exists; name another file, or overwrite it with --force"
            )
        }
        _ => format!(
            "{option} {path}: cannot write the file: {why}; name a file that can be written"
        ),
    })
}
