//! Payloads between hosts: the payload cores with the prefill, decode and transfer machines that move
//! the bytes.

mod cases;
mod cluster;
mod world;

use cluster::WayFaults;
use kvferry_engine::core::Nanos;
use kvferry_engine::core::payload::PayloadConfig;
use proptest::collection::vec;
use proptest::prelude::*;
use world::{HostStep, HostWorld};

fn step() -> impl Strategy<Value = HostStep> {
    let at = (0..3usize, 0..5usize);
    let key = (0..3u8, 0..3u8);
    prop_oneof![
        // One of the stage that puts, of either deployment.
        9 => (0..3usize, any::<bool>(), key.clone(), 1..40_000u64, 1..3u32).prop_map(
            |(host, other, key, bytes, receivers)| {
                let client = if other { 3 } else { 0 };
                HostStep::Put { host, client, key, bytes, receivers }
            },
        ),
        12 => (at.clone(), key.clone(), proptest::option::of(0..3usize))
            .prop_map(|((host, client), key, from)| HostStep::Want { host, client, key, from }),
        2 => (at.clone(), key.clone())
            .prop_map(|((host, client), key)| HostStep::Abandon { host, client, key }),
        4 => at.clone().prop_map(|(host, client)| HostStep::Take { host, client }),
        4 => at.clone().prop_map(|(host, client)| HostStep::Release { host, client }),
        1 => (at.clone(), 0..3u8, any::<bool>()).prop_map(|((host, client), request, fails)| {
            HostStep::End { host, client, request, fails }
        }),
        1 => (at.clone(), 0..3u8)
            .prop_map(|((host, client), request)| HostStep::CleanUp { host, client, request }),
        1 => at.prop_map(|(host, client)| HostStep::Replace { host, client }),
        1 => (0..3usize, any::<bool>(), prop_oneof![0..50u64, 0..12_000u64]).prop_map(
            |(host, is_told, down_ms)| HostStep::Crash { host, is_told, down_ms }
        ),
        1 => ((0..3usize, 0..3usize), prop_oneof![0..200u64, 0..12_000u64])
            .prop_map(|(hosts, ms)| HostStep::Cut { hosts, ms }),
        2 => (0..60u8, 0..30u8, prop_oneof![Just(0), 0..60u8], 0..40u8, 0..40u8).prop_map(
            |(lost, repeated, damaged, failed, late)| {
                HostStep::Faults(WayFaults { lost, repeated, damaged, failed, late })
            }
        ),
        2 => (0..3usize, any::<u8>(), 0..30u64, key)
            .prop_map(|(host, what, number, key)| HostStep::Lie { host, what, number, key }),
        9 => prop_oneof![0..30u64, 0..3_000u64].prop_map(|ms| HostStep::Wait { ms }),
    ]
}

/// Small pools and tables, so that each limit is met.
fn config() -> impl Strategy<Value = PayloadConfig> {
    (8..80u64, prop_oneof![Just(0), 1..8_000u64], 4..20u32, 1..6u32, 1..6u32).prop_map(
        |(pages, hold, slots_max, payloads_max, remembered)| PayloadConfig {
            pool: pages * cluster::PAGE,
            hold: Nanos::from_ms(hold),
            slots_max,
            payloads_max,
            host_payloads_max: 20,
            streams_max: remembered,
            tombstones_max: remembered,
            ..PayloadConfig::default()
        },
    )
}

/// Of the step, what hosts there are.
fn within(hosts: usize, step: HostStep) -> HostStep {
    match step {
        HostStep::Put { host, client, key, bytes, receivers } => {
            HostStep::Put { host: host % hosts, client, key, bytes, receivers }
        }
        HostStep::Want { host, client, key, from } => {
            HostStep::Want { host: host % hosts, client, key, from: from.map(|from| from % hosts) }
        }
        HostStep::Abandon { host, client, key } => {
            HostStep::Abandon { host: host % hosts, client, key }
        }
        HostStep::Take { host, client } => HostStep::Take { host: host % hosts, client },
        HostStep::Release { host, client } => HostStep::Release { host: host % hosts, client },
        HostStep::End { host, client, request, fails } => {
            HostStep::End { host: host % hosts, client, request, fails }
        }
        HostStep::CleanUp { host, client, request } => {
            HostStep::CleanUp { host: host % hosts, client, request }
        }
        HostStep::Replace { host, client } => HostStep::Replace { host: host % hosts, client },
        HostStep::Crash { host, is_told, down_ms } => {
            HostStep::Crash { host: host % hosts, is_told, down_ms }
        }
        HostStep::Lie { host, what, number, key } => {
            HostStep::Lie { host: host % hosts, what, number, key }
        }
        step => step,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn what_arrives_at_any_host_is_what_was_put_and_nothing_is_lost(
        hosts in 2..4usize,
        lies in any::<bool>(),
        config in config(),
        seed in any::<u64>(),
        steps in vec(step(), 1..120),
    ) {
        let mut world = HostWorld::new(hosts, lies, config, seed);
        for step in steps {
            world.step(within(hosts, step));
        }
        world.finish();
    }
}
