//! KV that is verified: what both sides digest, what differs, and who cannot.

use super::*;
use kvferry_engine::core::dialect::native::{Frame, decode as read};
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::core::verify::{DigestPlan, Verify};

const TOKENS: u32 = 100;
const OTHER_HASH: PromptHash = PromptHash([7, 8]);

/// A prompt that moves between a prefill and a decode which verify, and the one answer to it.
fn moved(pair: &mut PairWorld, mode: Mode, computed: u32) -> (RequestId, Vec<DecodeAnswer>) {
    let request = arrive_decode(pair, mode, TOKENS, 0);
    arrive_prefill(pair, mode, TOKENS, 1);
    if mode == Mode::Push {
        allocate(pair, &request, computed, TOKENS, 10);
    }
    prefill_all(pair, TOKENS);
    settle(pair, 1);
    if mode == Mode::Pull {
        allocate(pair, &request, computed, TOKENS, 10);
    }
    settle(pair, 1);
    let said = pair.decode_said.iter().filter(|answer| answer.is_last()).cloned().collect();
    (request, said)
}

fn both(level: Verify, mode: Mode, tp: (u16, u16)) -> PairWorld {
    PairWorld::verifying(mode, tp, (Verify::All, level))
}

fn failure_of(answers: &[DecodeAnswer]) -> String {
    let [DecodeAnswer::LoadFailed { failure, .. } | DecodeAnswer::Rejected { failure, .. }] =
        answers
    else {
        panic!("{answers:?}");
    };
    format!("{}: {failure}", failure.kind())
}

#[test]
fn both_sides_digest_the_same_parts_whatever_their_ranks() {
    for mode in [Mode::Push, Mode::Pull] {
        for tp in [(1, 1), (2, 4), (4, 2)] {
            for computed in [0, 48] {
                let mut pair = both(Verify::All, mode, tp);
                // Longer than it takes to move them, without TP ranks.
                pair.digest_us = if tp.0 == 1 { 5_000 } else { 5 };
                let (request, said) = moved(&mut pair, mode, computed);
                assert_eq!(said, [loaded(&request)], "{mode} {tp:?}");
                let blocks = TOKENS.div_ceil(BLOCK) - computed / BLOCK;
                let parts = u64::from(blocks) * u64::from(LAYERS) * u64::from(tp.0.max(tp.1));
                let found = pair.verified();
                assert_eq!((found.blocks, found.mismatches), (parts, 0), "{mode} {tp:?}");
                assert_eq!(pair.prefill_said, [freed(None)]);
                assert!(pair.at_rest());
            }
        }
    }
}

#[test]
fn a_sample_has_a_part_of_each_layer_and_is_another_one_for_each_prompt() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = both(Verify::Sample, mode, (2, 2));
        let (request, said) = moved(&mut pair, mode, 0);
        assert_eq!(said, [loaded(&request)], "{mode}");
        let (all, found) = (7 * 2 * u64::from(LAYERS), pair.verified().blocks);
        assert!(found >= 2 * u64::from(LAYERS) && found < all, "{found} of {all}");
    }
    let plan = |name: &str, incarnation, prompt| {
        let key = TransferKey { id: name.into(), prompt: 0 };
        DigestPlan::new(Verify::Sample, (&key, Incarnation(incarnation)), prompt)
    };
    let chosen = |plan: DigestPlan| -> Vec<(u16, u32)> {
        let all = (0..LAYERS).flat_map(|layer| (0..160).map(move |behind| (layer, behind)));
        all.filter(|(layer, behind)| plan.has(*layer, *behind)).collect()
    };
    let (one, other) = (chosen(plan("t1", 1, HASH)), chosen(plan("t1", 1, OTHER_HASH)));
    assert_ne!(one, other);
    // Names have clocks in them, which change nothing of what a run does.
    assert_eq!(one, chosen(plan("t2", 2, HASH)));
    for chosen in [one, other] {
        let share = chosen.len() as f64 / (160.0 * f64::from(LAYERS));
        assert!((0.06..0.08).contains(&share), "{share}");
    }
}

/// The digests of one part differ: of block 4 in layer 5.
#[test]
fn a_wrong_block_of_a_layer_is_named_and_is_no_answer() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = both(Verify::All, mode, (1, 1));
        let plan = DigestPlan::new(Verify::All, (&key(), Incarnation(1)), HASH);
        let wrong = plan.seed(5, 4 * BLOCK, (0, 0));
        pair.digests = Box::new(move |role, seed| {
            Ok(seed.wrapping_add(u64::from(role == Role::Decode && seed == wrong)))
        });
        let (_, said) = moved(&mut pair, mode, 0);
        let why = failure_of(&said);
        let named = why.starts_with("corrupt: ") && why.contains("block 4 in layer 5");
        assert!(named && why.contains("from prefill"), "{mode}: {why}");
        assert_eq!((pair.verified().blocks, pair.verified().mismatches), (0, 1));
        assert_eq!(pair.prefill_said, [freed(None)]);
        assert!(pair.at_rest());
    }
}

