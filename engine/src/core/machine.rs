//! The shape that all state machines of the protocol share.
//!
//! ```
//! use kvferry_engine::core::{Gauges, Machine, Nanos, Outbox};
//!
//! /// Says each word again.
//! struct Echo;
//!
//! impl Machine for Echo {
//!     type Input = &'static str;
//!     type Effect = String;
//!
//!     fn handle(&mut self, now: Nanos, input: &'static str, out: &mut Outbox<String>) {
//!         out.push(format!("{input} at {now}"));
//!     }
//!
//!     fn deadline(&self) -> Option<Nanos> {
//!         None
//!     }
//!
//!     fn gauges(&self) -> Gauges {
//!         Gauges::default()
//!     }
//! }
//!
//! let mut out = Outbox::new();
//! Echo.handle(Nanos::from_ms(5), "hello", &mut out);
//! assert_eq!(out.take(), ["hello at 5000.000us"]);
//! assert!(out.is_empty());
//! ```

use super::time::Nanos;

/// A protocol state machine: told everything, asks nothing.
///
/// A shell calls [`handle`](Machine::handle), performs the effects in order, and calls it again
/// with the machine's `Tick` input at [`deadline`](Machine::deadline).
pub trait Machine {
    /// What can happen to the machine.
    type Input: Send + Unpin + 'static;
    /// What the machine wants done.
    type Effect: Send + Unpin + 'static;

    /// Takes one input at time `now` (never earlier than at the call before) and appends the
    /// effects to `out`.
    fn handle(&mut self, now: Nanos, input: Self::Input, out: &mut Outbox<Self::Effect>);

    /// When the machine wants its next `Tick`, if at all.
    fn deadline(&self) -> Option<Nanos>;

    /// Sizes of its tables, for bounds, leak checks and metrics.
    fn gauges(&self) -> Gauges;
}

/// Effects of one or more calls of [`Machine::handle`], in order. Reuse it: it keeps its memory.
#[derive(Debug)]
pub struct Outbox<E> {
    effects: Vec<E>,
}

impl<E> Default for Outbox<E> {
    fn default() -> Self {
        Outbox { effects: Vec::new() }
    }
}

impl<E> From<Vec<E>> for Outbox<E> {
    fn from(effects: Vec<E>) -> Self {
        Outbox { effects }
    }
}

impl<E> Outbox<E> {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn push(&mut self, effect: impl Into<E>) {
        self.effects.push(effect.into());
    }

    /// Takes all effects out, oldest first.
    pub fn drain(&mut self) -> impl Iterator<Item = E> + '_ {
        self.effects.drain(..)
    }

    /// Takes all effects out as a list, oldest first.
    pub fn take(&mut self) -> Vec<E> {
        std::mem::take(&mut self.effects)
    }

    /// Effects not yet taken.
    pub fn as_slice(&self) -> &[E] {
        &self.effects
    }

    /// True if there is no effect.
    pub fn is_empty(&self) -> bool {
        self.effects.is_empty()
    }
}

/// The turn of one input in a machine: when it is, and where its effects go.
#[derive(Debug)]
pub(super) struct Turn<'a, E> {
    pub(super) now: Nanos,
    out: &'a mut Outbox<E>,
}

impl<'a, E> Turn<'a, E> {
    pub(super) fn new(now: Nanos, out: &'a mut Outbox<E>) -> Turn<'a, E> {
        Turn { now, out }
    }

    pub(super) fn push(&mut self, effect: impl Into<E>) {
        self.out.push(effect);
    }
}

/// How much a machine holds. All are zero when nothing is going on, except tombstones, peers,
/// links, what is remembered, and what is counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Transfers, flows or requests that have not ended.
    pub transfers: u32,
    /// Operations accepted by the data plane and not completed.
    pub operations: u32,
    /// Blocks the machine keeps from being reused as a source.
    pub held: u32,
    /// Blocks kept because bytes may still land in them.
    pub quarantined: u32,
    /// Frames or jobs waiting to be sent.
    pub queued: u32,
    /// Remembered ids of ended transfers.
    pub tombstones: u32,
    /// Peers known, connected or not.
    pub peers: u32,
    /// Control links of any state.
    pub links: u32,
    /// Entries of all other tables about what is under way: names, claims, deadlines, receivers.
    pub entries: u32,
    /// Entries of all other tables about peers, links, sessions and instances, which outlast what
    /// is under way: messages that came before their turn too, which a peer that stands still never
    /// completes, and deadlines that a table shares with these.
    pub remembered: u32,
    /// Notes of failures that a success with the same peer, pair or instance ends: strikes, pauses,
    /// troubles, tries in a row, sessions that are not open.
    pub failures: u32,
    /// Messages of peers that were handed on, each once and in order, since the start; wraps.
    pub delivered: u32,
    /// Messages of peers that broke the protocol, since the start.
    pub violations: u32,
}
