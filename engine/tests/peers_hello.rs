//! What is refused or ignored at the hello and after: wrong peers, damaged hellos, frames of the
//! past and of others.

mod peer_net;

use kvferry_engine::core::Nanos;
use kvferry_engine::core::channel::{ChannelConfig, WINDOW};
use kvferry_engine::core::command::ControlCommand;
use kvferry_engine::core::dialect::native::{self, ConnectionHeader, Frame, VERSION, VERSION_MIN};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::*;
use kvferry_engine::core::message::{AttemptTag, Hello, Message, Role};
use kvferry_engine::core::peers::{PeerEvent, PeerTurn, Peers};
use peer_net::*;

const SECOND: Nanos = Nanos::from_secs(1);

/// A flawless hello of the decode.
fn hello(incarnation: u64, session: u64) -> Hello {
    let (geometry, ranks) = shape(2);
    Hello {
        version: VERSION,
        version_min: VERSION,
        engine: "d".into(),
        incarnation: Incarnation(incarnation),
        session,
        expects: "p".into(),
        role: Role::Decode,
        capabilities: 3,
        fingerprint: geometry.fingerprint(),
        geometry,
        ranks,
    }
}

/// Says hello to the prefill by a link of its own.
fn say(net: &mut TestNet, link: u32, hello: Hello) {
    let frame = native::encode(&Frame::Hello(Box::new(hello)));
    net.stranger(link, None);
    net.stranger(link, Some(vec![frame]));
    net.run(Nanos::from_ms(1));
}

/// A hello with a flaw, and the beginning of its refusal.
type FlawedHello = (fn(&mut Hello), String);

fn flaws() -> [FlawedHello; 6] {
    let other = VERSION + 1;
    let ranges = format!("p speaks protocol versions 1 to {VERSION}, d {other} to {other}");
    [
        (|hello| (hello.version, hello.version_min) = (VERSION + 1, VERSION + 1), ranges),
        (|hello| hello.expects = "q".into(), "d expects q, this is p".into()),
        (|hello| hello.role = Role::Prefill, "p and d are both prefill".into()),
        (|hello| hello.fingerprint ^= 1, "geometry of d is damaged".into()),
        (|hello| hello.geometry.kv_heads = 2, "geometry of d is damaged".into()),
        (|hello| hello.capabilities = 4, "p and d share no transfer mode".into()),
    ]
}

#[test]
fn flaws_are_refused_with_a_reason() {
    let mut net = TestNet::ready(TestFaults::NONE);
    for (link, (flaw, expected)) in flaws().iter().enumerate() {
        let mut hello = hello(1, 1);
        flaw(&mut hello);
        say(&mut net, 900 + link as u32, hello);
        let Some(PeerEvent::Refused { failure: Failure::HelloRefused(reason), .. }) =
            net.cores[PREFILL].events.last()
        else {
            panic!("{expected}: {:?}", net.cores[PREFILL].events);
        };
        assert!(reason.starts_with(expected), "{reason}");
        assert_eq!(net.cores[PREFILL].events.len(), link + 1);
    }
    assert_eq!(net.cores[PREFILL].peers.gauges().peers, 0);
    say(&mut net, 999, hello(1, 1));
    assert_eq!(net.cores[PREFILL].up().len(), 1);
}

#[test]
fn refused_hello_leaves_the_connection_of_its_engine_up() {
    let mut net = TestNet::ready(TestFaults::NONE);
    say(&mut net, 900, hello(5, 7));
    let up = net.cores[PREFILL].up();
    // A hello of the same session, of a later session, and of a later incarnation.
    let lives = [(5, 7), (5, 8), (6, 1)];
    let cases = flaws().into_iter().flat_map(|flaw| lives.map(|life| (flaw.clone(), life)));
    for (link, ((flaw, expected), (incarnation, session))) in cases.enumerate() {
        let mut hello = hello(incarnation, session);
        flaw(&mut hello);
        say(&mut net, 910 + link as u32, hello);
        let core = &net.cores[PREFILL];
        assert_eq!((core.up(), core.failures()), (up.clone(), vec![]), "{expected}: {session}");
    }
    // The link of the first hello still carries the connection.
    let envelope =
        ConnectionHeader { version: VERSION, from: Incarnation(5), to: Incarnation(1), session: 7 };
    net.stranger(900, Some(vec![native::encode(&data(envelope, 0))]));
    net.run(Nanos::from_ms(1));
    assert_eq!(net.cores[PREFILL].received(up[0]).len(), 1);
    assert_eq!(net.cores[PREFILL].peers.gauges().peers, 1);
}

