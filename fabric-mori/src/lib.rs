//! A data plane over ROCm's MoRI-IO: RDMA between hosts, xGMI between the GPUs of one. MoRI is
//! loaded when a plane is made, and only then; without it there is an error that says what was
//! looked for.
//!
//! ```text
//!  owner --> MoriPlane --jobs--> thread of the engine --> mori-sys --> C shim --> MoRI-IO
//!        <-- events    <-- poller of completions <------------------------------- (RDMA, xGMI)
//!            door: hello and memory descriptors over TCP <--> MoriPlane of a peer
//! ```
//!
//! ```no_run
//! use kvferry_fabric_mori::{MoriBackend, MoriConfig, MoriPlane};
//!
//! let config = MoriConfig { backend: MoriBackend::Xgmi, ..MoriConfig::default() };
//! match MoriPlane::new(config) {
//!     Ok(plane) => println!("{plane:?}"),
//!     Err(why) => println!("{why}"),
//! }
//! ```
#![warn(missing_docs)]

mod access_control;
mod address;
mod completion_poller;
mod config;
mod counters;
mod device_events;
mod engine_thread;
mod event_queue;
mod job;
mod last_error;
mod link;
mod memory;
mod mori;
mod plane;
pub mod preflight;
mod session_opener;
mod sockets;

pub use config::{MoriBackend, MoriConfig};
pub use counters::MoriCounters;
pub use device_events::DeviceEvents;
pub use last_error::last_error_pipe;
pub use memory::DeviceMemory;
pub use mori_sys::{Shim, ShimSearchPath, ShimUnavailable, timeouts_set};
pub use plane::{MoriCounterReader, MoriError, MoriPlane};
