//! A data plane for host memory. The owner of a destination does the copy: a push is executed by
//! its target, a read by its initiator. So quiet of reads and fences are local, and hold though
//! the other process is stopped in the middle.
#![warn(missing_docs)]

mod config;
mod copy;
mod descriptor;
mod doorbell;
mod link;
mod memory;
mod path;
mod plane;
mod proto;
mod ring;
mod shared;
mod sys;
mod worker;

pub use config::{DataPath, HostConfig};
pub use memory::{HugePages, MemfdPool};
pub use plane::{HostCounterReader, HostError, HostPlane, SessionPaths};
pub use shared::{HostCounters, PathCount};
pub use sys::read_memory;
