//! Requests go to instances that serve their model.

use crate::closed::{fit, one};
use crate::discovery::{DiscoveryBench, done, native, sent};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::ids::{ClientId, EngineId};
use kvferry_engine::core::message::{
    MODEL_NAME_MAX, MODELS_MAX, Mode, Registration, Role, ServedModels,
};
use kvferry_engine::core::router::{
    ClientAnswer, ClientRequest, NAMED_MODELS_MAX, RejectReason, RoutedPrompt, RouterConfig,
    RouterEffect, RouterInput, StaticInstance, Unavailable,
};
use proptest::prelude::*;
use std::sync::Arc;

fn served(names: &[&str]) -> Option<Arc<ServedModels>> {
    let names = names.iter().map(|name| (*name).into()).collect();
    Some(Arc::new(ServedModels { names, adapters: Vec::new() }))
}

fn register(bench: &mut DiscoveryBench, name: &str, models: Option<Arc<ServedModels>>) {
    bench.give(RouterInput::Register(Registration { models, ..one(name) }));
}

fn ask(bench: &mut DiscoveryBench, model: Option<&str>) -> Vec<RouterEffect> {
    ask_engines(bench, model, None)
}

/// The same for engines that alone may serve it.
fn ask_engines(
    bench: &mut DiscoveryBench,
    model: Option<&str>,
    engines: Option<&[&str]>,
) -> Vec<RouterEffect> {
    let client = ClientId(bench.clients);
    bench.clients += 1;
    let prompts = vec![RoutedPrompt { tokens: 10, prefix: [].into() }];
    let model = model.map(Arc::from);
    bench.give(RouterInput::Request(ClientRequest {
        client,
        prompts,
        samples: 1,
        output: 4,
        model,
        engines: engines.map(|names| names.iter().map(|name| EngineId::from(*name)).collect()),
    }))
}

/// The models that a client is told who asked for another one.
fn told(effects: &[RouterEffect]) -> Vec<String> {
    let [RouterEffect::Answer { answer: ClientAnswer::NoModel(served), .. }] = effects else {
        panic!("{effects:?}")
    };
    served.iter().map(ToString::to_string).collect()
}

/// An instance that pairs with no other one here, since it has another transfer mode.
fn pulls(bench: &mut DiscoveryBench, name: &str, models: Option<Arc<ServedModels>>) {
    bench.give(RouterInput::Register(Registration { models, mode: Mode::Pull, ..one(name) }));
}

/// The role that has no instance for the model, by the answer, and the models of that role.
fn lacking(effects: &[RouterEffect]) -> (Role, Vec<&str>) {
    let [RouterEffect::Answer { answer: ClientAnswer::NoRole { missing, served }, .. }] = effects
    else {
        panic!("{effects:?}")
    };
    (*missing, served.iter().map(|name| &**name).collect())
}

#[test]
fn model_that_one_role_serves_is_refused_at_once_with_the_role_that_lacks_it() {
    let wait_max = Nanos::from_secs(1);
    let mut bench = DiscoveryBench::new(RouterConfig { wait_max, ..RouterConfig::default() });
    register(&mut bench, "d0", served(&["a", "lora"]));
    assert_eq!(ask(&mut bench, Some("lora")), [], "a prefill may come");
    register(&mut bench, "p0", served(&["a", "b"]));
    assert_eq!(lacking(&ask(&mut bench, Some("lora"))), (Role::Prefill, vec!["a", "b"]));
    assert_eq!(lacking(&ask(&mut bench, Some("b"))), (Role::Decode, vec!["a", "lora"]));
    assert_eq!(sent(ask(&mut bench, Some("a"))).len(), 2);
    // The waiting request gets the same answer.
    let late = bench.tick();
    assert_eq!(lacking(&late), (Role::Prefill, vec!["a", "b"]));
    // A decode may compute a short prompt alone.
    let config = RouterConfig { direct_below: 100, ..RouterConfig::default() };
    let mut bench = DiscoveryBench::new(config);
    register(&mut bench, "d0", served(&["a", "lora"]));
    register(&mut bench, "p0", served(&["a"]));
    assert_eq!(sent(ask(&mut bench, Some("lora"))).len(), 1);
}

