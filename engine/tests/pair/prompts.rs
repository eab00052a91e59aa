//! Legs with different prompts: KV of one prompt is never handed to the other.

use super::*;
use kvferry_engine::core::dialect::native::{Frame, decode as read};
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::core::verify::Verify;

const TOKENS: u32 = 100;
const OTHER_HASH: PromptHash = PromptHash([7, 8]);

/// Event that comes first: the decode's `Ask` or its blocks, or the prefill's leg or its KV.
#[derive(Clone, Copy, Debug)]
enum LegOrder {
    Asked,
    Allocated,
    Arrived,
    Computed,
}

fn arrive_other_prompt(pair: &mut PairWorld, mode: Mode) {
    let (request, leg) = (RequestId::from("p-1"), PrefillLeg::new(key(), mode));
    let (tokens, prompt_hash) = (TOKENS, OTHER_HASH);
    let hook = PrefillHook::Arrived { request, leg, tokens, prompt_hash };
    pair.prefill(PrefillInput::Hook(hook));
}

fn hand_over(pair: &mut PairWorld, mode: Mode, order: LegOrder) {
    let ask = |pair: &mut PairWorld, is_allocated: bool| {
        let request = arrive_decode(pair, mode, TOKENS, 0);
        if is_allocated {
            allocate(pair, &request, 0, TOKENS, 10);
        }
        settle(pair, 1);
    };
    match order {
        LegOrder::Asked | LegOrder::Allocated => {
            ask(pair, matches!(order, LegOrder::Allocated));
            arrive_other_prompt(pair, mode);
            settle(pair, 1);
            prefill_all(pair, TOKENS);
        }
        LegOrder::Arrived => {
            arrive_other_prompt(pair, mode);
            ask(pair, false);
            prefill_all(pair, TOKENS);
        }
        LegOrder::Computed => {
            arrive_other_prompt(pair, mode);
            prefill_all(pair, TOKENS);
            ask(pair, true);
        }
    }
    settle(pair, 60);
}

/// True if the prefill made a decode allocate blocks, or granted it blocks to read.
fn has_promised(pair: &PairWorld) -> bool {
    pair.frames.iter().any(|(_, _, frame)| {
        let Ok(Frame::Data { message, .. }) = read(frame) else { return false };
        matches!(message, Message::Begun { .. } | Message::Grant { .. } | Message::Delivered { .. })
    })
}

#[test]
fn other_prompt_of_equal_length_fails_with_both_hashes_and_moves_no_byte() {
    #[cfg(feature = "planted")]
    kvferry_engine::planted::plant_from_environment();
    let orders = [LegOrder::Asked, LegOrder::Allocated, LegOrder::Arrived, LegOrder::Computed];
    for mode in [Mode::Push, Mode::Pull] {
        for (order, level) in
            orders.iter().flat_map(|order| [Verify::Off, Verify::All].map(|level| (*order, level)))
        {
            let mut pair = PairWorld::verifying(mode, (2, 2), (level, level));
            hand_over(&mut pair, mode, order);
            let said: Vec<_> = pair.decode_said.iter().filter(|said| said.is_last()).collect();
            let [DecodeAnswer::LoadFailed { failure, .. } | DecodeAnswer::Rejected { failure, .. }] =
                said[..]
            else {
                panic!("{mode} {order:?}: {said:?}");
            };
            let expected = Failure::PromptMismatch { decode: HASH, prefill: OTHER_HASH };
            assert_eq!(*failure, expected, "{mode} {order:?}");
            let text = failure.to_string();
            assert!(text.contains(&HASH.to_string()) && text.contains(&OTHER_HASH.to_string()));
            assert!(pair.ops == 0 && !has_promised(&pair), "{mode} {order:?}");
            assert!(pair.at_rest(), "{mode} {order:?}");
        }
    }
}

#[test]
fn decode_that_has_the_whole_prompt_needs_no_equal_one() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = PairWorld::new(mode, 1, 1);
        let request = arrive_decode(&mut pair, mode, TOKENS, 0);
        allocate(&mut pair, &request, TOKENS, TOKENS, 10);
        arrive_other_prompt(&mut pair, mode);
        prefill_all(&mut pair, TOKENS);
        settle(&mut pair, 60);
        assert!(pair.decode_said.contains(&loaded(&request)), "{mode}: {:?}", pair.decode_said);
        assert!(pair.ops == 0 && pair.at_rest(), "{mode}");
    }
}
