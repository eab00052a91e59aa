//! Instances that register by MoRIIO's registrations: instances without an incarnation, decode legs
//! that wait for the prefill's answer, probes, and what is not taken.

use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::core::dialect::moriio::registration::MoriioRegistration;
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::ids::{ClientId, Incarnation, LegId};
use kvferry_engine::core::message::{FinishReason, Mode, Registration, Role};
use kvferry_engine::core::router::{
    ClientAnswer, ClientRequest, InstancePair, InstanceState, LegBody, LegEvent, LegFailure,
    ProbeId, RejectReason, RoutedPrompt, Router, RouterConfig, RouterEffect, RouterInput,
};
use kvferry_engine::core::{Machine, Nanos, Outbox};
use kvferry_engine::fabric::{ControlEvent, LinkId};
use std::num::NonZeroU16;

/// A router and its time.
pub(crate) struct DiscoveryBench {
    pub(crate) router: Router,
    pub(crate) now: Nanos,
    pub(crate) clients: u64,
}

/// A leg that was sent.
#[derive(Clone, Debug)]
pub(crate) struct SentLeg {
    pub(crate) leg: LegId,
    pub(crate) engine: String,
    pub(crate) pair: InstancePair,
    pub(crate) body: LegBody,
}

impl DiscoveryBench {
    pub(crate) fn new(config: RouterConfig) -> DiscoveryBench {
        #[cfg(feature = "planted")]
        kvferry_engine::planted::plant_from_environment();
        DiscoveryBench { router: Router::new(config, Incarnation(7)), now: Nanos::ZERO, clients: 0 }
    }

    pub(crate) fn give(&mut self, input: RouterInput) -> Vec<RouterEffect> {
        let mut out = Outbox::new();
        self.router.handle(self.now, input, &mut out);
        out.take()
    }

    pub(crate) fn hear(&mut self, frame: Vec<u8>) -> Vec<RouterEffect> {
        let link = LinkId(LinkId::INBOUND | 1);
        self.give(RouterInput::Control(ControlEvent::Frame { link, parts: vec![frame] }))
    }

    /// Asks for one token of one prompt.
    pub(crate) fn ask(&mut self) -> Vec<RouterEffect> {
        let client = ClientId(self.clients);
        self.clients += 1;
        let prompts = vec![RoutedPrompt { tokens: 10, prefix: [].into() }];
        self.give(RouterInput::Request(ClientRequest {
            client,
            prompts,
            samples: 1,
            output: 4,
            model: None,
            engines: None,
        }))
    }

    pub(crate) fn leg(&mut self, leg: LegId, event: LegEvent) -> Vec<RouterEffect> {
        self.give(RouterInput::Leg { leg, event })
    }

    pub(crate) fn engines(&self) -> Vec<String> {
        self.router.instances(self.now).map(|it| it.engine.to_string()).collect()
    }

    pub(crate) fn states(&self) -> Vec<InstanceState> {
        self.router.instances(self.now).map(|it| it.state).collect()
    }

    /// Lets time pass, with a tick at each deadline; returns what was wanted meanwhile.
    pub(crate) fn pass(&mut self, span: Nanos) -> Vec<RouterEffect> {
        let until = self.now + span;
        let mut wanted = Vec::new();
        while self.router.deadline().is_some_and(|due| due <= until) {
            wanted.extend(self.tick());
        }
        self.now = until;
        wanted
    }

    /// Lets time pass to the next deadline.
    pub(crate) fn tick(&mut self) -> Vec<RouterEffect> {
        self.now = self.router.deadline().expect("a timer is armed");
        self.give(RouterInput::Tick)
    }
}

pub(crate) fn beat(
    role: Role,
    host: &str,
    handshake: i64,
    dp: u16,
    mode: Mode,
) -> MoriioRegistration {
    let zmq = ZmqAddress { host: host.into(), handshake, notify: 61005 };
    let size = |size| NonZeroU16::new(size).unwrap();
    let http = match host.contains(':') {
        true => format!("[{host}]:8000"),
        false => format!("{host}:8000"),
    };
    let http = http.as_str().into();
    MoriioRegistration::new(role, http, zmq, size(dp), size(4), mode).unwrap()
}

fn p(mode: Mode) -> MoriioRegistration {
    beat(Role::Prefill, "10.0.0.1", 6301, 1, mode)
}

