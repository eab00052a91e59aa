//! What instances say of themselves and of each other: who took whose place, what fits, and which
//! peers are out of reach; and when a request goes back to who failed it.

use crate::discovery::{DiscoveryBench, SentLeg, beat, done, native, sent};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{Incarnation, TransferKey};
use kvferry_engine::core::layout::{Geometry, KvGroup, LayerRows, LayoutDigest};
use kvferry_engine::core::message::{
    FAILED_LEG_ID_MAX, FAILED_LEGS_MAX, FailedLeg, FinishReason, Mode, Registration, Role,
    TROUBLES_MAX, UnreachablePrefill,
};
use kvferry_engine::core::router::{
    ClientAnswer, InstanceState, LegEvent, LegFailure, RejectReason, RouterConfig, RouterEffect,
    RouterInput,
};
use kvferry_engine::core::{Machine, Nanos};
use std::sync::Arc;

pub(crate) fn one(name: &str) -> Registration {
    let role = if name.starts_with('p') { Role::Prefill } else { Role::Decode };
    Registration { dp_rank: 0, dp_size: 1, ..native(name, role, Mode::Push) }
}

fn bench() -> DiscoveryBench {
    DiscoveryBench::new(RouterConfig::default())
}

fn up(bench: &mut DiscoveryBench, all: &[Registration]) {
    for registration in all {
        bench.give(RouterInput::Register(registration.clone()));
    }
}

/// The legs of a request that is sent at once: prefill and decode.
fn pair(effects: Vec<RouterEffect>) -> [SentLeg; 2] {
    sent(effects).try_into().expect("a prefill and a decode leg")
}

fn names(pair: &[SentLeg; 2]) -> (&str, &str) {
    (&pair[0].engine, &pair[1].engine)
}

/// A restarted server at the place of `old`.
fn restarted(old: &Registration, name: &str, incarnation: u64) -> Registration {
    Registration {
        engine: name.into(),
        incarnation: Incarnation(incarnation),
        control: format!("tcp://{name}:1").as_str().into(),
        ..old.clone()
    }
}

#[test]
fn a_newer_engine_at_the_same_http_address_takes_the_place_at_once() {
    let mut bench = bench();
    let old = one("p0");
    up(&mut bench, &[old.clone(), one("d0")]);
    let [prefill, _] = pair(bench.ask());
    let new = restarted(&old, "p9", 6);
    let effects = bench.give(RouterInput::Register(new.clone()));
    let cancelled = RouterEffect::CancelLeg { leg: prefill.leg };
    assert!(effects.contains(&cancelled), "{effects:?}");
    assert_eq!(names(&pair(effects)), ("p9", "d0"), "the request moves to the new one");
    assert_eq!(bench.engines(), ["d0", "p9"]);
    // What is left of the old server goes on registering.
    for sequence in 2..5 {
        bench.give(RouterInput::Register(Registration { sequence, ..old.clone() }));
        assert_eq!(bench.engines(), ["d0", "p9"]);
    }
    assert_eq!(bench.router.counters().rejected[&RejectReason::Superseded], 3);
    let listed: Vec<_> = bench.router.rejections().map(|it| it.reason).collect();
    assert_eq!(listed, [RejectReason::Superseded]);
    // A router that hears of the new one first does not take the old one either.
    let mut other = self::bench();
    up(&mut other, &[new, old]);
    assert_eq!(other.engines(), ["p9"]);
}

#[test]
fn ranks_and_roles_of_one_address_live_side_by_side() {
    let mut bench = bench();
    let first = Registration { dp_rank: 0, dp_size: 2, ..one("p0") };
    let second = Registration { dp_rank: 1, ..restarted(&first, "p1", 6) };
    let other = Registration { role: Role::Decode, ..restarted(&first, "d0", 7) };
    up(&mut bench, &[first, second, other]);
    assert_eq!(bench.engines(), ["p0", "p1", "d0"]);
}

