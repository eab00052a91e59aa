//! Whole runs of the world: small ones, end to end through the real protocol machines.

use kvferry_engine::core::Nanos;
use kvferry_engine::core::layout::GroupKind;
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::router::RouterConfig;
use kvferry_engine::core::verify::Verify;
use kvferry_scenarios::cost::StepCost;
use kvferry_scenarios::lists::{FaultKind, TriggerEvent};
use kvferry_scenarios::run::*;
use kvferry_sim::replay::replay;
use kvferry_sim::world::{RunReport, RunVerdict, SimOptions, run};

fn instance(name: &str, role: Role, tp: u16, blocks: u32) -> InstanceSettings {
    InstanceSettings {
        name: name.into(),
        host: name.into(),
        node: name.into(),
        role,
        is_pool: false,
        tp,
        dp_rank: 0,
        dp_size: 1,
        blocks,
        block_tokens: 16,
        layout: MemoryLayout::Block,
        mode: Mode::Push,
        prefix_cache: false,
        cost: StepCost {
            step: Nanos::from_us(200),
            weights: Nanos::from_us(300),
            token_fs: 1_000_000,
            pair_fs: 1_000,
            context_fs: 1_000,
        },
        protocol: ProtocolSettings::default(),
        fabric: FabricLimits::default(),
        models: None,
    }
}

fn request(at: Nanos, tokens: u32, tail: u64, output: u32) -> WorkloadRequest {
    WorkloadRequest {
        arrival: at,
        prompts: vec![WorkloadPrompt { tokens, prefix: [].into(), tail }],
        samples: 1,
        output,
        abort: None,
        stop: false,
        model: None,
        decode_rendering: None,
    }
}

fn small(mode: Mode, tp: (u16, u16), requests: u32) -> Run {
    let mut instances =
        vec![instance("p0", Role::Prefill, tp.0, 256), instance("d0", Role::Decode, tp.1, 256)];
    for instance in &mut instances {
        instance.mode = mode;
    }
    let at = |n: u32| Nanos::from_ms(20) + Nanos::from_ms(u64::from(n));
    Run {
        name: "small".into(),
        about: "a small run".into(),
        seed: 7,
        model: ModelGeometry {
            name: "toy".into(),
            layers: 4,
            kv_heads: 4,
            latent: false,
            head_bytes: 16,
            element: 2,
            state_bytes: 64,
            groups: vec![ModelGroup { kind: GroupKind::Full, layers: vec![0, 1, 2, 3] }],
        },
        instances,
        network: NetworkSettings {
            latency: DurationRange { min: Nanos::from_us(2), max: Nanos::from_us(15) },
            bandwidth: 40_000_000_000,
            node_latency: DurationRange::fixed(Nanos::from_us(1)),
            node_bandwidth: 64_000_000_000,
            control_latency: DurationRange { min: Nanos::from_us(20), max: Nanos::from_us(80) },
        },
        router: RouterSettings {
            config: RouterConfig::default(),
            heartbeat: Nanos::from_secs(1),
            ids_differ: true,
        },
        engine: EngineSettings {
            chunk: 256,
            max_running: 16,
            max_waiting: 1000,
            load_failure: LoadFailurePolicy::Recompute,
            allocator: AllocationOrder::Fifo,
            early_percent: 0,
        },
        memory: MemoryFidelity::Bytes,
        verify: Verify::Off,
        mode,
        prefix_tokens: 512,
        streams: Vec::new(),
        served: Served::Requests,
        hosts: Vec::new(),
        requests: (0..requests)
            .map(|n| request(at(n), 40 + 97 * n % 500, u64::from(n) + 1, 4))
            .collect(),
        faults: Vec::new(),
        shaped: Vec::new(),
        liveness: LivenessMode::Heal,
        probes: true,
        expect: Expect::default(),
    }
}

fn held(report: &RunReport) {
    assert_eq!(report.violations, []);
    assert_eq!(report.verdict, RunVerdict::Held, "{report:?}");
}

#[test]
fn one_push() {
    let report = run(&small(Mode::Push, (1, 1), 1), SimOptions::default());
    held(&report);
    assert_eq!((report.finished, report.recomputed), (1, 0), "{report:?}");
}

#[test]
fn push_and_pull_with_any_tensor_parallelism() {
    for mode in [Mode::Push, Mode::Pull] {
        for tp in [(1, 1), (2, 2), (4, 1), (1, 4), (2, 4)] {
            let report = run(&small(mode, tp, 12), SimOptions::default());
            held(&report);
            assert_eq!((report.finished, report.recomputed), (12, 0), "{mode} {tp:?} {report:?}");
        }
    }
}

