//! Runs for unit tests.

use engine::core::layout::GroupKind;
use engine::core::message::{Mode, Role};
use engine::core::router::RouterConfig;
use engine::core::time::Nanos;
use scenarios::cost::Cost;
use scenarios::run::*;

/// An instance of two ranks.
pub(crate) fn instance(name: &str, role: Role) -> Instance {
    Instance {
        name: name.into(),
        host: name.into(),
        node: name.into(),
        role,
        tp: 2,
        dp_rank: 0,
        dp_size: 1,
        blocks: 64,
        block_tokens: 16,
        layout: MemoryLayout::Block,
        mode: Mode::Push,
        prefix_cache: false,
        cost: Cost {
            step: Nanos::from_ms(1),
            weights: Nanos::from_ms(1),
            token_fs: 0,
            pair_fs: 0,
            context_fs: 0,
        },
        protocol: Protocol::default(),
        fabric: FabricLimits::default(),
    }
}

/// p0, p1, d0 and d1.
pub(crate) fn two_and_two() -> Vec<Instance> {
    vec![
        instance("p0", Role::Prefill),
        instance("p1", Role::Prefill),
        instance("d0", Role::Decode),
        instance("d1", Role::Decode),
    ]
}

/// A run without requests.
pub(crate) fn run(instances: Vec<Instance>, faults: Vec<Fault>) -> Run {
    Run {
        name: "test".into(),
        about: String::new(),
        seed: 7,
        model: Model {
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
        network: Network {
            latency: Span::fixed(Nanos(2_000)),
            bandwidth: 50_000_000_000,
            node_latency: Span::fixed(Nanos(1_000)),
            node_bandwidth: 100_000_000_000,
            control_latency: Span::fixed(Nanos(50_000)),
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
            load_failure: LoadFailure::Recompute,
            allocator: Allocator::Fifo,
        },
        memory: MemoryModel::Bytes,
        mode: Mode::Push,
        prefix_tokens: 512,
        requests: Vec::new(),
        faults,
        shaped: Vec::new(),
        liveness: Liveness::Heal,
        expect: Expect::default(),
    }
}
