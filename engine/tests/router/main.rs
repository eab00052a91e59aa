//! Behaviour of the router under registrations, requests, failures, expiries and aborts in any
//! order.

mod busy;
mod closed;
mod direct;
mod discovery;
mod examples;
mod hosts;
mod load;
mod models;
mod overload;
mod pairs;
mod release;
mod signed;
mod static_instances;
mod switch;
mod world;

use kvferry_engine::core::Nanos;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::ClientId;
use kvferry_engine::core::message::{FinishReason, Mode, Role};
use kvferry_engine::core::router::{
    ClientAnswer, LegEvent, LegFailure, RoutedPrompt, RouterConfig, RouterInput, ServerLoad,
};
use proptest::prelude::*;
use std::collections::BTreeMap;
use world::{RouterWorld, prompt, registration};

const ENGINES: [&str; 7] = ["p0", "p1", "p2", "d0", "d1", "d2", "d3"];

#[derive(Clone, Debug)]
enum RouterStep {
    /// Engine, whether it restarted, whether it drains, how far its sequence jumps (or not).
    Register(usize, bool, bool, u64),
    /// Prompts with tokens and a family of prefixes, samples.
    Request(Vec<(u32, u64)>, u32),
    Leg(usize, LegEvent),
    Late(usize, LegEvent),
    Gone(u64),
    Pass(u64),
    /// Engine, and what its server says of its load: requests, and how full its KV cache is.
    Load(usize, [u32; 3], u16),
    Drain,
}

fn event() -> impl Strategy<Value = LegEvent> {
    let done = |recomputed| LegEvent::Done { reason: FinishReason::Length, recomputed };
    prop_oneof![
        4 => Just(LegEvent::FirstToken),
        6 => Just(done(None)),
        1 => Just(done(Some(Failure::PeerSilent))),
        1 => Just(LegEvent::Done { reason: FinishReason::Error, recomputed: None }),
        2 => Just(LegEvent::Failed(LegFailure::Connection)),
        1 => Just(LegEvent::Prefilled { params: "{}".into() }),
        1 => Just(LegEvent::Failed(LegFailure::Busy { retry_after: None })),
        1 => Just(LegEvent::Failed(LegFailure::Answer(500))),
        1 => Just(LegEvent::Failed(LegFailure::Instance(Failure::Unreachable))),
        1 => Just(LegEvent::Failed(LegFailure::Request("too long".into()))),
    ]
}

fn step() -> impl Strategy<Value = RouterStep> {
    let prompts = prop::collection::vec((0u32..3000, 0u64..4), 1..3);
    prop_oneof![
        8 => (0..ENGINES.len(), prop::bool::weighted(0.1), prop::bool::weighted(0.06), 0u64..3)
            .prop_map(|(e, restart, drain, jump)| RouterStep::Register(e, restart, drain, jump)),
        5 => (prompts, 1u32..4).prop_map(|(prompts, samples)| RouterStep::Request(prompts, samples)),
        12 => (any::<usize>(), event()).prop_map(|(n, event)| RouterStep::Leg(n, event)),
        1 => (any::<usize>(), event()).prop_map(|(n, event)| RouterStep::Late(n, event)),
        1 => any::<u64>().prop_map(RouterStep::Gone),
        4 => (0u64..300).prop_map(RouterStep::Pass),
        2 => (0..ENGINES.len() + 1, any::<[u32; 3]>(), any::<u16>(), 0u32..32).prop_map(|(e, load, kv, shift)| RouterStep::Load(e, load.map(|n| n >> shift), kv)),
        1 => prop::bool::weighted(0.02).prop_map(|d| if d { RouterStep::Drain } else { RouterStep::Pass(0) }),
    ]
}

fn config() -> impl Strategy<Value = RouterConfig> {
    let load = prop::option::of((1u64..400).prop_map(Nanos::from_ms));
    (0u32..4, 0u32..6, 1u32..12, 0u32..300, load).prop_map(
        |(retries, waiting, requests, affinity, load_period)| RouterConfig {
            expiry: Nanos::from_ms(1000),
            suspicion: Nanos::from_ms(100),
            breaker_max: Nanos::from_ms(400),
            stream_grace: Nanos::from_ms(500),
            drain_max: Nanos::from_ms(1500),
            retries_max: retries,
            waiting_max: waiting,
            wait_max: Nanos::from_ms(700),
            requests_max: requests,
            affinity_percent: affinity,
            prefixes_max: 8,
            load_period,
            ..RouterConfig::default()
        },
    )
}

