//! Hosts that end, or stand still, while their servers go on.

use crate::discovery::{DiscoveryBench, SentLeg, done, native, sent};
use kvferry_engine::core::dialect::native::{self as wire, Frame};
use kvferry_engine::core::ids::{Incarnation, LegId};
use kvferry_engine::core::message::{Mode, Registration, Role};
use kvferry_engine::core::router::{
    ClientAnswer, InstanceState, LeaveReason, LegEvent, LegFailure, ProbeId, RouterConfig,
    RouterEffect, RouterInput, Unavailable,
};
use kvferry_engine::core::{Machine, Nanos};
use kvferry_engine::fabric::{ControlEvent, LinkId};

const PROBE: Nanos = Nanos::from_ms(500);

fn config() -> RouterConfig {
    let (wait_max, host_wait) = (Nanos::from_secs(2), Nanos::from_secs(20));
    RouterConfig { probe: Some(PROBE), wait_max, host_wait, ..RouterConfig::default() }
}

/// The link of an instance: one each.
fn link(name: &str) -> LinkId {
    LinkId(LinkId::INBOUND | name.bytes().fold(0, |sum, byte| sum * 256 + u32::from(byte)))
}

fn register(
    bench: &mut DiscoveryBench,
    name: &str,
    incarnation: u64,
    sequence: u64,
) -> Vec<RouterEffect> {
    let role = if name.starts_with('p') { Role::Prefill } else { Role::Decode };
    let said = Registration {
        incarnation: Incarnation(incarnation),
        sequence,
        ..native(name, role, Mode::Push)
    };
    let parts = vec![wire::encode(&Frame::Register(said))];
    let effects = bench.give(RouterInput::Control(ControlEvent::Frame { link: link(name), parts }));
    answer_probes(bench, effects, true)
}

fn probes(effects: &[RouterEffect]) -> Vec<ProbeId> {
    let probe = |effect: &RouterEffect| match effect {
        RouterEffect::Probe { probe, .. } => Some(*probe),
        _ => None,
    };
    effects.iter().filter_map(probe).collect()
}

/// Answers all probes at once; returns what followed, beside what there was.
fn answer_probes(
    bench: &mut DiscoveryBench,
    effects: Vec<RouterEffect>,
    answers: bool,
) -> Vec<RouterEffect> {
    let mut all = effects;
    for probe in probes(&all) {
        all.extend(bench.give(RouterInput::Probed { probe, answers, models: None }));
    }
    all
}

/// Lets time pass to a moment, with servers that answer probes, or do not.
fn pass(bench: &mut DiscoveryBench, span: Nanos, answers: bool) -> Vec<RouterEffect> {
    let (until, mut all) = (bench.now + span, Vec::new());
    while bench.router.deadline().is_some_and(|due| due <= until) {
        let effects = bench.tick();
        all.extend(answer_probes(bench, effects, answers));
    }
    bench.now = until;
    all
}

/// The same with servers that have not said anything yet.
fn pass_silently(bench: &mut DiscoveryBench, span: Nanos) -> Vec<RouterEffect> {
    let (until, mut all) = (bench.now + span, Vec::new());
    while bench.router.deadline().is_some_and(|due| due <= until) {
        all.extend(bench.tick());
    }
    bench.now = until;
    all
}

fn link_ends(bench: &mut DiscoveryBench, name: &str, answers: bool) -> Vec<RouterEffect> {
    let effects = bench.give(RouterInput::Control(ControlEvent::LinkDown { link: link(name) }));
    answer_probes(bench, effects, answers)
}

fn bench_with(config: RouterConfig, names: &[&str]) -> DiscoveryBench {
    let mut bench = DiscoveryBench::new(config);
    for name in names {
        register(&mut bench, name, 1, 1);
    }
    bench
}

fn bench(names: &[&str]) -> DiscoveryBench {
    bench_with(config(), names)
}

/// The legs of one request: the prefill's and the decode's.
fn ask(bench: &mut DiscoveryBench) -> [SentLeg; 2] {
    sent(bench.ask()).try_into().expect("two legs")
}

fn cancelled(effects: &[RouterEffect]) -> Vec<LegId> {
    let leg = |effect: &RouterEffect| match effect {
        RouterEffect::CancelLeg { leg } => Some(*leg),
        _ => None,
    };
    effects.iter().filter_map(leg).collect()
}

fn answers(effects: Vec<RouterEffect>) -> Vec<ClientAnswer> {
    let answer = |effect| match effect {
        RouterEffect::Answer { answer, .. } => Some(answer),
        _ => None,
    };
    effects.into_iter().filter_map(answer).collect()
}

fn server_error() -> LegEvent {
    LegEvent::Failed(LegFailure::Answer(500))
}

