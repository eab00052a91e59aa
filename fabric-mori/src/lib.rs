//! A data plane over ROCm's MoRI-IO: RDMA between hosts, xGMI between the GPUs of one. MoRI is
//! loaded when a plane is made, and only then; without it there is an error that says what was
//! looked for.
//!
//! ```text
//!  owner --> MoriPlane --jobs--> thread of the engine --> mori-sys --> C shim --> MoRI-IO
//!        <-- events    <-- poller of completions <------------------------------- (RDMA, xGMI)
//!            acceptor: hello and memory descriptors over TCP <--> MoriPlane of a peer
//! ```
//!
//! [`MoriMixedPlane`] is one of each backend, with xGMI to peers of the node and RDMA to others.
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

// First, for its macro.
#[macro_use]
mod mori;

mod access_control;
mod address;
mod completion_poller;
mod config;
mod counters;
mod device;
mod engine_thread;
mod event_queue;
mod job;
mod link;
mod mixed;
mod peer_choice;
mod plane;
mod port_command;
pub mod preflight;
mod process;
mod session_opener;

pub use config::{MoriBackend, MoriConfig};
pub use counters::MoriCounters;
pub use device::{DeviceEvent, DeviceEvents, DeviceMemory};
pub use mixed::MoriMixedPlane;
pub use mori_sys::{
    CompiledShim, MoriInstallation, MoriSearchError, Shim, ShimSearchPath, ShimUnavailable,
    installed, timeouts_set,
};
pub use plane::{MoriCounterReader, MoriError, MoriPlane};
pub use port_command::PortCommand;
pub use process::last_error_pipe;
