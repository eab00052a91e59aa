//! What a prefill and a decode engine say to each other, case by case. Each claim of
//! `CONTRACT.md` that a small world can show is pinned here.

mod again;
mod bounds;
mod damage;
mod integrity;
mod leases;
mod load;
mod names;
mod newer;
mod prompts;
mod resets;
mod room;
mod stale;
mod told;
mod verify;
mod versions;
mod windows;
mod world;

use kvferry_engine::core::Nanos;
use kvferry_engine::core::decode::DecodeInput;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{Incarnation, RequestId, StepId, TransferKey};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::*;
use kvferry_engine::core::prefill::PrefillInput;
use kvferry_engine::fabric::{FabricError, Landed};
use std::{cell::Cell, rc::Rc};
use world::{BLOCK, HASH, LAYERS, OpResult, PairWorld, Speaker};

fn key() -> TransferKey {
    TransferKey { id: "t1".into(), prompt: 0 }
}

fn arrive_prefill(pair: &mut PairWorld, mode: Mode, tokens: u32, siblings: u32) {
    arrive_prefill_for(pair, mode, tokens, siblings, None);
}

fn arrive_prefill_for(
    pair: &mut PairWorld,
    mode: Mode,
    tokens: u32,
    siblings: u32,
    incarnation: Option<Incarnation>,
) {
    let leg = PrefillLeg { siblings, incarnation, ..PrefillLeg::new(key(), mode) };
    let request = RequestId::from("p-1");
    let hook = PrefillHook::Arrived { request, leg, tokens, prompt_hash: HASH };
    pair.prefill(PrefillInput::Hook(hook));
}

fn arrive_decode(pair: &mut PairWorld, mode: Mode, tokens: u32, sibling: u32) -> RequestId {
    arrive_decode_for(pair, mode, tokens, sibling, None)
}

fn arrive_decode_for(
    pair: &mut PairWorld,
    mode: Mode,
    tokens: u32,
    sibling: u32,
    incarnation: Option<Incarnation>,
) -> RequestId {
    let request = RequestId::from(format!("d-{sibling}"));
    let leg = DecodeLeg {
        sibling,
        incarnation,
        ..DecodeLeg::new(key(), mode, "prefill".into(), "prefill-control".into())
    };
    let hook = DecodeHook::Arrived { request: request.clone(), leg, tokens, prompt_hash: HASH };
    pair.decode(DecodeInput::Hook(hook));
    request
}

fn allocate(pair: &mut PairWorld, request: &RequestId, computed: u32, tokens: u32, first: u32) {
    let blocks = (0..tokens.div_ceil(BLOCK)).map(|i| first + i).collect();
    pair.decode(DecodeInput::Hook(DecodeHook::Allocated {
        request: request.clone(),
        computed,
        blocks: vec![BlockList::new(blocks)],
    }));
}

fn schedule(pair: &mut PairWorld, step: u64, from: u32, to: u32) {
    let (first, last) = (from.div_ceil(BLOCK), to.div_ceil(BLOCK));
    let blocks = vec![BlockList { first, ids: (1 + first..1 + last).collect() }];
    let chunk = Chunk { request: "p-1".into(), from, to, blocks };
    pair.prefill(PrefillInput::Hook(PrefillHook::Scheduled {
        step: StepId(step),
        chunks: vec![chunk],
    }));
}

fn finish(pair: &mut PairWorld, reason: FinishReason) {
    let request = RequestId::from("p-1");
    pair.prefill(PrefillInput::Hook(PrefillHook::Finished { request, reason }));
}

/// Computes the whole prompt in two chunks.
fn prefill_all(pair: &mut PairWorld, tokens: u32) {
    let half = tokens / 2;
    schedule(pair, 1, 0, half);
    for layer in 1..=LAYERS {
        pair.compute(1, layer);
    }
    schedule(pair, 2, half, tokens);
    for layer in 1..=LAYERS {
        pair.compute(2, layer);
    }
    finish(pair, FinishReason::Length);
}

fn settle(pair: &mut PairWorld, seconds: u64) {
    pair.run(pair.now + Nanos::from_secs(seconds));
}

