//! Instances that answer busy: they stay in rotation at the rate that they take.

use crate::discovery::{DiscoveryBench, SentLeg, done, native, sent};
use kvferry_engine::core::ids::{ClientId, LegId};
use kvferry_engine::core::message::{Mode, Registration, Role};
use kvferry_engine::core::router::{
    ClientAnswer, ClientRequest, InstanceState, LegBody, LegEvent, LegFailure, RetryShare,
    RoutedPrompt, RouterConfig, RouterEffect, RouterInput, StaticInstance,
};
use kvferry_engine::core::{Machine as _, Nanos};
use std::collections::VecDeque;

/// Legs that the busy instance takes at a time.
const CAP: usize = 4;

fn busy(retry_after: Option<Nanos>) -> LegEvent {
    LegEvent::Failed(LegFailure::Busy { retry_after })
}

/// Default settings, except that nothing expires.
fn config() -> RouterConfig {
    RouterConfig {
        probe: Some(Nanos::from_ms(500)),
        wait_max: Nanos::from_secs(2),
        expiry: Nanos::from_secs(1_000),
        retry_share: Some(RetryShare { percent: 50, per_second: 10 }),
        ..RouterConfig::default()
    }
}

/// A prefill and a decode, named or registered, one of which takes [`CAP`] legs at a time.
struct BusyPair {
    bench: DiscoveryBench,
    full: Role,
    /// Legs that the instances have, oldest first.
    legs: VecDeque<SentLeg>,
    refused: usize,
    finished: usize,
    failed: usize,
}

impl BusyPair {
    fn new(full: Role, is_named: bool) -> BusyPair {
        let mut bench = DiscoveryBench::new(config());
        let roles = [("p", Role::Prefill), ("d", Role::Decode)];
        if is_named {
            let named = |(name, role): (&str, Role)| StaticInstance {
                role,
                http: format!("{name}:8000").as_str().into(),
            };
            bench.give(RouterInput::Static(roles.map(named).into()));
            for effect in 0..2 {
                let probe = kvferry_engine::core::router::ProbeId(effect);
                bench.give(RouterInput::Probed { probe, answers: true, models: None });
            }
        } else {
            for (name, role) in roles {
                bench.give(RouterInput::Register(native(name, role, Mode::Push)));
            }
        }
        let (legs, refused, finished, failed) = (VecDeque::new(), 0, 0, 0);
        BusyPair { bench, full, legs, refused, finished, failed }
    }

    fn take(&mut self, effects: Vec<RouterEffect>) {
        for effect in &effects {
            match effect {
                RouterEffect::Answer { answer: ClientAnswer::Finished { .. }, .. } => {
                    self.finished += 1;
                }
                RouterEffect::Answer { .. } => self.failed += 1,
                RouterEffect::CancelLeg { leg } => self.legs.retain(|it| it.leg != *leg),
                _ => {}
            }
        }
        self.legs.extend(sent(effects));
    }

    fn ask(&mut self) {
        let effects = self.bench.ask();
        self.take(effects);
    }

    fn tell(&mut self, leg: LegId, event: LegEvent) {
        let effects = self.bench.leg(leg, event);
        self.take(effects);
    }

    /// The busy instance refuses its legs beyond [`CAP`].
    fn refuse(&mut self) {
        let full = self.full;
        let is_there = |it: &&SentLeg| it.body.role() == full;
        while let Some(over) = self.legs.iter().filter(is_there).nth(CAP).map(|it| it.leg) {
            self.refused += 1;
            self.legs.retain(|it| it.leg != over);
            self.tell(over, busy(Some(Nanos::from_secs(7))));
        }
    }

    /// The oldest leg of a role ends well.
    fn end(&mut self, role: Role) {
        let Some(at) = self.legs.iter().position(|it| it.body.role() == role) else { return };
        let ended = self.legs.remove(at).expect("just seen");
        let is_named = matches!(ended.body, LegBody::Prefill { .. }) && ended.pair.is_static();
        let event = if is_named { LegEvent::Prefilled { params: "{}".into() } } else { done() };
        self.tell(ended.leg, event);
    }
}

