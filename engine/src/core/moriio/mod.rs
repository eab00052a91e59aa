//! Peers that speak MoRIIO, the wire of vLLM 0.32.0's own connector.
//!
//! [`MoriioPeers`] is to them what [`Peers`](super::peers::Peers) is to native peers: the cores
//! send it the same messages and get the same events, and do not know the difference. What the wire
//! does not say is made up here: `fetch` answers a decode on behalf of its prefill, `feed` asks a
//! prefill on behalf of its decode. `shake` learns where a peer's KV lies, `notice` sends and takes
//! the one-way notices that all the rest consists of.
//!
//! The wire has no cancel, no failure notice, no lease and no lives. Hence a decode gets its blocks
//! back early only by keeping the prefill out for good, and a prefill frees what nobody released
//! after a fixed time; see `CONTRACT.md`.

mod config;
mod feed;
mod fetch;
mod memory;
mod notice;
mod shake;

pub use config::{MoriioConfig, MoriioSettings};
pub(super) use feed::EARLY_RELEASES_MAX;
pub(super) use shake::PENDING_MAX;

use super::command::ControlCommand;
use super::dialect::moriio::DecodeError;
use super::dialect::moriio::handshake::{AgentMetadata, LayerMemory};
use super::dialect::moriio::params::Peer;
use super::dialect::moriio::ports::Dial;
use super::error::{Failure, stranger};
use super::ids::{PeerSlot, TransferId};
use super::layout::check::refuse;
use super::layout::{Geometry, Mismatch, RankLayout};
use super::machine::Gauges;
use super::message::{Message, MoriioPeer, Role};
use super::peers::{Out, PeerEvent, PeerInfo, unused};
use super::time::Nanos;
use super::timers::Timers;
use crate::fabric::{Channel, ControlEvent, Endpoint, LinkId};
use feed::{Early, Feed};
use fetch::Fetch;
use notice::Notices;
use shake::Slot;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The pass of everyone who speaks MoRIIO: it has no hello on which one could be agreed.
pub const OPEN_PASS: u64 = 0;

/// Stands for the decodes that read from a prefill, which it need not know.
const READERS: PeerSlot = PeerSlot(PeerSlot::MORIIO);

/// The last number of a slot.
const SLOT_MAX: u32 = PeerSlot::MORIIO - 1;

/// Stands for all peers of whom nothing comes.
const NOBODY: PeerSlot = PeerSlot(PeerSlot::MORIIO | SLOT_MAX);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// The handshake of a peer takes too long.
    Shake(PeerSlot),
    /// Notices to an endpoint wait for a link.
    Notice(Endpoint),
    /// Prefill: a notice came for a transfer without a leg.
    Early(TransferId),
    /// Prefill: a source that is being read has to be kept.
    Renew(TransferId),
    /// Decode: the word that everything is written is overdue.
    Written(TransferId),
}

/// What was counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoriioCounters {
    /// Frames that broke the protocol and were dropped.
    pub violations: u32,
    /// Transfers that failed at a prefill, of which the wire cannot tell the decode.
    pub untold: u32,
    /// Notices that were dropped because their receiver was out of reach.
    pub dropped: u32,
}

/// All peers of one engine core that speak MoRIIO.
#[derive(Debug)]
pub struct MoriioPeers {
    config: MoriioConfig,
    role: Role,
    geometry: Arc<Geometry>,
    ranks: Option<Vec<RankLayout>>,
    /// What a handshake is answered, or why the own memory is of no use to the peers.
    replies: Result<(AgentMetadata, LayerMemory), Mismatch>,
    next_slot: u32,
    next_link: u32,
    slots: BTreeMap<PeerSlot, Slot>,
    targets: BTreeMap<Endpoint, PeerSlot>,
    /// Handshakes that are under way.
    shaking: BTreeMap<LinkId, PeerSlot>,
    /// Links of diallers that asked for memory before it was registered.
    early_calls: BTreeSet<LinkId>,
    /// Links by which notices come.
    heard: BTreeMap<LinkId, Option<Endpoint>>,
    notices: Notices,
    feeds: BTreeMap<TransferId, Feed>,
    early: BTreeMap<TransferId, Early>,
    fetches: BTreeMap<TransferId, Fetch>,
    timers: Timers<Timer>,
    counters: MoriioCounters,
}

impl MoriioPeers {
    /// No peers yet. Nothing is said before [`MoriioPeers::set_ranks`].
    pub fn new(config: MoriioConfig, role: Role, geometry: Arc<Geometry>) -> MoriioPeers {
        MoriioPeers {
            config,
            role,
            geometry,
            ranks: None,
            replies: Err(Mismatch("the memory is not registered".into())),
            next_slot: 0,
            next_link: 0,
            slots: BTreeMap::new(),
            targets: BTreeMap::new(),
            shaking: BTreeMap::new(),
            early_calls: BTreeSet::new(),
            heard: BTreeMap::new(),
            notices: Notices::default(),
            feeds: BTreeMap::new(),
            early: BTreeMap::new(),
            fetches: BTreeMap::new(),
            timers: Timers::default(),
            counters: MoriioCounters::default(),
        }
    }

