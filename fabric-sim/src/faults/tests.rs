use super::*;
use crate::dma::{BytesDecision, CompletionDecision};
use crate::testing::{run, two_and_two};
use kvferry_engine::fabric::Landed;
use kvferry_scenarios::lists::MessageName;
use kvferry_scenarios::run::{DurationRange, FaultTrigger, InjectedFault, PartitionDirection};

const T: Nanos = Nanos(1_000);

fn fault(kind: FaultKind, trigger: FaultTrigger) -> InjectedFault {
    InjectedFault {
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
        direction: PartitionDirection::Symmetric,
        first: RaceOrder::Either,
        becomes: None,
    }
}

fn on(event: TriggerEvent, nth: u32) -> FaultTrigger {
    FaultTrigger::On { event, from: None, to: None, message: None, nth }
}

fn engine(faults: Vec<InjectedFault>) -> FaultScheduler {
    FaultScheduler::new(&run(two_and_two(), faults))
}

fn op(from: u16, to: u16, nth: u64) -> FaultSubject {
    FaultSubject { nth, ..FaultSubject::between(from, to) }
}

fn frame(from: u16, to: u16, message: MessageName) -> FaultSubject {
    FaultSubject { message: Some(message), ..FaultSubject::between(from, to) }
}

fn actions(faults: &mut FaultScheduler) -> Vec<FaultAction> {
    let mut actions = Vec::new();
    faults.take_actions(&mut actions);
    actions
}

#[test]
fn the_nth_operation_of_the_named_instance_is_hit() {
    let mut lost = fault(FaultKind::AckLost, on(TriggerEvent::OpPosted, 2));
    lost.trigger = FaultTrigger::On {
        event: TriggerEvent::OpPosted,
        from: Some("p1".into()),
        to: None,
        message: None,
        nth: 2,
    };
    let mut faults = engine(vec![lost]);
    let fates: Vec<CompletionDecision> = [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2)]
        .map(|(from, nth)| faults.decide_op(T, &op(from, 2, nth)).ack)
        .into();
    assert_eq!(
        fates,
        [
            CompletionDecision::Given,
            CompletionDecision::Given,
            CompletionDecision::Given,
            CompletionDecision::Lost,
            CompletionDecision::Given
        ]
    );
}

#[test]
fn a_fault_of_a_time_waits_for_what_it_concerns() {
    let mut loss = fault(FaultKind::Loss, FaultTrigger::At(T));
    loss.message = Some(MessageName::Delivered);
    let mut faults = engine(vec![loss]);
    assert_eq!(faults.deadline(), Some(T));
    faults.tick(T);
    assert!(!faults.decide_frame(T, &frame(0, 2, MessageName::Ack)).drop);
    assert_eq!(faults.last_fault(Nanos(5_000)), Nanos(5_000));
    assert!(faults.decide_frame(T, &frame(0, 2, MessageName::Delivered)).drop);
    assert!(!faults.decide_frame(T, &frame(0, 2, MessageName::Delivered)).drop);
    assert_eq!(faults.last_fault(Nanos(5_000)), T);
}

#[test]
fn removing_a_fault_changes_no_draw_of_another() {
    let chance =
        |kind| InjectedFault { times: u32::MAX, ..fault(kind, FaultTrigger::Chance(300_000)) };
    let lost = chance(FaultKind::AckLost);
    let late = InjectedFault {
        delay: Some(DurationRange::fixed(Nanos(9))),
        ..chance(FaultKind::LateLanding)
    };
    let hits = |faults: Vec<InjectedFault>| -> Vec<CompletionDecision> {
        let mut faults = engine(faults);
        (0..200).map(|n| faults.decide_op(T, &op(n as u16 % 2, 2, n / 2)).ack).collect()
    };
    let alone = hits(vec![lost.clone()]);
    assert_eq!(alone, hits(vec![late, lost]));
    assert!(
        alone.contains(&CompletionDecision::Lost) && alone.contains(&CompletionDecision::Given)
    );
}

