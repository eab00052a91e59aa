//! The registrations that were not taken lately, for the people who sent them.

use crate::core::time::Nanos;
use crate::text::printable;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

/// How many are remembered.
pub(super) const LISTED_MAX: usize = 64;

/// Longest text of one, in characters.
const TEXT_MAX: usize = 256;

/// Why a registration was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RejectReason {
    /// The frame is not a registration of a version that we speak.
    Malformed,
    /// A MoRIIO registration with an address or size with which every request would fail.
    Unusable,
    /// The name is empty, too long, or has control characters.
    Name,
    /// An endpoint is empty, too long, has control characters or spaces, or port 0 or above 65535.
    Endpoint,
    /// `dp_size` is 0 or `dp_rank` is not below it.
    DataParallel,
    /// `tp` is 0 or above [`TP_MAX`](crate::core::ids::TP_MAX).
    TensorParallel,
    /// No engine can have the geometry or the rows that it says.
    Fit,
    /// Role, HTTP address, sizes or what has to fit changed within one incarnation.
    Changed,
    /// There are `instances_max` instances.
    Full,
    /// A newer engine serves at its HTTP address.
    Superseded,
    /// Its HTTP address is not among [`RouterConfig::listed`](super::RouterConfig::listed).
    Unlisted,
    /// As many instances registered from its address as are left for others.
    Share,
    /// It is not signed, and only such are taken.
    Unsigned,
    /// Its signature is not of who knows the secret, or is of something else.
    WrongSignature,
    /// It is not signed, and one that was has its name or its HTTP address.
    SignedBefore,
    /// It names no model, too many, or one by what is no name.
    Models,
}

pub(super) const REASONS: usize = RejectReason::Models as usize + 1;

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RejectReason::Malformed => "not a registration",
            RejectReason::Unusable => "unusable address or size",
            RejectReason::Name => "bad engine name",
            RejectReason::Endpoint => "bad endpoint",
            RejectReason::DataParallel => "bad DP rank or size",
            RejectReason::TensorParallel => "bad TP size",
            RejectReason::Fit => "bad geometry or rows",
            RejectReason::Changed => {
                "role, HTTP address, sizes or geometry changed within one incarnation"
            }
            RejectReason::Full => "too many instances",
            RejectReason::Superseded => "a newer engine serves at its HTTP address",
            RejectReason::Unlisted => "not listed",
            RejectReason::Share => "share of its address is full",
            RejectReason::Unsigned => "not signed",
            RejectReason::WrongSignature => "wrong signature",
            RejectReason::SignedBefore => "not signed, and a signed instance is there",
            RejectReason::Models => "bad names of models",
        })
    }
}

/// A registration that was not taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rejection {
    pub at: Nanos,
    /// The HTTP address that it gave, else whence it came. Control characters are
    /// replaced.
    pub from: Arc<str>,
    /// The kind of mistake.
    pub reason: RejectReason,
    pub why: Arc<str>,
}

/// The last [`LISTED_MAX`] of them, oldest first.
#[derive(Debug, Default)]
pub(super) struct Rejections(VecDeque<Rejection>);

impl Rejections {
    /// What is said again and again is listed once, with the last time.
    pub(super) fn add(&mut self, at: Nanos, from: &str, reason: RejectReason, why: &str) {
        let new = Rejection {
            at,
            from: printable(from, TEXT_MAX).into(),
            reason,
            why: printable(why, TEXT_MAX).into(),
        };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_bounded_and_printable() {
        let mut rejections = Rejections::default();
        for n in 0..LISTED_MAX as u64 + 3 {
            rejections.add(
                Nanos(n),
                &"a\r\n".repeat(1000),
                RejectReason::Malformed,
                &format!("{n}\0"),
            );
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
            rejections.add(Nanos(n), "a", RejectReason::Superseded, "b");
            rejections.add(Nanos(n), "a", RejectReason::Superseded, "c");
        }
        let listed: Vec<_> = rejections.iter().map(|it| (it.at, &*it.why)).collect();
        assert_eq!(listed, [(Nanos(99), "b"), (Nanos(99), "c")]);
    }
}
