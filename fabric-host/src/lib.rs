//! A data plane for host memory. The owner of a destination does the copy: a push is executed by
//! its target, a read by its initiator. So quiet of reads and fences are local, and hold though
//! the other process is stopped in the middle.
//!
//! ```text
//!            initiator                                     target
//!  owner --> HostPlane --submit--> ring or TCP --> worker thread copies a push
//!        <-- events    <-- done -- ring or TCP <--        |
//!                \------ worker thread copies a read <----+---- memory file, process or TCP
//! ```
//!
//! A plane registers memory, and is asked for what came of it:
//!
//! ```
//! use kvferry_engine::core::Nanos;
//! use kvferry_engine::fabric::{DataEvent, DataPlane, RegionId};
//! use kvferry_fabric_host::{HostConfig, HostPlane, HugePages, MemfdPool};
//!
//! let pool = MemfdPool::new(1 << 20, HugePages::No)?;
//! let mut plane = HostPlane::new(HostConfig::default())?;
//! plane.register(RegionId(0), pool.memory())?;
//! let mut events = Vec::new();
//! plane.poll(Nanos::ZERO, &mut events);
//! assert!(matches!(events[..], [DataEvent::Registered { result: Ok(_), .. }]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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

pub use config::{DataPath, HostConfig, PeerTrust};
pub use descriptor::this_node;
pub use memory::{HugePages, MemfdPool};
pub use plane::{HostCounterReader, HostError, HostPlane, SessionPaths};
pub use shared::{HostCounters, PathCount};
pub use sys::read_memory;
