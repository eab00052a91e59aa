//! The native dialect: versioned frames of one part, MessagePack behind a fixed header.
//!
//! Two engines say in their hellos which versions they speak and use the newest that both do
//! ([`agree`]): every frame of the connection is marked with it and says nothing that it does not
//! have. From version 2 on, a version may add fields at the end of a struct, variants of failures
//! (enums with a variant of text that takes names which are not known) and kinds of frames without
//! taking older ones out of [`VERSION_MIN`]: what may be passed over can be sent to who does not
//! know it, and is passed over, acknowledged. Other changes end the
//! support of the versions before them. What is said without an agreed version, hellos and
//! registrations, can only grow at the end; a listener of version 1 takes no such addition.
//!
//! ```
//! use kvferry_engine::core::dialect::native::{Frame, decode, encode};
//! use kvferry_engine::core::ids::TransferKey;
//!
//! let frame = Frame::Abandon { keys: vec![TransferKey { id: "t".into(), prompt: 0 }] };
//! let bytes = encode(&frame);
//! assert_eq!(decode(&bytes), Ok(frame));
//! assert!(decode(&bytes[1..]).is_err());
//! ```

pub use super::DecodeError;
use super::kind::MESSAGES;
pub use super::kind::MessageKind;
use super::skim::skim;
use super::unpack::Unpacker;
use crate::core::error::Failure;
use crate::core::ids::{EngineId, Incarnation, TransferKey};
use crate::core::layout::BlockList;
use crate::core::message::{AttemptTag, Hello, Message, Registration};
use crate::core::verify::KvDigest;
use crate::fabric::FabricError;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::sync::Arc;

/// Which connection a frame belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ConnectionHeader {
    /// Version that the connection is held in; in the header of the frame.
    #[serde(skip)]
    pub version: u16,
    /// Incarnation of the sender.
    pub from: Incarnation,
    /// Incarnation of the receiver that the sender knows.
    pub to: Incarnation,
    /// Number that the dialer gave the connection.
    pub session: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Frame {
    /// First frame of who dialled.
    Hello(Box<Hello>),
    Welcome(Box<Hello>),
    /// The negative answer, to a hello or a welcome.
    Refuse {
        /// The connection that does not come about.
        envelope: ConnectionHeader,
        engine: EngineId,
        reason: Arc<str>,
    },
    Data {
        envelope: ConnectionHeader,
        /// Its number, from 0.
        seq: u64,
        message: Message,
    },
    /// All messages before `next` arrived.
    Ack {
        envelope: ConnectionHeader,
        /// Number of the next message expected.
        next: u64,
    },
    /// Asks for an `Ack`.
    Probe {
        envelope: ConnectionHeader,
    },
    /// The connection is over.
    Bye {
        envelope: ConnectionHeader,
    },
    /// An instance registers with a router.
    Register(Registration),
    /// A router tells a prefill, on the link of its registrations, that nobody will fetch what is
    /// left of these transfers. Not acknowledged; without it a lease ends them.
    Abandon {
        keys: Vec<TransferKey>,
    },
}

impl Frame {
    /// The name of what it carries.
    pub fn name(&self) -> &'static str {
        let kind = match self {
            Frame::Hello(_) => MessageKind::Hello,
            Frame::Welcome(_) => MessageKind::Welcome,
            Frame::Refuse { .. } => MessageKind::Refuse,
            Frame::Data { message, .. } => kind_of(message),
            Frame::Ack { .. } => MessageKind::Ack,
            Frame::Probe { .. } => MessageKind::Probe,
            Frame::Bye { .. } => MessageKind::Bye,
            Frame::Register(_) => MessageKind::Register,
            Frame::Abandon { .. } => MessageKind::Abandon,
        };
        kind.name()
    }
}

/// Newest protocol version that this side speaks.
pub const VERSION: u16 = 2;

/// Oldest protocol version that this side speaks.
pub const VERSION_MIN: u16 = 1;

/// Longest frame in bytes; a hello of 64 ranks with 256 layers in a region of MoRI each fits.
pub const FRAME_MAX: usize = 16 << 20;

/// First bytes of every frame: 0xc1 starts no MessagePack value and no text, so frames of other
/// protocols are told apart. A version byte and a byte for the [`MessageKind`] follow.
pub const MAGIC: [u8; 2] = [0xc1, b'k'];

/// The version byte of what is said before a version is agreed.
const VERSIONLESS: u8 = 0;

/// The first version to which later ones may add.
const GROWS: u16 = 2;

const HEADER: usize = 4;

/// The version of a connection between who speaks up to `newest` and who says this hello; none if
/// there is no version that both speak.
pub fn agree(newest: u16, hello: &Hello) -> Option<u16> {
    let newest = newest.min(hello.version);
    (newest >= VERSION_MIN.max(hello.version_min)).then_some(newest)
}