#[test]
fn an_engine_that_tells_no_birth_is_older() {
    let mut bench = bench();
    let plain = beat(Role::Prefill, "10.0.0.1", 6301, 1, Mode::Push);
    bench.hear(plain.encode());
    assert_eq!(bench.engines(), ["P/10.0.0.1:8000/0"]);
    let born = Registration { http: "10.0.0.1:8000".into(), ..one("p0") };
    bench.give(RouterInput::Register(born));
    bench.hear(plain.encode());
    assert_eq!(bench.engines(), ["p0"]);
}

/// Of a model with two layers.
pub(crate) fn fit(model: &str, tokens: u32, element: u32) -> Option<Arc<LayoutDigest>> {
    let group = KvGroup::full(tokens, [0, 1]);
    let geometry = Geometry { tp: 4, ..Geometry::new(model, 8, vec![group]) };
    Some(Arc::new(LayoutDigest {
        geometry,
        rows: vec![LayerRows { layers: 2, element, elements: 256 }],
    }))
}

fn fitting(name: &str, fit: Option<Arc<LayoutDigest>>) -> Registration {
    Registration { fit, ..one(name) }
}

#[test]
fn only_what_fits_is_paired() {
    let (a, b) = (fit("a", 16, 2), fit("b", 16, 2));
    let mut bench = bench();
    up(
        &mut bench,
        &[
            fitting("p0", a),
            fitting("p1", b.clone()),
            fitting("d0", b),
            fitting("d1", fit("a", 32, 2)),
            fitting("d2", None),
        ],
    );
    for _ in 0..20 {
        let legs = pair(bench.ask());
        assert!(!matches!(names(&legs), ("p0", "d0") | ("p1", "d1")), "{legs:?}");
        legs.iter().for_each(|leg| drop(bench.leg(leg.leg, done())));
    }
    let misfits: Vec<_> = bench.router.misfits().map(|(p, d, _)| format!("{p} {d}")).collect();
    assert_eq!(misfits, ["p0 d0", "p1 d1"]);
}

#[test]
fn a_client_is_told_why_nothing_fits() {
    for (other, says) in [
        (fit("b", 16, 2), "model: source has \"a\", receiver has \"b\""),
        (fit("a", 24, 2), "block size of group 0"),
        (fit("a", 16, 4), "element size of layer 0: source has 2, receiver has 4"),
    ] {
        let wait_max = Nanos::from_secs(5);
        let mut bench = DiscoveryBench::new(RouterConfig { wait_max, ..RouterConfig::default() });
        up(&mut bench, &[fitting("p0", fit("a", 16, 2)), fitting("d0", other)]);
        assert!(sent(bench.ask()).is_empty());
        let answer = bench.tick().into_iter().find_map(|effect| match effect {
            RouterEffect::Answer { answer, .. } => Some(answer),
            _ => None,
        });
        assert_eq!(bench.now, wait_max);
        let Some(ClientAnswer::Misfit(why)) = answer else { panic!("{answer:?}") };
        assert!(why.0.contains(says), "{why}");
    }
}

fn trouble(incarnation: Option<u64>, number: u32) -> Vec<UnreachablePrefill> {
    let (engine, incarnation) = ("p0".into(), incarnation.map(Incarnation));
    vec![UnreachablePrefill { engine, incarnation, number, failure: Failure::PeerSilent }]
}

/// Two prefills, and two decodes of which the first says what is wrong with p0.
fn told(bench: &mut DiscoveryBench, sequence: u64, troubles: Vec<UnreachablePrefill>) {
    for name in ["p0", "p1", "d1"] {
        bench.give(RouterInput::Register(Registration { sequence, ..one(name) }));
    }
    bench.give(RouterInput::Register(Registration { sequence, troubles, ..one("d0") }));
}

/// How often the pair of p0 and d0 was chosen for 20 requests, which end without a word.
fn chosen(bench: &mut DiscoveryBench) -> usize {
    let mut count = 0;
    for _ in 0..20 {
        let legs = pair(bench.ask());
        count += usize::from(names(&legs) == ("p0", "d0"));
        legs.iter().for_each(|leg| drop(bench.leg(leg.leg, done())));
    }
    count
}

