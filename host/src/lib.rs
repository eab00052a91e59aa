//! The `kvferry` program: runs, sweeps and replays scenarios, and routes requests to instances.
//!
//! [`main`] is the whole program; the binary hands it the arguments and passes on the exit code.
//! `cli` stands over the rooms of the commands, and these over `instance` and `process`, which they
//! share. Without the feature `full` there is the simulator alone; without `simulator` neither that nor
//! the stand-in server `serve`.

#[cfg(not(any(feature = "full", feature = "simulator")))]
compile_error!("without the features `simulator` and `full` the program has no command");

#[cfg(feature = "full")]
mod bench;
mod cli;
#[cfg(feature = "full")]
mod doctor;
#[cfg(feature = "full")]
mod health;
#[cfg(feature = "full")]
pub mod instance;
#[cfg(feature = "full")]
mod needle;
mod process;
#[cfg(feature = "full")]
mod router;
#[cfg(feature = "full")]
mod secret;
#[cfg(all(feature = "full", feature = "simulator"))]
mod serve;
#[cfg(feature = "full")]
pub mod sidecar;
#[cfg(feature = "simulator")]
pub mod simulator;
#[cfg(feature = "full")]
mod spans;
#[cfg(feature = "full")]
mod tls;

pub use cli::main;
#[cfg(feature = "full")]
pub use process::interpreted_by;
#[cfg(feature = "full")]
#[doc(hidden)]
pub use router::{HeldByRouter, RouterInProcess};
