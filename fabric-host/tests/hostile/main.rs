//! What strangers and admitted peers of this host try against a plane, from outside: with real
//! sockets and descriptors, real processes, and bytes that anybody can make.

#[path = "../common/mod.rs"]
mod common;

mod addresses;
mod arithmetic;
mod doorbells;
mod files;
mod forged;
mod greetings;
mod network;
mod policy;
mod processes;
mod users;

use common::patient;
use common::remote::serve_if_child;

/// The other process: this test, executed again by the others.
#[test]
fn child() {
    serve_if_child();
}
