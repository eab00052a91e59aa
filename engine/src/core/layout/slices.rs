//! Byte ranges of one operation.

use crate::fabric::{Direction, OpId, SessionId, Submit};
use serde::{Deserialize, Serialize};

/// Byte ranges as three lists of equal length, offsets relative to two regions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Slices {
    /// Offsets into the local region.
    pub local: Vec<u64>,
    /// Offsets into the remote region.
    pub remote: Vec<u64>,
    /// Lengths in bytes.
    pub len: Vec<u64>,
}

impl Slices {
    /// Appends a range, or extends the last one if both sides continue it.
    #[inline]
    pub fn push(&mut self, local: u64, remote: u64, len: u64) {
        if let Some(last) = self.len.last_mut() {
            let at = self.local.len() - 1;
            if self.local[at] + *last == local && self.remote[at] + *last == remote {
                *last += len;
                return;
            }
        }
        self.local.push(local);
        self.remote.push(remote);
        self.len.push(len);
    }

    /// Makes room for more ranges.
    pub fn reserve(&mut self, ranges: usize) {
        self.local.reserve(ranges);
        self.remote.reserve(ranges);
        self.len.reserve(ranges);
    }

    pub fn count(&self) -> usize {
        self.len.len()
    }

    /// True if there is no range.
    pub fn is_empty(&self) -> bool {
        self.len.is_empty()
    }

    /// Sum of the lengths.
    pub fn bytes(&self) -> u64 {
        self.len.iter().sum()
    }

    /// Forgets the ranges, keeps the memory.
    pub fn clear(&mut self) {
        self.local.clear();
        self.remote.clear();
        self.len.clear();
    }

    /// The batch for a data plane.
    pub fn submit(&self, op: OpId, session: SessionId, direction: Direction) -> Submit<'_> {
        Submit { op, session, direction, local: &self.local, remote: &self.remote, len: &self.len }
    }
}
