//! What is drawn of a file while somebody asks for it, by where it stands.

use std::cell::RefCell;
use std::ops::Range;

thread_local! {
    static LOG: RefCell<Option<Vec<LoggedDraw>>> = const { RefCell::new(None) };
}

/// A value of a file that was drawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedDraw {
    /// The bytes of the file that hold it.
    pub bytes: Range<usize>,
    /// What was drawn, as a file can say it.
    pub text: String,
}

/// What `draw` gives, and all that it drew on this thread, in order.
pub fn logged<T>(draw: impl FnOnce() -> T) -> (T, Vec<LoggedDraw>) {
    let before = LOG.replace(Some(Vec::new()));
    let drawn = draw();
    (drawn, LOG.replace(before).unwrap_or_default())
}

/// What was drawn last stands for this, such as a word for an instance.
pub(crate) fn resolve(bytes: &Range<usize>, text: &str) {
    LOG.with_borrow_mut(|log| {
        let last = log.as_mut().and_then(|log| log.last_mut());
        if let Some(last) = last.filter(|last| last.bytes == *bytes) {
            text.clone_into(&mut last.text);
        }
    });
}

/// A value was drawn; nothing of it is kept unless it stands in a file and somebody asks.
pub(crate) fn add(bytes: &Range<usize>, text: impl FnOnce() -> String) {
    if bytes.is_empty() {
        return;
    }
    LOG.with_borrow_mut(|log| {
        if let Some(log) = log {
            log.push(LoggedDraw { bytes: bytes.clone(), text: text() });
        }
    });
}
