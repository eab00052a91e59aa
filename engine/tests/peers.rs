//! Peers find each other, lose each other and find each other again; messages arrive in order and
//! exactly once, whatever the network does.

mod peer_net;

use kvferry_engine::core::Nanos;
use kvferry_engine::core::channel::{ANSWERS_MAX, ChannelConfig};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{ConnectionId, EngineId};
use kvferry_engine::core::peers::PeerEvent;
use kvferry_engine::fabric::FabricError;
use peer_net::*;
use proptest::prelude::*;

const SECOND: Nanos = Nanos::from_secs(1);

fn rate() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), 0..10u64, 0..400u64]
}

fn faults() -> impl Strategy<Value = TestFaults> {
    let delay = prop_oneof![Just(30), 1..3_000u64, 1..400_000u64];
    let rates = (rate(), rate(), rate(), rate());
    (any::<u64>(), rates, prop_oneof![Just(0), 0..40u64], rate(), delay, 1..12_000u64).prop_map(
        |(seed, (loss, duplicate, cut, truncate), mute, refuse, delay, until)| TestFaults {
            seed,
            loss,
            duplicate,
            delay,
            cut: cut / 4,
            mute,
            truncate: truncate / 4,
            refuse,
            until: Nanos::from_ms(until),
        },
    )
}

/// In order, without gaps, of one connection of the sender in one incarnation.
fn check_order(core: &TestCore) -> Result<(), TestCaseError> {
    let mut slots: Vec<ConnectionId> = Vec::new();
    for event in &core.events {
        match event {
            PeerEvent::Up { connection: slot } => slots.push(*slot),
            PeerEvent::Message { connection: slot, .. } => {
                prop_assert!(slots.contains(slot), "not up")
            }
            PeerEvent::Down { connection: slot, .. } => slots.retain(|other| other != slot),
            _ => {}
        }
        prop_assert!(slots.len() <= 1, "two slots up at a time: {slots:?}");
    }
    let mut senders = Vec::new();
    let all = core.events.iter().filter_map(|event| match event {
        PeerEvent::Up { connection: slot } => Some(*slot),
        _ => None,
    });
    for slot in all {
        let received = core.received(slot);
        let numbers: Vec<u32> = received.iter().map(|(_, _, number)| *number).collect();
        prop_assert_eq!(numbers, (0..received.len() as u32).collect::<Vec<_>>());
        let mut from: Vec<_> =
            received.iter().map(|(incarnation, slot, _)| (*incarnation, *slot)).collect();
        from.dedup();
        prop_assert!(from.len() <= 1);
        senders.extend(from);
    }
    let count = senders.len();
    senders.sort_unstable();
    senders.dedup();
    prop_assert_eq!(count, senders.len(), "one link, two connections");
    Ok(())
}

/// Both sides are in one connection, which has delivered everything.
fn check_united(net: &TestNet) -> Result<(), TestCaseError> {
    let (prefill, decode) = (&net.cores[PREFILL], &net.cores[DECODE]);
    let (p, d) = (prefill.up(), decode.up());
    prop_assert_eq!((p.len(), d.len()), (1, 1), "{:?} {:?}", prefill.events, decode.events);
    let fence_key = prefill.peers.info(p[0]).map(|info| info.fence_key);
    prop_assert_eq!(fence_key, decode.peers.info(d[0]).map(|info| info.fence_key));
    let sent = |core: &TestCore, slot| core.sent.get(&slot).copied().unwrap_or(0) as usize;
    prop_assert_eq!(prefill.received(p[0]).len(), sent(decode, d[0]));
    prop_assert_eq!(decode.received(d[0]).len(), sent(prefill, p[0]));
    for core in [prefill, decode] {
        let gauges = core.peers.gauges();
        prop_assert_eq!((gauges.peers, gauges.queued), (1, 0));
    }
    Ok(())
}

/// Both sides send now and then, and decode calls whenever it has nobody.
fn talk(net: &mut TestNet, steps: &[(bool, u8)], pause: Nanos) {
    for (decode, count) in steps {
        let slot = net.reach();
        for _ in 0..*count {
            if *decode {
                let _ = net.send(DECODE, slot);
            } else if let Some(slot) = net.cores[PREFILL].up().first() {
                let _ = net.send(PREFILL, *slot);
            }
        }
        net.run(pause);
    }
}