fn d(mode: Mode) -> MoriioRegistration {
    beat(Role::Decode, "10.0.0.2", 7301, 1, mode)
}

pub(crate) fn native(name: &str, role: Role, mode: Mode) -> Registration {
    Registration {
        dp_rank: 2,
        dp_size: 8,
        tp: 4,
        ..Registration::new(
            name.into(),
            Incarnation(5),
            role,
            mode,
            format!("{name}:8000").as_str().into(),
            format!("tcp://{name}:6301").as_str().into(),
        )
    }
}

pub(crate) fn sent(effects: Vec<RouterEffect>) -> Vec<SentLeg> {
    let sent = |effect| match effect {
        RouterEffect::Dispatch { leg, engine, pair, body, .. } => {
            Some(SentLeg { leg, engine: engine.to_string(), pair: *pair, body })
        }
        _ => None,
    };
    effects.into_iter().filter_map(sent).collect()
}

pub(crate) fn done() -> LegEvent {
    LegEvent::Done { reason: FinishReason::Length, recomputed: None }
}

fn params_of(sent: &SentLeg) -> Option<&str> {
    match &sent.body {
        LegBody::Decode { params, .. } => params.as_deref(),
        LegBody::Prefill { .. } => panic!("a prefill leg: {sent:?}"),
    }
}

#[test]
fn a_heartbeat_is_an_instance_for_each_of_its_ranks() {
    let mut bench = DiscoveryBench::new(RouterConfig::default());
    for _ in 0..3 {
        bench.hear(beat(Role::Prefill, "fd00::1", 6301, 3, Mode::Push).encode());
        bench.now = bench.now + Nanos::from_secs(3);
    }
    assert_eq!(bench.engines(), ["P/[fd00::1]:8000/0", "P/[fd00::1]:8000/1", "P/[fd00::1]:8000/2"]);
    let views: Vec<_> =
        bench.router.instances(bench.now).map(|it| (it.dp_rank, it.dp_size)).collect();
    assert_eq!(views, [(0, 3), (1, 3), (2, 3)]);
    assert_eq!((bench.router.counters().replaced, bench.router.counters().stale), (0, 0));
    bench.tick();
    assert_eq!(bench.now, Nanos::from_secs(16));
    assert_eq!(bench.engines(), [""; 0]);
}

#[test]
fn another_heartbeat_of_the_same_address_is_another_incarnation() {
    let mut bench = DiscoveryBench::new(RouterConfig::default());
    bench.hear(beat(Role::Prefill, "10.0.0.1", 6301, 4, Mode::Push).encode());
    bench.hear(d(Mode::Push).encode());
    let legs = sent(bench.ask());
    assert_eq!(legs.len(), 2);
    // New ports, fewer ranks: the legs of the old incarnation fail over to the new one at once.
    let effects = bench.hear(beat(Role::Prefill, "10.0.0.1", 6401, 2, Mode::Push).encode());
    let cancelled =
        effects.iter().filter(|it| matches!(it, RouterEffect::CancelLeg { .. })).count();
    let again = sent(effects);
    assert_eq!((cancelled, again.len()), (2, 2));
    assert_eq!(again[0].pair.prefill.zmq.as_ref().unwrap().handshake, 6401);
    let mut engines = bench.engines();
    engines.sort();
    assert_eq!(engines, ["D/10.0.0.2:8000/0", "P/10.0.0.1:8000/0", "P/10.0.0.1:8000/1"]);
    assert_eq!(bench.router.counters().replaced, 4);
    // And back: what it was before is an incarnation of its own, too.
    bench.hear(beat(Role::Prefill, "10.0.0.1", 6301, 4, Mode::Push).encode());
    assert_eq!(bench.engines().len(), 5);
}

#[test]
fn a_decode_that_reads_waits_for_the_prefills_answer() {
    let mut bench = DiscoveryBench::new(RouterConfig::default());
    bench.hear(p(Mode::Pull).encode());
    bench.hear(d(Mode::Pull).encode());
    let legs = sent(bench.ask());
    assert_eq!(legs.len(), 1, "{legs:?}");
    assert_eq!(legs[0].pair.decode.zmq.as_ref().unwrap().handshake, 7301);
    let params = r#"{"remote_block_ids":[[1]]}"#;
    let next = sent(bench.leg(legs[0].leg, LegEvent::Prefilled { params: params.into() }));
    assert_eq!((next.len(), params_of(&next[0])), (1, Some(params)));
    assert_eq!(next[0].pair, legs[0].pair);
    let ended = bench.leg(next[0].leg, done());
    assert!(matches!(
        &ended[..],
        [RouterEffect::Answer { answer: ClientAnswer::Finished { .. }, .. }]
    ));
    assert_eq!(bench.router.gauges().transfers, 0);
    // Nothing to read: it is sent all the same, and counted.
    let legs = sent(bench.ask());
    let next = sent(bench.leg(legs[0].leg, done()));
    assert_eq!((next.len(), params_of(&next[0])), (1, None));
    assert_eq!(bench.router.counters().unread, 1);
}

