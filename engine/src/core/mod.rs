//! Sans-io protocol core: every state machine is a [`Machine`].

mod beacon;
pub mod blocks;
mod by_peer;
pub mod channel;
pub mod command;
pub mod decode;
pub mod dialect;
pub mod error;
pub mod hashes;
pub mod idmap;
pub mod ids;
pub mod instance;
pub mod kinds;
pub mod layout;
mod limits;
pub mod machine;
pub mod message;
pub mod moriio;
pub mod peers;
pub mod prefill;
mod registration;
pub mod router;
pub mod station;
pub mod tagged;
pub mod time;
pub mod timers;
mod tombstones;
pub mod transfer;

pub use machine::{Gauges, Machine, Outbox};
pub use time::Nanos;
