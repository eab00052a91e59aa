//! What control planes, the control network and the world tell each other.

use crate::keyed_rng::InclusiveRange;
use crate::queue::StepContext;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{ControlEvent, LinkId, LinkKind};
use std::sync::Arc;

/// A control plane in one incarnation; never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ControlPlaneIx(pub u32);

/// A call that a plane took.
#[derive(Clone, Debug)]
pub(crate) enum NetCall {
    Listen { channel: LinkKind },
    Dial { link: LinkId, name: Arc<str>, channel: LinkKind },
    Send { link: LinkId, parts: Vec<Vec<u8>> },
    HangUp { link: LinkId },
}

/// Calls that a control plane took, on the way to the network. Reuse it: it keeps its memory.
#[derive(Clone, Debug, Default)]
pub struct NetCalls {
    pub(crate) list: Vec<NetCall>,
}

impl NetCalls {
    /// True if there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}

/// What the network tells a control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetMessage {
    /// To be polled by the owner.
    Event(ControlEvent),
    /// This many frames of a link have left its queue.
    Sent { link: LinkId, frames: u32 },
}

/// A frame that was sent, as shown to [`NetHooks`].
#[derive(Clone, Copy, Debug)]
pub struct FrameInfo<'a> {
    /// Sender.
    pub from: ControlPlaneIx,
    /// Receiver.
    pub to: ControlPlaneIx,
    /// What the link is for.
    pub channel: LinkKind,
    /// Counts the frames of the sender, from 0.
    pub nth: u64,
    /// Its parts, to be decoded by who wants to know the kind of message.
    pub parts: &'a [Vec<u8>],
}

/// What the world decides about frames.
pub trait NetHooks {
    /// What becomes of a frame.
    fn decide_frame(&mut self, now: Nanos, frame: &FrameInfo<'_>) -> FrameDecision {
        let _unused = (now, frame);
        FrameDecision::default()
    }
}

/// What becomes of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameDecision {
    pub drop: bool,
    /// It arrives again this long after.
    pub duplicate: Option<Nanos>,
    /// It takes this much longer; later frames of the link wait for it.
    pub delay: Nanos,
    /// It waits for no earlier frame of the link, and no later one waits for it.
    pub reorder: bool,
    /// It cannot be read any more, in a way that these uniform bits draw.
    pub damage: Option<u64>,
    /// Another frame comes before it that does not belong there, drawn by these uniform bits.
    pub foreign: Option<u64>,
}

/// Settings of the control network.
#[derive(Clone, Debug)]
pub struct NetConfig {
    /// Seed of all draws.
    pub seed: u64,
    /// Nanoseconds one way.
    pub latency: InclusiveRange,
    /// Frames that a link queues before `send` is `Busy`.
    pub queue_max: u32,
    /// Until a dial that nobody answers fails.
    pub dial_timeout: Nanos,
    /// Frames of each channel that are kept to be sent once more, elsewhere.
    pub recorded: usize,
}

impl Default for NetConfig {
    fn default() -> Self {
        NetConfig {
            seed: 0,
            latency: InclusiveRange::new(20_000, 80_000),
            queue_max: 1_024,
            dial_timeout: Nanos::from_secs(2),
            recorded: 0,
        }
    }
}

/// An entry of the event queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetEvent {
    /// A frame or news of a link arrives.
    Arrive { slot: u32 },
}

/// With what the control network does something.
pub type NetContext<'a> = StepContext<'a, NetEvent, NetOutput>;

/// What a step did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetOutput {
    /// To be handed to [`super::SimControlPlane::deliver`].
    Deliver {
        plane: ControlPlaneIx,
        message: NetMessage,
        /// A frame that is not as any process wrote it for this link.
        forged: bool,
    },
}
