//! Which source rank gives which KV heads to which receiver rank.

use super::geometry::Geometry;
use crate::core::ids::{RankSet, TP_MAX};

/// Neighbouring KV heads that one source rank gives to one receiver rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeadShare {
    /// First head, counted from the first head of the source rank.
    pub(super) source: u16,
    /// First head, counted from the first head of the receiver rank.
    pub(super) receiver: u16,
    pub(super) heads: u16,
}

/// First KV head of a rank, the number of its heads, and on how many ranks each is replicated.
fn held(geometry: &Geometry, rank: u16) -> (u32, u32, u32) {
    let (heads, tp, rank) = (u32::from(geometry.kv_heads), u32::from(geometry.tp), u32::from(rank));
    match tp <= heads {
        true => (rank * heads / tp, heads / tp, 1),
        false => (rank / (tp / heads), 1, tp / heads),
    }
}

/// What source rank `from` gives to receiver rank `to`. With replicas on the source side the
/// receiver ranks of a head take them in turn, so equal sizes pair equal ranks and loads differ by
/// at most one.
pub(super) fn share(
    source: &Geometry,
    receiver: &Geometry,
    from: u16,
    to: u16,
) -> Option<HeadShare> {
    if source.latent {
        return (to % source.tp == from).then_some(HeadShare { source: 0, receiver: 0, heads: 1 });
    }
    let (source_first, source_heads, source_copies) = held(source, from);
    let (receiver_first, receiver_heads, receiver_copies) = held(receiver, to);
    let first = source_first.max(receiver_first);
    let end = (source_first + source_heads).min(receiver_first + receiver_heads);
    let turn = if planted!("copies-take-no-turns") {
        0
    } else {
        u32::from(to) % receiver_copies % source_copies
    };
    (first < end && u32::from(from) % source_copies == turn).then(|| HeadShare {
        source: (first - source_first) as u16,
        receiver: if planted!("heads-land-at-the-front") {
            0
        } else {
            (first - receiver_first) as u16
        },
        heads: (end - first) as u16,
    })
}

/// True if the sizes can be divided by, whatever a peer claims.
fn countable(geometry: &Geometry) -> bool {
    (1..=TP_MAX).contains(&geometry.tp) && geometry.kv_heads > 0
}

/// The source ranks that hold a part which some receiver rank takes; the others have nothing to
/// send. Empty for geometries without ranks or heads.
pub fn senders(source: &Geometry, receiver: &Geometry) -> RankSet {
    let mut ranks = RankSet::EMPTY;
    if countable(source) && countable(receiver) {
        for from in 0..source.tp {
            if (0..receiver.tp).any(|to| share(source, receiver, from, to).is_some()) {
                ranks.insert(from);
            }
        }
    }
    ranks
}

/// The receiver ranks that take a part: all of them, since each has heads of its own. Empty for
/// geometries without ranks or heads.
pub fn receivers(source: &Geometry, receiver: &Geometry) -> RankSet {
    match countable(source) && countable(receiver) {
        true => RankSet::first(receiver.tp),
        false => RankSet::EMPTY,
    }
}
