//! Sans-io protocol core: every state machine is a [`Machine`].

mod beacon;
pub mod blocks;
pub mod channel;
pub mod command;
pub mod decode;
pub mod dialect;
pub mod error;
pub mod hashes;
pub mod idmap;
pub mod ids;
pub mod layout;
mod limits;
pub mod machine;
pub mod message;
pub mod moriio;
pub mod peers;
pub mod prefill;
pub mod router;
pub mod station;
pub mod time;
pub mod timers;
mod tombstones;
pub mod transfer;

pub use machine::{Gauges, Machine, Outbox};
pub use time::Nanos;
