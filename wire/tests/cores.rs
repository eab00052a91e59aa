//! Router, prefill and decode find each other over ZeroMQ, as they do over the simulated network.

mod common;

use common::{PATIENCE, TestZmqPlane};
use kvferry_engine::core::command::ControlCommand;
use kvferry_engine::core::config::CoreConfig;
use kvferry_engine::core::decode::{Decode, DecodeEffect, DecodeInput};
use kvferry_engine::core::ids::{Incarnation, StepId, TransferKey};
use kvferry_engine::core::layout::{BlockList, Geometry, KvGroup, LayerLayout, RankLayout};
use kvferry_engine::core::message::*;
use kvferry_engine::core::prefill::{Prefill, PrefillEffect, PrefillInput};
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::core::router::{Router, RouterConfig, RouterEffect, RouterInput};
use kvferry_engine::core::{Machine, Nanos, Outbox};
use kvferry_engine::fabric::{Address, ControlEvent, ControlPlane, Endpoint, LinkKind, RegionDesc};
use std::time::{Duration, Instant};

/// How much slower than the machine's the clocks of the cores go: whatever it does meanwhile, no
/// limit of theirs passes before the test's own one.
const SLOW: u64 = 1_000;

fn now(start: Instant) -> Nanos {
    Nanos(start.elapsed().as_nanos() as u64 / SLOW)
}

/// A command to the control plane, or another effect.
type Sorted<E> = Result<ControlCommand, Box<E>>;

/// A machine with a control plane of its own.
struct ZmqTestNode<M: Machine> {
    machine: M,
    listeners: TestZmqPlane,
    start: Instant,
    /// Effects that are none of the control plane.
    said: Vec<M::Effect>,
    tick: fn() -> M::Input,
    hear: fn(ControlEvent) -> M::Input,
    command: fn(M::Effect) -> Sorted<M::Effect>,
}

impl<M: Machine> ZmqTestNode<M> {
    fn give(&mut self, input: M::Input) {
        let mut out = Outbox::new();
        let now = now(self.start);
        self.machine.handle(now, input, &mut out);
        for effect in out.take() {
            match (self.command)(effect) {
                Ok(ControlCommand::Dial { link, to, channel }) => {
                    self.listeners.plane.dial(link, &to, channel).expect("the address is one");
                }
                // A link that just went down says so itself.
                Ok(ControlCommand::Send { link, frame }) => {
                    let _ = self.listeners.plane.send(link, &[&frame]);
                }
                Ok(ControlCommand::Reply { link, frame }) => {
                    let _ = self.listeners.plane.send(link, &[&[], &frame]);
                }
                Ok(ControlCommand::HangUp { link }) => self.listeners.plane.hang_up(link),
                Err(other) => self.said.push(*other),
            }
        }
    }

    fn turn(&mut self) {
        let now = now(self.start);
        let mut events = Vec::new();
        self.listeners.plane.poll(now, &mut events);
        for event in events {
            self.give((self.hear)(event));
        }
        if self.machine.deadline().is_some_and(|due| due <= now) {
            self.give((self.tick)());
        }
    }
}

fn geometry() -> Geometry {
    let group = KvGroup::full(16, [0]);
    Geometry::new("wire", 1, vec![group])
}

/// Where the KV of the only rank would be; nothing is moved here.
fn ready() -> TransferReport {
    let layer = LayerLayout::contiguous(0, [8, 1, 16, 8], 2);
    let layout = RankLayout {
        rank: 0,
        address: Address([].into()),
        regions: vec![(RegionDesc([].into()), 8 * 256)],
        layers: vec![layer],
    };
    TransferReport::Ready { layout }
}

fn config(role: Role, control: &Endpoint, router: &Endpoint) -> CoreConfig {
    let (engine, incarnation) = (role.to_string(), Incarnation(1));
    CoreConfig {
        http: "http://127.0.0.1:1".into(),
        router: Some(router.clone()),
        ..CoreConfig::new(role, engine, incarnation, geometry(), control.clone())
    }
}