#[test]
fn request_that_names_engines_is_served_by_them_alone_and_holds_up_no_other() {
    let mut bench = DiscoveryBench::new(RouterConfig::default());
    for name in ["p0", "p1", "d0", "d1"] {
        register(&mut bench, name, None);
    }
    let served = |legs: Vec<RouterEffect>| -> Vec<String> {
        sent(legs).iter().map(|leg| leg.engine.to_string()).collect()
    };
    for _ in 0..3 {
        assert_eq!(served(ask_engines(&mut bench, None, Some(&["p1", "d0"]))), ["p1", "d0"]);
    }
    assert_eq!(ask_engines(&mut bench, None, Some(&["p0", "d2"])), [], "d2 may come");
    assert_eq!(served(ask(&mut bench, None)), ["p0", "d1"]);
    let effects = bench.give(RouterInput::Register(one("d2")));
    assert_eq!(served(effects), ["p0", "d2"]);
}

#[test]
fn request_that_no_pair_takes_is_told_why() {
    use Unavailable::{NoCommonMode, NoRole, Nobody};
    for (fleet, why) in [
        (&[][..], Nobody),
        (&[("p0", Mode::Push)], NoRole(Role::Decode)),
        (&[("d0", Mode::Push)], NoRole(Role::Prefill)),
        (&[("p0", Mode::Push), ("d0", Mode::Pull)], NoCommonMode),
    ] {
        let wait_max = Nanos::from_secs(1);
        let mut bench = DiscoveryBench::new(RouterConfig { wait_max, ..RouterConfig::default() });
        for (name, mode) in fleet {
            bench.give(RouterInput::Register(Registration { mode: *mode, ..one(name) }));
        }
        assert_eq!(ask(&mut bench, None), []);
        let told = bench.tick();
        let [RouterEffect::Answer { answer, .. }] = &told[..] else { panic!("{told:?}") };
        assert_eq!(*answer, ClientAnswer::NoInstance(why));
    }
}

/// A fleet with a pair for model `a`, and a decode for `b` whose prefill has another mode.
fn half_of_b() -> DiscoveryBench {
    let mut bench = DiscoveryBench::new(RouterConfig::default());
    for (name, models) in [("p0", ["a"]), ("d0", ["a"]), ("d1", ["b"])] {
        register(&mut bench, name, served(&models));
    }
    pulls(&mut bench, "p9", served(&["b"]));
    bench
}

#[test]
fn who_asks_for_a_model_hears_why_its_instances_do_not_fit() {
    let config = RouterConfig { wait_max: Nanos::from_secs(5), ..RouterConfig::default() };
    let mut bench = DiscoveryBench::new(config);
    for (name, model, tokens) in
        [("p0", "a", 16), ("d0", "a", 16), ("p1", "b", 16), ("d1", "b", 24)]
    {
        let (models, fit) = (served(&[model]), fit(model, tokens, 2));
        bench.give(RouterInput::Register(Registration { models, fit, ..one(name) }));
    }
    assert!(sent(ask(&mut bench, Some("b"))).is_empty());
    let answers = bench.tick().into_iter().filter_map(|effect| match effect {
        RouterEffect::Answer { answer, .. } => Some(answer),
        _ => None,
    });
    let answers: Vec<_> = answers.collect();
    let [ClientAnswer::Misfit(why)] = &answers[..] else { panic!("{answers:?}") };
    assert!(why.0.contains("block size of group 0"), "{why}");
    assert_eq!(sent(ask(&mut bench, Some("a"))).len(), 2);
}

#[test]
fn who_waits_for_a_model_holds_up_nobody_else() {
    let mut bench = half_of_b();
    assert_eq!(ask(&mut bench, Some("b")), [], "it waits for a prefill");
    assert_eq!(ask(&mut bench, Some("b")), [], "behind the first one");
    for model in [Some("a"), None] {
        assert_eq!(sent(ask(&mut bench, model)).len(), 2, "{model:?}");
    }
    // A request that waited before does not keep its place from others either.
    let p1 = native("p1", Role::Prefill, Mode::Push);
    let b = Registration { dp_rank: 0, dp_size: 1, models: served(&["b"]), ..p1 };
    let client = |effect: &RouterEffect| match effect {
        RouterEffect::Dispatch { client, .. } => *client,
        other => panic!("{other:?}"),
    };
    let clients: Vec<_> = bench.give(RouterInput::Register(b)).iter().map(client).collect();
    assert_eq!(clients, [0, 0, 1, 1].map(ClientId), "in the order in which they came");
}

