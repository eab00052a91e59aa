//! What connections say, and their ends.

use crate::connection::{ZmqConnection, ZmqPhase};
use crate::io::ZmqIoThread;
use crate::pace::FAST_MESSAGES;
use crate::shared::{CONNECTION_CUTS, ZmqLinkEvent};
use crate::zmtp::{ZmtpError, ZmtpEvent};
use kvferry_engine::fabric::LinkId;
use kvferry_engine::source::PeerSource;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::sync::atomic::Ordering;
use std::time::Instant;

impl ZmqIoThread {
    /// Writes what can be written; one that was hung up is closed when it has said all.
    pub(crate) fn flush(&mut self, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        connection.is_unwritten = false;
        connection.flush();
        let has_changed = connection.unsent() != connection.seen_unsent;
        if connection.is_hung_up && !connection.has_output() {
            self.close(token);
        } else if has_changed {
            self.hold_unsent(token);
        }
    }

    /// Reads once, unless the plane has to take first what its source has said.
    pub(crate) fn read(&mut self, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        if connection.phase == ZmqPhase::Connecting {
            connection.is_due = false;
            return;
        }
        let (source, is_hung_up) = (connection.source, connection.is_hung_up);
        let mut messages = usize::MAX;
        if !is_hung_up {
            let room = self.inbox.room(source);
            if room.messages == 0 {
                self.waiting.push(token);
                if room.is_flooded() {
                    self.cut_flood(source);
                }
                return;
            }
            messages = room.messages;
            if room.full_turns == 0 {
                connection.in_flood = 0;
            }
        }
        connection.is_due = false;
        let mut unread = std::mem::take(&mut connection.unread);
        let is_from_kernel = unread.is_empty();
        let bytes = if is_from_kernel {
            match recv(&connection.socket, &mut self.chunk[..], RecvFlags::empty()) {
                Ok((0, _)) => return self.close(token),
                Ok((count, _)) => &self.chunk[..count],
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => return self.is_due(token),
                // The plane treats it as any other end.
                Err(_) => return self.close(token),
            }
        } else {
            &unread[..]
        };
        // What comes after less than was asked for is told anew.
        let is_due = !is_from_kernel || connection.has_ended || bytes.len() == self.chunk.len();
        if is_hung_up && connection.phase == ZmqPhase::Open {
            if is_due {
                self.is_due(token);
            }
            return;
        }
        let read = connection.reader.read_some(bytes, messages, &mut self.said);
        let rest = read.as_ref().map_or(0, |count| bytes.len() - count);
        connection.in_flood += self.said.len();
        let is_flood = connection.pace.is_flood(self.said.len(), Instant::now());
        if is_from_kernel {
            connection.unread = bytes[bytes.len() - rest..].to_vec();
        } else {
            unread.drain(..unread.len() - rest);
            connection.unread = unread;
        }
        if is_due || rest > 0 {
            self.is_due(token);
        }
        let bytes = self.sort(token);
        self.inbox.push(&mut self.news, (source, bytes));
        match read {
            Err(why) => self.refuse(token, why),
            Ok(_) if is_flood => self.too_fast(token),
            Ok(_) => {
                self.hold(token);
                self.flush(token);
            }
        }
    }

    /// Ends the connection of a source that sent most messages since the source had no room.
    fn cut_flood(&mut self, source: PeerSource) {
        CONNECTION_CUTS.flood.fetch_add(1, Ordering::Relaxed);
        self.cut_largest(source, "more messages than are taken", |it| it.in_flood);
        self.inbox.cut_flood(source);
    }

    /// Ends a connection whose messages come faster than those of any honest peer.
    fn too_fast(&mut self, token: u64) {
        let Some(connection) = self.connections.get(&token) else { return };
        let peer = connection.peer;
        CONNECTION_CUTS.flood.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(%peer, most = FAST_MESSAGES, "connection cut: more messages a second for seconds");
        self.close(token);
    }

    /// Makes news of what was said; bytes of memory of the messages among it.
    fn sort(&mut self, token: u64) -> usize {
        let mut bytes = 0;
        let mut said = std::mem::take(&mut self.said);
        for event in said.drain(..) {
            match event {
                ZmtpEvent::Ready => self.opened(token),
                ZmtpEvent::Message(parts, cost) => {
                    let link = self.connections.get(&token).and_then(|it| it.link);
                    if let Some(link) = link {
                        bytes += cost;
                        self.news.push(ZmqLinkEvent::Frame { link, parts });
                    }
                }
                ZmtpEvent::Ping(context) => {
                    if let Some(connection) = self.connections.get_mut(&token) {
                        connection.answer(&context);
                        connection.flush();
                    }
                }
            }
        }
        self.said = said;
        bytes
    }