proptest! {
    #[test]
    fn messages_arrive_in_order_and_once(
        faults in faults(),
        steps in prop::collection::vec((any::<bool>(), 0..20u8), 1..60),
    ) {
        let mut net = TestNet::ready(faults);
        talk(&mut net, &steps, Nanos::from_ms(200));
        let rest = faults.until - net.now;
        net.run(rest + SECOND.scale(9, 1));
        let before = (net.frames, net.dials);
        talk(&mut net, &[(true, 3), (false, 3), (true, 1)], SECOND);
        check_order(&net.cores[PREFILL])?;
        check_order(&net.cores[DECODE])?;
        check_united(&net)?;
        prop_assert!(net.frames - before.0 < 60 && net.dials - before.1 <= 2);
        if faults.truncate == 0 {
            let violations = net.cores.each_ref().map(|core| core.peers.gauges().violations);
            prop_assert_eq!(violations, [0, 0]);
        }
    }

    #[test]
    fn losses_alone_cost_neither_link_nor_peer(
        seed in any::<u64>(),
        loss in 0..20u64,
        duplicate in 0..500u64,
        delay in 1..30_000u64,
        steps in prop::collection::vec((any::<bool>(), 0..20u8), 1..30),
    ) {
        let until = Nanos::MAX;
        let mut net = TestNet::ready(TestFaults { seed, loss, duplicate, delay, until, ..TestFaults::NONE });
        talk(&mut net, &steps, Nanos::from_ms(50));
        net.run(SECOND.scale(3, 1));
        check_order(&net.cores[PREFILL])?;
        check_order(&net.cores[DECODE])?;
        check_united(&net)?;
        prop_assert_eq!((net.dials, net.cores[DECODE].failures()), (1, vec![]));
    }

    #[test]
    fn a_new_incarnation_is_a_new_peer(
        faults in faults(),
        crashes in prop::collection::vec((0..2usize, any::<bool>(), 0..9_000u64), 1..4),
    ) {
        let mut net = TestNet::ready(faults);
        for (core, silently, pause) in crashes {
            talk(&mut net, &[(true, 3), (false, 3)], Nanos::from_ms(pause / 3));
            check_order(&net.cores[PREFILL])?;
            check_order(&net.cores[DECODE])?;
            net.crash(core, silently);
            net.run(Nanos::from_ms(pause));
            net.restart(core, 2);
        }
        talk(&mut net, &[(true, 3), (false, 3)], SECOND);
        let rest = faults.until - net.now;
        net.run(rest + SECOND.scale(9, 1));
        talk(&mut net, &[(true, 3), (false, 3), (true, 1)], SECOND);
        check_order(&net.cores[PREFILL])?;
        check_order(&net.cores[DECODE])?;
        check_united(&net)?;
    }
}

#[test]
fn hellos_wait_for_the_ranks_of_both_sides() {
    let mut net = TestNet::new(me(PREFILL, 1, 2), me(DECODE, 1, 2), TestFaults::NONE);
    let slot = net.reach();
    net.send(DECODE, slot).unwrap();
    net.run(SECOND.scale(60, 1));
    assert_eq!(net.frames, 0);
    net.set_ranks(DECODE, shape(2).1);
    net.run(SECOND);
    assert_eq!(net.cores[DECODE].up(), []);
    net.set_ranks(PREFILL, shape(2).1);
    net.run(SECOND);
    assert_eq!(net.cores[DECODE].up(), [slot]);
    check_united(&net).unwrap();
}

#[test]
fn engines_that_do_not_fit_are_refused_and_both_know_why() {
    let mut net = TestNet::new(me(PREFILL, 1, 2), me(DECODE, 1, 3), TestFaults::NONE);
    net.set_ranks(PREFILL, shape(2).1);
    net.set_ranks(DECODE, shape(3).1);
    net.reach();
    net.run(SECOND);
    let PeerEvent::Refused { engine, failure: Failure::Mismatch(why) } =
        &net.cores[PREFILL].events[0]
    else {
        panic!("{:?}", net.cores[PREFILL].events);
    };
    assert_eq!(*engine, EngineId::from("d"));
    let told = Failure::HelloRefused(format!("engines do not fit: {why}").into());
    assert_eq!(net.cores[DECODE].failures(), std::slice::from_ref(&told));
    let dials = net.dials;
    for _ in 0..100 {
        net.reach();
        net.run(Nanos::from_ms(2));
    }
    assert!(net.dials <= dials + 3, "{} dials", net.dials);
    assert_eq!(net.cores[DECODE].failures().iter().filter(|f| **f != told).count(), 0);
}

#[test]
fn nobody_there_is_unreachable_after_the_hello_time() {
    let mut net = TestNet::ready(TestFaults::NONE);
    net.crash(PREFILL, false);
    net.reach();
    net.run(Nanos::from_ms(1_999));
    assert_eq!(net.cores[DECODE].failures(), []);
    net.run(Nanos::from_ms(1));
    assert_eq!(net.cores[DECODE].failures(), [Failure::Unreachable]);
    assert!((3..10).contains(&net.dials), "{} dials", net.dials);
}

