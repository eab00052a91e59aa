//! News of a plane's threads for its owner.

use kvferry_fabric_common::NewsQueue;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Wake, Waker};

#[derive(Default)]
struct CountedWakes(AtomicU32);

impl Wake for CountedWakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn news_is_taken_once_and_only_what_is_told_wakes_the_owner() {
    let (news, wakes) = (NewsQueue::default(), Arc::new(CountedWakes::default()));
    news.tell(1);
    news.set_waker(Waker::from(wakes.clone()));
    news.push(2);
    assert_eq!(wakes.0.load(Ordering::Relaxed), 0);
    news.tell(3);
    assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
    let mut taken = vec![7];
    news.take(&mut taken);
    assert_eq!(taken, [1, 2, 3]);
    news.take(&mut taken);
    assert!(taken.is_empty(), "{taken:?}");
}
