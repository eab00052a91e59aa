use super::{Consumer, Producer, RingCorrupt, words_for};
use crate::ring::{AtomicU64, Ordering};
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::Arc;

type TestRingWords = Arc<[AtomicU64]>;

fn ring(capacity: usize) -> (TestRingWords, Producer<TestRingWords>, Consumer<TestRingWords>) {
    let words: TestRingWords = (0..words_for(capacity)).map(|_| AtomicU64::new(0)).collect();
    (words.clone(), Producer::new(words.clone()), Consumer::new(words))
}

proptest! {
    #[test]
    fn any_sequence_of_records_comes_out_as_it_went_in(
        steps in vec(prop_oneof![vec(any::<u64>(), 0..7).prop_map(Some), Just(None)], 0..200)
    ) {
        let (_, mut producer, mut consumer) = ring(16);
        let mut model = VecDeque::new();
        let mut record = Vec::new();
        for step in steps {
            match step {
                Some(words) => {
                    let used: usize = model.iter().map(|r: &Vec<u64>| r.len() + 1).sum();
                    let taken = producer.push(&words).unwrap();
                    prop_assert_eq!(taken, used + words.len() < 16);
                    if taken {
                        model.push_back(words);
                    } else {
                        prop_assert!(!model.is_empty());
                    }
                }
                None => {
                    let there = consumer.pop(&mut record).unwrap();
                    prop_assert_eq!(there.then(|| record.clone()), model.pop_front());
                }
            }
        }
    }

    #[test]
    fn words_written_by_anyone_are_survived(
        noise in vec((0..words_for(16), any::<u64>()), 0..40), records in 1..20_usize
    ) {
        let (words, mut producer, mut consumer) = ring(16);
        let mut into = Vec::new();
        for (at, word) in noise {
            let _ = producer.push(&vec![3; records % 8]);
            words[at].store(word, Ordering::Relaxed);
            let _ = consumer.pop(&mut into);
            prop_assert!(into.len() < 16);
        }
    }
}

#[test]
fn lengths_beyond_what_was_written_are_corrupt() {
    let (words, mut producer, mut consumer) = ring(16);
    assert_eq!(producer.push(&[1, 2]), Ok(true));
    words[32].store(3, Ordering::Relaxed);
    assert_eq!(consumer.pop(&mut Vec::new()), Err(RingCorrupt));
    words[0].store(99, Ordering::Relaxed);
    let mut late = Consumer::new(words);
    assert_eq!(late.pop(&mut Vec::new()), Err(RingCorrupt));
}
