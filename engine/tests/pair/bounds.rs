//! Engines that are set up differently, full queues, and peers that ask for more than there is.

use super::*;
use crate::world::{PairWorld, Speaker};
use kvferry_engine::core::channel::ChannelConfig;
use kvferry_engine::core::config::CoreSettings;
use kvferry_engine::core::dialect::native::{self, Frame, kind_of};

#[test]
fn a_lease_is_renewed_as_it_was_granted() {
    let channel = ChannelConfig::default();
    for (granted, own) in [(30, 30), (5, 30), (30, 5), (1, 30)] {
        let [prefill, decode] = [granted, own].map(|seconds| CoreSettings {
            lease: Nanos::from_secs(seconds),
            ..CoreSettings::default()
        });
        let mut pair = PairWorld::unequal(Mode::Pull, (&prefill, &channel), (&decode, &channel));
        let request = arrive_decode(&mut pair, Mode::Pull, 100, 0);
        arrive_prefill(&mut pair, Mode::Pull, 100, 1);
        prefill_all(&mut pair, 100);
        // It waits for blocks for longer than any of the leases.
        settle(&mut pair, 61);
        allocate(&mut pair, &request, 0, 100, 10);
        settle(&mut pair, 1);
        assert_eq!(pair.decode_said.last(), Some(&loaded(&request)), "{granted} s and {own} s");
        assert_eq!(pair.prefill_said, [freed(None)]);
        let renewals = pair.frames.iter().filter(|(_, from, frame)| {
            let Ok(Frame::Data { message, .. }) = native::decode(frame) else { return false };
            *from == Speaker::Decode && kind_of(&message).name() == "Renew"
        });
        let (renewals, third) = (renewals.count() as u64, 61 * 3 / granted);
        assert!((third / 2..=third + 1).contains(&renewals), "{renewals} of {granted} s");
        assert!(pair.at_rest());
    }
}

#[test]
fn a_lease_of_no_length_is_not_asked_for_without_end() {
    let prefill = CoreSettings { lease: Nanos(1), ..CoreSettings::default() };
    let (decode, channel) = (CoreSettings::default(), ChannelConfig::default());
    let mut pair = PairWorld::unequal(Mode::Pull, (&prefill, &channel), (&decode, &channel));
    let request = arrive_decode(&mut pair, Mode::Pull, 100, 0);
    allocate(&mut pair, &request, 0, 100, 10);
    settle(&mut pair, 1);
    arrive_prefill(&mut pair, Mode::Pull, 100, 1);
    prefill_all(&mut pair, 100);
    settle(&mut pair, 10);
    assert!(pair.frames.len() < 1_000, "{} frames", pair.frames.len());
    let failure = Failure::LeaseExpired;
    assert_eq!(pair.decode_said.last(), Some(&DecodeAnswer::LoadFailed { request, failure }));
}

/// A prefill that has said that it computes a prompt, and a decode with blocks for it whose queue
/// to the prefill is full.
fn without_room(claim: Nanos) -> (PairWorld, RequestId) {
    let settings = CoreSettings { claim, ..CoreSettings::default() };
    let channel = ChannelConfig { queue_max: 2, ..ChannelConfig::default() };
    let mut pair = PairWorld::unequal(Mode::Push, (&settings, &channel), (&settings, &channel));
    let request = arrive_decode(&mut pair, Mode::Push, 64, 0);
    settle(&mut pair, 1);
    arrive_prefill(&mut pair, Mode::Push, 64, 3);
    prefill_all(&mut pair, 64);
    settle(&mut pair, 1);
    // For a moment nothing gets through, and others fill the queue.
    pair.frame_passes = Box::new(|_: Speaker| false);
    for sibling in [1, 2] {
        arrive_decode(&mut pair, Mode::Push, 64, sibling);
    }
    allocate(&mut pair, &request, 0, 64, 10);
    let failure = Failure::Overload;
    let answer = DecodeAnswer::LoadFailed { request: request.clone(), failure };
    assert_eq!(pair.decode_said.last(), Some(&answer));
    (pair, request)
}

