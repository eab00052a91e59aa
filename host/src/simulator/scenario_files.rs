//! Scenario files as named on the command line.

use crate::process::CommandError;
use kvferry_scenarios::{Scenario, ScenarioError};
use std::path::{Path, PathBuf};

/// TOML files that belong to tools and are passed over in directories.
const TOOLS: &[&str] = &["Cargo.toml", "clippy.toml", "rustfmt.toml"];

/// Where a scenario comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ScenarioSource {
    /// The one inside the binary.
    Bundled,
    File(PathBuf),
}

impl ScenarioSource {
    /// Reads it; `trace` replaces the trace it names.
    ///
    /// # Errors
    /// As [`kvferry_scenarios::load`].
    pub(crate) fn load(&self, trace: Option<&Path>) -> Result<Scenario, ScenarioError> {
        match self {
            ScenarioSource::Bundled => kvferry_scenarios::bundled(trace),
            ScenarioSource::File(path) => kvferry_scenarios::load_with_trace(path, trace),
        }
    }

    /// The name it has in results.
    pub(crate) fn name(&self) -> String {
        match self {
            ScenarioSource::Bundled => kvferry_scenarios::BUNDLED.into(),
            ScenarioSource::File(path) => path.display().to_string(),
        }
    }
}

/// The scenarios that `paths` name: files as they are, the `.toml` files of directories and
/// everything below them by name. No path at all is the bundled scenario.
///
/// # Errors
/// A directory that cannot be listed or has no scenario in it.
pub(crate) fn find(paths: &[PathBuf]) -> Result<Vec<ScenarioSource>, CommandError> {
    if paths.is_empty() {
        return Ok(vec![ScenarioSource::Bundled]);
    }
    let mut found = Vec::new();
    for path in paths {
        if !path.is_dir() {
            found.push(ScenarioSource::File(path.clone()));
            continue;
        }
        let before = found.len();
        walk(path, &mut found)?;
        if found.len() == before {
            let text = format!("{}: no scenario in it; name a *.toml file", path.display());
            return Err(CommandError::Input(text));
        }
    }
    Ok(found)
}

fn walk(folder: &Path, found: &mut Vec<ScenarioSource>) -> Result<(), CommandError> {
    let unreadable = |why| {
        let text = format!("{}: cannot list the directory: {why}", folder.display());
        CommandError::Input(format!("{text}; name one that can be read"))
    };
    let mut entries = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        entries.push(entry.map_err(unreadable)?.path());
    }
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with('.') {
            continue;
        }
        if path.is_dir() {
            walk(&path, found)?;
        } else if name.ends_with(".toml") && !TOOLS.contains(&name.as_ref()) {
            found.push(ScenarioSource::File(path));
        }
    }
    Ok(())
}
