//! A file of `[[fault]]` tables without a scenario around them.

use super::fault::FaultSpec;
use super::{faults, seed, text_of};
use crate::doc::{FileName, TomlDoc, TomlSection};
use crate::error::ScenarioError;
use crate::run::InjectedFault;
use std::path::Path;

/// Faults for a fabric that moves real bytes: it injects them into the operations of its own
/// process, whatever the workload is. Keys of the file are `about`, `seed` and `[[fault]]`.
#[derive(Debug)]
pub struct FaultFile {
    file: FileName,
    seed: u64,
    specs: Vec<FaultSpec>,
}

impl FaultFile {
    /// Loads and validates a file of faults.
    ///
    /// # Errors
    /// What is wrong with it, at which line, and what to do.
    pub fn load(path: impl AsRef<Path>) -> Result<FaultFile, ScenarioError> {
        let path = path.as_ref();
        let text = text_of(path, "faults", "name a TOML file of [[fault]] tables")?;
        FaultFile::parse(&path.display().to_string(), &text)
    }

    /// Parses and validates the text of such a file; `file` is named in errors.
    ///
    /// # Errors
    /// As [`FaultFile::load`].
    pub fn parse(file: &str, text: &str) -> Result<FaultFile, ScenarioError> {
        let doc = TomlDoc { file: FileName(file.into()), text };
        let table = doc.parse()?;
        let root = TomlSection::new(&doc, "", Some(table.get_ref()), 1);
        if let Some(about) = root.get("about") {
            about.text()?;
        }
        let Some(seed) = (match root.get("seed") {
            None => Some(1),
            Some(_) => seed(&root)?,
        }) else {
            return Err(root.error("`seed` is \"any\"", "give a number, so that it happens again"));
        };
        let specs = faults(&root)?;
        root.finish()?;
        for spec in &specs {
            spec.check_nameless(&doc.file)?;
        }
        Ok(FaultFile { file: doc.file, seed, specs })
    }

    /// Seed of all decisions; 1 if the file sets none.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The faults that this seed has, each with the line of its table.
    pub fn faults(&self) -> Vec<(u32, InjectedFault)> {
        let on = self.specs.iter().filter(|spec| spec.is_on(self.seed));
        on.flat_map(|spec| spec.draw(self.seed, &[]).into_iter().map(|fault| (spec.line, fault)))
            .collect()
    }

    /// An error about the fault at a line, for what a fabric cannot inject.
    pub fn error(&self, line: u32, what: impl Into<String>, remedy: &str) -> ScenarioError {
        self.file.error(line, what, remedy)
    }
}
