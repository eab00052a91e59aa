//! What an engine and its router tell each other on the discovery channel.

use crate::key;
use crate::world::{HASH, core_config, layers};
use kvferry_engine::core::command::ControlCommand;
use kvferry_engine::core::config::CoreConfig;
use kvferry_engine::core::decode::{Decode, DecodeEffect, DecodeInput};
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{Incarnation, RequestId, TransferKey};
use kvferry_engine::core::layout::RankLayout;
use kvferry_engine::core::message::*;
use kvferry_engine::core::prefill::{Prefill, PrefillEffect, PrefillInput};
use kvferry_engine::core::{Machine, Nanos, Outbox};
use kvferry_engine::fabric::{Address, ControlEvent, LinkId, LinkKind, RegionDesc};

const ROUTER: &str = "router";

/// A core with one rank and a router that can be reached, if `there`.
struct CoreHarness<M: Machine> {
    core: M,
    now: Nanos,
    control: fn(ControlEvent) -> M::Input,
    tick: fn() -> M::Input,
    /// The control command in an effect.
    command: fn(&M::Effect) -> Option<&ControlCommand>,
    there: bool,
    discovery: Option<LinkId>,
    registered: Vec<(Nanos, Registration)>,
    said: Vec<M::Effect>,
}

fn config(role: Role) -> CoreConfig {
    #[cfg(feature = "planted")]
    kvferry_engine::planted::plant_from_environment();
    CoreConfig {
        router: Some(ROUTER.into()),
        ..core_config(role, Mode::Push, 1, &Default::default())
    }
}

fn ready() -> TransferReport {
    let (rank, address) = (0, Address([7].into()));
    let regions = vec![(RegionDesc([1].into()), 1 << 24)];
    TransferReport::Ready { layout: RankLayout { rank, address, regions, layers: layers(1, 64) } }
}

impl<M: Machine> CoreHarness<M> {
    fn give(&mut self, input: M::Input) {
        let mut inputs = vec![input];
        while let Some(input) = inputs.pop() {
            let mut out = Outbox::new();
            self.core.handle(self.now, input, &mut out);
            for effect in out.take() {
                match (self.command)(&effect) {
                    Some(ControlCommand::Dial { link, channel: LinkKind::Discovery, to }) => {
                        assert_eq!(&*to.0, ROUTER);
                        self.discovery = Some(*link);
                        if self.there {
                            let (link, channel) = (*link, LinkKind::Discovery);
                            let up = ControlEvent::LinkUp { link, channel, from: None };
                            inputs.push((self.control)(up));
                        }
                    }
                    Some(ControlCommand::Dial { link, .. }) => {
                        // No peer can be reached.
                        inputs.push((self.control)(ControlEvent::LinkDown { link: *link }));
                    }
                    Some(ControlCommand::Send { link, frame }) if Some(*link) == self.discovery => {
                        if let Ok(Frame::Register(registration)) = native::decode(frame) {
                            self.registered.push((self.now, registration));
                        }
                    }
                    Some(_) => {}
                    None => self.said.push(effect),
                }
            }
        }
    }

    fn advance(&mut self, span: Nanos) {
        let until = self.now + span;
        while let Some(due) = self.core.deadline().filter(|due| *due <= until) {
            self.now = self.now.max(due);
            self.give((self.tick)());
        }
        self.now = until;
    }
}

fn decode(there: bool) -> CoreHarness<Decode> {
    let mut harness = CoreHarness {
        core: Decode::new(config(Role::Decode)),
        now: Nanos::ZERO,
        control: DecodeInput::Control,
        tick: || DecodeInput::Tick,
        command: |effect| match effect {
            DecodeEffect::Control(command) => Some(command),
            _ => None,
        },
        there,
        discovery: None,
        registered: Vec::new(),
        said: Vec::new(),
    };
    harness.give(DecodeInput::Report { rank: 0, report: ready() });
    harness
}

fn prefill() -> CoreHarness<Prefill> {
    let mut harness = CoreHarness {
        core: Prefill::new(config(Role::Prefill)),
        now: Nanos::ZERO,
        control: PrefillInput::Control,
        tick: || PrefillInput::Tick,
        command: |effect| match effect {
            PrefillEffect::Control(command) => Some(command),
            _ => None,
        },
        there: true,
        discovery: None,
        registered: Vec::new(),
        said: Vec::new(),
    };
    harness.give(PrefillInput::Report { rank: 0, report: ready() });
    harness
}

fn arrive(harness: &mut CoreHarness<Decode>, prompt: u32) {
    arrive_from(harness, TransferKey { prompt, ..key() }, "p0");
}

