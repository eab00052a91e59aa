//! The C side of MoRI-IO, ROCm's library of RDMA and xGMI transfers: a shim over its C++ classes,
//! loaded at run time. What is above this is free of unsafe code: see `fabric-mori`.
//!
//! This crate builds everywhere. If there is a MoRI (see `mori-build` for where it is looked for),
//! the shim is compiled for it; with the feature `mori` it is an error if that is not possible. The
//! binary links to neither: [`Shim::load`] says what is missing where one is wanted.

mod abi;
mod load;
mod search_path;
mod timeouts;

pub use abi::{
    Backend, Code, Direction, Engine, Functions, Info, Kind, Location, MORI_ABI, Memory, Rdma,
    Session, Text,
};
pub use load::{Shim, ShimInfo};
pub use search_path::{ShimLoadFailure, ShimSearchPath, ShimUnavailable};
pub use timeouts::{set_timeouts, timeouts_set};
