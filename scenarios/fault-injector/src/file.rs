//! A file of `[[fault]]` tables without a scenario around them.
//!
//! ```
//! use kvferry_faults::FaultFile;
//!
//! let text = "seed = 4\n[[fault]]\nkind = 'fabric.no_copy'\nchance = 0.5\n";
//! let file = FaultFile::parse("half.toml", text)?;
//! assert_eq!((file.seed(), file.faults().len()), (4, 1));
//! let error = FaultFile::parse("odd.toml", &text.replace("copy", "cpy")).unwrap_err();
//! assert!(error.to_string().contains("odd.toml:3"), "{error}");
//! # Ok::<(), kvferry_faults::ScenarioError>(())
//! ```

use crate::doc::{FileName, FromKey, TomlDoc, TomlField};
use crate::error::ScenarioError;
use crate::fault::DrawnFault;
use crate::section;
use crate::table::FaultSpec;
use std::convert::Infallible;
use std::path::Path;

/// Seed of the first run where a file leaves it open.
pub const FIRST_SEED: u64 = 1;

/// `seed`; `None` is "any", one per run.
#[derive(Debug)]
pub struct ScenarioSeed(pub Option<u64>);

impl FromKey for ScenarioSeed {
    fn from_field(field: &TomlField<'_>) -> Result<ScenarioSeed, ScenarioError> {
        match field.text() {
            Ok("any") => Ok(ScenarioSeed(None)),
            Ok(_) => Err(field.error("`seed` is a text", "give a number or \"any\"")),
            Err(_) => field.literal().map(|seed| ScenarioSeed(Some(seed))),
        }
    }
}

section! {
    /// Faults for a fabric that moves real bytes: it injects them into the operations of its own
    /// process, whatever the workload is. Keys of the file are `about`, `seed` and `[[fault]]`.
    #[derive(Debug)]
    pub struct FaultFile(section) {
        #[expect(dead_code, reason = "it is for who reads the file")]
        about: Option<String>;
        seed: ScenarioSeed = ScenarioSeed(Some(FIRST_SEED));
        fault: Vec<FaultSpec>;
    } with {
        file: FileName = section.doc.file.clone();
    }
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
        let mut read: FaultFile = TomlDoc::new(file, text).read()?;
        FaultSpec::number_twins(&mut read.fault);
        for spec in &read.fault {
            spec.check_nameless(&read.file)?;
        }
        if read.seed.0.is_none() {
            let remedy = "give a number, so that it happens again";
            return Err(read.file.error(1, "`seed` is \"any\"", remedy));
        }
        Ok(read)
    }

    /// Seed of all decisions; 1 if the file sets none.
    pub fn seed(&self) -> u64 {
        self.seed.0.unwrap_or(FIRST_SEED)
    }

    /// The faults that this seed has.
    pub fn faults(&self) -> Vec<DrawnFault<Infallible>> {
        let seed = self.seed();
        let on = self.fault.iter().filter(|spec| spec.is_on(seed));
        on.flat_map(|spec| spec.draw(seed, &[])).collect()
    }

    /// An error about the fault at a line, for what a fabric cannot inject.
    pub fn error(&self, line: u32, what: impl Into<String>, remedy: &str) -> ScenarioError {
        self.file.error(line, what, remedy)
    }
}

/// The text of a file of which `what` is wanted; `remedy` is for who named one that is not there.
///
/// # Errors
/// If it cannot be read.
pub fn text_of(path: &Path, what: &str, remedy: &str) -> Result<String, ScenarioError> {
    std::fs::read_to_string(path).map_err(|why| {
        let file = FileName(path.display().to_string().into());
        file.error(0, format!("cannot read the {what}: {why}"), remedy)
    })
}