#[test]
fn names_that_nobody_lists_take_no_line_from_those_that_are_served() {
    let mut bench = half_of_b();
    // It may serve any, and has no partner for most.
    register(&mut bench, "p1", None);
    pulls(&mut bench, "d9", None);
    for nth in 0..1_000 {
        assert_eq!(ask(&mut bench, Some(&format!("unknown-{nth}"))), []);
    }
    for model in ["a", "b"] {
        assert_eq!(sent(ask(&mut bench, Some(model))).len(), 2, "{model}");
    }
    register(&mut bench, "p0", served(&["a"]));
    let any = native("d2", Role::Decode, Mode::Push);
    let all = bench.give(RouterInput::Register(Registration { dp_rank: 0, dp_size: 1, ..any }));
    assert_eq!(sent(all).len(), 2_000);
}

const MODELS: [&str; 3] = ["a", "b", "c"];

proptest! {
    /// Whatever instances serve or do not say, no leg goes to one that does not serve the model, and
    /// a request for what nobody serves is told so.
    #[test]
    fn no_leg_goes_to_who_does_not_serve_the_model(
        fleet in prop::collection::vec((any::<bool>(), prop::option::of(1u8..8)), 1..8),
        asked in prop::collection::vec(prop::option::of(0usize..4), 1..20),
        fails in prop::collection::vec(any::<bool>(), 1..40),
    ) {
        let config = RouterConfig { retry_pause: Nanos::ZERO, ..RouterConfig::default() };
        let mut bench = DiscoveryBench::new(config);
        let name = |at: usize, prefills: bool| format!("{}{at}", if prefills { 'p' } else { 'd' });
        let serves = |bits: Option<u8>, model: Option<usize>| match (bits, model) {
            (Some(bits), Some(model)) => bits >> model & 1 == 1,
            _ => true,
        };
        for (at, (prefills, bits)) in fleet.iter().enumerate() {
            let models = bits.map(|bits| {
                let own: Vec<_> =
                    (0..3).filter(|it| bits >> it & 1 == 1).map(|it| MODELS[it]).collect();
                served(&own).expect("some")
            });
            register(&mut bench, &name(at, *prefills), models);
        }
        let mut fails = fails.iter().cycle();
        for model in asked {
            let effects = ask(&mut bench, model.map(|it| *MODELS.get(it).unwrap_or(&"none")));
            if !fleet.iter().any(|(_, bits)| serves(*bits, model)) {
                prop_assert!(!told(&effects).is_empty());
                continue;
            }
            // One role has instances, but none for the model.
            let lacks = |prefills: bool| {
                let mut of = fleet.iter().filter(|(is, _)| *is == prefills).peekable();
                of.peek().is_some() && !of.any(|(_, bits)| serves(*bits, model))
            };
            if let Some(role) = [(true, Role::Prefill), (false, Role::Decode)]
                .into_iter()
                .find_map(|(prefills, role)| lacks(prefills).then_some(role))
            {
                prop_assert_eq!(lacking(&effects).0, role);
                continue;
            }
            let mut legs = sent(effects);
            while let Some(leg) = legs.pop() {
                let at: usize = leg.engine[1..].parse().expect("its number");
                prop_assert!(serves(fleet[at].1, model), "{model:?} at {}", leg.engine);
                let event = match fails.next() {
                    Some(true) => kvferry_engine::core::router::LegEvent::Failed(
                        kvferry_engine::core::router::LegFailure::Answer(500),
                    ),
                    _ => done(),
                };
                legs.extend(sent(bench.leg(leg.leg, event)));
            }
        }
    }
}

