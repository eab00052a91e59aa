//! Reliable, ordered delivery of [`Message`]s over links that lose frames and die.
//!
//! A [`Channel`] is one connection between two incarnations. It outlives its links: what was not
//! acknowledged is sent again over the next one. Numbers start at 0 on either side.
//!
//! ```
//! use kvferry_engine::core::Nanos;
//! use kvferry_engine::core::channel::{Channel, ChannelConfig, Received};
//! use kvferry_engine::core::command::ControlCommand;
//! use kvferry_engine::core::dialect::native::{VERSION, decode};
//! use kvferry_engine::core::ids::{Attempt, Incarnation, TransferKey};
//! use kvferry_engine::core::message::{AttemptTag, Message};
//! use kvferry_engine::core::prompt_hash::PromptHash;
//! use kvferry_engine::fabric::LinkId;
//!
//! let (now, link, config) = (Nanos::ZERO, LinkId(0), ChannelConfig::default());
//! let mut decode_side = Channel::new(&config, Incarnation(1), 5);
//! let mut prefill_side = Channel::new(&config, Incarnation(2), 5);
//! let (mut sent, mut answered, mut delivered) = (Vec::new(), Vec::new(), Vec::new());
//! decode_side.attach(now, link, (Incarnation(2), VERSION), &mut sent);
//! prefill_side.attach(now, link, (Incarnation(1), VERSION), &mut answered);
//!
//! let key = TransferKey { id: "t".into(), prompt: 0 };
//! let prompt_hash = PromptHash::of_tokens(&[7; 100]);
//! let tag = AttemptTag { key, sibling: 0, attempt: Attempt(0) };
//! let ask = Message::Ask { tag, tokens: 100, prompt_hash };
//! decode_side.send(now, ask.clone(), &mut sent)?;
//! let [ControlCommand::Send { frame, .. }] = &sent[..] else { panic!("{sent:?}") };
//! let frame = decode(frame).unwrap();
//! prefill_side.receive(now, frame, &mut |message| delivered.push(message), &mut answered);
//! assert_eq!(delivered, [ask]);
//!
//! // Kept until it is acknowledged.
//! assert_eq!(decode_side.unacknowledged().count(), 1);
//! let [ControlCommand::Send { frame, .. }] = &answered[..] else { panic!("{answered:?}") };
//! let frame = decode(frame).unwrap();
//! let received = decode_side.receive(now, frame, &mut |_| {}, &mut sent);
//! assert_eq!((received, decode_side.unacknowledged().count()), (Received::Progress, 0));
//! # Ok::<(), kvferry_engine::core::error::Failure>(())
//! ```

use super::command::{Commands, ControlCommand};
use super::dialect::native::{self, ConnectionHeader, Frame, UnreadableFrame, UnreadableMessage};
use super::error::Failure;
use super::ids::Incarnation;
use super::message::Message;
use super::time::Nanos;
use crate::fabric::LinkId;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Bits of [`super::message::Hello::capabilities`]; unknown bits are ignored.
pub mod capability {
    /// Prefill writes into decode's blocks.
    pub const PUSH: u32 = 1;
    /// Decode reads from prefill's blocks.
    pub const PULL: u32 = 1 << 1;
    /// There are payloads behind the engine, and notes about them are understood.
    pub const PAYLOADS: u32 = 1 << 2;
    /// KV is verified: the prefill digests what it gives when it is asked to, and the decode asks.
    pub const VERIFY: u32 = 1 << 3;
}

/// Messages that may be sent and unacknowledged; part of the protocol: a number further ahead is a
/// violation.
pub const WINDOW: u64 = 256;

/// Messages repeated at once when an acknowledgement is late.
const BURST: usize = 32;

/// Copies of a message that cannot be read before it is given up: a damaged one is sent again.
///
/// With the default times of [`ChannelConfig`] the eighth comes after 3.55 s, before the silence of
/// a peer that acknowledges nothing is noticed.
pub const COPIES: u32 = 8;

