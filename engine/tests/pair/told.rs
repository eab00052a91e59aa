//! What an engine and its router tell each other on the discovery channel.

use crate::key;
use crate::world::{core_config, layers};
use engine::core::command::ControlCommand;
use engine::core::decode::{Decode, DecodeEffect, DecodeInput};
use engine::core::dialect::native::{self, Frame};
use engine::core::error::Failure;
use engine::core::ids::{Incarnation, RequestId};
use engine::core::layout::RankLayout;
use engine::core::message::*;
use engine::core::prefill::{Prefill, PrefillEffect, PrefillInput};
use engine::core::station::CoreConfig;
use engine::core::{Machine, Nanos, Outbox};
use engine::fabric::{Address, Channel, ControlEvent, LinkId, RegionDesc};

const ROUTER: &str = "router";

/// A core with one rank and a router that can be reached, if `there`.
struct Desk<M: Machine> {
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
    CoreConfig {
        router: Some(ROUTER.into()),
        ..core_config(role, Mode::Push, 1, &Default::default())
    }
}

fn ready() -> Report {
    let (rank, address) = (0, Address([7].into()));
    let regions = vec![(RegionDesc([1].into()), 1 << 24)];
    Report::Ready { layout: RankLayout { rank, address, regions, layers: layers(1, 64) } }
}

impl<M: Machine> Desk<M> {
    fn give(&mut self, input: M::Input) {
        let mut inputs = vec![input];
        while let Some(input) = inputs.pop() {
            let mut out = Outbox::new();
            self.core.handle(self.now, input, &mut out);
            for effect in out.take() {
                match (self.command)(&effect) {
                    Some(ControlCommand::Dial { link, channel: Channel::Discovery, to }) => {
                        assert_eq!(&*to.0, ROUTER);
                        self.discovery = Some(*link);
                        if self.there {
                            let (link, channel) = (*link, Channel::Discovery);
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

    fn pass(&mut self, span: Nanos) {
        let until = self.now + span;
        while let Some(due) = self.core.deadline().filter(|due| *due <= until) {
            self.now = self.now.max(due);
            self.give((self.tick)());
        }
        self.now = until;
    }
}

fn decode(there: bool) -> Desk<Decode> {
    let mut desk = Desk {
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
    desk.give(DecodeInput::Report { rank: 0, report: ready() });
    desk
}

fn prefill() -> Desk<Prefill> {
    let mut desk = Desk {
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
    desk.give(PrefillInput::Report { rank: 0, report: ready() });
    desk
}

fn arrive(desk: &mut Desk<Decode>, prompt: u32) {
    let leg = DecodeLeg {
        key: engine::core::ids::TransferKey { prompt, ..key() },
        sibling: 0,
        mode: Mode::Push,
        prefill: "p0".into(),
        control: "nobody".into(),
        life: Some(Incarnation(3)),
        moriio: None,
    };
    let request = RequestId::from(format!("d-{prompt}"));
    desk.give(DecodeInput::Hook(DecodeHook::Arrived { request, leg, tokens: 64 }));
}

#[test]
fn a_decode_tells_the_router_at_once_which_prefill_is_out_of_reach() {
    let mut desk = decode(true);
    let (at, first) = desk.registered[0].clone();
    assert!(first.troubles.is_empty() && first.fit.is_some());
    arrive(&mut desk, 0);
    desk.pass(Nanos::from_secs(20));
    let news: Vec<_> = desk.registered.iter().filter(|(_, it)| !it.troubles.is_empty()).collect();
    let (told, registration) = news[0];
    let [Trouble { engine, life, number, failure }] = &registration.troubles[..] else {
        panic!("{registration:?}")
    };
    assert_eq!((&*engine.0, *life, *number), ("p0", Some(Incarnation(3)), 1));
    assert_eq!(*failure, Failure::Unreachable);
    // Between two heartbeats, which come at whole seconds.
    let beats: Vec<_> = desk.registered.iter().map(|(at, _)| *at).collect();
    assert!(beats.windows(2).all(|pair| pair[1] - pair[0] >= Nanos::from_ms(100)), "{beats:?}");
    assert!(*told > at && news.iter().all(|(_, it)| it.troubles[0].number == 1), "said again");
    arrive(&mut desk, 1);
    desk.pass(Nanos::from_secs(20));
    assert_eq!(desk.registered.last().expect("it beats").1.troubles[0].number, 2);
}

#[test]
fn what_was_abandoned_before_its_leg_came_is_no_duplicate() {
    let mut desk = prefill();
    let link = desk.discovery.expect("it registered");
    let frame = native::encode(&Frame::Abandon { keys: vec![key()] });
    for _ in 0..3 {
        let parts = vec![frame.clone()];
        desk.give(PrefillInput::Control(ControlEvent::Frame { link, parts }));
    }
    let leg = PrefillLeg { key: key(), siblings: 1, mode: Mode::Push, life: None, moriio: None };
    let request = RequestId::from("p-1");
    desk.said.clear();
    desk.give(PrefillInput::Hook(PrefillHook::Arrived {
        request: request.clone(),
        leg,
        tokens: 64,
    }));
    let failure = Failure::Cancelled;
    let rejected = PrefillAnswer::Rejected { request, failure };
    assert_eq!(desk.said, [PrefillEffect::Answer(rejected)]);
}

#[test]
fn an_engine_says_whether_its_router_is_there() {
    let router = || ROUTER.into();
    let mut desk = decode(false);
    desk.pass(Nanos::from_secs(20));
    let silent = DecodeEffect::Router(RouterNews::Silent { router: router() });
    assert_eq!(desk.said, std::slice::from_ref(&silent), "once");
    desk.there = true;
    desk.pass(Nanos::from_secs(2));
    let there = DecodeEffect::Router(RouterNews::Registered { router: router() });
    assert_eq!(desk.said, [silent.clone(), there.clone()]);
    desk.there = false;
    let link = desk.discovery.expect("it is up");
    desk.give(DecodeInput::Control(ControlEvent::LinkDown { link }));
    desk.pass(Nanos::from_secs(20));
    assert_eq!(desk.said, [silent.clone(), there, silent]);
}
