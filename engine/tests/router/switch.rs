//! Instances that register anew in another role: the former one is drained before the new one is
//! served.

use crate::discovery::{DiscoveryBench, SentLeg, done, native, sent};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::ids::{Incarnation, LegId};
use kvferry_engine::core::message::{Mode, Registration, Role};
use kvferry_engine::core::router::{
    ClientAnswer, InstanceState, LegBody, LegEvent, RouterConfig, RouterEffect, RouterInput,
};
use proptest::prelude::*;
use std::collections::BTreeMap;

const DRAIN: Nanos = Nanos::from_secs(60);

fn one(name: &str, role: Role, incarnation: u64) -> Registration {
    let incarnation = Incarnation(incarnation);
    Registration { dp_rank: 0, dp_size: 1, incarnation, ..native(name, role, Mode::Push) }
}

/// Engines a and c prefill, b and d decode.
fn bench() -> DiscoveryBench {
    let expiry = Nanos::from_secs(100_000);
    let config = RouterConfig { expiry, drain_max: DRAIN, ..RouterConfig::default() };
    let mut bench = DiscoveryBench::new(config);
    for (name, role) in
        [("a", Role::Prefill), ("b", Role::Decode), ("c", Role::Prefill), ("d", Role::Decode)]
    {
        bench.give(RouterInput::Register(one(name, role, 1)));
    }
    bench
}

fn legs(bench: &mut DiscoveryBench) -> [SentLeg; 2] {
    sent(bench.ask()).try_into().expect("a prefill and a decode leg")
}

/// The engines of a request that is served at once.
fn served(bench: &mut DiscoveryBench) -> [String; 2] {
    let legs = legs(bench);
    for leg in &legs {
        bench.leg(leg.leg, done());
    }
    legs.map(|leg| leg.engine)
}

fn states(bench: &DiscoveryBench, name: &str) -> Vec<InstanceState> {
    let all = bench.router.instances(bench.now);
    all.filter(|it| &*it.engine.0 == name).map(|it| it.state).collect()
}

/// A bench whose decode b streams to a client, and registers as a prefill.
fn switching() -> (DiscoveryBench, LegId) {
    let mut bench = bench();
    let [prefill, stream] = legs(&mut bench);
    assert_eq!((&*prefill.engine, &*stream.engine), ("a", "b"));
    bench.leg(prefill.leg, done());
    bench.leg(stream.leg, LegEvent::FirstToken);
    let effects = bench.give(RouterInput::Register(one("b", Role::Prefill, 2)));
    assert!(effects.is_empty(), "nothing is cancelled: {effects:?}");
    (bench, stream.leg)
}

#[test]
fn the_former_role_is_drained_before_the_new_one_is_served() {
    let (mut bench, stream) = switching();
    assert_eq!(states(&bench, "b"), [InstanceState::Draining, InstanceState::Switching]);
    for _ in 0..6 {
        let [prefill, decode] = served(&mut bench);
        assert!(prefill != "b" && decode == "d", "{prefill} {decode}");
    }
    bench.leg(stream, done());
    assert_eq!(states(&bench, "b"), [InstanceState::Ready]);
    let prefills: Vec<_> = (0..6).map(|_| served(&mut bench)[0].clone()).collect();
    assert!(prefills.iter().any(|it| it == "b"), "{prefills:?}");
    assert_eq!(bench.router.counters().switched, 1);
}

#[test]
fn who_does_not_finish_its_legs_is_waited_for_no_longer_than_who_drains() {
    let (mut bench, stream) = switching();
    bench.now = bench.now + DRAIN - Nanos(1);
    assert!(bench.give(RouterInput::Tick).is_empty());
    bench.now = bench.now + Nanos(1);
    let effects = bench.give(RouterInput::Tick);
    assert!(effects.contains(&RouterEffect::CancelLeg { leg: stream }), "{effects:?}");
    let is_failed = |effect: &RouterEffect| {
        matches!(effect, RouterEffect::Answer { answer: ClientAnswer::Failed(_), .. })
    };
    assert!(effects.iter().any(is_failed), "its client has seen tokens: {effects:?}");
    assert_eq!(states(&bench, "b"), [InstanceState::Ready]);
}

#[test]
fn who_has_no_legs_is_served_in_its_new_role_at_once() {
    let mut bench = bench();
    bench.give(RouterInput::Register(one("b", Role::Prefill, 2)));
    assert_eq!(states(&bench, "b"), [InstanceState::Ready]);
    assert_eq!(bench.router.counters().switched, 0);
}

#[test]
fn a_server_of_two_roles_does_not_switch() {
    let (mut bench, at) = (bench(), "b:8000");
    let [prefill, stream] = legs(&mut bench);
    // Another host of the same server: neither drains.
    let both = Registration { http: at.into(), ..one("b2", Role::Prefill, 2) };
    bench.give(RouterInput::Register(both));
    assert_eq!(states(&bench, "b2"), [InstanceState::Ready]);
    assert_eq!(states(&bench, "b"), [InstanceState::Ready]);
    bench.leg(prefill.leg, done());
    bench.leg(stream.leg, done());
}