#[test]
fn a_pair_that_a_decode_names_is_passed_over_until_kv_comes() {
    let mut bench = bench();
    told(&mut bench, 1, Vec::new());
    assert!(chosen(&mut bench) > 0);
    told(&mut bench, 2, trouble(Some(5), 1));
    assert_eq!(chosen(&mut bench), 0);
    // Said again it is nothing new: after its time the pair is tried.
    bench.now = bench.now + Nanos::from_secs(5);
    told(&mut bench, 3, trouble(Some(5), 1));
    assert!(chosen(&mut bench) <= 20);
    told(&mut bench, 4, trouble(Some(5), 2));
    assert_eq!(chosen(&mut bench), 0, "one more");
    told(&mut bench, 5, Vec::new());
    assert!(chosen(&mut bench) > 0, "KV came");
    told(&mut bench, 6, trouble(Some(4), 1));
    assert!(chosen(&mut bench) > 0, "that was another incarnation");
}

/// The causes that a registration makes the router pass to its shell, and of which engine.
fn causes(bench: &mut DiscoveryBench, registration: Registration) -> Option<(String, usize)> {
    let effects = bench.give(RouterInput::Register(registration));
    effects.into_iter().find_map(|effect| match effect {
        RouterEffect::LegCauses { engine, failed } => Some((engine.to_string(), failed.len())),
        _ => None,
    })
}

#[test]
fn causes_of_failed_legs_are_passed_on_once_from_decodes_whose_registration_is_taken() {
    let failed = |id: String| FailedLeg {
        key: TransferKey { id: id.as_str().into(), prompt: 0 },
        sibling: 0,
        failure: Failure::HelloRefused("x".repeat(10_000).into()),
    };
    let mut bench = bench();
    let told = |name, sequence, count| {
        let failed = (0..count).map(|n| failed(format!("tx-{n}"))).collect();
        Registration { sequence, failed, ..one(name) }
    };
    assert_eq!(causes(&mut bench, told("d0", 2, 0)), None);
    assert_eq!(causes(&mut bench, told("d0", 3, 2)), Some(("d0".into(), 2)));
    assert_eq!(causes(&mut bench, told("d0", 3, 2)), None, "the same registration again");
    assert_eq!(causes(&mut bench, told("p0", 2, 2)), None, "a prefill");
    let badly_named = Registration { sequence: 4, ..told("", 4, 2) };
    assert_eq!(causes(&mut bench, badly_named), None);
    // A registration says no more than it may.
    let all = told("d0", 4, 3 * FAILED_LEGS_MAX);
    assert_eq!(causes(&mut bench, all), Some(("d0".into(), FAILED_LEGS_MAX)));
    let long = vec![failed("x".repeat(FAILED_LEG_ID_MAX + 1)), failed("tx".into())];
    let long = Registration { failed: long, ..told("d0", 5, 0) };
    let effects = bench.give(RouterInput::Register(long));
    let [RouterEffect::LegCauses { failed, .. }] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!(failed.len(), 1);
    assert!(failed[0].failure.to_string().len() < 1_000);
}

#[test]
fn a_full_list_does_not_say_that_what_it_leaves_out_is_over() {
    let mut bench = bench();
    told(&mut bench, 1, trouble(Some(5), 1));
    assert_eq!(chosen(&mut bench), 0);
    let other = |n: u32| UnreachablePrefill {
        engine: format!("q{n}").as_str().into(),
        ..trouble(None, n).remove(0)
    };
    told(&mut bench, 2, (2..2 + TROUBLES_MAX as u32).map(other).collect());
    assert_eq!(chosen(&mut bench), 0, "pushed out by others");
    told(&mut bench, 3, vec![other(2)]);
    assert!(chosen(&mut bench) > 0, "KV came");
}