fn loaded(request: &RequestId) -> DecodeAnswer {
    DecodeAnswer::Loaded { request: request.clone() }
}

fn freed(failure: Option<Failure>) -> PrefillAnswer {
    PrefillAnswer::SourceFree { request: "p-1".into(), failure }
}

#[test]
fn push_delivers_layer_by_layer_between_unequal_ranks() {
    for (prefill_tp, decode_tp) in [(1, 1), (2, 4), (4, 2)] {
        let mut pair = PairWorld::new(Mode::Push, prefill_tp, decode_tp);
        let request = arrive_decode(&mut pair, Mode::Push, 100, 0);
        allocate(&mut pair, &request, 0, 100, 10);
        settle(&mut pair, 1);
        arrive_prefill(&mut pair, Mode::Push, 100, 1);
        schedule(&mut pair, 1, 0, 50);
        settle(&mut pair, 1);
        assert_eq!(pair.ops, 0, "nothing is computed yet");
        pair.compute(1, 1);
        settle(&mut pair, 1);
        let per_layer = u64::from(prefill_tp.max(decode_tp));
        assert_eq!(pair.ops, per_layer, "the first layer goes as soon as it is computed");
        prefill_all_from_second_chunk(&mut pair);
        settle(&mut pair, 1);
        assert_eq!(pair.ops, 2 * u64::from(LAYERS) * per_layer);
        assert_eq!(pair.decode_said, [loaded(&request)]);
        assert_eq!(pair.prefill_said, [freed(None)]);
        assert!(pair.at_rest());
    }
}

fn prefill_all_from_second_chunk(pair: &mut PairWorld) {
    schedule(pair, 2, 50, 100);
    pair.compute(2, LAYERS);
    finish(pair, FinishReason::Stop);
}

#[test]
fn events_of_a_push_commute() {
    // Announce before and after the prompt is computed, and before and after its leg arrives.
    for order in 0..3 {
        let mut pair = PairWorld::new(Mode::Push, 2, 2);
        if order > 0 {
            arrive_prefill(&mut pair, Mode::Push, 70, 1);
        }
        if order > 1 {
            prefill_all(&mut pair, 70);
        }
        let request = arrive_decode(&mut pair, Mode::Push, 70, 0);
        allocate(&mut pair, &request, 32, 70, 10);
        settle(&mut pair, 1);
        if order == 0 {
            arrive_prefill(&mut pair, Mode::Push, 70, 1);
        }
        if order < 2 {
            prefill_all(&mut pair, 70);
        }
        settle(&mut pair, 1);
        assert_eq!(pair.decode_said, [loaded(&request)], "order {order}");
        assert_eq!(pair.prefill_said, [freed(None)], "order {order}");
        assert!(pair.at_rest());
    }
}

#[test]
fn pull_reads_under_a_lease_and_releases() {
    let mut pair = PairWorld::new(Mode::Pull, 2, 1);
    let request = arrive_decode(&mut pair, Mode::Pull, 100, 0);
    allocate(&mut pair, &request, 0, 100, 10);
    settle(&mut pair, 1);
    assert_eq!(pair.ops, 0);
    arrive_prefill(&mut pair, Mode::Pull, 100, 1);
    prefill_all(&mut pair, 100);
    settle(&mut pair, 1);
    assert_eq!(pair.decode_said, [loaded(&request)]);
    assert_eq!(pair.prefill_said, [freed(None)]);
    assert!(pair.at_rest());
}

#[test]
fn a_prefix_hit_of_everything_releases_the_source_without_a_transfer() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 1, 1);
        arrive_prefill(&mut pair, mode, 64, 1);
        let request = arrive_decode(&mut pair, mode, 64, 0);
        allocate(&mut pair, &request, 64, 64, 10);
        prefill_all(&mut pair, 64);
        settle(&mut pair, 1);
        assert_eq!(pair.ops, 0);
        assert_eq!(pair.decode_said, [loaded(&request)]);
        assert_eq!(pair.prefill_said, [freed(None)]);
        assert!(pair.at_rest());
    }
}