#[test]
fn hello_without_room_for_it_leaves_the_connection_of_its_engine_up() {
    let mut net = limited(2, 64);
    say(&mut net, 900, hello(5, 7));
    let up = net.cores[PREFILL].up();
    net.cores[PREFILL].peers.reserve(2);
    say(&mut net, 901, hello(5, 8));
    assert_eq!((net.cores[PREFILL].up(), overloads(&net.cores[PREFILL])), (up, 1));
}

#[test]
fn hellos_of_the_past_change_nothing() {
    let mut net = TestNet::ready(TestFaults::NONE);
    say(&mut net, 900, hello(5, 7));
    let up = net.cores[PREFILL].up();
    for (link, (incarnation, session)) in [(4, 9), (5, 6), (0, 0)].into_iter().enumerate() {
        say(&mut net, 901 + link as u32, hello(incarnation, session));
        assert_eq!(net.cores[PREFILL].up(), up);
    }
    let slot = up[0];
    net.close(PREFILL, slot);
    say(&mut net, 910, hello(5, 7));
    assert_eq!(net.cores[PREFILL].peers.gauges().peers, 0, "a session that is over resumed");
    say(&mut net, 911, hello(5, 8));
    assert_eq!(net.cores[PREFILL].peers.gauges().peers, 1);
}

#[test]
fn the_next_session_of_an_incarnation_replaces_the_one_before() {
    let mut net = TestNet::ready(TestFaults::NONE);
    say(&mut net, 900, hello(5, 7));
    say(&mut net, 901, hello(5, 8));
    assert_eq!(net.cores[PREFILL].failures(), [Failure::PeerSilent]);
    assert_eq!(net.cores[PREFILL].up().len(), 1);
}

/// A restart with a clock that went back, and no place where the last incarnation was noted.
#[test]
fn an_incarnation_that_seems_to_be_before_the_last_one_is_let_in_when_that_is_over() {
    for core in [PREFILL, DECODE] {
        let mut net = TestNet::new(me(PREFILL, 5, 2), me(DECODE, 5, 2), TestFaults::NONE);
        for core in [PREFILL, DECODE] {
            net.set_ranks(core, shape(2).1);
        }
        net.reach();
        net.run(SECOND);
        assert_eq!(net.cores[DECODE].up().len(), 1);
        net.restart_as(core, 3, 2);
        let begun = net.now;
        while net.cores[core].up().is_empty() {
            net.reach();
            net.run(SECOND);
            let waited = net.now - begun;
            assert!(
                waited < Nanos::from_secs(20),
                "core {core}: {:?}",
                net.cores[DECODE].failures()
            );
        }
        // From then on it is an incarnation like any other.
        net.restart_as(core, 4, 2);
        net.reach();
        net.run(SECOND);
        net.reach();
        net.run(SECOND);
        assert_eq!(net.cores[core].up().len(), 1, "core {core}");
    }
}

#[test]
fn an_incarnation_that_is_over_ends_nothing_though_it_is_higher() {
    let mut net = TestNet::new(me(PREFILL, 5, 2), me(DECODE, 5, 2), TestFaults::NONE);
    for core in [PREFILL, DECODE] {
        net.set_ranks(core, shape(2).1);
    }
    say(&mut net, 900, hello(5, 7));
    say(&mut net, 901, hello(3, 1));
    net.run(ChannelConfig::default().silent);
    say(&mut net, 902, hello(3, 1));
    let up = net.cores[PREFILL].up();
    say(&mut net, 903, hello(5, 7));
    assert_eq!(net.cores[PREFILL].up(), up);
    assert_eq!(net.cores[PREFILL].failures(), [Failure::PeerSilent]);
}

