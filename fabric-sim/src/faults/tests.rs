use super::*;
use crate::dma::{Ack, Bytes};
use crate::testing::{run, two_and_two};
use engine::fabric::Landed;
use scenarios::lists::MessageName;
use scenarios::run::{Cut, Fault, Span, Trigger};

const T: Nanos = Nanos(1_000);

fn fault(kind: FaultKind, trigger: Trigger) -> Fault {
    Fault {
        key: kind as u64 + 77,
        line: 1,
        kind,
        trigger,
        target: None,
        from: None,
        to: None,
        message: None,
        lasts: None,
        times: 1,
        delay: None,
        factor: 1,
        rank: None,
        direction: Cut::Symmetric,
        first: Order::Either,
        becomes: None,
    }
}

fn on(event: Event, nth: u32) -> Trigger {
    Trigger::On { event, from: None, to: None, message: None, nth }
}

fn engine(faults: Vec<Fault>) -> Faults {
    Faults::new(&run(two_and_two(), faults))
}

fn op(from: u16, to: u16, nth: u64) -> Spot {
    Spot { nth, ..Spot::between(from, to) }
}

fn frame(from: u16, to: u16, message: MessageName) -> Spot {
    Spot { message: Some(message), ..Spot::between(from, to) }
}

fn actions(faults: &mut Faults) -> Vec<Action> {
    let mut actions = Vec::new();
    faults.take_actions(&mut actions);
    actions
}

#[test]
fn the_nth_operation_of_the_named_instance_is_hit() {
    let mut lost = fault(FaultKind::AckLost, on(Event::OpPosted, 2));
    lost.trigger = Trigger::On {
        event: Event::OpPosted,
        from: Some("p1".into()),
        to: None,
        message: None,
        nth: 2,
    };
    let mut faults = engine(vec![lost]);
    let fates: Vec<Ack> = [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2)]
        .map(|(from, nth)| faults.op_fate(T, &op(from, 2, nth)).ack)
        .into();
    assert_eq!(fates, [Ack::Given, Ack::Given, Ack::Given, Ack::Lost, Ack::Given]);
}

#[test]
fn a_fault_of_a_time_waits_for_what_it_concerns() {
    let mut loss = fault(FaultKind::Loss, Trigger::At(T));
    loss.message = Some(MessageName::Delivered);
    let mut faults = engine(vec![loss]);
    assert_eq!(faults.deadline(), Some(T));
    faults.tick(T);
    assert!(!faults.frame_fate(T, &frame(0, 2, MessageName::Ack)).drop);
    assert_eq!(faults.last_fault(Nanos(5_000)), Nanos(5_000));
    assert!(faults.frame_fate(T, &frame(0, 2, MessageName::Delivered)).drop);
    assert!(!faults.frame_fate(T, &frame(0, 2, MessageName::Delivered)).drop);
    assert_eq!(faults.last_fault(Nanos(5_000)), T);
}

#[test]
fn removing_a_fault_changes_no_draw_of_another() {
    let chance = |kind| Fault { times: u32::MAX, ..fault(kind, Trigger::Chance(300_000)) };
    let lost = chance(FaultKind::AckLost);
    let late = Fault { delay: Some(Span::fixed(Nanos(9))), ..chance(FaultKind::LateLanding) };
    let hits = |faults: Vec<Fault>| -> Vec<Ack> {
        let mut faults = engine(faults);
        (0..200).map(|n| faults.op_fate(T, &op(n as u16 % 2, 2, n / 2)).ack).collect()
    };
    let alone = hits(vec![lost.clone()]);
    assert_eq!(alone, hits(vec![late, lost]));
    assert!(alone.contains(&Ack::Lost) && alone.contains(&Ack::Given));
}