#[test]
fn a_silent_peer_is_down_on_time_and_not_before() {
    let mut net = TestNet::ready(TestFaults::NONE);
    let slot = net.reach();
    net.run(SECOND);
    net.crash(PREFILL, true);
    net.run(Nanos::from_ms(5_900));
    assert_eq!(net.cores[DECODE].up(), [slot]);
    net.run(Nanos::from_ms(1_200));
    assert_eq!(net.cores[DECODE].failures(), [Failure::PeerSilent]);
}

#[test]
fn a_link_that_carries_nothing_is_replaced() {
    for from in [PREFILL, DECODE] {
        let mut net = TestNet::ready(TestFaults::NONE);
        let slot = net.reach();
        net.run(SECOND);
        net.mute(from);
        net.send(DECODE, slot).unwrap();
        let other = net.cores[PREFILL].up()[0];
        net.send(PREFILL, other).unwrap();
        net.run(SECOND.scale(4, 1));
        assert_eq!(net.cores[DECODE].failures(), []);
        check_united(&net).unwrap();
        assert_eq!((net.dials, net.open()), (2, 1));
    }
}

#[test]
fn lost_message_is_repeated_on_time_though_others_follow() {
    let mut net = TestNet::ready(TestFaults::NONE);
    let slot = net.reach();
    net.run(SECOND);
    (net.faults.loss, net.faults.until) = (1_000, net.now + Nanos::from_us(1));
    net.send(DECODE, slot).unwrap();
    let other = net.cores[PREFILL].up()[0];
    let (mut passed, step) = (Nanos::ZERO, Nanos::from_ms(10));
    while net.cores[PREFILL].received(other).is_empty() {
        net.run(step);
        passed = passed + step;
        assert!(passed <= ChannelConfig::default().retransmit + step, "nothing was repeated");
        net.send(DECODE, slot).unwrap();
    }
}

#[test]
fn a_link_that_was_cut_is_replaced_at_once() {
    let mut net = TestNet::ready(TestFaults::NONE);
    let slot = net.reach();
    net.send(DECODE, slot).unwrap();
    net.run(SECOND);
    net.cut_all();
    net.send(DECODE, slot).unwrap();
    net.run(Nanos::from_ms(1));
    check_united(&net).unwrap();
}

#[test]
fn who_was_dialled_gives_up_a_peer_that_does_not_dial_again() {
    let mut net = TestNet::ready(TestFaults::NONE);
    net.reach();
    net.run(SECOND);
    net.crash(DECODE, false);
    net.run(Nanos::from_ms(6_900));
    assert_eq!(net.cores[PREFILL].failures(), []);
    net.run(Nanos::from_ms(200));
    assert_eq!(net.cores[PREFILL].failures(), [Failure::PeerSilent]);
}

#[test]
fn a_link_that_never_lasts_is_given_up() {
    let mut net = TestNet::ready(TestFaults::NONE);
    net.reach();
    for _ in 0..80 {
        net.run(Nanos::from_ms(1_100));
        net.cut_all();
    }
    assert_eq!(net.cores[DECODE].failures(), [Failure::PeerSilent]);
    assert!(net.dials < 40, "{} dials", net.dials);
}

#[test]
fn link_that_is_cut_after_each_message_is_replaced_each_time() {
    let mut net = TestNet::ready(TestFaults::NONE);
    let slot = net.reach();
    for _ in 0..80 {
        net.send(DECODE, slot).unwrap();
        net.run(Nanos::from_ms(1_100));
        net.cut_all();
    }
    assert_eq!(net.cores[DECODE].failures(), []);
    net.run(SECOND);
    check_united(&net).unwrap();
}

#[test]
fn a_process_that_stood_still_does_not_blame_its_peers() {
    for span in [8, 60] {
        let mut net = TestNet::ready(TestFaults::NONE);
        net.reach();
        net.run(SECOND);
        net.pause(DECODE, SECOND.scale(span, 1));
        net.run(SECOND.scale(span + 9, 1));
        assert_eq!(net.cores[DECODE].failures(), []);
        check_united(&net).unwrap();
    }
}

#[test]
fn a_process_that_stood_still_before_it_was_answered_waits_once_more() {
    let mut net = TestNet::ready(TestFaults::NONE);
    net.reach();
    net.pause(DECODE, SECOND.scale(8, 1));
    net.run(SECOND.scale(9, 1));
    assert_eq!(net.cores[DECODE].failures(), []);
    check_united(&net).unwrap();
}

