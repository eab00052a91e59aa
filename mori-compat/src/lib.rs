//! MoRI-IO's objects over a kvferry data plane: what vLLM's MoRIIOConnector calls when it imports
//! `mori.io`, without MoRI.
//!
//! A [`CompatEngine`] owns a [`DataPlane`](kvferry_engine::fabric::DataPlane) and a thread that
//! polls it. Descriptors are the plane's own bytes and travel in vLLM's handshake. A
//! [`CompatSession`] posts batches and hands out a [`CompatTransferStatus`] each, which is settled
//! by the thread and read by whoever polls it. Everything may be called from any thread.
//!
//! In two things it is kinder than MoRI: a failure is reported only when no byte of the operation
//! can land any more, and a peer that comes back under the same key with another address is a new
//! peer.
//!
//! Tests inject failures (`KVFERRY_FAULTS`) and log what was moved ([`CompatSettings::audit`]).

mod audit;
mod desc;
mod engine;
mod error;
mod fabric;
mod poll_thread;
mod session;
mod settings;
mod state;
mod status;

pub use desc::{CompatEngineDesc, CompatMemoryDesc};
pub use engine::CompatEngine;
pub use error::CompatError;
pub use fabric::CompatPlane;
pub use kvferry_fabric_host::SessionPaths;
pub use session::CompatSession;
pub use settings::CompatSettings;
pub use status::{CompatStatusCode, CompatTransferStatus};
