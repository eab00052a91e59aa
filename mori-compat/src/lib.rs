//! MoRI-IO's objects over a kvferry data plane: what vLLM's MoRIIOConnector, SGLang's MoRI backend and
//! vLLM-Omni's MoriTransferEngineConnector call when they import `mori`, without MoRI.
//!
//! A [`CompatEngine`] owns a [`DataPlane`](kvferry_engine::fabric::DataPlane) and a thread that
//! polls it. Descriptors are the plane's own bytes and travel in vLLM's handshake. A
//! [`CompatSession`] posts batches and hands out a [`CompatTransferStatus`] each, which is settled
//! by the thread and read by whoever polls it or waits for it. A [`CompatRequest`] names its regions
//! itself. Everything may be called from any thread.
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
mod host_memory;
mod poll_thread;
mod requests;
mod session;
mod settings;
mod state;
mod status;

pub use desc::{CompatEngineDesc, CompatMemoryDesc};
pub use engine::CompatEngine;
pub use error::CompatError;
pub use fabric::CompatPlane;
pub use host_memory::check_host_memory;
pub use kvferry_fabric_host::SessionPaths;
pub use requests::CompatRequest;
pub use session::CompatSession;
pub use settings::CompatSettings;
pub use status::{CompatStatusCode, CompatTransferStatus};