    /// Both sides said what they are.
    fn opened(&mut self, token: u64) {
        let Some(connection) = self.connections.get(&token) else { return };
        let (is_inbound, link) = (connection.is_inbound, connection.link);
        // One that was hung up has as long as it had to say what was queued.
        if !connection.is_hung_up {
            self.set_deadline(token, None);
        }
        let link = if is_inbound { self.fresh_link() } else { link };
        let Some(connection) = self.connections.get_mut(&token) else { return };
        connection.phase = ZmqPhase::Open;
        connection.link = link;
        let source = connection.source;
        let from = connection.is_inbound.then(|| connection.endpoint());
        let (channel, queued) = (connection.channel, connection.queued.clone());
        connection.flush();
        if let Some(link) = link {
            self.by_link.insert(link, token);
            self.news.push(ZmqLinkEvent::Up { link, channel, queued, from });
        }
        if self.greeting.remove(&token) {
            self.greetings.change(source, 1, 0);
        }
    }

    /// An id that no other link of a peer has.
    pub(crate) fn fresh_link(&mut self) -> Option<LinkId> {
        loop {
            let link = LinkId(LinkId::INBOUND | self.next_inbound);
            self.next_inbound = self.next_inbound.wrapping_add(1) & !LinkId::INBOUND;
            if !self.by_link.contains_key(&link) {
                return Some(link);
            }
        }
    }

    /// Keeps account of an unfinished message. If there is too much of them, who has most is cut.
    fn hold(&mut self, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        let held = connection.reader.held() + connection.unread.len();
        let before = std::mem::replace(&mut connection.unfinished, held);
        self.unfinished.change(connection.source, before, held);
        while let Some(largest) = self.unfinished.largest_if_over() {
            CONNECTION_CUTS.unfinished.fetch_add(1, Ordering::Relaxed);
            let what = "unfinished messages have too many bytes";
            if !self.cut_largest(largest, what, |it| it.unfinished) {
                return;
            }
        }
    }

    /// Keeps account of what a peer has not read. If there is too much of it, who has most is cut.
    fn hold_unsent(&mut self, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        let unsent = connection.unsent();
        let before = std::mem::replace(&mut connection.seen_unsent, unsent);
        self.unsent.change(connection.source, before, unsent);
        while let Some(largest) = self.unsent.largest_if_over() {
            CONNECTION_CUTS.unread.fetch_add(1, Ordering::Relaxed);
            let what = "messages that peers do not read have too many bytes";
            if !self.cut_largest(largest, what, |it| it.seen_unsent) {
                return;
            }
        }
    }

    /// Ends that connection of a source which has most; false if it has none.
    fn cut_largest(
        &mut self,
        source: PeerSource,
        what: &str,
        amount: impl Fn(&ZmqConnection) -> usize,
    ) -> bool {
        let of = self.connections.iter().filter(|(_, it)| it.source == source);
        let Some((&token, it)) = of.max_by_key(|(_, it)| amount(it)) else { return false };
        let (peer, count) = (it.peer, amount(it));
        tracing::warn!(%peer, count, "connection cut: {what}, and this address has most of them");
        self.close(token);
        true
    }

    /// Ends a connection for what was said by it.
    fn refuse(&mut self, token: u64, why: ZmtpError) {
        let Some(connection) = self.connections.get(&token) else { return };
        let peer = connection.peer;
        match why {
            ZmtpError::TooLong => {
                CONNECTION_CUTS.too_long.fetch_add(1, Ordering::Relaxed);
                let most = connection.reader.most();
                tracing::warn!(%peer, most, "connection cut: a message with more bytes, or parts, than one may have");
            }
            ZmtpError::Protocol(what) => {
                CONNECTION_CUTS.protocol.fetch_add(1, Ordering::Relaxed);
                if connection.is_inbound {
                    // Whoever looks for open ports does so.
                    tracing::debug!(%peer, what, "connection cut: no ZeroMQ that is spoken here");
                } else {
                    tracing::warn!(%peer, what, "no ZeroMQ that is spoken here; is it the port of a control plane?");
                }
            }
        }
        self.close(token);
    }

    pub(crate) fn set_deadline(&mut self, token: u64, deadline: Option<Instant>) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        if let Some(before) = std::mem::replace(&mut connection.deadline, deadline) {
            self.deadlines.remove(&(before, token));
        }
        self.deadlines.extend(deadline.map(|at| (at, token)));
    }

    /// Ends those that did not get on in time.
    pub(crate) fn end_late(&mut self) {
        while let Some(&(at, token)) = self.deadlines.first() {
            if at > Instant::now() {
                return;
            }
            if self.greeting.contains(&token) {
                CONNECTION_CUTS.greetings.fetch_add(1, Ordering::Relaxed);
            }
            self.close(token);
        }
    }

    /// Ends a connection, and tells the plane if it knows the link.
    pub(crate) fn close(&mut self, token: u64) {
        self.set_deadline(token, None);
        let Some(connection) = self.connections.remove(&token) else { return };
        let source = connection.source;
        self.unfinished.change(source, connection.unfinished, 0);
        self.unsent.change(source, connection.seen_unsent, 0);
        if self.greeting.remove(&token) {
            self.greetings.change(source, 1, 0);
        }
        if connection.is_inbound {
            self.inbound.change(source, 1, 0);
        }
        if let Some(link) = connection.link {
            self.by_link.remove(&link);
            self.news.push(ZmqLinkEvent::Down { link });
            self.inbox.push(&mut self.news, (source, 0));
        }
    }
}
