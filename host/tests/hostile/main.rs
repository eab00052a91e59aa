//! What strangers do to a host and to its connector, from outside.

#[path = "../program/mod.rs"]
#[allow(dead_code, reason = "other test programs use the rest")]
mod program;

mod socket_folder;
