//! A channel that is listened on: one ROUTER with all its links.

use crate::message::{ZmqMessage, receive};
use crate::monitor::{MonitoredSocket, ZmqMonitorEvent};
use crate::shared::{SendQueueDepth, ZmqEventQueue, ZmqLinkEvent};
use kvferry_engine::fabric::{Endpoint, LinkId, LinkKind};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use zmq::{Context, SocketType};

/// A connection of a peer.
struct ZmqInboundLink {
    /// What libzmq calls it; known from its first message on.
    name: Option<Vec<u8>>,
    out: VecDeque<Vec<Vec<u8>>>,
    queued: Arc<SendQueueDepth>,
    /// Its first message was read before the word that it was accepted.
    early: bool,
}

pub(crate) struct ZmqListener {
    pub(crate) watched: MonitoredSocket,
    channel: LinkKind,
    links: BTreeMap<LinkId, ZmqInboundLink>,
    by_fd: BTreeMap<i32, LinkId>,
    by_name: BTreeMap<Vec<u8>, LinkId>,
    /// Those whose messages libzmq did not take.
    blocked: BTreeSet<LinkId>,
}

impl ZmqListener {
    /// Listens at an address of libzmq; also the address that others dial.
    pub(crate) fn new(
        context: &Context,
        channel: LinkKind,
        at: &str,
    ) -> zmq::Result<(ZmqListener, String)> {
        let socket = context.socket(SocketType::ROUTER)?;
        crate::io::prepare(&socket)?;
        socket.set_router_mandatory(true)?;
        let watched = MonitoredSocket::new(context, socket, &format!("{channel:?}"))?;
        watched.socket.bind(at)?;
        let bound = watched.socket.get_last_endpoint()?.map_err(|_| zmq::Error::EINVAL)?;
        let (links, by_fd, by_name, blocked) = Default::default();
        let bound = crate::address::canonical_endpoint(&bound);
        Ok((ZmqListener { watched, channel, links, by_fd, by_name, blocked }, bound))
    }

    /// True if something waits for room at a peer; libzmq does not say when there is.
    pub(crate) fn has_output(&self) -> bool {
        self.blocked.iter().any(|link| self.links[link].name.is_some())
    }

    pub(crate) fn has(&self, link: LinkId) -> bool {
        self.links.contains_key(&link)
    }

    pub(crate) fn push(&mut self, link: LinkId, parts: Vec<Vec<u8>>) {
        if let Some(inbound) = self.links.get_mut(&link) {
            inbound.out.push_back(parts);
            self.flush(link);
        }
    }

    /// Says nothing more; what it says is not heard by the plane.
    pub(crate) fn hang_up(&mut self, link: LinkId) {
        if let Some(inbound) = self.links.get_mut(&link) {
            inbound.out.clear();
            self.blocked.remove(&link);
        }
    }

    /// Does what can be done.
    pub(crate) fn pump(&mut self, next: &mut u32, inbox: &ZmqEventQueue) {
        while let Some(event) = self.watched.next() {
            self.event(event, next, inbox);
        }
        while !inbox.is_full() {
            let Some(message) = receive(&mut self.watched.socket) else { break };
            self.received(message, next, inbox);
        }
        let waiting: Vec<LinkId> = self.blocked.iter().copied().collect();
        waiting.into_iter().for_each(|link| self.flush(link));
    }

    fn event(&mut self, event: ZmqMonitorEvent, next: &mut u32, inbox: &ZmqEventQueue) {
        match event {
            ZmqMonitorEvent::Accepted(fd) => {
                let known = self.by_fd.get(&fd).and_then(|link| self.links.get_mut(link));
                if known.is_none_or(|link| !std::mem::take(&mut link.early)) {
                    self.lost(fd, inbox);
                    self.accepted(fd, next, inbox);
                }
            }
            ZmqMonitorEvent::Lost(fd) => {
                // What it said before comes first.
                while let Some(message) = receive(&mut self.watched.socket) {
                    self.received(message, next, inbox);
                }
                self.lost(fd, inbox);
            }
            ZmqMonitorEvent::Ready | ZmqMonitorEvent::Failed => {}
        }
    }

    fn accepted(&mut self, fd: i32, next: &mut u32, inbox: &ZmqEventQueue) -> LinkId {
        let link = LinkId(LinkId::INBOUND | *next);
        *next += 1;
        let queued = Arc::<SendQueueDepth>::default();
        let (name, out) = (None, VecDeque::new());
        let inbound = ZmqInboundLink { name, out, queued: queued.clone(), early: false };
        self.links.insert(link, inbound);
        self.by_fd.insert(fd, link);
        inbox.push(ZmqLinkEvent::Up { link, channel: self.channel, queued, from: peer_of(fd) });
        link
    }

    fn lost(&mut self, fd: i32, inbox: &ZmqEventQueue) {
        let Some(link) = self.by_fd.remove(&fd) else { return };
        let Some(inbound) = self.links.remove(&link) else { return };
        self.blocked.remove(&link);
        if let Some(name) = inbound.name {
            self.by_name.remove(&name);
        }
        inbox.push(ZmqLinkEvent::Down { link });
    }