#[test]
fn the_worst_fate_wins_and_delays_add_up() {
    let always = |kind| Fault {
        times: u32::MAX,
        delay: Some(Span::fixed(Nanos(10))),
        ..fault(kind, Trigger::Chance(1_000_000))
    };
    let mut faults = engine(vec![
        always(FaultKind::NotifyOvertakes),
        always(FaultKind::CompletionReorder),
        always(FaultKind::CompletionReorder),
        always(FaultKind::LateLanding),
        always(FaultKind::AckLost),
        always(FaultKind::CompletionLost),
    ]);
    assert_eq!(faults.placement(), Placement::OnQuiet);
    let fate = faults.op_fate(T, &op(0, 2, 0));
    assert_eq!(fate.ack_delay, Nanos(20));
    assert_eq!(fate.ack, Ack::Never);
    assert!(matches!(fate.bytes, Bytes::Fails { landed: Landed::Unknown, late: Some(_), .. }));
}

#[test]
fn windows_end_once_the_last_one_of_a_pair_does() {
    let cut = |at, lasts| Fault {
        from: Some("p0".into()),
        to: Some("d0".into()),
        direction: Cut::OneWay,
        lasts: Some(Span::fixed(Nanos(lasts))),
        ..fault(FaultKind::Partition, Trigger::At(Nanos(at)))
    };
    let mut faults = engine(vec![cut(10, 100), cut(50, 100)]);
    let cut = |cut| Action::Cut { from: 0, to: 2, cut };
    faults.tick(Nanos(10));
    faults.tick(Nanos(50));
    assert_eq!(actions(&mut faults), [cut(true), cut(true)]);
    assert!(!faults.frame_fate(T, &frame(2, 0, MessageName::Ack)).drop);
    faults.tick(Nanos(110));
    assert_eq!(actions(&mut faults), []);
    assert!(faults.frame_fate(T, &frame(0, 2, MessageName::Ack)).drop);
    faults.tick(Nanos(150));
    assert_eq!(actions(&mut faults), [cut(false)]);
    assert!(!faults.frame_fate(T, &frame(0, 2, MessageName::Ack)).drop);
    assert_eq!(faults.last_fault(Nanos(999)), Nanos(150));
    assert_eq!(faults.deadline(), None);
}

#[test]
fn healing_ends_what_passes_and_leaves_what_is_for_good() {
    let pair = |fault: Fault| Fault { from: Some("p0".into()), to: Some("d0".into()), ..fault };
    let mut faults = engine(vec![
        pair(fault(FaultKind::OneWayPermanent, Trigger::At(T))),
        pair(Fault {
            lasts: Some(Span::fixed(Nanos::from_secs(1))),
            ..fault(FaultKind::HalfOpen, Trigger::At(T))
        }),
        fault(FaultKind::Loss, Trigger::Chance(1_000_000)),
        fault(FaultKind::Crash, Trigger::At(Nanos::from_secs(2))),
    ]);
    faults.tick(T);
    assert_eq!(faults.last_fault(Nanos(7_000)), Nanos(7_000));
    faults.heal(Nanos(8_000));
    assert_eq!(faults.last_fault(Nanos(9_000)), Nanos(8_000));
    assert!(faults.frame_fate(T, &frame(0, 2, MessageName::Pull)).drop);
    assert!(!faults.frame_fate(T, &frame(2, 0, MessageName::Pull)).drop);
    faults.tick(Nanos::MAX);
    assert_eq!(actions(&mut faults), []);
}

#[test]
fn a_crash_of_a_host_hits_all_its_ranks() {
    let mut run = run(two_and_two(), Vec::new());
    run.instances[0].host = "h".into();
    run.instances[1].host = "h".into();
    run.faults = vec![Fault {
        target: Some("h".into()),
        ..fault(FaultKind::Crash, on(Event::RequestPrefilled, 1))
    }];
    let mut faults = Faults::new(&run);
    faults.on_event(T, Event::RequestPrefilled, &Spot::at(3));
    let crash = |instance| Action::Crash { instance, back_after: None, becomes: None };
    assert_eq!(actions(&mut faults), [crash(0), crash(1)]);
}

