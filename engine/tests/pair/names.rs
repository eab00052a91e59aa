//! Names that come again: of transfers, attempts, and incarnations of a peer.

use super::{HASH, allocate, arrive_decode, arrive_decode_for, arrive_prefill, freed, loaded};
use super::{prefill_all, settle};
use crate::world::{PairWorld, Speaker};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::config::CoreSettings;
use kvferry_engine::core::decode::DecodeInput;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{Incarnation, RequestId};
use kvferry_engine::core::layout::Mismatch;
use kvferry_engine::core::message::{
    DecodeAnswer, DecodeHook, FinishReason, Mode, PrefillAnswer, PrefillHook, PrefillLeg,
};
use kvferry_engine::core::prefill::PrefillInput;

fn abort(pair: &mut PairWorld, request: &RequestId) {
    let (request, reason) = (request.clone(), FinishReason::Aborted);
    pair.decode(DecodeInput::Hook(DecodeHook::Finished { request, reason }));
}

#[test]
fn a_leg_that_comes_again_after_its_end_is_refused() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 1, 1);
        arrive_prefill(&mut pair, mode, 64, 2);
        prefill_all(&mut pair, 64);
        let first = arrive_decode(&mut pair, mode, 64, 0);
        allocate(&mut pair, &first, 0, 64, 10);
        settle(&mut pair, 1);
        assert_eq!(pair.decode_said, [loaded(&first)]);
        let request = arrive_decode(&mut pair, mode, 64, 0);
        let failure = Failure::DuplicateKey;
        assert_eq!(pair.decode_said[1..], [DecodeAnswer::Rejected { request, failure }]);
    }
}

#[test]
fn more_copies_of_a_prompt_than_it_has_samples_are_refused() {
    let mut pair = PairWorld::new(Mode::Push, 1, 1);
    arrive_prefill(&mut pair, Mode::Push, 64, 1);
    let (key, mode) = (super::key(), Mode::Push);
    let leg = PrefillLeg::new(key, mode);
    let request = RequestId::from("p-2");
    let hook =
        PrefillHook::Arrived { request: request.clone(), leg, tokens: 64, prompt_hash: HASH };
    pair.prefill(PrefillInput::Hook(hook));
    let failure = Failure::DuplicateKey;
    assert_eq!(pair.prefill_said, [PrefillAnswer::Rejected { request, failure }]);
}

#[test]
fn a_later_incarnation_is_not_told_what_an_earlier_one_had() {
    let mut pair = PairWorld::new(Mode::Pull, 1, 1);
    let incarnation = Some(Incarnation(1));
    let request = arrive_decode_for(&mut pair, Mode::Pull, 64, 0, incarnation);
    settle(&mut pair, 1);
    // The release is never heard of, and what would have heard it is gone.
    pair.frame_passes = Box::new(|_: Speaker| false);
    allocate(&mut pair, &request, 64, 64, 10);
    settle(&mut pair, 8);
    pair.restart_prefill(Mode::Pull, 1);
    pair.frame_passes = Box::new(|_: Speaker| true);
    settle(&mut pair, 4);
    assert!(pair.at_rest(), "the new incarnation waits for a prompt that it never had");
}

#[test]
fn a_grant_of_an_attempt_before_is_not_read_under() {
    let settings = CoreSettings { tombstones_max: 0, ..CoreSettings::default() };
    let mut pair = PairWorld::with(Mode::Pull, 1, 1, &settings);
    let first = arrive_decode(&mut pair, Mode::Pull, 64, 0);
    arrive_prefill(&mut pair, Mode::Pull, 64, 1);
    settle(&mut pair, 1);
    // While the grant is on its way the request is left, and comes again under its name.
    prefill_all(&mut pair, 64);
    abort(&mut pair, &first);
    let again = arrive_decode(&mut pair, Mode::Pull, 64, 0);
    allocate(&mut pair, &again, 0, 64, 10);
    settle(&mut pair, 1);
    assert_eq!(pair.prefill_said, [freed(None)]);
    assert!(!pair.decode_said.contains(&loaded(&again)), "what is read has been freed");
}

#[test]
fn a_release_of_an_attempt_before_ends_no_receiver() {
    let settings = CoreSettings { tombstones_max: 0, ..CoreSettings::default() };
    let mut pair = PairWorld::with(Mode::Push, 1, 1, &settings);
    let incarnation = Some(Incarnation(1));
    let arrive = |pair: &mut PairWorld| arrive_decode_for(pair, Mode::Push, 64, 1, incarnation);
    arrive_decode_for(&mut pair, Mode::Push, 64, 0, incarnation);
    arrive_prefill(&mut pair, Mode::Push, 64, 2);
    prefill_all(&mut pair, 64);
    settle(&mut pair, 1);
    // The prefill hears nothing of the first attempt but, when both meet again, its release.
    pair.frame_passes = Box::new(|_: Speaker| false);
    let request = arrive(&mut pair);
    settle(&mut pair, 12);
    let rejected =
        DecodeAnswer::Rejected { request: request.clone(), failure: Failure::PeerSilent };
    assert_eq!(pair.decode_said.last(), Some(&rejected));
    // Whoever just failed is left alone for a while; then the connection begins anew.
    let mut left_alone = false;
    loop {
        let said = pair.decode_said.len();
        arrive(&mut pair);
        let rejected = pair.decode_said.len() > said;
        if left_alone && !rejected {
            break;
        }
        if !rejected {
            abort(&mut pair, &request);
        }
        left_alone |= rejected;
        pair.run(pair.now + Nanos::from_ms(10));
    }
    pair.frame_passes = Box::new(|_: Speaker| true);
    settle(&mut pair, 2);
    let due = DecodeAnswer::Allocate { request: request.clone() };
    assert_eq!(pair.decode_said.last(), Some(&due));
    allocate(&mut pair, &request, 0, 64, 30);
    settle(&mut pair, 2);
    assert_eq!(pair.decode_said.last(), Some(&loaded(&request)));
}

#[test]
fn a_sibling_that_the_prompt_does_not_have_is_refused_and_costs_the_others_nothing() {
    for mode in [Mode::Push, Mode::Pull] {
        for early in [true, false] {
            let mut pair = PairWorld::new(mode, 1, 1);
            let stray = early.then(|| arrive_decode(&mut pair, mode, 64, 7));
            settle(&mut pair, 1);
            arrive_prefill(&mut pair, mode, 64, 1);
            let stray = stray.unwrap_or_else(|| arrive_decode(&mut pair, mode, 64, 7));
            prefill_all(&mut pair, 64);
            settle(&mut pair, 1);
            let failure = Failure::Mismatch(Mismatch("sibling 7 of 1".into()));
            let refused = DecodeAnswer::Rejected { request: stray, failure };
            assert_eq!(pair.decode_said, [refused]);
            assert_eq!(pair.prefill_said, [], "sibling 0 is still to come");
            let request = arrive_decode(&mut pair, mode, 64, 0);
            allocate(&mut pair, &request, 0, 64, 10);
            settle(&mut pair, 1);
            assert_eq!(pair.decode_said[1..], [loaded(&request)]);
            assert!(pair.at_rest());
        }
    }
}
