//! Every interleaving of two threads on a small ring.

use super::{Consumer, Producer, words_for};
use crate::ring::AtomicU64;
use loom::sync::{Arc, Notify};
use loom::thread;
use std::ops::Deref;

#[derive(Clone)]
struct Words(Arc<Vec<AtomicU64>>);

impl Deref for Words {
    type Target = [AtomicU64];
    fn deref(&self) -> &[AtomicU64] {
        &self.0
    }
}

fn ring(capacity: usize) -> (Producer<Words>, Consumer<Words>) {
    let words = Words(Arc::new((0..words_for(capacity)).map(|_| AtomicU64::new(0)).collect()));
    (Producer::new(words.clone()), Consumer::new(words))
}

/// An eventfd: what was rung is not lost.
type Bell = Arc<Notify>;

fn write(mut producer: Producer<Words>, bells: [Option<Bell>; 2]) {
    let [filled, room] = bells;
    for n in [1, 2] {
        while !producer.push(&[n, n + 10]).unwrap() {
            match &room {
                Some(room) => room.wait(),
                None => thread::yield_now(),
            }
        }
        if let Some(filled) = &filled
            && producer.must_wake()
        {
            filled.notify();
        }
    }
}

fn read(mut consumer: Consumer<Words>, bells: [Option<Bell>; 2]) {
    let [filled, room] = bells;
    let mut record = Vec::new();
    for n in [1, 2] {
        while !consumer.pop(&mut record).unwrap() {
            match &filled {
                Some(filled) if consumer.sleep() => filled.wait(),
                Some(_) => {}
                None => thread::yield_now(),
            }
        }
        assert_eq!(record, [n, n + 10]);
        if let Some(room) = &room
            && consumer.made_room()
        {
            room.notify();
        }
    }
}

/// Two records of three words each; a side without a bell looks again and again.
fn check(capacity: usize, sleeps: [bool; 2]) {
    loom::model(move || {
        let (producer, consumer) = ring(capacity);
        let bells = sleeps.map(|sleeps| sleeps.then(|| Arc::new(Notify::new())));
        let theirs = bells.clone();
        let writer = thread::spawn(move || write(producer, theirs));
        read(consumer, bells);
        writer.join().unwrap();
    });
}

#[test]
fn a_consumer_never_sleeps_over_a_record() {
    check(8, [true, false]);
}

/// Whoever was rung for may have left it to the consumer that looks: then that one sees what it
/// was, or does not go to sleep over it.
#[test]
fn a_consumer_that_looks_by_itself_misses_no_bell() {
    loom::model(|| {
        let (mut producer, mut consumer) = ring(4);
        assert!(consumer.sleep());
        let writer = thread::spawn(move || {
            assert_eq!(producer.push(&[7]), Ok(true));
            producer.must_wake()
        });
        let rung = consumer.attend();
        let mut record = Vec::new();
        let seen = consumer.pop(&mut record).unwrap();
        let asleep = !seen && consumer.sleep();
        assert!(!(rung && asleep), "asleep over a record whose bell was rung before");
        let rings = writer.join().unwrap();
        assert!(rings || !asleep, "asleep and not rung for");
    });
}

#[test]
fn a_producer_never_waits_for_room_that_is_there() {
    check(4, [false, true]);
}