#[test]
fn an_incarnation_that_seems_to_be_before_one_that_is_here_is_told_so() {
    let mut net = TestNet::ready(TestFaults::NONE);
    say(&mut net, 900, hello(5, 7));
    let told = net.cores[PREFILL].up();
    let Hello { engine, .. } = hello(4, 1);
    let refused = |net: &TestNet| {
        net.said_by_prefill.iter().rev().find_map(|frame| match native::decode(frame) {
            Ok(Frame::Refuse { envelope, reason, .. }) => Some((envelope, reason)),
            _ => None,
        })
    };
    for link in [901, 902] {
        say(&mut net, link, hello(4, 1));
        assert_eq!(refused(&net), None, "nobody knows yet whether the other is there");
        let last = net.said_by_prefill.last().map(|frame| native::decode(frame));
        assert!(matches!(last, Some(Ok(Frame::Bye { .. }))), "{last:?}");
    }
    let version = native::VERSION;
    let (from, to) = (Incarnation(5), Incarnation(1));
    let envelope = ConnectionHeader { version, from, to, session: 7 };
    let here = native::encode(&Frame::Ack { envelope, next: 0 });
    net.stranger(900, Some(vec![here]));
    net.run(Nanos::from_ms(1));
    say(&mut net, 903, hello(4, 1));
    let (envelope, reason) = refused(&net).expect("it is told");
    assert_eq!((envelope.to, net.cores[PREFILL].up()), (Incarnation(4), told));
    assert!(
        reason.starts_with(&format!("incarnation 4 of {engine} seems to be before 5")),
        "{reason}"
    );
}

#[test]
fn a_later_incarnation_is_not_judged_by_one_that_did_not_fit() {
    let mut net = TestNet::new(me(PREFILL, 1, 3), me(DECODE, 1, 2), TestFaults::NONE);
    net.set_ranks(PREFILL, shape(3).1);
    net.set_ranks(DECODE, shape(2).1);
    net.reach_incarnation(Some(Incarnation(1)));
    net.run(Nanos::from_ms(1));
    assert_eq!(net.cores[DECODE].failures().len(), 1);
    net.restart(PREFILL, 2);
    for (incarnation, ups) in [(Some(Incarnation(1)), 0), (None, 0), (Some(Incarnation(2)), 1)] {
        net.reach_incarnation(incarnation);
        net.run(Nanos::from_ms(1));
        assert_eq!(net.cores[DECODE].up().len(), ups, "{incarnation:?}");
    }
}

#[test]
fn another_engine_may_not_answer() {
    let mut net = TestNet::new(me(PREFILL, 1, 2), me(DECODE, 1, 2), TestFaults::NONE);
    net.set_ranks(DECODE, shape(2).1);
    net.reach();
    net.run(Nanos::from_ms(1));
    let welcome =
        Hello { engine: "q".into(), expects: "d".into(), role: Role::Prefill, ..hello(1, 1) };
    net.forge(DECODE, &Frame::Welcome(Box::new(welcome)));
    net.run(Nanos::from_ms(1));
    let failures = net.cores[DECODE].failures();
    assert_eq!(failures, [Failure::HelloRefused("dialled p, q answered".into())]);
}

#[test]
fn an_answer_to_another_engine_is_ignored() {
    let mut net = TestNet::new(me(PREFILL, 1, 2), me(DECODE, 1, 2), TestFaults::NONE);
    net.set_ranks(DECODE, shape(2).1);
    net.reach();
    net.run(Nanos::from_ms(1));
    let welcome =
        Hello { engine: "p".into(), expects: "e".into(), role: Role::Prefill, ..hello(1, 1) };
    net.forge(DECODE, &Frame::Welcome(Box::new(welcome)));
    net.set_ranks(PREFILL, shape(2).1);
    net.run(SECOND);
    assert_eq!((net.cores[DECODE].failures(), net.cores[DECODE].up().len()), (vec![], 1));
}