#[test]
fn what_no_engine_can_say_of_itself_is_refused() {
    let mut bench = bench();
    let rows = |layers: u16, count: usize| {
        let mut fit = (*fit("a", 16, 2).unwrap()).clone();
        fit.rows = vec![LayerRows { layers, element: 2, elements: 256 }; count];
        Some(Arc::new(fit))
    };
    // Their layers together are more than a number of 32 bits.
    let many = rows(u16::MAX, 65_600);
    for fit in [many, rows(1, 1), rows(0, 2), rows(2, 2)] {
        up(&mut bench, &[fitting("p0", fit.clone()), fitting("d0", fit)]);
    }
    assert!(bench.engines().is_empty());
    assert_eq!(bench.router.counters().rejected[&RejectReason::Fit], 8);
    up(&mut bench, &[fitting("p0", rows(1, 2)), fitting("d0", rows(1, 2))]);
    assert_eq!(bench.engines(), ["p0", "d0"]);
    // One incarnation has one address.
    let moved =
        Registration { http: "elsewhere:1".into(), sequence: 9, ..fitting("p0", rows(1, 2)) };
    up(&mut bench, &[moved]);
    assert_eq!(bench.router.counters().rejected[&RejectReason::Changed], 1);
}

#[test]
fn a_heartbeat_comes_after_the_last_number_there_is() {
    let mut bench = bench();
    let plain = beat(Role::Prefill, "10.0.0.1", 6301, 1, Mode::Push);
    let last = Registration {
        incarnation: Incarnation(u64::MAX),
        sequence: u64::MAX,
        ..one("P/10.0.0.1:8000/0")
    };
    up(&mut bench, &[Registration { role: Role::Prefill, ..last }]);
    bench.hear(plain.encode());
    assert_eq!(bench.engines(), ["P/10.0.0.1:8000/0"]);
}

#[test]
fn a_decode_is_not_blamed_for_its_pair() {
    let mut bench = bench();
    // The only prefill for d0 is out of its reach.
    up(&mut bench, &[one("p0"), one("d0")]);
    let mut legs = pair(bench.ask());
    let fails = LegEvent::Failed(LegFailure::Answer(500));
    for round in 1..=8 {
        bench.leg(legs[1].leg, fails.clone());
        let troubles = trouble(Some(5), round);
        let told = Registration { sequence: u64::from(round) + 1, troubles, ..one("d0") };
        bench.give(RouterInput::Register(told));
        let again = Registration { sequence: u64::from(round) + 1, ..one("p0") };
        bench.give(RouterInput::Register(again));
        bench.now = bench.now + Nanos::from_secs(1);
        bench.give(RouterInput::Tick);
        legs = pair(bench.ask());
        assert_eq!(bench.states(), [InstanceState::Ready; 2], "round {round}");
    }
    assert_eq!(bench.router.counters().suspicions, 0);
}

/// The next legs, and when they are sent.
fn later(bench: &mut DiscoveryBench) -> (Nanos, Option<[SentLeg; 2]>) {
    let legs = sent(bench.tick());
    (bench.now, legs.try_into().ok())
}

#[test]
fn who_failed_a_request_gets_it_again_after_a_pause_only() {
    let mut bench = bench();
    up(&mut bench, &[one("p0"), one("d0")]);
    let legs = pair(bench.ask());
    let fails = || LegEvent::Failed(LegFailure::Answer(500));
    let effects = bench.leg(legs[1].leg, fails());
    assert_eq!(sent(effects).len(), 0, "not at once");
    let (at, legs) = later(&mut bench);
    let legs = legs.expect("the first retry");
    assert_eq!(at, Nanos::from_ms(500));
    assert_eq!(sent(bench.leg(legs[1].leg, fails())).len(), 0);
    let (at, legs) = later(&mut bench);
    let legs = legs.expect("the second one");
    assert_eq!(at, Nanos::from_ms(1500));
    let effects = bench.leg(legs[1].leg, fails());
    assert!(effects.iter().any(is_answer), "no more than `retries_max`: {effects:?}");
    assert_eq!(bench.router.gauges().queued, 0);
}

/// As `kvferry router` has them.
fn short() -> RouterConfig {
    let (wait_max, retry_wait_max) = (Nanos::from_secs(2), Nanos::from_ms(600));
    RouterConfig { wait_max, retry_wait_max, ..RouterConfig::default() }
}

fn is_answer(effect: &RouterEffect) -> bool {
    matches!(effect, RouterEffect::Answer { .. })
}