/// Incarnation and sequence of each engine.
type Lives = BTreeMap<usize, (u64, u64)>;

fn play(world: &mut RouterWorld, lives: &mut Lives, step: RouterStep) {
    match step {
        RouterStep::Register(engine, restart, draining, jump) => {
            let (incarnation, sequence) = lives.entry(engine).or_insert((1, 0));
            if restart {
                (*incarnation, *sequence) = (*incarnation + 1, 0);
            }
            *sequence += jump;
            // One prefill and one decode pull in even incarnations, all others push.
            let pulls = ENGINES[engine].ends_with('1') && *incarnation % 2 == 0;
            let mode = if pulls { Mode::Pull } else { Mode::Push };
            let mut said = registration(ENGINES[engine], *incarnation, *sequence, mode);
            said.draining = draining;
            world.register(said);
        }
        RouterStep::Request(prompts, samples) => {
            let with_prefix = |(tokens, family): (u32, u64)| RoutedPrompt {
                tokens,
                prefix: (0..u64::from(tokens / 512)).map(|run| family * 100 + run).collect(),
            };
            world.request(prompts.into_iter().map(with_prefix).collect(), samples);
        }
        RouterStep::Leg(nth, event) => {
            let count = world.live.len();
            if count > 0 {
                let leg = *world.live.keys().nth(nth % count).unwrap();
                world.leg(leg, event);
            }
        }
        RouterStep::Late(nth, event) => {
            let count = world.ended.len();
            if count > 0 {
                world.late(world.ended[nth % count], event);
            }
        }
        RouterStep::Gone(nth) => {
            let count = world.answers.len() + world.gone.len() + world.open.len();
            if count > 0 {
                world.go(ClientId(nth % count as u64));
            }
        }
        RouterStep::Pass(ms) => world.advance(Nanos::from_ms(ms)),
        RouterStep::Load(engine, [running, waiting, queued], kv_cache) => {
            let name = ENGINES.get(engine).unwrap_or(&"nobody");
            let http = format!("{name}:8000").as_str().into();
            let load = ServerLoad { running, waiting, queued, kv_cache };
            world.give(RouterInput::Load { http, load });
        }
        RouterStep::Drain => world.drain(),
    }
}

fn run(config: RouterConfig, steps: Vec<RouterStep>) -> RouterWorld {
    let mut world = RouterWorld::new(config);
    let mut lives = Lives::new();
    for engine in [0, 1, 3, 4] {
        play(&mut world, &mut lives, RouterStep::Register(engine, false, false, 1));
    }
    for step in steps {
        play(&mut world, &mut lives, step);
    }
    world.finish();
    world
}

