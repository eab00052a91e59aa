//! The list of the bugs.

use crate::finder::Finder;
use serde::Deserialize;
use std::path::Path;

/// A bug that can be planted.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Bug {
    /// Its name in the source.
    pub(crate) name: String,
    /// What it does; `engine/PLANTED.md` shows it.
    #[allow(dead_code, reason = "for readers")]
    does: String,
    pub(crate) found: Finder,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct BugList {
    bug: Vec<Bug>,
    /// Changes that were taken for bugs and change nothing; each says why.
    #[allow(dead_code, reason = "for readers")]
    harmless: Vec<toml::Table>,
}

/// All bugs that something has to find.
pub(crate) fn bugs() -> Vec<Bug> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/planted.toml");
    let text = std::fs::read_to_string(&path).expect("the list is there");
    let list: BugList = toml::from_str(&text).unwrap_or_else(|why| panic!("planted.toml: {why}"));
    assert!(list.bug.len() >= 30, "{} bugs", list.bug.len());
    list.bug
}
