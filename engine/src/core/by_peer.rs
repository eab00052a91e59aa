//! What is under way with each peer, so that news of one peer costs nothing of the others.

use super::ids::ConnectionId;
use std::collections::{BTreeMap, BTreeSet};

/// Names by the peer that they have to do with.
#[derive(Debug)]
pub(super) struct ByPeer<T>(BTreeMap<ConnectionId, BTreeSet<T>>);

impl<T> Default for ByPeer<T> {
    fn default() -> Self {
        ByPeer(BTreeMap::new())
    }
}

impl<T: Ord + Clone> ByPeer<T> {
    pub(super) fn insert(&mut self, peer: ConnectionId, name: T) {
        self.0.entry(peer).or_default().insert(name);
    }

    pub(super) fn remove(&mut self, peer: ConnectionId, name: &T) {
        let Some(names) = self.0.get_mut(&peer) else { return };
        names.remove(name);
        if names.is_empty() {
            self.0.remove(&peer);
        }
    }

    /// Names of all peers.
    pub(super) fn len(&self) -> usize {
        self.0.values().map(BTreeSet::len).sum()
    }

    /// All names of a peer, in order.
    pub(super) fn of(&self, peer: ConnectionId) -> Vec<T> {
        self.0.get(&peer).map_or(Vec::new(), |names| names.iter().cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_peer_has_its_own_and_nothing_is_left_of_who_has_none() {
        let mut names = ByPeer::default();
        for name in [3, 1, 2] {
            names.insert(ConnectionId(7), name);
        }
        names.insert(ConnectionId(8), 4);
        names.remove(ConnectionId(7), &2);
        assert_eq!((names.of(ConnectionId(7)), names.of(ConnectionId(8))), (vec![1, 3], vec![4]));
        names.remove(ConnectionId(8), &4);
        names.remove(ConnectionId(8), &4);
        assert_eq!((names.of(ConnectionId(8)), names.0.len(), names.len()), (vec![], 1, 2));
    }
}
