//! Planes under load in processes of their own, while ports flap and processes are stopped, killed
//! and fenced at random: every operation has an outcome, every byte is right, nothing lands that
//! must not, and all serve again once nothing goes wrong any more.
//!
//! It takes seconds; `KVFERRY_SOAK_S` is how many, `KVFERRY_SOAK_SEED` which, and
//! `KVFERRY_SOAK_WITHIN_MS` how fast all have to serve again on a machine that has nothing else to
//! do.

#![allow(clippy::print_stdout, reason = "of an hour one wants to see something")]

#[path = "../common/mod.rs"]
mod common;
mod mesh;
mod node;

use mesh::Mesh;
use std::time::Duration;

/// The other processes: this test, executed again.
#[test]
fn child() {
    common::serve_if_child();
}

fn number(variable: &str, default: u64) -> u64 {
    let text = std::env::var(variable);
    text.map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{variable}={text}")))
}

/// How often all has to be well in between.
const PERIOD: Duration = Duration::from_secs(20);

#[test]
fn whatever_happens_has_an_outcome_and_passes() {
    let (seconds, seed) = (number("KVFERRY_SOAK_S", 8), number("KVFERRY_SOAK_SEED", 1));
    let within = Duration::from_millis(number("KVFERRY_SOAK_WITHIN_MS", u64::MAX >> 1));
    let mut left = Duration::from_secs(seconds);
    let mut mesh = Mesh::new(seed);
    mesh.recover();
    while !left.is_zero() {
        let period = left.min(PERIOD);
        mesh.trouble(period);
        let took = mesh.recover();
        left -= period;
        println!("{} in service again {took:?} after the last fault", mesh.summary());
        assert!(took < within, "{took:?} until all served again");
    }
}