#[test]
fn two_engines_on_one_link_go_on_by_others() {
    let mut net = TestNet::ready(TestFaults::NONE);
    let slot = net.reach();
    net.run(Nanos::from_ms(1));
    let up = net.cores[PREFILL].up();
    let other = Hello { engine: "e".into(), ..hello(1, 1) };
    net.forge(PREFILL, &Frame::Hello(Box::new(other)));
    net.run(SECOND);
    net.send(DECODE, slot).unwrap();
    net.run(SECOND);
    assert_eq!((net.cores[PREFILL].up(), net.cores[DECODE].failures()), (up.clone(), vec![]));
    assert_eq!((net.cores[PREFILL].received(up[0]).len(), net.dials), (1, 2));
}

#[test]
fn an_engine_that_lost_its_link_to_another_is_not_kept_for_ever() {
    let mut net = TestNet::ready(TestFaults::NONE);
    say(&mut net, 900, Hello { engine: "e".into(), ..hello(1, 1) });
    let second = native::encode(&Frame::Hello(Box::new(hello(1, 1))));
    net.stranger(900, Some(vec![second]));
    net.run(Nanos::from_ms(1));
    say(&mut net, 901, hello(1, 1));
    net.run(ChannelConfig::default().silent);
    assert_eq!(net.cores[PREFILL].failures(), [Failure::PeerSilent]);
    assert_eq!(net.cores[PREFILL].up().len(), 1);
}

fn data(envelope: ConnectionHeader, seq: u64) -> Frame {
    let key = TransferKey { id: "t".into(), prompt: 1 };
    let message =
        Message::Cancel { tag: AttemptTag { key, sibling: 1, attempt: Attempt(seq as u32) } };
    Frame::Data { envelope, seq, message }
}

#[test]
fn frames_of_other_lives_and_sessions_are_ignored_and_counted() {
    let mut net = TestNet::ready(TestFaults::NONE);
    net.reach();
    net.run(SECOND);
    let right =
        ConnectionHeader { version: VERSION, from: Incarnation(1), to: Incarnation(1), session: 1 };
    let wrong = [
        ConnectionHeader { from: Incarnation(2), ..right },
        ConnectionHeader { to: Incarnation(2), ..right },
        ConnectionHeader { session: 2, ..right },
    ];
    for envelope in wrong {
        net.forge(PREFILL, &data(envelope, 0));
        net.forge(PREFILL, &Frame::Ack { envelope, next: 9 });
    }
    // A later incarnation of the peer may end the connection of this one.
    let earlier = ConnectionHeader { from: Incarnation(0), ..right };
    for envelope in [earlier, wrong[1], wrong[2]] {
        net.forge(PREFILL, &Frame::Bye { envelope });
    }
    net.run(Nanos::from_ms(1));
    let TestCore { peers, events, .. } = &net.cores[PREFILL];
    assert_eq!((peers.stale(), peers.gauges().violations, events.len()), (9, 0, 1));
    net.forge(PREFILL, &data(right, 0));
    net.run(Nanos::from_ms(1));
    assert_eq!(net.cores[PREFILL].events.len(), 2);
}

#[test]
fn broken_rules_are_counted_and_cost_only_the_frame() {
    let mut net = TestNet::ready(TestFaults::NONE);
    let slot = net.reach();
    net.run(SECOND);
    let right =
        ConnectionHeader { version: VERSION, from: Incarnation(1), to: Incarnation(1), session: 1 };
    net.forge(PREFILL, &data(right, WINDOW));
    net.forge(PREFILL, &Frame::Ack { envelope: right, next: 1 });
    net.forge(PREFILL, &Frame::Welcome(Box::new(hello(1, 1))));
    net.forge(DECODE, &Frame::Hello(Box::new(hello(1, 1))));
    net.run(Nanos::from_ms(1));
    assert_eq!(net.cores[PREFILL].peers.gauges().violations, 3);
    assert_eq!(net.cores[DECODE].peers.gauges().violations, 1);
    let last = net.cores[DECODE].events.last();
    assert!(matches!(last, Some(PeerEvent::Violation(what)) if &*what.peer == "p"), "{last:?}");
    net.send(DECODE, slot).unwrap();
    net.run(Nanos::from_ms(1));
    assert_eq!(net.cores[PREFILL].received(net.cores[PREFILL].up()[0]).len(), 1);
}

