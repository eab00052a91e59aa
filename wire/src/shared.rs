//! What the plane and its thread share.

use kvferry_engine::fabric::{Endpoint, LinkId, LinkKind};
use kvferry_engine::source::{PeerSource, SourceBudget};
use kvferry_fabric_common::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;

/// Messages that a link takes before `Busy`.
pub(crate) const QUEUE_MAX: u32 = 16_384;

/// Bytes of memory that messages may have until the plane takes them. Who has its share of them is
/// read no further, and its sender feels it.
const INBOX_MAX: usize = 128 << 20;

/// Messages that the plane gets in one turn, so that the time to take them is bounded. A source
/// that has used its share is not read until the next turn.
const TURN_MESSAGES: usize = 16_384;

/// Consecutive turns in which a source may use its share and have more to send. Then its connection
/// with most messages is cut: no honest peer sends so many.
const FLOOD_TURNS: u32 = 16;

/// Fewest messages of a source in a turn that count as a flood, whatever other sources sent.
const FLOOD_MESSAGES: usize = 256;

/// What any piece of news costs in bytes of memory.
const NEWS_COST: usize = 256;

/// Connections that the planes of this process have ended by themselves, by cause.
#[derive(Debug)]
pub struct ConnectionCuts {
    /// A message had more bytes and parts than one may have.
    pub too_long: AtomicU64,
    /// There was too much of unfinished messages, and its source had most of it.
    pub unfinished: AtomicU64,
    /// There was too much that peers had not read, and its source had most of it.
    pub unread: AtomicU64,
    /// It had not said what it is when it was to, or there were too many such and its source had
    /// most of them.
    pub greetings: AtomicU64,
    /// Its source had its share of all connections.
    pub connections: AtomicU64,
    /// Its source sent more than its share for many turns, and this connection sent most of it; or
    /// its messages came faster than any peer sends them.
    pub flood: AtomicU64,
    /// What it said is not what is spoken here.
    pub protocol: AtomicU64,
}

/// What was cut since the process began.
pub static CONNECTION_CUTS: ConnectionCuts = ConnectionCuts {
    too_long: AtomicU64::new(0),
    unfinished: AtomicU64::new(0),
    unread: AtomicU64::new(0),
    greetings: AtomicU64::new(0),
    connections: AtomicU64::new(0),
    flood: AtomicU64::new(0),
    protocol: AtomicU64::new(0),
};

impl ConnectionCuts {
    /// Each cause with how many there were.
    pub fn by_cause(&self) -> [(&'static str, u64); 7] {
        [
            ("too-long", &self.too_long),
            ("unfinished", &self.unfinished),
            ("unread", &self.unread),
            ("greetings", &self.greetings),
            ("connections", &self.connections),
            ("flood", &self.flood),
            ("protocol", &self.protocol),
        ]
        .map(|(cause, count)| (cause, count.load(Ordering::Relaxed)))
    }
}

/// Messages of one link that the kernel has not taken yet.
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

#[derive(Debug)]
struct ZmqInbox {
    news: Vec<ZmqLinkEvent>,
    waker: Option<Waker>,
    bytes: SourceBudget,
    /// Messages since the plane took the last ones.
    messages: SourceBudget,
    /// Sources that had more messages than room since the plane last took messages, and the number
    /// of consecutive turns before in which each source had more.
    full: BTreeSet<PeerSource>,
    floods: BTreeMap<PeerSource, u32>,
    /// Somebody is not read because it has its share.
    is_awaited: bool,
}

/// Limits of what may be read from a source in this turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadRoom {
    /// Number of messages; 0 if nothing may be read.
    pub(crate) messages: usize,
    /// Consecutive earlier turns in which the source had more messages than room.
    pub(crate) full_turns: u32,
}

impl ReadRoom {
    /// True if a connection of the source is to be cut.
    pub(crate) const fn is_flooded(self) -> bool {
        self.full_turns >= FLOOD_TURNS
    }
}

/// News for the plane, and who waits for them.
#[derive(Debug)]
pub(crate) struct ZmqEventQueue(Mutex<ZmqInbox>);

impl Default for ZmqEventQueue {
    fn default() -> Self {
        let bytes = SourceBudget::new(INBOX_MAX);
        ZmqEventQueue(Mutex::new(ZmqInbox {
            news: Vec::new(),
            waker: None,
            bytes,
            messages: SourceBudget::new(TURN_MESSAGES),
            full: BTreeSet::new(),
            floods: BTreeMap::new(),
            is_awaited: false,
        }))
    }
}

