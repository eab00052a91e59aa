//! Every interleaving of two threads on a small ring.

use super::{Consumer, Producer, words_for};
use crate::sync::AtomicU64;
use loom::sync::{Arc, Condvar, Mutex};
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
#[derive(Clone)]
struct Bell(Arc<(Mutex<bool>, Condvar)>);

impl Bell {
    fn new() -> Bell {
        Bell(Arc::new((Mutex::new(false), Condvar::new())))
    }

    fn ring(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.0.0.lock().unwrap();
        while !*rung {
            rung = self.0.1.wait(rung).unwrap();
        }
        *rung = false;
    }
}

#[test]
fn records_arrive_whole_and_in_order_and_nobody_sleeps_for_good() {
    // Records of two words and a length in four words: the second does not fit beside the first.
    loom::model(|| {
        let (mut producer, mut consumer) = ring(4);
        let (filled, room) = (Bell::new(), Bell::new());
        let (filled_too, room_too) = (filled.clone(), room.clone());
        let writer = thread::spawn(move || {
            for n in [1, 2] {
                while !producer.push(&[n, n + 10]).unwrap() {
                    room_too.wait();
                }
                if producer.must_wake() {
                    filled_too.ring();
                }
            }
        });
        let mut record = Vec::new();
        for n in [1, 2] {
            while !consumer.pop(&mut record).unwrap() {
                if consumer.sleep() {
                    filled.wait();
                }
            }
            assert_eq!(record, [n, n + 10]);
            if consumer.made_room() {
                room.ring();
            }
        }
        writer.join().unwrap();
    });
}