#[test]
fn an_announcement_without_room_releases_the_source() {
    let (mut pair, _) = without_room(Nanos::from_secs(600));
    pair.frame_passes = Box::new(|_: Speaker| true);
    settle(&mut pair, 1);
    for sibling in [1, 2] {
        let request = format!("d-{sibling}").into();
        let reason = FinishReason::Aborted;
        pair.decode(DecodeInput::Hook(DecodeHook::Finished { request, reason }));
    }
    settle(&mut pair, 5);
    assert_eq!(pair.prefill_said, [freed(None)], "long before it gives the receiver up");
    assert!(pair.at_rest());
}

#[test]
fn all_that_is_given_up_beside_a_full_queue_is_released() {
    gives_up_beside_a_full_queue(CoreSettings::default().lease, 0);
}

#[test]
fn what_was_given_up_is_told_in_a_conversation_that_outlasts_the_lease() {
    gives_up_beside_a_full_queue(Nanos::from_secs(2), 5);
}

/// Six samples are given up while the prefill is out of reach for some seconds.
fn gives_up_beside_a_full_queue(lease: Nanos, apart: u64) {
    let claim = Nanos::from_secs(600);
    let settings = CoreSettings { claim, lease, ..CoreSettings::default() };
    let (wide, small) =
        (ChannelConfig::default(), ChannelConfig { queue_max: 2, ..ChannelConfig::default() });
    let mut pair = PairWorld::unequal(Mode::Push, (&settings, &wide), (&settings, &small));
    arrive_prefill(&mut pair, Mode::Push, 64, 6);
    for sibling in 0..4 {
        arrive_decode(&mut pair, Mode::Push, 64, sibling);
        settle(&mut pair, 1);
    }
    pair.frame_passes = Box::new(|_: Speaker| false);
    for sibling in [4, 5] {
        arrive_decode(&mut pair, Mode::Push, 64, sibling);
    }
    for sibling in 0..6 {
        let request = format!("d-{sibling}").into();
        let reason = FinishReason::Aborted;
        pair.decode(DecodeInput::Hook(DecodeHook::Finished { request, reason }));
    }
    settle(&mut pair, apart);
    pair.frame_passes = Box::new(|_: Speaker| true);
    prefill_all(&mut pair, 64);
    settle(&mut pair, 20);
    assert_eq!(pair.prefill_said, [freed(None)], "long before it gives the receivers up");
    assert!(pair.at_rest());
}

#[test]
fn an_announcement_that_outlasts_its_receiver_is_written_nowhere() {
    // A name is forgotten as soon as it has ended, so that the prompt may come again.
    let settings = CoreSettings { tombstones_max: 0, ..CoreSettings::default() };
    let mut pair = PairWorld::with(Mode::Push, 1, 1, &settings);
    let request = arrive_decode(&mut pair, Mode::Push, 64, 0);
    arrive_prefill(&mut pair, Mode::Push, 64, 1);
    schedule(&mut pair, 1, 0, 32);
    settle(&mut pair, 1);
    pair.frame_passes = Box::new(|from| from != Speaker::Decode);
    allocate(&mut pair, &request, 0, 64, 10);
    finish(&mut pair, FinishReason::Aborted);
    settle(&mut pair, 1);
    let failure = Failure::PrefillEnded;
    assert_eq!(pair.decode_said.last(), Some(&DecodeAnswer::LoadFailed { request, failure }));
    arrive_prefill(&mut pair, Mode::Push, 64, 1);
    prefill_all(&mut pair, 64);
    pair.frame_passes = Box::new(|_: Speaker| true);
    settle(&mut pair, 10);
    assert_eq!(pair.ops, 0, "its blocks may be those of somebody else");
}