/// A leg whose prefill is out of reach.
fn arrive_from(harness: &mut CoreHarness<Decode>, key: TransferKey, prefill: &str) {
    let request = RequestId::from(format!("d-{}", key.prompt));
    let leg = DecodeLeg {
        key,
        sibling: 0,
        mode: Mode::Push,
        prefill: prefill.into(),
        control: "nobody".into(),
        incarnation: Some(Incarnation(3)),
        moriio: None,
    };
    harness.give(DecodeInput::Hook(DecodeHook::Arrived {
        request,
        leg,
        tokens: 64,
        prompt_hash: HASH,
    }));
}

#[test]
fn a_decode_tells_the_router_at_once_which_prefill_is_out_of_reach() {
    let mut harness = decode(true);
    let (at, first) = harness.registered[0].clone();
    assert!(first.troubles.is_empty() && first.fit.is_some());
    arrive(&mut harness, 0);
    harness.advance(Nanos::from_secs(20));
    let news: Vec<_> =
        harness.registered.iter().filter(|(_, it)| !it.troubles.is_empty()).collect();
    let (told, registration) = news[0];
    let [UnreachablePrefill { engine, incarnation, number, failure }] = &registration.troubles[..]
    else {
        panic!("{registration:?}")
    };
    assert_eq!((&*engine.0, *incarnation, *number), ("p0", Some(Incarnation(3)), 1));
    assert_eq!(*failure, Failure::Unreachable);
    // Between two heartbeats, which come at whole seconds.
    let beats: Vec<_> = harness.registered.iter().map(|(at, _)| *at).collect();
    assert!(beats.windows(2).all(|pair| pair[1] - pair[0] >= Nanos::from_ms(100)), "{beats:?}");
    assert!(*told > at && news.iter().all(|(_, it)| it.troubles[0].number == 1), "said again");
    arrive(&mut harness, 1);
    harness.advance(Nanos::from_secs(20));
    assert_eq!(harness.registered.last().expect("it beats").1.troubles[0].number, 2);
}

#[test]
fn decode_tells_the_router_once_why_each_leg_failed() {
    let mut harness = decode(true);
    let failed = |harness: &CoreHarness<Decode>| -> Vec<(Nanos, FailedLeg)> {
        let each = |(at, it): &(Nanos, Registration)| {
            it.failed.iter().map(|leg| (*at, leg.clone())).collect::<Vec<_>>()
        };
        harness.registered.iter().flat_map(each).collect()
    };
    (0..300).for_each(|prompt| arrive(&mut harness, prompt));
    harness.advance(Nanos::from_secs(20));
    let told = failed(&harness);
    let mut prompts: Vec<_> = told.iter().map(|(_, leg)| leg.key.prompt).collect();
    prompts.sort_unstable();
    assert_eq!(prompts, (0..300).collect::<Vec<_>>(), "each once");
    assert!(told.iter().all(|(_, leg)| leg.failure == Failure::Unreachable && leg.sibling == 0));
    let ends = harness.said.iter().filter(|effect| matches!(effect, DecodeEffect::Answer(_)));
    assert_eq!(ends.count(), 300);
    // The router waits for less than a heartbeat.
    assert!(told[299].0 - told[0].0 <= Nanos::from_ms(100), "{told:?}");
    assert!(harness.registered.iter().all(|(_, it)| it.failed.len() <= FAILED_LEGS_MAX));
    // A key that was used before says nothing of its first leg.
    arrive(&mut harness, 7);
    harness.advance(Nanos::from_secs(20));
    assert_eq!(failed(&harness).len(), 300);
}

#[test]
fn failed_legs_beyond_the_backlog_and_with_long_ids_are_not_told() {
    let told = |harness: &mut CoreHarness<Decode>| -> Vec<u32> {
        harness.advance(Nanos::from_secs(20));
        let all = harness.registered.iter().flat_map(|(_, it)| &it.failed);
        all.map(|leg| leg.key.prompt).collect()
    };
    let mut harness = decode(true);
    for (prompt, len) in [(1, FAILED_LEG_ID_MAX), (2, FAILED_LEG_ID_MAX + 1)] {
        let key = TransferKey { id: "t".repeat(len).as_str().into(), prompt };
        arrive_from(&mut harness, key, "p0");
    }
    assert_eq!(told(&mut harness), [1]);
    let mut harness = decode(true);
    (0..3_000).for_each(|prompt| arrive(&mut harness, prompt));
    // All of them fail together, so that nothing is told in between.
    assert_eq!(told(&mut harness).len(), 1_024);
    assert!(harness.registered.iter().all(|(_, it)| it.failed.len() <= FAILED_LEGS_MAX));
}