#[test]
fn stream_outlives_the_incarnation_that_it_began_with() {
    let mut bench = bench(&["p0", "d0"]);
    let ([prefill, stream], [_, starting]) = (ask(&mut bench), ask(&mut bench));
    bench.leg(prefill.leg, done());
    bench.leg(stream.leg, LegEvent::FirstToken);
    let effects = register(&mut bench, "d0", 2, 1);
    assert!(cancelled(&effects).contains(&starting.leg), "its KV is not coming: {effects:?}");
    assert!(!cancelled(&effects).contains(&stream.leg), "{effects:?}");
    assert_eq!(bench.states().len(), 3, "its streams are left of it");
    // Long after any grace.
    pass(&mut bench, Nanos::from_secs(5), true);
    register(&mut bench, "p0", 1, 2);
    register(&mut bench, "d0", 2, 2);
    let ended = answers(bench.leg(stream.leg, done()));
    assert_eq!(ended, [ClientAnswer::Finished { recomputed: None }]);
    assert_eq!(bench.states(), [InstanceState::Ready; 2]);
}

#[test]
fn stream_of_a_replaced_incarnation_ends_with_its_connection() {
    let mut bench = bench(&["p0", "d0"]);
    let [_, stream] = ask(&mut bench);
    bench.leg(stream.leg, LegEvent::FirstToken);
    register(&mut bench, "d0", 2, 1);
    let cut = LegFailure::Connection;
    let ended = answers(bench.leg(stream.leg, LegEvent::Failed(cut.clone())));
    assert_eq!(ended, [ClientAnswer::Failed(cut)]);
    assert_eq!(bench.states(), [InstanceState::Ready; 2], "the next one is not blamed for it");
}

#[test]
fn instance_whose_link_ended_gets_no_legs_and_keeps_those_that_it_has() {
    let mut bench = bench(&["p0", "d0", "d1"]);
    let [_, decode] = ask(&mut bench);
    let effects = link_ends(&mut bench, &decode.engine, true);
    assert_eq!(cancelled(&effects), [], "its server may answer all the same");
    for _ in 0..4 {
        let [_, other] = ask(&mut bench);
        assert_ne!(other.engine, decode.engine);
    }
    assert_eq!(answers(bench.leg(decode.leg, done())).len(), 1);
}

#[test]
fn legs_of_an_instance_fail_over_if_its_link_ended_and_its_server_does_not_answer() {
    let mut bench = bench(&["p0", "d0", "d1"]);
    let [_, decode] = ask(&mut bench);
    let effects = link_ends(&mut bench, &decode.engine, false);
    assert!(cancelled(&effects).contains(&decode.leg), "{effects:?}");
    let again = sent(effects);
    assert!(again.len() == 2 && again[1].engine != decode.engine, "{again:?}");
}

#[test]
fn tries_without_a_host_do_not_count() {
    let config = RouterConfig { retries_max: 1, ..config() };
    let mut bench = bench_with(config, &["p0", "d0", "d1", "d2", "d3"]);
    let [_, mut decode] = ask(&mut bench);
    // One try is excused, and one is had.
    for _ in 0..2 {
        link_ends(&mut bench, &decode.engine, true);
        decode = sent(bench.leg(decode.leg, server_error())).pop().expect("it is sent again");
    }
    assert_eq!(bench.router.counters().excused, 1);
    link_ends(&mut bench, &decode.engine, true);
    let failed = ClientAnswer::Failed(LegFailure::Answer(500));
    assert_eq!(answers(bench.leg(decode.leg, server_error())), [failed], "it is bounded");
}

#[test]
fn connection_that_failed_is_a_try_though_its_host_is_lost() {
    let config = RouterConfig { retries_max: 1, ..config() };
    let mut bench = bench_with(config, &["p0", "d0", "d1", "d2"]);
    let [_, mut decode] = ask(&mut bench);
    let cut = LegEvent::Failed(LegFailure::Connection);
    link_ends(&mut bench, &decode.engine, true);
    decode = sent(bench.leg(decode.leg, cut.clone())).pop().expect("it is sent again");
    link_ends(&mut bench, &decode.engine, true);
    assert_eq!(answers(bench.leg(decode.leg, cut)).len(), 1, "it may end every server");
}

#[test]
fn requests_wait_for_the_next_host_of_the_only_decode() {
    let mut bench = bench(&["p0", "d0"]);
    link_ends(&mut bench, "d0", true);
    assert!(sent(bench.ask()).is_empty());
    for second in 2..8 {
        let effects = pass(&mut bench, Nanos::from_secs(1), true);
        assert_eq!(answers(effects), [], "second {second}");
        register(&mut bench, "p0", 1, second);
    }
    assert_eq!(sent(register(&mut bench, "d0", 2, 1)).len(), 2);
}