#[test]
fn computed_prompt_that_is_aborted_is_freed_as_cancelled() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 1, 1);
        arrive_prefill(&mut pair, mode, 64, 1);
        prefill_all(&mut pair, 64);
        finish(&mut pair, FinishReason::Aborted);
        settle(&mut pair, 1);
        assert_eq!(pair.prefill_said, [freed(Some(Failure::Cancelled))]);
        assert!(pair.at_rest());
    }
}

#[test]
fn a_receiver_that_never_says_where_to_is_given_up() {
    for seconds in [60, 600] {
        let settings = CoreSettings { claim: Nanos::from_secs(seconds), ..CoreSettings::default() };
        let mut pair = PairWorld::with(Mode::Push, 1, 1, &settings);
        let request = arrive_decode(&mut pair, Mode::Push, 64, 0);
        arrive_prefill(&mut pair, Mode::Push, 64, 1);
        prefill_all(&mut pair, 64);
        settle(&mut pair, seconds - 1);
        assert_eq!(pair.prefill_said, [], "it may wait for blocks");
        settle(&mut pair, 2);
        let failure = Failure::NotFetched;
        assert_eq!(pair.prefill_said, [freed(Some(failure.clone()))]);
        let answer = DecodeAnswer::Rejected { request, failure };
        assert_eq!(pair.decode_said.last(), Some(&answer));
        assert!(pair.at_rest());
    }
}

#[test]
fn a_receiver_that_asks_late_in_the_lease_is_given_up_though_claims_are_shorter() {
    let settings = CoreSettings { claim: Nanos::from_secs(1), ..CoreSettings::default() };
    let mut pair = PairWorld::with(Mode::Push, 1, 1, &settings);
    arrive_prefill(&mut pair, Mode::Push, 64, 1);
    prefill_all(&mut pair, 64);
    settle(&mut pair, 2);
    let request = arrive_decode(&mut pair, Mode::Push, 64, 0);
    settle(&mut pair, settings.lease.0.div_ceil(1_000_000_000));
    let failure = Failure::NotFetched;
    assert_eq!(pair.prefill_said, [freed(Some(failure.clone()))]);
    let answer = DecodeAnswer::Rejected { request, failure };
    assert_eq!(pair.decode_said.last(), Some(&answer));
    assert!(pair.at_rest());
}

#[test]
fn siblings_that_the_prompt_does_not_have_leave_no_trace() {
    for (early, mode) in [(true, Mode::Push), (false, Mode::Push), (false, Mode::Pull)] {
        let settings = CoreSettings { early_max: 50, receivers_max: 50, ..CoreSettings::default() };
        let mut pair = PairWorld::with(mode, 1, 1, &settings);
        if !early {
            arrive_prefill(&mut pair, mode, 64, 1);
        }
        for sibling in 1..300 {
            let request = arrive_decode(&mut pair, mode, 64, sibling);
            let reason = FinishReason::Aborted;
            pair.decode(DecodeInput::Hook(DecodeHook::Finished { request, reason }));
            pair.run(pair.now + Nanos::from_ms(1));
        }
        // As many as there is room for before the leg, and some more of the key and the peer.
        let most = if early { 50 } else { 0 };
        let entries = |pair: &PairWorld| pair.prefill_gauges().entries;
        assert!((most..most + 8).contains(&entries(&pair)), "{} of {most}, {mode}", entries(&pair));
        if early {
            arrive_prefill(&mut pair, mode, 64, 1);
            assert!(entries(&pair) < 8, "{}", entries(&pair));
        }
        let request = arrive_decode(&mut pair, mode, 64, 0);
        allocate(&mut pair, &request, 0, 64, 10);
        prefill_all(&mut pair, 64);
        settle(&mut pair, 1);
        assert_eq!(pair.decode_said.last(), Some(&loaded(&request)));
        assert_eq!(pair.prefill_said.len(), 1);
        assert!(pair.at_rest());
    }
}

