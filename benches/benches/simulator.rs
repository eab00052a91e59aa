//! Speed of the simulator: queue entries per second on one core, invariants and trace hash on.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvferry_scenarios::Run;
use kvferry_sim::world::{RunVerdict, SimOptions, run};
use std::path::Path;

fn drawn(file: &str, seed: u64) -> Run {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios").join(file);
    kvferry_scenarios::load(&path).expect("the file is valid").draw(seed).expect("the seed draws")
}

fn simulator(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("simulator");
    group.sample_size(10);
    for file in ["smoke/throughput.toml", "trace/push.toml", "trace/pull.toml"] {
        let scenario = drawn(file, 1);
        let report = run(&scenario, SimOptions::default());
        assert_eq!(report.verdict, RunVerdict::Held, "{file}: {:?}", report.violations);
        group.throughput(Throughput::Elements(report.events));
        group.bench_function(file, |bench| {
            bench.iter(|| run(&scenario, SimOptions::default()).trace_hash);
        });
    }
    group.finish();
}

fn swarm(criterion: &mut Criterion) {
    let seeds: Vec<Run> = (0..100).map(|seed| drawn("swarm.toml", seed)).collect();
    let mut group = criterion.benchmark_group("swarm");
    group.sample_size(10);
    group.throughput(Throughput::Elements(seeds.len() as u64));
    group.bench_function("seeds", |bench| {
        bench
            .iter(|| seeds.iter().map(|seed| run(seed, SimOptions::default()).events).sum::<u64>());
    });
    group.finish();
}

criterion_group!(benches, simulator, swarm);
criterion_main!(benches);
