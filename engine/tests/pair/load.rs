//! What a full link and a plane with little credit do.

use super::{BLOCK, HASH, LAYERS, allocate, loaded, settle};
use crate::world::{OpResult, PairWorld, caps};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::decode::DecodeInput;
use kvferry_engine::core::ids::{RequestId, StepId, TransferKey};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::*;
use kvferry_engine::core::prefill::PrefillInput;
use kvferry_engine::core::transfer::TransferSettings;
use kvferry_engine::fabric::{Caps, Credits, FabricError, Landed, Placement, PlaneTimeouts};
use std::cell::RefCell;
use std::rc::Rc;

pub(super) const TOKENS: u32 = 4 * BLOCK;

/// As real planes have it: what has completed is there.
pub(super) fn placed(per_peer: Credits, in_all: Credits) -> Caps {
    Caps { per_peer, in_all, placement: Placement::OnCompletion, ..caps() }
}

pub(super) fn unlimited() -> Caps {
    placed(Credits::UNLIMITED, Credits::UNLIMITED)
}

pub(super) fn request(n: u32) -> RequestId {
    format!("d-{n}").into()
}

/// Prompt `n` is computed, and granted to its decode.
pub(super) fn offer(pair: &mut PairWorld, n: u32, tokens: u32) {
    let key = TransferKey { id: format!("t{n}").into(), prompt: 0 };
    let leg = DecodeLeg::new(key.clone(), Mode::Pull, "prefill".into(), "prefill-control".into());
    let arrived = DecodeHook::Arrived { request: request(n), leg, tokens, prompt_hash: HASH };
    pair.decode(DecodeInput::Hook(arrived));
    let leg = PrefillLeg::new(key, Mode::Pull);
    let prompt = RequestId::from(format!("p-{n}"));
    let arrived = PrefillHook::Arrived { request: prompt.clone(), leg, tokens, prompt_hash: HASH };
    pair.prefill(PrefillInput::Hook(arrived));
    let blocks = vec![BlockList::new((40 * n..40 * n + tokens.div_ceil(BLOCK)).collect())];
    let chunk = Chunk { request: prompt.clone(), from: 0, to: tokens, blocks };
    let step = StepId(u64::from(n));
    pair.prefill(PrefillInput::Hook(PrefillHook::Scheduled { step, chunks: vec![chunk] }));
    pair.compute(u64::from(n), LAYERS);
    let finished = PrefillHook::Finished { request: prompt, reason: FinishReason::Length };
    pair.prefill(PrefillInput::Hook(finished));
}

pub(super) fn offer_all(pair: &mut PairWorld, count: u32) {
    for n in 1..=count {
        offer(pair, n, TOKENS);
    }
    settle(pair, 1);
}

/// Decode has blocks for prompt `n`.
pub(super) fn take(pair: &mut PairWorld, n: u32, tokens: u32) {
    allocate(pair, &request(n), 0, tokens, 40 * n);
}

fn loads(pair: &PairWorld) -> usize {
    pair.decode_said.iter().filter(|said| matches!(said, DecodeAnswer::Loaded { .. })).count()
}

#[test]
fn nothing_is_posted_beyond_the_credit_of_a_plane() {
    let four = Credits::of_operations(4);
    let ranges = Credits { ranges: 7, ..Credits::UNLIMITED };
    let bytes = Credits { bytes: 9_000, ..Credits::UNLIMITED };
    for few in [four, ranges, bytes, Credits { operations: 1, ..ranges }] {
        for caps in [placed(few, Credits::UNLIMITED), placed(Credits::UNLIMITED, few)] {
            for flows in [2_u32, 7, 15] {
                let mut pair = PairWorld::over(caps, Mode::Pull, TransferSettings::default());
                pair.op_us = Box::new(|_, _| 500);
                offer_all(&mut pair, flows);
                for n in 1..=flows {
                    take(&mut pair, n, TOKENS);
                }
                settle(&mut pair, 5);
                assert_eq!(loads(&pair), flows as usize, "{caps:?}");
                assert!(pair.posted.values().all(|times| *times == 1), "{:?}", pair.posted);
                assert!(pair.at_rest());
            }
        }
    }
}

#[test]
fn a_plane_that_is_busy_costs_no_try_and_little_work() {
    let settings = TransferSettings { retries_max: 0, ..TransferSettings::default() };
    let mut pair = PairWorld::over(unlimited(), Mode::Pull, settings);
    pair.credit = 2;
    pair.op_us = Box::new(|_, _| 500);
    offer_all(&mut pair, 7);
    for n in 1..=7 {
        take(&mut pair, n, TOKENS);
    }
    settle(&mut pair, 5);
    assert_eq!(loads(&pair), 7);
    let needed = 7 * u64::from(LAYERS);
    assert_eq!(pair.ops - pair.refused, needed);
    assert!(pair.refused <= needed, "{} refused, {needed} needed", pair.refused);
}

