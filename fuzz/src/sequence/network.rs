//! The other ends of the core's links.

use super::frames;
use super::step::FuzzFrameSpec;
use kvferry_engine::core::Nanos;
use kvferry_engine::core::command::ControlCommand;
use kvferry_engine::core::dialect::moriio::handshake::REQUEST;
use kvferry_engine::core::dialect::moriio::notify::{
    ReceivedPrefillNotice, decode_at_prefill, write_done,
};
use kvferry_engine::core::dialect::native::{self, ConnectionHeader, Frame};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{EngineId, Incarnation, RankSet, TransferKey};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{AttemptTag, Message, Role};
use kvferry_engine::fabric::{LinkId, LinkKind};
use std::collections::{BTreeMap, VecDeque};

/// One link as its other end sees it.
#[derive(Debug)]
pub(super) struct FuzzLink {
    pub(super) channel: LinkKind,
    pub(super) up: bool,
    /// Incarnation of the peer and number of the connection.
    connection: (u64, u64),
    /// Messages of the core that arrived.
    heard: u64,
}

/// A frame and the link that it comes by.
pub(super) type FuzzFrame = (LinkId, Vec<Vec<u8>>);

/// All links, and what the peers remember.
#[derive(Debug)]
pub(super) struct FuzzNetwork {
    role: Role,
    pub(super) links: BTreeMap<LinkId, FuzzLink>,
    opened: u32,
    /// Frames that no peer has looked at; the newest are lost.
    unread: VecDeque<(LinkId, Vec<u8>)>,
    /// Tags that the core used.
    tags: Vec<AttemptTag>,
    /// Number of the next message of each connection.
    next: BTreeMap<(u64, u64), u64>,
}

const UNREAD_MAX: usize = 64;

impl FuzzNetwork {
    /// The wire of peers with this role.
    pub(super) fn new(role: Role) -> FuzzNetwork {
        FuzzNetwork {
            role,
            links: BTreeMap::new(),
            opened: 0,
            unread: VecDeque::new(),
            tags: Vec::new(),
            next: BTreeMap::new(),
        }
    }

    pub(super) fn open(&mut self, channel: LinkKind) -> LinkId {
        self.opened += 1;
        let link = LinkId(LinkId::INBOUND | self.opened);
        self.insert(link, channel, true);
        link
    }

    fn insert(&mut self, link: LinkId, channel: LinkKind, up: bool) {
        let entry = FuzzLink { channel, up, connection: (7, 1), heard: 0 };
        assert!(self.links.insert(link, entry).is_none(), "{link} is used twice");
    }

    /// One of the links that `fit`.
    pub(super) fn pick(&self, which: u8, fit: impl Fn(&FuzzLink) -> bool) -> Option<LinkId> {
        let fitting: Vec<_> = self.links.iter().filter(|(_, link)| fit(link)).collect();
        fitting.get(usize::from(which) % fitting.len().max(1)).map(|(id, _)| **id)
    }

    pub(super) fn command(&mut self, command: ControlCommand) {
        match command {
            ControlCommand::Dial { link, channel, .. } => self.insert(link, channel, false),
            ControlCommand::HangUp { link } => drop(self.links.remove(&link)),
            ControlCommand::Send { link, frame } | ControlCommand::Reply { link, frame } => {
                if let Ok(Frame::Data { message, .. }) = native::decode(&frame)
                    && let Some(tag) = message.tag()
                    && !self.tags.contains(tag)
                    && self.tags.len() < UNREAD_MAX
                {
                    self.tags.push(tag.clone());
                }
                if self.links.contains_key(&link) && self.unread.len() < UNREAD_MAX {
                    self.unread.push_back((link, frame));
                }
            }
        }
    }

    /// Says hello over a link, and goes on with that connection.
    pub(super) fn greet(&mut self, link: LinkId, peer: u8, conversation: (u64, u64)) -> FuzzFrame {
        if let Some(link) = self.links.get_mut(&link) {
            link.connection = conversation;
        }
        let hello = frames::hello(self.role, peer, conversation, 0);
        (link, vec![native::encode(&Frame::Hello(hello))])
    }

    fn envelope(&self, link: LinkId) -> ConnectionHeader {
        let (incarnation, session) = self.links.get(&link).map_or((7, 1), |link| link.connection);
        ConnectionHeader {
            version: frames::version(incarnation),
            from: Incarnation(incarnation),
            to: frames::OWN.1,
            session,
        }
    }

    fn data(&mut self, link: LinkId, skew: i8, message: Message) -> FuzzFrame {
        let envelope = self.envelope(link);
        let next = self.next.entry((envelope.from.0, envelope.session)).or_default();
        // The furthest back is the last there can be.
        let seq = if skew == i8::MIN { u64::MAX } else { next.wrapping_add_signed(skew.into()) };
        *next += u64::from(skew == 0);
        (link, vec![native::encode_data(&envelope, seq, &message)])
    }

