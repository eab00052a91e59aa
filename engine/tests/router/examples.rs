//! Single situations, step by step.

use crate::up;
use crate::world::{RouterWorld, prompt, registration};
use kvferry_engine::core::command::ControlCommand;
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{ClientId, Incarnation, LegId, TransferKey};
use kvferry_engine::core::message::{FinishReason, Mode, Role};
use kvferry_engine::core::router::{
    ClientAnswer, InstanceState, LeaveReason, LegEvent, LegFailure, RejectReason, RoutedPrompt,
    RouterConfig, RouterInput, Unavailable,
};
use kvferry_engine::core::{Machine, Nanos};
use kvferry_engine::fabric::{ControlEvent, LinkId};

const CUT: LegEvent = LegEvent::Failed(LegFailure::Connection);

fn world(prefills: usize, decodes: usize) -> RouterWorld {
    let mut world = RouterWorld::new(RouterConfig::default());
    up(&mut world, prefills, decodes);
    world
}

fn engine_of(world: &RouterWorld, leg: LegId) -> String {
    world.live[&leg].engine.to_string()
}

#[test]
fn restart_fails_legs_over_at_once() {
    let mut world = world(2, 1);
    let client = world.request(vec![prompt(100)], 1);
    let prefill = world.legs(client, Role::Prefill)[0];
    let key = world.live[&prefill].key.clone();
    let name = engine_of(&world, prefill);
    world.register(registration(&name, 2, 1, Mode::Push));
    assert!(world.ended.contains(&prefill));
    let again = world.legs(client, Role::Prefill)[0];
    assert_ne!(world.live[&again].key.id, key.id);
    assert_ne!(engine_of(&world, again), name, "another instance is preferred");
    assert_eq!(world.router.counters().replaced, 1);
    world.finish();
    assert_eq!(world.answers[&client], ClientAnswer::Finished { recomputed: None });
}

#[test]
fn older_registration_changes_nothing() {
    let mut world = RouterWorld::new(RouterConfig::default());
    world.register(registration("p0", 5, 7, Mode::Push));
    world.advance(Nanos::from_secs(9));
    for (incarnation, sequence) in [(5, 7), (5, 6), (4, 900)] {
        world.register(registration("p0", incarnation, sequence, Mode::Pull));
    }
    assert_eq!(world.router.counters().stale, 3);
    assert_eq!(world.router.instances(world.now).next().unwrap().mode, Mode::Push);
    world.advance(Nanos::from_secs(1));
    assert_eq!(world.router.gauges().peers, 0, "repeats do not keep it");
    world.register(registration("p0", 5, 7, Mode::Push));
    world.register(registration("p0", 4, 8, Mode::Push));
    assert_eq!(world.router.gauges().peers, 0, "repeats do not revive it");
    world.register(registration("p0", 5, 8, Mode::Push));
    assert_eq!(world.router.gauges().peers, 1);
}

/// A restart with a clock that went back, and no place where the last incarnation was noted.
#[test]
fn an_instance_whose_clock_went_back_is_taken_when_its_last_incarnation_is_over() {
    let mut world = RouterWorld::new(RouterConfig::default());
    world.register(registration("p0", 5, 7, Mode::Push));
    for second in 1..20 {
        world.advance(Nanos::from_secs(1));
        world.register(registration("p0", 3, second, Mode::Pull));
    }
    let instance = world.router.instances(world.now).next().expect("it is known");
    assert_eq!((instance.incarnation, instance.mode), (Incarnation(3), Mode::Pull));
    // What is still under way of the incarnation before, and of this one.
    world.register(registration("p0", 3, 2, Mode::Push));
    assert_eq!(world.router.instances(world.now).next().map(|it| it.mode), Some(Mode::Pull));
}