struct Trio {
    router: ZmqTestNode<Router>,
    prefill: ZmqTestNode<Prefill>,
    decode: ZmqTestNode<Decode>,
}

impl Trio {
    fn new(host: &str) -> (Trio, Endpoint) {
        let start = Instant::now();
        let [mut a, mut b, c] = [0; 3].map(|_| TestZmqPlane::new(host));
        let discovery = a.plane.listen(LinkKind::Discovery).unwrap();
        let control = b.plane.listen(LinkKind::Handshake).unwrap();
        let router = ZmqTestNode {
            machine: Router::new(RouterConfig::default(), Incarnation(1)),
            listeners: a,
            start,
            said: Vec::new(),
            tick: || RouterInput::Tick,
            hear: RouterInput::Control,
            command: |effect| match effect {
                RouterEffect::Control(command) => Ok(command),
                other => Err(Box::new(other)),
            },
        };
        let prefill = ZmqTestNode {
            machine: Prefill::new(config(Role::Prefill, &control, &discovery)),
            listeners: b,
            start,
            said: Vec::new(),
            tick: || PrefillInput::Tick,
            hear: PrefillInput::Control,
            command: |effect| match effect {
                PrefillEffect::Control(command) => Ok(command),
                other => Err(Box::new(other)),
            },
        };
        let decode = ZmqTestNode {
            machine: Decode::new(config(Role::Decode, &control, &discovery)),
            listeners: c,
            start,
            said: Vec::new(),
            tick: || DecodeInput::Tick,
            hear: DecodeInput::Control,
            command: |effect| match effect {
                DecodeEffect::Control(command) => Ok(command),
                other => Err(Box::new(other)),
            },
        };
        (Trio { router, prefill, decode }, control)
    }

    fn until(&mut self, what: &str, done: impl Fn(&Trio) -> bool) {
        let start = Instant::now();
        while !done(self) {
            assert!(start.elapsed() < PATIENCE, "no {what}");
            self.router.turn();
            self.prefill.turn();
            self.decode.turn();
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }
}

#[test]
fn cores_register_say_hello_and_speak_over_zeromq() {
    let (mut trio, control) = Trio::new("127.0.0.1");
    trio.prefill.give(PrefillInput::Report { rank: 0, report: ready() });
    trio.decode.give(DecodeInput::Report { rank: 0, report: ready() });
    trio.until("registrations", |trio| trio.router.machine.gauges().peers == 2);
    let key = TransferKey { id: "tx".into(), prompt: 0 };
    let incarnation = Some(Incarnation(1));
    let mode = Mode::Push;
    let leg =
        DecodeLeg { incarnation, ..DecodeLeg::new(key.clone(), mode, "prefill".into(), control) };
    let (request, prompt_hash) = ("d".into(), PromptHash::of_tokens(&[7; 16]));
    trio.decode.give(DecodeInput::Hook(DecodeHook::Arrived {
        request,
        leg,
        tokens: 16,
        prompt_hash,
    }));
    let leg = PrefillLeg { incarnation, ..PrefillLeg::new(key, mode) };
    let request = "p".into();
    trio.prefill.give(PrefillInput::Hook(PrefillHook::Arrived {
        request,
        leg,
        tokens: 16,
        prompt_hash,
    }));
    let blocks = vec![BlockList::new(vec![1])];
    let chunk = Chunk { request: "p".into(), from: 0, to: 16, blocks };
    let hook = PrefillHook::Scheduled { step: StepId(1), chunks: vec![chunk] };
    trio.prefill.give(PrefillInput::Hook(hook));
    let due = DecodeEffect::Answer(DecodeAnswer::Allocate { request: "d".into() });
    trio.until("word that the prompt is computed", |trio| trio.decode.said.contains(&due));
}
