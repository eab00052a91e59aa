//! KV geometry and the way from block lists to byte ranges.
//!
//! A [`Geometry`] and [`RankLayout`]s describe what an engine's KV cache looks like, [`check()`]
//! says whether two engines fit, a [`Route`] is precomputed from what one rank exchanges with one
//! rank of a peer, and [`Route::plan`] turns block lists into coalesced [`Slices`].
//!
//! ```
//! use kvferry_engine::core::layout::*;
//! use kvferry_engine::fabric::{Address, RegionDesc};
//!
//! // A layer of 64 blocks with 2 heads, 16 tokens, and 8 elements of 2 bytes.
//! let geometry = Geometry::new("m", 2, vec![KvGroup::full(16, [0])]);
//! let rank = |name: &str| RankLayout {
//!     rank: 0,
//!     address: Address(name.as_bytes().into()),
//!     regions: vec![(RegionDesc(name.as_bytes().into()), 64 * 512)],
//!     layers: vec![LayerLayout::contiguous(0, [64, 2, 16, 8], 2)],
//! };
//! let (source, receiver) = (rank("source"), [rank("receiver")]);
//! check((&geometry, &[source.clone()]), (&geometry, &receiver))?;
//!
//! // Two blocks that are neighbours on both sides, and one that is not.
//! let route = &routes(true, (&geometry, &source), (&geometry, &receiver))?[0];
//! let (local, remote) = (BlockList::new(vec![3, 4, 9]), BlockList::new(vec![10, 11, 0]));
//! let span = TokenSpan { group: 0, from: 0, to: 48, local: &local, remote: &remote };
//! let mut slices = Slices::default();
//! route.plan(&[0], &span, &mut slices)?;
//! assert_eq!(slices.local, [3 * 512, 9 * 512]);
//! assert_eq!(slices.remote, [10 * 512, 0]);
//! assert_eq!(slices.len, [2 * 512, 512]);
//! # Ok::<(), Mismatch>(())
//! ```

pub(super) mod check;
mod digest;
mod geometry;
mod heads;
mod mapping;
mod overlap;
mod route;
mod slices;

pub use check::{Mismatch, check};
pub use digest::{LayerRows, LayoutDigest};
pub use geometry::{BlockList, Geometry, GroupKind, HeadSlots, KvGroup, LayerLayout, RankLayout};
pub use heads::{receivers, senders};
pub use route::{Footprint, Route, RouteSide, TokenSpan, routes, routes_from};
pub use slices::Slices;