#[test]
fn every_layout_and_block_size_reaches_every_other() {
    let layouts =
        [MemoryLayout::Block, MemoryLayout::Layer, MemoryLayout::HeadSplit, MemoryLayout::Token];
    for memory in [MemoryFidelity::Bytes, MemoryFidelity::Cells] {
        for (nth, from) in layouts.into_iter().enumerate() {
            for (at, to) in layouts.into_iter().enumerate() {
                // A cell stands for whole head slots, so it cannot tell K and V of a fused slot.
                let split = |layout| layout == MemoryLayout::HeadSplit;
                if memory == MemoryFidelity::Cells && split(from) != split(to) {
                    continue;
                }
                let mode = if (nth + at) % 2 == 0 { Mode::Push } else { Mode::Pull };
                let mut small = small(mode, (2, 1), 4);
                small.memory = memory;
                small.instances[0].layout = from;
                small.instances[1].layout = to;
                small.instances[at % 2].block_tokens = 32;
                let report = run(&small, SimOptions::default());
                let ends = (report.finished, report.recomputed);
                let sizes = small.instances[0].block_tokens;
                let what = format!("{mode} {memory:?} {from:?} ({sizes}) to {to:?}");
                assert_eq!(report.violations, [], "{what}");
                assert_eq!(ends, (4, 0), "{what} {report:?}");
            }
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_trace_and_another_another() {
    let run_of = |seed| {
        let mut small = small(Mode::Push, (2, 1), 10);
        small.seed = seed;
        run(&small, SimOptions::default())
    };
    let first = run_of(1);
    for _ in 0..3 {
        assert_eq!(run_of(1), first);
    }
    assert_ne!(run_of(2).trace_hash, first.trace_hash);
}

#[test]
fn a_recording_replays_and_changes_nothing() {
    let small = small(Mode::Pull, (1, 2), 6);
    let plain = run(&small, SimOptions::default());
    let recorded = run(&small, SimOptions { record: true, ..SimOptions::default() });
    assert_eq!(recorded.trace_hash, plain.trace_hash);
    let recording = recorded.recording.expect("it was asked for");
    let replayed = replay(&recording).expect("the machines are deterministic");
    assert_eq!((replayed.scenario.as_str(), replayed.seed), ("small", 7));
    assert!(replayed.inputs > 100 && replayed.effects > 100, "{replayed:?}");
    let mut cut = recording;
    cut.0.truncate(cut.0.len() - 1);
    assert!(replay(&cut).is_err());
}

/// A small run with one fault that names no instance.
fn with_fault(kind: FaultKind, mode: Mode, trigger: FaultTrigger, seed: u64) -> Run {
    let mut run = small(mode, (2, 1), 24);
    run.seed = seed;
    run.instances.push(InstanceSettings { mode, ..instance("p1", Role::Prefill, 1, 256) });
    run.instances.push(InstanceSettings { mode, ..instance("d1", Role::Decode, 2, 256) });
    run.instances.sort_by_key(|instance| instance.role);
    let ms = |from, to| Some(DurationRange { min: Nanos::from_ms(from), max: Nanos::from_ms(to) });
    run.faults.push(InjectedFault {
        key: 11,
        line: 0,
        kind,
        trigger,
        target: None,
        from: None,
        to: None,
        message: None,
        lasts: ms(50, 900),
        times: 6,
        delay: ms(1, 80),
        factor: 50,
        rank: None,
        direction: PartitionDirection::Symmetric,
        first: RaceOrder::Either,
        becomes: None,
    });
    run
}

#[test]
fn every_fault_leaves_every_promise_held() {
    let triggers = [
        (FaultTrigger::Chance(30_000), true),
        (FaultTrigger::At(Nanos::from_ms(31)), true),
        (
            FaultTrigger::On {
                event: TriggerEvent::TransferWriting,
                from: None,
                to: None,
                message: None,
                nth: 3,
            },
            false,
        ),
    ];
    let mut broken = Vec::new();
    // A leg that is delivered again after it ended is known to begin its attempt anew, and nothing
    // survives operations that move no byte.
    let unfit = [FaultKind::DispatchedTwice, FaultKind::NoCopy];
    let kinds = FaultKind::ALL.iter().filter(|kind| !unfit.contains(kind));
    for kind in kinds {
        for (nth, (trigger, pull)) in triggers.iter().enumerate() {
            for mode in [Mode::Push, Mode::Pull] {
                if mode == Mode::Pull && !pull {
                    continue;
                }
                let report =
                    run(&with_fault(*kind, mode, trigger.clone(), 3), SimOptions::default());
                if report.verdict != RunVerdict::Held {
                    let first = report.violations.first().map(ToString::to_string);
                    broken
                        .push(format!("{kind} {mode} trigger {nth}: {first:?} {:?}", report.left));
                }
            }
        }
    }
    assert!(broken.is_empty(), "{}: {broken:#?}", broken.len());
}

#[test]
fn a_core_is_drawn_healed_and_shown() {
    let mut cores = std::collections::BTreeSet::new();
    for seed in 0..12 {
        for kind in [FaultKind::Pause, FaultKind::Crash, FaultKind::Partition] {
            let mut run_of =
                with_fault(kind, Mode::Pull, FaultTrigger::At(Nanos::from_ms(31)), seed);
            run_of.liveness = LivenessMode::Core;
            for one in &mut run_of.instances {
                one.protocol.core.lease = Nanos::from_secs(1);
                one.protocol.core.orphan = Nanos::from_secs(1);
            }
            run_of.faults[0].lasts = Some(DurationRange::fixed(Nanos::from_secs(20)));
            let report = run(&run_of, SimOptions::default());
            held(&report);
            let has = |role| report.core.iter().any(|name| name.starts_with(role));
            assert!(has('p') && has('d'), "{:?}", report.core);
            cores.insert(report.core);
        }
    }
    assert!(cores.len() > 3, "{cores:?}");
}

#[test]
fn who_tries_nothing_twice_gets_as_many_probes_as_sessions_died() {
    let mut run_of =
        with_fault(FaultKind::QpError, Mode::Push, FaultTrigger::At(Nanos::from_ms(22)), 3);
    run_of.instances = small(Mode::Push, (1, 4), 0).instances;
    let group = |layer| ModelGroup { kind: GroupKind::Full, layers: vec![layer] };
    run_of.model.groups = (0..4).map(group).collect();
    run_of.requests.truncate(1);
    run_of.faults[0].times = 1;
    for one in &mut run_of.instances {
        one.layout = MemoryLayout::Layer;
        one.protocol.transfer.retries_max = 0;
        one.fabric.operations_max = Some(1);
    }
    let report = run(&run_of, SimOptions::default());
    held(&report);
    assert_eq!((report.faults.len(), report.recomputed), (1, 1), "{report:?}");
}