#[test]
fn streams_survive_an_expiry_if_registrations_resume() {
    for resumes in [true, false] {
        let mut world = world(1, 1);
        let (streaming, starting) =
            (world.request(vec![prompt(100)], 1), world.request(vec![prompt(100)], 1));
        let stream = world.legs(streaming, Role::Decode)[0];
        world.leg(stream, LegEvent::FirstToken);
        world.advance(world.config.expiry);
        assert!(world.live.contains_key(&stream));
        assert!(world.legs(starting, Role::Decode).is_empty(), "fails over and waits");
        if resumes {
            world.register(registration("d0", 1, 2, Mode::Push));
        }
        world.advance(world.config.stream_grace);
        assert_eq!(world.live.contains_key(&stream), resumes);
        if !resumes {
            let silent = LegFailure::Left(LeaveReason::Silent);
            assert_eq!(world.answers[&streaming], ClientAnswer::Failed(silent));
        }
        world.finish();
    }
}

#[test]
fn prefill_failure_after_the_first_token_is_ignored() {
    let mut world = world(1, 1);
    let client = world.request(vec![prompt(100)], 1);
    world.leg(world.legs(client, Role::Decode)[0], LegEvent::FirstToken);
    world.leg(world.legs(client, Role::Prefill)[0], CUT);
    assert_eq!(world.live.len(), 1);
    world.done(world.legs(client, Role::Decode)[0]);
    assert_eq!(world.answers[&client], ClientAnswer::Finished { recomputed: None });
}

#[test]
fn bad_request_of_a_prefill_is_ignored_once_tokens_stream() {
    let mut world = world(1, 1);
    let client = world.request(vec![prompt(100)], 1);
    world.leg(world.legs(client, Role::Decode)[0], LegEvent::FirstToken);
    let failed = LegEvent::Failed(LegFailure::Request("too long".into()));
    world.leg(world.legs(client, Role::Prefill)[0], failed);
    assert!(world.open.contains(&client));
    assert_eq!(world.router.counters().retries, 0);
}

#[test]
fn retry_prefers_busier_instances_to_those_that_failed() {
    let failed = || LegEvent::Failed(LegFailure::Instance(Failure::Stalled));
    for role in [Role::Prefill, Role::Decode] {
        let mut world = world(2, 2);
        let heavy = world.request(vec![prompt(5000)], 1);
        let busy = [Role::Prefill, Role::Decode].map(|role| world.legs(heavy, role)[0]);
        let light = world.request(vec![prompt(10)], 1);
        world.leg(world.legs(light, role)[0], failed());
        let retried = [Role::Prefill, Role::Decode].map(|role| world.legs(light, role)[0]);
        assert_eq!(engine_of(&world, retried[0]), engine_of(&world, busy[0]));
        let same = engine_of(&world, retried[1]) == engine_of(&world, busy[1]);
        assert_eq!(same, role == Role::Decode, "a decode is not blamed for its prefill");
    }
}

#[test]
fn requests_above_the_limit_take_turns() {
    let mut world = RouterWorld::new(RouterConfig { requests_max: 1, ..RouterConfig::default() });
    up(&mut world, 1, 1);
    let clients: Vec<_> = (0..5).map(|_| world.request(vec![prompt(100)], 1)).collect();
    for client in clients {
        assert_eq!(world.live.len(), 2);
        world.done(world.legs(client, Role::Decode)[0]);
        assert_eq!(world.answers[&client], ClientAnswer::Finished { recomputed: None });
    }
}

#[test]
fn draining_instance_has_time_to_finish() {
    let mut world = world(1, 1);
    let client = world.request(vec![prompt(100)], 1);
    world.done(world.legs(client, Role::Prefill)[0]);
    let mut last = registration("d0", 1, 2, Mode::Push);
    last.draining = true;
    world.register(last);
    world.advance(world.config.drain_max - Nanos(1));
    assert_eq!(world.legs(client, Role::Decode).len(), 1);
    world.advance(Nanos(1));
    assert!(world.live.is_empty());
    assert_eq!(world.router.gauges().peers, 0);
    world.finish();
    let drained = LegFailure::Left(LeaveReason::Drained);
    assert_eq!(world.answers[&client], ClientAnswer::Failed(drained));
}

