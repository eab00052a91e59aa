//! Failures that come again after a success: they cost nothing beyond themselves, however often.

use super::load::{TOKENS, offer, offer_all, placed, request, take, unlimited};
use super::{loaded, settle};
use crate::world::{OpResult, PairWorld};
use kvferry_engine::core::config::REBUILDS_MAX;
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::message::{DecodeAnswer, Mode};
use kvferry_engine::core::transfer::TransferSettings;
use kvferry_engine::fabric::{Credits, FabricError, Landed};
use std::cell::Cell;
use std::rc::Rc;

/// Has the next operation of a pair fail so whenever the cell says so.
fn fragile(pair: &mut PairWorld, error: FabricError) -> Rc<Cell<bool>> {
    let fails = Rc::new(Cell::new(false));
    let next = fails.clone();
    pair.op_fate = Box::new(move |_| match next.take() {
        true => OpResult::Fails(error.clone(), Landed::None),
        false => OpResult::Done,
    });
    fails
}

#[test]
fn session_that_dies_between_successes_is_opened_anew_each_time() {
    let settings = TransferSettings::default();
    let rounds = settings.reopens_max + 2;
    let mut pair = PairWorld::over(unlimited(), Mode::Pull, settings);
    let fails = fragile(&mut pair, FabricError::QueuePair);
    for n in 1..=rounds {
        offer(&mut pair, n, TOKENS);
        settle(&mut pair, 1);
        fails.set(true);
        take(&mut pair, n, TOKENS);
        settle(&mut pair, 2);
        assert_eq!(pair.decode_said.last(), Some(&loaded(&request(n))));
    }
    assert!(pair.at_rest());
}

#[test]
fn operations_that_fail_once_each_end_no_transfer() {
    let settings = TransferSettings {
        operation_bytes_min: 1_024,
        operation_bytes_max: 1_024,
        ..TransferSettings::default()
    };
    let rounds = settings.retries_max + 2;
    // One after the other: each operation, then the same once more.
    let caps = placed(Credits::UNLIMITED, Credits::of_operations(1));
    let mut pair = PairWorld::over(caps, Mode::Pull, settings);
    pair.op_fate = Box::new(|n| match n % 2 {
        1 => OpResult::Fails(FabricError::AckTimeout, Landed::None),
        _ => OpResult::Done,
    });
    offer_all(&mut pair, 1);
    take(&mut pair, 1, TOKENS);
    settle(&mut pair, 5);
    assert_eq!(pair.decode_said.last(), Some(&loaded(&request(1))));
    assert!(pair.posted.len() >= rounds as usize, "{:?}", pair.posted);
    assert!(pair.posted.values().all(|times| *times == 2), "{:?}", pair.posted);
    assert!(pair.at_rest());
}

#[test]
fn peer_whose_sessions_end_between_successes_is_connected_anew_each_time() {
    let settings = TransferSettings { reopens_max: 0, ..TransferSettings::default() };
    let mut pair = PairWorld::over(unlimited(), Mode::Pull, settings);
    let fails = fragile(&mut pair, FabricError::QueuePair);
    for n in 1..=REBUILDS_MAX + 2 {
        for (number, is_bad) in [(2 * n, true), (2 * n + 1, false)] {
            offer(&mut pair, number, TOKENS);
            settle(&mut pair, 1);
            fails.set(is_bad);
            take(&mut pair, number, TOKENS);
            settle(&mut pair, 2);
            let request = request(number);
            let failure = Failure::Fabric(FabricError::QueuePair);
            let answer = match is_bad {
                true => DecodeAnswer::LoadFailed { request, failure },
                false => loaded(&request),
            };
            assert_eq!(pair.decode_said.last(), Some(&answer));
        }
    }
    assert!(pair.at_rest());
}

/// Prefills that are out of reach, as the decode said last.
fn troubles(pair: &PairWorld) -> Vec<String> {
    let register = |(_, _, frame): &(_, _, Vec<u8>)| match native::decode(frame) {
        Ok(Frame::Register(said)) => Some(said),
        _ => None,
    };
    let last = pair.frames.iter().rev().find_map(register).expect("it has registered");
    last.troubles.iter().map(|it| it.engine.to_string()).collect()
}

#[test]
fn trouble_with_a_peer_ends_with_the_next_prompt_that_comes() {
    let settings = TransferSettings { reopens_max: 0, ..TransferSettings::default() };
    let mut pair = PairWorld::behind_a_router(Mode::Pull, settings);
    let fails = fragile(&mut pair, FabricError::QueuePair);
    for round in 0..3 {
        for (n, is_bad) in [(2 * round + 1, true), (2 * round + 2, false)] {
            offer(&mut pair, n, TOKENS);
            settle(&mut pair, 1);
            fails.set(is_bad);
            take(&mut pair, n, TOKENS);
            settle(&mut pair, 5);
            let expected: &[&str] = if is_bad { &["prefill"] } else { &[] };
            assert_eq!(troubles(&pair), expected, "prompt {n}");
        }
    }
}