/// Blocks listed in messages that arrived early; beyond, they are dropped and sent again.
const EARLY_BLOCKS_MAX: usize = 1 << 20;

/// Times and limits of the channels of one engine core.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ChannelConfig {
    /// A peer that does not answer the hello for this long is unreachable.
    pub hello: Nanos,
    /// First wait before an unacknowledged frame is sent again; doubles per repetition.
    pub retransmit: Nanos,
    /// Longest wait before a frame is sent again, and the time without a frame after which an
    /// expected peer is probed.
    pub retransmit_max: Nanos,
    /// A peer of which nothing is heard for this long, though something is expected, is down.
    pub silent: Nanos,
    /// Messages per peer that are not acknowledged; one more is `Overload`, unless the peer waits for
    /// it: see [`ANSWERS_MAX`].
    pub queue_max: u32,
    /// Peers at a time, with those that are being fenced; more are `Overload`.
    pub peers_max: u32,
    /// Links at a time; more are not opened, or closed at once.
    pub links_max: u32,
    /// Newest version of the native dialect that is spoken, for a way back to an earlier one; at
    /// most [`native::VERSION`].
    pub version: u16,
}

impl Default for ChannelConfig {
    fn default() -> Self {
        ChannelConfig {
            hello: Nanos::from_secs(2),
            retransmit: Nanos::from_ms(50),
            retransmit_max: Nanos::from_secs(1),
            silent: Nanos::from_secs(7),
            queue_max: 65_536,
            peers_max: 4_096,
            links_max: 8_192,
            version: native::VERSION,
        }
    }
}

impl ChannelConfig {
    /// First and longest wait before a frame is sent again; at least a microsecond, so that a
    /// setting of zero cannot make a timer that is due for ever.
    pub(super) fn waits(&self) -> (Nanos, Nanos) {
        let first = self.retransmit.max(Nanos::from_us(1));
        (first, self.retransmit_max.max(first))
    }
}

/// True if the peer would wait for the message for ever. Who asks for something is told if it
/// cannot be asked for; leases and sources end by themselves.
pub(super) fn is_awaited(message: &Message) -> bool {
    match message {
        Message::Ask { .. }
        | Message::Announce { .. }
        | Message::Pull { .. }
        | Message::Renew { .. }
        | Message::Renewed { .. }
        | Message::Release { .. } => false,
        Message::Payload { note } => note.is_awaited(),
        _ => true,
    }
}

/// Places beside `queue_max` for messages that the peer waits for, such as answers. A peer whose own
/// questions find a full queue asks no more, so that only one that acknowledges nothing gets here.
pub const ANSWERS_MAX: u32 = 65_536;

/// Takes messages in order, each once.
pub type Deliver<'a> = &'a mut dyn FnMut(Message);

#[derive(Debug)]
pub struct Channel {
    envelope: ConnectionHeader,
    retransmit: Nanos,
    retransmit_max: Nanos,
    queue_max: usize,
    link: Option<LinkId>,
    /// Unacknowledged messages; the first is number `base`, the first `sent` were sent.
    queue: VecDeque<Message>,
    base: u64,
    sent: usize,
    /// Number of the next message to deliver, and those that came before their turn; none for one
    /// that a later version has added.
    next: u64,
    early: BTreeMap<u64, Option<Message>>,
    early_blocks: usize,
    /// Copies of message `next` that could not be read.
    unread: u32,
    /// The owner waits for the peer.
    waiting: bool,
    /// Whether the peer is still there has to be known once.
    doubted: bool,
    /// When something is to be sent again, or a probe.
    timer: Option<Nanos>,
    wait: Nanos,
    /// Since when the peer owes us an acknowledgement, or any frame if none is due.
    quiet: Option<Nanos>,
    heard: Nanos,
    stall_compensated: bool,
}

/// What a frame did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// A message was delivered or one of ours acknowledged for the first time.
    Progress,
    Nothing,
    /// It belongs to another connection and was ignored.
    Stale,
    /// A message was given up because none of its copies could be read.
    GivenUp,
    /// It cannot come from a peer that keeps to the protocol and was ignored.
    Violation(&'static str),
}

