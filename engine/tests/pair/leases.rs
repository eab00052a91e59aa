//! What a lease covers, and what is done when nobody can be told.

use super::{HASH, allocate, arrive_decode, arrive_decode_for, arrive_prefill, freed, key, loaded};
use super::{prefill_all, settle};
use crate::world::{BLOCK, OpResult, PairWorld, Speaker};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::config::CoreSettings;
use kvferry_engine::core::decode::DecodeInput;
use kvferry_engine::core::dialect::native::FRAME_MAX;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::{
    DecodeAnswer, DecodeHook, FinishReason, Mode, PrefillHook, PrefillLeg, TransferReport,
};
use kvferry_engine::core::prefill::PrefillInput;
use kvferry_engine::fabric::{FabricError, Refused};
use std::sync::Arc;

#[test]
fn a_prompt_that_was_queued_for_longer_than_a_lease_is_read() {
    for seconds in [1, 12, 19, 26, 28, 100] {
        let mut pair = PairWorld::new(Mode::Pull, 2, 1);
        let request = arrive_decode(&mut pair, Mode::Pull, 100, 0);
        arrive_prefill(&mut pair, Mode::Pull, 100, 1);
        settle(&mut pair, seconds);
        prefill_all(&mut pair, 100);
        settle(&mut pair, 1);
        let due = DecodeAnswer::Allocate { request: request.clone() };
        assert_eq!(pair.decode_said.as_slice(), std::slice::from_ref(&due), "after {seconds} s");
        allocate(&mut pair, &request, 0, 100, 10);
        settle(&mut pair, 1);
        assert_eq!(pair.decode_said, [due, loaded(&request)], "after {seconds} s");
        assert_eq!(pair.prefill_said, [freed(None)]);
        assert!(pair.at_rest());
    }
}

/// A partition begins in the middle of a read, or when the prompt has just been granted.
fn cut_off(reads: bool) -> PairWorld {
    let mut pair = PairWorld::new(Mode::Pull, 2, 2);
    pair.op_fate = Box::new(|_| OpResult::Silent);
    let request = arrive_decode_for(&mut pair, Mode::Pull, 100, 0, Some(Incarnation(1)));
    if reads {
        allocate(&mut pair, &request, 0, 100, 10);
    }
    arrive_prefill(&mut pair, Mode::Pull, 100, 1);
    settle(&mut pair, 1);
    if !reads {
        pair.frame_passes = Box::new(|_: Speaker| false);
    }
    prefill_all(&mut pair, 100);
    settle(&mut pair, 1);
    pair.frame_passes = Box::new(|_: Speaker| false);
    settle(&mut pair, 12);
    let failure = Failure::PeerSilent;
    let told = match reads {
        true => DecodeAnswer::LoadFailed { request, failure },
        false => DecodeAnswer::Rejected { request, failure },
    };
    assert_eq!(pair.decode_said.last(), Some(&told));
    assert_eq!(pair.prefill_said, [], "a reader that fell silent may still read");
    pair
}

#[test]
fn what_a_reader_gave_up_is_released_when_it_meets_the_same_incarnation_again() {
    for reads in [true, false] {
        let mut pair = cut_off(reads);
        pair.frame_passes = Box::new(|_: Speaker| true);
        settle(&mut pair, 4);
        assert_eq!(pair.prefill_said.len(), 1, "freed though the lease goes on");
        assert!(pair.at_rest());
    }
}

#[test]
fn a_release_that_was_never_acknowledged_is_said_again_when_both_meet() {
    let mut pair = PairWorld::new(Mode::Pull, 2, 2);
    let request = arrive_decode(&mut pair, Mode::Pull, 100, 0);
    arrive_prefill(&mut pair, Mode::Pull, 100, 1);
    prefill_all(&mut pair, 100);
    settle(&mut pair, 1);
    // Decode has the grant; now nothing gets to the prefill.
    pair.frame_passes = Box::new(|from: Speaker| from == Speaker::Prefill);
    allocate(&mut pair, &request, 0, 100, 10);
    settle(&mut pair, 12);
    assert_eq!(pair.decode_said.last(), Some(&loaded(&request)));
    assert_eq!(pair.prefill_said, []);
    pair.frame_passes = Box::new(|_: Speaker| true);
    settle(&mut pair, 4);
    assert_eq!(pair.prefill_said, [freed(None)]);
    assert!(pair.at_rest());
}

