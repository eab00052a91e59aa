//! Places of a source file that can be changed, and the changes.

use sha2::{Digest, Sha256};
use std::ops::Range;

/// A change of one place of a source file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MutationSite {
    /// Path of the source file below the root of the workspace.
    pub(crate) file: String,
    /// Names of the type and the function in the file.
    pub(crate) function: String,
    /// What is written in place of what.
    pub(crate) change: String,
    /// Number of equal changes before it in the function.
    pub(crate) nth: usize,
    pub(crate) line: usize,
    /// Bytes of the file that are changed; empty at the start of a function's body.
    pub(crate) span: Range<usize>,
    pub(crate) edit: SiteEdit,
    /// Text of the function.
    pub(crate) body: String,
}

/// How a place is rewritten so that a switch chooses between the original and the change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SiteEdit {
    /// The expression is replaced by this one.
    Replace(String),
    /// The statement is left out.
    Drop,
    /// This statement is run first.
    Begin(String),
}

impl MutationSite {
    /// Name of the site: the same as long as the function keeps its name and the place its text.
    pub(crate) fn key(&self) -> String {
        let nth = if self.nth == 0 { String::new() } else { format!(" #{}", self.nth + 1) };
        format!("{} {}: {}{nth}", self.file, self.function, self.change)
    }

    /// Hash of the change and of the function's text.
    pub(crate) fn hash(&self) -> String {
        hash(&[self.key().as_bytes(), self.body.as_bytes()])
    }
}

/// Hash of a text.
pub(crate) fn hash(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}
