//! What the threads of a plane tell its owner.

use crate::lock;
use std::sync::Mutex;
use std::task::Waker;

/// Where news is left, and who is woken for it.
#[derive(Debug)]
pub struct NewsQueue<E>(Mutex<(Vec<E>, Option<Waker>)>);

impl<E> Default for NewsQueue<E> {
    fn default() -> Self {
        NewsQueue(Mutex::default())
    }
}

impl<E> NewsQueue<E> {
    /// Leaves news; nobody is woken for it yet.
    pub fn push(&self, news: E) {
        lock(&self.0).0.push(news);
    }

    /// Leaves news and wakes the owner.
    pub fn tell(&self, news: E) {
        self.push(news);
        self.wake();
    }

    /// Has the owner poll.
    pub fn wake(&self) {
        let waker = lock(&self.0).1.clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Swaps what is new for an empty list.
    pub fn take(&self, into: &mut Vec<E>) {
        into.clear();
        std::mem::swap(into, &mut lock(&self.0).0);
    }

    /// From now on `waker` is woken, and no other.
    pub fn set_waker(&self, waker: Waker) {
        lock(&self.0).1 = Some(waker);
    }
}
