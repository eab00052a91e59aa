//! The payload core, with clients that keep to its rules, one that does not, and memory that shows
//! who wrote where.

mod anew;
mod cases;
mod names;
mod step;
mod world;

use kvferry_engine::core::payload::PayloadConfig;
use proptest::collection::vec;
use proptest::prelude::*;
use step::PayloadStep;
use world::PayloadWorld;

fn step() -> impl Strategy<Value = PayloadStep> {
    let client = 0..5usize;
    let key = (0..3u8, 0..3u8);
    prop_oneof![
        6 => (client.clone(), key.clone(), 0..90_000u64, 1..3u32, 0..30u64)
            .prop_map(|(client, key, bytes, receivers, wait)| PayloadStep::Reserve { client, key, bytes, receivers, wait }),
        5 => (client.clone(), any::<bool>(), any::<bool>())
            .prop_map(|(client, put, is_chunk)| PayloadStep::Written { client, put, is_chunk }),
        1 => (client.clone(), key.clone(), any::<bool>())
            .prop_map(|(client, key, is_chunk)| PayloadStep::GiveUp { client, key, is_chunk }),
        1 => (client.clone(), key.clone()).prop_map(|(client, key)| PayloadStep::Drop { client, key }),
        8 => (client.clone(), key.clone()).prop_map(|(client, key)| PayloadStep::Want { client, key }),
        2 => (client.clone(), key).prop_map(|(client, key)| PayloadStep::Abandon { client, key }),
        4 => client.clone().prop_map(|client| PayloadStep::Take { client }),
        4 => client.clone().prop_map(|client| PayloadStep::Release { client }),
        1 => (client.clone(), 0..3u8, any::<bool>(), any::<bool>())
            .prop_map(|(client, request, fails, is_own)| PayloadStep::End { client, request, fails, is_own }),
        1 => (client.clone(), 0..3u8, any::<bool>())
            .prop_map(|(client, request, is_own)| PayloadStep::CleanUp { client, request, is_own }),
        1 => client.prop_map(|client| PayloadStep::Replace { client }),
        2 => (0..40u64, any::<u8>()).prop_map(|(id, what)| PayloadStep::Lie { id, what }),
        3 => (0..20u64).prop_map(|ms| PayloadStep::Wait { ms }),
    ]
}

/// Streams of the three requests in two deployments: the model knows of each who has begun it.
const STREAMS: u32 = 6;

/// Small pools and tables, so that each limit is met.
fn config() -> impl Strategy<Value = PayloadConfig> {
    (4..80u64, prop_oneof![Just(0), 1..60u64], 2..20u32, 1..6u32, 1..4u32, 1..6u32).prop_map(
        |(pages, hold, slots_max, payloads_max, reservations_max, remembered)| PayloadConfig {
            pool: pages * 4096,
            hold: kvferry_engine::core::Nanos::from_ms(hold),
            slots_max,
            payloads_max,
            reservations_max,
            streams_max: remembered.max(STREAMS),
            tombstones_max: remembered.max(STREAMS),
            ..PayloadConfig::default()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn what_arrives_is_what_was_put_and_nothing_is_lost(
        config in config(),
        steps in vec(step(), 1..160),
    ) {
        let mut world = PayloadWorld::new(config);
        for step in steps {
            world.step(step);
        }
        world.finish();
    }
}
