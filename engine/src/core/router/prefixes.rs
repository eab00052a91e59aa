//! Which prompt prefixes an instance has computed lately, as far as the router knows.

use crate::core::hash_index::HashIndex;

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct PrefixNode {
    hash: u64,
    newer: u32,
    older: u32,
}

/// A bounded set of prefix hashes that forgets the least recently used.
///
/// A prompt touches its longest prefix first, so a prefix is always more recent than what extends
/// it and is forgotten after it.
#[derive(Clone, Debug)]
pub(super) struct PrefixMemory {
    places: HashIndex,
    nodes: Vec<PrefixNode>,
    newest: u32,
    oldest: u32,
    capacity: u32,
}

impl PrefixMemory {
    /// Remembers up to `capacity` hashes.
    pub(super) fn new(capacity: u32) -> Self {
        let capacity = capacity.min(NONE - 1);
        PrefixMemory {
            places: HashIndex::new(0),
            nodes: Vec::new(),
            newest: NONE,
            oldest: NONE,
            capacity,
        }
    }

    /// Number of hashes that are remembered.
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Number of leading hashes of `prefix` that are remembered.
    pub(super) fn matched(&self, prefix: &[u64]) -> usize {
        prefix.iter().take_while(|hash| self.places.get(**hash).is_some()).count()
    }

    /// Makes the hashes of `prefix` the most recent, the first one before all.
    pub(super) fn touch(&mut self, prefix: &[u64]) {
        let kept = prefix.len().min(self.capacity as usize);
        for hash in prefix[..kept].iter().rev() {
            let place = match self.places.get(*hash) {
                Some(place) => {
                    self.unlink(place);
                    place
                }
                None => self.take_place(*hash),
            };
            self.link_newest(place);
        }
    }

    fn take_place(&mut self, hash: u64) -> u32 {
        let place = if (self.nodes.len() as u64) < u64::from(self.capacity) {
            self.nodes.push(PrefixNode { hash, newer: NONE, older: NONE });
            self.nodes.len() as u32 - 1
        } else {
            let place = self.oldest;
            self.unlink(place);
            let node = &mut self.nodes[place as usize];
            self.places.remove(node.hash);
            node.hash = hash;
            place
        };
        self.places.insert(hash, place);
        place
    }

    fn unlink(&mut self, place: u32) {
        let PrefixNode { newer, older, .. } = self.nodes[place as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.nodes[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.nodes[older as usize].newer = newer,
        }
    }

    fn link_newest(&mut self, place: u32) {
        let older = self.newest;
        let node = &mut self.nodes[place as usize];
        node.newer = NONE;
        node.older = older;
        match older {
            NONE => self.oldest = place,
            older => self.nodes[older as usize].newer = place,
        }
        self.newest = place;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The same set as a list, most recent first.
    fn naive_touch(list: &mut Vec<u64>, prefix: &[u64], capacity: usize) {
        for hash in prefix[..prefix.len().min(capacity)].iter().rev() {
            list.retain(|known| known != hash);
            list.insert(0, *hash);
            list.truncate(capacity);
        }
    }

    proptest! {
        #[test]
        fn remembers_what_a_naive_list_remembers(
            capacity in 0u32..9,
            touches in prop::collection::vec(prop::collection::vec(0u64..14, 0..12), 0..40),
        ) {
            let mut memory = PrefixMemory::new(capacity);
            let mut naive = Vec::new();
            for prefix in &touches {
                memory.touch(prefix);
                naive_touch(&mut naive, prefix, capacity as usize);
                for hash in 0..14 {
                    prop_assert_eq!(memory.matched(&[hash]), usize::from(naive.contains(&hash)));
                }
                prop_assert!(memory.nodes.len() <= capacity as usize);
            }
        }
    }

    #[test]
    fn match_ends_at_the_first_unknown_hash() {
        let mut memory = PrefixMemory::new(8);
        memory.touch(&[1, 2, 4]);
        assert_eq!(memory.matched(&[1, 2, 3, 4]), 2);
        assert_eq!(memory.matched(&[9, 1]), 0);
    }
}
