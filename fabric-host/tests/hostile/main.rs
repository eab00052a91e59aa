//! What strangers do to a host plane, from outside.

#[path = "../common/mod.rs"]
mod common;

mod greetings;