/// All of a prompt is cached while decode does not get through to the prefill's newest incarnation.
#[test]
fn a_release_reaches_the_incarnation_that_has_the_prompt() {
    for (restarts, seconds) in [(false, 1), (false, 3), (true, 1), (true, 8)] {
        let mut pair = PairWorld::new(Mode::Pull, 1, 1);
        let mut incarnation = Incarnation(1);
        if restarts {
            let other = arrive_decode_for(&mut pair, Mode::Pull, 64, 1, Some(incarnation));
            settle(&mut pair, 1);
            pair.frame_passes = Box::new(|_: Speaker| false);
            pair.restart_prefill(Mode::Pull, 1);
            pair.decode(DecodeInput::Hook(DecodeHook::Finished {
                request: other,
                reason: FinishReason::Aborted,
            }));
            incarnation = Incarnation(2);
        }
        pair.frame_passes = Box::new(|_: Speaker| false);
        let request = arrive_decode_for(&mut pair, Mode::Pull, 64, 0, Some(incarnation));
        allocate(&mut pair, &request, 64, 64, 10);
        arrive_prefill(&mut pair, Mode::Pull, 64, 1);
        prefill_all(&mut pair, 64);
        settle(&mut pair, seconds);
        assert_eq!(pair.decode_said.last(), Some(&loaded(&request)));
        assert_eq!(pair.prefill_said, []);
        pair.frame_passes = Box::new(|_: Speaker| true);
        settle(&mut pair, 4);
        assert_eq!(pair.prefill_said, [freed(None)], "{restarts}, after {seconds} s");
        assert!(pair.at_rest());
    }
}

#[test]
fn what_a_receiver_gave_up_is_released_when_it_meets_the_same_incarnation_again() {
    for announces in [false, true] {
        let mut pair = PairWorld::new(Mode::Push, 1, 1);
        let arrive = |pair: &mut PairWorld, sibling| {
            arrive_decode_for(pair, Mode::Push, 100, sibling, Some(Incarnation(1)))
        };
        arrive(&mut pair, 0);
        arrive_prefill(&mut pair, Mode::Push, 100, 2);
        prefill_all(&mut pair, 100);
        settle(&mut pair, 1);
        // The prefill never hears of the second receiver.
        pair.frame_passes = Box::new(|_: Speaker| false);
        let request = arrive(&mut pair, 1);
        if announces {
            allocate(&mut pair, &request, 0, 100, 10);
        }
        settle(&mut pair, 12);
        let failure = Failure::PeerSilent;
        let told = match announces {
            true => DecodeAnswer::LoadFailed { request, failure },
            false => DecodeAnswer::Rejected { request, failure },
        };
        assert_eq!(pair.decode_said.last(), Some(&told));
        assert_eq!(pair.prefill_said, [], "the second receiver is waited for");
        pair.frame_passes = Box::new(|_: Speaker| true);
        settle(&mut pair, 4);
        assert_eq!(pair.prefill_said.len(), 1, "freed though the prompt is held for longer");
        assert!(pair.at_rest());
    }
}

#[test]
fn a_reader_that_never_meets_the_prefill_again_gives_up_with_the_lease() {
    let mut pair = cut_off(true);
    assert!(!pair.at_rest());
    settle(&mut pair, 32);
    assert_eq!(pair.prefill_said.len(), 1);
    assert!(pair.at_rest());
}

#[test]
fn a_native_reader_comes_in_the_place_of_whoever_a_prompt_is_held_for() {
    for waits in [false, true] {
        let mut pair = PairWorld::beside_moriio(Mode::Pull);
        let leg = PrefillLeg { moriio: Some(Arc::default()), ..PrefillLeg::new(key(), Mode::Pull) };
        let arrived =
            PrefillHook::Arrived { request: "p-1".into(), leg, tokens: 100, prompt_hash: HASH };
        pair.prefill(PrefillInput::Hook(arrived));
        if !waits {
            prefill_all(&mut pair, 100);
            settle(&mut pair, 20);
        }
        let request = arrive_decode(&mut pair, Mode::Pull, 100, 0);
        allocate(&mut pair, &request, 0, 100, 10);
        settle(&mut pair, 1);
        if waits {
            prefill_all(&mut pair, 100);
            settle(&mut pair, 1);
        }
        assert_eq!(pair.decode_said.last(), Some(&loaded(&request)));
        assert_eq!(pair.prefill_said, [freed(None)], "nobody else is waited for");
        assert!(pair.at_rest());
    }
}