/// A frame that cannot be read, and what is known of it all the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableFrame {
    pub error: DecodeError,
    /// What the frame is as a message of a connection, if it is one.
    pub message: Option<UnreadableMessage>,
    /// True if a later version has added it, so that nothing is wrong with it.
    pub later: bool,
}

/// A message that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableMessage {
    pub envelope: ConnectionHeader,
    pub seq: u64,
    /// What it is about, if that can be read.
    pub about: Option<(MessageKind, AttemptTag)>,
}

/// The frame's bytes, one part.
pub fn encode(frame: &Frame) -> Vec<u8> {
    match frame {
        Frame::Hello(hello) => pack(MessageKind::Hello, 0, hello),
        Frame::Welcome(hello) => pack(MessageKind::Welcome, 0, hello),
        Frame::Refuse { envelope, engine, reason } => {
            pack(MessageKind::Refuse, 0, &(envelope, engine, reason))
        }
        Frame::Data { envelope, seq, message } => encode_data(envelope, *seq, message),
        Frame::Ack { envelope, next } => {
            pack(MessageKind::Ack, envelope.version, &(envelope, next))
        }
        Frame::Probe { envelope } => pack(MessageKind::Probe, envelope.version, envelope),
        Frame::Bye { envelope } => pack(MessageKind::Bye, envelope.version, envelope),
        Frame::Register(registration) => pack(MessageKind::Register, 0, registration),
        Frame::Abandon { keys } => pack(MessageKind::Abandon, 0, keys),
    }
}

/// The bytes of [`Frame::Data`], from a borrowed message.
pub fn encode_data(envelope: &ConnectionHeader, seq: u64, message: &Message) -> Vec<u8> {
    let message = spoken(envelope.version, message);
    pack(kind_of(&message), envelope.version, &(envelope, seq, &*message))
}

/// The message in words that the version has.
fn spoken(version: u16, message: &Message) -> Cow<'_, Message> {
    match message {
        Message::Ended { tag, failure, quiet } if failure.since() > version => {
            let failure = Failure::Fabric(FabricError::Backend(failure.to_string().into()));
            Cow::Owned(Message::Ended { tag: tag.clone(), failure, quiet: *quiet })
        }
        message => Cow::Borrowed(message),
    }
}

fn pack(kind: MessageKind, version: u16, body: &impl Serialize) -> Vec<u8> {
    let version = if kind.is_versionless() { VERSIONLESS } else { version as u8 };
    let mut bytes = Vec::with_capacity(128);
    bytes.extend([MAGIC[0], MAGIC[1], version, kind as u8]);
    rmp_serde::encode::write(&mut bytes, body).expect("a Vec takes every value of known length");
    bytes
}

/// True if the message, whatever its numbers, fits into a frame.
pub fn fits(message: &Message) -> bool {
    let sums = |digest: &Option<Box<KvDigest>>| {
        digest.as_ref().map_or(0, |sums| 9 * (sums.blocks.len() + sums.layers.len()))
    };
    let ids =
        |blocks: &[BlockList]| -> usize { blocks.iter().map(|list| 16 + 5 * list.ids.len()).sum() };
    let lists: usize = match message {
        Message::Payload { note } => note.text_len(),
        Message::Announce { blocks, .. } => ids(blocks),
        Message::Grant { blocks, digest, .. } => ids(blocks) + sums(digest),
        Message::Delivered { digest, .. } => sums(digest),
        _ => 0,
    };
    // Names of variants, the envelope, numbers and the longest reason take less than the rest.
    let name = message.tag().map_or(0, |tag| tag.key.id.0.len());
    lists + name + 4096 <= FRAME_MAX
}

/// True if the bytes have the header of a hello.
pub fn is_hello(bytes: &[u8]) -> bool {
    matches!(bytes, [m0, m1, _, kind, ..] if [*m0, *m1] == MAGIC && *kind == MessageKind::Hello as u8)
}

/// The frame that the bytes are. Takes time and memory in proportion to their length.
///
/// # Errors
/// Names the message and what is wrong with the bytes.
pub fn decode(bytes: &[u8]) -> Result<Frame, DecodeError> {
    read(bytes).map_err(|unread| unread.error)
}

/// [`decode`] for who has to know what it could not read.
///
/// # Errors
/// What is wrong with the bytes, and what could be read of them.
pub fn read(bytes: &[u8]) -> Result<Frame, UnreadableFrame> {
    let refused = |frame, rule: &str| {
        let error = DecodeError { frame, rule: rule.into() };
        Err(UnreadableFrame { error, message: None, later: false })
    };
    let foreign = |rule| refused("frame", rule);
    if bytes.len() > FRAME_MAX {
        return foreign("longer than a frame may be");
    }
    let Some((&[m0, m1, version, byte], body)) = bytes.split_first_chunk::<HEADER>() else {
        return foreign("shorter than a header");
    };
    if [m0, m1] != MAGIC {
        return foreign("another protocol");
    }
    let version = u16::from(version);
    let Some(kind) = MessageKind::from_byte(byte) else {
        return Err(unknown(version, byte, body));
    };
    let spoken = if kind.is_versionless() {
        version == u16::from(VERSIONLESS)
    } else {
        (VERSION_MIN..=VERSION).contains(&version)
    };
    if !spoken {
        return refused(kind.name(), &format!("unknown version {version}"));
    }
    let read = skim(body).map_err(String::from).and_then(|()| unpack(kind, version, body));
    read.map_err(|rule| UnreadableFrame {
        error: DecodeError { frame: kind.name(), rule: rule.into() },
        message: lost(version, Some(kind), body),
        later: false,
    })
}