impl Channel {
    /// A connection without a link; the peer's incarnation and the version are learnt at the
    /// hello.
    pub fn new(config: &ChannelConfig, me: Incarnation, session: u64) -> Channel {
        let (retransmit, retransmit_max) = config.waits();
        Channel {
            envelope: ConnectionHeader { version: 0, from: me, to: Incarnation(0), session },
            retransmit,
            retransmit_max,
            queue_max: config.queue_max as usize,
            link: None,
            queue: VecDeque::new(),
            base: 0,
            sent: 0,
            next: 0,
            early: BTreeMap::new(),
            early_blocks: 0,
            unread: 0,
            waiting: false,
            doubted: false,
            timer: None,
            wait: retransmit,
            quiet: None,
            heard: Nanos::ZERO,
            stall_compensated: false,
        }
    }

    /// Continues over a link, with the peer's incarnation as told in its hello and the version that
    /// was agreed: all that is not acknowledged is sent.
    pub fn attach(
        &mut self,
        now: Nanos,
        link: LinkId,
        (peer, version): (Incarnation, u16),
        out: &mut dyn Commands,
    ) {
        (self.envelope.to, self.envelope.version) = (peer, version);
        self.link = Some(link);
        self.hear(now);
        if !planted!("new-link-repeats-nothing") {
            self.repeat(self.sent, out);
        }
        self.flush(out);
        self.quiet = self.expecting().then_some(now);
        self.wait = self.retransmit;
        self.rearm(now);
    }

    /// Does without a link until the next [`Channel::attach`].
    pub fn detach(&mut self) -> Option<LinkId> {
        self.timer = None;
        self.link.take()
    }

    /// The link in use.
    pub fn link(&self) -> Option<LinkId> {
        self.link
    }

    /// What the frames of this connection carry.
    pub fn envelope(&self) -> ConnectionHeader {
        self.envelope
    }

    /// Queues a message and sends it if the window allows.
    ///
    /// # Errors
    /// `Overload` if the queue is full or the message is longer than a frame may be.
    pub fn send(
        &mut self,
        now: Nanos,
        message: Message,
        out: &mut dyn Commands,
    ) -> Result<(), Failure> {
        let is_more = is_awaited(&message) && !planted!("answers-find-no-room");
        let more = if is_more { ANSWERS_MAX as usize } else { 0 };
        if self.queue.len() >= self.queue_max + more || !native::fits(&message) {
            return Err(Failure::Overload);
        }
        self.queue.push_back(message);
        self.quiet.get_or_insert(now);
        if self.link.is_some() {
            let idle = self.sent == 0;
            self.flush(out);
            if idle {
                self.wait = self.retransmit;
                self.timer = Some(now + self.wait);
            }
        }
        Ok(())
    }

    /// Messages of which it is not known that the peer has them, in order.
    pub fn unacknowledged(&self) -> impl Iterator<Item = &Message> {
        self.queue.iter()
    }

    /// Says whether the owner waits for the peer: then it is probed and its silence counts.
    pub fn watch(&mut self, now: Nanos, waiting: bool) {
        if self.waiting == waiting {
            return;
        }
        self.waiting = waiting;
        if !self.expecting() {
            self.quiet = None;
            self.timer = None;
        } else if self.quiet.is_none() {
            self.quiet = Some(now);
            self.rearm(now);
        }
    }

    /// Asks whether the peer is still there; if it does not answer its silence counts.
    pub fn check_liveness(&mut self, now: Nanos) {
        self.doubted = true;
        if self.quiet.is_none() {
            self.quiet = Some(now);
            self.rearm(now);
        }
    }

    /// True until the peer answers what [`Channel::check_liveness`] asked.
    pub fn is_checking_liveness(&self) -> bool {
        self.doubted
    }