#[test]
fn a_lost_ack_is_retried_after_quiet() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 2, 2);
        pair.op_fate = Box::new(|n| match n {
            3 => OpResult::Fails(FabricError::AckTimeout, Landed::Unknown),
            _ => OpResult::Done,
        });
        let request = arrive_decode(&mut pair, mode, 100, 0);
        allocate(&mut pair, &request, 0, 100, 10);
        arrive_prefill(&mut pair, mode, 100, 1);
        prefill_all(&mut pair, 100);
        settle(&mut pair, 2);
        assert_eq!(pair.decode_said, [loaded(&request)], "{mode}");
        assert_eq!(pair.prefill_said, [freed(None)], "{mode}");
        assert!(pair.at_rest());
    }
}

#[test]
fn a_completion_that_never_comes_tears_the_session_down_and_is_retried() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 1, 1);
        pair.op_fate = Box::new(|n| if n == 2 { OpResult::Silent } else { OpResult::Done });
        let request = arrive_decode(&mut pair, mode, 100, 0);
        allocate(&mut pair, &request, 0, 100, 10);
        arrive_prefill(&mut pair, mode, 100, 1);
        prefill_all(&mut pair, 100);
        settle(&mut pair, 6);
        assert_eq!(pair.decode_said, [loaded(&request)], "{mode}");
        assert!(pair.at_rest());
    }
}

#[test]
fn a_transfer_that_always_fails_ends_on_both_sides() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 2, 2);
        pair.op_fate = Box::new(|_| OpResult::Fails(FabricError::RemoteAccess, Landed::Unknown));
        let request = arrive_decode(&mut pair, mode, 100, 0);
        allocate(&mut pair, &request, 0, 100, 10);
        arrive_prefill(&mut pair, mode, 100, 1);
        prefill_all(&mut pair, 100);
        settle(&mut pair, 5);
        let failure = Failure::Fabric(FabricError::RemoteAccess);
        assert_eq!(
            pair.decode_said,
            [DecodeAnswer::LoadFailed { request, failure: failure.clone() }],
            "{mode}"
        );
        assert_eq!(pair.prefill_said.len(), 1, "{mode}");
        assert!(pair.at_rest());
    }
}

#[test]
fn an_abort_while_waiting_is_answered_when_quiet() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 2, 2);
        let request = arrive_decode(&mut pair, mode, 100, 0);
        allocate(&mut pair, &request, 0, 100, 10);
        arrive_prefill(&mut pair, mode, 100, 1);
        schedule(&mut pair, 1, 0, 100);
        pair.compute(1, 2);
        settle(&mut pair, 1);
        let reason = FinishReason::Aborted;
        let hook = DecodeHook::Finished { request: request.clone(), reason };
        pair.decode(DecodeInput::Hook(hook));
        settle(&mut pair, 1);
        let failure = Failure::Cancelled;
        assert_eq!(pair.decode_said, [DecodeAnswer::LoadFailed { request, failure }], "{mode}");
        pair.compute(1, LAYERS);
        finish(&mut pair, FinishReason::Length);
        settle(&mut pair, 1);
        assert_eq!(pair.prefill_said.len(), 1, "{mode}: the source is freed at once");
        assert!(pair.at_rest());
    }
}

#[test]
fn an_abort_before_allocation_releases_the_source() {
    let mut pair = PairWorld::new(Mode::Push, 1, 1);
    arrive_prefill(&mut pair, Mode::Push, 64, 1);
    let request = arrive_decode(&mut pair, Mode::Push, 64, 0);
    let hook = DecodeHook::Finished { request, reason: FinishReason::Aborted };
    pair.decode(DecodeInput::Hook(hook));
    prefill_all(&mut pair, 64);
    settle(&mut pair, 1);
    assert_eq!(pair.decode_said, []);
    assert_eq!(pair.prefill_said, [freed(None)]);
    assert!(pair.at_rest());
}