#[test]
fn a_decode_that_waited_is_never_heard_of_when_the_prefill_fails() {
    let mut bench = DiscoveryBench::new(RouterConfig::default());
    for host in ["10.0.0.1", "10.0.0.3"] {
        bench.hear(beat(Role::Prefill, host, 6301, 1, Mode::Pull).encode());
    }
    bench.hear(d(Mode::Pull).encode());
    let legs = sent(bench.ask());
    let effects = bench.leg(legs[0].leg, LegEvent::Failed(LegFailure::Connection));
    assert!(!effects.iter().any(|it| matches!(it, RouterEffect::CancelLeg { .. })), "{effects:?}");
    let again = sent(effects);
    assert!(again.len() == 1 && again[0].engine != legs[0].engine, "{again:?}");
    // The same when the client goes.
    let effects = bench.give(RouterInput::Gone { client: ClientId(0) });
    assert!(matches!(effects[..], [RouterEffect::CancelLeg { leg }] if leg == again[0].leg));
    assert_eq!(bench.router.gauges().transfers, 0);
    let legs: u32 = bench.router.instances(bench.now).map(|it| it.legs).sum();
    assert_eq!(legs, 0);
}

#[test]
fn a_native_registration_in_a_heartbeat_counts() {
    let mut bench = DiscoveryBench::new(RouterConfig::default());
    bench.hear(p(Mode::Pull).encode_with(&native("p0", Role::Prefill, Mode::Pull)));
    bench.hear(d(Mode::Pull).encode_with(&native("d0", Role::Decode, Mode::Pull)));
    assert_eq!(bench.engines(), ["p0", "d0"]);
    let legs = sent(bench.ask());
    assert_eq!(legs.len(), 2, "native decodes pull by themselves");
    assert!(legs[0].pair.is_native());
    let prefill = &legs[0].pair.prefill;
    assert_eq!((prefill.dp_rank, prefill.dp_size), (2, 8));
    assert_eq!(prefill.zmq.as_ref().unwrap().handshake, 6301);
}

#[test]
fn only_those_are_paired_who_have_a_dialect_in_common() {
    let mut bench =
        DiscoveryBench::new(RouterConfig { wait_max: Nanos(1), ..RouterConfig::default() });
    // A prefill that speaks MoRIIO only, decodes that do not, and one that speaks both.
    bench.hear(p(Mode::Push).encode());
    for name in ["d0", "d1"] {
        let frame = Frame::Register(native(name, Role::Decode, Mode::Push));
        bench.hear(native::encode(&frame));
    }
    assert!(bench.ask().is_empty());
    bench.give(RouterInput::Gone { client: ClientId(0) });
    bench.hear(d(Mode::Push).encode_with(&native("d2", Role::Decode, Mode::Push)));
    for _ in 0..4 {
        let legs = sent(bench.ask());
        assert_eq!(legs.len(), 2);
        assert!(legs[1].engine == "d2" && !legs[1].pair.is_native(), "{legs:?}");
    }
    // A native prefill takes the others.
    bench.hear(native::encode(&Frame::Register(native("p1", Role::Prefill, Mode::Push))));
    let legs = sent(bench.ask());
    assert!(legs[0].engine == "p1" && legs[0].pair.is_native(), "{legs:?}");
}

#[test]
fn instance_without_a_registration_connection_does_not_serve_until_it_registers_again() {
    let mut bench = DiscoveryBench::new(RouterConfig::default());
    bench.hear(p(Mode::Push).encode());
    bench.hear(d(Mode::Push).encode());
    assert_eq!(bench.states(), [InstanceState::Ready; 2]);
    let link = LinkId(LinkId::INBOUND | 1);
    bench.give(RouterInput::Control(ControlEvent::LinkDown { link }));
    assert_eq!(bench.states(), [InstanceState::Disconnected; 2]);
    assert!(bench.router.instances(bench.now).all(|it| !it.state.serves()));
    assert!(bench.ask().is_empty(), "no leg is sent where no host is known to serve it");
    bench.hear(d(Mode::Push).encode());
    assert_eq!(bench.states(), [InstanceState::Disconnected, InstanceState::Ready]);
    assert_eq!(sent(bench.hear(p(Mode::Push).encode())).len(), 2, "what waited goes at once");
}