#[test]
fn who_drains_and_comes_with_another_name_is_drained_first() {
    let mut bench = bench();
    let [prefill, stream] = legs(&mut bench);
    bench.leg(prefill.leg, done());
    let drains = Registration { draining: true, sequence: 2, ..one("b", Role::Decode, 1) };
    bench.give(RouterInput::Register(drains));
    let new = Registration { http: "b:8000".into(), ..one("b2", Role::Prefill, 2) };
    bench.give(RouterInput::Register(new));
    assert_eq!(states(&bench, "b2"), [InstanceState::Switching]);
    bench.leg(stream.leg, done());
    assert_eq!(states(&bench, "b2"), [InstanceState::Ready]);
    assert!(states(&bench, "b").is_empty());
}

#[test]
fn who_restarts_or_goes_back_meanwhile_has_one_place() {
    let (mut bench, stream) = switching();
    bench.give(RouterInput::Register(one("b", Role::Prefill, 3)));
    assert_eq!(states(&bench, "b"), [InstanceState::Draining, InstanceState::Switching]);
    // In its first role it is a decode that began anew, or its host did: streams end by themselves.
    bench.give(RouterInput::Register(one("b", Role::Decode, 4)));
    assert_eq!(states(&bench, "b"), [InstanceState::Lost, InstanceState::Ready]);
    bench.leg(stream, done());
    assert_eq!(states(&bench, "b"), [InstanceState::Ready]);
}

#[derive(Clone, Debug)]
enum SwitchStep {
    /// One of the engines begins anew, in a role.
    Begin(usize, bool),
    Ask,
    End(usize, bool),
    Pass(u64),
}

fn step() -> impl Strategy<Value = SwitchStep> {
    prop_oneof![
        2 => (0usize..4, any::<bool>()).prop_map(|(e, prefills)| SwitchStep::Begin(e, prefills)),
        4 => Just(SwitchStep::Ask),
        5 => (any::<usize>(), any::<bool>()).prop_map(|(n, well)| SwitchStep::End(n, well)),
        1 => (0u64..40).prop_map(SwitchStep::Pass),
    ]
}

/// Legs in flight, where and in which role.
#[derive(Default)]
struct LiveLegs(BTreeMap<LegId, (String, Role)>);

impl LiveLegs {
    fn judge(&mut self, effects: Vec<RouterEffect>) {
        for effect in effects {
            match effect {
                RouterEffect::Dispatch { leg, engine, body, .. } => {
                    let role = match body {
                        LegBody::Prefill { .. } => Role::Prefill,
                        LegBody::Decode { .. } => Role::Decode,
                    };
                    let engine = engine.to_string();
                    let other = self.0.values().find(|(at, as_)| *at == engine && *as_ != role);
                    assert_eq!(other, None, "{engine} gets a {role} leg");
                    self.0.insert(leg, (engine, role));
                }
                RouterEffect::CancelLeg { leg } => assert!(self.0.remove(&leg).is_some()),
                _ => {}
            }
        }
    }
}

proptest! {
    /// Whatever becomes of the legs, and however often engines switch.
    #[test]
    fn no_server_has_legs_of_two_roles(steps in prop::collection::vec(step(), 0..120)) {
        #[cfg(feature = "planted")]
        kvferry_engine::planted::plant_from_environment();
        let (mut bench, mut live) = (bench(), LiveLegs::default());
        let mut incarnations = [1; 4];
        for step in steps {
            let effects = match step {
                SwitchStep::Begin(engine, prefills) => {
                    incarnations[engine] += 1;
                    let role = if prefills { Role::Prefill } else { Role::Decode };
                    let name = ["a", "b", "c", "d"][engine];
                    bench.give(RouterInput::Register(one(name, role, incarnations[engine])))
                }
                SwitchStep::Ask => bench.ask(),
                SwitchStep::End(nth, well) => {
                    let count = live.0.len().max(1);
                    let Some(leg) = live.0.keys().nth(nth % count).copied() else { continue };
                    live.0.remove(&leg);
                    let failed = LegEvent::Failed(kvferry_engine::core::router::LegFailure::Answer(500));
                    bench.leg(leg, if well { done() } else { failed })
                }
                SwitchStep::Pass(s) => {
                    bench.now = bench.now + Nanos::from_secs(s);
                    bench.give(RouterInput::Tick)
                }
            };
            live.judge(effects);
        }
        // All of it ends by itself, and every engine has one role then.
        let effects = bench.pass(DRAIN.scale(2, 1));
        live.judge(effects);
        let switching = bench.router.instances(bench.now).filter(|it| {
            matches!(it.state, InstanceState::Switching | InstanceState::Draining)
        });
        prop_assert_eq!(switching.count(), 0);
    }
}