/// A push can be over, and decode's answer too, before the engine of the prefill has one; a router
/// then leaves the prefill.
#[test]
fn a_prefill_that_is_aborted_when_decode_has_all_did_not_fail() {
    let mut pair = PairWorld::new(Mode::Push, 1, 1);
    let request = arrive_decode(&mut pair, Mode::Push, 100, 0);
    allocate(&mut pair, &request, 0, 100, 10);
    arrive_prefill(&mut pair, Mode::Push, 100, 1);
    schedule(&mut pair, 1, 0, 100);
    pair.compute(1, LAYERS);
    settle(&mut pair, 1);
    assert_eq!(pair.decode_said, [loaded(&request)]);
    finish(&mut pair, FinishReason::Aborted);
    settle(&mut pair, 1);
    assert_eq!(pair.prefill_said, [freed(None)]);
    assert!(pair.at_rest());
}

#[test]
fn a_prefill_that_ends_early_is_told() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 1, 1);
        let request = arrive_decode(&mut pair, mode, 100, 0);
        allocate(&mut pair, &request, 0, 100, 10);
        arrive_prefill(&mut pair, mode, 100, 1);
        settle(&mut pair, 1);
        schedule(&mut pair, 1, 0, 50);
        pair.compute(1, 2);
        finish(&mut pair, FinishReason::Aborted);
        settle(&mut pair, 1);
        let failure = Failure::PrefillEnded;
        assert_eq!(
            pair.decode_said,
            [DecodeAnswer::LoadFailed { request, failure: failure.clone() }],
            "{mode}"
        );
        assert_eq!(pair.prefill_said, [freed(Some(failure))], "{mode}");
        assert!(pair.at_rest());
    }
}

#[test]
fn a_preempted_prefill_is_sent_again_from_its_new_blocks() {
    let mut pair = PairWorld::new(Mode::Push, 2, 2);
    let request = arrive_decode(&mut pair, Mode::Push, 96, 0);
    allocate(&mut pair, &request, 0, 96, 10);
    arrive_prefill(&mut pair, Mode::Push, 96, 1);
    schedule(&mut pair, 1, 0, 48);
    pair.compute(1, LAYERS);
    let id = RequestId::from("p-1");
    pair.prefill(PrefillInput::Hook(PrefillHook::Preempted { request: id.clone() }));
    settle(&mut pair, 1);
    assert_eq!(pair.prefill_said, [PrefillAnswer::PreemptionSafe { request: id }]);
    schedule(&mut pair, 2, 0, 96);
    pair.compute(2, LAYERS);
    finish(&mut pair, FinishReason::Length);
    settle(&mut pair, 1);
    assert_eq!(pair.decode_said, [loaded(&request)]);
    assert_eq!(pair.prefill_said[1..], [freed(None)]);
    assert!(pair.at_rest());
}

#[test]
fn a_receiver_of_a_prompt_that_does_not_get_going_again_does_without() {
    let mut pair = PairWorld::new(Mode::Push, 1, 1);
    let request = arrive_decode(&mut pair, Mode::Push, 96, 0);
    arrive_prefill(&mut pair, Mode::Push, 96, 1);
    settle(&mut pair, 1);
    schedule(&mut pair, 1, 0, 48);
    settle(&mut pair, 1);
    allocate(&mut pair, &request, 0, 96, 10);
    settle(&mut pair, 1);
    let id = RequestId::from("p-1");
    let preempted = PrefillHook::Preempted { request: id };
    pair.prefill(PrefillInput::Hook(preempted.clone()));
    settle(&mut pair, 3);
    // It starts again, but gets no farther than before.
    schedule(&mut pair, 2, 0, 16);
    settle(&mut pair, 1);
    pair.prefill(PrefillInput::Hook(preempted));
    settle(&mut pair, 2);
    let failure = Failure::Preempted;
    assert_eq!(pair.decode_said[1..], [DecodeAnswer::LoadFailed { request, failure }]);
    finish(&mut pair, FinishReason::Aborted);
    assert_eq!(pair.prefill_said[2..], [freed(Some(Failure::Preempted))]);
    settle(&mut pair, 1);
    assert!(pair.at_rest());
}