fn limited(peers_max: u32, links_max: u32) -> TestNet {
    let config = ChannelConfig { peers_max, links_max, ..ChannelConfig::default() };
    let mut net = TestNet::new(me(PREFILL, 1, 2), me(DECODE, 1, 2), TestFaults::NONE);
    for core in [PREFILL, DECODE] {
        net.cores[core].peers = Peers::new(config.clone(), me(core, 1, 2), false);
        net.set_ranks(core, shape(2).1);
    }
    net
}

fn overloads(core: &TestCore) -> usize {
    let overload =
        |event: &&PeerEvent| matches!(event, PeerEvent::Refused { failure: Failure::Overload, .. });
    core.events.iter().filter(overload).count()
}

#[test]
fn a_peer_above_the_limit_is_refused_until_there_is_room() {
    let mut net = limited(2, 64);
    let of = |engine: &str, session| Hello { engine: engine.into(), ..hello(1, session) };
    say(&mut net, 900, of("d", 1));
    say(&mut net, 901, of("e", 1));
    say(&mut net, 902, of("f", 1));
    let prefill = &net.cores[PREFILL];
    assert_eq!((prefill.up().len(), overloads(prefill)), (2, 1));
    assert_eq!(prefill.peers.gauges().peers, 2);
    // One that is known may come again.
    say(&mut net, 903, of("e", 2));
    assert_eq!((net.cores[PREFILL].up().len(), overloads(&net.cores[PREFILL])), (2, 1));
    // One that is gone but not done with takes its place all the same.
    let first = net.cores[PREFILL].up()[0];
    net.cores[PREFILL].peers.reserve(1);
    net.close(PREFILL, first);
    say(&mut net, 904, of("f", 2));
    assert_eq!(overloads(&net.cores[PREFILL]), 2);
    net.cores[PREFILL].peers.reserve(0);
    say(&mut net, 905, of("f", 3));
    assert_eq!((net.cores[PREFILL].peers.gauges().peers, overloads(&net.cores[PREFILL])), (2, 2));
}

#[test]
fn of_peers_that_are_gone_the_one_for_longest_is_forgotten() {
    let mut net = limited(2, 64);
    let of = |engine: &str, session| Hello { engine: engine.into(), ..hello(1, session) };
    // The last in the order of names is the first to go.
    for (link, engine) in ["z", "b"].into_iter().enumerate() {
        say(&mut net, 900 + link as u32, of(engine, 5));
        let slot = net.cores[PREFILL].up()[0];
        net.cores[PREFILL].events.clear();
        net.close(PREFILL, slot);
    }
    say(&mut net, 902, of("c", 5));
    say(&mut net, 903, of("b", 5));
    assert_eq!(net.cores[PREFILL].up().len(), 1, "a connection that is over resumed");
    say(&mut net, 904, of("z", 5));
    assert_eq!(net.cores[PREFILL].up().len(), 2, "remembered for longer than there is room");
    // What goes on is not forgotten, whatever comes: the hello of the past changes nothing.
    say(&mut net, 905, of("a", 1));
    assert_eq!(overloads(&net.cores[PREFILL]), 1);
    let up = net.cores[PREFILL].up();
    say(&mut net, 906, of("c", 4));
    assert_eq!(net.cores[PREFILL].up(), up);
}