impl ZmqEventQueue {
    fn lock(&self) -> MutexGuard<'_, ZmqInbox> {
        lock(&self.0)
    }

    /// Takes all of the news; the messages among them have so many bytes of memory.
    pub(crate) fn push(&self, news: &mut Vec<ZmqLinkEvent>, (from, bytes): (PeerSource, usize)) {
        if news.is_empty() {
            return;
        }
        let waker = {
            let mut inner = self.lock();
            let cost = bytes + news.len() * NEWS_COST;
            inner.bytes.change(from, 0, cost);
            let messages = news.iter().filter(|it| matches!(it, ZmqLinkEvent::Frame { .. }));
            inner.messages.change(from, 0, messages.count());
            inner.news.append(news);
            inner.waker.clone()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Limits for reading from a source. If it is 0, [`ZmqEventQueue::take`] tells when that
    /// changes.
    pub(crate) fn room(&self, source: PeerSource) -> ReadRoom {
        let inner = &mut *self.lock();
        // Each message counts twice: its source has it, and it is no longer free.
        let mut messages = inner.messages.room(source).div_ceil(2);
        if messages == 0 && inner.messages.of(source) >= FLOOD_MESSAGES {
            inner.full.insert(source);
        }
        if inner.bytes.room(source) == 0 {
            messages = 0;
        }
        inner.is_awaited |= messages == 0;
        ReadRoom { messages, full_turns: inner.floods.get(&source).copied().unwrap_or(0) }
    }

    /// Resets the count of a source after one of its connections was cut for a flood.
    pub(crate) fn cut_flood(&self, source: PeerSource) {
        let inner = &mut *self.lock();
        inner.floods.remove(&source);
        inner.full.remove(&source);
    }

    /// All news, and whether somebody waits for their place.
    pub(crate) fn take(&self) -> (Vec<ZmqLinkEvent>, bool) {
        let inner = &mut *self.lock();
        inner.bytes.clear();
        inner.messages.clear();
        inner.floods.retain(|source, _| inner.full.contains(source));
        for source in std::mem::take(&mut inner.full) {
            *inner.floods.entry(source).or_default() += 1;
        }
        (std::mem::take(&mut inner.news), std::mem::take(&mut inner.is_awaited))
    }

    pub(crate) fn set_waker(&self, waker: Waker) {
        self.lock().waker = Some(waker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn source(last: u8) -> PeerSource {
        PeerSource::new(Ipv4Addr::new(10, 0, 0, last).into())
    }

    fn push(queue: &ZmqEventQueue, from: PeerSource, messages: usize) {
        let frame = |_| ZmqLinkEvent::Frame { link: LinkId(1), parts: Vec::new() };
        queue.push(&mut (0..messages).map(frame).collect(), (from, 0));
    }

    #[test]
    fn link_takes_as_many_messages_as_its_queue_has_places() {
        let queued = SendQueueDepth::default();
        assert_eq!((0..2 * QUEUE_MAX).take_while(|_| queued.enter()).count(), QUEUE_MAX as usize);
        queued.leave();
        assert!(queued.enter() && !queued.enter());
    }

    #[test]
    fn source_with_few_messages_is_no_flood_though_others_leave_no_room() {
        let queue = ZmqEventQueue::default();
        let [few, many] = [source(1), source(2)];
        for turn in 0..=FLOOD_TURNS {
            push(&queue, many, TURN_MESSAGES);
            push(&queue, few, FLOOD_MESSAGES - 1);
            for (source, full_turns) in [(few, 0), (many, turn)] {
                assert_eq!(queue.room(source), ReadRoom { messages: 0, full_turns });
            }
            assert_eq!(queue.room(many).is_flooded(), turn == FLOOD_TURNS);
            queue.take();
        }
        // A turn with room ends it.
        assert!(queue.room(many).messages > 0);
        queue.take();
        assert_eq!(queue.room(many).full_turns, 0);
    }

    #[test]
    fn bytes_that_wait_for_the_plane_are_shared_by_sources() {
        let queue = ZmqEventQueue::default();
        let [first, second] = [source(1), source(2)];
        queue.push(&mut vec![ZmqLinkEvent::Down { link: LinkId(1) }], (first, INBOX_MAX / 2));
        assert_eq!(queue.room(first).messages, 0);
        assert!(queue.room(second).messages > 0);
        let (_, is_awaited) = queue.take();
        assert!(is_awaited, "the first waits for its place");
        assert!(queue.room(first).messages > 0);
    }
}