#[test]
fn a_source_that_was_given_up_is_counted_until_it_is_quiet() {
    let mut pair = PairWorld::new(Mode::Push, 1, 1);
    let request = arrive_decode(&mut pair, Mode::Push, 96, 0);
    allocate(&mut pair, &request, 0, 96, 10);
    arrive_prefill(&mut pair, Mode::Push, 96, 1);
    settle(&mut pair, 1);
    schedule(&mut pair, 1, 0, 48);
    settle(&mut pair, 1);
    let before = pair.prefill_gauges().entries;
    let id = RequestId::from("p-1");
    pair.prefill(PrefillInput::Hook(PrefillHook::Preempted { request: id.clone() }));
    // The time to be scheduled again, too.
    assert_eq!(pair.prefill_gauges().entries, before + 2);
    settle(&mut pair, 1);
    assert_eq!(pair.prefill_said, [PrefillAnswer::PreemptionSafe { request: id }]);
    assert_eq!(pair.prefill_gauges().entries, before + 1);
}

#[test]
fn names_that_receivers_left_before_the_leg_came_are_counted() {
    let [came, never] = [true, false].map(|comes| {
        let mut pair = PairWorld::new(Mode::Push, 1, 1);
        let request = arrive_decode(&mut pair, Mode::Push, 64, 0);
        allocate(&mut pair, &request, 0, 64, 10);
        if comes {
            arrive_prefill(&mut pair, Mode::Push, 64, 1);
            prefill_all(&mut pair, 64);
        }
        settle(&mut pair, 33);
        pair.prefill_gauges()
    });
    assert_eq!((came.tombstones, never.tombstones), (1, 1));
    assert_eq!(never.remembered, came.remembered + 1);
}

#[test]
fn a_preemption_that_crosses_with_a_rejection_is_answered() {
    let mut pair = PairWorld::new(Mode::Push, 1, 1);
    arrive_prefill(&mut pair, Mode::Pull, 96, 1);
    settle(&mut pair, 1);
    let id = RequestId::from("p-1");
    let failure = match &pair.prefill_said[..] {
        [PrefillAnswer::Rejected { request, failure }] if *request == id => failure.clone(),
        said => panic!("of the other mode: {said:?}"),
    };
    pair.prefill(PrefillInput::Hook(PrefillHook::Preempted { request: id.clone() }));
    settle(&mut pair, 1);
    let safe = PrefillAnswer::PreemptionSafe { request: id };
    assert_eq!(pair.prefill_said[1..], [safe], "after {failure}");
}

#[test]
fn preempted_source_is_safe_when_the_flow_of_a_cancelled_sibling_is_quiet() {
    let mut pair = PairWorld::new(Mode::Push, 1, 1);
    pair.op_us = Box::new(|_, _| 400_000);
    arrive_prefill(&mut pair, Mode::Push, 96, 2);
    let request = arrive_decode(&mut pair, Mode::Push, 96, 1);
    settle(&mut pair, 1);
    schedule(&mut pair, 1, 0, 48);
    settle(&mut pair, 1);
    allocate(&mut pair, &request, 0, 96, 10);
    pair.compute(1, LAYERS);
    let ms = |pair: &mut PairWorld, ms| pair.run(pair.now + Nanos::from_ms(ms));
    ms(&mut pair, 50);
    assert_eq!(pair.ops, u64::from(LAYERS), "they are on their way");
    let reason = FinishReason::Aborted;
    pair.decode(DecodeInput::Hook(DecodeHook::Finished { request, reason }));
    ms(&mut pair, 50);
    let id = RequestId::from("p-1");
    pair.prefill(PrefillInput::Hook(PrefillHook::Preempted { request: id.clone() }));
    ms(&mut pair, 200);
    assert_eq!(pair.prefill_said, [], "it is still read");
    ms(&mut pair, 200);
    assert_eq!(pair.prefill_said, [PrefillAnswer::PreemptionSafe { request: id }]);
}