#[test]
fn decode_failure_after_the_first_token_is_final() {
    let mut world = world(2, 2);
    let client = world.request(vec![prompt(100), prompt(50)], 1);
    let decode = world.legs(client, Role::Decode)[0];
    world.leg(decode, LegEvent::FirstToken);
    world.leg(decode, CUT);
    assert_eq!(world.answers[&client], ClientAnswer::Failed(LegFailure::Connection));
    assert!(world.live.is_empty());
}

#[test]
fn bad_request_is_not_retried() {
    let mut world = world(2, 2);
    let client = world.request(vec![prompt(100)], 1);
    let failure = LegFailure::Request("context too long".into());
    world.leg(world.legs(client, Role::Prefill)[0], LegEvent::Failed(failure.clone()));
    assert_eq!(world.answers[&client], ClientAnswer::Failed(failure));
    assert!(world.router.instances(world.now).all(|i| i.state == InstanceState::Ready));
    for (prompts, samples) in [(vec![], 1), (vec![prompt(1)], 0), (vec![prompt(1)], u32::MAX)] {
        let client = world.request(prompts, samples);
        assert!(matches!(world.answers[&client], ClientAnswer::Failed(LegFailure::Request(_))));
    }
}

#[test]
fn siblings_share_a_key_and_only_unseen_ones_are_retried() {
    let mut world = world(2, 3);
    let client = world.request(vec![prompt(100)], 3);
    let decodes = world.legs(client, Role::Decode);
    let key = world.live[&decodes[0]].key.clone();
    assert!(world.live.len() == 4 && world.live.values().all(|leg| leg.key == key));
    world.leg(decodes[0], LegEvent::FirstToken);
    world.leg(decodes[1], CUT);
    let samples: Vec<_> = world.live.values().map(|leg| (leg.sample, leg.key == key)).collect();
    assert_eq!(samples, [(Some(0), true), (None, false), (Some(1), false), (Some(2), false)]);
    world.finish();
    assert_eq!(world.answers[&client], ClientAnswer::Finished { recomputed: None });
}

#[test]
fn prompts_of_one_request_are_told_apart_by_index() {
    let mut world = world(2, 2);
    let client = world.request(vec![prompt(100), prompt(200)], 1);
    let keys: Vec<_> =
        world.legs(client, Role::Prefill).iter().map(|leg| world.live[leg].key.clone()).collect();
    assert_eq!(keys[0].id, keys[1].id);
    assert_eq!((keys[0].prompt, keys[1].prompt), (0, 1));
}

#[test]
fn tries_are_bounded_and_the_last_cause_is_told() {
    let mut world = world(3, 3);
    let client = world.request(vec![prompt(100)], 1);
    for _ in 0..=world.config.retries_max {
        assert!(world.open.contains(&client));
        let failed = LegEvent::Failed(LegFailure::Instance(Failure::Stalled));
        world.leg(world.legs(client, Role::Decode)[0], failed);
    }
    let stalled = LegFailure::Instance(Failure::Stalled);
    assert_eq!(world.answers[&client], ClientAnswer::Failed(stalled));
    let mut pairs = world.pairs.clone();
    pairs.sort();
    pairs.dedup();
    assert_eq!(pairs.len(), 3, "each try has another pair: {pairs:?}");
}

#[test]
fn leg_that_its_instance_ends_fails_by_its_role() {
    for (role, failure) in
        [(Role::Prefill, Failure::PrefillEnded), (Role::Decode, Failure::Cancelled)]
    {
        let mut world = world(3, 3);
        let client = world.request(vec![prompt(100)], 1);
        while world.open.contains(&client) {
            let ended = LegEvent::Done { reason: FinishReason::Error, recomputed: None };
            world.leg(world.legs(client, role)[0], ended);
        }
        let failed = LegFailure::Instance(failure);
        assert_eq!(world.answers[&client], ClientAnswer::Failed(failed), "{role:?}");
    }
}

#[test]
fn recompute_is_told() {
    let mut world = world(1, 1);
    let client = world.request(vec![prompt(100)], 1);
    let recomputed = Some(Failure::PeerSilent);
    let done = LegEvent::Done { reason: FinishReason::Stop, recomputed: recomputed.clone() };
    world.leg(world.legs(client, Role::Decode)[0], done);
    assert_eq!(world.answers[&client], ClientAnswer::Finished { recomputed });
    assert!(world.live.is_empty(), "nobody wants the KV any more");
}