/// A frame of a kind that this version does not have.
fn unknown(version: u16, byte: u8, body: &[u8]) -> UnreadableFrame {
    let error = DecodeError { frame: "frame", rule: format!("unknown kind {byte}").into() };
    let grows = (GROWS..=VERSION).contains(&version);
    let message = if grows && byte >= MESSAGES { lost(version, None, body) } else { None };
    let whole = skim(body).is_ok() && (byte < MESSAGES || message.is_some());
    // A damaged header may hide a message that is known.
    let known = message.as_ref().is_some_and(|lost| lost.about.is_some());
    UnreadableFrame { error, later: grows && whole && !known, message }
}

/// What can be read of a message that as a whole cannot.
fn lost(version: u16, kind: Option<MessageKind>, body: &[u8]) -> Option<UnreadableMessage> {
    if kind.is_some_and(|kind| (kind as u8) < MESSAGES) {
        return None;
    }
    let mut values = Unpacker::new(body, version >= GROWS);
    values.list().ok()?;
    let envelope = ConnectionHeader { version, ..values.value().ok()? };
    let seq = values.value().ok()?;
    let mut about = || {
        let (name, _) = values.variant().ok()?;
        let named = MessageKind::parse(name)?;
        values.list().ok()?;
        Some((named, values.value().ok()?))
    };
    let about = about();
    Some(UnreadableMessage { envelope, seq, about })
}

fn unpack(kind: MessageKind, version: u16, body: &[u8]) -> Result<Frame, String> {
    let mut values = Unpacker::new(body, version != 1);
    let of = |envelope: ConnectionHeader| ConnectionHeader { version, ..envelope };
    let frame = match kind {
        MessageKind::Hello => Frame::Hello(value(&mut values)?),
        MessageKind::Welcome => Frame::Welcome(value(&mut values)?),
        MessageKind::Refuse => {
            let BodyOfThree(envelope, engine, reason) = value(&mut values)?;
            Frame::Refuse { envelope: of(envelope), engine, reason }
        }
        MessageKind::Ack => {
            let BodyOfTwo(envelope, next) = value(&mut values)?;
            Frame::Ack { envelope: of(envelope), next }
        }
        MessageKind::Probe => Frame::Probe { envelope: of(value(&mut values)?) },
        MessageKind::Bye => Frame::Bye { envelope: of(value(&mut values)?) },
        MessageKind::Register => Frame::Register(value(&mut values)?),
        MessageKind::Abandon => Frame::Abandon { keys: value(&mut values)? },
        _ => {
            let BodyOfThree(envelope, seq, message): BodyOfThree<_, _, Message> =
                value(&mut values)?;
            if kind_of(&message) != kind {
                return Err("header names another message".into());
            }
            Frame::Data { envelope: of(envelope), seq, message }
        }
    };
    Ok(frame)
}

/// Bodies of frames that are no struct of their own, and grow at the end as structs do.
#[derive(Deserialize)]
struct BodyOfTwo<A, B>(A, B);

#[derive(Deserialize)]
struct BodyOfThree<A, B, C>(A, B, C);

fn value<T: DeserializeOwned>(values: &mut Unpacker<'_>) -> Result<T, String> {
    values.value().map_err(|why| why.to_string())
}

/// What a frame carries, from its header alone.
pub fn peek(bytes: &[u8]) -> Option<MessageKind> {
    match bytes {
        [m0, m1, _, kind, ..] if [*m0, *m1] == MAGIC => MessageKind::from_byte(*kind),
        _ => None,
    }
}

/// The kind of the frame that carries the message.
pub fn kind_of(message: &Message) -> MessageKind {
    match message {
        Message::Ask { .. } => MessageKind::Ask,
        Message::Begun { .. } => MessageKind::Begun,
        Message::Announce { .. } => MessageKind::Announce,
        Message::Pull { .. } => MessageKind::Pull,
        Message::Grant { .. } => MessageKind::Grant,
        Message::Renew { .. } => MessageKind::Renew,
        Message::Renewed { .. } => MessageKind::Renewed,
        Message::Delivered { .. } => MessageKind::Delivered,
        Message::Release { .. } => MessageKind::Release,
        Message::Cancel { .. } => MessageKind::Cancel,
        Message::Ended { .. } => MessageKind::Ended,
        Message::Payload { .. } => MessageKind::Payload,
    }
}
