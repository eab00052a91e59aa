//! The `kvferry` program: runs, sweeps and replays scenarios, and routes requests to instances.
//!
//! [`main`] is the whole program; the binary hands it the arguments and passes on the exit code.

pub mod actor_simulation;
mod bench;
mod cli;
mod control_listeners;
mod doctor;
mod exit;
mod export;
mod failure_notice;
mod incarnations;
mod instance_setup;
mod legs;
pub mod limits;
mod lists;
mod local_cluster;
mod logs;
pub mod meters;
mod outcome;
pub mod plane;
mod progress;
mod replay;
mod router;
mod run;
mod scenario_files;
mod scrape;
mod seed_run;
mod serve;
pub mod sidecar;
mod signals;
mod stdout;
mod sweep;
mod sync;
mod table;

pub use cli::main;
