//! The pool of payloads: one payload freed and another allocated while 10,000 have bytes.

use criterion::{Criterion, criterion_group, criterion_main};
use kvferry_engine::core::payload::pool::PayloadPool;

const LIVE: usize = 10_000;

/// Bytes of a payload: those of the stages of a pipeline, a half to twice as much.
fn bytes(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let (kind, size) = (*seed >> 60, *seed >> 33);
    let usual = match kind {
        0..12 => 3305,
        12..15 => 65_536,
        _ => 1_611_713,
    };
    usual / 2 + size % (usual * 3 / 2)
}

fn payload_pool(criterion: &mut Criterion) {
    let mut seed = 1;
    let mut pool = PayloadPool::new(8 << 30);
    let mut ranges = Vec::new();
    while ranges.len() < LIVE {
        ranges.push(pool.allocate(bytes(&mut seed)).expect("there is room"));
    }
    criterion.bench_function("payload_pool/free and allocate", |bench| {
        bench.iter(|| {
            let bytes = bytes(&mut seed);
            let at = (seed >> 33) as usize % LIVE;
            pool.free(ranges[at]).expect("it is allocated");
            ranges[at] = pool.allocate(bytes).expect("there is room");
        });
    });
}

criterion_group!(benches, payload_pool);
criterion_main!(benches);
