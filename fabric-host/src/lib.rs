//! A data plane for host memory. The owner of a destination does the copy: a push is executed by
//! its target, a read by its initiator. So quiet of reads and fences are local, and hold though
//! the other process is stopped in the middle.

mod config;
mod copy;
mod descriptor;
mod hub;
mod link;
mod memory;
mod path;
mod plane;
mod proto;
mod ring;
mod sync;
mod sys;
mod worker;

pub use config::{HostConfig, Path};
pub use hub::{Counters, PathCount};
pub use memory::{HugePages, Pool};
pub use plane::{HostError, HostPlane, Meter, SessionPaths};
pub use sys::read_memory;
