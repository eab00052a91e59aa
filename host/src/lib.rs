//! The `kvferry` program: runs, sweeps and replays scenarios, and routes requests to instances.
//!
//! [`main`] is the whole program; the binary hands it the arguments and passes on the exit code.
//! `cli` stands over the rooms of the commands, and these over `instance` and `process`, which they
//! share. Without the feature `simulator` neither `simulator` nor the stand-in server `serve` is
//! there.

mod bench;
mod cli;
mod doctor;
mod health;
pub mod instance;
mod needle;
mod process;
mod router;
mod secret;
#[cfg(feature = "simulator")]
mod serve;
pub mod sidecar;
#[cfg(feature = "simulator")]
pub mod simulator;
mod spans;
mod tls;

pub use cli::main;
pub use process::interpreted_by;
#[doc(hidden)]
pub use router::{HeldByRouter, RouterInProcess};
