//! The folder for the logs of the processes of a run.

use crate::process::CommandError;
use crate::simulator::outcome::RunOutcome;
use kvferry_sim::world::RunVerdict;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Runs of this process, whose folders have numbers.
static RUNS: AtomicU32 = AtomicU32::new(0);

/// The folder; one without a name given by the user is removed unless it has something to explain.
pub(super) struct ClusterLogs {
    folder: PathBuf,
    /// The user has named it.
    named: bool,
    /// It has something to explain.
    kept: bool,
}

impl ClusterLogs {
    /// Makes the folder that is named, or a new one for temporary files.
    ///
    /// # Errors
    /// The folder cannot be made.
    pub(super) fn new(named: Option<&Path>) -> Result<ClusterLogs, CommandError> {
        let name = || {
            let nth = RUNS.fetch_add(1, Ordering::Relaxed);
            std::env::temp_dir().join(format!("kvferry-run-{}-{nth}", std::process::id()))
        };
        let folder = named.map_or_else(name, Path::to_path_buf);
        let made = match named {
            Some(folder) => fs::create_dir_all(folder),
            // Not one that somebody else has put there.
            None => fs::DirBuilder::new().mode(0o700).create(&folder),
        };
        made.map_err(|why| {
            let folder = folder.display();
            CommandError::Input(format!(
                "logs of the processes: {folder}: {why}; name a folder by --logs"
            ))
        })?;
        Ok(ClusterLogs { folder, named: named.is_some(), kept: false })
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Keeps the folder if the run has something to explain; the folder that is kept.
    pub(super) fn end(mut self, outcome: &RunOutcome) -> Option<PathBuf> {
        let clean = outcome.exit == RunVerdict::Held && outcome.failed + outcome.recomputed == 0;
        self.kept = !clean;
        (self.named || self.kept).then(|| self.folder.clone())
    }

    /// Keeps the folder of a run that came to no end, and names it in the error.
    pub(super) fn explain(mut self, why: CommandError) -> CommandError {
        self.kept = true;
        match why {
            CommandError::Input(text) => {
                let folder = self.folder.display();
                CommandError::Input(format!("{text}; logs of the processes: {folder}"))
            }
            other => other,
        }
    }
}

impl Drop for ClusterLogs {
    fn drop(&mut self) {
        if !self.named && !self.kept {
            // What is left of it is no error of the run.
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}