    /// Takes a frame that came by a link of this connection; its messages are delivered in their
    /// turn. Frames of the hello are not for the channel and count as stale.
    pub fn receive(
        &mut self,
        now: Nanos,
        frame: Frame,
        deliver: Deliver<'_>,
        out: &mut dyn Commands,
    ) -> Received {
        let (Frame::Data { envelope, .. }
        | Frame::Ack { envelope, .. }
        | Frame::Probe { envelope }) = &frame
        else {
            return Received::Stale;
        };
        if let Some(odd) = self.mismatch(envelope) {
            return odd;
        }
        self.hear(now);
        match frame {
            Frame::Data { seq, message, .. } => self.take(seq, Some(message), deliver, out),
            Frame::Ack { next, .. } => self.acknowledged(now, next, out),
            _ => {
                self.acknowledge(out);
                Received::Nothing
            }
        }
    }

    /// Takes a message that cannot be read. What a later version has added is acknowledged and
    /// passed over. Of what is damaged another copy will come; the message is given up,
    /// and acknowledged, when [`COPIES`] of it were, so that it keeps up nothing behind it.
    pub fn pass_over(
        &mut self,
        now: Nanos,
        unread: &UnreadableFrame,
        deliver: Deliver<'_>,
        out: &mut dyn Commands,
    ) -> Received {
        let Some(UnreadableMessage { envelope, seq, .. }) = &unread.message else {
            return Received::Nothing;
        };
        if let Some(odd) = self.mismatch(envelope) {
            return odd;
        }
        self.hear(now);
        if unread.later {
            return self.take(*seq, None, deliver, out);
        }
        if *seq != self.next {
            return Received::Nothing;
        }
        self.unread += 1;
        if self.unread < COPIES {
            return Received::Nothing;
        }
        self.take(*seq, None, deliver, out);
        Received::GivenUp
    }

    /// What frames of the peer carry.
    pub fn inbound(&self) -> ConnectionHeader {
        let ConnectionHeader { version, from, to, session } = self.envelope;
        ConnectionHeader { version, from: to, to: from, session }
    }

    /// Why a frame with this envelope is not taken, if it is not.
    fn mismatch(&self, envelope: &ConnectionHeader) -> Option<Received> {
        let ConnectionHeader { version, .. } = self.inbound();
        if (ConnectionHeader { version, ..*envelope }) != self.inbound() {
            return Some(Received::Stale);
        }
        let agreed = envelope.version == version;
        (!agreed).then_some(Received::Violation("another version than was agreed"))
    }

    /// Sends again what is due at `now`, or a probe.
    pub fn tick(&mut self, now: Nanos, out: &mut dyn Commands) {
        if self.timer.is_none_or(|at| at > now) {
            return;
        }
        if self.sent > 0 {
            self.repeat(self.sent.min(BURST), out);
            if !planted!("repetitions-do-not-slow-down") {
                self.wait = (self.wait + self.wait).min(self.retransmit_max);
            }
            self.timer = Some(now + self.wait);
        } else if self.heard + self.retransmit_max > now {
            self.timer = Some(self.heard + self.retransmit_max);
        } else {
            self.post(native::encode(&Frame::Probe { envelope: self.envelope }), out);
            self.timer = Some(now + self.wait);
            self.wait = (self.wait + self.wait).min(self.retransmit_max);
        }
    }

    /// When [`Channel::tick`] is wanted.
    pub fn deadline(&self) -> Option<Nanos> {
        self.timer
    }

    /// Since when the peer owes an acknowledgement (frames of it alone do not count: they may come
    /// by a link on which ours vanish), or any frame if none is due.
    pub fn silent_since(&self) -> Option<Nanos> {
        self.quiet
    }

    /// Counts the peer's silence from `since` at the earliest, once per silence: this process
    /// stood still and could not have heard it.
    pub fn compensate_stall(&mut self, since: Nanos) {
        if !self.stall_compensated && self.quiet.is_some_and(|quiet| quiet < since) {
            self.quiet = Some(since);
            self.stall_compensated = true;
        }
    }

    /// Messages that came before their turn and wait for others.
    pub fn early(&self) -> usize {
        self.early.len()
    }