#[test]
fn decode_gets_blocks_when_the_prefill_has_its_own() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 1, 1);
        let request = arrive_decode(&mut pair, mode, 96, 0);
        settle(&mut pair, 1);
        arrive_prefill(&mut pair, mode, 96, 1);
        settle(&mut pair, 1);
        assert_eq!(pair.decode_said, [], "{mode}: the prompt waits for blocks");
        let due = DecodeAnswer::Allocate { request: request.clone() };
        schedule(&mut pair, 1, 0, 48);
        settle(&mut pair, 1);
        let said: &[_] = if mode == Mode::Push { std::slice::from_ref(&due) } else { &[] };
        assert_eq!(pair.decode_said, said, "{mode}: what is pulled moves when it is whole");
        pair.compute(1, LAYERS);
        schedule(&mut pair, 2, 48, 96);
        settle(&mut pair, 1);
        assert_eq!(pair.decode_said, std::slice::from_ref(&due), "{mode}");
        pair.compute(2, LAYERS);
        finish(&mut pair, FinishReason::Length);
        // Longer than a lease: the receiver has the source kept while it waits for blocks.
        settle(&mut pair, 100);
        assert_eq!(pair.decode_said, [due], "{mode}");
        allocate(&mut pair, &request, 0, 96, 10);
        settle(&mut pair, 1);
        assert_eq!(pair.decode_said[1..], [loaded(&request)], "{mode}");
        assert_eq!(pair.prefill_said, [freed(None)], "{mode}");
        assert!(pair.at_rest());
    }
}

#[test]
fn a_later_incarnation_is_not_asked_for_what_an_earlier_one_had() {
    // The incarnation that is there is 1; one before it has a higher number if its clock went back.
    for (mode, past) in [(Mode::Push, 0), (Mode::Pull, 0), (Mode::Push, 2), (Mode::Pull, 2)] {
        let (mut pair, past) = (PairWorld::new(mode, 1, 1), Some(Incarnation(past)));
        let rejected =
            |request| DecodeAnswer::Rejected { request, failure: Failure::PeerRestarted };
        let first = arrive_decode_for(&mut pair, mode, 96, 0, past);
        assert_eq!(pair.decode_said, [], "the peer has not said which incarnation it is in");
        settle(&mut pair, 1);
        assert_eq!(pair.decode_said, [rejected(first)], "{mode}");
        let second = arrive_decode_for(&mut pair, mode, 96, 1, past);
        assert_eq!(pair.decode_said[1..], [rejected(second)], "{mode}");
        arrive_decode_for(&mut pair, mode, 96, 2, Some(Incarnation(1)));
        settle(&mut pair, 1);
        assert_eq!(pair.decode_said.len(), 2, "{mode}: this incarnation has it");
    }
}

#[test]
fn a_leg_for_another_incarnation_of_the_prefill_fails_at_once() {
    for mode in [Mode::Push, Mode::Pull] {
        for incarnation in [Incarnation(0), Incarnation(2)] {
            let mut pair = PairWorld::new(mode, 1, 1);
            arrive_prefill_for(&mut pair, mode, 64, 1, Some(incarnation));
            let (request, failure) = ("p-1".into(), Failure::OtherLife);
            assert_eq!(pair.prefill_said, [PrefillAnswer::Rejected { request, failure }]);
            assert!(pair.at_rest());
        }
    }
}

#[test]
fn siblings_are_served_by_one_copy_and_a_duplicate_is_refused() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 1, 1);
        arrive_prefill(&mut pair, mode, 64, 2);
        prefill_all(&mut pair, 64);
        let one = arrive_decode(&mut pair, mode, 64, 0);
        allocate(&mut pair, &one, 0, 64, 10);
        settle(&mut pair, 1);
        assert_eq!(pair.prefill_said, [], "the second sibling is still to come");
        let two = arrive_decode(&mut pair, mode, 64, 1);
        allocate(&mut pair, &two, 0, 64, 20);
        settle(&mut pair, 1);
        assert_eq!(pair.decode_said, [loaded(&one), loaded(&two)]);
        assert_eq!(pair.prefill_said, [freed(None)]);
        arrive_prefill(&mut pair, mode, 64, 2);
        let failure = Failure::DuplicateKey;
        let request = RequestId::from("p-1");
        assert_eq!(pair.prefill_said[1..], [PrefillAnswer::Rejected { request, failure }]);
        assert!(pair.at_rest());
    }
}

