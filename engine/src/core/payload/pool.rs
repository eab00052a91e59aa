//! Which bytes of one registered region are whose payload.
//!
//! ```
//! use kvferry_engine::core::payload::pool::{AllocateError, PAGE, PayloadPool};
//!
//! let mut pool = PayloadPool::new(4 * PAGE);
//! let chunk = pool.allocate(3305)?;
//! let tensor = pool.allocate(3 * PAGE)?;
//! assert_eq!((tensor.offset(), pool.free_bytes()), (PAGE, 0));
//! // The caller waits until something is freed, but not for what never fits.
//! assert!(matches!(pool.allocate(1), Err(AllocateError::NoRoom { .. })));
//! assert!(matches!(pool.allocate(5 * PAGE), Err(AllocateError::TooLarge { .. })));
//! pool.free(chunk).unwrap();
//! assert!(pool.free(chunk).is_err(), "it was freed before");
//! assert_eq!(pool.allocate(1)?.offset(), 0);
//! # Ok::<(), AllocateError>(())
//! ```
//!
//! # Where a payload goes
//!
//! Payloads below [`LARGE`] go from the beginning of the pool up, and large ones from its end down,
//! so that a small one that lives long does not split what a large one needs.
//!
//! - A large payload gets the smallest hole that has room, the highest if several are equal.
//! - A small payload gets the smallest hole that has room, the lowest if several are equal, but
//!   only if it then ends within the reach of its kind: before the end of the highest payload that
//!   is as small or smaller, in classes 4^(k-1) < pages <= 4^k. Else it gets the lowest hole that
//!   has room, and that may extend the reach.
//!
//! Neighbouring holes are one hole at once. Of the schemes that were tried over sizes from 3 KB to
//! 256 MB and lifetimes from 1 ms to 30 s in pools of 0.5 to 8 GiB this one refused least often while
//! enough was free. First fit refused 30 times as often with chunks of 3 KB and 1.6 MB at 70 to 90 %
//! occupancy, and a third more often with tensors of 16 MB among them. Buddies, and size classes
//! that round up, cannot use holes that would do.
//!
//! # What is promised
//!
//! A payload wastes less than one [`PAGE`], and is refused only if no hole has room for it. Among N
//! payloads there are at most N + 1 holes, so whoever is refused p pages sees less than (N + 1) * p
//! free.
//!
//! How much that can be at worst: let V be the most pages that were in use since the pool was empty
//! for the last time, the refused ones counted too. Of a pool of P pages
//!
//! - 1 page is refused only if nothing is free;
//! - p pages below [`LARGE`] are refused only if P < (1 + 5k) * V, where k = log4 p, rounded up;
//! - p pages from [`LARGE`] on are refused only if P < R + L + (N + 1) * p, where N large payloads
//!   have L pages and R is the reach of the small ones, at most 31 V.
//!
//! Proof of the second: a payload of class k extends the reach of its class only into the lowest
//! hole that has room for it, so what is below has smaller holes, at most 4^k - 1 pages. From the
//! reach R' of the smaller classes on up, each of them is followed by a payload of more than
//! 4^(k-1) pages, so more than a fifth of these pages is in use, and the new end is at most
//! R' + 5 V. The reach of single pages is at most V, as there is no hole below them. If there is no
//! hole with room, the same holds for the end of the pool. The third counts the holes between large
//! payloads, which alone are beyond the reach.
//!
//! No allocator that leaves everything where it is can promise more than P = (1 + log2(p) / 2) * V
//! (J. M. Robson, An estimate of the store size necessary for dynamic storage allocation, JACM 18,
//! 1971). Best fit alone has no such bound: it may need almost P = p * V (D. E. Knuth, The Art of
//! Computer Programming, volume 1, section 2.5, exercise 42).
//!
//! # What it needs of its caller
//!
//! Order. The pool does not wait: who is refused tries again after each [`PayloadPool::free`], which
//! costs one look-up as long as nothing is large enough. As long as one waits, nothing that came
//! later may be allocated: then the pool can only drain, and whoever waits is served at the latest
//! when all that was in use has been freed. Those that overtake may keep a large one waiting for
//! ever.

