//! The native dialect: versioned frames of one part, MessagePack behind a fixed header.

pub use super::error::DecodeError;
pub use super::kind::MessageKind;
use super::skim::skim;
use crate::core::ids::{EngineId, Incarnation, TransferKey};
use crate::core::message::{Hello, Message, Registration};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Which conversation a frame belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Envelope {
    /// Life of the sender.
    pub from: Incarnation,
    /// Life of the receiver that the sender knows.
    pub to: Incarnation,
    /// Number that the dialer gave the conversation.
    pub session: u64,
}

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Frame {
    /// First frame of who dialled.
    Hello(Box<Hello>),
    /// The answer.
    Welcome(Box<Hello>),
    /// The negative answer, to a hello or a welcome.
    Refuse {
        /// The conversation that does not come about.
        envelope: Envelope,
        /// Who refuses.
        engine: EngineId,
        /// Why.
        reason: Arc<str>,
    },
    /// A message.
    Data {
        /// The conversation.
        envelope: Envelope,
        /// Its number, from 0.
        seq: u64,
        /// The message.
        message: Message,
    },
    /// All messages before `next` arrived.
    Ack {
        /// The conversation.
        envelope: Envelope,
        /// Number of the next message expected.
        next: u64,
    },
    /// Asks for an `Ack`.
    Probe {
        /// The conversation.
        envelope: Envelope,
    },
    /// The conversation is over.
    Bye {
        /// The conversation.
        envelope: Envelope,
    },
    /// An instance registers with a router.
    Register(Registration),
    /// A router tells a prefill, on the link of its registrations, that nobody will fetch what is
    /// left of these transfers. Not acknowledged; without it a lease ends them.
    Abandon {
        /// The transfers.
        keys: Vec<TransferKey>,
    },
}

/// Newest protocol version that this side speaks.
pub const VERSION: u16 = 1;

/// Oldest protocol version that this side speaks.
pub const VERSION_MIN: u16 = 1;

/// Longest frame in bytes; a hello of 64 ranks with 512 regions each fits.
pub const FRAME_MAX: usize = 16 << 20;

/// First bytes of every frame: 0xc1 starts no MessagePack value and no text, so frames of other
/// protocols are told apart. A version byte and a byte for the [`MessageKind`] follow.
pub const MAGIC: [u8; 2] = [0xc1, b'k'];

/// The version byte of what is said before a version is agreed.
const VERSIONLESS: u8 = 0;

const HEADER: usize = 4;

/// The frame's bytes, one part.
pub fn encode(frame: &Frame) -> Vec<u8> {
    match frame {
        Frame::Hello(hello) => pack(MessageKind::Hello, hello),
        Frame::Welcome(hello) => pack(MessageKind::Welcome, hello),
        Frame::Refuse { envelope, engine, reason } => {
            pack(MessageKind::Refuse, &(envelope, engine, reason))
        }
        Frame::Data { envelope, seq, message } => encode_data(envelope, *seq, message),
        Frame::Ack { envelope, next } => pack(MessageKind::Ack, &(envelope, next)),
        Frame::Probe { envelope } => pack(MessageKind::Probe, envelope),
        Frame::Bye { envelope } => pack(MessageKind::Bye, envelope),
        Frame::Register(registration) => pack(MessageKind::Register, registration),
        Frame::Abandon { keys } => pack(MessageKind::Abandon, keys),
    }
}

/// The bytes of [`Frame::Data`], from a borrowed message.
pub fn encode_data(envelope: &Envelope, seq: u64, message: &Message) -> Vec<u8> {
    pack(kind_of(message), &(envelope, seq, message))
}

fn pack(kind: MessageKind, body: &impl Serialize) -> Vec<u8> {
    let version = if kind.is_versionless() { VERSIONLESS } else { VERSION as u8 };
    let mut bytes = Vec::with_capacity(128);
    bytes.extend([MAGIC[0], MAGIC[1], version, kind as u8]);
    rmp_serde::encode::write(&mut bytes, body).expect("a Vec takes every value of known length");
    bytes
}

/// True if the message, whatever its numbers, fits into a frame.
pub fn fits(message: &Message) -> bool {
    let lists: usize = match message {
        Message::Announce { blocks, .. } | Message::Grant { blocks, .. } => {
            blocks.iter().map(|list| 16 + 5 * list.ids.len()).sum()
        }
        _ => 0,
    };
    // Names of variants, the envelope, numbers and the longest reason take less than the rest.
    lists + message.tag().key.id.0.len() + 4096 <= FRAME_MAX
}

/// The frame that the bytes are. Takes time and memory in proportion to their length.
///
/// # Errors
/// Names the message and what is wrong with the bytes.
pub fn decode(bytes: &[u8]) -> Result<Frame, DecodeError> {
    let error = |frame, rule: &str| DecodeError { frame, rule: rule.into() };
    if bytes.len() > FRAME_MAX {
        return Err(error("frame", "longer than a frame may be"));
    }
    let Some((&[m0, m1, version, byte], body)) = bytes.split_first_chunk::<HEADER>() else {
        return Err(error("frame", "shorter than a header"));
    };
    if [m0, m1] != MAGIC {
        return Err(error("frame", "another protocol"));
    }
    let Some(kind) = MessageKind::from_byte(byte) else {
        return Err(error("frame", &format!("unknown kind {byte}")));
    };
    let spoken = if kind.is_versionless() {
        version == VERSIONLESS
    } else {
        (VERSION_MIN..=VERSION).contains(&u16::from(version))
    };
    if !spoken {
        return Err(error(kind.name(), &format!("unknown version {version}")));
    }
    skim(body).map_err(|rule| error(kind.name(), rule))?;
    unpack(kind, body)
}

fn unpack(kind: MessageKind, body: &[u8]) -> Result<Frame, DecodeError> {
    let frame = match kind {
        MessageKind::Hello => Frame::Hello(value(kind, body)?),
        MessageKind::Welcome => Frame::Welcome(value(kind, body)?),
        MessageKind::Refuse => {
            let (envelope, engine, reason) = value(kind, body)?;
            Frame::Refuse { envelope, engine, reason }
        }
        MessageKind::Ack => {
            let (envelope, next) = value(kind, body)?;
            Frame::Ack { envelope, next }
        }
        MessageKind::Probe => Frame::Probe { envelope: value(kind, body)? },
        MessageKind::Bye => Frame::Bye { envelope: value(kind, body)? },
        MessageKind::Register => Frame::Register(value(kind, body)?),
        MessageKind::Abandon => Frame::Abandon { keys: value(kind, body)? },
        _ => {
            let (envelope, seq, message) = value(kind, body)?;
            if kind_of(&message) != kind {
                let rule = "header names another message".into();
                return Err(DecodeError { frame: kind.name(), rule });
            }
            Frame::Data { envelope, seq, message }
        }
    };
    Ok(frame)
}

fn value<T: DeserializeOwned>(kind: MessageKind, body: &[u8]) -> Result<T, DecodeError> {
    rmp_serde::from_slice(body)
        .map_err(|why| DecodeError { frame: kind.name(), rule: why.to_string().into() })
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
    }
}

/// 64-bit FNV-1a (<https://datatracker.ietf.org/doc/html/draft-eastlake-fnv>).
pub(crate) fn hash(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
