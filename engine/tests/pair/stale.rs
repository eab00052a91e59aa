//! Messages of the past, and engines that turn away.

use super::*;
use crate::world::{PairWorld, Speaker};
use kvferry_engine::core::config::CoreSettings;
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::ids::Attempt;
use std::collections::BTreeSet;

/// Changes the messages that a side says.
fn reword(pair: &mut PairWorld, who: Speaker, mut change: impl FnMut(&mut Message) + 'static) {
    pair.alter = Box::new(move |from, frame| match native::decode(&frame) {
        Ok(Frame::Data { envelope, seq, mut message }) if from == who => {
            change(&mut message);
            vec![native::encode_data(&envelope, seq, &message)]
        }
        _ => vec![frame],
    });
}

#[test]
fn what_is_said_of_another_attempt_changes_nothing_at_decode() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 1, 1);
        reword(&mut pair, Speaker::Prefill, |message| match message {
            Message::Begun { tag }
            | Message::Grant { tag, .. }
            | Message::Delivered { tag, .. }
            | Message::Ended { tag, .. } => tag.attempt = Attempt(tag.attempt.0 + 1),
            _ => {}
        });
        let request = arrive_decode(&mut pair, mode, 100, 0);
        arrive_prefill(&mut pair, mode, 100, 1);
        schedule(&mut pair, 1, 0, 100);
        settle(&mut pair, 1);
        assert_eq!(pair.decode_said, [], "{mode}: begun");
        allocate(&mut pair, &request, 0, 100, 10);
        pair.compute(1, LAYERS);
        finish(&mut pair, FinishReason::Length);
        settle(&mut pair, 1);
        assert_eq!(pair.decode_said, [], "{mode}: granted or delivered");
        let other = arrive_decode(&mut pair, mode, 100, 7);
        settle(&mut pair, 1);
        assert_eq!(pair.decode_said, [], "{mode}: {other} ended");
    }
}

#[test]
fn what_is_said_of_another_attempt_changes_nothing_at_the_prefill() {
    // The lease of a reader, and a source that is released.
    let mut pair = PairWorld::new(Mode::Pull, 1, 1);
    reword(&mut pair, Speaker::Decode, |message| match message {
        Message::Renew { tag, .. } | Message::Release { tag, .. } => {
            tag.attempt = Attempt(tag.attempt.0 + 1);
        }
        _ => {}
    });
    let request = arrive_decode(&mut pair, Mode::Pull, 100, 0);
    arrive_prefill(&mut pair, Mode::Pull, 100, 1);
    prefill_all(&mut pair, 100);
    settle(&mut pair, 1);
    allocate(&mut pair, &request, 0, 100, 10);
    settle(&mut pair, 1);
    assert_eq!(pair.decode_said.last(), Some(&loaded(&request)));
    assert_eq!(pair.prefill_said, [], "released by another attempt");
    settle(&mut pair, 30);
    assert_eq!(pair.prefill_said, [freed(Some(Failure::LeaseExpired))]);

    // Blocks that decode wants back.
    let mut pair = PairWorld::new(Mode::Push, 1, 1);
    reword(&mut pair, Speaker::Decode, |message| {
        if let Message::Cancel { tag } = message {
            tag.attempt = Attempt(tag.attempt.0 + 1);
        }
    });
    let request = arrive_decode(&mut pair, Mode::Push, 100, 0);
    allocate(&mut pair, &request, 0, 100, 10);
    arrive_prefill(&mut pair, Mode::Push, 100, 1);
    schedule(&mut pair, 1, 0, 100);
    pair.compute(1, 1);
    settle(&mut pair, 1);
    let reason = FinishReason::Aborted;
    pair.decode(DecodeInput::Hook(DecodeHook::Finished { request, reason }));
    settle(&mut pair, 1);
    let before = pair.ops;
    pair.compute(1, LAYERS);
    settle(&mut pair, 1);
    assert!(pair.ops > before, "stopped by another attempt");
}

#[test]
fn an_answer_to_an_earlier_renewal_does_not_extend_the_lease() {
    // The newest renewals get no answer but that to the first one.
    let mut pair = PairWorld::new(Mode::Pull, 1, 1);
    reword(&mut pair, Speaker::Prefill, |message| {
        if let Message::Renewed { count, .. } = message {
            *count = 1;
        }
    });
    let request = arrive_decode(&mut pair, Mode::Pull, 100, 0);
    arrive_prefill(&mut pair, Mode::Pull, 100, 1);
    prefill_all(&mut pair, 100);
    settle(&mut pair, 100);
    let failure = Failure::LeaseExpired;
    let answer = DecodeAnswer::Rejected { request, failure };
    assert_eq!(pair.decode_said.last(), Some(&answer), "the first was answered in time");
}

#[test]
fn an_ended_name_is_refused_at_decode_as_long_as_it_is_remembered() {
    for (tombstones_max, refused) in [(4, true), (0, false)] {
        let settings = CoreSettings { tombstones_max, ..CoreSettings::default() };
        let mut pair = PairWorld::with(Mode::Pull, 1, 1, &settings);
        let request = arrive_decode(&mut pair, Mode::Pull, 64, 0);
        let finished = DecodeHook::Finished { request, reason: FinishReason::Aborted };
        pair.decode(DecodeInput::Hook(finished));
        let again = arrive_decode(&mut pair, Mode::Pull, 64, 0);
        let failure = Failure::DuplicateKey;
        let answer = DecodeAnswer::Rejected { request: again, failure };
        assert_eq!(pair.decode_said.contains(&answer), refused);
    }
}

