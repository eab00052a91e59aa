//! Pairs of instances between which KV does not get through.

use crate::up;
use crate::world::{RouterWorld, prompt, registration};
use kvferry_engine::core::Machine;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{ClientId, LegId};
use kvferry_engine::core::message::{FinishReason, Mode, Role};
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::core::router::{ClientAnswer, LegEvent, LegFailure, RouterConfig};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// Prefill and decode, by number.
type TestPair = (usize, usize);

/// The legs of a client and the pair that has them.
fn legs(world: &RouterWorld, client: ClientId) -> ([LegId; 2], TestPair) {
    let legs = [Role::Prefill, Role::Decode].map(|role| world.legs(client, role)[0]);
    let [p, d] = legs.map(|leg| number(&world.live[&leg].engine.to_string()));
    (legs, (p, d))
}

fn number(engine: &str) -> usize {
    engine[1..].parse().unwrap()
}

fn refused() -> Failure {
    Failure::HelloRefused("block sizes".into())
}

/// Serves one request; a decode that cannot get the KV of its prefill computes it itself. Returns
/// the pair.
fn serve(world: &mut RouterWorld, failure: impl Fn(TestPair) -> Option<Failure>) -> TestPair {
    let client = world.request(vec![prompt(100)], 1);
    let (legs, pair) = legs(world, client);
    let recomputed = failure(pair);
    world.done(legs[0]);
    world.leg(
        legs[1],
        LegEvent::Done { reason: FinishReason::Stop, recomputed: recomputed.clone() },
    );
    assert_eq!(world.answers[&client], ClientAnswer::Finished { recomputed });
    pair
}

/// Serves one request; a decode that cannot get the KV of its prefill fails the leg. Returns the
/// pairs that were tried.
fn serve_or_fail(
    world: &mut RouterWorld,
    failure: impl Fn(TestPair) -> Option<Failure>,
) -> Vec<TestPair> {
    let client = world.request(vec![prompt(100)], 1);
    let mut tried = Vec::new();
    while !world.answers.contains_key(&client) {
        if world.live.is_empty() {
            // It waits before it is sent again to who failed it.
            let due = world.router.deadline().expect("it waits for something");
            world.advance(due - world.now);
            continue;
        }
        let (legs, pair) = legs(world, client);
        tried.push(pair);
        match failure(pair) {
            Some(failure) => {
                world.leg(legs[1], LegEvent::Failed(LegFailure::Instance(failure)));
            }
            None => legs.into_iter().for_each(|leg| world.done(leg)),
        }
    }
    tried
}

/// Lets as much time pass as a breaker can take, while all instances go on registering.
fn rest(world: &mut RouterWorld, (prefills, decodes): TestPair, round: u64) {
    for beat in 1..=4 {
        world.advance(world.config.breaker_max.scale(1, 4));
        let prefills = (0..prefills).map(|n| format!("p{n}"));
        for name in prefills.chain((0..decodes).map(|n| format!("d{n}"))) {
            world.register(registration(&name, 1, 4 * round + beat, Mode::Push));
        }
    }
}

/// Numbers of prefills and decodes, and the pairs of them that work; at least one does.
fn fleet() -> impl Strategy<Value = (TestPair, BTreeSet<TestPair>)> {
    let size = (1usize..5, 1usize..5);
    (size, prop::collection::vec(any::<bool>(), 16), any::<prop::sample::Index>()).prop_map(
        |(size, matrix, whole)| {
            let pairs = (0..size.0).flat_map(|p| (0..size.1).map(move |d| (p, d)));
            let pairs: Vec<TestPair> = pairs.collect();
            let whole = pairs[whole.index(pairs.len())];
            let works = |(p, d): &TestPair| (*p, *d) == whole || matrix[4 * p + d];
            (size, pairs.into_iter().filter(works).collect())
        },
    )
}

proptest! {
    #[test]
    fn a_pair_that_does_not_work_is_met_once_if_another_does(
        (size, works) in fleet(),
        failure in prop::sample::select(vec![refused(), Failure::Unreachable, Failure::PeerSilent]),
    ) {
        let mut world = RouterWorld::new(RouterConfig::default());
        up(&mut world, size.0, size.1);
        let mut met = BTreeSet::new();
        for round in 1..40 {
            rest(&mut world, size, round);
            let pair = serve(&mut world, |pair| (!works.contains(&pair)).then(|| failure.clone()));
            prop_assert!(works.contains(&pair) || met.insert(pair), "{pair:?} was met again");
        }
    }

    #[test]
    fn no_retry_meets_a_pair_that_does_not_fit_again_if_another_does((size, works) in fleet()) {
        let mut world = RouterWorld::new(RouterConfig::default());
        up(&mut world, size.0, size.1);
        let mut met = BTreeSet::new();
        for round in 1..20 {
            rest(&mut world, size, round);
            for pair in serve_or_fail(&mut world, |pair| (!works.contains(&pair)).then(refused)) {
                prop_assert!(works.contains(&pair) || met.insert(pair), "{pair:?} was met again");
            }
        }
    }
}

