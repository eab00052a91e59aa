//! Live peers whose ranks are connected anew after a failure.

use crate::core::config::REBUILDS_MAX;
use crate::core::ids::{ConnectionId, RankSet};
use std::collections::BTreeMap;

#[derive(Debug, Default)]
struct PeerRebuild {
    /// Times in a row.
    tries: u32,
    /// Ranks that have not opened all their sessions since the last time.
    unready: RankSet,
}

/// Peers that were connected anew and are not whole yet.
#[derive(Debug, Default)]
pub(super) struct PeerRebuilds(BTreeMap<ConnectionId, PeerRebuild>);

impl PeerRebuilds {
    /// Counts a failure of a peer that has sessions with `tp` ranks. Returns the number of failures
    /// before it in a row, or none if the peer is to be given up.
    pub(super) fn failed(&mut self, connection: ConnectionId, tp: u16) -> Option<u32> {
        let rebuild = self.0.entry(connection).or_default();
        let before = rebuild.tries;
        if before >= REBUILDS_MAX {
            self.0.remove(&connection);
            return None;
        }
        *rebuild = PeerRebuild { tries: before + 1, unready: RankSet::first(tp) };
        Some(before)
    }

    /// Notes that a rank has opened all its sessions with a peer. The peer is whole, and its failures
    /// are forgotten, when all ranks have.
    pub(super) fn ready(&mut self, connection: ConnectionId, rank: u16) {
        let Some(rebuild) = self.0.get_mut(&connection) else { return };
        rebuild.unready.remove(rank);
        let is_whole = rebuild.unready.is_empty() && !planted!("rebuilds-of-a-life-count");
        if is_whole || planted!("one-rank-ends-the-rebuilds") {
            self.0.remove(&connection);
        }
    }

    /// Forgets a peer that is gone.
    pub(super) fn forget(&mut self, connection: ConnectionId) {
        self.0.remove(&connection);
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: ConnectionId = ConnectionId(7);

    #[test]
    fn peer_is_given_up_after_failures_in_a_row_though_one_rank_has_its_sessions() {
        let mut rebuilds = PeerRebuilds::default();
        for before in 0..REBUILDS_MAX {
            assert_eq!(rebuilds.failed(PEER, 2), Some(before));
            rebuilds.ready(PEER, 1);
        }
        assert_eq!(rebuilds.failed(PEER, 2), None);
        assert_eq!(rebuilds.len(), 0);
    }

    #[test]
    fn failures_before_all_ranks_had_their_sessions_do_not_count() {
        let mut rebuilds = PeerRebuilds::default();
        for _ in 0..2 {
            for before in 0..REBUILDS_MAX {
                assert_eq!(rebuilds.failed(PEER, 2), Some(before));
            }
            rebuilds.ready(PEER, 0);
            assert_eq!(rebuilds.len(), 1);
            rebuilds.ready(PEER, 1);
            assert_eq!(rebuilds.len(), 0);
        }
    }
}
