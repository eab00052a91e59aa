//! Keys of transfers that have ended, so that a late message cannot start them again.

use super::ids::TransferKey;
use std::collections::{BTreeSet, VecDeque};

/// The newest ended keys; the oldest is forgotten when it is full.
#[derive(Debug)]
pub(super) struct Tombstones {
    order: VecDeque<TransferKey>,
    keys: BTreeSet<TransferKey>,
    max: usize,
}

impl Tombstones {
    pub(super) fn new(max: u32) -> Tombstones {
        Tombstones { order: VecDeque::new(), keys: BTreeSet::new(), max: max as usize }
    }

    pub(super) fn insert(&mut self, key: TransferKey) {
        if self.keys.insert(key.clone()) {
            self.order.push_back(key);
            if self.order.len() > self.max
                && let Some(oldest) = self.order.pop_front()
            {
                self.keys.remove(&oldest);
            }
        }
    }

    pub(super) fn contains(&self, key: &TransferKey) -> bool {
        self.keys.contains(key)
    }

    pub(super) fn len(&self) -> u32 {
        self.keys.len() as u32
    }
}
