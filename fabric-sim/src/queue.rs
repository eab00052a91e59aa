//! The event queue: virtual time and what happens when.
//!
//! A radix heap (Ahuja, Mehlhorn, Orlin, Tarjan 1990): simulated time never goes back, so an entry
//! needs to be compared with the current time only. Entries of equal time keep their order of
//! arrival because buckets are emptied front to back and refilled only while empty; the order is
//! therefore (time, sequence) without storing a sequence.
//!
//! ```
//! use kvferry_engine::core::Nanos;
//! use kvferry_sim::queue::EventQueue;
//!
//! let mut queue = EventQueue::new();
//! for (at, what) in [(20, "late"), (10, "first"), (10, "second")] {
//!     queue.push(Nanos(at), what);
//! }
//! let order: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|(_, what)| what).collect();
//! assert_eq!((order, queue.now()), (vec!["first", "second", "late"], Nanos(20)));
//! ```

use crate::slab::Slab;
use kvferry_engine::core::time::Nanos;

/// One bucket per bit in which a time can differ from the current one, and one for equality.
const BUCKETS: usize = 65;

/// Accepts entries of type `E` for a later time. Implemented by [`EventQueue`] for every type that
/// converts into its entries, so that each part of the simulator knows its own events only.
pub trait Schedule<E> {
    /// Adds an entry at `at`, or at the current time if that is later.
    fn at(&mut self, at: Nanos, entry: E);
}

/// What a network is given for something that it does: the time, and where to put what follows.
pub struct StepContext<'a, E, O> {
    pub now: Nanos,
    /// Where its own events wait.
    pub queue: &'a mut dyn Schedule<E>,
    pub out: &'a mut Vec<O>,
}

impl<'a, E, O> StepContext<'a, E, O> {
    pub fn new(
        now: Nanos,
        queue: &'a mut dyn Schedule<E>,
        out: &'a mut Vec<O>,
    ) -> StepContext<'a, E, O> {
        StepContext { now, queue, out }
    }

    /// Adds an entry that is due in a while.
    pub fn after(&mut self, span: Nanos, entry: E) {
        self.queue.at(self.now + span, entry);
    }
}

/// Entries ordered by (time, order of arrival). Push and pop are amortised O(log of the time span).
#[derive(Debug)]
pub struct EventQueue<E> {
    /// Time of the entry popped last; nothing can be scheduled before.
    now: u64,
    /// Bucket `b` holds times whose highest bit that differs from `now` is bit `b - 1`.
    buckets: Vec<Vec<EventQueueKey>>,
    /// Smallest time in each bucket.
    least: [u64; BUCKETS],
    /// Bit set of buckets that are not empty.
    filled: u128,
    /// Next entry of bucket 0.
    head: usize,
    spill: Vec<EventQueueKey>,
    entries: Slab<E>,
    popped: u64,
}

#[derive(Clone, Copy, Debug)]
struct EventQueueKey {
    at: u64,
    slot: u32,
}

impl<E> Default for EventQueue<E> {
    fn default() -> Self {
        EventQueue {
            now: 0,
            buckets: (0..BUCKETS).map(|_| Vec::new()).collect(),
            least: [u64::MAX; BUCKETS],
            filled: 0,
            head: 0,
            spill: Vec::new(),
            entries: Slab::default(),
            popped: 0,
        }
    }
}

impl<E> EventQueue<E> {
    /// An empty queue at time zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Time of the entry that was popped last.
    pub fn now(&self) -> Nanos {
        Nanos(self.now)
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if nothing waits.
    pub fn is_empty(&self) -> bool {
        self.filled == 0
    }

    /// Entries popped since the start.
    pub fn popped(&self) -> u64 {
        self.popped
    }

    /// Adds an entry at `at`, or at [`EventQueue::now`] if that is later.
    #[inline]
    pub fn push(&mut self, at: Nanos, entry: E) {
        let slot = self.entries.add(entry);
        self.place(EventQueueKey { at: at.0.max(self.now), slot });
    }

    #[inline]
    fn place(&mut self, key: EventQueueKey) {
        let bucket = (u64::BITS - (key.at ^ self.now).leading_zeros()) as usize;
        self.buckets[bucket].push(key);
        self.least[bucket] = self.least[bucket].min(key.at);
        self.filled |= 1 << bucket;
    }

    /// When the next entry is due.
    #[inline]
    pub fn next_at(&self) -> Option<Nanos> {
        match self.filled {
            0 => None,
            filled => Some(Nanos(self.least[filled.trailing_zeros() as usize])),
        }
    }

    /// Takes the next entry and moves the time to it.
    #[inline]
    pub fn pop(&mut self) -> Option<(Nanos, E)> {
        if self.filled & 1 == 0 {
            self.refill()?;
        }
        let key = self.buckets[0][self.head];
        self.head += 1;
        if self.head == self.buckets[0].len() {
            self.buckets[0].clear();
            self.head = 0;
            self.filled &= !1;
            self.least[0] = u64::MAX;
        }
        self.popped += 1;
        Some((Nanos(key.at), self.entries.take(key.slot)))
    }

    /// Moves the time to the next entry and spreads the bucket that holds it over lower ones.
    fn refill(&mut self) -> Option<()> {
        if self.filled == 0 {
            return None;
        }
        let bucket = self.filled.trailing_zeros() as usize;
        self.now = self.least[bucket];
        self.filled &= !(1 << bucket);
        self.least[bucket] = u64::MAX;
        let mut keys =
            std::mem::replace(&mut self.buckets[bucket], std::mem::take(&mut self.spill));
        for key in keys.drain(..) {
            self.place(key);
        }
        self.spill = keys;
        Some(())
    }
}

impl<E, Part: Into<E>> Schedule<Part> for EventQueue<E> {
    #[inline]
    fn at(&mut self, at: Nanos, entry: Part) {
        self.push(at, entry.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pops_like_a_sorted_list(steps in prop::collection::vec((0u64..2000, 0u32..3), 1..300)) {
            let mut queue = EventQueue::new();
            let mut model: Vec<(u64, usize)> = Vec::new();
            let mut now = 0;
            for (n, (delay, pops)) in steps.iter().enumerate() {
                let at = if delay % 7 == 0 { delay * 1_000_003 } else { *delay };
                queue.push(Nanos(now + at), n);
                model.push((now + at, n));
                for _ in 0..*pops {
                    model.sort();
                    let expected = (!model.is_empty()).then(|| model.remove(0));
                    prop_assert_eq!(queue.next_at().map(|at| at.0), expected.map(|(at, _)| at));
                    let got = queue.pop().map(|(at, n)| (at.0, n));
                    prop_assert_eq!(got, expected);
                    now = got.map_or(now, |(at, _)| at);
                }
                prop_assert_eq!(queue.len(), model.len());
            }
        }
    }

    #[test]
    fn the_past_is_now() {
        let mut queue = EventQueue::new();
        queue.push(Nanos(10), "a");
        queue.pop();
        queue.push(Nanos(3), "b");
        assert_eq!(queue.pop(), Some((Nanos(10), "b")));
        assert_eq!(queue.pop(), None);
    }
}
