//! The registrations that were not taken lately, for the people who sent them.

use super::registry::Reject;
use crate::core::time::Nanos;
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::Arc;

/// How many are remembered.
pub(super) const LISTED_MAX: usize = 64;

/// Longest text of one, in characters.
const TEXT_MAX: usize = 256;

/// A registration that was not taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rejection {
    /// When.
    pub at: Nanos,
    /// The HTTP address that it gave, else whence it came. Control characters are
    /// replaced.
    pub from: Arc<str>,
    /// The kind of mistake.
    pub reason: Reject,
    /// What is wrong.
    pub why: Arc<str>,
}

/// The last [`LISTED_MAX`] of them, oldest first.
#[derive(Debug, Default)]
pub(super) struct Rejections(VecDeque<Rejection>);

impl Rejections {
    /// What is said again and again is listed once, with the last time.
    pub(super) fn add(&mut self, at: Nanos, from: &str, reason: Reject, why: &str) {
        let new = Rejection { at, from: printable(from), reason, why: printable(why) };
        let same = |it: &Rejection| (&it.from, it.reason, &it.why) == (&new.from, reason, &new.why);
        match self.0.iter().position(same) {
            Some(before) => _ = self.0.remove(before),
            None if self.0.len() == LISTED_MAX => _ = self.0.pop_front(),
            None => {}
        }
        self.0.push_back(new);
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Rejection> {
        self.0.iter()
    }
}

fn printable(text: &str) -> Arc<str> {
    let shown = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    text.chars().take(TEXT_MAX).map(shown).collect::<String>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_bounded_and_printable() {
        let mut rejections = Rejections::default();
        for n in 0..LISTED_MAX as u64 + 3 {
            rejections.add(Nanos(n), &"a\r\n".repeat(1000), Reject::Malformed, &format!("{n}\0"));
        }
        let listed: Vec<_> = rejections.iter().collect();
        assert_eq!((listed.len(), listed[0].at), (LISTED_MAX, Nanos(3)));
        assert_eq!(listed[0].from.chars().count(), TEXT_MAX);
        assert!(listed.iter().all(|one| !one.from.contains(char::is_control)));
        assert_eq!(&*listed[0].why, "3\u{fffd}");
    }

    #[test]
    fn what_is_said_again_is_listed_once() {
        let mut rejections = Rejections::default();
        for n in 0..100 {
            rejections.add(Nanos(n), "a", Reject::Superseded, "b");
            rejections.add(Nanos(n), "a", Reject::Superseded, "c");
        }
        let listed: Vec<_> = rejections.iter().map(|it| (it.at, &*it.why)).collect();
        assert_eq!(listed, [(Nanos(99), "b"), (Nanos(99), "c")]);
    }
}