/// Number of ended requests and of refused legs while some clients send again and again. In each
/// round all legs of the two instances end, and time passes.
fn served_in_rounds(full: Role, is_named: bool, clients: usize) -> (usize, usize) {
    let mut pair = BusyPair::new(full, is_named);
    let mut asked = 0;
    for _ in 0..200 {
        while asked - pair.finished < clients {
            pair.ask();
            asked += 1;
        }
        pair.refuse();
        let at_once = pair.legs.iter().filter(|it| it.body.role() == Role::Prefill).count();
        (0..at_once).for_each(|_| pair.end(Role::Prefill));
        pair.refuse();
        let at_once = pair.legs.iter().filter(|it| it.body.role() == Role::Decode).count();
        (0..at_once).for_each(|_| pair.end(Role::Decode));
        pair.bench.now = pair.bench.now + Nanos::from_ms(50);
    }
    assert_eq!(pair.failed, 0, "{clients} clients");
    let states = pair.bench.states();
    assert!(states.iter().all(|it| *it == InstanceState::Ready), "{states:?}");
    assert_eq!(
        (pair.bench.router.counters().suspicions, pair.bench.router.counters().retries),
        (0, 0)
    );
    assert_eq!(pair.bench.router.counters().busy, pair.refused as u64);
    (pair.finished, pair.refused)
}

#[test]
fn busy_instance_stays_in_rotation_at_the_rate_that_it_takes() {
    for full in [Role::Prefill, Role::Decode] {
        for is_named in [false, true] {
            let (expected, none) = served_in_rounds(full, is_named, CAP);
            assert_eq!((expected, none), (200 * CAP, 0));
            for clients in [5, 8, 64] {
                let (served, refused) = served_in_rounds(full, is_named, clients);
                let what =
                    format!("{full} named {is_named}, {clients} clients: {served} of {expected}");
                assert!(served * 10 >= expected * 9, "{what}");
                assert!(refused * 10 <= served + clients * 10, "{what}, {refused} refused");
            }
        }
    }
}

#[test]
fn refused_leg_goes_to_an_instance_that_has_room() {
    let mut bench = DiscoveryBench::new(RouterConfig::default());
    for (name, role) in [("p0", Role::Prefill), ("d0", Role::Decode), ("d1", Role::Decode)] {
        bench.give(RouterInput::Register(native(name, role, Mode::Push)));
    }
    let legs = sent(bench.ask());
    let again = sent(bench.leg(legs[1].leg, busy(None)));
    let engines: Vec<_> = again.iter().map(|it| &*it.engine).collect();
    assert_eq!((&*legs[1].engine, &engines[..]), ("d0", &["p0", "d1"][..]));
    assert_eq!(bench.states(), [InstanceState::Ready; 3]);
    let full: Vec<_> = bench.router.instances(bench.now).map(|it| (it.busy, it.legs_max)).collect();
    assert_eq!(full, [(false, None), (true, Some(1)), (false, None)]);
}

#[test]
fn instance_that_others_fill_is_asked_again_after_the_time_that_it_names() {
    let config = RouterConfig { wait_max: Nanos::from_secs(60), ..RouterConfig::default() };
    let mut bench = DiscoveryBench::new(config);
    for (name, role) in [("p0", Role::Prefill), ("d0", Role::Decode)] {
        bench.give(RouterInput::Register(native(name, role, Mode::Push)));
    }
    let mut legs = sent(bench.ask());
    let mut asked_at = Vec::new();
    for _ in 0..3 {
        let refused = bench.leg(legs[1].leg, busy(Some(Nanos::from_secs(3))));
        assert!(sent(refused).is_empty(), "it was just refused");
        assert_eq!(bench.ask(), [], "others wait as well");
        legs = sent(bench.tick());
        assert_eq!(legs.len(), 2, "one request tries it");
        asked_at.push(bench.now);
    }
    // The first time it may not have noticed yet that a leg was cancelled.
    assert_eq!(asked_at, [20, 3_020, 6_020].map(Nanos::from_ms));
    bench.leg(legs[0].leg, done());
    let next = sent(bench.leg(legs[1].leg, done()));
    assert!(!next.is_empty(), "it serves again");
}

