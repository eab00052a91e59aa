//! Peers that speak MoRIIO, the wire of vLLM 0.32.0's own connector.
//!
//! [`MoriioPeers`] is to them what [`Peers`](super::peers::Peers) is to native peers: the cores
//! send it the same messages and get the same events, and do not know the difference. What the wire
//! does not say is made up here: `prefill_proxy` answers a decode on behalf of its prefill,
//! `decode_proxy` asks a prefill on behalf of its decode. `handshake` learns where a peer's KV
//! lies, `notice` sends and takes the one-way notices that all the rest consists of.
//!
//! The wire has no cancel, no failure notice, no lease and no incarnations. Hence a decode gets its
//! blocks back early only by keeping the prefill out for good, and a prefill frees what nobody
//! released after a fixed time; see `CONTRACT.md`.
//!
//! ```
//! use kvferry_engine::core::Nanos;
//! use kvferry_engine::core::moriio::MoriioSettings;
//!
//! // The times of 0.32.0: its prefills free what is read after 60 s, so nothing is kept longer.
//! let settings = MoriioSettings::default();
//! assert_eq!((settings.hold, settings.write), (Nanos::from_secs(60), Nanos::from_secs(120)));
//! ```

mod config;
mod decode_proxy;
mod handshake;
mod memory;
mod notice;
mod prefill_proxy;

pub use config::{MoriioConfig, MoriioSettings};
pub(super) use decode_proxy::EARLY_RELEASES_MAX;
pub(super) use handshake::PENDING_MAX;

use super::command::ControlCommand;
use super::dialect::moriio::DecodeError;
use super::dialect::moriio::handshake::{AgentMetadata, LayerMemory, REQUEST};
use super::dialect::moriio::params::MoriioRemote;
use super::dialect::moriio::ports::DialPurpose;
use super::error::{Failure, stranger};
use super::ids::{ConnectionId, TransferId};
use super::layout::check::refuse;
use super::layout::{Geometry, Mismatch, RankLayout};
use super::machine::Gauges;
use super::message::{Message, MoriioLeg, Role};
use super::peers::{PeerEvent, PeerInfo, PeerTurn, unused};
use super::time::Nanos;
use super::timers::Timers;
use crate::fabric::{ControlEvent, Endpoint, LinkId, LinkKind};
use decode_proxy::{DecodeProxy, EarlyNotices};
use handshake::MoriioConnection;
use notice::NoticeSender;
use prefill_proxy::PrefillProxy;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The fence key of everyone who speaks MoRIIO: it has no hello on which one could be agreed.
pub const OPEN_FENCE_KEY: u64 = 0;

/// Stands for the decodes that read from a prefill, which it need not know.
const READERS: ConnectionId = ConnectionId(ConnectionId::MORIIO);

/// The last number of a connection.
const CONNECTION_MAX: u32 = ConnectionId::MORIIO - 1;