#[test]
fn a_grant_that_no_frame_holds_costs_its_transfer_only() {
    let mut pair = PairWorld::new(Mode::Pull, 1, 1);
    let blocks = FRAME_MAX as u32 / 5 + 1;
    let request = arrive_decode(&mut pair, Mode::Pull, blocks * BLOCK, 0);
    arrive_prefill(&mut pair, Mode::Pull, blocks * BLOCK, 1);
    prefill_all(&mut pair, blocks * BLOCK);
    settle(&mut pair, 1);
    let failure = Failure::Refused(Refused::Invalid("too many blocks for a frame".into()));
    let refused = DecodeAnswer::Rejected { request, failure: failure.clone() };
    assert_eq!(pair.decode_said, [refused]);
    assert_eq!(pair.prefill_said, [freed(Some(failure))]);
    assert!(pair.at_rest());
}

#[test]
fn a_release_is_taken_though_no_receiver_is() {
    let settings = CoreSettings { receivers_max: 0, ..CoreSettings::default() };
    let mut pair = PairWorld::with(Mode::Pull, 1, 1, &settings);
    arrive_prefill(&mut pair, Mode::Pull, 64, 1);
    let request = arrive_decode(&mut pair, Mode::Pull, 64, 0);
    allocate(&mut pair, &request, 64, 64, 10);
    prefill_all(&mut pair, 64);
    settle(&mut pair, 1);
    assert_eq!(pair.prefill_said, [freed(None)]);
    assert!(pair.at_rest());
}

#[test]
fn what_came_after_the_lease_less_its_margin_is_not_used() {
    // Of 5 s a reader uses 4.5 s.
    let settings = CoreSettings { lease: Nanos::from_secs(5), ..CoreSettings::default() };
    let mut pair = PairWorld::with(Mode::Pull, 1, 1, &settings);
    let request = arrive_decode(&mut pair, Mode::Pull, 64, 0);
    arrive_prefill(&mut pair, Mode::Pull, 64, 1);
    prefill_all(&mut pair, 64);
    pair.run(pair.now + Nanos::from_ms(10));
    // No renewal gets through.
    pair.frame_passes = Box::new(|_: Speaker| false);
    pair.run(pair.now + Nanos::from_ms(4_700));
    let failure = Failure::LeaseExpired;
    let rejected = DecodeAnswer::Rejected { request, failure };
    assert_eq!(pair.decode_said.last(), Some(&rejected));
}

#[test]
fn a_source_that_is_read_is_kept_though_its_memory_cannot_be_used() {
    let mut pair = PairWorld::new(Mode::Pull, 1, 1);
    pair.op_fate = Box::new(|_| OpResult::Silent);
    let request = arrive_decode(&mut pair, Mode::Pull, 64, 0);
    allocate(&mut pair, &request, 0, 64, 10);
    arrive_prefill(&mut pair, Mode::Pull, 64, 1);
    prefill_all(&mut pair, 64);
    pair.run(pair.now + Nanos::from_ms(100));
    let failure = Failure::Fabric(FabricError::RemoteAccess);
    let report = TransferReport::Unusable { failure: failure.clone() };
    pair.prefill(PrefillInput::Report { rank: 0, report });
    assert_eq!(pair.prefill_said, [], "decode reads it");
    settle(&mut pair, 8);
    assert_eq!(pair.decode_said, [DecodeAnswer::LoadFailed { request, failure: failure.clone() }]);
    assert_eq!(pair.prefill_said, [freed(Some(failure))]);
}

#[test]
fn a_source_is_given_back_by_a_decode_whose_memory_cannot_be_used() {
    let mut pair = PairWorld::new(Mode::Pull, 1, 1);
    let request = arrive_decode(&mut pair, Mode::Pull, 64, 0);
    arrive_prefill(&mut pair, Mode::Pull, 64, 1);
    prefill_all(&mut pair, 64);
    settle(&mut pair, 1);
    assert_eq!(pair.prefill_said, []);
    let failure = Failure::Fabric(FabricError::RemoteAccess);
    let report = TransferReport::Unusable { failure: failure.clone() };
    pair.decode(DecodeInput::Report { rank: 0, report });
    settle(&mut pair, 1);
    assert_eq!(pair.decode_said.last(), Some(&DecodeAnswer::Rejected { request, failure }));
    assert_eq!(pair.prefill_said, [freed(None)]);
}