#[test]
fn a_source_that_nobody_fetches_is_freed_by_its_lease() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 1, 1);
        arrive_prefill(&mut pair, mode, 64, 1);
        prefill_all(&mut pair, 64);
        settle(&mut pair, 29);
        assert_eq!(pair.prefill_said, []);
        settle(&mut pair, 2);
        assert_eq!(pair.prefill_said, [freed(Some(Failure::NotFetched))]);
        assert!(pair.at_rest());
    }
}

#[test]
fn an_announce_without_a_prefill_leg_ends() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 1, 1);
        let request = arrive_decode(&mut pair, mode, 64, 0);
        allocate(&mut pair, &request, 0, 64, 10);
        settle(&mut pair, 32);
        let failure = Failure::UnknownTransfer;
        assert_eq!(pair.decode_said, [DecodeAnswer::LoadFailed { request, failure }], "{mode}");
        assert!(pair.at_rest());
    }
}

#[test]
fn a_dead_prefill_is_fenced_before_the_blocks_go_back() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 2, 2);
        let request = arrive_decode(&mut pair, mode, 100, 0);
        allocate(&mut pair, &request, 0, 100, 10);
        arrive_prefill(&mut pair, mode, 100, 1);
        settle(&mut pair, 1);
        pair.kill(Role::Prefill);
        settle(&mut pair, 12);
        let failure = Failure::PeerSilent;
        assert_eq!(pair.decode_said, [DecodeAnswer::LoadFailed { request, failure }], "{mode}");
        assert!(pair.at_rest());
    }
}

#[test]
fn a_dead_decode_costs_the_prefill_no_block_for_longer_than_its_lease() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 2, 2);
        pair.op_fate = Box::new(|_| OpResult::Silent);
        let request = arrive_decode(&mut pair, mode, 100, 0);
        allocate(&mut pair, &request, 0, 100, 10);
        arrive_prefill(&mut pair, mode, 100, 1);
        prefill_all(&mut pair, 100);
        settle(&mut pair, 1);
        pair.kill(Role::Decode);
        settle(&mut pair, 32);
        assert_eq!(pair.prefill_said.len(), 1, "{mode}");
        assert!(pair.at_rest(), "{mode}");
    }
}

#[test]
fn lost_frames_are_sent_again() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 1, 1);
        // About one in three, without a period that retransmissions could fall in step with.
        let mut state = 1_u32;
        pair.frame_passes = Box::new(move |_: Speaker| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 24 >= 85
        });
        let request = arrive_decode(&mut pair, mode, 100, 0);
        allocate(&mut pair, &request, 0, 100, 10);
        arrive_prefill(&mut pair, mode, 100, 1);
        prefill_all(&mut pair, 100);
        settle(&mut pair, 5);
        assert_eq!(pair.decode_said, [loaded(&request)], "{mode}");
        assert_eq!(pair.prefill_said, [freed(None)], "{mode}");
        assert!(pair.at_rest());
    }
}

#[test]
fn what_is_not_acknowledged_is_said_less_and_less_often() {
    let mut pair = PairWorld::new(Mode::Push, 1, 1);
    arrive_decode(&mut pair, Mode::Push, 100, 0);
    settle(&mut pair, 1);
    let said = Rc::new(Cell::new(0));
    let count = said.clone();
    pair.frame_passes = Box::new(move |_: Speaker| {
        count.set(count.get() + 1);
        false
    });
    arrive_decode(&mut pair, Mode::Push, 100, 1);
    settle(&mut pair, 2);
    // Each message after 50, 150, 350, 750 and 1,550 ms, beside the first time.
    assert!(said.get() <= 20, "{} frames in 2 s", said.get());
}