#[test]
fn a_process_that_stands_still_again_and_again_gives_up_a_peer_that_is_not_there() {
    let mut net = TestNet::ready(TestFaults::NONE);
    net.crash(PREFILL, false);
    net.reach();
    for _ in 0..2 {
        assert_eq!(net.cores[DECODE].failures(), []);
        net.pause(DECODE, SECOND.scale(3, 1));
        net.run(Nanos::from_ms(3_100));
    }
    assert_eq!(net.cores[DECODE].failures(), [Failure::Unreachable]);
}

#[test]
fn restarts_are_told_as_such() {
    let mut net = TestNet::ready(TestFaults::NONE);
    for core in [PREFILL, DECODE] {
        net.reach();
        net.run(SECOND);
        net.crash(core, false);
        net.restart(core, 2);
        net.reach();
        net.run(SECOND);
        assert_eq!(net.cores[1 - core].failures().last(), Some(&Failure::PeerRestarted));
        net.reach();
        net.run(SECOND);
        check_united(&net).unwrap();
    }
}

#[test]
fn restart_with_another_geometry_is_refused_and_the_old_peer_ends_by_silence() {
    let mut net = TestNet::ready(TestFaults::NONE);
    net.reach();
    net.run(SECOND);
    net.crash(DECODE, false);
    net.restart(DECODE, 3);
    net.reach();
    net.run(SECOND);
    // A refused hello ends nothing that is under way.
    assert_eq!(net.cores[PREFILL].failures(), []);
    let last = net.cores[PREFILL].events.last();
    assert!(matches!(last, Some(PeerEvent::Refused { .. })), "{last:?}");
    net.run(ChannelConfig::default().silent);
    assert_eq!(net.cores[PREFILL].failures(), [Failure::PeerSilent]);
}

#[test]
fn new_ranks_end_all_conversations_and_new_ones_tell_them() {
    let mut net = TestNet::ready(TestFaults::NONE);
    net.reach();
    net.run(SECOND);
    let mut ranks = shape(2).1;
    net.set_ranks(PREFILL, ranks.clone());
    assert_eq!(net.cores[PREFILL].failures(), []);
    ranks[0].layers[0].base = 1024;
    ranks[0].layers[1].base = 0;
    net.set_ranks(PREFILL, ranks.clone());
    net.run(SECOND);
    assert_eq!(net.cores[PREFILL].failures(), [Failure::Fabric(FabricError::Closed)]);
    assert_eq!(net.cores[DECODE].failures(), [Failure::Fabric(FabricError::PeerGone)]);
    let slot = net.reach();
    net.run(SECOND);
    check_united(&net).unwrap();
    assert_eq!(*net.cores[DECODE].peers.info(slot).unwrap().ranks, ranks);
}

#[test]
fn closing_tells_the_other_side_and_gives_all_links_back() {
    let mut net = TestNet::ready(TestFaults::NONE);
    let slot = net.reach();
    net.run(SECOND);
    net.close(DECODE, slot);
    net.run(SECOND.scale(3, 1));
    assert_eq!(net.cores[DECODE].failures(), []);
    assert_eq!(net.cores[PREFILL].failures(), [Failure::Fabric(FabricError::PeerGone)]);
    for core in &net.cores {
        assert_eq!((core.peers.gauges().links, core.peers.deadline()), (0, None));
    }
    assert_eq!(net.send(DECODE, slot), Err(Failure::PeerSilent));
}

#[test]
fn a_full_queue_is_overload() {
    let mut net = TestNet::ready(TestFaults::NONE);
    let slot = net.reach();
    let asked = (0..70_000).take_while(|_| net.ask(DECODE, slot).is_ok()).count();
    assert_eq!(asked, 65_536);
    assert_eq!(net.ask(DECODE, slot), Err(Failure::Overload));
    let more = (0..70_000).take_while(|_| net.send(DECODE, slot).is_ok()).count();
    assert_eq!(more, ANSWERS_MAX as usize, "which the peer waits for");
    assert_eq!(net.send(DECODE, slot), Err(Failure::Overload));
    net.run(SECOND);
    check_united(&net).unwrap();
}

#[test]
fn strangers_are_hung_up() {
    let mut net = TestNet::ready(TestFaults::NONE);
    net.stranger(900, None);
    net.stranger(901, None);
    net.stranger(901, Some(vec![b"GET / HTTP/1.1\r\n\r\n".to_vec()]));
    net.run(Nanos::from_ms(1));
    assert_eq!(net.cores[PREFILL].peers.gauges().links, 1);
    assert_eq!(net.cores[PREFILL].peers.gauges().violations, 1);
    net.run(SECOND.scale(2, 1));
    assert_eq!(net.cores[PREFILL].peers.gauges().links, 0);
}