    /// Messages that are not acknowledged.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    fn expecting(&self) -> bool {
        self.waiting || self.doubted || !self.queue.is_empty()
    }

    fn hear(&mut self, now: Nanos) {
        self.heard = now;
        self.stall_compensated = false;
        if std::mem::take(&mut self.doubted) && !self.expecting() {
            self.timer = None;
        }
        if self.sent == 0 || planted!("any-frame-is-a-sign-of-life") {
            self.wait = self.retransmit;
            self.quiet = self.expecting().then_some(now);
        }
    }

    fn take(
        &mut self,
        seq: u64,
        message: Option<Message>,
        deliver: Deliver<'_>,
        out: &mut dyn Commands,
    ) -> Received {
        if seq.checked_sub(self.next).is_some_and(|ahead| ahead >= WINDOW) {
            return Received::Violation("number beyond the window");
        }
        let before = self.next;
        if seq == self.next {
            message.into_iter().for_each(&mut *deliver);
            self.next += 1;
            self.unread = 0;
            while let Some(message) = self.early.remove(&self.next) {
                self.early_blocks -= message.as_ref().map_or(0, blocks);
                message.into_iter().for_each(&mut *deliver);
                self.next += 1;
            }
        } else if match seq < self.next {
            true => planted!("repeats-are-delivered"),
            false => planted!("early-messages-are-delivered"),
        } {
            message.into_iter().for_each(&mut *deliver);
        } else if seq > self.next && !self.early.contains_key(&seq) {
            let blocks = message.as_ref().map_or(0, blocks);
            if self.early_blocks + blocks <= EARLY_BLOCKS_MAX {
                self.early_blocks += blocks;
                self.early.insert(seq, message);
            }
        }
        self.acknowledge(out);
        if self.next > before { Received::Progress } else { Received::Nothing }
    }

    fn acknowledged(&mut self, now: Nanos, next: u64, out: &mut dyn Commands) -> Received {
        let Some(count) = next.checked_sub(self.base) else {
            return Received::Nothing;
        };
        if count > self.sent as u64 {
            return Received::Violation("acknowledges what was not sent");
        }
        if count == 0 {
            return Received::Nothing;
        }
        self.queue.drain(..count as usize);
        self.base = next;
        self.sent -= count as usize;
        self.flush(out);
        self.quiet = self.expecting().then_some(now);
        self.wait = self.retransmit;
        self.rearm(now);
        Received::Progress
    }

    fn rearm(&mut self, now: Nanos) {
        self.timer = match self.link {
            Some(_) if self.sent > 0 => Some(now + self.wait),
            Some(_) if self.waiting || self.doubted => Some(now + self.retransmit_max),
            _ => None,
        };
    }

    /// Sends what was not sent and fits into the window.
    fn flush(&mut self, out: &mut dyn Commands) {
        while self.sent < self.queue.len().min(WINDOW as usize) && self.link.is_some() {
            self.post(self.encoded(self.sent), out);
            self.sent += 1;
        }
    }

    fn repeat(&mut self, count: usize, out: &mut dyn Commands) {
        for index in 0..count {
            self.post(self.encoded(index), out);
        }
    }

    fn encoded(&self, index: usize) -> Vec<u8> {
        native::encode_data(&self.envelope, self.base + index as u64, &self.queue[index])
    }

    fn acknowledge(&self, out: &mut dyn Commands) {
        let ack = Frame::Ack { envelope: self.envelope, next: self.next };
        self.post(native::encode(&ack), out);
    }

    fn post(&self, frame: Vec<u8>, out: &mut dyn Commands) {
        if let Some(link) = self.link {
            out.push(ControlCommand::Send { link, frame });
        }
    }
}

/// What a stored message costs, in listed blocks.
fn blocks(message: &Message) -> usize {
    match message {
        Message::Announce { blocks, .. } | Message::Grant { blocks, .. } => {
            blocks.iter().map(|list| 1 + list.ids.len()).sum()
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests;