#[test]
fn an_instance_gets_legs_once_it_answered_a_probe() {
    let config = RouterConfig { probe: Some(Nanos::from_ms(500)), ..RouterConfig::default() };
    let mut bench = DiscoveryBench::new(config);
    let probe = |effects: &[RouterEffect]| -> Vec<ProbeId> {
        let probe = |effect: &RouterEffect| match effect {
            RouterEffect::Probe { probe, .. } => Some(*probe),
            _ => None,
        };
        effects.iter().filter_map(probe).collect()
    };
    let first = probe(&bench.hear(p(Mode::Push).encode()));
    let second = probe(&bench.hear(d(Mode::Push).encode()));
    assert_eq!((first.len(), second.len()), (1, 1));
    assert!(probe(&bench.hear(p(Mode::Push).encode())).is_empty(), "one probe at a time");
    assert!(bench.ask().is_empty());
    bench.give(RouterInput::Probed { probe: first[0], answers: true, models: None });
    assert_eq!(bench.states(), [InstanceState::Ready, InstanceState::Unproven]);
    bench.give(RouterInput::Probed { probe: second[0], answers: false, models: None });
    let again = probe(&bench.tick());
    assert_eq!((bench.now, &again), (Nanos::from_ms(500), &second));
    // What waited goes at once.
    let effects = bench.give(RouterInput::Probed { probe: second[0], answers: true, models: None });
    assert_eq!(sent(effects).len(), 2);
    assert!(
        bench
            .give(RouterInput::Probed { probe: ProbeId(99), answers: false, models: None })
            .is_empty()
    );
}

#[test]
fn what_is_not_taken_is_listed_with_its_reason() {
    let mut bench =
        DiscoveryBench::new(RouterConfig { instances_max: 2, ..RouterConfig::default() });
    let hostless = beat(Role::Prefill, "10.0.0.1", 6301, 3, Mode::Push).encode();
    for frame in [vec![], b"\xc1k".to_vec(), b"GET / HTTP/1.1".to_vec(), hostless] {
        bench.now = bench.now + Nanos(1);
        bench.hear(frame);
    }
    let text = |it: &str| {
        let mut frame = p(Mode::Push).encode();
        let at = frame.windows(4).position(|window| window == b"host").unwrap();
        frame[at..at + 4].copy_from_slice(it.as_bytes());
        frame
    };
    bench.hear(text("tsoh"));
    let listed: Vec<_> = bench.router.rejections().map(|it| (it.reason, it.at.0)).collect();
    let malformed = RejectReason::Malformed;
    let expected = [
        (malformed, 1),
        (malformed, 2),
        (malformed, 3),
        (RejectReason::DataParallel, 4),
        (RejectReason::Unusable, 4),
    ];
    assert_eq!(listed, expected);
    let last = bench.router.rejections().last().unwrap();
    assert_eq!((&*last.from, &*last.why), ("10.0.0.1:8000", "zmq_address that is none"));
    assert_eq!(bench.router.counters().rejected[&malformed], 3);
    assert_eq!(bench.router.instances(bench.now).count(), 0);
}

#[test]
fn what_was_sent_before_waits_for_its_pause_longer() {
    let config = RouterConfig { wait_max: Nanos::from_secs(1), ..RouterConfig::default() };
    let mut bench = DiscoveryBench::new(RouterConfig { suspicion: Nanos::from_secs(5), ..config });
    bench.hear(p(Mode::Push).encode());
    bench.hear(d(Mode::Push).encode());
    let legs = sent(bench.ask());
    bench.leg(legs[0].leg, LegEvent::Failed(LegFailure::Connection));
    let ended = bench.tick();
    assert_eq!(bench.now, Nanos::from_ms(1_500));
    let failed = ClientAnswer::Failed(LegFailure::Connection);
    assert!(matches!(&ended[..], [RouterEffect::Answer { answer, .. }] if *answer == failed));
}