#[test]
fn instance_whose_server_serves_other_legs_is_asked_again_soon() {
    let config = RouterConfig { wait_max: Nanos::from_secs(60), ..RouterConfig::default() };
    let mut bench = DiscoveryBench::new(config);
    bench.give(RouterInput::Register(native("p0", Role::Prefill, Mode::Push)));
    for name in ["d0", "d1"] {
        let registration = native(name, Role::Decode, Mode::Push);
        let http = "server:8000".into();
        let dp_rank = u16::from(name == "d1");
        bench.give(RouterInput::Register(Registration { http, dp_rank, ..registration }));
    }
    let legs: Vec<_> = (0..2).map(|_| sent(bench.ask())).collect();
    let engines: Vec<_> = legs.iter().map(|legs| &*legs[1].engine).collect();
    assert_eq!(engines, ["d0", "d1"], "{:?}", bench.engines());
    let refusal = || busy(Some(Nanos::from_secs(3)));
    // The leg of the second request stays at d1, which takes no other one.
    let mut again = sent(bench.leg(legs[0][1].leg, refusal()));
    assert_eq!(&*again[1].engine, "d1");
    assert!(sent(bench.leg(again[1].leg, refusal())).is_empty(), "both have no room");
    let mut asked_at = Vec::new();
    for _ in 0..3 {
        again = sent(bench.tick());
        assert_eq!((again.len(), &*again[1].engine), (2, "d0"));
        asked_at.push(bench.now);
        assert!(sent(bench.leg(again[1].leg, refusal())).is_empty(), "it was just refused");
    }
    // A leg of d1 that ends makes room sooner than the server says.
    assert_eq!(asked_at, [20, 60, 140].map(Nanos::from_ms));
}

#[test]
fn request_that_never_finds_room_fails_as_busy_when_its_time_is_over() {
    let wait_max = Nanos::from_secs(2);
    let mut bench = DiscoveryBench::new(RouterConfig { wait_max, ..config() });
    for (name, role) in [("p0", Role::Prefill), ("d0", Role::Decode)] {
        bench.give(RouterInput::Register(native(name, role, Mode::Push)));
    }
    let retry_after = Some(Nanos::from_ms(300));
    let mut legs = sent(bench.ask());
    let waits = bench.ask();
    legs.extend(sent(waits));
    let (mut answers, mut tries) = (Vec::new(), 0);
    while answers.len() < 2 {
        for leg in std::mem::take(&mut legs) {
            let event = if leg.body.role() == Role::Decode { busy(retry_after) } else { done() };
            let effects = bench.leg(leg.leg, event);
            answers.extend(effects.iter().filter_map(|effect| match effect {
                RouterEffect::Answer { answer, .. } => Some(answer.clone()),
                _ => None,
            }));
            legs.extend(sent(effects));
            tries += 1;
            assert!(tries < 100, "the instance is hammered");
        }
        if legs.is_empty() && answers.len() < 2 {
            let effects = bench.tick();
            answers.extend(effects.iter().filter_map(|effect| match effect {
                RouterEffect::Answer { answer, .. } => Some(answer.clone()),
                _ => None,
            }));
            legs.extend(sent(effects));
        }
    }
    assert!(answers.iter().all(|it| *it == ClientAnswer::Failed(LegFailure::Busy { retry_after })));
    assert_eq!(bench.now, wait_max);
    assert_eq!(bench.router.gauges().entries, 0);
}

#[test]
fn request_that_waited_for_room_only_is_told_busy() {
    let wait_max = Nanos::from_secs(2);
    let mut bench = DiscoveryBench::new(RouterConfig { wait_max, ..config() });
    for (name, role) in [("p0", Role::Prefill), ("d0", Role::Decode)] {
        bench.give(RouterInput::Register(native(name, role, Mode::Push)));
    }
    let legs: Vec<_> = (0..2).map(|_| sent(bench.ask())).collect();
    bench.leg(legs[1][1].leg, busy(None));
    assert_eq!(bench.ask(), [], "one leg is there, and the instance takes one");
    let answers: Vec<_> = bench.tick();
    assert_eq!(bench.now, wait_max);
    let failed = ClientAnswer::Failed(LegFailure::Busy { retry_after: None });
    assert!(
        answers
            .iter()
            .all(|it| matches!(it, RouterEffect::Answer { answer, .. } if *answer == failed)),
        "{answers:?}"
    );
    assert_eq!(answers.len(), 2);
}

#[test]
fn prompts_of_a_request_beyond_the_room_wait_and_those_that_have_room_go() {
    let mut bench = DiscoveryBench::new(config());
    for (name, role) in [("p0", Role::Prefill), ("d0", Role::Decode)] {
        bench.give(RouterInput::Register(native(name, role, Mode::Push)));
    }
    let prompts = vec![RoutedPrompt { tokens: 10, prefix: [].into() }; 3];
    let (client, samples, output, model) = (ClientId(99), 1, 4, None);
    let request = ClientRequest { client, prompts, samples, output, model, engines: None };
    let legs = sent(bench.give(RouterInput::Request(request)));
    let decodes: Vec<_> = legs.iter().filter(|it| it.body.role() == Role::Decode).collect();
    assert_eq!(decodes.len(), 3);
    assert!(sent(bench.leg(decodes[2].leg, busy(None))).is_empty(), "two are there");
    assert!(sent(bench.leg(decodes[1].leg, busy(None))).is_empty(), "one is there");
    let mut waiting = vec![decodes[0].leg];
    let mut again = 0;
    while let Some(leg) = waiting.pop() {
        let effects = bench.leg(leg, done());
        if let Some(RouterEffect::Answer { answer, .. }) = effects.last() {
            assert_eq!((answer, again), (&ClientAnswer::Finished { recomputed: None }, 2));
            return;
        }
        let decodes = sent(effects).into_iter().filter(|it| it.body.role() == Role::Decode);
        waiting.extend(decodes.map(|it| it.leg).inspect(|_| again += 1));
    }
    panic!("it has not ended");
}

