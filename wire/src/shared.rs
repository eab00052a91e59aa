//! What the plane and its thread share.

use kvferry_engine::fabric::{Endpoint, LinkId, LinkKind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

/// Messages that a link takes before `Busy`.
pub(crate) const QUEUE_MAX: u32 = 16_384;

/// News that wait for the plane; then the thread reads no more, and senders feel it.
const INBOX_MAX: usize = 16_384;

/// Messages of one link that libzmq has not taken yet.
#[derive(Debug, Default)]
pub(crate) struct SendQueueDepth(AtomicU32);

impl SendQueueDepth {
    /// Takes a place; false if there is none.
    pub(crate) fn enter(&self) -> bool {
        let room = |count: u32| (count < QUEUE_MAX).then_some(count + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, room).is_ok()
    }

    /// Gives a place back.
    pub(crate) fn leave(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What happened to a link.
#[derive(Debug)]
pub(crate) enum ZmqLinkEvent {
    Up { link: LinkId, channel: LinkKind, queued: Arc<SendQueueDepth>, from: Option<Endpoint> },
    Frame { link: LinkId, parts: Vec<Vec<u8>> },
    Down { link: LinkId },
}

/// News for the plane, and who waits for them.
#[derive(Debug, Default)]
pub(crate) struct ZmqEventQueue {
    inner: Mutex<(Vec<ZmqLinkEvent>, Option<Waker>)>,
}

impl ZmqEventQueue {
    fn lock(&self) -> MutexGuard<'_, (Vec<ZmqLinkEvent>, Option<Waker>)> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, news: ZmqLinkEvent) {
        let waker = {
            let mut inner = self.lock();
            inner.0.push(news);
            inner.1.clone()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// True if the plane is to be waited for before more is read.
    pub(crate) fn is_full(&self) -> bool {
        self.lock().0.len() >= INBOX_MAX
    }

    pub(crate) fn take(&self) -> Vec<ZmqLinkEvent> {
        std::mem::take(&mut self.lock().0)
    }

    pub(crate) fn set_waker(&self, waker: Waker) {
        self.lock().1 = Some(waker);
    }
}
