//! Orders of calls that are the worst for one allocator or another. [`WatchedPool`] holds the bounds
//! at every step of them.

use crate::watched::WatchedPool;
use kvferry_engine::core::payload::pool::PAGE;

/// Leaves a page of its own at distances near `pages`, where best fit cannot resist: each is put
/// where a hole of exactly one page was made, beyond all that is in use.
#[test]
fn payloads_that_fit_exactly_far_away_do_not_scatter() {
    let mut pool = WatchedPool::new(1 << 40);
    for pages in 256..512 {
        let [before, behind] = [0; 2].map(|_| pool.allocate(pages * PAGE).unwrap());
        pool.free(before);
        let filler = pool.allocate((pages - 1) * PAGE).unwrap();
        let _stays = pool.allocate(PAGE).unwrap();
        pool.free(filler);
        pool.free(behind);
    }
    pool.check();
    assert!(pool.extent() <= 3 * pool.peak(), "{} of {}", pool.extent(), pool.peak());
}

/// The adversary of Robson's lower bound: sizes double, and what stays of each size occupies a page
/// of the same remainder, in a way that most of the rest is lost. No allocator needs less than
/// 1 + k / 2 times what is in use for sizes up to 2^k.
#[test]
fn the_worst_order_costs_little_more_than_any_allocator_pays() {
    const DOUBLINGS: u64 = 10;
    let most = 1 << 14;
    let mut pool = WatchedPool::new(1 << 40);
    let (mut remainder, mut used, mut extent) = (0, 0, 0);
    for k in 0..=DOUBLINGS {
        let size = 1_u64 << k;
        if k > 0 {
            let stays = |remainder: u64| {
                let has = move |first: u64, pages: u64| {
                    (first..first + pages).any(|page| page % size == remainder)
                };
                let live = pool.live().into_iter();
                let split = live.partition::<Vec<_>, _>(|range| {
                    has(range.offset() / PAGE, range.bytes() / PAGE)
                });
                let lost: u64 = split.0.iter().map(|range| size - range.bytes() / PAGE).sum();
                (lost, split.1)
            };
            let (low, high) = (remainder, remainder + size / 2);
            let freed;
            (remainder, freed) = match (stays(low), stays(high)) {
                (a, b) if a.0 >= b.0 => (low, a.1),
                (_, b) => (high, b.1),
            };
            for range in freed {
                pool.free(range);
                used -= range.bytes() / PAGE;
            }
        }
        while used + size <= most {
            let _stays = pool.allocate(size * PAGE).unwrap();
            used += size;
        }
        extent = pool.extent().max(extent);
    }
    pool.check();
    let least = most + most * DOUBLINGS / 2 - (1 << DOUBLINGS);
    assert!(extent >= least, "{extent}: less than is possible, so the adversary is not the worst");
    assert!(extent <= 2 * least, "{extent} pages for {most} in use, {least} at least");
}
