//! Random inputs in any order.

use crate::bench::EngineBench;
use kvferry_engine::core::layout::GroupKind;
use kvferry_engine::core::machine::{Gauges, Machine};
use kvferry_engine::core::message::Role;
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::cost::StepCost;
use kvferry_scenarios::decide::mix;
use kvferry_scenarios::engine::{EngineConfig, EngineInput, GroupConfig, PromptContent};
use kvferry_scenarios::run::{AllocationOrder, LoadFailurePolicy};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum EngineOp {
    Leg { family: u64, tokens: u32, output: u32, stop: bool, reject: bool },
    Cancel(prop::sample::Index),
    Answer(prop::sample::Index, bool),
    Step,
    Preempt,
}

fn op() -> impl Strategy<Value = EngineOp> {
    let leg = (0u64..3, 0u32..70, 1u32..20, prop::bool::weighted(0.1), prop::bool::weighted(0.1));
    prop_oneof![
        4 => leg.prop_map(|(family, tokens, output, stop, reject)| {
            EngineOp::Leg { family, tokens, output, stop, reject }
        }),
        1 => any::<prop::sample::Index>().prop_map(EngineOp::Cancel),
        4 => (any::<prop::sample::Index>(), prop::bool::weighted(0.8))
            .prop_map(|(at, well)| EngineOp::Answer(at, well)),
        8 => Just(EngineOp::Step),
        1 => Just(EngineOp::Preempt),
    ]
}

/// Prompts of a family agree in their leading runs of 8 tokens, and behind them for every other
/// length.
fn content(family: u64, tokens: u32) -> PromptContent {
    let hash = |run: u32| mix(mix(family, 77), u64::from(run));
    PromptContent {
        tokens,
        prefix: (0..tokens / 8).map(hash).collect(),
        prefix_tokens: 8,
        tail: mix(family, u64::from(tokens % 2)),
    }
}

fn groups() -> impl Strategy<Value = Vec<GroupConfig>> {
    let full = (prop::sample::select(vec![1, 3, 4, 16]), 6u32..60).prop_map(|(block_tokens, n)| {
        GroupConfig { kind: GroupKind::Full, block_tokens, blocks: n.max(96 / block_tokens) }
    });
    let other = (prop::sample::select(vec![2, 4, 8]), 1u32..40, 30u32..60).prop_map(
        |(block_tokens, window, blocks)| GroupConfig {
            kind: GroupKind::Window { tokens: window },
            block_tokens,
            blocks,
        },
    );
    let state = (3u32..9).prop_map(|blocks| GroupConfig {
        kind: GroupKind::State,
        block_tokens: 0,
        blocks,
    });
    prop_oneof![
        6 => full.clone().prop_map(|full| vec![full]),
        1 => other.clone().prop_map(|window| vec![window]),
        2 => (full.clone(), other).prop_map(|(full, window)| vec![full, window]),
        1 => (full, state).prop_map(|(full, state)| vec![full, state]),
    ]
}

fn config() -> impl Strategy<Value = EngineConfig> {
    let limits = (1u32..40, 1u32..6, 4u32..30);
    (groups(), limits, any::<[bool; 5]>()).prop_map(|(groups, limits, flags)| EngineConfig {
        role: if flags[0] { Role::Prefill } else { Role::Decode },
        tp: 1,
        layers: 2,
        groups,
        max_batched_tokens: limits.0,
        max_running: limits.1,
        max_waiting: limits.2,
        prefix_cache: flags[1],
        allocator: if flags[2] { AllocationOrder::Fifo } else { AllocationOrder::Lifo },
        early_percent: 0,
        load_failure: if flags[3] { LoadFailurePolicy::Recompute } else { LoadFailurePolicy::Fail },
        id_seed: flags[4].then_some(7),
        cost: StepCost {
            step: Nanos(5),
            weights: Nanos(9),
            token_fs: 1,
            pair_fs: 1,
            context_fs: 1,
        },
    })
}

fn play(bench: &mut EngineBench, op: EngineOp) {
    match op {
        EngineOp::Leg { family, tokens, output, stop, reject } => {
            let leg = bench.leg(content(family, tokens), output, stop);
            if reject {
                bench.reject_next(leg);
            }
        }
        EngineOp::Cancel(at) if !bench.open.is_empty() => {
            let legs: Vec<_> = bench.open.iter().copied().collect();
            bench.cancel(*at.get(&legs));
        }
        EngineOp::Answer(at, well) if !bench.due.is_empty() => {
            bench.answer(at.index(bench.due.len()), well);
        }
        EngineOp::Step => bench.step_done(),
        EngineOp::Preempt => bench.input(EngineInput::PreemptOne),
        EngineOp::Cancel(_) | EngineOp::Answer(..) => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    /// The bench checks after every input that blocks are conserved, never handed out while in
    /// use or quarantined, written by their owner alone, and hold what their readers expect; that
    /// hooks come in a legal order; that legs end once; and that no due answer is a fault.
    #[test]
    fn serves_anything(config in config(), ops in prop::collection::vec(op(), 1..150)) {
        let mut bench = EngineBench::new(config);
        bench.eager = false;
        for op in ops {
            play(&mut bench, op);
        }
        bench.settle();
        prop_assert!(bench.open.is_empty(), "legs without an end: {:?}", bench.open);
        prop_assert_eq!(bench.engine.gauges(), Gauges::default());
    }

    /// Equal inputs give equal effects.
    #[test]
    fn is_deterministic(config in config(), ops in prop::collection::vec(op(), 1..60)) {
        let run = || {
            let mut bench = EngineBench::new(config.clone());
            bench.eager = false;
            ops.iter().cloned().for_each(|op| play(&mut bench, op));
            bench.settle();
            bench.log
        };
        prop_assert_eq!(run(), run());
    }
}
