//! Examples of what the engine tells the cores and its shell.

use crate::bench::{BenchDeadline, EngineBench};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::LegId;
use kvferry_engine::core::layout::{BlockList, GroupKind};
use kvferry_engine::core::machine::{Machine, Outbox};
use kvferry_engine::core::message::{
    DecodeAnswer, DecodeHook, FinishReason, PrefillAnswer, PrefillHook, Role,
};
use kvferry_engine::core::router::{LegEvent, LegFailure};
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::cost::StepCost;
use kvferry_scenarios::engine::{
    EngineConfig, EngineConfigError, EngineEffect, EngineInput, GroupConfig, PromptContent,
};
use kvferry_scenarios::run::{AllocationOrder, LoadFailurePolicy};

/// 11 usable blocks of 4 tokens, 16 tokens per step; 1 us per step and 1 us per token.
fn config(role: Role) -> EngineConfig {
    EngineConfig {
        role,
        tp: 1,
        layers: 4,
        groups: vec![GroupConfig { kind: GroupKind::Full, block_tokens: 4, blocks: 12 }],
        max_batched_tokens: 16,
        max_running: 8,
        max_waiting: 8,
        prefix_cache: true,
        allocator: AllocationOrder::Fifo,
        early_percent: 0,
        load_failure: LoadFailurePolicy::Recompute,
        id_seed: None,
        cost: StepCost {
            step: Nanos(1_000),
            weights: Nanos(0),
            token_fs: 1_000_000_000,
            pair_fs: 0,
            context_fs: 0,
        },
    }
}

fn prompt(tokens: u32) -> PromptContent {
    PromptContent { tokens, prefix: [].into(), prefix_tokens: 512, tail: 9 }
}

/// Everything but the observations.
fn told(bench: &mut EngineBench) -> Vec<EngineEffect> {
    let mut log = std::mem::take(&mut bench.log);
    log.retain(|effect| {
        !matches!(
            effect,
            EngineEffect::Taken { .. } | EngineEffect::Freed { .. } | EngineEffect::Use { .. }
        )
    });
    log
}

fn chunks(effects: &[EngineEffect]) -> Vec<(u32, u32, BlockList)> {
    let mut found = Vec::new();
    for effect in effects {
        if let EngineEffect::Prefill(PrefillHook::Scheduled { chunks, .. }) = effect {
            let part = chunks.iter().map(|c| (c.from, c.to, c.blocks[0].clone()));
            found.extend(part);
        }
    }
    found
}

fn end(effects: &[EngineEffect], leg: LegId) -> Option<&LegEvent> {
    effects.iter().find_map(|effect| match effect {
        EngineEffect::Leg { leg: of, event } if *of == leg && *event != LegEvent::FirstToken => {
            Some(event)
        }
        _ => None,
    })
}

/// The `computed` of every `Allocated`.
fn allocated(effects: &[EngineEffect]) -> Vec<u32> {
    let computed = effects.iter().filter_map(|effect| match effect {
        EngineEffect::Decode(DecodeHook::Allocated { computed, .. }) => Some(*computed),
        _ => None,
    });
    computed.collect()
}

#[test]
fn a_prompt_is_computed_in_chunks_and_held_until_the_source_is_free() {
    let mut bench = EngineBench::new(config(Role::Prefill));
    let leg = bench.leg(prompt(30), 1, false);
    assert_eq!(bench.step.as_ref().map(|step| step.duration), Some(Nanos(17_000)));
    bench.step_done();
    bench.step_done();
    let log = told(&mut bench);
    let list = |first, ids| BlockList { first, ids };
    let expected = [(0, 16, list(0, vec![1, 2, 3, 4])), (16, 30, list(4, vec![5, 6, 7, 8]))];
    assert_eq!(chunks(&log), expected);
    let done = LegEvent::Done { reason: FinishReason::Length, recomputed: None };
    assert_eq!(end(&log, leg), Some(&done));
    assert_eq!(bench.engine.pool(0).held, 8);
    bench.settle();
    assert_eq!((bench.engine.pool(0).held, bench.engine.pool(0).cached), (0, 7));
}

