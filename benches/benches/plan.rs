//! Workload `plan61`: 61 layers x 512 blocks of a pool of 4096, block ids to merged byte ranges.
//!
//! MLA has one run per block and layer; GQA keeps K and V in two head slots far apart, so two.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvferry_engine::core::layout::{
    BlockList, Geometry, HeadSlots, KvGroup, LayerLayout, RankLayout, Route, Slices, TokenSpan,
    routes,
};
use kvferry_engine::fabric::{Address, RegionDesc};
use std::hint::black_box;

const LAYERS: u16 = 61;
const POOL: u32 = 4096;
const BLOCKS: u32 = 512;
const BLOCK_TOKENS: u32 = 16;

/// The route from a rank to its counterpart; all layers lie in one region, one after the other.
fn route(latent: bool) -> Route {
    let geometry = Geometry {
        model: "plan61".into(),
        tp: 1,
        kv_heads: 1,
        latent,
        packed: false,
        layers: LAYERS,
        groups: vec![KvGroup::full(BLOCK_TOKENS, 0..LAYERS)],
    };
    // DeepSeek-V3: 512 + 64 latent elements; else heads of 128 elements. 2 bytes each.
    let (slots, heads, width) =
        if latent { (HeadSlots::Fused, 1, 576) } else { (HeadSlots::Split, 2, 128) };
    let block = u64::from(BLOCK_TOKENS * width);
    let slot = block * u64::from(POOL);
    let layer_bytes = 2 * slot * u64::from(heads);
    let layers = (0..u64::from(LAYERS)).map(|layer| LayerLayout {
        region: 0,
        base: layer * layer_bytes,
        shape: [POOL, heads, BLOCK_TOKENS, width],
        stride: [block, slot, u64::from(width), 1],
        element: 2,
        slots,
    });
    let rank = RankLayout {
        rank: 0,
        address: Address([0u8; 0].into()),
        regions: vec![(RegionDesc([0u8; 0].into()), u64::from(LAYERS) * layer_bytes)],
        layers: layers.collect(),
    };
    routes(true, (&geometry, &rank), (&geometry, std::slice::from_ref(&rank)))
        .expect("fits itself")
        .remove(0)
}

/// Block ids in runs of `run`, the runs scattered over the pool by a full cycle of odd steps.
fn ids(run: u32, step: u32) -> BlockList {
    let slots = POOL / run;
    let ids = (0..BLOCKS).map(|at| (at / run * step + step / 2) % slots * run + at % run);
    BlockList::new(ids.collect())
}

fn plan61(c: &mut Criterion) {
    let all: Vec<u16> = (0..LAYERS).collect();
    for (latent, model) in [(true, "mla"), (false, "gqa")] {
        let route = route(latent);
        for (run, order) in [(1, "scattered"), (32, "runs32"), (BLOCKS, "contiguous")] {
            let (local, remote) = (ids(run, 2017), ids(run, 3163));
            let span = TokenSpan {
                group: 0,
                from: 0,
                to: BLOCKS * BLOCK_TOKENS,
                local: &local,
                remote: &remote,
            };
            let runs = u64::from(BLOCKS / run) * if latent { 1 } else { 2 };
            let mut out = Slices::default();
            route.plan(&all, &span, &mut out).expect("valid ids");
            assert_eq!(out.count() as u64, u64::from(LAYERS) * runs, "{model} {order}");
            let mut group = c.benchmark_group(format!("plan61/{model}/{order}"));
            group.throughput(Throughput::Elements(u64::from(LAYERS) * runs));
            for (calls, per_call) in [("one_call", usize::from(LAYERS)), ("call_per_layer", 1)] {
                group.bench_function(calls, |b| {
                    b.iter(|| {
                        out.clear();
                        for layers in all.chunks(per_call) {
                            route.plan(layers, black_box(&span), &mut out).expect("valid ids");
                        }
                        black_box(&out).count()
                    });
                });
            }
            group.finish();
        }
    }
}

criterion_group!(benches, plan61);
criterion_main!(benches);