    fn received(&mut self, message: ZmqMessage, next: &mut u32, inbox: &ZmqEventQueue) {
        let ZmqMessage { mut parts, fd } = message;
        let name = parts.remove(0);
        let link = match self.by_name.get(&name) {
            Some(link) => *link,
            None => {
                let known = self.by_fd.get(&fd).copied();
                let unnamed = |link: &LinkId| self.links[link].name.is_none();
                let link = match known.filter(unnamed) {
                    Some(link) => link,
                    // Of a connection before the one that has this descriptor now.
                    None if known.is_some() => return,
                    None => {
                        let link = self.accepted(fd, next, inbox);
                        self.links.get_mut(&link).expect("just made").early = true;
                        link
                    }
                };
                self.by_name.insert(name.clone(), link);
                self.links.get_mut(&link).expect("just seen").name = Some(name);
                link
            }
        };
        inbox.push(ZmqLinkEvent::Frame { link, parts });
    }

    /// Gives libzmq what it takes.
    fn flush(&mut self, link: LinkId) {
        let Some(inbound) = self.links.get_mut(&link) else { return };
        let Some(name) = &inbound.name else {
            self.blocked.insert(link);
            return;
        };
        while let Some(parts) = inbound.out.front() {
            let named = std::iter::once(name).chain(parts);
            // Other errors are of a peer that is gone; the monitor tells.
            if self.watched.socket.send_multipart(named, zmq::DONTWAIT) == Err(zmq::Error::EAGAIN) {
                self.blocked.insert(link);
                return;
            }
            inbound.out.pop_front();
            inbound.queued.leave();
        }
        self.blocked.remove(&link);
    }
}

/// The other end of a connection. One that is gone already is not told, or as that of a younger one
/// with the same descriptor.
fn peer_of(fd: i32) -> Option<Endpoint> {
    // SAFETY: Nothing is read, written or closed; a descriptor that is no socket, or none, is an
    // error.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let at: SocketAddr = rustix::net::getpeername(fd).ok()??.try_into().ok()?;
    Some(Endpoint::tcp(&at.ip().to_canonical().to_string(), at.port()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use zmq::POLLIN;

    /// Events up to the one that is wanted.
    fn events(
        listener: &ZmqListener,
        wanted: impl Fn(&ZmqMonitorEvent) -> bool,
    ) -> Vec<ZmqMonitorEvent> {
        let mut events = Vec::new();
        while !events.iter().any(&wanted) {
            listener.watched.events.poll(POLLIN, 20_000).expect("the monitor lives");
            events.push(listener.watched.next().unwrap_or(ZmqMonitorEvent::Failed));
            assert!(events.len() < 100, "{events:?}");
        }
        events
    }

    fn news(inbox: &ZmqEventQueue) -> Vec<String> {
        let text = |news| match news {
            ZmqLinkEvent::Up { .. } => "up".into(),
            ZmqLinkEvent::Frame { parts, .. } => String::from_utf8_lossy(&parts[0]).into_owned(),
            ZmqLinkEvent::Down { .. } => "down".into(),
        };
        inbox.take().into_iter().map(text).collect()
    }

    #[test]
    fn what_a_peer_said_comes_before_its_end() {
        let (context, inbox, mut next) = (Context::new(), ZmqEventQueue::default(), 0);
        let (mut listener, at) =
            ZmqListener::new(&context, LinkKind::Notify, "tcp://127.0.0.1:*").expect("it listens");
        let peer = context.socket(SocketType::DEALER).unwrap();
        peer.connect(&at).unwrap();
        for text in ["a", "b"] {
            peer.send(text, 0).unwrap();
        }
        drop(peer);
        for event in events(&listener, |event| matches!(event, ZmqMonitorEvent::Lost(_))) {
            listener.event(event, &mut next, &inbox);
        }
        assert_eq!(news(&inbox), ["up", "a", "b", "down"]);
    }

    #[test]
    fn a_message_may_be_read_before_the_word_that_its_connection_was_accepted() {
        let (context, inbox, mut next) = (Context::new(), ZmqEventQueue::default(), 0);
        let (mut listener, at) =
            ZmqListener::new(&context, LinkKind::Notify, "tcp://127.0.0.1:*").expect("it listens");
        let peer = context.socket(SocketType::DEALER).unwrap();
        peer.connect(&at).unwrap();
        peer.send("a", 0).unwrap();
        listener.watched.socket.poll(POLLIN, 20_000).unwrap();
        let message = receive(&mut listener.watched.socket).expect("it is readable");
        listener.received(message, &mut next, &inbox);
        for event in events(&listener, |event| matches!(event, ZmqMonitorEvent::Ready)) {
            listener.event(event, &mut next, &inbox);
        }
        assert_eq!(news(&inbox), ["up", "a"]);
    }
}
