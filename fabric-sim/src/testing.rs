//! Runs for unit tests.

use kvferry_engine::core::layout::GroupKind;
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::router::RouterConfig;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::core::verify::Verify;
use kvferry_scenarios::cost::StepCost;
use kvferry_scenarios::run::*;

/// An instance of two ranks.
pub(crate) fn instance(name: &str, role: Role) -> InstanceSettings {
    InstanceSettings {
        name: name.into(),
        host: name.into(),
        node: name.into(),
        role,
        is_pool: false,
        tp: 2,
        dp_rank: 0,
        dp_size: 1,
        blocks: 64,
        block_tokens: 16,
        layout: MemoryLayout::Block,
        mode: Mode::Push,
        prefix_cache: false,
        cost: StepCost {
            step: Nanos::from_ms(1),
            weights: Nanos::from_ms(1),
            token_fs: 0,
            pair_fs: 0,
            context_fs: 0,
        },
        protocol: ProtocolSettings::default(),
        fabric: FabricLimits::default(),
        models: None,
    }
}

/// p0, p1, d0 and d1.
pub(crate) fn two_and_two() -> Vec<InstanceSettings> {
    vec![
        instance("p0", Role::Prefill),
        instance("p1", Role::Prefill),
        instance("d0", Role::Decode),
        instance("d1", Role::Decode),
    ]
}

/// A run without requests.
pub(crate) fn run(instances: Vec<InstanceSettings>, faults: Vec<InjectedFault>) -> Run {
    Run {
        name: "test".into(),
        about: String::new(),
        seed: 7,
        model: ModelGeometry {
            name: "small".into(),
            layers: 2,
            kv_heads: 2,
            latent: false,
            head_bytes: 64,
            element: 2,
            state_bytes: 256,
            groups: vec![ModelGroup { kind: GroupKind::Full, layers: vec![0, 1] }],
        },
        instances,
        network: NetworkSettings {
            latency: DurationRange::fixed(Nanos(2_000)),
            bandwidth: 50_000_000_000,
            node_latency: DurationRange::fixed(Nanos(1_000)),
            node_bandwidth: 100_000_000_000,
            control_latency: DurationRange::fixed(Nanos(50_000)),
        },
        router: RouterSettings {
            config: RouterConfig::default(),
            heartbeat: Nanos::from_secs(1),
            ids_differ: false,
        },
        engine: EngineSettings {
            chunk: 512,
            max_running: 64,
            max_waiting: 1_024,
            load_failure: LoadFailurePolicy::Recompute,
            allocator: AllocationOrder::Fifo,
            early_percent: 0,
        },
        memory: MemoryFidelity::Bytes,
        verify: Verify::Off,
        mode: Mode::Push,
        prefix_tokens: 512,
        streams: Vec::new(),
        served: kvferry_scenarios::run::Served::Requests,
        hosts: Vec::new(),
        requests: Vec::new(),
        faults,
        shaped: Vec::new(),
        liveness: LivenessMode::Heal,
        probes: true,
        expect: Expect::default(),
    }
}