#[test]
fn requests_that_waited_for_a_host_wait_for_its_first_answer() {
    let mut bench = bench(&["p0", "d0"]);
    link_ends(&mut bench, "d0", true);
    bench.ask();
    let effects = pass(&mut bench, Nanos::from_secs(5), true);
    assert_eq!(answers(effects), []);
    let said =
        Registration { incarnation: Incarnation(2), ..native("d0", Role::Decode, Mode::Push) };
    let parts = vec![wire::encode(&Frame::Register(said))];
    let returned = ControlEvent::Frame { link: link("d0"), parts };
    let effects = bench.give(RouterInput::Control(returned));
    let [probe] = probes(&effects)[..] else { panic!("{effects:?}") };
    // For longer than a request waits for an instance.
    for second in 2..6 {
        register(&mut bench, "p0", 1, second);
        let effects = pass_silently(&mut bench, Nanos::from_secs(1));
        assert_eq!(answers(effects), [], "second {second}");
    }
    let effects = bench.give(RouterInput::Probed { probe, answers: true, models: None });
    assert_eq!(sent(effects).len(), 2);
}

#[test]
fn requests_that_waited_for_a_host_in_vain_are_told_so() {
    let mut bench = bench(&["p0", "d0"]);
    link_ends(&mut bench, "d0", true);
    bench.ask();
    let mut told = Vec::new();
    for second in 2..22 {
        told.extend(answers(pass(&mut bench, Nanos::from_secs(1), true)));
        register(&mut bench, "p0", 1, second);
    }
    let no_host = ClientAnswer::NoInstance(Unavailable::NoHost(Role::Decode));
    let nobody = ClientAnswer::NoInstance(Unavailable::NoRole(Role::Decode));
    assert!(told == [no_host] || told == [nobody], "{told:?}");
    assert_eq!(bench.now, Nanos::from_secs(20));
}

#[test]
fn late_instance_that_answers_keeps_its_legs_for_the_wait() {
    let mut bench = bench(&["p0", "d0", "d1"]);
    let [_, decode] = ask(&mut bench);
    for second in 2..15 {
        let effects = pass(&mut bench, Nanos::from_secs(1), true);
        assert_eq!(cancelled(&effects), []);
        for name in ["p0", "d0", "d1"].into_iter().filter(|name| *name != decode.engine) {
            register(&mut bench, name, 1, second);
        }
    }
    assert_eq!(bench.states().iter().filter(|it| **it == InstanceState::Late).count(), 1);
    let [_, other] = ask(&mut bench);
    assert_ne!(other.engine, decode.engine);
    // It registers again.
    register(&mut bench, &decode.engine, 1, 2);
    assert_eq!(bench.states(), [InstanceState::Ready; 3]);
    // It does not any more.
    let mut gone = Vec::new();
    for second in 20..55 {
        gone.extend(cancelled(&pass(&mut bench, Nanos::from_secs(1), true)));
        for name in ["p0", "d0", "d1"].into_iter().filter(|name| *name != decode.engine) {
            register(&mut bench, name, 1, second);
        }
    }
    assert!(gone.contains(&decode.leg), "it is not waited for for ever");
}

#[test]
fn late_instance_that_does_not_answer_is_lost_at_once_and_the_cause_is_named() {
    let mut bench = bench_with(RouterConfig { retries_max: 0, ..config() }, &["p0", "d0"]);
    ask(&mut bench);
    let told = answers(pass(&mut bench, RouterConfig::default().expiry, false));
    assert_eq!(told, [ClientAnswer::Failed(LegFailure::Left(LeaveReason::Silent))]);
    assert_eq!(bench.router.instances(bench.now).count(), 0);
}

#[test]
fn stream_goes_on_as_long_as_its_server_answers() {
    let mut bench = bench(&["p0", "d0"]);
    let [_, stream] = ask(&mut bench);
    bench.leg(stream.leg, LegEvent::FirstToken);
    let effects = pass(&mut bench, Nanos::from_secs(300), true);
    assert!(!cancelled(&effects).contains(&stream.leg));
    assert!(bench.states().contains(&InstanceState::Lost));
    let effects = pass(&mut bench, config().stream_grace + PROBE, false);
    assert!(cancelled(&effects).contains(&stream.leg));
    assert_eq!(bench.router.deadline(), None);
}

#[test]
fn router_that_stood_still_reads_registrations_before_it_gives_instances_up() {
    let without_probes = RouterConfig { probe: None, ..config() };
    for config in [config(), without_probes] {
        let mut bench = bench_with(config, &["p0", "d0"]);
        let [_, decode] = ask(&mut bench);
        let waits = RouterConfig::default().expiry.scale(6, 1);
        bench.now = bench.now + waits;
        // A client is read first.
        let effects = bench.ask();
        assert_eq!((cancelled(&effects), probes(&effects)), (vec![], vec![]));
        for name in ["p0", "d0"] {
            assert_eq!(cancelled(&register(&mut bench, name, 1, 2)), []);
        }
        assert_eq!(cancelled(&pass(&mut bench, Nanos::from_secs(5), true)), []);
        assert_eq!(bench.states(), [InstanceState::Ready; 2]);
        assert_eq!(answers(bench.leg(decode.leg, done())).len(), 1);
    }
}
