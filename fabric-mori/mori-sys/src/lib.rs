//! The C side of MoRI-IO, ROCm's library of RDMA and xGMI transfers: a shim over its C++ classes,
//! loaded at run time. What is above this is free of unsafe code: see `fabric-mori`.
//!
//! This crate builds everywhere, and links to neither. [`Shim::load`] takes a shim that is there, or
//! compiles one for the MoRI that is installed (see `mori-build` for where that is looked for), and
//! says what is missing if it cannot.

mod abi;
mod load;
mod search_path;
mod shim_cache;
mod timeouts;
mod verbs;

pub use abi::{
    Backend, Code, Direction, Engine, Functions, Info, Kind, Location, MORI_ABI, Memory, Rdma,
    Session, Text,
};
pub use kvferry_mori_build::{MoriInstallation, MoriSearchError};
pub use load::{Shim, ShimInfo};
pub use search_path::{ShimLoadFailure, ShimOrigin, ShimSearchPath, ShimUnavailable};
pub use shim_cache::{CompiledShim, ShimCache, installed};
pub use timeouts::{set_timeouts, timeouts_set};
pub use verbs::message_max;
