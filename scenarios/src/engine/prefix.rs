//! Which block holds the KV of which prefix.

/// A map from prefix hashes to blocks: open addressing with linear probing, at most half full.
///
/// With a `BTreeMap` instead, and blocks of 16 tokens, the whole engine takes six times as long for
/// a production trace.
#[derive(Debug)]
pub(super) struct PrefixTable {
    slots: Vec<Slot>,
    mask: usize,
}

/// Key 0 is an empty slot.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    key: u64,
    block: u32,
}

impl PrefixTable {
    /// An empty map for up to `entries` entries.
    pub(super) fn new(entries: u32) -> PrefixTable {
        let size = (entries as usize * 2).next_power_of_two().max(2);
        PrefixTable { slots: vec![Slot::default(); size], mask: size - 1 }
    }

    /// Where the key is, or where it would go. Keys are hashes, so any of their bits will do.
    fn locate(&self, key: u64) -> usize {
        let mut at = key as usize & self.mask;
        while self.slots[at].key != key && self.slots[at].key != 0 {
            at = (at + 1) & self.mask;
        }
        at
    }

    pub(super) fn get(&self, key: u64) -> Option<u32> {
        let slot = self.slots[self.locate(key)];
        (slot.key != 0).then_some(slot.block)
    }

    /// Adds an entry unless there is one with this key; true if it did.
    pub(super) fn insert(&mut self, key: u64, block: u32) -> bool {
        debug_assert_ne!(key, 0);
        let at = self.locate(key);
        let vacant = self.slots[at].key == 0;
        if vacant {
            self.slots[at] = Slot { key, block };
        }
        vacant
    }

    /// Removes an entry and moves those behind it up, so that no search breaks off.
    pub(super) fn remove(&mut self, key: u64) {
        let mut hole = self.locate(key);
        if self.slots[hole].key == 0 {
            return;
        }
        let mut at = hole;
        loop {
            at = (at + 1) & self.mask;
            let slot = self.slots[at];
            if slot.key == 0 {
                break;
            }
            let home = slot.key as usize & self.mask;
            if at.wrapping_sub(home) & self.mask >= at.wrapping_sub(hole) & self.mask {
                self.slots[hole] = slot;
                hole = at;
            }
        }
        self.slots[hole] = Slot::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// Few distinct home slots, so that runs of colliding entries are long.
        #[test]
        fn behaves_like_a_map(ops in prop::collection::vec((0u64..40, any::<bool>()), 1..200)) {
            let mut table = PrefixTable::new(24);
            let mut model = BTreeMap::new();
            for (n, (word, insert)) in ops.into_iter().enumerate() {
                let key = ((word / 4) << 32) + (word % 4) * 61 + 1;
                if insert && model.len() < 24 {
                    let fresh = !model.contains_key(&key);
                    prop_assert_eq!(table.insert(key, n as u32), fresh);
                    model.entry(key).or_insert(n as u32);
                } else {
                    table.remove(key);
                    model.remove(&key);
                }
                for word in 0..40u64 {
                    let key = ((word / 4) << 32) + (word % 4) * 61 + 1;
                    prop_assert_eq!(table.get(key), model.get(&key).copied());
                }
            }
        }
    }
}
