//! Names of what frames carry.

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

            /// The kind that the header of a frame names.
            pub(super) const fn from_byte(byte: u8) -> Option<MessageKind> {
                match byte { $($byte => Some(MessageKind::$name),)* _ => None }
            }
        }
    };
}

kinds! {
    /// [`Frame::Hello`](super::native::Frame::Hello).
    Hello = 1,
    /// [`Frame::Welcome`](super::native::Frame::Welcome).
    Welcome = 2,
    /// [`Frame::Refuse`](super::native::Frame::Refuse).
    Refuse = 3,
    /// [`Frame::Ack`](super::native::Frame::Ack).
    Ack = 4,
    /// [`Frame::Probe`](super::native::Frame::Probe).
    Probe = 5,
    /// [`Frame::Bye`](super::native::Frame::Bye).
    Bye = 6,
    /// [`Frame::Register`](super::native::Frame::Register).
    Register = 7,
    /// [`Frame::Abandon`](super::native::Frame::Abandon).
    Abandon = 8,
    /// [`Message::Ask`](crate::core::message::Message::Ask).
    Ask = 14,
    /// [`Message::Begun`](crate::core::message::Message::Begun).
    Begun = 15,
    /// [`Message::Announce`](crate::core::message::Message::Announce).
    Announce = 16,
    /// [`Message::Pull`](crate::core::message::Message::Pull).
    Pull = 17,
    /// [`Message::Grant`](crate::core::message::Message::Grant).
    Grant = 18,
    /// [`Message::Renew`](crate::core::message::Message::Renew).
    Renew = 19,
    /// [`Message::Renewed`](crate::core::message::Message::Renewed).
    Renewed = 20,
    /// [`Message::Delivered`](crate::core::message::Message::Delivered).
    Delivered = 21,
    /// [`Message::Release`](crate::core::message::Message::Release).
    Release = 22,
    /// [`Message::Cancel`](crate::core::message::Message::Cancel).
    Cancel = 23,
    /// [`Message::Ended`](crate::core::message::Message::Ended).
    Ended = 24,
}

/// Bytes of kinds from here on are those of messages, which have a number and are acknowledged,
/// whether this version knows them or not.
pub(super) const MESSAGES: u8 = MessageKind::Ask as u8;

impl MessageKind {
    /// The kind with this name.
    pub fn parse(name: &str) -> Option<MessageKind> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }

    /// True for what is said without an agreed version; its form is the same in all versions.
    pub(super) const fn is_versionless(self) -> bool {
        matches!(
            self,
            MessageKind::Hello
                | MessageKind::Welcome
                | MessageKind::Refuse
                | MessageKind::Register
                | MessageKind::Abandon
        )
    }
}
