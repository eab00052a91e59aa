//! What can happen in a program.

use arbitrary::Arbitrary;

/// One step; numbers are taken modulo what there is to choose from.
#[derive(Clone, Debug, Arbitrary)]
pub(super) enum FuzzStep {
    /// A peer does with the oldest frame that it got what it should.
    Polite,
    /// The engine calls a hook.
    Hook { what: u8, which: u8, size: u8 },
    /// A link that the core dialled is up.
    Up { link: u8 },
    /// The ranks report something.
    Report { what: u8, which: u8 },
    /// A native decode dials and says hello.
    Greet { peer: u8, incarnation: u8, session: u8 },
    /// The other side opens a link.
    Open { channel: u8 },
    /// A frame comes over a link.
    Say { link: u8, words: FuzzFrameSpec },
    /// The same, with one byte changed and perhaps cut short.
    Hurt { link: u8, words: FuzzFrameSpec, at: u16, value: u8, cut: Option<u16> },
    /// Bytes come over a link.
    Raw { link: u8, parts: Vec<Vec<u8>> },
    /// A link is gone.
    Down { link: u8 },
    /// Time passes.
    Wait { ms: u16 },
    /// Much time passes.
    WaitLong { seconds: u8 },
    /// No new requests, please.
    Drain,
}

/// What a frame says.
#[derive(Clone, Debug, Arbitrary)]
pub(super) enum FuzzFrameSpec {
    /// A native message with the next number, or another.
    Data {
        skew: Option<i8>,
        saying: NativeMessageSpec,
    },
    /// MoRIIO: write here.
    Blocks {
        transfer: u8,
        ids: Vec<u8>,
        rank: u8,
    },
    /// MoRIIO: the source is free.
    Released {
        transfer: u8,
        tp: u16,
    },
    /// MoRIIO: everything is written, or from 128 on: nothing will be.
    Written {
        transfer: u8,
    },
    /// MoRIIO: a transfer id and nothing else.
    Bare {
        transfer: u8,
    },
    /// MoRIIO: both replies are wanted.
    Call,
    /// MoRIIO: first reply.
    Metadata {
        shift: u8,
        blocks: i8,
    },
    /// MoRIIO: second reply.
    Memory {
        shift: u8,
        layers: u8,
    },
    /// Native, and so are all that follow.
    Hello {
        peer: u8,
        incarnation: u8,
        session: u8,
        odd: u8,
    },
    Welcome {
        incarnation: u8,
        session: Option<u8>,
        odd: u8,
    },
    Refuse {
        incarnation: u8,
    },
    Ack {
        next: u8,
    },
    Probe,
    Bye,
    Abandon {
        transfer: u8,
    },
}

#[derive(Clone, Debug, Arbitrary)]
pub(super) struct NativeMessageSpec {
    pub(super) kind: u8,
    /// One of the tags that the core used, or a new one.
    pub(super) tag: Option<u8>,
    pub(super) transfer: u8,
    pub(super) sibling: u8,
    pub(super) attempt: u8,
    pub(super) tokens: u8,
    pub(super) from: u8,
    pub(super) first: u8,
    pub(super) blocks: Vec<u8>,
    pub(super) ranks: u8,
    pub(super) time: u64,
    pub(super) quiet: bool,
}
