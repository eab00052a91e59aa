//! Peers that speak MoRIIO, the wire of the connector of that name in vLLM 0.32.0 and 0.33.0.
//!
//! [`MoriioPeers`] is to them what [`Peers`](super::peers::Peers) is to native peers: the cores
//! send it the same messages and get the same events, and do not know the difference. What the wire
//! does not say is made up here: `prefill_proxy` answers a decode on behalf of its prefill,
//! `decode_proxy` asks a prefill on behalf of its decode. `handshake` learns where a peer's KV
//! lies, `notice` sends and takes the one-way notices that all the rest consists of.
//!
//! On this wire each TP rank listens for itself and tells its own memory, so one core here answers
//! at the ports of all its ranks and asks all ranks of a peer. What the ranks of a peer say one by
//! one the core is told as one.
//!
//! The wire has no cancel, no lease, no incarnations, and a failure notice only from 0.33.0 on.
//! Hence a decode gets its
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
use super::dialect::moriio::handshake::REQUEST;
use super::dialect::moriio::params::MoriioRemote;
use super::dialect::moriio::ports::DialPurpose;
use super::error::{Failure, stranger};
use super::ids::{ConnectionId, TP_MAX, TransferId};
use super::layout::check::refuse;
use super::layout::{Geometry, Mismatch, RankLayout};
use super::machine::Gauges;
use super::message::{Message, Mode, MoriioLeg, Role};
use super::peers::{PeerEvent, PeerInfo, PeerTurn, unused};
use super::time::Nanos;
use super::timers::Timers;
use crate::fabric::{ControlEvent, Endpoint, LinkId, LinkKind};
use decode_proxy::{DecodeProxy, EarlyNotices};
use handshake::{MoriioConnection, RankReplies};
use notice::NoticeSender;
use prefill_proxy::PrefillProxy;
use std::collections::BTreeMap;
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
    mode: Mode,
    geometry: Arc<Geometry>,
    ranks: Option<Vec<RankLayout>>,
    /// What a handshake with each rank is answered, or why the own memory is of no use to the peers.
    replies: Result<Vec<RankReplies>, Mismatch>,
    last_id: u32,
    next_link: u32,
    connections: BTreeMap<ConnectionId, MoriioConnection>,
    /// By where their first rank listens, and the number of ranks.
    targets: BTreeMap<(Endpoint, u16), ConnectionId>,
    /// Handshakes that are under way, each with the peer and its rank.
    handshakes: BTreeMap<LinkId, (ConnectionId, usize)>,
    /// Links of diallers that asked for the memory of a rank before it was registered.
    early_calls: BTreeMap<LinkId, u16>,
    /// Links by which ranks above 0 are asked for their memory.
    rank_links: BTreeMap<LinkId, (u16, Option<Endpoint>)>,
    /// Links by which notices come, with the rank that they are for.
    notify_links: BTreeMap<LinkId, (u16, Option<Endpoint>)>,
    notices: NoticeSender,
    feeds: BTreeMap<TransferId, DecodeProxy>,
    early: BTreeMap<TransferId, EarlyNotices>,
    fetches: BTreeMap<TransferId, PrefillProxy>,
    timers: Timers<MoriioTimer>,
    counters: MoriioCounters,
}