    /// The frame that says so over this link.
    pub(super) fn say(&mut self, link: LinkId, words: &FuzzFrameSpec) -> Option<FuzzFrame> {
        if let Some(parts) = frames::moriio(words) {
            return Some((link, parts));
        }
        let envelope = self.envelope(link);
        let engine = EngineId::from("peer-0");
        let frame = match words {
            FuzzFrameSpec::Data { skew, saying } => {
                let message = frames::message(saying, &self.tags);
                return Some(self.data(link, skew.unwrap_or(0), message));
            }
            FuzzFrameSpec::Hello { peer, incarnation, session, odd } => {
                let conversation = (frames::said_long(*incarnation), frames::said_long(*session));
                Frame::Hello(frames::hello(self.role, *peer, conversation, *odd))
            }
            FuzzFrameSpec::Welcome { incarnation, session, odd } => {
                let session = session.map_or(envelope.session, u64::from);
                Frame::Welcome(frames::hello(
                    self.role,
                    0,
                    (u64::from(*incarnation), session),
                    *odd,
                ))
            }
            FuzzFrameSpec::Refuse { incarnation } => {
                let envelope =
                    ConnectionHeader { from: Incarnation(u64::from(*incarnation)), ..envelope };
                Frame::Refuse { envelope, engine, reason: "no".into() }
            }
            FuzzFrameSpec::Ack { next } => Frame::Ack { envelope, next: frames::said_long(*next) },
            FuzzFrameSpec::Probe => Frame::Probe { envelope },
            FuzzFrameSpec::Bye => Frame::Bye { envelope },
            FuzzFrameSpec::Abandon { transfer } => {
                let id = frames::transfer(*transfer);
                Frame::Abandon { keys: vec![TransferKey { id, prompt: 0 }] }
            }
            _ => return None,
        };
        Some((link, vec![native::encode(&frame)]))
    }

    /// What a peer that means well says to the oldest frame.
    pub(super) fn polite(&mut self) -> Vec<FuzzFrame> {
        let Some((id, frame)) = self.unread.pop_front() else { return Vec::new() };
        let Some(link) = self.links.get_mut(&id) else { return Vec::new() };
        match native::decode(&frame) {
            Ok(Frame::Hello(hello)) => {
                link.connection = (7, hello.session);
                let hello = frames::hello(self.role, 0, link.connection, 0);
                vec![(id, vec![native::encode(&Frame::Welcome(hello))])]
            }
            Ok(Frame::Data { seq, message, .. }) => {
                link.heard = link.heard.max(seq + 1);
                let mut words = vec![self.ack(id)];
                words.extend(answer(message).map(|message| self.data(id, 0, message)));
                words
            }
            Ok(Frame::Probe { .. }) => vec![self.ack(id)],
            Ok(_) => Vec::new(),
            Err(_) if frame == REQUEST => {
                let blocks = i64::from(frames::BLOCKS);
                let replies = [
                    frames::metadata(0x10_0000, blocks).encode(),
                    frames::memory(0x10_0000, frames::LAYERS).encode(),
                ];
                replies.into_iter().map(|reply| (id, reply.into())).collect()
            }
            Err(_) => self.polite_moriio(&frame).into_iter().collect(),
        }
    }

    fn polite_moriio(&mut self, frame: &[u8]) -> Option<FuzzFrame> {
        let Ok(ReceivedPrefillNotice::RemoteBlocks(notice)) = decode_at_prefill(&[frame]) else {
            return None;
        };
        let link = self.pick(0, |link| link.up && link.channel == LinkKind::Notify)?;
        Some((link, vec![write_done(&notice.transfer().clone())]))
    }

    fn ack(&self, link: LinkId) -> FuzzFrame {
        let next = self.links.get(&link).map_or(0, |link| link.heard);
        (link, vec![native::encode(&Frame::Ack { envelope: self.envelope(link), next })])
    }
}

/// What the other role says to a message when all goes well.
fn answer(message: Message) -> Option<Message> {
    let blocks = |tokens: u32| {
        let ids = (0..tokens.div_ceil(frames::BLOCK_TOKENS)).collect();
        vec![BlockList::new(ids)]
    };
    let ranks = RankSet::first(1);
    let lease = Nanos::from_secs(9);
    Some(match message {
        Message::Ask { tag, .. } => Message::Begun { tag },
        Message::Announce { tag, tokens, .. } => {
            Message::Delivered { tag, ranks, tokens, digest: None }
        }
        Message::Pull { tag, tokens, .. } => {
            Message::Grant { tag, tokens, blocks: blocks(tokens), lease, digest: None }
        }
        Message::Renew { tag, count } => Message::Renewed { tag, count, lease },
        Message::Cancel { tag } => Message::Ended { tag, failure: Failure::Cancelled, quiet: true },
        Message::Begun { tag } => {
            Message::Announce { tag, tokens: 40, from: 0, blocks: blocks(40), verify: None }
        }
        Message::Grant { tag, .. } => Message::Release { tag, ranks },
        Message::Renewed { .. }
        | Message::Delivered { .. }
        | Message::Release { .. }
        | Message::Payload { .. }
        | Message::Ended { .. } => return None,
    })
}
