//! What a router refuses where too much is asked or fails.

use crate::discovery::{DiscoveryBench, native, sent};
use crate::up;
use crate::world::{RouterWorld, prompt};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::router::{
    ClientAnswer, LegEvent, LegFailure, RetryShare, RouterConfig, RouterEffect, RouterInput,
    Unavailable,
};

fn bench(config: RouterConfig) -> DiscoveryBench {
    let mut bench = DiscoveryBench::new(config);
    for (name, role) in [("p0", Role::Prefill), ("d0", Role::Decode)] {
        bench.give(RouterInput::Register(native(name, role, Mode::Push)));
    }
    bench
}

/// The answer that a client gets at once, if it gets one.
fn answer(effects: Vec<RouterEffect>) -> Option<ClientAnswer> {
    effects.into_iter().find_map(|effect| match effect {
        RouterEffect::Answer { answer, .. } => Some(answer),
        _ => None,
    })
}

#[test]
fn requests_above_those_that_may_be_open_are_overload() {
    let mut bench =
        bench(RouterConfig { open_max: Some(3), requests_max: 2, ..RouterConfig::default() });
    let first = sent(bench.ask());
    // One more is in flight, and one waits.
    assert_eq!((answer(bench.ask()), answer(bench.ask())), (None, None));
    assert_eq!(answer(bench.ask()), Some(ClientAnswer::Overload));
    assert_eq!(bench.router.counters().shed, 1);
    first.iter().for_each(|leg| drop(bench.leg(leg.leg, crate::discovery::done())));
    assert_eq!(answer(bench.ask()), None, "there is room again");
    assert_eq!(answer(bench.ask()), Some(ClientAnswer::Overload));
}

#[test]
fn a_full_queue_is_overload_where_there_are_instances() {
    let config = RouterConfig { requests_max: 1, waiting_max: 1, ..RouterConfig::default() };
    let mut with = bench(config.clone());
    assert_eq!((answer(with.ask()), answer(with.ask())), (None, None));
    assert_eq!(answer(with.ask()), Some(ClientAnswer::Overload));
    let mut without = DiscoveryBench::new(config);
    assert_eq!(answer(without.ask()), None);
    assert_eq!(answer(without.ask()), Some(ClientAnswer::NoInstance(Unavailable::Nobody)));
    assert_eq!((with.router.counters().shed, without.router.counters().shed), (1, 0));
}

/// Failures of requests, each of which has many tries, until one is not sent again.
fn retries_until_refused(bench: &mut DiscoveryBench) -> u32 {
    let mut legs = sent(bench.ask());
    for retries in 0.. {
        // It says nothing of the instance.
        let failure = LegFailure::Instance(Failure::Cancelled);
        let effects = bench.leg(legs[1].leg, LegEvent::Failed(failure.clone()));
        if let Some(answer) = answer(effects.clone()) {
            assert_eq!(answer, ClientAnswer::Failed(failure));
            return retries;
        }
        legs = sent(effects);
    }
    unreachable!("it would go on for ever")
}

#[test]
fn retries_of_all_requests_together_are_a_share_of_them() {
    let share = Some(RetryShare { percent: 50, per_second: 1 });
    let mut bench = bench(RouterConfig {
        retry_share: share,
        retries_max: 1_000,
        retry_pause: Nanos::ZERO,
        expiry: Nanos::from_secs(60),
        ..RouterConfig::default()
    });
    // 10 in 10 s, and half of one request is none.
    assert_eq!(retries_until_refused(&mut bench), 10);
    // Of two one.
    assert_eq!(retries_until_refused(&mut bench), 1);
    assert_eq!(retries_until_refused(&mut bench), 0);
    assert_eq!(bench.router.counters().refused_retries, 3);
    assert_eq!(bench.router.counters().retries, 11);
    bench.now = bench.now + Nanos::from_secs(10);
    assert_eq!(retries_until_refused(&mut bench), 10);
}

#[test]
fn request_that_is_sent_again_waits_behind_no_new_one() {
    let config =
        RouterConfig { requests_max: 1, retry_pause: Nanos::ZERO, ..RouterConfig::default() };
    let mut world = RouterWorld::new(config);
    up(&mut world, 1, 1);
    let first = world.request(vec![prompt(100)], 1);
    let waiting = [200, 300].map(|tokens| world.request(vec![prompt(tokens)], 1));
    let decode = world.legs(first, Role::Decode)[0];
    // The only decode is kept out of traffic for a while.
    world.leg(decode, LegEvent::Failed(LegFailure::Connection));
    assert_eq!(world.live.len(), 0);
    world.advance(world.config.suspicion.scale(2, 1));
    let has_legs = |client| !world.legs(client, Role::Decode).is_empty();
    assert_eq!([first, waiting[0], waiting[1]].map(has_legs), [true, false, false]);
    world.finish();
    for client in [first, waiting[0], waiting[1]] {
        assert_eq!(world.answers[&client], ClientAnswer::Finished { recomputed: None });
    }
}
