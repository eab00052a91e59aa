//! Faults: their kinds, the tables that say when they happen, and what injects them into the
//! transfers of a process.
//!
//! A file of `[[fault]]` tables is read by [`FaultFile`] and becomes a [`FaultInjector`], which
//! decides what happens to each transfer; a [`FaultyDataPlane`] lets it happen to a data plane. The
//! scenario language reads its tables with the same means, see [`section!`]. All randomness is
//! keyed, see [`decide`].

pub mod decide;
pub mod doc;
pub mod draw_log;
mod error;
mod fault;
pub mod file;
mod injector;
pub mod lists;
mod plane;
mod schema;
pub mod section;
pub mod table;
pub mod value;

pub use error::ScenarioError;
pub use fault::{
    DrawnFault, DurationRange, FaultPlace, FaultTrigger, MemoryLayout, PartitionDirection,
    RaceOrder, RestartGeometry,
};
pub use file::FaultFile;
pub use injector::{FaultInjector, InjectedEffect, ReportFault, VARIABLE};
pub use lists::{FaultKind, MessageName, TriggerEvent};
pub use plane::FaultyDataPlane;
pub use schema::{FaultSchema, Opportunity};
