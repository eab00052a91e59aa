//! A data plane over ROCm's MoRI-IO: RDMA between hosts, xGMI between the GPUs of one. MoRI is
//! loaded when a plane is made, and only then; without it there is an error that says what was
//! looked for.
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
mod plane;
pub mod preflight;
mod process;
mod session_opener;

pub use config::{MoriBackend, MoriConfig};
pub use counters::MoriCounters;
pub use device::{DeviceEvents, DeviceMemory};
pub use mori_sys::{Shim, ShimSearchPath, ShimUnavailable, timeouts_set};
pub use plane::{MoriCounterReader, MoriError, MoriPlane};
pub use process::last_error_pipe;