#[test]
fn prefill_hands_over_its_prefix_hits_but_computes_the_last_token() {
    let mut bench = EngineBench::new(config(Role::Prefill));
    bench.leg(prompt(16), 1, false);
    bench.settle();
    told(&mut bench);
    bench.leg(prompt(16), 1, true);
    bench.settle();
    let log = told(&mut bench);
    let blocks = chunks(&log).remove(0);
    assert_eq!((blocks.0, blocks.1, blocks.2.ids.len()), (12, 16, 4));
    let stopped = LegEvent::Done { reason: FinishReason::Stop, recomputed: None };
    assert_eq!(end(&log, LegId(2)), Some(&stopped));
}

#[test]
fn decode_waits_for_its_kv_and_computes_one_token_of_the_prompt() {
    let mut bench = EngineBench::new(config(Role::Decode));
    let leg = bench.leg(prompt(10), 4, false);
    assert!(bench.step.is_none());
    bench.answer(0, true);
    let step = bench.step.clone().expect("the last token is computed");
    assert_eq!((step.computes[0].from, step.computes[0].to, step.decoding), (9, 10, 0));
    bench.settle();
    let log = told(&mut bench);
    let kinds: Vec<&str> = log
        .iter()
        .map(|effect| match effect {
            EngineEffect::Decode(DecodeHook::Arrived { .. }) => "arrived",
            EngineEffect::Decode(DecodeHook::Allocated { .. }) => "allocated",
            EngineEffect::Decode(DecodeHook::Finished { .. }) => "finished",
            EngineEffect::Step(_) => "step",
            EngineEffect::Leg { event: LegEvent::FirstToken, .. } => "token",
            EngineEffect::Leg { .. } => "done",
            _ => "other",
        })
        .collect();
    let expected =
        ["arrived", "allocated", "step", "token", "step", "step", "step", "finished", "done"];
    assert_eq!(kinds, expected);
    let grown: Vec<u32> = log.iter().filter_map(grown).flatten().collect();
    assert_eq!(grown, [3], "token 12 is the first of logical block 3");
    let done = LegEvent::Done { reason: FinishReason::Length, recomputed: None };
    assert_eq!(end(&log, leg), Some(&done));
}

fn grown(effect: &EngineEffect) -> Option<Vec<u32>> {
    match effect {
        EngineEffect::Step(plan) => Some(plan.grown.iter().map(|g| g.logical).collect()),
        _ => None,
    }
}

#[test]
fn decode_hits_none_some_and_all_of_a_prompt() {
    let mut bench = EngineBench::new(config(Role::Decode));
    for tokens in [12, 14, 12] {
        bench.leg(prompt(tokens), 1, false);
        bench.settle();
    }
    assert_eq!(allocated(&told(&mut bench)), [0, 12, 12]);
}

#[test]
fn a_failed_load_is_recomputed_and_said_to_be() {
    let mut bench = EngineBench::new(config(Role::Decode));
    let leg = bench.leg(prompt(10), 2, false);
    bench.answer(0, false);
    bench.settle();
    let log = told(&mut bench);
    let done = LegEvent::Done { reason: FinishReason::Length, recomputed: Some(Failure::Stalled) };
    assert_eq!(end(&log, leg), Some(&done));
    assert_eq!(allocated(&log).len(), 1);
}

#[test]
fn a_failed_load_fails_the_leg_if_so_configured() {
    let fail = EngineConfig { load_failure: LoadFailurePolicy::Fail, ..config(Role::Decode) };
    let mut bench = EngineBench::new(fail);
    let leg = bench.leg(prompt(10), 2, false);
    bench.answer(0, false);
    let log = told(&mut bench);
    let failed = LegEvent::Failed(LegFailure::Instance(Failure::Stalled));
    assert_eq!(end(&log, leg), Some(&failed));
    assert_eq!(bench.engine.pool(0).free, 11);
}

#[test]
fn blocks_of_a_cancelled_load_are_quarantined_until_its_answer() {
    let mut bench = EngineBench::new(config(Role::Decode));
    let leg = bench.leg(prompt(40), 2, false);
    bench.cancel(leg);
    assert_eq!(bench.engine.pool(0).quarantined, 10);
    bench.leg(prompt(9), 2, false);
    assert_eq!(allocated(&told(&mut bench)).len(), 1, "one block is too few");
    bench.answer(0, false);
    assert_eq!(allocated(&told(&mut bench)).len(), 1);
    assert_eq!(bench.engine.pool(0).quarantined, 0);
}

