//! A data plane over ROCm's MoRI-IO: RDMA between hosts, xGMI between the GPUs of one. MoRI is
//! loaded when a plane is made, and only then; without it there is an error that says what was
//! looked for.

mod address;
mod config;
mod counters;
mod desk;
mod door;
mod events;
mod gate;
mod job;
mod memory;
mod mori;
mod news;
mod opener;
mod plane;
pub mod preflight;
mod sockets;
mod watch;
mod words;

pub use config::{Backend, MoriConfig};
pub use counters::Counters;
pub use events::DeviceEvents;
pub use memory::DeviceMemory;
pub use mori_sys::{Places, Shim, Unavailable, timeouts_set};
pub use plane::{Meter, MoriError, MoriPlane};
pub use words::last_words;
