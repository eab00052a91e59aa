//! One TCP connection: what it has to say and what it says.

use crate::pace::MessagePace;
use crate::shared::SendQueueDepth;
use crate::zmtp::{ZmtpReader, ZmtpSocket, pong};
use kvferry_engine::fabric::{Endpoint, LinkId, LinkKind};
use kvferry_engine::source::PeerSource;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Messages that are written at a time.
const WRITTEN_TOGETHER: usize = 64;

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ZmqPhase {
    /// The kernel dials.
    Connecting,
    /// The other side has not said what it is.
    Greeting,
    Open,
}

pub(crate) struct ZmqConnection {
    pub(crate) socket: OwnedFd,
    pub(crate) peer: SocketAddr,
    pub(crate) source: PeerSource,
    pub(crate) channel: LinkKind,
    /// None of a connection that a peer dialled and that is not open yet.
    pub(crate) link: Option<LinkId>,
    /// A peer dialled it.
    pub(crate) is_inbound: bool,
    pub(crate) phase: ZmqPhase,
    /// Until when it has to get on, and how long it has for each phase.
    pub(crate) deadline: Option<Instant>,
    pub(crate) patience: Duration,
    /// Nobody listens to it any more; it still says what was queued before.
    pub(crate) is_hung_up: bool,
    pub(crate) reader: ZmtpReader,
    /// Bytes that were read from the kernel and not parsed, because there was no room for their
    /// messages.
    pub(crate) unread: Vec<u8>,
    /// Messages of this connection since its source last had room for all messages.
    pub(crate) in_flood: usize,
    pub(crate) pace: MessagePace,
    pub(crate) queued: Arc<SendQueueDepth>,
    /// Bytes of memory that its unfinished message was last seen to have.
    pub(crate) unfinished: usize,
    /// Bytes of messages that the kernel has not taken, now and when it was last looked.
    unsent: usize,
    pub(crate) seen_unsent: usize,
    /// There is an end, or an error, behind what can be read.
    pub(crate) has_ended: bool,
    /// It is in the list of those to be read.
    pub(crate) is_due: bool,
    /// It is in the list of those to be written.
    pub(crate) is_unwritten: bool,
    /// Greeting or `PONG`, written before the messages.
    urgent: Vec<u8>,
    out: VecDeque<Vec<u8>>,
    /// Bytes of the first of them that are written.
    written: usize,
    has_room: bool,
}

impl ZmqConnection {
    /// One that listens or dials, by what it is, in the phase that it begins with.
    pub(crate) fn new(
        (socket, peer): (OwnedFd, SocketAddr),
        channel: LinkKind,
        link: Option<LinkId>,
        queued: Arc<SendQueueDepth>,
    ) -> ZmqConnection {
        let (own, phase) = match link {
            Some(_) => (ZmtpSocket::Dealer, ZmqPhase::Connecting),
            None => (ZmtpSocket::Router, ZmqPhase::Greeting),
        };
        ZmqConnection {
            socket,
            peer,
            source: PeerSource::new(peer.ip()),
            channel,
            link,
            is_inbound: link.is_none(),
            phase,
            deadline: None,
            patience: Duration::ZERO,
            is_hung_up: false,
            reader: ZmtpReader::new(own),
            unread: Vec::new(),
            in_flood: 0,
            pace: MessagePace::new(Instant::now()),
            queued,
            unfinished: 0,
            unsent: 0,
            seen_unsent: 0,
            has_ended: false,
            is_due: false,
            is_unwritten: false,
            urgent: own.opening(),
            out: VecDeque::new(),
            written: 0,
            has_room: link.is_none(),
        }
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        Endpoint::tcp(&self.peer.ip().to_canonical().to_string(), self.peer.port())
    }

    pub(crate) fn push(&mut self, message: Vec<u8>) {
        self.unsent += message.len();
        self.out.push_back(message);
    }

    /// Bytes of messages that the kernel has not taken.
    pub(crate) fn unsent(&self) -> usize {
        self.unsent
    }

    pub(crate) fn has_output(&self) -> bool {
        !self.out.is_empty()
    }

    /// Answers a `PING`, unless something else is on its way, which tells as well that this side
    /// lives: who does not read cannot have answers pile up.
    pub(crate) fn answer(&mut self, context: &[u8]) {
        if self.urgent.is_empty() && self.out.is_empty() {
            self.urgent = pong(context);
        }
    }

    /// The kernel takes more.
    pub(crate) fn set_writable(&mut self) {
        self.has_room = true;
    }

    /// Gives the kernel what it takes. What fails is told by reading, behind what came before.
    pub(crate) fn flush(&mut self) {
        while self.has_room && self.phase != ZmqPhase::Connecting {
            let is_open = self.phase == ZmqPhase::Open;
            let messages = if is_open { self.out.len().min(WRITTEN_TOGETHER) } else { 0 };
            let mut slices = [IoSlice::new(&[]); 1 + WRITTEN_TOGETHER];
            slices[0] = IoSlice::new(&self.urgent);
            for (slice, message) in slices[1..].iter_mut().zip(self.out.iter().take(messages)) {
                *slice = IoSlice::new(message);
            }
            if messages > 0 {
                slices[1].advance(self.written);
            } else if self.urgent.is_empty() {
                return;
            }
            match rustix::io::writev(&self.socket, &slices[..=messages]) {
                Ok(count) => self.advance(count),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.has_room = false,
                Err(_) => {
                    self.has_room = false;
                    self.urgent = Vec::new();
                    self.discard();
                }
            }
        }
    }

    /// So many bytes are written.
    fn advance(&mut self, mut count: usize) {
        let urgent = count.min(self.urgent.len());
        self.urgent.drain(..urgent);
        count -= urgent;
        while let Some(first) = self.out.front() {
            let left = first.len() - self.written;
            if count < left {
                self.written += count;
                return;
            }
            count -= left;
            self.written = 0;
            self.unsent -= first.len();
            self.out.pop_front();
            self.queued.leave();
        }
    }

    /// Says nothing of what was queued.
    fn discard(&mut self) {
        (self.written, self.unsent) = (0, 0);
        for _ in self.out.drain(..) {
            self.queued.leave();
        }
    }
}