#[test]
fn models_that_are_served_are_named_a_bounded_number_of_them() {
    let mut bench = DiscoveryBench::new(RouterConfig::default());
    let many: Vec<String> = (0..MODELS_MAX).map(|n| format!("m{n:03}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    register(&mut bench, "p0", served(&many));
    register(&mut bench, "d0", served(&["m000", "b"]));
    let named = told(&ask(&mut bench, Some("other")));
    assert_eq!((named.len(), &*named[0], &*named[1]), (NAMED_MODELS_MAX, "b", "m000"));
    assert_eq!(bench.router.counters().unknown_models, 1);
    assert_eq!(sent(ask(&mut bench, Some("m000"))).len(), 2);
    assert_eq!(sent(ask(&mut bench, None)).len(), 2);
    // One of the two does not serve it; the other one may.
    pulls(&mut bench, "d9", None);
    assert!(ask(&mut bench, Some("m001")).is_empty());
    register(&mut bench, "d1", None);
    assert!(sent(bench.give(RouterInput::Tick)).is_empty(), "it was sent when the decode came");
}

#[test]
fn who_waits_is_told_when_nobody_serves_its_model_any_more() {
    let mut bench = DiscoveryBench::new(RouterConfig::default());
    register(&mut bench, "p0", None);
    assert!(ask(&mut bench, Some("a")).is_empty());
    let told_now = Registration {
        sequence: 2,
        models: served(&["b"]),
        dp_rank: 0,
        dp_size: 1,
        ..native("p0", Role::Prefill, Mode::Push)
    };
    bench.now = RouterConfig::default().wait_max - Nanos(1);
    bench.give(RouterInput::Register(told_now));
    bench.now = bench.now + Nanos(1);
    assert_eq!(told(&bench.give(RouterInput::Tick)), ["b"]);
}

#[test]
fn names_that_cannot_be_are_refused() {
    let mut bench = DiscoveryBench::new(RouterConfig::default());
    let long = "m".repeat(MODEL_NAME_MAX + 1);
    let many = vec!["m"; MODELS_MAX + 1];
    for bad in [&[][..], &[""], &["a\n"], &[&long], &many] {
        register(&mut bench, "p0", served(bad));
        assert_eq!(bench.router.rejections().last().expect("one").reason, RejectReason::Models);
    }
    assert!(bench.engines().is_empty());
}

#[test]
fn models_are_asked_for_where_the_registration_has_none() {
    let period = Nanos::from_secs(30);
    let config = RouterConfig {
        probe: Some(Nanos::from_ms(500)),
        models_period: Some(period),
        ..RouterConfig::default()
    };
    let mut bench = DiscoveryBench::new(config);
    let named = StaticInstance { role: Role::Prefill, http: "p:1".into() };
    let named = move || RouterInput::Static([named.clone()].into());
    let wants = |effects: Vec<RouterEffect>| match &effects[..] {
        [RouterEffect::Probe { probe, is_unproven, wants_models, .. }] => {
            assert!(wants_models);
            (*probe, *is_unproven)
        }
        effects => panic!("{effects:?}"),
    };
    let (probe, is_unproven) = wants(bench.give(named()));
    assert!(is_unproven);
    let models = |bench: &DiscoveryBench| {
        let view = bench.router.instances(bench.now).next().expect("one");
        view.models.map(|it| it.names.len())
    };
    bench.give(RouterInput::Probed { probe, answers: true, models: served(&["a", "b"]) });
    assert_eq!(models(&bench), Some(2));
    // What it does not list again, or lists by what is no name, it is believed to serve still.
    for (listed, known) in [(None, 2), (served(&["a\n"]), 2), (served(&["a"]), 1)] {
        let asked = bench.now;
        while bench.now < asked + period {
            bench.now = bench.now + Nanos::from_secs(5);
            let effects = bench.give(named());
            if bench.now < asked + period {
                assert!(effects.is_empty(), "{effects:?}");
                continue;
            }
            let (probe, is_unproven) = wants(effects);
            assert!(!is_unproven);
            bench.give(RouterInput::Probed { probe, answers: true, models: listed.clone() });
        }
        assert_eq!(models(&bench), Some(known));
    }
}

#[test]
fn request_for_a_model_that_the_missing_role_served_once_waits_for_it() {
    let wait_max = Nanos::from_secs(1);
    let mut bench = DiscoveryBench::new(RouterConfig { wait_max, ..RouterConfig::default() });
    register(&mut bench, "p0", served(&["a"]));
    register(&mut bench, "d0", served(&["a", "lora"]));
    assert_eq!(lacking(&ask(&mut bench, Some("lora"))), (Role::Prefill, vec!["a"]));
    register(&mut bench, "p1", served(&["lora"]));
    let before = one("p1");
    bench.give(RouterInput::Register(Registration {
        sequence: before.sequence + 1,
        draining: true,
        models: served(&["lora"]),
        ..before
    }));
    assert_eq!(ask(&mut bench, Some("lora")), [], "it may come again");
    let late = bench.tick();
    let why = Unavailable::NoRole(Role::Prefill);
    assert!(
        matches!(&late[..], [RouterEffect::Answer { answer: ClientAnswer::NoInstance(it), .. }] if *it == why),
        "{late:?}"
    );
}
