//! `kvferry secret`: makes the secret that the processes of a fleet prove to each other.

use crate::process::{CommandError, Exit};
use clap::Args;
use kvferry_trust::FleetSecret;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Arguments of `secret`.
#[derive(Clone, Debug, Args)]
pub(crate) struct SecretArgs {
    /// File that is created with the secret in it, which only its owner can read; without it the
    /// secret is printed
    #[arg(value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
}

/// Makes a secret.
///
/// # Errors
/// The file exists or cannot be created, or there are no random bytes.
pub(crate) fn command(args: &SecretArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let secret = FleetSecret::random().map_err(|why| CommandError::Input(why.to_string()))?;
    match &args.file {
        Some(path) => create(path, &secret)?,
        None => writeln!(out, "{secret}")?,
    }
    Ok(Exit::HELD)
}

fn create(path: &Path, secret: &str) -> Result<(), CommandError> {
    let wrong = |why: std::io::Error| {
        let remedy = match why.kind() {
            ErrorKind::AlreadyExists => {
                "no file is overwritten: give another path; SECURITY.md says how a secret is rotated"
            }
            ErrorKind::NotFound => "create its folder first",
            _ => "give a path that this user can create",
        };
        CommandError::Input(format!("secret file {}: {why}: {remedy}", path.display()))
    };
    let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let mut file = created.map_err(wrong)?;
    writeln!(file, "{secret}").map_err(wrong)
}