/// Stands for all peers of whom nothing comes.
const NOBODY: ConnectionId = ConnectionId(ConnectionId::MORIIO | CONNECTION_MAX);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum MoriioTimer {
    /// The handshake of a peer takes too long.
    Handshake(ConnectionId),
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
    last_id: u32,
    next_link: u32,
    connections: BTreeMap<ConnectionId, MoriioConnection>,
    targets: BTreeMap<Endpoint, ConnectionId>,
    /// Handshakes that are under way.
    handshakes: BTreeMap<LinkId, ConnectionId>,
    /// Links of diallers that asked for memory before it was registered.
    early_calls: BTreeSet<LinkId>,
    /// Links by which notices come.
    notify_links: BTreeMap<LinkId, Option<Endpoint>>,
    notices: NoticeSender,
    feeds: BTreeMap<TransferId, DecodeProxy>,
    early: BTreeMap<TransferId, EarlyNotices>,
    fetches: BTreeMap<TransferId, PrefillProxy>,
    timers: Timers<MoriioTimer>,
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
            last_id: 0,
            next_link: 0,
            connections: BTreeMap::new(),
            targets: BTreeMap::new(),
            handshakes: BTreeMap::new(),
            early_calls: BTreeSet::new(),
            notify_links: BTreeMap::new(),
            notices: NoticeSender::default(),
            feeds: BTreeMap::new(),
            early: BTreeMap::new(),
            fetches: BTreeMap::new(),
            timers: Timers::default(),
            counters: MoriioCounters::default(),
        }
    }

    /// Says where the KV of the own ranks lies. Other ranks than before end all connections.
    pub fn set_ranks(&mut self, ranks: Vec<RankLayout>, turn: &mut PeerTurn<'_>) {
        if self.ranks.as_ref() == Some(&ranks) {
            return;
        }
        self.replies = match &ranks[..] {
            _ if self.config.closed.is_some() => {
                refuse(format_args!("{}", self.config.closed.as_deref().unwrap_or_default()))
            }
            [rank] => memory::replies(&self.config, rank),
            ranks => {
                let tp = ranks.len();
                refuse(format_args!("peers that speak MoRIIO need TP 1, this engine has {tp}"))
            }
        };
        let rebuilt = self.ranks.replace(ranks).is_some();
        let connections: Vec<ConnectionId> = self.connections.keys().copied().collect();
        for connection in connections {
            if rebuilt {
                self.fail(connection, Failure::EngineGone, turn);
            } else {
                self.dial(connection, turn);
            }
        }
        for link in std::mem::take(&mut self.early_calls) {
            self.answer(link, turn);
        }
    }

    /// Whether a leg with a peer that speaks MoRIIO can be taken.
    ///
    /// # Errors
    /// Why such peers are not dealt with, or why this engine's memory is of no use to them.
    pub fn admits(&self, leg: &MoriioLeg) -> Result<(), Failure> {
        match (&self.ranks, &self.replies) {
            // It names nobody, and will be told so.
            _ if self.role == Role::Decode && leg.peer.is_none() => Ok(()),
            (Some(_), Err(mismatch)) => Err(Failure::Mismatch(mismatch.clone())),
            _ => Ok(()),
        }
    }

    /// Queues a message on the way to a peer, as far as the wire knows it.
    pub fn send(&mut self, connection: ConnectionId, message: Message, turn: &mut PeerTurn<'_>) {
        match self.role {
            Role::Prefill => self.on_prefill_message(message, turn),
            Role::Decode => self.on_decode_message(connection, message, turn),
        }
    }

    /// Takes an event of the control plane that is about MoRIIO; gives back any other.
    pub fn control(
        &mut self,
        event: ControlEvent,
        turn: &mut PeerTurn<'_>,
    ) -> Option<ControlEvent> {
        match event {
            ControlEvent::LinkUp { link, channel: LinkKind::Notify, from } if link.is_inbound() => {
                self.hear_link(link, from, turn);
            }
            ControlEvent::LinkUp { link, .. } if self.is_own(link) => self.link_up(link, turn),
            ControlEvent::Frame { link, parts } if self.notify_links.contains_key(&link) => {
                self.on_notice(link, &parts, turn);
            }
            ControlEvent::Frame { link, parts } if self.is_own(link) => {
                self.on_reply(link, &parts, turn);
            }
            ControlEvent::Frame { link, parts } if handshake::is_call(&parts) => {
                self.answer(link, turn);
            }
            ControlEvent::LinkDown { link } if self.notify_links.remove(&link).is_some() => {}
            ControlEvent::LinkDown { link } if self.is_own(link) => self.link_down(link, turn),
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
    fn hear_link(&mut self, link: LinkId, from: Option<Endpoint>, turn: &mut PeerTurn<'_>) {
        let is_full = self.notify_links.len() >= self.config.settings.links_max as usize;
        if !is_full && self.config.closed.is_none() {
            self.notify_links.insert(link, from);
        } else {
            turn.commands.push(ControlCommand::HangUp { link });
        }
    }

    fn link_up(&mut self, link: LinkId, turn: &mut PeerTurn<'_>) {
        if self.handshakes.contains_key(&link) {
            turn.commands.push(ControlCommand::Send { link, frame: REQUEST.to_vec() });
        } else {
            self.notices.up(link, turn);
        }
    }

    fn link_down(&mut self, link: LinkId, turn: &mut PeerTurn<'_>) {
        match self.handshakes.remove(&link) {
            Some(connection) => self.handshake_broke(connection, turn),
            None => {
                let Some((to, waiting)) = self.notices.down(link) else { return };
                match waiting {
                    true => {
                        self.timers.arm(MoriioTimer::Notice(to.clone()), turn.now + notice::REDIAL)
                    }
                    false => _ = self.timers.cancel(&MoriioTimer::Notice(to.clone())),
                }
                self.check_liveness(&to, turn);
            }
        }
    }

    /// Does what is due.
    pub fn tick(&mut self, turn: &mut PeerTurn<'_>) {
        while let Some(timer) = self.timers.pop_due(turn.now) {
            match timer {
                MoriioTimer::Handshake(connection) => {
                    self.fail(connection, Failure::Unreachable, turn)
                }
                MoriioTimer::Notice(to) => self.renotify(&to, turn),
                MoriioTimer::Early(transfer) => {
                    self.early.remove(&transfer);
                }
                MoriioTimer::Renew(transfer) => self.renew(&transfer, turn),
                MoriioTimer::Written(transfer) => self.overdue(&transfer, turn),
            }
        }
    }

    /// When [`MoriioPeers::tick`] is wanted, if at all.
    pub fn deadline(&self) -> Option<Nanos> {
        self.timers.next()
    }

    /// The peer, once its handshake is done.
    pub fn info(&self, connection: ConnectionId) -> Option<&PeerInfo> {
        self.connections.get(&connection)?.info.as_ref()
    }

    /// Ends all that is under way with a peer, with `Down`. Unknown connections are ignored.
    pub fn fail(&mut self, connection: ConnectionId, failure: Failure, turn: &mut PeerTurn<'_>) {
        let Some(state) = self.connections.remove(&connection) else { return };
        self.targets.remove(&state.endpoint);
        self.timers.cancel(&MoriioTimer::Handshake(connection));
        if let Some(link) = state.link {
            self.handshakes.remove(&link);
            turn.commands.push(ControlCommand::HangUp { link });
        }
        turn.events.push(PeerEvent::Down { connection, failure, unacked_releases: None });
    }

    /// The engine is done with a transfer.
    pub fn forget(&mut self, transfer: &TransferId) {
        if self.feeds.remove(transfer).is_some() {
            self.timers.cancel(&MoriioTimer::Renew(transfer.clone()));
        }
        if self.fetches.remove(transfer).is_some() {
            self.timers.cancel(&MoriioTimer::Written(transfer.clone()));
        }
    }

    /// What was counted since the start.
    pub fn counters(&self) -> MoriioCounters {
        let dropped = self.notices.dropped;
        MoriioCounters { dropped, ..self.counters }
    }

    /// Sizes and counts; takes time in proportion to the number of peers.
    pub(super) fn gauges(&self) -> Gauges {
        let links = self.handshakes.len() + self.notify_links.len() + self.notices.links();
        let pending: usize = self.connections.values().map(MoriioConnection::pending).sum();
        let early: usize = self.early.values().map(EarlyNotices::entries).sum();
        let entries = self.feeds.len() + self.fetches.len() + early;
        let known = self.targets.len() + self.early_calls.len() + self.notices.lines();
        Gauges {
            queued: self.notices.queued() + pending as u32,
            peers: self.connections.len() as u32,
            links: links as u32,
            entries: entries as u32,
            remembered: (known + self.timers.len()) as u32,
            violations: self.counters.violations,
            ..Gauges::default()
        }
    }

    /// The connection of a peer; starts a handshake if there is none, or none that can be trusted.
    fn connection_of(&mut self, peer: &MoriioLeg, turn: &mut PeerTurn<'_>) -> ConnectionId {
        let endpoint =
            peer.peer.as_ref().map(|peer| self.endpoint(DialPurpose::Handshake, peer, 0));
        if let Some(Ok(endpoint)) = &endpoint
            && let Some(connection) = self.targets.get(endpoint).copied()
        {
            self.verify(connection, turn);
            return connection;
        }
        let full = self.connections.len() >= self.config.settings.peers_max as usize
            || self.last_id >= CONNECTION_MAX - 1;
        let endpoint = match endpoint {
            Some(Ok(_)) if full => Err(Failure::Overload),
            Some(endpoint) => endpoint,
            None => Err(Failure::Unreachable),
        };
        match endpoint {
            Ok(endpoint) => {
                self.last_id += 1;
                let connection = ConnectionId(ConnectionId::MORIIO | self.last_id);
                self.targets.insert(endpoint.clone(), connection);
                self.connections.insert(connection, MoriioConnection::new(endpoint));
                self.dial(connection, turn);
                connection
            }
            Err(failure) => {
                turn.events.push(PeerEvent::Down {
                    connection: NOBODY,
                    failure,
                    unacked_releases: None,
                });
                NOBODY
            }
        }
    }

    /// Where a TP rank of a peer listens.
    fn endpoint(
        &self,
        what: DialPurpose,
        peer: &MoriioRemote,
        tp: u16,
    ) -> Result<Endpoint, Failure> {
        peer.endpoint(self.config.settings.ports, what, tp).map_err(Failure::Mismatch)
    }

    /// Links of this side are numbered apart from those of native peers.
    fn fresh_link(&mut self) -> LinkId {
        let is_used = |link| self.handshakes.contains_key(&link) || self.notices.has(link);
        unused(LinkId::MORIIO, &mut self.next_link, is_used)
    }

    fn is_own(&self, link: LinkId) -> bool {
        !link.is_inbound() && link.0 & LinkId::MORIIO != 0
    }

    fn violation(&mut self, link: LinkId, error: &DecodeError, turn: &mut PeerTurn<'_>) {
        self.counters.violations = self.counters.violations.saturating_add(1);
        let peer = match self
            .handshakes
            .get(&link)
            .and_then(|connection| self.connections.get(connection))
        {
            Some(connection) => connection.endpoint.to_string(),
            None => stranger(link, self.notify_links.get(&link).and_then(Option::as_ref)),
        };
        turn.events.push(PeerEvent::Violation(error.violation(&peer)));
    }
}

#[cfg(test)]
mod tests;
