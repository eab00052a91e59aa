//! The KV transfer protocol of kvferry.
//!
//! [`core`] holds the protocol as state machines without IO, clock, randomness or async;
//! [`fabric`] the two traits through which bytes and frames leave the process; [`effects`] performs
//! the effects of a machine on a plane. With the feature `actors` the same machines run as actix
//! actors.

// First, for its macro.
#[macro_use]
pub mod planted;

#[cfg(feature = "actors")]
#[warn(missing_docs)]
pub mod actors;
#[cfg(feature = "conformance")]
#[warn(missing_docs)]
pub mod conformance;
pub mod core;
pub mod effects;
#[warn(missing_docs)]
pub mod fabric;
#[warn(missing_docs)]
pub mod text;
