//! The peers of one engine core: links, hellos and channels.
//!
//! Decode dials with [`Peers::reach`], prefill answers; from then on both have a [`PeerSlot`] for
//! one conversation between two incarnations. A slot survives its link and ends for good with
//! [`PeerEvent::Down`]; whatever follows has another slot.

use super::channel::ChannelConfig;
use super::command::ControlCommand;
use super::error::{Failure, PeerViolation};
use super::ids::{EngineId, Incarnation, PeerSlot};
use super::layout::{Geometry, RankLayout};
use super::message::{Message, Role};
use super::time::Nanos;
use crate::fabric::{ControlEvent, Endpoint, LinkId};
use std::sync::Arc;

/// Who an engine core is.
#[derive(Clone, Debug)]
pub struct Me {
    /// Its configured name.
    pub engine: EngineId,
    /// Its life.
    pub incarnation: Incarnation,
    /// What it does. Decode dials, prefill answers.
    pub role: Role,
    /// Its KV cache.
    pub geometry: Arc<Geometry>,
    /// What it can do, at least one mode of [`super::channel::capability`].
    pub capabilities: u32,
}

/// What is known of a peer once it is up.
#[derive(Clone, Debug)]
pub struct PeerInfo {
    /// Its name.
    pub engine: EngineId,
    /// Its life.
    pub incarnation: Incarnation,
    /// Its KV cache.
    pub geometry: Arc<Geometry>,
    /// Its ranks.
    pub ranks: Arc<Vec<RankLayout>>,
    /// What both sides can do, see [`super::channel::capability`].
    pub capabilities: u32,
    /// The same on both sides and in no other conversation; see
    /// [`crate::fabric::DataPlane::connect`].
    pub pass: u64,
}

/// What happened to the peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerEvent {
    /// The hello is done; [`Peers::info`] is there.
    Up {
        /// The peer.
        slot: PeerSlot,
    },
    /// A message, in order and exactly once.
    Message {
        /// Who sent it.
        slot: PeerSlot,
        /// The message.
        message: Message,
    },
    /// The conversation is over; last event of the slot. May come without `Up`.
    Down {
        /// The peer.
        slot: PeerSlot,
        /// Why.
        failure: Failure,
    },
    /// A hello was refused by this side; the peer was told the reason.
    Refused {
        /// Who said hello.
        engine: EngineId,
        /// Why it does not fit.
        failure: Failure,
    },
    /// A frame broke the protocol and was dropped.
    Violation(PeerViolation),
}

/// What the calls of [`Peers`] produce; the owner drains both, commands in order.
#[derive(Debug, Default)]
pub struct PeerOut {
    /// For the control plane.
    pub commands: Vec<ControlCommand>,
    /// For the owner.
    pub events: Vec<PeerEvent>,
}

/// Sizes and counts of [`Peers`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerGauges {
    /// Slots that are not down.
    pub peers: u32,
    /// Of these, those whose hello is done.
    pub up: u32,
    /// Links of any state.
    pub links: u32,
    /// Messages sent and not acknowledged, or waiting to be sent.
    pub queued: u32,
    /// Frames that broke the protocol, since the start.
    pub violations: u32,
    /// Frames of another incarnation or session, since the start.
    pub stale: u32,
}

/// All peers of one engine core.
#[derive(Debug)]
pub struct Peers {
    links: u32,
    slots: u32,
}

impl Peers {
    /// No peers yet. Nothing is said before [`Peers::set_ranks`].
    ///
    /// # Panics
    /// If `me` has no transfer mode.
    pub fn new(_config: ChannelConfig, _me: Me) -> Peers {
        Peers { links: 0, slots: 0 }
    }

    /// Says where the KV of the own ranks lies, one entry per rank. The first call starts the
    /// hellos; a call with other ranks (a rebuilt backend) ends all conversations.
    pub fn set_ranks(&mut self, _now: Nanos, _ranks: Vec<RankLayout>, _out: &mut PeerOut) {}

    /// The slot of a prefill at an endpoint; starts a conversation if there is none. While a peer
    /// that just failed is being left alone, the new slot goes down at once, for the same reason.
    pub fn reach(
        &mut self,
        _now: Nanos,
        _engine: &EngineId,
        _endpoint: &Endpoint,
        _out: &mut PeerOut,
    ) -> PeerSlot {
        self.slots += 1;
        PeerSlot(self.slots)
    }

    /// Queues a message; before `Up` it waits for it.
    ///
    /// # Errors
    /// `Overload` when the queue is full or the message is longer than a frame may be,
    /// `PeerSilent` when the slot is down.
    pub fn send(
        &mut self,
        _now: Nanos,
        _slot: PeerSlot,
        _message: Message,
        _out: &mut PeerOut,
    ) -> Result<(), Failure> {
        Ok(())
    }

    /// Says whether the owner waits for the peer, e.g. because transfers with it are under way.
    /// Only while it does, or while messages are unacknowledged, the peer is probed and its
    /// silence noticed. Unknown slots are ignored.
    pub fn watch(&mut self, _now: Nanos, _slot: PeerSlot, _waiting: bool, _out: &mut PeerOut) {}

    /// Takes an event of the control plane; false if the link is none of these peers' (and the
    /// event was not used).
    pub fn control(&mut self, _now: Nanos, _event: ControlEvent, _out: &mut PeerOut) -> bool {
        true
    }

    /// Does what is due.
    pub fn tick(&mut self, _now: Nanos, _out: &mut PeerOut) {}

    /// When [`Peers::tick`] is wanted, if at all.
    pub fn deadline(&self) -> Option<Nanos> {
        None
    }

    /// Ends a conversation; no event follows. Unknown slots are ignored.
    pub fn close(&mut self, _now: Nanos, _slot: PeerSlot, _out: &mut PeerOut) {}

    /// The peer, once it is up and until it is down.
    pub fn info(&self, _slot: PeerSlot) -> Option<&PeerInfo> {
        None
    }

    /// An id for a link that the owner dials itself on the same control plane.
    pub fn fresh_link(&mut self) -> LinkId {
        self.links += 1;
        LinkId(self.links)
    }

    /// Sizes and counts.
    pub fn gauges(&self) -> PeerGauges {
        PeerGauges::default()
    }
}
