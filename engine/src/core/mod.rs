//! Sans-io protocol core: every state machine is a [`Machine`].
//!
//! ```
//! use kvferry_engine::core::ids::Incarnation;
//! use kvferry_engine::core::router::{Router, RouterConfig, RouterInput};
//! use kvferry_engine::core::{Machine, Nanos, Outbox};
//!
//! let (mut router, mut out) = (Router::new(RouterConfig::default(), Incarnation(1)), Outbox::new());
//! router.handle(Nanos::from_ms(1), RouterInput::Drain, &mut out);
//! assert!(router.is_draining() && out.is_empty());
//! assert_eq!(router.deadline(), None, "it waits for nothing");
//! ```

pub mod block_ledger;
mod by_peer;
pub mod channel;
pub mod command;
pub mod config;
pub mod decode;
pub mod dialect;
pub(crate) mod engine_core;
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
pub mod omni_mori;
pub mod payload;
mod peer_manager;
pub mod peers;
pub mod prefill;
pub mod prompt_hash;
mod recent_set;
mod registration;
pub mod router;
pub mod time;
mod timers;
pub mod transfer;
pub mod verify;

pub use machine::{Gauges, Machine, Outbox};
pub use time::Nanos;