/// Damage of one block of one layer, for each of them: it is found, or the block is none that moves.
#[test]
fn damage_in_any_block_and_layer_is_found_wherever_a_prefix_hit_ends() {
    let plan = DigestPlan::new(Verify::All, (&key(), Incarnation(1)), HASH);
    for mode in [Mode::Push, Mode::Pull] {
        for computed in [0, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, TOKENS - 1] {
            for (block, layer) in
                (0..TOKENS.div_ceil(BLOCK)).flat_map(|b| (0..LAYERS).map(move |l| (b, l)))
            {
                let mut pair = both(Verify::All, mode, (1, 1));
                let wrong = plan.seed(layer, block * BLOCK, (0, 0));
                pair.digests = Box::new(move |role, seed| {
                    Ok(seed.wrapping_add(u64::from(role == Role::Decode && seed == wrong)))
                });
                let (request, said) = moved(&mut pair, mode, computed);
                let what =
                    format!("{mode}, block {block} of layer {layer} behind {computed} tokens");
                if (block + 1) * BLOCK <= computed {
                    assert_eq!(said, [loaded(&request)], "{what}");
                } else {
                    let why = failure_of(&said);
                    let named = format!("block {block}");
                    assert!(why.starts_with("corrupt: ") && why.contains(&named), "{what}: {why}");
                }
            }
        }
    }
}

#[test]
fn the_right_bytes_in_a_wrong_place_differ() {
    #[cfg(feature = "planted")]
    kvferry_engine::planted::plant_from_environment();
    let key = |id: &str| TransferKey { id: id.into(), prompt: 0 };
    let plan = |id, incarnation, hash| {
        let hash = PromptHash([hash, 0]);
        DigestPlan::new(Verify::All, (&key(id), Incarnation(incarnation)), hash)
    };
    let of = |plan: DigestPlan, layer, token, ranks| plan.seed(layer, token, ranks);
    let mut seeds = vec![
        of(plan("t", 1, 7), 3, 32, (0, 1)),
        of(plan("u", 1, 7), 3, 32, (0, 1)),
        of(plan("t", 2, 7), 3, 32, (0, 1)),
        of(plan("t", 1, 8), 3, 32, (0, 1)),
        of(plan("t", 1, 7), 4, 32, (0, 1)),
        of(plan("t", 1, 7), 3, 48, (0, 1)),
        of(plan("t", 1, 7), 3, 32, (1, 0)),
    ];
    let all = seeds.len();
    seeds.sort_unstable();
    seeds.dedup();
    assert_eq!(seeds.len(), all);
}

#[test]
fn a_plane_that_cannot_read_its_bytes_fails_the_load() {
    for (mode, side) in [
        (Mode::Push, Role::Prefill),
        (Mode::Push, Role::Decode),
        (Mode::Pull, Role::Prefill),
        (Mode::Pull, Role::Decode),
    ] {
        let mut pair = both(Verify::All, mode, (2, 2));
        pair.digests = Box::new(move |role, seed| match role == side {
            true => Err(FabricError::LocalAccess),
            false => Ok(seed),
        });
        let (_, said) = moved(&mut pair, mode, 0);
        let why = failure_of(&said);
        assert!(why.contains("local protection error"), "{mode} {side}: {why}");
        assert!(pair.at_rest(), "{mode} {side}");
    }
}

#[test]
fn who_does_not_verify_is_told_so_at_the_hello() {
    for (prefill, decode) in [(Verify::Off, Verify::Sample), (Verify::All, Verify::Off)] {
        let mut pair = PairWorld::verifying(Mode::Push, (1, 1), (prefill, decode));
        let (_, said) = moved(&mut pair, Mode::Push, 0);
        let why = failure_of(&said);
        assert!(why.contains("set `verify` on both or on neither"), "{why}");
        assert!(why.starts_with("hello-refused") && pair.verified().blocks == 0, "{why}");
    }
}

#[test]
fn a_request_that_ends_while_it_is_verified_has_one_answer() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut pair = both(Verify::All, mode, (2, 2));
        let asked = Rc::new(Cell::new(false));
        let heard = asked.clone();
        pair.digests = Box::new(move |role, seed| {
            heard.set(heard.get() || role == Role::Decode);
            Ok(seed)
        });
        let request = arrive_decode(&mut pair, mode, TOKENS, 0);
        arrive_prefill(&mut pair, mode, TOKENS, 1);
        allocate(&mut pair, &request, 0, TOKENS, 10);
        prefill_all(&mut pair, TOKENS);
        for _ in 0..200_000 {
            if asked.get() {
                break;
            }
            pair.run(pair.now + Nanos::from_us(1));
        }
        let reason = FinishReason::Aborted;
        pair.decode(DecodeInput::Hook(DecodeHook::Finished { request, reason }));
        settle(&mut pair, 60);
        let said: Vec<_> = pair.decode_said.iter().filter(|answer| answer.is_last()).collect();
        assert!(
            matches!(said[..], [DecodeAnswer::LoadFailed { failure: Failure::Cancelled, .. }]),
            "{said:?}"
        );
        assert!(pair.at_rest());
    }
}

#[test]
fn nothing_is_said_of_digests_where_none_are_wanted() {
    for mode in [Mode::Push, Mode::Pull] {
        for (level, told) in [(Verify::Off, 0), (Verify::All, 2)] {
            let mut pair = PairWorld::verifying(mode, (1, 1), (level, level));
            moved(&mut pair, mode, 0);
            let of_digests = pair.frames.iter().filter(|(_, _, frame)| {
                let Ok(Frame::Data { message, .. }) = read(frame) else { return false };
                match message {
                    Message::Announce { verify, .. } | Message::Pull { verify, .. } => {
                        verify.is_some()
                    }
                    Message::Grant { digest, .. } | Message::Delivered { digest, .. } => {
                        digest.is_some()
                    }
                    _ => false,
                }
            });
            assert_eq!(of_digests.count(), told, "{mode} {level}");
        }
    }
}