    /// Says where the KV of the own ranks lies. Other ranks than before end all conversations.
    pub fn set_ranks(&mut self, now: Nanos, ranks: Vec<RankLayout>, out: &mut Out<'_>) {
        if self.ranks.as_ref() == Some(&ranks) {
            return;
        }
        self.replies = match &ranks[..] {
            [rank] => memory::replies(&self.config, rank),
            ranks => {
                let tp = ranks.len();
                refuse(format_args!("peers that speak MoRIIO need TP 1, this engine has {tp}"))
            }
        };
        let rebuilt = self.ranks.replace(ranks).is_some();
        let slots: Vec<PeerSlot> = self.slots.keys().copied().collect();
        for slot in slots {
            if rebuilt {
                self.fail(slot, Failure::EngineGone, out);
            } else {
                self.dial(now, slot, out);
            }
        }
        for link in std::mem::take(&mut self.early_calls) {
            self.answer(link, out);
        }
    }

    /// Whether legs with peers that speak MoRIIO can be taken.
    ///
    /// # Errors
    /// Why this engine's memory is of no use to them.
    pub fn admits(&self) -> Result<(), Failure> {
        match (&self.ranks, &self.replies) {
            (Some(_), Err(mismatch)) => Err(Failure::Mismatch(mismatch.clone())),
            _ => Ok(()),
        }
    }

    /// Queues a message on the way to a peer, as far as the wire knows it.
    pub fn send(&mut self, now: Nanos, slot: PeerSlot, message: Message, out: &mut Out<'_>) {
        match self.role {
            Role::Prefill => self.feed(now, message, out),
            Role::Decode => self.fetch(now, slot, message, out),
        }
    }

    /// Takes an event of the control plane that is about MoRIIO; gives back any other.
    pub fn control(
        &mut self,
        now: Nanos,
        event: ControlEvent,
        out: &mut Out<'_>,
    ) -> Option<ControlEvent> {
        match event {
            ControlEvent::LinkUp { link, channel: Channel::Notify, from } if link.is_inbound() => {
                self.hear_link(link, from, out);
            }
            ControlEvent::LinkUp { link, .. } if self.is_own(link) => self.link_up(link, out),
            ControlEvent::Frame { link, parts } if self.heard.contains_key(&link) => {
                self.on_notice(now, link, &parts, out);
            }
            ControlEvent::Frame { link, parts } if self.is_own(link) => {
                self.on_reply(now, link, &parts, out);
            }
            ControlEvent::Frame { link, parts } if shake::is_call(&parts) => {
                self.answer(link, out);
            }
            ControlEvent::LinkDown { link } if self.heard.remove(&link).is_some() => {}
            ControlEvent::LinkDown { link } if self.is_own(link) => self.link_down(now, link, out),
            other => {
                if let ControlEvent::LinkDown { link } = &other {
                    self.early_calls.remove(link);
                }
                return Some(other);
            }
        }
        None
    }

    /// Somebody will send notices by this link, unless too many do.
    fn hear_link(&mut self, link: LinkId, from: Option<Endpoint>, out: &mut Out<'_>) {
        if self.heard.len() < self.config.settings.links_max as usize {
            self.heard.insert(link, from);
        } else {
            out.commands.push(ControlCommand::HangUp { link });
        }
    }

    fn link_up(&mut self, link: LinkId, out: &mut Out<'_>) {
        if self.shaking.contains_key(&link) {
            self.ask(link, out);
        } else {
            self.notices.up(link, out);
        }
    }

    fn link_down(&mut self, now: Nanos, link: LinkId, out: &mut Out<'_>) {
        match self.shaking.remove(&link) {
            Some(slot) => self.handshake_broke(slot, out),
            None => {
                let Some((to, waiting)) = self.notices.down(link) else { return };
                match waiting {
                    true => self.timers.arm(Timer::Notice(to.clone()), now + notice::REDIAL),
                    false => _ = self.timers.cancel(&Timer::Notice(to.clone())),
                }
                self.doubt(now, &to, out);
            }
        }
    }

    /// Does what is due.
    pub fn tick(&mut self, now: Nanos, out: &mut Out<'_>) {
        while let Some(timer) = self.timers.pop_due(now) {
            match timer {
                Timer::Shake(slot) => self.fail(slot, Failure::Unreachable, out),
                Timer::Notice(to) => self.renotify(now, &to, out),
                Timer::Early(transfer) => {
                    self.early.remove(&transfer);
                }
                Timer::Renew(transfer) => self.renew(now, &transfer, out),
                Timer::Written(transfer) => self.overdue(&transfer, out),
            }
        }
    }

