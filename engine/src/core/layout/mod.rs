//! KV geometry and the way from block lists to byte ranges.
//!
//! [`geometry`] describes what an engine's KV cache looks like, [`check`] says whether two engines
//! fit, [`route`] precomputes what one rank exchanges with one rank of a peer, and
//! [`route::Route::plan`] turns block lists into coalesced [`Slices`].

pub mod check;
mod digest;
pub mod geometry;
mod heads;
mod mapping;
mod overlap;
pub mod route;
mod slices;

pub use check::{Mismatch, check};
pub use digest::{LayerRows, LayoutDigest};
pub use geometry::{BlockList, Geometry, GroupKind, HeadSlots, KvGroup, LayerLayout, RankLayout};
pub use heads::{receivers, senders};
pub use route::{Footprint, Route, TokenSpan, routes};
pub use slices::Slices;