#[test]
fn the_newest_version_that_both_speak_is_kept_and_said() {
    for (newest, agreed) in [(1, 1), (VERSION, VERSION), (VERSION + 7, VERSION)] {
        let mut net = TestNet::ready(TestFaults::NONE);
        say(&mut net, 900, Hello { version: newest, version_min: 1, ..hello(1, 1) });
        let slot = net.cores[PREFILL].up()[0];
        assert_eq!(net.cores[PREFILL].peers.info(slot).unwrap().version, agreed);
        // A frame of any other version is none of this connection.
        for version in VERSION_MIN..=VERSION {
            let envelope =
                ConnectionHeader { version, from: Incarnation(1), to: Incarnation(1), session: 1 };
            net.stranger(900, Some(vec![native::encode(&data(envelope, 0))]));
        }
        net.run(Nanos::from_ms(1));
        let gauges = net.cores[PREFILL].peers.gauges();
        assert_eq!(gauges.violations, u32::from(VERSION - VERSION_MIN));
        assert_eq!(net.cores[PREFILL].received(slot).len(), 1, "{agreed}");
    }
}

/// What becomes of an attempt of the decode to reach another prefill.
fn reach_another(net: &mut TestNet) -> (Vec<ControlCommand>, Vec<PeerEvent>) {
    let (mut commands, mut events) = (Vec::new(), Vec::new());
    let turn = &mut PeerTurn { now: net.now, commands: &mut commands, events: &mut events };
    net.cores[DECODE].peers.reach(&"q".into(), &"tcp://q".into(), None, turn);
    (commands, events)
}

fn is_overload((_, events): &(Vec<ControlCommand>, Vec<PeerEvent>)) -> bool {
    matches!(events[..], [PeerEvent::Down { failure: Failure::Overload, .. }])
}

#[test]
fn a_decode_reaches_no_more_peers_and_opens_no_more_links_than_its_limits() {
    for (peers_max, links_max) in [(1, 64), (64, 1)] {
        let mut net = limited(peers_max, links_max);
        let slot = net.reach();
        net.run(SECOND);
        assert_eq!(net.cores[DECODE].up(), [slot]);
        let out = reach_another(&mut net);
        assert!(is_overload(&out) && out.0.is_empty(), "{out:?}");
        assert_eq!(net.reach(), slot, "a peer that is there can be used");
        net.close(DECODE, slot);
        // The link stands for a while, so that the goodbye gets through.
        assert_eq!(is_overload(&reach_another(&mut net)), links_max == 1);
        net.run(SECOND + SECOND);
        assert_eq!(reach_another(&mut net).1, []);
    }
}

#[test]
fn a_link_above_the_limit_is_not_opened_to_mend_another() {
    let mut net = limited(64, 1);
    let slot = net.reach();
    net.run(SECOND);
    net.mute(PREFILL);
    let dials = net.dials;
    for _ in 0..80 {
        net.run(Nanos::from_ms(100));
        assert!(net.cores[DECODE].peers.gauges().links <= 1);
    }
    assert_eq!((net.dials, net.cores[DECODE].failures()), (dials, vec![Failure::PeerSilent]));
    assert!(!net.cores[DECODE].up().contains(&slot));
}

#[test]
fn links_of_strangers_above_the_limit_are_closed_at_once() {
    let mut net = limited(64, 2);
    for link in 900..903 {
        net.stranger(link, None);
    }
    net.run(Nanos::from_ms(1));
    assert_eq!(net.cores[PREFILL].peers.gauges().links, 2);
    let frame = native::encode(&Frame::Hello(Box::new(hello(1, 1))));
    net.stranger(902, Some(vec![frame.clone()]));
    net.run(Nanos::from_ms(1));
    assert_eq!(net.cores[PREFILL].up(), [], "its link is not there");
    // Who says nothing makes room.
    net.run(SECOND + SECOND);
    assert_eq!(net.cores[PREFILL].peers.gauges().links, 0);
    net.stranger(903, None);
    net.stranger(903, Some(vec![frame]));
    net.run(Nanos::from_ms(1));
    assert_eq!(net.cores[PREFILL].up().len(), 1);
}