/// The keys that prefills were told to abandon.
fn abandoned(world: &RouterWorld) -> Vec<TransferKey> {
    let keys = |command: &ControlCommand| match command {
        ControlCommand::Send { frame, .. } => match native::decode(frame) {
            Ok(Frame::Abandon { keys }) => keys,
            other => panic!("not for an instance: {other:?}"),
        },
        other => panic!("not for an instance: {other:?}"),
    };
    world.told.iter().flat_map(keys).collect()
}

#[test]
fn a_prefill_is_told_what_nobody_fetches() {
    let recomputed = Some(Failure::PeerSilent);
    let went_without = LegEvent::Done { reason: FinishReason::Stop, recomputed };
    for event in [Some(CUT), Some(went_without), None] {
        let mut world = world(1, 1);
        let frame = native::encode(&Frame::Register(registration("p0", 1, 2, Mode::Push)));
        let parts = vec![frame];
        world.give(RouterInput::Control(ControlEvent::Frame { link: LinkId(1), parts }));
        let client = world.request(vec![prompt(100)], 1);
        let key = world.live[&world.legs(client, Role::Prefill)[0]].key.clone();
        world.done(world.legs(client, Role::Prefill)[0]);
        assert_eq!(abandoned(&world), []);
        match event {
            Some(event) => world.leg(world.legs(client, Role::Decode)[0], event),
            None => world.go(client),
        }
        assert_eq!(abandoned(&world), [key]);
    }
}

#[test]
fn a_prompt_that_went_without_its_kv_is_abandoned_while_others_go_on() {
    let mut world = world(1, 1);
    let parts = vec![native::encode(&Frame::Register(registration("p0", 1, 2, Mode::Push)))];
    world.give(RouterInput::Control(ControlEvent::Frame { link: LinkId(1), parts }));
    let client = world.request(vec![prompt(100), prompt(50)], 1);
    for leg in world.legs(client, Role::Prefill) {
        world.done(leg);
    }
    let leg = world.legs(client, Role::Decode)[0];
    let key = world.live[&leg].key.clone();
    let recomputed = Some(Failure::PeerSilent);
    world.leg(leg, LegEvent::Done { reason: FinishReason::Stop, recomputed });
    assert_eq!(abandoned(&world), [key]);
    assert!(world.answers.is_empty());
}

#[test]
fn prompt_that_ends_before_its_prefill_is_abandoned_once_no_sample_wants_it() {
    let mut world = world(1, 1);
    let parts = vec![native::encode(&Frame::Register(registration("p0", 1, 2, Mode::Push)))];
    world.give(RouterInput::Control(ControlEvent::Frame { link: LinkId(1), parts }));
    let client = world.request(vec![prompt(100)], 2);
    let key = world.live[&world.legs(client, Role::Prefill)[0]].key.clone();
    // The decode had the prompt cached, and is gone before it can say so.
    world.done(world.legs(client, Role::Decode)[0]);
    assert_eq!(abandoned(&world), []);
    world.done(world.legs(client, Role::Decode)[0]);
    assert_eq!(abandoned(&world), [key]);
}

#[test]
fn a_prefill_hears_nothing_of_what_was_fetched() {
    let mut world = world(1, 1);
    let parts = vec![native::encode(&Frame::Register(registration("p0", 1, 2, Mode::Push)))];
    world.give(RouterInput::Control(ControlEvent::Frame { link: LinkId(1), parts }));
    world.request(vec![prompt(100)], 2);
    world.finish();
    assert_eq!(abandoned(&world), []);
}

/// A prompt of which all but 52 tokens are known where it was served.
fn shared() -> RoutedPrompt {
    RoutedPrompt { tokens: 2100, prefix: (0..4).collect() }
}

fn prefill_of(world: &RouterWorld, client: ClientId) -> String {
    engine_of(world, world.legs(client, Role::Prefill)[0])
}

