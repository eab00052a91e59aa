//! Fixed texts that many requests and answers are searched for.

use memchr::memmem::Finder;
use std::sync::OnceLock;

/// A fixed text. Its searcher is built once: to build one takes longer than to search an answer.
pub(crate) struct Needle {
    text: &'static [u8],
    finder: OnceLock<Finder<'static>>,
}

impl Needle {
    pub(crate) const fn new(text: &'static str) -> Needle {
        Needle { text: text.as_bytes(), finder: OnceLock::new() }
    }

    /// Offset of the first occurrence.
    pub(crate) fn find(&self, bytes: &[u8]) -> Option<usize> {
        self.finder.get_or_init(|| Finder::new(self.text)).find(bytes)
    }

    pub(crate) fn is_in(&self, bytes: &[u8]) -> bool {
        self.find(bytes).is_some()
    }

    /// Number of bytes of the text.
    pub(crate) const fn len(&self) -> usize {
        self.text.len()
    }
}
