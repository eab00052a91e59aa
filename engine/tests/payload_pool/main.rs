//! The pool of payloads behaves like a plain list of ranges and keeps its bounds.

mod adversaries;
mod pipeline;
mod trace;
mod watched;

use kvferry_engine::core::payload::pool::{AllocateError, LARGE, PAGE, PayloadPool};
use proptest::collection::vec;
use proptest::prelude::*;
use watched::WatchedPool;

#[derive(Clone, Copy, Debug)]
enum PoolStep {
    Allocate(u64),
    /// Frees one of those that have bytes.
    Free(prop::sample::Index),
    /// Frees one of all that ever had bytes.
    FreeAgain(prop::sample::Index),
}

/// Bytes of payloads: of few pages, of any number, and large ones.
fn bytes() -> impl Strategy<Value = u64> {
    let pages = prop_oneof![
        4 => 1..6u64,
        2 => 1..300u64,
        1 => prop::sample::select(vec![4, 16, 64, 1024, LARGE / PAGE - 1, LARGE / PAGE]),
        1 => LARGE / PAGE..4 * LARGE / PAGE,
    ];
    prop_oneof![
        1 => Just(0),
        20 => (pages, 0..PAGE).prop_map(|(pages, less)| pages * PAGE - less),
    ]
}

fn step() -> impl Strategy<Value = PoolStep> {
    prop_oneof![
        4 => bytes().prop_map(PoolStep::Allocate),
        3 => any::<prop::sample::Index>().prop_map(PoolStep::Free),
        1 => any::<prop::sample::Index>().prop_map(PoolStep::FreeAgain),
    ]
}

proptest! {
    #[test]
    fn the_pool_behaves_like_a_list_of_ranges(
        pages in prop_oneof![0..40u64, 0..600u64, 0..8 * LARGE / PAGE],
        beyond in 0..PAGE,
        steps in vec(step(), 1..250),
    ) {
        let mut pool = WatchedPool::new(pages * PAGE + beyond);
        let mut all = Vec::new();
        for step in steps {
            match step {
                PoolStep::Allocate(bytes) => all.extend(pool.allocate(bytes)),
                PoolStep::Free(index) => {
                    let live = pool.live();
                    if !live.is_empty() {
                        pool.free(*index.get(&live));
                    }
                }
                PoolStep::FreeAgain(index) if !all.is_empty() => pool.free(*index.get(&all)),
                PoolStep::FreeAgain(_) => {}
            }
            pool.check();
        }
        for range in pool.live() {
            pool.free(range);
        }
        pool.check();
        prop_assert_eq!((pool.pool.largest(), pool.pool.len()), (pages * PAGE, 0));
    }

    /// Sizes that grow while few of each stay, which is what scatters holes.
    #[test]
    fn the_bounds_hold_while_sizes_grow(
        pages in 1000..20_000u64,
        phases in vec((1..3000u64, 1..60usize, vec(any::<prop::sample::Index>(), 0..40)), 1..12),
    ) {
        let mut pool = WatchedPool::new(pages * PAGE);
        let mut phases = phases;
        phases.sort_by_key(|(size, ..)| *size);
        for (size, count, freed) in phases {
            for _ in 0..count {
                pool.allocate(size * PAGE);
            }
            for index in freed {
                let live = pool.live();
                if !live.is_empty() {
                    pool.free(*index.get(&live));
                }
            }
        }
        pool.check();
    }
}

#[test]
fn an_empty_payload_takes_nothing_even_of_a_full_pool() {
    let mut pool = PayloadPool::new(PAGE);
    let full = pool.allocate(PAGE).unwrap();
    let empty = pool.allocate(0).unwrap();
    assert_eq!((empty.bytes(), pool.len(), pool.free_bytes()), (0, 1, 0));
    pool.free(empty).unwrap();
    pool.free(full).unwrap();
    assert!(pool.is_empty());
}

#[test]
fn what_never_fits_is_told_from_what_does_not_fit_now() {
    let mut pool = PayloadPool::new(3 * PAGE);
    let ranges = [0; 3].map(|_| pool.allocate(PAGE).unwrap());
    let too_large = AllocateError::TooLarge { bytes: 3 * PAGE + 1, pool: 3 * PAGE };
    assert_eq!(pool.allocate(3 * PAGE + 1), Err(too_large));
    assert!(matches!(pool.allocate(u64::MAX), Err(AllocateError::TooLarge { .. })));
    pool.free(ranges[0]).unwrap();
    pool.free(ranges[2]).unwrap();
    let no_room = AllocateError::NoRoom { bytes: 2 * PAGE, free: 2 * PAGE, largest: PAGE };
    assert_eq!(pool.allocate(2 * PAGE), Err(no_room));
    assert!(no_room.to_string().contains("8192 bytes of the pool are free, at most 4096"));
}

#[test]
fn a_receipt_is_worth_nothing_once_its_place_was_given_to_another() {
    let mut pool = PayloadPool::new(2 * PAGE);
    let first = pool.allocate(PAGE).unwrap();
    pool.free(first).unwrap();
    let second = pool.allocate(PAGE).unwrap();
    assert_eq!(second.offset(), first.offset());
    let error = pool.free(first).unwrap_err();
    assert!(error.to_string().contains("freed before"), "{error}");
    assert_eq!(pool.free_bytes(), PAGE);
    pool.free(second).unwrap();
}

#[test]
fn small_payloads_that_stay_do_not_split_what_large_ones_need() {
    let mut pool = PayloadPool::new(64 * LARGE);
    let mut freed = Vec::new();
    for at in 0..60 {
        let _stays = pool.allocate(3305).unwrap();
        freed.push(pool.allocate(LARGE + at * PAGE).unwrap());
        freed.push(pool.allocate(20 * PAGE).unwrap());
    }
    freed.into_iter().for_each(|range| pool.free(range).unwrap());
    // Among the small ones are holes of 20 pages, and the large ones leave one.
    assert!(pool.largest() >= pool.bytes() - 60 * 21 * PAGE, "{} bytes", pool.largest());
}

#[test]
fn a_large_payload_takes_the_highest_of_the_holes_that_fit_best() {
    let mut pool = PayloadPool::new(16 * LARGE);
    let holes = [0; 2].map(|_| {
        let hole = pool.allocate(LARGE).unwrap();
        let _stays = pool.allocate(2 * LARGE).unwrap();
        hole
    });
    holes.into_iter().for_each(|range| pool.free(range).unwrap());
    for hole in holes {
        assert_eq!(pool.allocate(LARGE).unwrap().offset(), hole.offset());
    }
    assert_eq!(pool.largest(), 10 * LARGE);
}

#[test]
fn a_pool_costs_nothing_before_it_is_used() {
    let mut pool = PayloadPool::new(1 << 62);
    let (low, high) = (pool.allocate(1).unwrap(), pool.allocate(LARGE).unwrap());
    assert_eq!((low.offset(), high.offset()), (0, (1 << 62) - LARGE));
    assert_eq!(pool.largest(), (1 << 62) - LARGE - PAGE);
}