#[test]
fn a_full_pool_preempts_the_decode_admitted_last_which_then_needs_no_transfer() {
    let mut bench = EngineBench::new(config(Role::Decode));
    let first = bench.leg(prompt(20), 12, false);
    let second = bench.leg(PromptContent { tail: 5, ..prompt(20) }, 12, false);
    bench.settle();
    let log = told(&mut bench);
    assert_eq!(allocated(&log).len(), 2);
    let done = LegEvent::Done { reason: FinishReason::Length, recomputed: None };
    assert_eq!((end(&log, first), end(&log, second)), (Some(&done), Some(&done)));
    let again = log.iter().any(|effect| match effect {
        EngineEffect::Step(plan) => plan.computes.iter().any(|compute| compute.to > 20),
        _ => false,
    });
    assert!(again, "prompt and generated tokens are computed again");
    let tokens = log
        .iter()
        .filter(|effect| matches!(effect, EngineEffect::Leg { event: LegEvent::FirstToken, .. }));
    assert_eq!(tokens.count(), 2);
}

#[test]
fn a_preempted_prefill_waits_until_its_blocks_are_safe() {
    let mut bench = EngineBench::new(config(Role::Prefill));
    bench.leg(prompt(30), 1, false);
    bench.input(EngineInput::PreemptOne);
    bench.step_done();
    assert_eq!(bench.due.iter().map(|due| due.1).collect::<Vec<_>>(), [BenchDeadline::Safe]);
    assert!(bench.step.is_none());
    assert_eq!(bench.engine.pool(0).quarantined, 4);
    told(&mut bench);
    bench.settle();
    // Its own blocks are prefix hits.
    let ranges: Vec<_> = chunks(&told(&mut bench)).iter().map(|c| (c.0, c.1)).collect();
    assert_eq!(ranges, [(16, 30)]);
}

#[test]
fn a_prompt_is_not_begun_before_all_of_it_fits() {
    let mut bench =
        EngineBench::new(EngineConfig { max_batched_tokens: 8, ..config(Role::Prefill) });
    let content = |tokens, tail| PromptContent { tail, ..prompt(tokens) };
    // 4 of 11 blocks are held as a source, and 2 of a request that was preempted.
    bench.leg(content(16, 1), 1, false);
    bench.step_done();
    bench.step_done();
    bench.leg(content(24, 2), 1, false);
    bench.input(EngineInput::PreemptOne);
    bench.step_done();
    told(&mut bench);
    assert!(bench.step.is_none(), "the preempted one waits for its blocks to be safe");
    let last = bench.leg(content(28, 3), 1, false);
    assert!(bench.step.is_none(), "there are blocks for its first chunk, but not for the prompt");
    bench.answer(1, true);
    let ranges: Vec<_> = chunks(&told(&mut bench)).iter().map(|c| (c.0, c.1)).collect();
    assert_eq!(ranges, [(8, 16)], "the preempted one goes first, with a prefix hit");
    bench.settle();
    assert!(!bench.open.contains(&last));
}

#[test]
fn a_window_keeps_its_last_blocks_only() {
    let window = GroupConfig { kind: GroupKind::Window { tokens: 8 }, block_tokens: 4, blocks: 12 };
    let mut bench =
        EngineBench::new(EngineConfig { groups: vec![window], ..config(Role::Prefill) });
    bench.leg(prompt(64), 1, false);
    let mut held = Vec::new();
    while bench.step.is_some() {
        bench.step_done();
        held.push(bench.engine.pool(0).held);
    }
    // Before each chunk of 4 blocks only those with the last 8 tokens are left, and at the end, too.
    assert_eq!(held, [6, 6, 6, 2]);

    let mut bench = EngineBench::new(EngineConfig { groups: vec![window], ..config(Role::Decode) });
    bench.leg(prompt(62), 1, false);
    let log = told(&mut bench);
    let list = log.iter().find_map(|effect| match effect {
        EngineEffect::Decode(DecodeHook::Allocated { blocks, .. }) => Some(blocks[0].clone()),
        _ => None,
    });
    assert_eq!(list, Some(BlockList { first: 13, ids: vec![1, 2, 3] }));
}

