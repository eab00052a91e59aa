//! The native dialect: versioned frames of one part, MessagePack behind a fixed header.

use crate::core::error::PeerViolation;
use crate::core::ids::{EngineId, Incarnation};
use crate::core::message::{Hello, Message, Registration};
use std::fmt;
use std::sync::Arc;

/// Which conversation a frame belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
}

/// Why bytes are no frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeError {
    /// Name of the message, if the header says it.
    pub frame: &'static str,
    /// What is wrong.
    pub rule: Arc<str>,
}

impl DecodeError {
    /// The violation, with the name of who sent the bytes.
    pub fn violation(&self, peer: &str) -> PeerViolation {
        PeerViolation { peer: peer.into(), frame: self.frame.into(), rule: self.rule.clone() }
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.rule, self.frame)
    }
}

impl std::error::Error for DecodeError {}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $byte:literal,)*) => {
        /// What a frame carries, by the name that scenario files use.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum MessageKind { $($(#[$doc])* $name = $byte,)* }

        impl MessageKind {
            /// All kinds.
            pub const ALL: &[MessageKind] = &[$(MessageKind::$name,)*];

            /// The name.
            pub const fn name(self) -> &'static str {
                match self { $(MessageKind::$name => stringify!($name),)* }
            }

            const fn from_byte(byte: u8) -> Option<MessageKind> {
                match byte { $($byte => Some(MessageKind::$name),)* _ => None }
            }
        }
    };
}

kinds! {
    /// [`Frame::Hello`].
    Hello = 1,
    /// [`Frame::Welcome`].
    Welcome = 2,
    /// [`Frame::Refuse`].
    Refuse = 3,
    /// [`Frame::Ack`].
    Ack = 4,
    /// [`Frame::Probe`].
    Probe = 5,
    /// [`Frame::Bye`].
    Bye = 6,
    /// [`Frame::Register`].
    Register = 7,
    /// [`Message::Announce`].
    Announce = 16,
    /// [`Message::Pull`].
    Pull = 17,
    /// [`Message::Grant`].
    Grant = 18,
    /// [`Message::Renew`].
    Renew = 19,
    /// [`Message::Renewed`].
    Renewed = 20,
    /// [`Message::Delivered`].
    Delivered = 21,
    /// [`Message::Release`].
    Release = 22,
    /// [`Message::Cancel`].
    Cancel = 23,
    /// [`Message::Ended`].
    Ended = 24,
}

impl MessageKind {
    /// The kind with this name.
    pub fn parse(name: &str) -> Option<MessageKind> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }
}

/// First bytes of every frame; the first is the one byte that no MessagePack value contains as a
/// marker, and no text protocol starts with it.
pub const MAGIC: [u8; 2] = [0xc1, b'k'];

/// The frame's bytes, one part.
pub fn encode(_frame: &Frame) -> Vec<u8> {
    Vec::new()
}

/// The frame that the bytes are. Takes time and memory in proportion to their length.
///
/// # Errors
/// Names the message and what is wrong with the bytes.
pub fn decode(_bytes: &[u8]) -> Result<Frame, DecodeError> {
    Err(DecodeError { frame: "?", rule: "not a frame".into() })
}

/// What a frame carries, from its header alone.
pub fn peek(bytes: &[u8]) -> Option<MessageKind> {
    match bytes {
        [m0, m1, _, kind, ..] if [*m0, *m1] == MAGIC => MessageKind::from_byte(*kind),
        _ => None,
    }
}