/// Serves the shared prompt; says at which prefill.
fn serve_shared(world: &mut RouterWorld) -> String {
    let first = world.request(vec![shared()], 1);
    let home = prefill_of(world, first);
    for leg in [Role::Prefill, Role::Decode].map(|role| world.legs(first, role)[0]) {
        world.done(leg);
    }
    home
}

#[test]
fn known_prefix_wins_until_load_outweighs_it() {
    let mut world = world(2, 2);
    let home = serve_shared(&mut world);
    let mut homes = Vec::new();
    for _ in 0..60 {
        let client = world.request(vec![shared()], 1);
        homes.push(prefill_of(&world, client) == home);
    }
    // 52 tokens are left to compute each time, so 2048 saved ones outweigh 39 requests.
    assert!(homes[..39].iter().all(|home| *home), "{homes:?}");
    assert!(homes[39..].iter().any(|home| !home), "{homes:?}");
}

#[test]
fn instance_in_its_next_life_is_not_preferred_for_a_prefix() {
    for restarts in [false, true] {
        let mut world = world(2, 1);
        let home = serve_shared(&mut world);
        if restarts {
            world.register(registration(&home, 9, 1, Mode::Push));
        }
        // Work for both, of which that at the other one ends.
        for _ in 0..2 {
            let client = world.request(vec![prompt(100)], 1);
            if prefill_of(&world, client) != home {
                world.done(world.legs(client, Role::Prefill)[0]);
            }
        }
        let second = world.request(vec![shared()], 1);
        assert_eq!(prefill_of(&world, second) == home, !restarts);
    }
}

#[test]
fn only_equal_modes_are_paired() {
    let mut world = RouterWorld::new(RouterConfig::default());
    world.register(registration("p0", 1, 1, Mode::Push));
    world.register(registration("d0", 1, 1, Mode::Pull));
    let client = world.request(vec![prompt(100)], 1);
    assert_eq!(world.router.gauges().queued, 1);
    world.register(registration("p1", 1, 1, Mode::Pull));
    assert_eq!(engine_of(&world, world.legs(client, Role::Prefill)[0]), "p1");
    world.register(registration("d0", 2, 1, Mode::Push));
    let prefill = world.legs(client, Role::Prefill)[0];
    assert_eq!(engine_of(&world, prefill), "p0", "a fleet may change its mode");
}

#[test]
fn instance_that_fails_repeatedly_is_tried_by_one_client() {
    let mut world = world(1, 1);
    let first = world.request(vec![prompt(100)], 2);
    world.leg(world.legs(first, Role::Decode)[0], CUT);
    assert!(world.live.is_empty(), "the only decode is suspect");
    world.register(registration("d0", 1, 2, Mode::Push));
    assert_eq!(world.live.len(), 3, "registering heals the first failure");
    world.leg(world.legs(first, Role::Decode)[0], CUT);
    world.register(registration("d0", 1, 3, Mode::Push));
    let second = world.request(vec![prompt(100)], 1);
    assert!(world.live.is_empty(), "registering does not heal the second");
    world.advance(world.config.suspicion.scale(2, 1));
    assert_eq!(world.legs(first, Role::Decode).len(), 2, "one client tries it");
    assert!(world.legs(second, Role::Decode).is_empty());
    world.leg(world.legs(first, Role::Decode)[0], LegEvent::FirstToken);
    assert_eq!(world.legs(second, Role::Decode).len(), 1);
    world.finish();
}

#[test]
fn legs_that_one_outage_fails_count_once() {
    let mut world = world(1, 1);
    let clients = [(); 2].map(|()| world.request(vec![prompt(100)], 1));
    for client in clients {
        world.leg(world.legs(client, Role::Decode)[0], CUT);
    }
    world.register(registration("d0", 1, 2, Mode::Push));
    for client in clients {
        assert_eq!(world.legs(client, Role::Decode).len(), 1, "registering heals one failure");
    }
    world.finish();
}