#[test]
fn the_last_freed_block_comes_first_if_so_configured() {
    let taken = |allocator| {
        let lifo = EngineConfig { allocator, prefix_cache: false, ..config(Role::Prefill) };
        let mut bench = EngineBench::new(lifo);
        bench.leg(prompt(8), 1, false);
        bench.settle();
        told(&mut bench);
        bench.leg(prompt(8), 1, false);
        chunks(&told(&mut bench))[0].2.ids.clone()
    };
    assert_eq!(taken(AllocationOrder::Lifo), [1, 2]);
    assert_eq!(taken(AllocationOrder::Fifo), [3, 4]);
}

#[test]
fn what_can_never_run_is_a_bad_request() {
    let mut bench = EngineBench::new(config(Role::Decode));
    for (tokens, output, why) in [
        (0, 1, "the prompt is empty"),
        (4, 0, "no token is to be generated"),
        (
            40,
            6,
            "40 prompt tokens and 6 to generate need 12 blocks of KV cache group 0, which has 11",
        ),
    ] {
        let leg = bench.leg(prompt(tokens), output, false);
        let log = told(&mut bench);
        let failed = LegEvent::Failed(LegFailure::Request(why.into()));
        assert_eq!((log.len(), end(&log, leg)), (1, Some(&failed)));
    }
    for _ in 0..8 {
        bench.leg(prompt(4), 1, false);
    }
    let leg = bench.leg(prompt(4), 1, false);
    let busy = LegEvent::Failed(LegFailure::Busy { retry_after: None });
    assert_eq!(end(&told(&mut bench), leg), Some(&busy));
}

#[test]
fn an_answer_that_is_not_due_is_a_fault() {
    let mut bench = EngineBench::new(config(Role::Decode));
    bench.leg(prompt(10), 3, false);
    let request = bench.due[0].0.clone();
    bench.answer(0, true);
    for request in [request, "nobody".into()] {
        let mut out = Outbox::new();
        let again = EngineInput::Decode(DecodeAnswer::Loaded { request });
        bench.engine.handle(Nanos::ZERO, again, &mut out);
        assert!(matches!(out.as_slice(), [EngineEffect::Fault(_)]), "{out:?}");
    }
}

#[test]
fn a_source_cannot_be_free_before_its_request_has_ended() {
    let mut bench = EngineBench::new(config(Role::Prefill));
    bench.leg(prompt(30), 1, false);
    let request = bench.engine.request_of(LegId(1)).cloned().expect("it is running");
    let answers = [
        PrefillAnswer::SourceFree { request: request.clone(), failure: None },
        PrefillAnswer::PreemptionSafe { request },
    ];
    for answer in answers {
        let mut out = Outbox::new();
        bench.engine.handle(Nanos::ZERO, EngineInput::Prefill(answer), &mut out);
        assert!(matches!(out.as_slice(), [EngineEffect::Fault(_)]), "{out:?}");
    }
    assert_eq!(bench.engine.pool(0).held, 4);
}

#[test]
fn settings_with_which_nothing_could_run_are_refused() {
    let mut bad = config(Role::Decode);
    bad.groups[0].blocks = 1;
    let error = bad.check().expect_err("only the null block");
    assert_eq!(error, EngineConfigError::NoBlocks { group: 0, blocks: 1 });
    let bad = EngineConfig { max_running: 0, ..config(Role::Decode) };
    assert_eq!(bad.check(), Err(EngineConfigError::ZeroLimit { name: "max_running" }));
}

#[test]
fn equal_prefixes_have_equal_stamps_and_others_have_not() {
    let content = |prefix: &[u64], tail| PromptContent {
        tokens: 20,
        prefix: prefix.into(),
        prefix_tokens: 8,
        tail,
    };
    let (a, b, c) = (content(&[1, 2], 3), content(&[1, 2], 4), content(&[1, 5], 3));
    for token in 0..20 {
        assert_eq!(a.stamp(token) == b.stamp(token), token < 16, "{token}");
        assert_eq!(a.stamp(token) == c.stamp(token), token < 8, "{token}");
    }
}
