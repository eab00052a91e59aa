//! A pool beside a plain list of what it gave, with the promises of its documentation checked.

use kvferry_engine::core::payload::pool::{AllocateError, LARGE, PAGE, PayloadPool, PoolRange};
use std::collections::BTreeMap;

fn pages(range: &PoolRange) -> u64 {
    range.bytes().div_ceil(PAGE)
}

fn end(range: &PoolRange) -> u64 {
    range.offset() / PAGE + pages(range)
}

/// k of 4^(k-1) < pages <= 4^k.
fn class(pages: u64) -> u64 {
    (0..).find(|k| pages <= 1 << (2 * k)).unwrap()
}

/// A pool that is watched.
pub(crate) struct WatchedPool {
    pub(crate) pool: PayloadPool,
    /// What it gave, by offset.
    live: BTreeMap<u64, PoolRange>,
    used: u64,
    /// The most pages that were in use since the pool was empty.
    peak: u64,
}

impl WatchedPool {
    pub(crate) fn new(bytes: u64) -> WatchedPool {
        WatchedPool { pool: PayloadPool::new(bytes), live: BTreeMap::new(), used: 0, peak: 0 }
    }

    pub(crate) fn live(&self) -> Vec<PoolRange> {
        self.live.values().copied().collect()
    }

    /// The most pages in use so far.
    pub(crate) fn peak(&self) -> u64 {
        self.peak
    }

    /// The end of the highest payload, in pages.
    pub(crate) fn extent(&self) -> u64 {
        self.live.last_key_value().map_or(0, |(_, range)| end(range))
    }

    pub(crate) fn allocate(&mut self, bytes: u64) -> Option<PoolRange> {
        let largest = self.pool.largest();
        let got = self.pool.allocate(bytes);
        let asked = bytes.div_ceil(PAGE);
        match got {
            Ok(range) => {
                assert!(range.offset() % PAGE == 0 && range.bytes() == bytes, "{range:?}");
                if bytes > 0 {
                    self.taken(range);
                }
                Some(range)
            }
            Err(AllocateError::TooLarge { .. }) => {
                assert!(bytes > self.pool.bytes(), "{bytes} of {}", self.pool.bytes());
                None
            }
            Err(error) => {
                let free = self.pool.free_bytes();
                assert_eq!(error, AllocateError::NoRoom { bytes, free, largest });
                assert!(largest < asked * PAGE && bytes <= self.pool.bytes(), "{error}");
                self.refused(asked);
                None
            }
        }
    }

    fn taken(&mut self, range: PoolRange) {
        let below = self.live.range(..=range.offset()).next_back();
        assert!(below.is_none_or(|(_, below)| end(below) * PAGE <= range.offset()), "{range:?}");
        let above = self.live.range(range.offset()..).next();
        assert!(above.is_none_or(|(offset, _)| end(&range) * PAGE <= *offset), "{range:?}");
        assert!(end(&range) * PAGE <= self.pool.bytes(), "{range:?}");
        self.live.insert(range.offset(), range);
        self.used += pages(&range);
        self.peak = self.peak.max(self.used);
        if range.bytes() <= LARGE - PAGE {
            let bound = (1 + 5 * class(pages(&range))) * self.peak;
            assert!(end(&range) <= bound, "{range:?} ends behind page {bound}");
        }
    }

    /// A payload may be refused so many pages only as is promised.
    fn refused(&self, asked: u64) {
        let total = self.pool.bytes() / PAGE;
        let peak = self.peak.max(self.used + asked);
        let free = total - self.used;
        assert!(free < (self.live.len() as u64 + 1) * asked, "{asked} pages, {free} are free");
        if asked == 1 {
            assert_eq!(free, 0);
        } else if asked < LARGE / PAGE {
            assert!(total < (1 + 5 * class(asked)) * peak, "{asked} of {total}, peak {peak}");
        } else {
            let is_large = |range: &&PoolRange| pages(range) >= LARGE / PAGE;
            let large: Vec<u64> = self.live.values().filter(is_large).map(pages).collect();
            let small = self.live.values().filter(|range| !is_large(range));
            let reach = small.map(end).max().unwrap_or(0);
            let bound = reach + large.iter().sum::<u64>() + (large.len() as u64 + 1) * asked;
            assert!(total < bound, "{asked} pages of {total}, beyond {bound}");
        }
    }

    /// Frees what may have been freed before.
    pub(crate) fn free(&mut self, range: PoolRange) {
        let is_live = self.live.get(&range.offset()) == Some(&range);
        let freed = self.pool.free(range);
        assert_eq!(freed.is_ok(), is_live || range.bytes() == 0, "{range:?}");
        if is_live {
            self.live.remove(&range.offset());
            self.used -= pages(&range);
            if self.used == 0 {
                self.peak = 0;
            }
        }
    }

    /// Compares the pool with the list.
    pub(crate) fn check(&self) {
        let total = self.pool.bytes() / PAGE;
        let starts = self.live.keys().map(|offset| offset / PAGE).chain([total]);
        let ends = [0].into_iter().chain(self.live.values().map(end));
        let holes = starts.zip(ends).map(|(start, end)| start - end);
        assert_eq!(self.pool.largest(), holes.max().unwrap() * PAGE);
        assert_eq!(self.pool.free_bytes(), (total - self.used) * PAGE);
        assert_eq!(self.pool.len(), self.live.len());
        assert_eq!(self.pool.is_empty(), self.live.is_empty());
    }
}
