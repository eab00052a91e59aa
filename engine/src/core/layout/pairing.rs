//! Which source rank gives which KV heads to which sink rank.

use super::geometry::Geometry;
use crate::core::ids::{RankSet, TP_MAX};

/// Neighbouring KV heads that one source rank gives to one sink rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// First head, counted from the first head of the source rank.
    pub(super) source: u16,
    /// First head, counted from the first head of the sink rank.
    pub(super) sink: u16,
    /// Number of heads.
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

/// What source rank `from` gives to sink rank `to`. With replicas on the source side the sink
/// ranks of a head take them in turn, so equal sizes pair equal ranks and loads differ by at most
/// one.
pub(super) fn share(source: &Geometry, sink: &Geometry, from: u16, to: u16) -> Option<Share> {
    if source.latent {
        return (to % source.tp == from).then_some(Share { source: 0, sink: 0, heads: 1 });
    }
    let (source_first, source_heads, source_copies) = held(source, from);
    let (sink_first, sink_heads, sink_copies) = held(sink, to);
    let first = source_first.max(sink_first);
    let end = (source_first + source_heads).min(sink_first + sink_heads);
    let turn = if planted!("copies-take-no-turns") {
        0
    } else {
        u32::from(to) % sink_copies % source_copies
    };
    (first < end && u32::from(from) % source_copies == turn).then(|| Share {
        source: (first - source_first) as u16,
        sink: if planted!("heads-land-at-the-front") { 0 } else { (first - sink_first) as u16 },
        heads: (end - first) as u16,
    })
}

/// True if the sizes can be divided by, whatever a peer claims.
fn countable(geometry: &Geometry) -> bool {
    (1..=TP_MAX).contains(&geometry.tp) && geometry.kv_heads > 0
}

/// The source ranks that hold a part which some sink rank takes; the others have nothing to send.
/// Empty for geometries without ranks or heads.
pub fn senders(source: &Geometry, sink: &Geometry) -> RankSet {
    let mut ranks = RankSet::EMPTY;
    if countable(source) && countable(sink) {
        for from in 0..source.tp {
            if (0..sink.tp).any(|to| share(source, sink, from, to).is_some()) {
                ranks.insert(from);
            }
        }
    }
    ranks
}

/// The sink ranks that take a part: all of them, since each has heads of its own. Empty for
/// geometries without ranks or heads.
pub fn receivers(source: &Geometry, sink: &Geometry) -> RankSet {
    match countable(source) && countable(sink) {
        true => RankSet::first(sink.tp),
        false => RankSet::EMPTY,
    }
}
