//! The `kvferry` program: runs, sweeps and replays scenarios, and routes requests to instances.
//!
//! [`main`] is the whole program; the binary hands it the arguments and passes on the exit code.

pub mod actors;
mod attempt;
mod bench;
mod cli;
mod cores;
mod doctor;
pub mod embed;
mod exit;
mod export;
mod files;
mod fleet;
mod legs;
pub mod limits;
mod lists;
mod lives;
mod logs;
pub mod meters;
mod outcome;
mod output;
pub mod plane;
mod progress;
mod replay;
mod router;
mod run;
mod scrape;
mod serve;
mod signals;
mod sweep;
mod sync;
mod table;
mod told;
mod wiring;

pub use cli::main;
