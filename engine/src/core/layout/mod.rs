//! KV geometry and the way from block lists to byte ranges.
//!
//! [`geometry`] describes what an engine's KV cache looks like, [`check`] says whether two engines
//! fit, [`route`] precomputes what one rank exchanges with one rank of a peer, and
//! [`route::Route::plan`] turns block lists into coalesced [`Slices`].

pub mod check;
mod fit;
mod form;
pub mod geometry;
mod overlap;
mod pairing;
pub mod route;
mod slices;

pub use check::{Mismatch, check};
pub use fit::{Fit, Rows};
pub use geometry::{BlockList, Geometry, Group, GroupKind, HeadSlots, LayerLayout, RankLayout};
pub use pairing::{receivers, senders};
pub use route::{Footprint, Route, Span, routes};
pub use slices::Slices;
