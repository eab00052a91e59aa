//! A fault with every value drawn.

use crate::decide::{DecisionKey, within};
use crate::lists::{FaultKind, MessageName, TriggerEvent};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::message::Role;
use serde::{Deserialize, Serialize};
use std::convert::Infallible;

/// A span of time that is drawn anew each time it is used; both ends included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DurationRange {
    pub min: Nanos,
    pub max: Nanos,
}

impl DurationRange {
    pub const fn fixed(nanos: Nanos) -> DurationRange {
        DurationRange { min: nanos, max: nanos }
    }

    pub const fn draw(&self, key: &DecisionKey) -> Nanos {
        self.pick(key.get())
    }

    /// Maps a uniform number, see [`crate::decide::decide`].
    pub const fn pick(&self, uniform: u64) -> Nanos {
        Nanos(within(uniform, self.min.0, self.max.0))
    }
}

/// A fault with every value drawn; `I` is what an instance is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrawnFault<I> {
    /// Names its decisions (the `actor` of [`crate::decide::decide`]); depends on nothing but the
    /// fault's own table.
    pub key: u64,
    /// Line of its table in the file.
    pub line: u32,
    pub kind: FaultKind,
    pub trigger: FaultTrigger,
    /// The instance it happens to (a name or a host), or `router`; `None` is any.
    pub target: Option<String>,
    /// Narrows it to what comes from this instance.
    pub from: Option<String>,
    /// Narrows it to what goes to this instance.
    pub to: Option<String>,
    /// Narrows it to these frames.
    pub message: Option<MessageName>,
    /// How long it lasts; `None` is for good, or a single event.
    pub lasts: Option<DurationRange>,
    /// How often it can fire.
    pub times: u32,
    /// By how much things are late.
    pub delay: Option<DurationRange>,
    /// Divides a bandwidth, or multiplies the time of a step.
    pub factor: u32,
    /// The TP rank.
    pub rank: Option<u16>,
    /// Which directions a partition cuts.
    pub direction: PartitionDirection,
    /// Which of two simultaneous things comes first.
    pub first: RaceOrder,
    /// What the instance is after its restart.
    pub becomes: Option<Box<I>>,
}

/// When a fault fires.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultTrigger {
    At(Nanos),
    On {
        event: TriggerEvent,
        /// Counts only events at this instance (a name or a host).
        from: Option<String>,
        /// Counts only events whose peer is this instance.
        to: Option<String>,
        /// Counts only frames of this kind.
        message: Option<MessageName>,
        /// The how many-th; starts at 1.
        nth: u32,
    },
    /// At each opportunity, with this probability in a million.
    Chance(u32),
}

impl FaultTrigger {
    /// True if it waits for an input.
    pub fn is_input(&self) -> bool {
        matches!(self, FaultTrigger::On { event, .. } if event.is_input())
    }
}

/// Which directions a partition cuts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PartitionDirection {
    /// Both directions between `from` and `to`.
    Symmetric,
    /// Only what goes from `from` to `to`.
    OneWay,
    /// Everything from and to `target`.
    Node,
}

/// Which of two simultaneous things comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RaceOrder {
    /// The lease ends, or the frame comes, before the bytes; the registration in another role comes
    /// before the end of the process.
    Early,
    /// The bytes come first, and the end of the process.
    Late,
    /// Drawn each time.
    Either,
}

/// How an engine lays out its KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MemoryLayout {
    /// One tensor per layer, `[block, head, token, K and V]`.
    Block,
    /// All layers of a block together: `[block, layer, head, token, K and V]`.
    Layer,
    /// One tensor per layer, `[block, K or V, head, token, C]`.
    HeadSplit,
    /// One tensor per layer, `[block, token, head, K and V]`.
    Token,
}

/// An instance that faults can name.
pub trait FaultPlace: Clone {
    /// Unique name.
    fn name(&self) -> &str;

    /// The name that its DP ranks share.
    fn host(&self) -> &str;

    fn role(&self) -> Role;

    fn tp(&self) -> u16;

    /// What it is after a restart.
    fn restarted(&self, geometry: RestartGeometry) -> Self;
}

/// What changes when an instance restarts; `None` stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestartGeometry {
    pub tp: Option<u16>,
    pub blocks: Option<u32>,
    pub block_tokens: Option<u32>,
    pub layout: Option<MemoryLayout>,
}

/// A process without a topology has no instance that a fault could name.
impl FaultPlace for Infallible {
    fn name(&self) -> &str {
        match *self {}
    }

    fn host(&self) -> &str {
        match *self {}
    }

    fn role(&self) -> Role {
        match *self {}
    }

    fn tp(&self) -> u16 {
        match *self {}
    }

    fn restarted(&self, _: RestartGeometry) -> Infallible {
        *self
    }
}
