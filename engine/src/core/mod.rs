//! Sans-io protocol core: every state machine is a [`Machine`].

pub mod block_ledger;
mod by_peer;
pub mod channel;
pub mod command;
pub mod config;
pub mod decode;
pub mod dialect;
pub mod engine_core;
pub mod enum_variants;
pub mod error;
pub mod hash_index;
mod heartbeat;
pub mod ids;
pub mod input_kinds;
pub mod instance;
pub mod layout;
mod limits;
pub mod machine;
pub mod message;
pub mod moriio;
pub mod peer_manager;
pub mod peers;
pub mod prefill;
mod recent_set;
mod registration;
pub mod router;
pub mod time;
pub mod timers;
pub mod transfer;

pub use machine::{Gauges, Machine, Outbox};
pub use time::Nanos;