#[test]
fn a_registration_names_a_bounded_number_of_prefills_the_last_ones() {
    let mut harness = decode(true);
    for prompt in 0..3 * TROUBLES_MAX as u32 {
        arrive_from(&mut harness, TransferKey { prompt, ..key() }, &format!("p{prompt}"));
    }
    harness.advance(Nanos::from_secs(20));
    let last = &harness.registered.last().expect("it beats").1.troubles;
    assert_eq!(last.len(), TROUBLES_MAX);
    let newest = 3 * TROUBLES_MAX as u32 - 1;
    assert!(last.iter().any(|it| *it.engine.0 == *format!("p{newest}")), "{last:?}");
    assert!(harness.registered.iter().all(|(_, it)| it.troubles.len() <= TROUBLES_MAX));
}

#[test]
fn decode_without_a_router_keeps_no_failed_legs() {
    let remembered = |prompts: u32| {
        let mut harness = decode(false);
        (0..prompts).for_each(|prompt| arrive(&mut harness, prompt));
        harness.advance(Nanos::from_secs(20));
        let remembered = harness.core.gauges().remembered;
        harness.there = true;
        harness.advance(Nanos::from_secs(20));
        assert!(harness.registered.iter().all(|(_, it)| it.failed.is_empty()));
        remembered
    };
    assert_eq!(remembered(9), remembered(1));
}

#[test]
fn what_was_abandoned_before_its_leg_came_is_no_duplicate() {
    let mut harness = prefill();
    let link = harness.discovery.expect("it registered");
    let frame = native::encode(&Frame::Abandon { keys: vec![key()] });
    for _ in 0..3 {
        let parts = vec![frame.clone()];
        harness.give(PrefillInput::Control(ControlEvent::Frame { link, parts }));
    }
    let leg = PrefillLeg::new(key(), Mode::Push);
    let request = RequestId::from("p-1");
    harness.said.clear();
    harness.give(PrefillInput::Hook(PrefillHook::Arrived {
        request: request.clone(),
        leg,
        tokens: 64,
        prompt_hash: HASH,
    }));
    let failure = Failure::Cancelled;
    let rejected = PrefillAnswer::Rejected { request, failure };
    assert_eq!(harness.said, [PrefillEffect::Answer(rejected)]);
}

#[test]
fn an_engine_says_whether_its_router_is_there() {
    let router = || ROUTER.into();
    let mut harness = decode(false);
    harness.advance(Nanos::from_secs(20));
    let silent = DecodeEffect::Router(RouterEvent::Silent { router: router() });
    assert_eq!(harness.said, std::slice::from_ref(&silent), "once");
    harness.there = true;
    harness.advance(Nanos::from_secs(2));
    let there = DecodeEffect::Router(RouterEvent::Registered { router: router() });
    assert_eq!(harness.said, [silent.clone(), there.clone()]);
    harness.there = false;
    let link = harness.discovery.expect("it is up");
    harness.give(DecodeInput::Control(ControlEvent::LinkDown { link }));
    harness.advance(Nanos::from_secs(20));
    assert_eq!(harness.said, [silent.clone(), there, silent]);
}

#[test]
fn draining_engine_does_not_report_a_silent_router() {
    let mut harness = decode(false);
    harness.give(DecodeInput::Drain);
    harness.advance(Nanos::from_secs(20));
    assert_eq!(harness.said, []);
}

#[test]
fn an_engine_dials_a_router_that_hung_up_at_once_and_then_with_pauses() {
    let mut harness = decode(true);
    harness.advance(Nanos::from_secs(5));
    harness.there = false;
    let link = harness.discovery.expect("it is up");
    harness.give(DecodeInput::Control(ControlEvent::LinkDown { link }));
    let (start, mut dials) = (harness.now, Vec::new());
    while harness.now - start < Nanos::from_secs(5) {
        let before = harness.discovery;
        harness.now = harness.core.deadline().expect("it goes on");
        harness.give(DecodeInput::Tick);
        if harness.discovery != before {
            dials.push((harness.now - start).0 / 1_000_000);
            let link = harness.discovery.expect("it dialled");
            harness.give(DecodeInput::Control(ControlEvent::LinkDown { link }));
        }
    }
    // The first one is as long after as two registrations are apart; then it doubles to a heartbeat.
    assert_eq!(dials, [100, 300, 700, 1500, 2500, 3500, 4500, 5500]);
    // One that takes the link and drops it is not dialled any faster.
    harness.there = true;
    let mut ups = 0;
    let start = harness.now;
    while harness.now - start < Nanos::from_secs(10) {
        let before = harness.discovery;
        harness.now = harness.core.deadline().expect("it goes on");
        harness.give(DecodeInput::Tick);
        if harness.discovery != before {
            ups += 1;
            let link = harness.discovery.expect("it dialled");
            harness.give(DecodeInput::Control(ControlEvent::LinkDown { link }));
        }
    }
    assert_eq!(ups, 10);
}
