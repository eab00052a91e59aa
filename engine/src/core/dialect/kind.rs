//! Names of what frames carry.

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $byte:literal,)*) => {
        /// What a frame carries, by the name that scenario files use.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum MessageKind { $($(#[$doc])* $name = $byte,)* }

        impl MessageKind {
            pub const ALL: &[MessageKind] = &[$(MessageKind::$name,)*];

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
    Hello = 1,
    Welcome = 2,
    Refuse = 3,
    Ack = 4,
    Probe = 5,
    Bye = 6,
    Register = 7,
    Abandon = 8,
    Ask = 14,
    Begun = 15,
    Announce = 16,
    Pull = 17,
    Grant = 18,
    Renew = 19,
    Renewed = 20,
    Delivered = 21,
    Release = 22,
    Cancel = 23,
    Ended = 24,
    Payload = 25,
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