use super::holes::{Hole, HoleTrie};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Alignment of payloads in bytes: the page of x86-64, so that no two payloads share one, and what
/// the allocator of vLLM-Omni's MoRI connector rounds to (`BufferAllocator`, 0.30.0).
pub const PAGE: u64 = 4096;

/// From so many bytes on a payload is large. Of the powers of two this one did best: it is above the
/// chunks that stages hand on (1.6 MB) and below tensors and KV of whole prompts (16 MB and more).
pub const LARGE: u64 = 8 << 20;

/// Classes of small payloads: 1 page, 2 to 4, 5 to 16, and so on; one more is that of large ones.
const SMALL_CLASSES: usize = 7;

/// The class of a payload of so many pages.
fn class_of(pages: u64) -> usize {
    if pages >= LARGE / PAGE {
        return SMALL_CLASSES;
    }
    (64 - pages.saturating_sub(1).leading_zeros()).div_ceil(2) as usize
}

/// Bytes of a pool that one payload has. It is a receipt: copies of it are worth nothing once it
/// was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "who drops it never frees its bytes"]
pub struct PoolRange {
    offset: u64,
    bytes: u64,
    /// Tells apart what was in the same place at different times.
    serial: u64,
}

impl PoolRange {
    /// Where the payload starts in the pool, in bytes; a multiple of [`PAGE`].
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes that were asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn first(&self) -> u64 {
        self.offset / PAGE
    }

    fn pages(&self) -> u64 {
        self.bytes.div_ceil(PAGE)
    }

    fn end(&self) -> u64 {
        self.first() + self.pages()
    }
}

/// Why a payload got no bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AllocateError {
    /// It has no room even if it is alone.
    TooLarge { bytes: u64, pool: u64 },
    /// It has to wait until something is freed. If enough is free, but not in one piece, `largest`
    /// is less than `bytes` and `free` is not.
    NoRoom { bytes: u64, free: u64, largest: u64 },
}

impl fmt::Display for AllocateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AllocateError::TooLarge { bytes, pool } => write!(
                f,
                "a payload of {bytes} bytes is larger than the whole pool of {pool} bytes: \
                 make the pool larger"
            ),
            AllocateError::NoRoom { bytes, free, largest } => write!(
                f,
                "no room for {bytes} bytes now: {free} bytes of the pool are free, at most \
                 {largest} in one piece"
            ),
        }
    }
}

impl std::error::Error for AllocateError {}

/// What was to be freed is not allocated: it was freed before, or belongs to another pool. Nothing
/// was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAllocated(pub PoolRange);

impl fmt::Display for NotAllocated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PoolRange { offset, bytes, serial } = self.0;
        write!(
            f,
            "{bytes} bytes at offset {offset} of the pool (allocation {serial}) were freed before, \
             or are of another pool"
        )
    }
}

impl std::error::Error for NotAllocated {}

/// The bytes of one registered region and who has which.
///
/// Both [`PayloadPool::allocate`] and [`PayloadPool::free`] take time in proportion to the logarithm
/// of the number of holes and payloads, or to the bits of the number of a page where that is more;
/// memory goes by the number of holes and payloads alone.
#[derive(Clone, Debug)]
pub struct PayloadPool {
    pages: u64,
    free: u64,
    serial: u64,
    holes: HoleTrie,
    /// The same holes by (pages, first page).
    by_size: BTreeSet<(u64, u64)>,
    /// Payloads that have bytes, by class and first page.
    live: [BTreeMap<u64, PoolRange>; SMALL_CLASSES + 1],
}

impl PayloadPool {
    /// A pool of so many bytes, all of them free. What is beyond the last whole [`PAGE`] is not
    /// used.
    pub fn new(bytes: u64) -> PayloadPool {
        let pages = bytes / PAGE;
        let mut pool = PayloadPool {
            pages,
            free: pages,
            serial: 0,
            holes: HoleTrie::new(),
            by_size: BTreeSet::new(),
            live: Default::default(),
        };
        if pages > 0 {
            pool.add_hole(Hole { first: 0, end: pages });
        }
        pool
    }

    /// Bytes of the pool, free or not.
    pub fn bytes(&self) -> u64 {
        self.pages * PAGE
    }