#[test]
fn decode_legs_are_lost_and_prefill_legs_are_not() {
    let lost = fault(FaultKind::DecodeLegLost, on(Event::RequestArrived, 1));
    let mut faults = engine(vec![lost]);
    faults.on_event(T, Event::RequestArrived, &Spot::at(ROUTER));
    assert_eq!(faults.leg_fate(T, false, &Spot::between(ROUTER, 0)), LegFate::default());
    assert!(faults.leg_fate(T, true, &Spot::between(ROUTER, 2)).lost);
}

#[test]
fn hits_are_counted_by_the_phase_of_the_transfer() {
    let mut faults = engine(vec![fault(FaultKind::Loss, on(Event::FrameSent, 2))]);
    faults.frame_fate(T, &frame(2, 0, MessageName::Announce));
    faults.on_event(T, Event::TransferWriting, &Spot::between(0, 2));
    faults.frame_fate(T, &frame(2, 0, MessageName::Ack));
    let found: Vec<_> = faults.coverage().iter().map(|(key, n)| (*key, *n)).collect();
    assert_eq!(found, [((FaultKind::Loss, Phase::Moving), 1)]);
    let mut hits = Vec::new();
    faults.take_hits(&mut hits);
    assert_eq!(hits, [Hit { kind: FaultKind::Loss, from: Some(2), to: Some(0) }]);
}

#[test]
fn a_raced_read_ends_with_its_lease() {
    for (first, done_first) in [(Order::Late, true), (Order::Early, false)] {
        let race = Fault { first, ..fault(FaultKind::ExpiryRace, on(Event::OpPosted, 1)) };
        let mut faults = engine(vec![race]);
        assert_eq!(faults.op_fate(T, &op(2, 0, 0)).not_before, Nanos::ZERO);
        let at = Nanos::from_secs(27);
        let read = Spot { lease: Some(at), ..op(2, 0, 1) };
        assert_eq!(faults.op_fate(T, &read).not_before, at);
        assert_eq!(actions(&mut faults), [Action::Race { instance: 2, at, done_first }]);
        assert!(faults.frame_fate(T, &frame(2, 0, MessageName::Renew)).drop);
        assert!(!faults.frame_fate(at, &frame(2, 0, MessageName::Renew)).drop);
    }
}

#[test]
fn a_core_is_healed_of_everything_and_the_rest_of_nothing() {
    let pair = |kind, from: &str, to: &str| Fault {
        from: Some(from.into()),
        to: Some(to.into()),
        lasts: Some(Span::fixed(Nanos::from_secs(1))),
        ..fault(kind, Trigger::At(T))
    };
    let pause = |target: &str| Fault {
        target: Some(target.into()),
        lasts: Some(Span::fixed(Nanos::from_secs(1))),
        ..fault(FaultKind::Pause, Trigger::At(T))
    };
    let mut faults = engine(vec![
        pair(FaultKind::OneWayPermanent, "p0", "d0"),
        pair(FaultKind::OneWayPermanent, "p1", "d0"),
        pair(FaultKind::HalfOpen, "p0", "d1"),
        pause("p0"),
        pause("d1"),
        pause("router"),
        fault(FaultKind::Crash, Trigger::At(Nanos::from_secs(2))),
    ]);
    faults.tick(T);
    actions(&mut faults);
    faults.settle(Nanos(8_000), &[0, 2].into());
    let goes_on = |instance| Action::Pause { instance, paused: false };
    assert_eq!(actions(&mut faults), [goes_on(0), goes_on(ROUTER)]);
    let lasting: Vec<_> = faults.lasting().collect();
    assert_eq!(lasting, [(1, Some(2)), (0, Some(3)), (3, None)]);
    assert!(!faults.frame_fate(T, &frame(0, 2, MessageName::Grant)).drop);
    assert!(faults.frame_fate(T, &frame(1, 2, MessageName::Grant)).drop);
    faults.tick(Nanos::MAX);
    assert_eq!(actions(&mut faults), []);
    assert!(faults.frame_fate(T, &frame(0, 3, MessageName::Grant)).drop);
    assert_eq!(faults.last_fault(Nanos(9_000)), Nanos(8_000));
}
