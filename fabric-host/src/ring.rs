//! A lock-free ring of records for one producer and one consumer, who may be different processes.
//!
//! A record is a list of words. The ring lies in words that both sides map, all of them atomics:
//! the other side may write anything at any time, and all that comes of it is [`RingCorrupt`].

// Atomics of the standard library, or of loom where the rings are checked by it.
#[cfg(feature = "loom")]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use std::ops::Deref;

/// Words ahead of the records. Each index has a cache line of its own.
const HEADER: usize = 32;
/// Words written so far, by the producer.
const TAIL: usize = 0;
/// Words read so far, by the consumer.
const HEAD: usize = 8;
/// 1 while the consumer has to be woken.
const ASLEEP: usize = 16;
/// 1 while the producer has to be woken when there is room.
const CRAMPED: usize = 24;

/// Words that a ring needs for records of `capacity` words in all, their lengths included.
pub(crate) const fn words_for(capacity: usize) -> usize {
    HEADER + capacity
}

/// The other side left the ring in a state that no sequence of its calls makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingCorrupt;

#[derive(Debug)]
pub(crate) struct Producer<W> {
    words: W,
    tail: u64,
    /// What is known of the consumer's index.
    head: u64,
}

#[derive(Debug)]
pub(crate) struct Consumer<W> {
    words: W,
    head: u64,
    /// What is known of the producer's index.
    tail: u64,
}

/// The words of the records; a power of two of them.
fn records(words: &[AtomicU64]) -> &[AtomicU64] {
    let records = &words[HEADER..];
    debug_assert!(records.len().is_power_of_two());
    records
}

impl<W: Deref<Target = [AtomicU64]>> Producer<W> {
    /// The writing end of a ring that nobody used yet: all words are zero.
    pub(crate) fn new(words: W) -> Self {
        Producer { words, tail: 0, head: 0 }
    }

    fn room(&self) -> Result<u64, RingCorrupt> {
        let capacity = records(&self.words).len() as u64;
        capacity.checked_sub(self.tail.wrapping_sub(self.head)).ok_or(RingCorrupt)
    }

    /// Appends a record; false if there is no room, and then the consumer rings when there is.
    pub(crate) fn push(&mut self, record: &[u64]) -> Result<bool, RingCorrupt> {
        let need = record.len() as u64 + 1;
        debug_assert!(need <= records(&self.words).len() as u64, "a record that never fits");
        if self.room()? < need {
            self.head = self.words[HEAD].load(Ordering::Acquire);
            if self.room()? < need {
                // A swap, not a store: either the consumer's swap sees this one, or this one sees
                // that swap and with it the index stored ahead of it.
                self.words[CRAMPED].swap(1, Ordering::AcqRel);
                self.head = self.words[HEAD].load(Ordering::Acquire);
                if self.room()? < need {
                    return Ok(false);
                }
            }
        }
        let slots = records(&self.words);
        let mask = slots.len() - 1;
        let mut at = self.tail as usize;
        for word in std::iter::once(&(record.len() as u64)).chain(record) {
            slots[at & mask].store(*word, Ordering::Relaxed);
            at = at.wrapping_add(1);
        }
        self.tail = self.tail.wrapping_add(need);
        self.words[TAIL].store(self.tail, Ordering::Release);
        Ok(true)
    }

    /// True if the consumer sleeps and has to be woken for what was pushed; true once per sleep.
    pub(crate) fn must_wake(&self) -> bool {
        self.words[ASLEEP].swap(0, Ordering::AcqRel) == 1
    }
}

impl<W: Deref<Target = [AtomicU64]>> Consumer<W> {
    /// The reading end of a ring that nobody used yet: all words are zero.
    pub(crate) fn new(words: W) -> Self {
        Consumer { words, head: 0, tail: 0 }
    }

    fn filled(&self) -> Result<u64, RingCorrupt> {
        let filled = self.tail.wrapping_sub(self.head);
        if filled <= records(&self.words).len() as u64 { Ok(filled) } else { Err(RingCorrupt) }
    }

    /// Moves the oldest record into `into`; false if there is none.
    pub(crate) fn pop(&mut self, into: &mut Vec<u64>) -> Result<bool, RingCorrupt> {
        if self.tail == self.head {
            self.tail = self.words[TAIL].load(Ordering::Acquire);
        }
        let filled = self.filled()?;
        if filled == 0 {
            return Ok(false);
        }
        let slots = records(&self.words);
        let mask = slots.len() - 1;
        let len = slots[self.head as usize & mask].load(Ordering::Relaxed);
        if len >= filled {
            return Err(RingCorrupt);
        }
        into.clear();
        let from = self.head.wrapping_add(1) as usize;
        into.extend(
            (0..len as usize).map(|n| slots[from.wrapping_add(n) & mask].load(Ordering::Relaxed)),
        );
        self.head = self.head.wrapping_add(len + 1);
        self.words[HEAD].store(self.head, Ordering::Release);
        Ok(true)
    }

    /// True if the producer waits for room and has to be woken after a pop; true once per wait.
    pub(crate) fn made_room(&self) -> bool {
        self.words[CRAMPED].swap(0, Ordering::AcqRel) == 1
    }

    /// True if there is something to pop.
    pub(crate) fn is_filled(&self) -> bool {
        self.words[TAIL].load(Ordering::Acquire) != self.head
    }

    /// Announces that the consumer looks by itself and has not to be woken; true if it was rung for
    /// since it went to sleep.
    pub(crate) fn attend(&self) -> bool {
        // A swap, not a store, which would part the producer's swap from that of `sleep`.
        self.words[ASLEEP].swap(0, Ordering::AcqRel) == 0
    }

    /// True if it was rung for since it announced that it sleeps.
    pub(crate) fn is_rung(&self) -> bool {
        self.words[ASLEEP].load(Ordering::Acquire) == 0
    }

    /// Announces that the consumer goes to sleep; false if it must not, as there is something.
    pub(crate) fn sleep(&self) -> bool {
        self.words[ASLEEP].swap(1, Ordering::AcqRel);
        !self.is_filled()
    }
}

#[cfg(all(test, feature = "loom"))]
mod model;
#[cfg(all(test, not(feature = "loom")))]
mod tests;
