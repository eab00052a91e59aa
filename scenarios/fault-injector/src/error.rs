//! What is wrong with a scenario or a trace, for the person who wrote it.

use std::fmt;
use std::sync::Arc;

/// A scenario or trace that cannot be used: where, what and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScenarioError {
    /// The file as it was named by the user.
    pub file: Arc<str>,
    /// Line, counted from 1; 0 if it is about the file as a whole.
    pub line: u32,
    pub what: String,
    /// What to do about it.
    pub remedy: String,
}

impl fmt::Display for ScenarioError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        write!(f, ": {}; {}", self.what, self.remedy)
    }
}

impl std::error::Error for ScenarioError {}

/// The entry of `known` that is nearest to `word` by edit distance, if one is near.
pub fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let limit = (word.chars().count() / 3).max(1) + 1;
    known
        .iter()
        .map(|entry| (distance(word, entry), *entry))
        .filter(|(distance, _)| *distance <= limit)
        .min()
        .map(|(_, entry)| entry)
}

/// Levenshtein distance in characters.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
