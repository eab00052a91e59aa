//! The holes of a pool in the order of their addresses.

/// Pages that nobody has, with neighbours that somebody has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hole {
    pub(super) first: u64,
    /// The first page behind it.
    pub(super) end: u64,
}

impl Hole {
    pub(super) fn pages(self) -> u64 {
        self.end - self.first
    }
}

/// No node.
const NONE: u32 = u32::MAX;

/// A hole, or a fork between two sides.
#[derive(Clone, Copy, Debug)]
struct TrieNode {
    /// Where a hole ends. At a fork, what counts is the high bits, which all holes below share.
    end: u64,
    /// Pages of the largest hole here or below.
    largest: u64,
    /// How many low bits of `end` differ among the holes below: none at a hole. The highest of them
    /// says on which side a hole is.
    bits: u32,
    sides: [u32; 2],
}

impl TrieNode {
    fn covers(&self, end: u64) -> bool {
        (self.end ^ end) >> self.bits == 0
    }

    fn side(&self, end: u64) -> usize {
        (end >> (self.bits - 1) & 1) as usize
    }
}

/// The holes in a binary trie over their ends, in which each fork knows the largest hole below it.
/// A path is no longer than the number of a page has bits, and no operation takes more than two.
///
/// The ends are the keys because most payloads are cut from the beginning of a hole, which then
/// stays where it is in the trie.
#[derive(Clone, Debug)]
pub(super) struct HoleTrie {
    nodes: Vec<TrieNode>,
    spare: Vec<u32>,
    root: u32,
}

impl HoleTrie {
    pub(super) fn new() -> HoleTrie {
        HoleTrie { nodes: Vec::new(), spare: Vec::new(), root: NONE }
    }

    /// Pages of the largest hole; 0 if there is none.
    pub(super) fn largest(&self) -> u64 {
        if self.root == NONE { 0 } else { self.node(self.root).largest }
    }

    /// Adds a hole, or changes the one that ends there.
    pub(super) fn set(&mut self, hole: Hole) {
        self.root = self.set_below(self.root, hole);
    }

    /// Removes the hole that ends there.
    pub(super) fn remove(&mut self, end: u64) {
        if self.root != NONE {
            self.root = self.remove_below(self.root, end);
        }
    }

    /// The lowest hole of at least so many pages.
    pub(super) fn lowest(&self, pages: u64) -> Option<Hole> {
        if self.root == NONE || self.largest() < pages {
            return None;
        }
        let mut node = self.node(self.root);
        while node.bits > 0 {
            let low = self.node(node.sides[0]);
            node = if low.largest >= pages { low } else { self.node(node.sides[1]) };
        }
        Some(self.hole(node))
    }

    /// The hole that ends there.
    pub(super) fn ending_at(&self, end: u64) -> Option<Hole> {
        let mut at = self.root;
        while at != NONE {
            let node = self.node(at);
            if !node.covers(end) {
                return None;
            }
            if node.bits == 0 {
                return Some(self.hole(node));
            }
            at = node.sides[node.side(end)];
        }
        None
    }

    /// The hole that starts there.
    pub(super) fn starting_at(&self, first: u64) -> Option<Hole> {
        let next = if self.root == NONE { None } else { self.next_end(self.root, first) };
        next.filter(|hole| hole.first == first)
    }

    /// The lowest hole below a node that ends behind a page.
    fn next_end(&self, at: u32, page: u64) -> Option<Hole> {
        let node = self.node(at);
        if node.bits == 0 {
            return (node.end > page).then(|| self.hole(node));
        }
        let high = node.end >> (node.bits - 1) | 1;
        let low = page < high << (node.bits - 1);
        let low = low.then(|| self.next_end(node.sides[0], page)).flatten();
        low.or_else(|| self.next_end(node.sides[1], page))
    }

    fn set_below(&mut self, at: u32, hole: Hole) -> u32 {
        let leaf = TrieNode { end: hole.end, largest: hole.pages(), bits: 0, sides: [NONE; 2] };
        if at == NONE {
            return self.add(leaf);
        }
        let node = *self.node(at);
        if !node.covers(hole.end) {
            let bits = 64 - (node.end ^ hole.end).leading_zeros();
            let largest = node.largest.max(leaf.largest);
            let mut fork = TrieNode { end: hole.end, largest, bits, sides: [at; 2] };
            fork.sides[fork.side(hole.end)] = self.add(leaf);
            return self.add(fork);
        }
        if node.bits == 0 {
            self.nodes[at as usize] = leaf;
        } else {
            let side = node.side(hole.end);
            self.nodes[at as usize].sides[side] = self.set_below(node.sides[side], hole);
            self.update(at);
        }
        at
    }

    /// What is left of a node.
    fn remove_below(&mut self, at: u32, end: u64) -> u32 {
        let node = *self.node(at);
        if !node.covers(end) {
            return at;
        }
        if node.bits == 0 {
            self.spare.push(at);
            return NONE;
        }
        let side = node.side(end);
        let left = self.remove_below(node.sides[side], end);
        if left == NONE {
            self.spare.push(at);
            return node.sides[1 - side];
        }
        self.nodes[at as usize].sides[side] = left;
        self.update(at);
        at
    }

    /// Makes a fork know what is below it.
    fn update(&mut self, at: u32) {
        let [low, high] = self.node(at).sides.map(|side| self.node(side));
        self.nodes[at as usize].largest = low.largest.max(high.largest);
    }

    fn add(&mut self, node: TrieNode) -> u32 {
        if let Some(at) = self.spare.pop() {
            self.nodes[at as usize] = node;
            return at;
        }
        self.nodes.push(node);
        self.nodes.len() as u32 - 1
    }

    fn node(&self, at: u32) -> &TrieNode {
        &self.nodes[at as usize]
    }

    fn hole(&self, node: &TrieNode) -> Hole {
        Hole { first: node.end - node.largest, end: node.end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// Ends that differ in high and in low bits; holes may overlap here, which changes nothing.
        #[test]
        fn behaves_like_a_map(
            steps in prop::collection::vec(
                (0u64..24, 0u32..3, 1u64..20, any::<bool>()), 1..200),
        ) {
            let (mut trie, mut model) = (HoleTrie::new(), BTreeMap::new());
            for (low, high, pages, set) in steps {
                let end = 20 + low + ((1 << (17 * high)) >> 1);
                if set {
                    trie.set(Hole { first: end - pages, end });
                    model.insert(end, end - pages);
                } else {
                    trie.remove(end);
                    model.remove(&end);
                }
                let holes = || model.iter().map(|(end, first)| Hole { first: *first, end: *end });
                prop_assert_eq!(trie.largest(), holes().map(Hole::pages).max().unwrap_or(0));
                for pages in 0..21 {
                    prop_assert_eq!(trie.lowest(pages), holes().find(|hole| hole.pages() >= pages));
                }
                for page in (0..50).chain([1 << 16, end - pages, end, 1 << 40]) {
                    let ending = holes().find(|hole| hole.end == page);
                    prop_assert_eq!(trie.ending_at(page), ending);
                    let next = holes().find(|hole| hole.end > page);
                    let starting = next.filter(|hole| hole.first == page);
                    prop_assert_eq!(trie.starting_at(page), starting);
                }
                let nodes = (2 * model.len()).saturating_sub(1);
                prop_assert_eq!(trie.nodes.len() - trie.spare.len(), nodes);
            }
        }
    }
}
