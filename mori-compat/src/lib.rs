//! MoRI-IO's objects over a kvferry data plane: what vLLM's MoRIIOConnector calls when it imports
//! `mori.io`, without MoRI.
//!
//! An [`Engine`] owns a [`DataPlane`](engine::fabric::DataPlane) and a thread that polls it.
//! Descriptors are the plane's own bytes and travel in vLLM's handshake. A [`Session`] posts
//! batches and hands out a [`Status`] each, which is settled by the thread and read by whoever
//! polls it. Everything may be called from any thread.
//!
//! In two things it is kinder than MoRI: a failure is reported only when no byte of the operation
//! can land any more, and a peer that comes back under the same key with another address is a new
//! peer.
//!
//! Tests and fault drills inject failures ([`Settings::faults`]) and log what was moved
//! ([`Settings::audit`]).

mod audit;
mod desc;
mod engine;
mod error;
mod fabric;
mod pump;
mod session;
mod settings;
mod state;
mod status;

pub use desc::{EngineDesc, MemoryDesc};
pub use engine::Engine;
pub use error::Error;
pub use fabric::Fabric;
pub use fabric_host::SessionPaths;
pub use session::Session;
pub use settings::Settings;
pub use status::{Code, Status};
