//! A pipeline of three stages for a while, beside plain first fit: how often a payload is refused
//! although enough is free.

use kvferry_engine::core::payload::pool::{PAGE, PayloadPool, PoolRange};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

const POOL: u64 = 512 << 20;
const SECONDS: u64 = 600;

/// Shares out of 1000 and bytes. A payload has between half and twice these bytes.
type PayloadMix = &'static [(u64, u64)];

/// What thinker, talker and code2wav hand on.
const CHUNKS: PayloadMix = &[(750, 3305), (250, 1_611_713)];
const TENSORS: PayloadMix = &[(600, 3305), (100, 65_536), (250, 1_611_713), (50, 16_777_216)];
const WITH_KV: PayloadMix =
    &[(600, 3305), (100, 65_536), (250, 1_611_713), (45, 16_777_216), (5, 134_217_728)];

/// SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014).
struct PipelineRng(u64);

impl PipelineRng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Evenly in [0, 1).
    fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn bytes(&mut self, mix: PayloadMix) -> u64 {
        let mut left = self.next() % 1000;
        let kind = mix.iter().find(|(share, _)| {
            let found = left < *share;
            left = left.saturating_sub(*share);
            found
        });
        (kind.unwrap().1 as f64 * (2.0 * self.share() - 1.0).exp2()) as u64
    }
}

trait TestAllocator {
    type Place: Copy + Ord;
    fn take(&mut self, bytes: u64) -> Option<Self::Place>;
    fn give_back(&mut self, place: Self::Place);
}

impl TestAllocator for (PayloadPool, BTreeMap<u64, PoolRange>) {
    type Place = u64;

    fn take(&mut self, bytes: u64) -> Option<u64> {
        let range = self.0.allocate(bytes).ok()?;
        self.1.insert(range.offset(), range);
        Some(range.offset())
    }

    fn give_back(&mut self, offset: u64) {
        self.0.free(self.1.remove(&offset).unwrap()).unwrap();
    }
}

/// First fit; holes as (first page, pages) in the order of addresses.
struct FirstFit(Vec<(u64, u64)>);

impl TestAllocator for FirstFit {
    type Place = (u64, u64);

    fn take(&mut self, bytes: u64) -> Option<(u64, u64)> {
        let pages = bytes.div_ceil(PAGE);
        let at = self.0.iter().position(|(_, free)| *free >= pages)?;
        let (first, free) = self.0[at];
        self.0[at] = (first + pages, free - pages);
        if free == pages {
            self.0.remove(at);
        }
        Some((first, pages))
    }

    fn give_back(&mut self, (first, pages): (u64, u64)) {
        let mut at = self.0.partition_point(|(other, _)| *other < first);
        self.0.insert(at, (first, pages));
        if at > 0 && self.0[at - 1].0 + self.0[at - 1].1 == first {
            at -= 1;
            self.0[at].1 += self.0.remove(at + 1).1;
        }
        if at + 1 < self.0.len() && self.0[at].0 + self.0[at].1 == self.0[at + 1].0 {
            self.0[at].1 += self.0.remove(at + 1).1;
        }
    }
}

/// Payloads, and those that were refused although enough was free and the occupancy not yet what
/// it was to be. Each of these waits, and all behind it.
#[derive(Debug, Default)]
struct PipelineCounts {
    payloads: u64,
    refused: u64,
    /// Microseconds for which one that was refused waited.
    waited: u64,
}

/// Runs at an occupancy that changes between 70 and 90 %. Lifetimes are between 1 ms and 30 s, evenly
/// in their logarithm.
fn run<A: TestAllocator>(mut pool: A, mix: PayloadMix) -> PipelineCounts {
    let mut random = PipelineRng(7);
    let mut ends: BinaryHeap<Reverse<(u64, u64, A::Place)>> = BinaryHeap::new();
    let mut counts = PipelineCounts::default();
    let (mut now, mut used, mut most) = (0, 0, 0);
    while now < SECONDS * 1_000_000 {
        if counts.payloads % 1000 == 0 {
            most = (POOL as f64 * (0.7 + 0.2 * random.share())) as u64;
        }
        let bytes = random.bytes(mix);
        let lifetime = (1e3 * 30_000_f64.powf(random.share())) as u64;
        let reserved = bytes.next_multiple_of(PAGE);
        counts.payloads += 1;
        let mut since = None;
        let place = loop {
            if used + reserved <= most {
                if let Some(place) = pool.take(bytes) {
                    break place;
                }
                since.get_or_insert(now);
            }
            let Reverse((end, reserved, place)) = ends.pop().expect("an empty pool has room");
            now = end.max(now);
            used -= reserved;
            pool.give_back(place);
        };
        if let Some(since) = since {
            counts.refused += 1;
            counts.waited += now - since;
        }
        used += reserved;
        ends.push(Reverse((now + lifetime, reserved, place)));
    }
    counts
}

#[test]
fn a_pipeline_is_refused_less_often_than_by_first_fit() {
    for (mix, at_most) in [(CHUNKS, 0.3), (TENSORS, 0.9), (WITH_KV, 0.9)] {
        let ours = run((PayloadPool::new(POOL), BTreeMap::new()), mix);
        let first_fit = run(FirstFit(vec![(0, POOL / PAGE)]), mix);
        let rate = |counts: &PipelineCounts| counts.refused as f64 / counts.payloads as f64;
        assert!(rate(&ours) <= at_most * rate(&first_fit), "{ours:?}, first fit {first_fit:?}");
    }
}
