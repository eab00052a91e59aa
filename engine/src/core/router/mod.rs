//! Pairs prefill and decode instances and sees every request to its end.
//!
//! The router knows instances by their registrations, clients by number, and sends legs through
//! the shell (HTTP in a deployment). It holds no KV.

mod io;

pub use io::*;
