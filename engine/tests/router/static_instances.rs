//! Instances that the operator names, and that say nothing of themselves.

use crate::discovery::{DiscoveryBench, beat, done, native, sent};
use kvferry_engine::core::dialect::native::{self as dialect, Frame};
use kvferry_engine::core::message::{Mode, Registration, Role};
use kvferry_engine::core::router::{
    InstanceState, LegBody, LegEvent, LegFailure, ListedInstances, ProbeId, RejectReason,
    RouterConfig, RouterEffect, RouterInput, StaticInstance,
};
use kvferry_engine::core::{Machine, Nanos};

const P: (Role, &str) = (Role::Prefill, "p:8000");
const D: (Role, &str) = (Role::Decode, "d:8000");

fn name(bench: &mut DiscoveryBench, instances: &[(Role, &str)]) -> Vec<RouterEffect> {
    let named =
        instances.iter().map(|(role, http)| StaticInstance { role: *role, http: (*http).into() });
    bench.give(RouterInput::Static(named.collect()))
}

fn probes(effects: &[RouterEffect]) -> Vec<ProbeId> {
    let probe = |effect: &RouterEffect| match effect {
        RouterEffect::Probe { probe, .. } => Some(*probe),
        _ => None,
    };
    effects.iter().filter_map(probe).collect()
}

fn probed() -> DiscoveryBench {
    let probe = Some(Nanos::from_ms(500));
    DiscoveryBench::new(RouterConfig { probe, ..RouterConfig::default() })
}

#[test]
fn a_decode_gets_what_the_prefill_answered_word_for_word() {
    let mut bench = probed();
    let asked = probes(&name(&mut bench, &[P, D]));
    assert_eq!(asked.len(), 2);
    assert!(probes(&name(&mut bench, &[P, D])).is_empty(), "one probe at a time");
    assert!(bench.ask().is_empty());
    bench.give(RouterInput::Probed { probe: asked[0], answers: true, models: None });
    let legs =
        sent(bench.give(RouterInput::Probed { probe: asked[1], answers: true, models: None }));
    let [prefill] = &legs[..] else { panic!("{legs:?}") };
    assert!(prefill.pair.is_static() && !prefill.pair.is_native(), "{prefill:?}");
    assert_eq!(prefill.engine, "static/P/p:8000");
    let params = LegEvent::Prefilled { params: "{\"a\":1}".into() };
    let legs = sent(bench.leg(prefill.leg, params));
    let LegBody::Decode { params, .. } = &legs[0].body else { panic!("{legs:?}") };
    assert_eq!((params.as_deref(), &*legs[0].engine), (Some("{\"a\":1}"), "static/D/d:8000"));
    bench.leg(legs[0].leg, done());
    // A prefill that says nothing: the decode computes the prompt.
    let legs = sent(bench.ask());
    let legs = sent(bench.leg(legs[0].leg, done()));
    assert!(matches!(&legs[0].body, LegBody::Decode { params: None, .. }), "{legs:?}");
    assert_eq!(bench.router.counters().unread, 1);
}

#[test]
fn pairs_are_of_one_dialect() {
    for speaks_moriio in [true, false] {
        let mut bench = DiscoveryBench::new(RouterConfig::default());
        name(&mut bench, &[P]);
        let moriio = beat(Role::Decode, "10.0.0.2", 7301, 1, Mode::Pull).encode();
        match speaks_moriio {
            true => drop(bench.hear(moriio)),
            false => {
                let decode = native("d0", Role::Decode, Mode::Pull);
                bench.give(RouterInput::Register(Registration {
                    dp_rank: 0,
                    dp_size: 1,
                    ..decode
                }));
            }
        }
        assert!(bench.ask().is_empty(), "no pair");
        assert_eq!(sent(name(&mut bench, &[P, D]))[0].engine, "static/P/p:8000");
        // The other decode has the least load, and is not taken.
        let legs = sent(bench.ask());
        assert_eq!(legs.len(), 1, "{legs:?}");
    }
}