    /// Bytes that nobody has.
    pub fn free_bytes(&self) -> u64 {
        self.free * PAGE
    }

    /// The most bytes that can be allocated now.
    pub fn largest(&self) -> u64 {
        self.holes.largest() * PAGE
    }

    /// Payloads that have bytes; empty ones are not counted.
    pub fn len(&self) -> usize {
        self.live.iter().map(BTreeMap::len).sum()
    }

    /// True if nobody has bytes.
    pub fn is_empty(&self) -> bool {
        self.free == self.pages
    }

    /// Gives a payload its bytes. One without bytes is no failure: it gets a range of length 0 that
    /// takes nothing.
    ///
    /// # Errors
    /// If the payload is larger than the pool, or has no room now.
    pub fn allocate(&mut self, bytes: u64) -> Result<PoolRange, AllocateError> {
        if bytes == 0 {
            return Ok(PoolRange { offset: 0, bytes, serial: 0 });
        }
        let pages = bytes.div_ceil(PAGE);
        if pages > self.pages {
            return Err(AllocateError::TooLarge { bytes, pool: self.bytes() });
        }
        let class = class_of(pages);
        let Some(hole) = self.hole_for(pages, class) else {
            let (free, largest) = (self.free_bytes(), self.largest());
            return Err(AllocateError::NoRoom { bytes, free, largest });
        };
        let first = if class < SMALL_CLASSES { hole.first } else { hole.end - pages };
        self.cut(hole, Hole { first, end: first + pages });
        self.free -= pages;
        self.serial += 1;
        let range = PoolRange { offset: first * PAGE, bytes, serial: self.serial };
        self.live[class].insert(first, range);
        Ok(range)
    }

    /// Takes the bytes of a payload back.
    ///
    /// # Errors
    /// If they are not allocated; nothing is changed then.
    pub fn free(&mut self, range: PoolRange) -> Result<(), NotAllocated> {
        if range.bytes == 0 {
            return Ok(());
        }
        let (mut first, mut end) = (range.first(), range.end());
        let live = &mut self.live[class_of(range.pages())];
        if live.get(&first) != Some(&range) {
            return Err(NotAllocated(range));
        }
        live.remove(&first);
        self.free += range.pages();
        if let Some(before) = self.holes.ending_at(first) {
            self.remove_hole(before);
            first = before.first;
        }
        if let Some(after) = self.holes.starting_at(end) {
            // It stays in the trie, where it grows.
            self.by_size.remove(&(after.pages(), after.first));
            end = after.end;
        }
        self.add_hole(Hole { first, end });
        Ok(())
    }

    /// The hole from which a payload is cut.
    fn hole_for(&self, pages: u64, class: usize) -> Option<Hole> {
        let &(size, first) = self.by_size.range((pages, 0)..).next()?;
        if class < SMALL_CLASSES {
            if first + pages <= self.reach(class) {
                return Some(Hole { first, end: first + size });
            }
            return self.holes.lowest(pages);
        }
        let &(_, first) = self.by_size.range((size, first)..=(size, u64::MAX)).next_back()?;
        Some(Hole { first, end: first + size })
    }

    /// The end of the highest payload of a class of small ones, or of one below.
    fn reach(&self, class: usize) -> u64 {
        let highest = self.live[..=class].iter().filter_map(BTreeMap::last_key_value);
        highest.map(|(_, range)| range.end()).max().unwrap_or(0)
    }

    /// Takes pages at one of the ends of a hole.
    fn cut(&mut self, hole: Hole, taken: Hole) {
        if taken.end == hole.end {
            self.remove_hole(hole);
        } else {
            // It stays in the trie, where it shrinks.
            self.by_size.remove(&(hole.pages(), hole.first));
            self.add_hole(Hole { first: taken.end, end: hole.end });
        }
        if hole.first < taken.first {
            self.add_hole(Hole { first: hole.first, end: taken.first });
        }
    }

    fn add_hole(&mut self, hole: Hole) {
        self.holes.set(hole);
        self.by_size.insert((hole.pages(), hole.first));
    }

    fn remove_hole(&mut self, hole: Hole) {
        self.holes.remove(hole.end);
        self.by_size.remove(&(hole.pages(), hole.first));
    }
}