    /// When [`MoriioPeers::tick`] is wanted, if at all.
    pub fn deadline(&self) -> Option<Nanos> {
        self.timers.next()
    }

    /// The peer, once its handshake is done.
    pub fn info(&self, slot: PeerSlot) -> Option<&PeerInfo> {
        self.slots.get(&slot)?.info.as_ref()
    }

    /// Ends all that is under way with a peer, with `Down`. Unknown slots are ignored.
    pub fn fail(&mut self, slot: PeerSlot, failure: Failure, out: &mut Out<'_>) {
        let Some(state) = self.slots.remove(&slot) else { return };
        self.targets.remove(&state.endpoint);
        self.timers.cancel(&Timer::Shake(slot));
        if let Some(link) = state.link {
            self.shaking.remove(&link);
            out.commands.push(ControlCommand::HangUp { link });
        }
        out.events.push(PeerEvent::Down { slot, failure, unsaid: None });
    }

    /// The engine is done with a transfer.
    pub fn forget(&mut self, transfer: &TransferId) {
        if self.feeds.remove(transfer).is_some() {
            self.timers.cancel(&Timer::Renew(transfer.clone()));
        }
        if self.fetches.remove(transfer).is_some() {
            self.timers.cancel(&Timer::Written(transfer.clone()));
        }
    }

    /// What was counted since the start.
    pub fn counters(&self) -> MoriioCounters {
        let dropped = self.notices.dropped;
        MoriioCounters { dropped, ..self.counters }
    }

    /// Sizes and counts; takes time in proportion to the number of peers.
    pub(super) fn gauges(&self) -> Gauges {
        let links = self.shaking.len() + self.heard.len() + self.notices.links();
        let pending: usize = self.slots.values().map(Slot::pending).sum();
        let early: usize = self.early.values().map(Early::entries).sum();
        let entries = self.feeds.len() + self.fetches.len() + early;
        let known = self.targets.len() + self.early_calls.len() + self.notices.lines();
        Gauges {
            queued: self.notices.queued() + pending as u32,
            peers: self.slots.len() as u32,
            links: links as u32,
            entries: entries as u32,
            remembered: (known + self.timers.len()) as u32,
            violations: self.counters.violations,
            ..Gauges::default()
        }
    }

    /// The slot of a peer; starts a handshake if there is none, or none that can be trusted.
    fn slot_of(&mut self, now: Nanos, peer: &MoriioPeer, out: &mut Out<'_>) -> PeerSlot {
        let endpoint = peer.peer.as_ref().map(|peer| self.endpoint(Dial::Handshake, peer, 0));
        if let Some(Ok(endpoint)) = &endpoint
            && let Some(slot) = self.targets.get(endpoint).copied()
        {
            self.verify(now, slot, out);
            return slot;
        }
        let full = self.slots.len() >= self.config.settings.peers_max as usize
            || self.next_slot >= SLOT_MAX - 1;
        let endpoint = match endpoint {
            Some(Ok(_)) if full => Err(Failure::Overload),
            Some(endpoint) => endpoint,
            None => Err(Failure::Unreachable),
        };
        match endpoint {
            Ok(endpoint) => {
                self.next_slot += 1;
                let slot = PeerSlot(PeerSlot::MORIIO | self.next_slot);
                self.targets.insert(endpoint.clone(), slot);
                self.slots.insert(slot, Slot::new(endpoint));
                self.dial(now, slot, out);
                slot
            }
            Err(failure) => {
                out.events.push(PeerEvent::Down { slot: NOBODY, failure, unsaid: None });
                NOBODY
            }
        }
    }

    /// Where a TP rank of a peer listens.
    fn endpoint(&self, what: Dial, peer: &Peer, tp: u16) -> Result<Endpoint, Failure> {
        peer.endpoint(self.config.settings.ports, what, tp).map_err(Failure::Mismatch)
    }

    /// Links of this side are numbered apart from those of native peers.
    fn fresh_link(&mut self) -> LinkId {
        let is_used = |link| self.shaking.contains_key(&link) || self.notices.has(link);
        unused(LinkId::MORIIO, &mut self.next_link, is_used)
    }

    fn is_own(&self, link: LinkId) -> bool {
        !link.is_inbound() && link.0 & LinkId::MORIIO != 0
    }

    fn violation(&mut self, link: LinkId, error: &DecodeError, out: &mut Out<'_>) {
        self.counters.violations = self.counters.violations.saturating_add(1);
        let peer = match self.shaking.get(&link).and_then(|slot| self.slots.get(slot)) {
            Some(slot) => slot.endpoint.to_string(),
            None => stranger(link, self.heard.get(&link).and_then(Option::as_ref)),
        };
        out.events.push(PeerEvent::Violation(error.violation(&peer)));
    }
}

#[cfg(test)]
mod tests;