#[test]
fn requests_that_one_instance_failed_together_wait_until_it_is_back() {
    let mut bench = DiscoveryBench::new(short());
    let old = one("d0");
    up(&mut bench, &[one("p0"), old.clone()]);
    let fails = || LegEvent::Failed(LegFailure::Answer(500));
    let mut legs: Vec<_> = (0..4).map(|_| pair(bench.ask())).collect();
    // What the first of them did to the instance is not held against the others.
    for (ms, again) in [(0, 4), (500, 0)] {
        for [_, decode] in std::mem::take(&mut legs) {
            let effects = bench.leg(decode.leg, fails());
            assert!(!effects.iter().any(is_answer), "at {ms} ms: {effects:?}");
        }
        while bench.router.deadline().is_some_and(|at| at <= Nanos::from_ms(1_400)) {
            let effects = bench.tick();
            assert!(!effects.iter().any(is_answer), "at {}: {effects:?}", bench.now);
            let sent = sent(effects);
            legs.extend(sent.chunks_exact(2).map(|it| [it[0].clone(), it[1].clone()]));
        }
        assert_eq!(legs.len(), again, "after {ms} ms");
    }
    bench.now = Nanos::from_ms(1_400);
    let effects =
        bench.give(RouterInput::Register(Registration { incarnation: Incarnation(6), ..old }));
    assert_eq!(sent(effects).len(), 8);
    assert_eq!(bench.router.gauges().queued, 0);
}

#[test]
fn what_failed_hardly_waits_where_nobody_is_left() {
    let mut bench = DiscoveryBench::new(short());
    let prefill = one("p0");
    up(&mut bench, &[prefill.clone(), one("d0")]);
    let legs = pair(bench.ask());
    let last = Registration { sequence: 2, draining: true, ..prefill };
    bench.give(RouterInput::Register(last));
    bench.leg(legs[1].leg, LegEvent::Failed(LegFailure::Answer(500)));
    assert!(bench.tick().iter().any(is_answer));
    assert_eq!(bench.now, Nanos::from_ms(600));
}

#[test]
fn a_pause_ends_when_an_instance_comes_that_did_not_fail() {
    let mut bench = bench();
    let old = one("d0");
    up(&mut bench, &[one("p0"), old.clone()]);
    let legs = pair(bench.ask());
    bench.leg(legs[1].leg, LegEvent::Failed(LegFailure::Answer(500)));
    bench.now = bench.now + Nanos::from_ms(10);
    let newer = Registration { incarnation: Incarnation(6), ..old };
    let effects = bench.give(RouterInput::Register(newer));
    assert_eq!(names(&pair(effects)), ("p0", "d0"));
    assert_eq!(bench.router.gauges().queued, 0);
}

#[test]
fn others_get_it_at_once() {
    let mut bench = bench();
    up(&mut bench, &[one("p0"), one("p1"), one("d0"), one("d1")]);
    let legs = pair(bench.ask());
    let again = pair(bench.leg(legs[1].leg, LegEvent::Failed(LegFailure::Answer(500))));
    assert_ne!(again[1].engine, legs[1].engine);
    // A client that leaves in a pause leaves nothing.
    let third = bench.leg(again[1].leg, LegEvent::Failed(LegFailure::Answer(500)));
    assert!(sent(third).is_empty());
    let gone = RouterInput::Gone { client: kvferry_engine::core::ids::ClientId(0) };
    bench.give(gone);
    assert_eq!((bench.router.gauges().queued, bench.router.gauges().transfers), (0, 0));
}

/// `with` recompute, told by the answer.
#[test]
fn an_answer_that_tells_of_a_recomputed_prompt_has_the_pair_passed_over() {
    let mut bench = bench();
    told(&mut bench, 1, Vec::new());
    let recomputed = Some(Failure::PeerSilent);
    let event = LegEvent::Done { reason: FinishReason::Length, recomputed };
    for _ in 0..20 {
        let legs = pair(bench.ask());
        let is_cut = names(&legs) == ("p0", "d0");
        bench.leg(legs[0].leg, done());
        bench.leg(legs[1].leg, if is_cut { event.clone() } else { done() });
        if is_cut {
            break;
        }
    }
    assert_eq!(chosen(&mut bench), 0);
}