#[test]
fn one_more_operation_is_tried_after_as_many_as_are_in_flight() {
    let mut pair = PairWorld::over(unlimited(), Mode::Pull, TransferSettings::default());
    pair.credit = 1;
    let at_once = Rc::new(RefCell::new(Vec::new()));
    let seen = at_once.clone();
    pair.op_us = Box::new(move |_, used| {
        seen.borrow_mut().push(used.operations);
        500
    });
    offer_all(&mut pair, 7);
    for n in 1..=7 {
        take(&mut pair, n, TOKENS);
    }
    pair.run(pair.now + Nanos::from_us(100));
    let refused = pair.refused;
    assert!(refused > 0, "one at a time is all that it takes");
    pair.credit = usize::MAX;
    settle(&mut pair, 5);
    assert_eq!((loads(&pair), pair.refused), (7, refused));
    // With so many beside it an operation is posted for each of them and for itself as they complete,
    // and one more then.
    let posted = |beside: u32| at_once.borrow().iter().filter(|it| **it == beside).count() as u32;
    let counts: Vec<u32> = (0..8).map(posted).collect();
    assert_eq!(counts, (0..8).map(|beside| beside + 2).collect::<Vec<_>>());
}

#[test]
fn a_block_of_more_ranges_than_an_operation_may_have_is_moved_in_parts() {
    for slices_max in [1, 3] {
        // Four blocks that are not neighbours, each one range.
        let caps = Caps { slices_max, ..unlimited() };
        let mut pair = PairWorld::over(caps, Mode::Pull, TransferSettings::default());
        pair.op_us = Box::new(|more, _| more.bytes);
        offer_all(&mut pair, 1);
        let blocks = vec![BlockList::new(vec![9, 3, 30, 12])];
        let allocated = DecodeHook::Allocated { request: request(1), computed: 0, blocks };
        pair.decode(DecodeInput::Hook(allocated));
        settle(&mut pair, 1);
        assert_eq!(loads(&pair), 1);
        let each = 4_u32.div_ceil(slices_max);
        assert_eq!(pair.ops, u64::from(each) * u64::from(LAYERS));
        assert!(pair.posted.values().all(|times| *times == 1), "{:?}", pair.posted);
    }
}

#[test]
fn an_operation_that_failed_is_repeated_and_no_other() {
    for slices_max in [1, 1_024] {
        let caps = Caps { slices_max, ..unlimited() };
        let mut pair = PairWorld::over(caps, Mode::Pull, TransferSettings::default());
        pair.op_fate = Box::new(|n| match n {
            5 => OpResult::Fails(FabricError::AckTimeout, Landed::Unknown),
            9 => OpResult::Fails(FabricError::AckTimeout, Landed::None),
            _ => OpResult::Done,
        });
        offer_all(&mut pair, 2);
        let blocks = vec![BlockList::new(vec![9, 3, 30, 12])];
        let allocated = DecodeHook::Allocated { request: request(1), computed: 0, blocks };
        pair.decode(DecodeInput::Hook(allocated));
        settle(&mut pair, 1);
        assert_eq!(loads(&pair), 1);
        let twice = pair.posted.values().filter(|times| **times == 2).count();
        let once = pair.posted.values().filter(|times| **times == 1).count();
        assert_eq!((twice, twice + once), (2, pair.posted.len()));
    }
}

#[test]
fn neighbours_that_leave_cost_a_read_nothing() {
    for leave in 0..=8 {
        let mut pair = PairWorld::over(unlimited(), Mode::Pull, TransferSettings::default());
        // One after the other, 300 ms each: it takes longer than any quiet may, and moves.
        pair.op_us = Box::new(|_, used| 300_000 * u64::from(used.operations + 1));
        offer_all(&mut pair, 1 + leave);
        take(&mut pair, 1, TOKENS);
        pair.run(pair.now + Nanos::from_ms(50));
        for n in 2..2 + leave {
            take(&mut pair, n, TOKENS);
            pair.run(pair.now + Nanos::from_ms(50));
            let reason = FinishReason::Aborted;
            pair.decode(DecodeInput::Hook(DecodeHook::Finished { request: request(n), reason }));
            pair.run(pair.now + Nanos::from_ms(1_200));
        }
        settle(&mut pair, 60);
        assert!(pair.decode_said.contains(&loaded(&request(1))), "{leave} leave");
        let again: Vec<_> = pair.posted.iter().filter(|(_, times)| **times > 1).collect();
        assert!(again.is_empty(), "{leave} leave, posted more than once: {again:?}");
        assert!(pair.at_rest());
    }
}

#[test]
fn blocks_are_held_while_the_operation_that_ended_its_peer_may_land() {
    // The first failure of a session ends the peer, and with it the flow.
    let settings = TransferSettings { reopens_max: 0, ..TransferSettings::default() };
    let mut pair = PairWorld::over(unlimited(), Mode::Pull, settings);
    pair.op_fate = Box::new(|n| match n == u64::from(LAYERS) {
        true => OpResult::Fails(FabricError::QueuePair, Landed::Unknown),
        false => OpResult::Done,
    });
    pair.quiet_us = 500_000;
    offer_all(&mut pair, 1);
    take(&mut pair, 1, TOKENS);
    pair.run(pair.now + Nanos::from_ms(400));
    let ended = |pair: &PairWorld| {
        pair.decode_said.iter().any(|said| matches!(said, DecodeAnswer::LoadFailed { .. }))
    };
    assert_eq!((pair.ops, ended(&pair)), (u64::from(LAYERS), false), "{:?}", pair.decode_said);
    settle(&mut pair, 5);
    assert!(ended(&pair) && pair.at_rest(), "{:?}", pair.decode_said);
}

