//! Names of transfers that have ended, so that a late message or a repeated leg cannot start them
//! again.

use std::collections::{BTreeSet, VecDeque};

/// The newest ended names; the oldest is forgotten when it is full.
#[derive(Debug)]
pub(super) struct Tombstones<K> {
    order: VecDeque<K>,
    names: BTreeSet<K>,
    max: usize,
}

impl<K: Ord + Clone> Tombstones<K> {
    pub(super) fn new(max: u32) -> Tombstones<K> {
        Tombstones { order: VecDeque::new(), names: BTreeSet::new(), max: max as usize }
    }

    pub(super) fn insert(&mut self, name: K) {
        if self.names.insert(name.clone()) {
            self.order.push_back(name);
            if self.order.len() > self.max
                && let Some(oldest) = self.order.pop_front()
                && !planted!("ended-names-without-limit")
            {
                self.names.remove(&oldest);
            }
        }
    }

    pub(super) fn contains(&self, name: &K) -> bool {
        self.names.contains(name)
    }

    pub(super) fn len(&self) -> u32 {
        self.names.len() as u32
    }
}