impl MoriioPeers {
    /// No peers yet. Nothing is said before [`MoriioPeers::set_ranks`].
    pub fn new(
        config: MoriioConfig,
        (role, mode): (Role, Mode),
        geometry: Arc<Geometry>,
    ) -> MoriioPeers {
        MoriioPeers {
            config,
            role,
            mode,
            geometry,
            ranks: None,
            replies: Err(Mismatch("the memory is not registered".into())),
            last_id: 0,
            next_link: 0,
            connections: BTreeMap::new(),
            targets: BTreeMap::new(),
            handshakes: BTreeMap::new(),
            early_calls: BTreeMap::new(),
            rank_links: BTreeMap::new(),
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
        self.replies = match self.config.closed.as_deref() {
            Some(closed) => refuse(format_args!("{closed}")),
            None => {
                let own = |rank| memory::replies(&self.config, &self.geometry, rank);
                ranks.iter().map(own).collect()
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
        for call in std::mem::take(&mut self.early_calls) {
            self.answer(call, turn);
        }
    }

    /// Whether a leg in MoRIIO's form can be taken. A prefill takes any: who comes for it may be
    /// native. A decode goes to no peer that such a leg names where they are not dealt with.
    ///
    /// # Errors
    /// That it is so.
    pub fn admits(&self, leg: &MoriioLeg) -> Result<(), Failure> {
        match &self.config.closed {
            Some(why) if self.role == Role::Decode && leg.peer.is_some() => {
                Err(Failure::mismatch(&**why))
            }
            _ => Ok(()),
        }
    }

    /// Whether peers that speak MoRIIO can use this engine's memory, as far as it is known.
    ///
    /// # Errors
    /// Why not.
    pub fn fits(&self) -> Result<(), Failure> {
        match (&self.ranks, &self.replies) {
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
            ControlEvent::LinkUp { link, channel, from } if link.is_inbound() => match channel {
                LinkKind::Notify => self.hear_link(link, (0, from), turn),
                LinkKind::RankNotify(rank) => self.hear_link(link, (rank, from), turn),
                LinkKind::RankHandshake(rank) => self.ask_link(link, (rank, from), turn),
                _ => return Some(ControlEvent::LinkUp { link, channel, from }),
            },
            ControlEvent::LinkUp { link, .. } if self.is_own(link) => self.link_up(link, turn),
            ControlEvent::Frame { link, parts } if self.notify_links.contains_key(&link) => {
                self.on_notice(link, &parts, turn);
            }
            ControlEvent::Frame { link, parts } if self.is_own(link) => {
                self.on_reply(link, &parts, turn);
            }
            ControlEvent::Frame { link, parts } if handshake::is_call(&parts) => {
                let rank = self.rank_links.get(&link).map_or(0, |(rank, _)| *rank);
                self.answer((link, rank), turn);
            }
            // Who speaks the native dialect says hello to rank 0.
            ControlEvent::Frame { link, .. } if self.rank_links.contains_key(&link) => {
                let error = DecodeError { frame: "handshake", rule: "unknown call".into() };
                self.violation(link, &error, turn);
            }
            ControlEvent::LinkDown { link } if self.notify_links.remove(&link).is_some() => {}
            ControlEvent::LinkDown { link } if self.is_own(link) => self.link_down(link, turn),
            other => {
                if let ControlEvent::LinkDown { link } = &other {
                    self.early_calls.remove(link);
                    if self.rank_links.remove(link).is_some() {
                        return None;
                    }
                }
                return Some(other);
            }
        }
        None
    }

    /// Somebody will send notices for a rank by this link, unless too many do.
    fn hear_link(
        &mut self,
        link: LinkId,
        (rank, from): (u16, Option<Endpoint>),
        turn: &mut PeerTurn<'_>,
    ) {
        if self.takes_link(self.notify_links.len(), rank) {
            self.notify_links.insert(link, (rank, from));
        } else {
            turn.commands.push(ControlCommand::HangUp { link });
        }
    }

    /// Somebody will ask for the memory of a rank by this link, unless too many do.
    fn ask_link(
        &mut self,
        link: LinkId,
        (rank, from): (u16, Option<Endpoint>),
        turn: &mut PeerTurn<'_>,
    ) {
        if self.takes_link(self.rank_links.len(), rank) {
            self.rank_links.insert(link, (rank, from));
        } else {
            turn.commands.push(ControlCommand::HangUp { link });
        }
    }

    /// Whether a link for a rank is kept beside others.
    fn takes_link(&self, others: usize, rank: u16) -> bool {
        let is_full = others >= self.config.settings.links_max as usize;
        !is_full && self.config.closed.is_none() && rank < self.geometry.tp
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
        self.targets.remove(&state.target());
        self.timers.cancel(&MoriioTimer::Handshake(connection));
        for link in state.ranks.iter().filter_map(|rank| rank.link) {
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
        let inbound = self.notify_links.len() + self.rank_links.len();
        let links = self.handshakes.len() + inbound + self.notices.links();
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
        let endpoints = match &peer.peer {
            Some(peer) => self.endpoints(peer),
            None => Err(Failure::Unreachable),
        };
        let target = endpoints.as_ref().ok().map(|ranks| (ranks[0].clone(), ranks.len() as u16));
        if let Some(connection) = target.as_ref().and_then(|target| self.targets.get(target)) {
            let connection = *connection;
            self.verify(connection, turn);
            return connection;
        }
        let ranks = endpoints.as_ref().map_or(0, Vec::len);
        let full = self.connections.len() >= self.config.settings.peers_max as usize
            || self.handshakes.len() + ranks > self.config.settings.links_max as usize
            || self.last_id >= CONNECTION_MAX - 1;
        let endpoints = match endpoints {
            Ok(_) if full => Err(Failure::Overload),
            endpoints => endpoints,
        };
        match endpoints {
            Ok(endpoints) => {
                self.last_id += 1;
                let connection = ConnectionId(ConnectionId::MORIIO | self.last_id);
                let state = MoriioConnection::new(endpoints);
                self.targets.insert(state.target(), connection);
                self.connections.insert(connection, state);
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

    /// TP ranks of a peer.
    fn tp_of(&self, peer: &MoriioRemote) -> u16 {
        peer.shape.tp_size_or(self.geometry.tp)
    }

    /// Where the TP ranks of a peer are asked for their memory; at least one.
    fn endpoints(&self, peer: &MoriioRemote) -> Result<Vec<Endpoint>, Failure> {
        let tp = self.tp_of(peer);
        if !(1..=TP_MAX).contains(&tp) {
            return Err(Failure::mismatch(format!("a peer of {tp} TP ranks, not 1..={TP_MAX}")));
        }
        (0..tp).map(|rank| self.endpoint(DialPurpose::Handshake, peer, rank)).collect()
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
        let asked = self.handshakes.get(&link).and_then(|(connection, rank)| {
            Some(&self.connections.get(connection)?.ranks[*rank].endpoint)
        });
        let peer = match asked {
            Some(endpoint) => endpoint.to_string(),
            None => {
                let known = self.notify_links.get(&link).or_else(|| self.rank_links.get(&link));
                stranger(link, known.and_then(|(_, from)| from.as_ref()))
            }
        };
        turn.events.push(PeerEvent::Violation(error.violation(&peer)));
    }
}

#[cfg(test)]
mod places;
#[cfg(test)]
mod tests;