#[test]
fn retries_wait_before_new_requests_and_fail_with_their_cause() {
    let mut world = world(1, 1);
    let old = world.request(vec![prompt(100)], 1);
    let mut leaving = registration("p0", 1, 2, Mode::Push);
    leaving.draining = true;
    world.register(leaving);
    let new = world.request(vec![prompt(100)], 1);
    let failed = LegEvent::Failed(LegFailure::Instance(Failure::Stalled));
    world.leg(world.legs(old, Role::Prefill)[0], failed);
    assert_eq!(world.router.gauges().queued, 2);
    world.advance(Nanos::from_secs(9));
    world.register(registration("d0", 1, 2, Mode::Push));
    world.advance(Nanos::from_secs(21));
    let nobody = ClientAnswer::NoInstance(Unavailable::Nobody);
    assert_eq!(world.answers[&new], nobody);
    assert_eq!(world.answers[&old], ClientAnswer::Failed(LegFailure::Instance(Failure::Stalled)));
}

#[test]
fn bad_registrations_are_counted_by_reason() {
    let mut world = RouterWorld::new(RouterConfig { instances_max: 2, ..RouterConfig::default() });
    let mut bad = vec![registration("p0", 1, 1, Mode::Push); 7];
    bad[0].engine = "".into();
    bad[1].http = "p0:0".into();
    bad[2].control = "tcp://p0:65536".into();
    bad[3].http = "p0\r\nX: y:80".into();
    bad[4].dp_rank = 1;
    bad[5].tp = 0;
    bad[6].tp = 65;
    for registration in bad {
        world.give(RouterInput::Register(registration));
    }
    let parts = vec![vec![0xc1]];
    world.give(RouterInput::Control(ControlEvent::Frame { link: LinkId(1), parts }));
    world.give(RouterInput::Control(ControlEvent::Frame { link: LinkId(1), parts: vec![] }));
    assert_eq!(world.router.gauges().peers, 0);
    up(&mut world, 1, 2);
    let mut turned = registration("p0", 1, 2, Mode::Push);
    turned.role = Role::Decode;
    world.give(RouterInput::Register(turned));
    let counted: Vec<_> = world.router.counters().rejected.clone().into_iter().collect();
    let expected = [
        (RejectReason::Malformed, 2),
        (RejectReason::Name, 1),
        (RejectReason::Endpoint, 3),
        (RejectReason::DataParallel, 1),
        (RejectReason::TensorParallel, 2),
        (RejectReason::Changed, 1),
        (RejectReason::Full, 1),
    ];
    assert_eq!(counted, expected);
    assert_eq!(world.router.gauges().violations, 11);
}

#[test]
fn registrations_arrive_as_native_frames() {
    let mut world = RouterWorld::new(RouterConfig::default());
    let said = registration("p0", 3, 1, Mode::Pull);
    let frame = native::encode(&Frame::Register(said.clone()));
    let parts = vec![frame.clone(), b"ignored".to_vec()];
    world.give(RouterInput::Control(ControlEvent::Frame { link: LinkId(1), parts }));
    let seen = world.router.instances(world.now).next().unwrap();
    assert_eq!(
        (seen.engine, seen.incarnation, seen.mode),
        (&said.engine, said.incarnation, said.mode)
    );
    for cut in 0..frame.len() {
        let parts = vec![frame[..cut].to_vec()];
        world.give(RouterInput::Control(ControlEvent::Frame { link: LinkId(1), parts }));
    }
    let rejected = &world.router.counters().rejected;
    assert_eq!(rejected[&RejectReason::Malformed], frame.len() as u64);
}

#[test]
fn drained_router_finishes_what_it_has() {
    let mut world = world(1, 1);
    let (running, waiting) =
        (world.request(vec![prompt(100)], 1), world.request(vec![prompt(100)], 1));
    world.drain();
    let refused = world.request(vec![prompt(100)], 1);
    assert_eq!(world.answers[&refused], ClientAnswer::NoInstance(Unavailable::Draining));
    world.finish();
    for client in [running, waiting] {
        assert_eq!(world.answers[&client], ClientAnswer::Finished { recomputed: None });
    }
}
