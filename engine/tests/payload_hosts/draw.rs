//! What is drawn: what the hosts are set to, and what happens to them.

use crate::cluster::{HostSettings, PAGE, WayFaults};
use crate::step::HostStep;
use kvferry_engine::core::Nanos;
use kvferry_engine::core::config::CoreSettings;
use kvferry_engine::core::payload::PayloadConfig;
use proptest::prelude::*;

fn one_of_clients() -> impl Strategy<Value = HostStep> {
    let at = (0..3usize, 0..5usize);
    let key = (0..3u8, 0..3u8);
    prop_oneof![
        // One of the stage that puts, of either deployment.
        9 => (0..3usize, any::<[bool; 2]>(), key.clone(), 1..40_000u64, 1..3u32).prop_map(
            |(host, [other, is_chunk], key, bytes, receivers)| {
                let client = if other { 3 } else { 0 };
                HostStep::Put { host, client, key, bytes, receivers, is_chunk }
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
        2 => (0..3usize, any::<u8>(), 0..30u64, key)
            .prop_map(|(host, what, number, key)| HostStep::Lie { host, what, number, key }),
    ]
}

fn fault() -> impl Strategy<Value = HostStep> {
    let short_or_long = || prop_oneof![0..50u64, 0..12_000u64];
    prop_oneof![
        1 => (0..3usize, any::<bool>(), short_or_long())
            .prop_map(|(host, is_told, down_ms)| HostStep::Crash { host, is_told, down_ms }),
        1 => ((0..3usize, 0..3usize), prop_oneof![0..200u64, 0..12_000u64, 0..90_000u64])
            .prop_map(|(hosts, ms)| HostStep::Cut { hosts, ms }),
        1 => (0..3usize, short_or_long()).prop_map(|(host, ms)| HostStep::Stand { host, ms }),
        1 => (0..3usize, 0..3usize, short_or_long())
            .prop_map(|(host, other, ms)| HostStep::Unname { host, other, ms }),
        2 => (0..60u8, 0..30u8, prop_oneof![Just(0), 0..60u8], 0..40u8, 0..40u8).prop_map(
            |(lost, repeated, damaged, failed, late)| {
                HostStep::Faults(WayFaults { lost, repeated, damaged, failed, late })
            }
        ),
    ]
}

/// Of a hundred steps that are no time that passes, so many are faults.
pub(crate) fn step(faults: u32) -> impl Strategy<Value = HostStep> {
    prop_oneof![
        75 - faults => one_of_clients(),
        faults => fault(),
        25 => prop_oneof![0..30u64, 0..3_000u64].prop_map(|ms| HostStep::Wait { ms }),
    ]
}

/// What hardly ever binds, or is met soon.
fn limit(small: std::ops::Range<u32>, ample: u32) -> impl Strategy<Value = u32> {
    prop_oneof![2 => Just(ample), 1 => small]
}

fn payload(pages: std::ops::Range<u64>) -> impl Strategy<Value = PayloadConfig> {
    let remembered = (1..6u32, limit(1..6, 4_096), prop_oneof![Just(60_000), 500..8_000u64]);
    let tables = (limit(1..8, 20), 1..6u32, limit(1..6, 20), limit(1..3, 1_024), remembered);
    let hold = prop_oneof![Just(0), 1..8_000u64, Just(300_000)];
    (pages, hold, tables).prop_map(|(pages, hold, tables)| {
        let (slots_max, payloads_max, host_payloads_max, hosts_max, (streams, tombstones, room)) =
            tables;
        PayloadConfig {
            pool: pages * PAGE,
            hold: Nanos::from_ms(hold),
            room: Nanos::from_ms(room),
            slots_max,
            payloads_max,
            hosts_max,
            host_payloads_max,
            streams_max: streams,
            tombstones_max: tombstones,
            ..PayloadConfig::default()
        }
    })
}

fn core() -> impl Strategy<Value = CoreSettings> {
    let times = (prop_oneof![Just(2_000), 300..8_000u64], prop_oneof![Just(2_000), 200..4_000u64]);
    (times, limit(1..6, 65_536), limit(1..6, 65_536), limit(0..4, 4_096)).prop_map(
        |((lease, orphan), requests_max, receivers_max, tombstones_max)| CoreSettings {
            lease: Nanos::from_ms(lease),
            orphan: Nanos::from_ms(orphan),
            requests_max,
            receivers_max,
            tombstones_max,
            ..CoreSettings::default()
        },
    )
}

/// Pools of so many pages, and small tables, so that each limit is met.
pub(crate) fn settings(pages: std::ops::Range<u64>) -> impl Strategy<Value = HostSettings> {
    let lines = (limit(4..40, 65_536), limit(1..4, 1_024));
    (payload(pages), core(), lines).prop_map(|(payload, core, (queue_max, operations_max))| {
        HostSettings { queue_max, operations_max, ..HostSettings::new(payload, core) }
    })
}
