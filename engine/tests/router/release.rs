//! A router that lets its instances go to another one.

use crate::discovery::{DiscoveryBench, beat, done, native, sent};
use kvferry_engine::core::command::ControlCommand;
use kvferry_engine::core::dialect::native::{self as wire, Frame};
use kvferry_engine::core::message::{Mode, Registration, Role};
use kvferry_engine::core::router::{
    ClientAnswer, InstanceState, LegEvent, LegFailure, RouterConfig, RouterEffect, RouterInput,
};
use kvferry_engine::core::{Machine, Nanos};
use kvferry_engine::fabric::{ControlEvent, LinkId, LinkKind};

const PREFILLS: LinkId = LinkId(LinkId::INBOUND | 1);
const DECODES: LinkId = LinkId(LinkId::INBOUND | 2);
const LATE: LinkId = LinkId(LinkId::INBOUND | 3);

fn frame(link: LinkId, frame: Vec<u8>) -> RouterInput {
    RouterInput::Control(ControlEvent::Frame { link, parts: vec![frame] })
}

fn told(link: LinkId, registration: Registration) -> RouterInput {
    frame(link, wire::encode(&Frame::Register(registration)))
}

fn up(link: LinkId) -> RouterInput {
    let from = Some("10.0.0.9:1".into());
    RouterInput::Control(ControlEvent::LinkUp { link, channel: LinkKind::Discovery, from })
}

/// A router with two prefills on one link and a decode on another.
fn bench() -> DiscoveryBench {
    let release_max = Nanos::from_secs(60);
    let mut bench = DiscoveryBench::new(RouterConfig { release_max, ..RouterConfig::default() });
    for link in [PREFILLS, DECODES] {
        bench.give(up(link));
    }
    for name in ["p0", "p1"] {
        bench.give(told(PREFILLS, native(name, Role::Prefill, Mode::Push)));
    }
    bench.give(told(DECODES, native("d0", Role::Decode, Mode::Push)));
    assert_eq!(bench.states(), [InstanceState::Ready; 3]);
    bench
}

fn hung_up(effects: &[RouterEffect]) -> Vec<LinkId> {
    let link = |effect: &RouterEffect| match effect {
        RouterEffect::Control(ControlCommand::HangUp { link }) => Some(*link),
        _ => None,
    };
    effects.iter().filter_map(link).collect()
}

#[test]
fn instances_that_were_let_go_serve_on_without_registering() {
    let mut bench = bench();
    let before = sent(bench.ask());
    let effects = bench.give(RouterInput::Release);
    assert_eq!(hung_up(&effects), [PREFILLS, DECODES]);
    assert!(bench.router.is_draining() && effects.len() == 2, "{effects:?}");
    assert!(bench.give(RouterInput::Release).is_empty(), "once");
    // Beyond the expiry of what they said.
    bench.pass(Nanos::from_secs(30));
    assert!(bench.give(RouterInput::Tick).is_empty());
    for leg in before {
        bench.leg(leg.leg, done());
    }
    let legs = sent(bench.ask());
    assert_eq!(legs.len(), 2, "new requests are served");
    // One that has gone meanwhile is found out by its legs.
    let prefill = legs[0].clone();
    let again = sent(bench.leg(prefill.leg, LegEvent::Failed(LegFailure::Connection)));
    assert!(again.len() == 2 && again[0].engine != prefill.engine, "{again:?}");
    again.iter().for_each(|leg| drop(bench.leg(leg.leg, done())));
    bench.give(RouterInput::Drain);
    let refused = bench.ask();
    assert!(
        matches!(&refused[..], [RouterEffect::Answer { answer: ClientAnswer::NoInstance(_), .. }]),
        "{refused:?}"
    );
    bench.pass(Nanos::from_secs(31));
    assert!(bench.engines().is_empty(), "they are forgotten in the end");
    assert_eq!(bench.router.deadline(), None);
}

#[test]
fn who_comes_to_a_router_that_let_go_is_sent_away() {
    let mut bench = bench();
    bench.give(RouterInput::Release);
    let before = bench.router.gauges();
    assert_eq!(hung_up(&bench.give(up(LATE))), [LATE]);
    let more = native("p2", Role::Prefill, Mode::Push);
    assert_eq!(hung_up(&bench.give(told(LATE, more))), [LATE]);
    let plain = beat(Role::Decode, "10.0.0.2", 7301, 1, Mode::Push).encode();
    assert_eq!(hung_up(&bench.give(frame(LATE, plain))), [LATE]);
    assert_eq!(hung_up(&bench.give(frame(LATE, b"x".to_vec()))), [LATE]);
    assert_eq!(bench.engines(), ["p0", "p1", "d0"]);
    assert_eq!(bench.router.gauges(), before, "nothing is kept of them");
}

#[test]
fn one_that_is_leaving_is_not_held() {
    let mut bench = bench();
    let legs = sent(bench.ask());
    let leaves = native(&legs[0].engine, Role::Prefill, Mode::Push);
    bench.give(told(PREFILLS, Registration { draining: true, sequence: 2, ..leaves }));
    assert_eq!(bench.give(RouterInput::Release).len(), 2);
    legs.iter().for_each(|leg| drop(bench.leg(leg.leg, done())));
    assert_eq!(bench.engines().len(), 2, "it left with its last leg");
    let next = sent(bench.ask());
    assert_ne!(next[0].engine, legs[0].engine);
}

#[test]
fn a_link_that_went_down_before_is_not_hung_up() {
    let mut bench = bench();
    bench.give(RouterInput::Control(ControlEvent::LinkDown { link: DECODES }));
    assert_eq!(hung_up(&bench.give(RouterInput::Release)), [PREFILLS]);
}