#[test]
fn what_waits_for_quiet_leaves_the_operations_before_it_their_time() {
    let mut pair = PairWorld::over(unlimited(), Mode::Pull, TransferSettings::default());
    // One after the other, each of which takes longer than a quiet may. One of them fails, and is
    // repeated when all of the others are over.
    pair.op_us = Box::new(|_, used| 1_500_000 * u64::from(used.operations + 1));
    pair.op_fate = Box::new(|n| match n {
        1 => OpResult::Fails(FabricError::AckTimeout, Landed::Unknown),
        _ => OpResult::Done,
    });
    offer_all(&mut pair, 1);
    take(&mut pair, 1, TOKENS);
    settle(&mut pair, 60);
    assert_eq!(loads(&pair), 1, "{:?}", pair.decode_said);
    let again = pair.posted.values().filter(|times| **times > 1).count();
    assert_eq!((again, pair.ops), (1, u64::from(LAYERS) + 1), "{:?}", pair.posted);
    assert!(pair.at_rest());
}

#[test]
fn a_read_that_moves_is_not_dead_however_long_it_takes() {
    let settings = TransferSettings {
        operation_bytes_min: 1_024,
        operation_bytes_max: 1_024,
        ..TransferSettings::default()
    };
    let mut pair = PairWorld::over(unlimited(), Mode::Pull, settings);
    // Four blocks of 1 KiB in each layer, 2 KiB a second: longer than a lease and than any stall.
    pair.op_us = Box::new(|more, used| (more.bytes + used.bytes) * 488);
    offer_all(&mut pair, 1);
    take(&mut pair, 1, TOKENS);
    settle(&mut pair, 10);
    assert_eq!(loads(&pair), 0);
    settle(&mut pair, 300);
    assert_eq!(loads(&pair), 1, "{:?}", pair.decode_said);
    assert_eq!(pair.ops, 4 * u64::from(LAYERS), "nothing is posted twice");
    assert!(pair.at_rest());
}

#[test]
fn a_plane_that_says_itself_what_has_failed_has_its_time() {
    for (seconds, tries) in [(0, 2), (8, 1)] {
        let time = Nanos::from_secs(seconds);
        let patience = PlaneTimeouts { open: time, operation: time };
        let caps = Caps { patience, ..unlimited() };
        let mut pair = PairWorld::over(caps, Mode::Pull, TransferSettings::default());
        pair.opens.0 = 7_000_000;
        let mut slow = true;
        // As on a machine that is slow at first.
        pair.op_us =
            Box::new(move |_, _| if std::mem::take(&mut slow) { 6_000_000 } else { 1_000 });
        offer_all(&mut pair, 1);
        take(&mut pair, 1, TOKENS);
        settle(&mut pair, 25);
        let opened = pair.opens.1;
        assert_eq!(opened > 1, tries > 1, "{opened} sessions with {seconds} s");
        let posted = u64::from(LAYERS);
        assert_eq!(loads(&pair) == 1 && pair.ops == posted, tries == 1, "{:?}", pair.decode_said);
    }
}

/// Milliseconds that a prompt of one block takes behind three of so many blocks. In each layer a
/// block takes 12.5 ms, an operation has four at most.
fn short_behind(blocks: u32) -> u64 {
    let four = 4 * 1_024;
    let settings = TransferSettings {
        operation_bytes_min: four,
        operation_bytes_max: four,
        ..TransferSettings::default()
    };
    let mut pair = PairWorld::over(unlimited(), Mode::Pull, settings);
    pair.op_us = Box::new(|more, used| (more.bytes + used.bytes) * 12_500 / 1_024);
    let long = 1..if blocks > 0 { 4 } else { 1 };
    for n in long.clone() {
        offer(&mut pair, n, blocks * BLOCK);
    }
    offer(&mut pair, 4, BLOCK);
    settle(&mut pair, 1);
    for n in long {
        take(&mut pair, n, blocks * BLOCK);
    }
    pair.run(pair.now + Nanos::from_ms(600));
    let start = pair.now;
    take(&mut pair, 4, BLOCK);
    for ms in 1..100_000 {
        pair.run(start + Nanos::from_ms(ms));
        if pair.decode_said.contains(&loaded(&request(4))) {
            return ms;
        }
    }
    panic!("behind {blocks}: {:?}, {} operations", pair.decode_said, pair.ops);
}

#[test]
fn a_short_prompt_does_not_wait_for_the_long_ones_before_it() {
    let (alone, operation) = (short_behind(0), 50);
    for blocks in [4, 40] {
        let behind = short_behind(blocks);
        let most = 4 * alone + 2 * operation;
        assert!(behind <= most, "{alone} ms alone, {behind} ms behind three of {blocks} blocks");
    }
}
