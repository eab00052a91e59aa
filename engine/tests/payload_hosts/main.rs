//! Payloads between hosts: the payload cores with the prefill, decode and transfer machines that move
//! the bytes.

mod cases;
mod cluster;
mod draw;
#[path = "../payload/names.rs"]
mod names;
mod plane;
mod rest;
mod step;
mod world;

use cluster::HostSettings;
use draw::{settings, step};
use proptest::collection::vec;
use proptest::prelude::*;
use step::HostStep;
use world::HostWorld;

fn all_goes_well(
    hosts: usize,
    lies: bool,
    settings: HostSettings,
    seed: u64,
    steps: Vec<HostStep>,
) {
    let mut world = HostWorld::new(hosts, lies, settings, seed);
    for step in steps {
        world.step(step);
    }
    world.finish();
}

proptest! {
    #[test]
    fn what_arrives_at_any_host_is_what_was_put_and_nothing_is_lost(
        (hosts, lies) in (2..4usize, any::<bool>()),
        settings in settings(8..80),
        seed in any::<u64>(),
        steps in vec(step(7), 1..120),
    ) {
        all_goes_well(hosts, lies, settings, seed, steps);
    }

    #[test]
    fn hosts_that_are_full_give_each_other_what_they_want(
        hosts in 2..4usize,
        settings in settings(1..12),
        seed in any::<u64>(),
        steps in vec(step(4), 1..120),
    ) {
        all_goes_well(hosts, false, settings, seed, steps);
    }

    #[test]
    fn hosts_that_begin_anew_leave_nothing_behind(
        hosts in 2..4usize,
        settings in settings(1..40),
        seed in any::<u64>(),
        steps in vec(step(25), 1..120),
    ) {
        all_goes_well(hosts, false, settings, seed, steps);
    }
}