#[test]
fn who_is_named_no_more_drains_and_comes_back_when_named_again() {
    let mut bench = DiscoveryBench::new(RouterConfig::default());
    let other = (Role::Decode, "e:8000");
    name(&mut bench, &[P, D]);
    let prefill = sent(bench.ask())[0].leg;
    let decode = sent(bench.leg(prefill, done()))[0].clone();
    name(&mut bench, &[P, other]);
    assert_eq!(bench.engines().len(), 3, "{:?}", bench.engines());
    assert_eq!(bench.states()[1], InstanceState::Draining);
    // Repeating says nothing new, and the leg ends in its own time.
    bench.now = bench.now + Nanos::from_secs(5);
    name(&mut bench, &[P, other]);
    bench.leg(decode.leg, done());
    assert_eq!(bench.engines(), ["static/P/p:8000", "static/D/e:8000"]);
    assert_eq!(bench.router.counters().retries, 0);
    name(&mut bench, &[P, D]);
    assert_eq!(bench.engines(), ["static/P/p:8000", "static/D/d:8000"]);
    // Another role is another instance.
    name(&mut bench, &[(Role::Decode, "p:8000"), (Role::Prefill, "d:8000")]);
    assert_eq!(bench.engines(), ["static/D/p:8000", "static/P/d:8000"]);
    // Nobody says anything any more.
    while bench.router.deadline().is_some() {
        bench.tick();
    }
    assert!(bench.engines().is_empty());
}

#[test]
fn who_failed_has_to_answer_again() {
    let mut bench = probed();
    for probe in probes(&name(&mut bench, &[P, D])) {
        bench.give(RouterInput::Probed { probe, answers: true, models: None });
    }
    let leg = sent(bench.ask())[0].leg;
    bench.leg(leg, LegEvent::Failed(LegFailure::Connection));
    assert_eq!(bench.states(), [InstanceState::Unproven, InstanceState::Ready]);
    // That it is still named does not count.
    name(&mut bench, &[P, D]);
    assert!(sent(bench.ask()).is_empty());
    let again = probes(&bench.tick());
    bench.give(RouterInput::Probed { probe: again[0], answers: false, models: None });
    let again = loop {
        let again = probes(&bench.tick());
        if !again.is_empty() {
            break again;
        }
        name(&mut bench, &[P, D]);
    };
    assert_eq!(bench.states()[0], InstanceState::Unproven);
    let legs =
        sent(bench.give(RouterInput::Probed { probe: again[0], answers: true, models: None }));
    assert!(legs.iter().all(|leg| leg.engine == "static/P/p:8000") && !legs.is_empty());
}

#[test]
fn what_an_instance_says_of_itself_counts_more() {
    let mut bench = DiscoveryBench::new(RouterConfig::default());
    let http = (Role::Prefill, "10.0.0.1:8000");
    let own = beat(Role::Prefill, "10.0.0.1", 6301, 1, Mode::Push).encode();
    name(&mut bench, &[http]);
    bench.hear(own);
    assert_eq!(bench.engines(), ["P/10.0.0.1:8000/0"]);
    name(&mut bench, &[http]);
    assert_eq!(bench.engines(), ["P/10.0.0.1:8000/0"]);
    assert_eq!(bench.router.rejections().count(), 0);
    // It is silent: the operator still names it.
    bench.now = bench.now + RouterConfig::default().expiry;
    name(&mut bench, &[http]);
    assert!(bench.engines().contains(&"static/P/10.0.0.1:8000".to_owned()));
}

#[test]
fn names_of_static_instances_are_nobody_elses() {
    let mut bench = DiscoveryBench::new(RouterConfig::default());
    let liar = native("static/P/p:8000", Role::Prefill, Mode::Pull);
    bench.hear(dialect::encode(&Frame::Register(Registration { dp_rank: 0, ..liar })));
    let reasons: Vec<_> = bench.router.rejections().map(|it| it.reason).collect();
    assert_eq!(reasons, [RejectReason::Name]);
    name(&mut bench, &[P, (Role::Decode, "no port:x")]);
    assert_eq!(bench.engines(), ["static/P/p:8000"]);
    assert_eq!(bench.router.rejections().last().expect("listed").reason, RejectReason::Endpoint);
}

#[test]
fn who_is_named_need_not_be_listed_or_signed() {
    let listed = Some(ListedInstances::loopback());
    let config = RouterConfig { listed, require_signed: true, ..RouterConfig::default() };
    let mut bench = DiscoveryBench::new(config);
    name(&mut bench, &[P, D]);
    assert_eq!(sent(bench.ask()).len(), 1);
    // A router that ends keeps what it has.
    bench.give(RouterInput::Release);
    name(&mut bench, &[]);
    assert_eq!(bench.engines().len(), 2);
}
