//! What strangers do to the ports of a control plane: a process that listens, and sockets that say
//! what they like.

#[path = "../common/mod.rs"]
mod common;

mod bounds;
mod flood;
mod victim;

/// What [`victim::ZmqVictim`] starts.
#[test]
fn victim() {
    victim::serve_if_child();
}