#[test]
fn what_an_earlier_incarnation_is_owed_is_not_said_to_a_later_one() {
    let mut pair = PairWorld::new(Mode::Pull, 1, 1);
    let incarnation = Some(Incarnation(1));
    let request = arrive_decode_for(&mut pair, Mode::Pull, 64, 0, incarnation);
    settle(&mut pair, 1);
    pair.frame_passes = Box::new(|_: Speaker| false);
    let finished = DecodeHook::Finished { request, reason: FinishReason::Aborted };
    pair.decode(DecodeInput::Hook(finished));
    settle(&mut pair, 12);
    pair.restart_prefill(Mode::Pull, 1);
    pair.frame_passes = Box::new(|_: Speaker| true);
    let from = pair.frames.len();
    settle(&mut pair, 10);
    let releases = pair.frames[from..].iter().filter(|(_, who, frame)| {
        let release = |message: &Message| matches!(message, Message::Release { .. });
        let said = native::decode(frame);
        *who == Speaker::Decode
            && matches!(said, Ok(Frame::Data { message, .. }) if release(&message))
    });
    assert_eq!(releases.count(), 0, "an incarnation that has none of it");
    assert_eq!(pair.prefill_gauges().transfers, 0);
}

#[test]
fn what_an_incarnation_with_a_lower_number_is_owed_is_kept_beside_that_of_a_higher_one() {
    let mut pair = PairWorld::new(Mode::Pull, 1, 1);
    pair.frame_passes = Box::new(|_: Speaker| false);
    for (sibling, incarnation) in [(0, Incarnation(7)), (1, Incarnation(1))] {
        let request = arrive_decode_for(&mut pair, Mode::Pull, 64, sibling, Some(incarnation));
        let finished = DecodeHook::Finished { request, reason: FinishReason::Aborted };
        pair.decode(DecodeInput::Hook(finished));
    }
    pair.frame_passes = Box::new(|_: Speaker| true);
    settle(&mut pair, 10);
    let released = pair.frames.iter().filter_map(|(_, who, frame)| match native::decode(frame) {
        Ok(Frame::Data { message: Message::Release { tag, .. }, .. })
            if *who == Speaker::Decode =>
        {
            Some(tag.sibling)
        }
        _ => None,
    });
    let released: BTreeSet<u32> = released.collect();
    assert_eq!(released, BTreeSet::from([1]), "the prefill is in incarnation 1");
}

#[test]
fn a_source_that_is_read_outlives_the_engines_end() {
    let mut pair = PairWorld::new(Mode::Pull, 1, 1);
    pair.op_fate = Box::new(|_| OpResult::Silent);
    let request = arrive_decode(&mut pair, Mode::Pull, 100, 0);
    allocate(&mut pair, &request, 0, 100, 10);
    arrive_prefill(&mut pair, Mode::Pull, 100, 1);
    prefill_all(&mut pair, 100);
    settle(&mut pair, 1);
    // Decode does not hear that the prefill's memory cannot be used any more.
    pair.frame_passes = Box::new(|from: Speaker| from == Speaker::Decode);
    let report = TransferReport::Unusable { failure: Failure::EngineGone };
    pair.prefill(PrefillInput::Report { rank: 0, report });
    settle(&mut pair, 2);
    assert_eq!(pair.prefill_said, [], "it may be read until the lease ends");
    settle(&mut pair, 40);
    assert_eq!(pair.prefill_said, [freed(Some(Failure::EngineGone))]);
}

#[test]
fn a_prefill_knows_whom_it_refused_and_why() {
    let mut pair = PairWorld::new(Mode::Pull, 1, 1);
    pair.alter = Box::new(|_, frame| match native::decode(&frame) {
        Ok(Frame::Hello(mut hello)) => {
            (hello.version, hello.version_min) = (9, 7);
            vec![native::encode(&Frame::Hello(hello))]
        }
        _ => vec![frame],
    });
    let request = arrive_decode(&mut pair, Mode::Pull, 64, 0);
    settle(&mut pair, 1);
    let why = "prefill speaks protocol versions 1 to 2, decode 7 to 9";
    let failure = Failure::HelloRefused(why.into());
    assert_eq!(pair.turned_away, [("decode".into(), failure.clone())]);
    assert_eq!(pair.decode_said, [DecodeAnswer::Rejected { request, failure }]);
}

#[test]
fn a_message_that_is_not_said_to_this_role_is_told_with_who_said_it() {
    let mut pair = PairWorld::new(Mode::Pull, 1, 1);
    pair.violations = Some(Vec::new());
    reword(&mut pair, Speaker::Decode, |message| {
        let tag = message.tag().expect("it is of a transfer").clone();
        *message = Message::Begun { tag };
    });
    arrive_decode(&mut pair, Mode::Pull, 64, 0);
    settle(&mut pair, 1);
    let violations = pair.violations.unwrap();
    let [violation] = &violations[..] else { panic!("{violations:?}") };
    let told = (&*violation.peer, &*violation.frame, &*violation.rule);
    assert_eq!(told, ("decode", "Begun", "not said to this role"));
}