/// The decode whose pair with the only prefill failed, and the other one, which is busy.
fn one_failed_of_two(world: &mut RouterWorld, failure: Failure) -> (usize, usize) {
    up(world, 1, 2);
    let failed = serve(world, |_| Some(failure.clone())).1;
    let busy = world.request(vec![prompt(5000)], 1);
    let decode = world.legs(busy, Role::Decode)[0];
    assert_eq!(number(&world.live[&decode].engine.to_string()), 1 - failed);
    assert_eq!(serve(world, |_| None).1, 1 - failed);
    rest(world, (1, 2), 1);
    (failed, 1 - failed)
}

#[test]
fn a_suspect_pair_is_taken_again_when_its_time_is_over() {
    let mut world = RouterWorld::new(RouterConfig::default());
    let (failed, _) = one_failed_of_two(&mut world, Failure::Unreachable);
    assert_eq!(serve(&mut world, |_| None).1, failed);
    world.finish();
}

#[test]
fn a_pair_that_does_not_fit_is_not_taken_for_another_that_is_busy() {
    let mut world = RouterWorld::new(RouterConfig::default());
    let (_, busy) = one_failed_of_two(&mut world, refused());
    assert_eq!(serve(&mut world, |_| None).1, busy);
    world.finish();
}

#[test]
fn the_only_pair_is_taken_though_it_does_not_fit() {
    let mut world = RouterWorld::new(RouterConfig::default());
    up(&mut world, 1, 1);
    for _ in 0..5 {
        serve(&mut world, |_| Some(refused()));
    }
    world.register(registration("d0", 2, 1, Mode::Push));
    up(&mut world, 1, 2);
    let pairs: BTreeSet<TestPair> = (0..2).map(|_| serve(&mut world, |_| None)).collect();
    assert_eq!(pairs.len(), 2, "a new incarnation is not answerable for the one before");
}

#[test]
fn a_leg_that_failed_for_its_pair_tells_of_the_pair() {
    let mut world = RouterWorld::new(RouterConfig::default());
    up(&mut world, 2, 1);
    let client = world.request(vec![prompt(100)], 1);
    let source =
        |world: &RouterWorld| world.live[&world.legs(client, Role::Prefill)[0]].engine.to_string();
    let first = source(&world);
    let decode = world.legs(client, Role::Decode)[0];
    world.leg(decode, LegEvent::Failed(LegFailure::Instance(refused())));
    assert_ne!(source(&world), first);
    world.legs(client, Role::Decode).into_iter().for_each(|leg| world.done(leg));
    for _ in 0..6 {
        assert_ne!(serve(&mut world, |_| None).0, number(&first));
    }
}

/// The decode has other tokens of the same number: no other pair would do better.
#[test]
fn two_prompts_of_one_request_blame_no_instance() {
    let failure =
        || Failure::PromptMismatch { decode: PromptHash([1, 2]), prefill: PromptHash([1, 3]) };
    for recomputes in [false, true] {
        let mut world = RouterWorld::new(RouterConfig::default());
        up(&mut world, 2, 2);
        for _ in 0..12 {
            if recomputes {
                serve(&mut world, |_| Some(failure()));
                continue;
            }
            let client = world.request(vec![prompt(100)], 2);
            let (ids, _) = legs(&world, client);
            world.leg(ids[1], LegEvent::Failed(LegFailure::Instance(failure())));
            let expected = ClientAnswer::Failed(LegFailure::Instance(failure()));
            assert_eq!(world.answers.get(&client), Some(&expected));
            assert!(world.live.is_empty(), "{:?}", world.live);
        }
        let clients: Vec<_> = (0..2).map(|_| world.request(vec![prompt(100)], 1)).collect();
        let pairs: Vec<_> = clients.iter().map(|client| legs(&world, *client).1).collect();
        let [(p, d), (other_p, other_d)] = pairs[..] else { panic!("{pairs:?}") };
        assert!(p != other_p && d != other_d, "all instances stay in rotation: {pairs:?}");
    }
}