/// After all that, a request to new instances is served at once.
fn heals(mut world: RouterWorld) {
    for engine in ["p0", "d0"] {
        world.register(registration(engine, 1000, 1, Mode::Push));
    }
    let client = world.request(vec![prompt(10)], 1);
    assert_eq!(world.live.len(), 2);
    world.finish();
    assert_eq!(world.answers[&client], ClientAnswer::Finished { recomputed: None });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// The judgements are in `World`: exactly one answer or gone, no leg to an instance that does
    /// not take any, equal modes, unique transfer ids, siblings cancelled, bounded tries and
    /// tables, late events without effect, nothing left at the end.
    #[test]
    fn every_request_ends_once_and_leaves_nothing(
        config in config(),
        steps in prop::collection::vec(step(), 0..150),
    ) {
        let drains = steps.iter().any(|step| matches!(step, RouterStep::Drain));
        let world = run(config, steps);
        if !drains {
            heals(world);
        }
    }

    #[test]
    fn equal_inputs_have_equal_effects(
        config in config(),
        steps in prop::collection::vec(step(), 0..60),
    ) {
        let (one, two) = (run(config.clone(), steps.clone()), run(config, steps));
        prop_assert_eq!(one.pairs, two.pairs);
        prop_assert_eq!(one.answers, two.answers);
        prop_assert_eq!(one.ended, two.ended);
    }

    /// Greedy choice: two instances of a role never differ by more than the largest leg, samples of one
    /// prompt included.
    #[test]
    fn load_differs_by_at_most_one_leg(
        prefills in 1usize..6,
        decodes in 1usize..6,
        sizes in prop::collection::vec((1u32..5000, 1u32..5), 1..80),
    ) {
        let mut world = RouterWorld::new(RouterConfig::default());
        up(&mut world, prefills, decodes);
        for (tokens, samples) in sizes {
            world.request(vec![prompt(tokens)], samples);
        }
        for role in ['p', 'd'] {
            let loads: Vec<u64> = world
                .router
                .instances(world.now)
                .filter(|view| view.engine.0.starts_with(role))
                .map(|view| view.tokens)
                .collect();
            let spread = loads.iter().max().unwrap() - loads.iter().min().unwrap();
            prop_assert!(spread <= 5016, "{:?}", loads);
        }
        world.finish();
    }

    /// No leg goes to an instance beside which another one had less to do, so that none that is idle is
    /// passed by, whatever has ended meanwhile.
    #[test]
    fn instance_with_least_to_do_is_chosen(
        prefills in 1usize..5,
        decodes in 1usize..5,
        steps in prop::collection::vec(((1u32..5000, 1u32..4), prop::option::of(any::<usize>())), 1..60),
    ) {
        let mut world = RouterWorld::new(RouterConfig::default());
        up(&mut world, prefills, decodes);
        for ((tokens, samples), ends) in steps {
            let before = loads(&world);
            world.request(vec![prompt(tokens)], samples);
            let after = loads(&world);
            for (role, legs) in [('p', 1), ('d', u64::from(samples))] {
                let of_role = |(name, load): (&String, &u64)| {
                    name.starts_with(role).then_some((*load, *load - before[name]))
                };
                let of_role: Vec<_> = after.iter().filter_map(of_role).collect();
                let leg = of_role.iter().map(|(_, more)| more).sum::<u64>() / legs;
                let least = of_role.iter().map(|(load, _)| *load).min().unwrap();
                let got_one = of_role.iter().filter(|(_, more)| *more > 0);
                prop_assert!(got_one.clone().all(|(load, _)| load - leg <= least), "{before:?} {after:?}");
            }
            if let Some(nth) = ends {
                let leg = *world.live.keys().nth(nth % world.live.len()).unwrap();
                world.done(leg);
            }
        }
        world.finish();
    }

    /// Requests one after the other, all instances idle: no lock step of prefill and decode.
    #[test]
    fn all_pairs_are_used_evenly(prefills in 1usize..5, decodes in 1usize..5) {
        let mut world = RouterWorld::new(RouterConfig::default());
        up(&mut world, prefills, decodes);
        let rounds = 4;
        for _ in 0..rounds * prefills * decodes {
            world.request(vec![prompt(1000)], 1);
            while let Some(leg) = world.live.keys().next().copied() {
                world.done(leg);
            }
        }
        let mut used = BTreeMap::new();
        for pair in &world.pairs {
            *used.entry(pair).or_insert(0) += 1;
        }
        prop_assert_eq!(used.len(), prefills * decodes);
        prop_assert!(used.values().all(|times| *times == rounds), "{:?}", used);
    }

    /// The same with `window` decode legs in flight, which end in order.
    #[test]
    fn overlapping_requests_use_all_pairs(side in 2usize..5, window in 1usize..9) {
        let mut world = RouterWorld::new(RouterConfig::default());
        up(&mut world, side, side);
        for _ in 0..4 * side * side {
            let client = world.request(vec![prompt(1000)], 1);
            world.done(world.legs(client, Role::Prefill)[0]);
            if world.open.len() == window {
                let oldest = *world.open.first().unwrap();
                world.done(world.legs(oldest, Role::Decode)[0]);
            }
        }
        let mut used = world.pairs.clone();
        used.sort();
        used.dedup();
        prop_assert_eq!(used.len(), side * side);
    }
}

/// Tokens of what each instance has to do.
fn loads(world: &RouterWorld) -> BTreeMap<String, u64> {
    world.router.instances(world.now).map(|view| (view.engine.to_string(), view.tokens)).collect()
}

fn up(world: &mut RouterWorld, prefills: usize, decodes: usize) {
    for (role, count) in [("p", prefills), ("d", decodes)] {
        for index in 0..count {
            world.register(registration(&format!("{role}{index}"), 1, 1, Mode::Push));
        }
    }
}
