//! What one rank exchanges with one rank of a peer, precomputed at the hello.

use super::check::Mismatch;
use super::geometry::{BlockList, Geometry, RankLayout};
use super::slices::Slices;

/// The part of the KV that one local and one remote rank exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The peer's rank.
    pub remote_rank: u16,
}

/// Tokens of one request in one group, with the blocks of both sides.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    /// Group index.
    pub group: usize,
    /// First token.
    pub from: u32,
    /// One past the last token; rounded up to the smaller block size when planned.
    pub to: u32,
    /// Blocks of the local side.
    pub local: &'a BlockList,
    /// Blocks of the remote side.
    pub remote: &'a BlockList,
}

impl Route {
    /// The regions `(local, remote)` that a layer of the route touches; layers with equal regions
    /// can share an operation.
    pub fn regions(&self, _layer: u16) -> (u16, u16) {
        (0, 0)
    }

    /// Appends the byte ranges of `span` for each of `layers` (all in the span's group), layer by
    /// layer, merged where both sides are contiguous.
    ///
    /// # Errors
    /// A block list that does not cover the span or names a block outside the pool; nothing is
    /// appended then.
    pub fn plan(
        &self,
        _layers: &[u16],
        _span: &Span<'_>,
        _out: &mut Slices,
    ) -> Result<(), Mismatch> {
        Ok(())
    }
}

/// The routes of rank `rank` of the local engine to the ranks of the peer; `local_is_source` says
/// who has the KV. Every head that a sink rank needs comes from exactly one source rank.
///
/// # Errors
/// As [`super::check`].
pub fn routes(
    _rank: u16,
    _local_is_source: bool,
    _local: (&Geometry, &[RankLayout]),
    _remote: (&Geometry, &[RankLayout]),
) -> Result<Vec<Route>, Mismatch> {
    Ok(Vec::new())
}