#[test]
fn the_worst_fate_wins_and_delays_add_up() {
    let always = |kind| InjectedFault {
        times: u32::MAX,
        delay: Some(DurationRange::fixed(Nanos(10))),
        ..fault(kind, FaultTrigger::Chance(1_000_000))
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
    let fate = faults.decide_op(T, &op(0, 2, 0));
    assert_eq!(fate.ack_delay, Nanos(20));
    assert_eq!(fate.ack, CompletionDecision::Never);
    assert!(matches!(
        fate.bytes,
        BytesDecision::Fails { landed: Landed::Unknown, late: Some(_), .. }
    ));
}

#[test]
fn windows_end_once_the_last_one_of_a_pair_does() {
    let cut = |at, lasts| InjectedFault {
        from: Some("p0".into()),
        to: Some("d0".into()),
        direction: PartitionDirection::OneWay,
        lasts: Some(DurationRange::fixed(Nanos(lasts))),
        ..fault(FaultKind::Partition, FaultTrigger::At(Nanos(at)))
    };
    let mut faults = engine(vec![cut(10, 100), cut(50, 100)]);
    let cut = |cut| FaultAction::Cut { from: 0, to: 2, cut };
    faults.tick(Nanos(10));
    faults.tick(Nanos(50));
    assert_eq!(actions(&mut faults), [cut(true), cut(true)]);
    assert!(!faults.decide_frame(T, &frame(2, 0, MessageName::Ack)).drop);
    faults.tick(Nanos(110));
    assert_eq!(actions(&mut faults), []);
    assert!(faults.decide_frame(T, &frame(0, 2, MessageName::Ack)).drop);
    faults.tick(Nanos(150));
    assert_eq!(actions(&mut faults), [cut(false)]);
    assert!(!faults.decide_frame(T, &frame(0, 2, MessageName::Ack)).drop);
    assert_eq!(faults.last_fault(Nanos(999)), Nanos(150));
    assert_eq!(faults.deadline(), None);
}

#[test]
fn healing_ends_what_passes_and_leaves_what_is_for_good() {
    let pair = |fault: InjectedFault| InjectedFault {
        from: Some("p0".into()),
        to: Some("d0".into()),
        ..fault
    };
    let mut faults = engine(vec![
        pair(fault(FaultKind::OneWayPermanent, FaultTrigger::At(T))),
        pair(InjectedFault {
            lasts: Some(DurationRange::fixed(Nanos::from_secs(1))),
            ..fault(FaultKind::HalfOpen, FaultTrigger::At(T))
        }),
        fault(FaultKind::Loss, FaultTrigger::Chance(1_000_000)),
        fault(FaultKind::Crash, FaultTrigger::At(Nanos::from_secs(2))),
    ]);
    faults.tick(T);
    assert_eq!(faults.last_fault(Nanos(7_000)), Nanos(7_000));
    faults.heal(Nanos(8_000));
    assert_eq!(faults.last_fault(Nanos(9_000)), Nanos(8_000));
    assert!(faults.decide_frame(T, &frame(0, 2, MessageName::Pull)).drop);
    assert!(!faults.decide_frame(T, &frame(2, 0, MessageName::Pull)).drop);
    faults.tick(Nanos::MAX);
    assert_eq!(actions(&mut faults), []);
}

#[test]
fn a_crash_of_a_host_hits_all_its_ranks() {
    let mut run = run(two_and_two(), Vec::new());
    run.instances[0].host = "h".into();
    run.instances[1].host = "h".into();
    run.faults = vec![InjectedFault {
        target: Some("h".into()),
        ..fault(FaultKind::Crash, on(TriggerEvent::RequestPrefilled, 1))
    }];
    let mut faults = FaultScheduler::new(&run);
    faults.on_event(T, TriggerEvent::RequestPrefilled, &FaultSubject::at(3));
    let crash = |instance| FaultAction::Crash { instance, back_after: None, becomes: None };
    assert_eq!(actions(&mut faults), [crash(0), crash(1)]);
}

#[test]
fn decode_legs_are_lost_and_prefill_legs_are_not() {
    let lost = fault(FaultKind::DecodeLegLost, on(TriggerEvent::RequestArrived, 1));
    let mut faults = engine(vec![lost]);
    faults.on_event(T, TriggerEvent::RequestArrived, &FaultSubject::at(ROUTER));
    assert_eq!(
        faults.decide_leg(T, false, &FaultSubject::between(ROUTER, 0)),
        LegDecision::default()
    );
    assert!(faults.decide_leg(T, true, &FaultSubject::between(ROUTER, 2)).lost);
}

#[test]
fn hits_are_counted_by_the_phase_of_the_transfer() {
    let mut faults = engine(vec![fault(FaultKind::Loss, on(TriggerEvent::FrameSent, 2))]);
    faults.decide_frame(T, &frame(2, 0, MessageName::Announce));
    faults.on_event(T, TriggerEvent::TransferWriting, &FaultSubject::between(0, 2));
    faults.decide_frame(T, &frame(2, 0, MessageName::Ack));
    let found: Vec<_> = faults.coverage().iter().map(|(key, n)| (*key, *n)).collect();
    assert_eq!(found, [((FaultKind::Loss, CoveragePhase::Moving), 1)]);
    let mut hits = Vec::new();
    faults.take_hits(&mut hits);
    assert_eq!(hits, [FaultHit { kind: FaultKind::Loss, from: Some(2), to: Some(0) }]);
}

#[test]
fn a_raced_read_ends_with_its_lease() {
    for (first, done_first) in [(RaceOrder::Late, true), (RaceOrder::Early, false)] {
        let race =
            InjectedFault { first, ..fault(FaultKind::ExpiryRace, on(TriggerEvent::OpPosted, 1)) };
        let mut faults = engine(vec![race]);
        assert_eq!(faults.decide_op(T, &op(2, 0, 0)).not_before, Nanos::ZERO);
        let at = Nanos::from_secs(27);
        let read = FaultSubject { lease: Some(at), ..op(2, 0, 1) };
        assert_eq!(faults.decide_op(T, &read).not_before, at);
        assert_eq!(actions(&mut faults), [FaultAction::Race { instance: 2, at, done_first }]);
        assert!(faults.decide_frame(T, &frame(2, 0, MessageName::Renew)).drop);
        assert!(!faults.decide_frame(at, &frame(2, 0, MessageName::Renew)).drop);
    }
}

#[test]
fn a_core_is_healed_of_everything_and_the_rest_of_nothing() {
    let pair = |kind, from: &str, to: &str| InjectedFault {
        from: Some(from.into()),
        to: Some(to.into()),
        lasts: Some(DurationRange::fixed(Nanos::from_secs(1))),
        ..fault(kind, FaultTrigger::At(T))
    };
    let pause = |target: &str| InjectedFault {
        target: Some(target.into()),
        lasts: Some(DurationRange::fixed(Nanos::from_secs(1))),
        ..fault(FaultKind::Pause, FaultTrigger::At(T))
    };
    let mut faults = engine(vec![
        pair(FaultKind::OneWayPermanent, "p0", "d0"),
        pair(FaultKind::OneWayPermanent, "p1", "d0"),
        pair(FaultKind::HalfOpen, "p0", "d1"),
        pause("p0"),
        pause("d1"),
        pause("router"),
        fault(FaultKind::Crash, FaultTrigger::At(Nanos::from_secs(2))),
    ]);
    faults.tick(T);
    actions(&mut faults);
    faults.settle(Nanos(8_000), &[0, 2].into());
    let goes_on = |instance| FaultAction::Pause { instance, paused: false };
    assert_eq!(actions(&mut faults), [goes_on(0), goes_on(ROUTER)]);
    let lasting: Vec<_> = faults.lasting().collect();
    assert_eq!(lasting, [(1, Some(2)), (0, Some(3)), (3, None)]);
    assert!(!faults.decide_frame(T, &frame(0, 2, MessageName::Grant)).drop);
    assert!(faults.decide_frame(T, &frame(1, 2, MessageName::Grant)).drop);
    faults.tick(Nanos::MAX);
    assert_eq!(actions(&mut faults), []);
    assert!(faults.decide_frame(T, &frame(0, 3, MessageName::Grant)).drop);
    assert_eq!(faults.last_fault(Nanos(9_000)), Nanos(8_000));
}

#[test]
fn a_hit_of_a_chance_is_the_nth_event_of_its_sender() {
    let lost = fault(FaultKind::AckLost, FaultTrigger::Chance(300_000));
    let ops = [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (0, 2), (1, 3), (1, 4), (0, 3)];
    let fates = |faults: &mut FaultScheduler| {
        ops.map(|(from, nth)| faults.decide_op(T, &op(from, 2, nth)).ack)
    };
    let mut faults = engine(vec![InjectedFault { times: u32::MAX, ..lost.clone() }]);
    let drawn = fates(&mut faults);
    let hits = faults.chance_hits().to_vec();
    assert_eq!(hits.len(), drawn.iter().filter(|ack| **ack == CompletionDecision::Lost).count());
    assert!((1..ops.len()).contains(&hits.len()), "{hits:?}");
    let pinned = hits.iter().map(|hit| InjectedFault {
        trigger: FaultTrigger::On {
            event: hit.event,
            from: Some(["p0", "p1"][usize::from(hit.from)].into()),
            to: None,
            message: None,
            nth: hit.nth,
        },
        ..lost.clone()
    });
    assert_eq!(fates(&mut engine(pinned.collect())), drawn);
}