#[test]
fn refusal_after_the_time_to_find_room_tries_an_idle_instance_first() {
    let wait_max = Nanos::from_secs(2);
    let mut bench = DiscoveryBench::new(RouterConfig { wait_max, ..config() });
    for (name, role) in [("p0", Role::Prefill), ("d0", Role::Decode), ("d1", Role::Decode)] {
        bench.give(RouterInput::Register(native(name, role, Mode::Push)));
    }
    let first = sent(bench.ask());
    let second = sent(bench.leg(first[1].leg, busy(None)));
    bench.now = Nanos::from_secs(3);
    let third = sent(bench.leg(second[1].leg, busy(None)));
    let decodes = [&first, &second, &third].map(|legs| &*legs[1].engine);
    assert_eq!(decodes, ["d0", "d1", "d0"]);
}

#[test]
fn prompts_that_are_served_in_rounds_do_not_fail_while_rounds_go_on() {
    let mut bench = DiscoveryBench::new(config());
    for (name, role) in [("p0", Role::Prefill), ("d0", Role::Decode)] {
        bench.give(RouterInput::Register(native(name, role, Mode::Push)));
    }
    let prompts = vec![RoutedPrompt { tokens: 10, prefix: [].into() }; 3 * CAP];
    let (client, samples, output, model) = (ClientId(99), 1, 4, None);
    let request = ClientRequest { client, prompts, samples, output, model, engines: None };
    let mut legs = sent(bench.give(RouterInput::Request(request)));
    let is_decode = |it: &SentLeg| it.body.role() == Role::Decode;
    for _ in 0..100 {
        let decodes: Vec<_> = legs.iter().filter(|it| is_decode(it)).map(|it| it.leg).collect();
        for over in decodes.into_iter().skip(CAP).rev() {
            legs.retain(|it| it.leg != over);
            assert_eq!(sent(bench.leg(over, busy(None))).len(), 0);
        }
        // Each leg takes longer than a request waits.
        let end = bench.now + config().wait_max + Nanos::from_secs(1);
        while bench.router.deadline().is_some_and(|at| at <= end) {
            assert_eq!(bench.tick(), []);
        }
        bench.now = end;
        for ended in std::mem::take(&mut legs).into_iter().filter(is_decode) {
            let effects = bench.leg(ended.leg, done());
            if let Some(RouterEffect::Answer { answer, .. }) = effects.last() {
                assert_eq!(answer, &ClientAnswer::Finished { recomputed: None });
                return;
            }
            legs.extend(sent(effects));
        }
    }
    panic!("it has not ended");
}

#[test]
fn leg_refused_after_others_were_taken_leaves_room_for_as_many_as_these() {
    let mut bench = DiscoveryBench::new(config());
    for (name, role) in [("p0", Role::Prefill), ("d0", Role::Decode)] {
        bench.give(RouterInput::Register(native(name, role, Mode::Push)));
    }
    let legs: Vec<_> = (0..3).map(|_| sent(bench.ask())).collect();
    assert!(sent(bench.leg(legs[0][1].leg, busy(None))).is_empty());
    let limits: Vec<_> = bench.router.instances(bench.now).map(|it| it.legs_max).collect();
    assert_eq!(limits, [None, Some(2)]);
}

#[test]
fn held_legs_do_not_count_as_legs_of_the_instance_that_refused_one() {
    let pair = BusyPair::new(Role::Decode, true);
    let mut bench = pair.bench;
    let legs: Vec<_> = (0..2).map(|_| sent(bench.ask())).collect();
    let prefilled = LegEvent::Prefilled { params: "{}".into() };
    let decode = sent(bench.leg(legs[1][0].leg, prefilled));
    assert_eq!((legs[0].len(), decode.len()), (1, 1), "the decode of the first request is held");
    bench.leg(decode[0].leg, busy(None));
    assert_eq!(bench.router.deadline(), Some(Nanos::from_ms(20)), "it pauses");
}
