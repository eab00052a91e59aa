//! The peers of one engine core: links, hellos and channels.
//!
//! Decode dials with [`Peers::reach`], prefill answers; from then on both have a [`ConnectionId`]
//! for one connection between two incarnations. A connection survives its link and ends for good
//! with [`PeerEvent::Down`]; whatever follows has another connection.
//!
//! ```
//! use kvferry_engine::core::Nanos;
//! use kvferry_engine::core::channel::{ChannelConfig, capability};
//! use kvferry_engine::core::command::ControlCommand;
//! use kvferry_engine::core::ids::{Incarnation, Role};
//! use kvferry_engine::core::layout::{Geometry, KvGroup};
//! use kvferry_engine::core::peers::{LocalEngine, PeerTurn, Peers};
//!
//! let me = LocalEngine {
//!     engine: "decode-0".into(),
//!     incarnation: Incarnation(1),
//!     role: Role::Decode,
//!     geometry: Geometry::new("llama", 8, vec![KvGroup::full(16, 0..32)]).into(),
//!     capabilities: capability::PUSH,
//! };
//! let mut peers = Peers::new(ChannelConfig::default(), me, false);
//! let (mut commands, mut events) = (Vec::new(), Vec::new());
//! let mut turn = PeerTurn { now: Nanos::ZERO, commands: &mut commands, events: &mut events };
//! let prefill = "tcp://10.0.0.1:6301".into();
//! let connection = peers.reach(&"prefill-0".into(), &prefill, None, &mut turn);
//! // Nobody is dialled before it is known where the own KV lies.
//! assert!(peers.info(connection).is_none());
//! peers.set_ranks(Vec::new(), &mut turn);
//! assert!(matches!(&commands[..], [ControlCommand::Dial { to, .. }] if *to == prefill));
//! ```

mod connection;
mod hello;
#[cfg(test)]
mod tests;
mod transports;

use super::channel::{Channel, ChannelConfig};
use super::command::Commands;
use super::dialect::native::{MessageKind, VERSION, VERSION_MIN};
use super::error::{Failure, PeerViolation};
use super::ids::{ConnectionId, EngineId, Incarnation};
use super::layout::{Geometry, RankLayout};
use super::machine::Gauges;
use super::message::{AttemptTag, Message, Role};
use super::recent_set::RecentSet;
use super::time::Nanos;
use super::timers::Timers;
use crate::fabric::{Endpoint, FabricError, LinkId};
pub use connection::UnackedReleases;
use connection::{Connection, ConnectionAction};
use std::collections::BTreeMap;
use std::sync::Arc;
pub(super) use transports::unused;

/// Who an engine core is.
#[derive(Clone, Debug)]
pub struct LocalEngine {
    pub engine: EngineId,
    pub incarnation: Incarnation,
    /// What it does. Decode dials, prefill answers.
    pub role: Role,
    pub geometry: Arc<Geometry>,
    /// What it can do, at least one mode of [`super::channel::capability`].
    pub capabilities: u32,
}

/// What is known of a peer once it is up.
#[derive(Clone, Debug)]
pub struct PeerInfo {
    pub engine: EngineId,
    pub incarnation: Incarnation,
    pub geometry: Arc<Geometry>,
    pub ranks: Arc<Vec<RankLayout>>,
    /// What both sides can do, see [`super::channel::capability`].
    pub capabilities: u32,
    /// Version of the native dialect that the connection is held in; 0 for another dialect.
    pub version: u16,
    /// The same on both sides and in no other connection; see
    /// [`crate::fabric::DataPlane::connect`].
    pub fence_key: u64,
}

/// What happened to the peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerEvent {
    /// The hello is done; [`Peers::info`] is there.
    Up { connection: ConnectionId },
    /// A message, in order and exactly once.
    Message { connection: ConnectionId, message: Message },
    /// A message that could not be read, in its place; `violation` was told as well.
    Lost {
        connection: ConnectionId,
        /// What it was about.
        tag: AttemptTag,
        /// Which message it was.
        kind: MessageKind,
        /// Why it could not be read.
        violation: PeerViolation,
    },
    /// The connection is over; last event of the connection. May come without `Up`.
    Down {
        connection: ConnectionId,
        failure: Failure,
        /// What is still to be said, if this side dialled and the peer was up.
        unacked_releases: Option<Box<UnackedReleases>>,
    },
    /// A hello was refused by this side; the peer was told the reason.
    Refused {
        engine: EngineId,
        /// Why it does not fit.
        failure: Failure,
    },
    /// A frame broke the protocol and was dropped.
    Violation(PeerViolation),
}

/// The turn of one call of [`Peers`]: when it is, and where it puts what it produces, in order.
pub struct PeerTurn<'a> {
    pub now: Nanos,
    /// For the control plane.
    pub commands: &'a mut dyn Commands,
    pub events: &'a mut Vec<PeerEvent>,
}

/// The last number of a connection of native peers.
const CONNECTION_MAX: u32 = ConnectionId::MORIIO - 1;

/// Whose a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LinkOwner {
    /// Opened by the other side, which did not get through with a hello.
    Unidentified,
    /// Of a connection, whichever side opened it.
    Connection(ConnectionId),
    /// Of a connection that is down; stands for a while so that the last frame gets through.
    Closing,
}

/// What a deadline is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ConnectionTimer {
    Connection(ConnectionId),
    Link(LinkId),
}

/// A target that is left alone after a failure.
#[derive(Clone, Debug)]
struct Backoff {
    until: Nanos,
    wait: Nanos,
    failure: Failure,
    /// The incarnation that this is about, if it said so.
    incarnation: Option<Incarnation>,
}

/// What was last seen of a peer.
#[derive(Clone, Copy, Debug)]
struct PeerRecord {
    incarnation: Incarnation,
    /// The highest incarnation that is over, if that is higher: its clock went back.
    past: Option<Incarnation>,
    session: u64,
}

/// All peers of one engine core.
#[derive(Debug)]
pub struct Peers {
    config: ChannelConfig,
    local: LocalEngine,
    cautious: bool,
    ranks: Option<Vec<RankLayout>>,
    fingerprint: u64,
    next_link: u32,
    /// The link of the owner.
    owner_link: Option<LinkId>,
    last_id: u32,
    next_session: u64,
    /// Places that connections which are over still take.
    reserved: usize,
    connections: BTreeMap<ConnectionId, Connection>,
    /// Connections that this side dials.
    targets: BTreeMap<(EngineId, Endpoint), ConnectionId>,
    /// Connections of peers that dialled.
    callers: BTreeMap<EngineId, ConnectionId>,
    /// The latest incarnation and session seen of each peer.
    known: BTreeMap<EngineId, PeerRecord>,
    /// Peers whose connections are over, in the order of their ends.
    gone: RecentSet<EngineId>,
    backoffs: BTreeMap<(EngineId, Endpoint), Backoff>,
    links: BTreeMap<LinkId, LinkOwner>,
    /// Whence the links of others came, as far as known.
    from: BTreeMap<LinkId, Endpoint>,
    timers: Timers<ConnectionTimer>,
    delivered: u32,
    violations: u32,
    stale: u32,
}

impl Peers {
    /// No peers yet. Nothing is said before [`Peers::set_ranks`]. With `cautious`, whoever is
    /// dialled is asked first, in MoRIIO's words, whether it speaks the native dialect: a hello
    /// ends the listener of vLLM 0.32.0, which may be what listens there today.
    ///
    /// # Panics
    /// If `me` has no transfer mode.
    pub fn new(mut config: ChannelConfig, me: LocalEngine, cautious: bool) -> Peers {
        (config.retransmit, config.retransmit_max) = config.waits();
        config.version = config.version.clamp(VERSION_MIN, VERSION);
        assert!(me.capabilities & hello::MODES != 0, "{} has no transfer mode", me.engine);
        let fingerprint = me.geometry.fingerprint();
        let gone = RecentSet::new(config.peers_max);
        Peers {
            config,
            local: me,
            cautious,
            ranks: None,
            fingerprint,
            next_link: 0,
            owner_link: None,
            last_id: 0,
            next_session: 0,
            reserved: 0,
            connections: BTreeMap::new(),
            targets: BTreeMap::new(),
            callers: BTreeMap::new(),
            known: BTreeMap::new(),
            gone,
            backoffs: BTreeMap::new(),
            links: BTreeMap::new(),
            from: BTreeMap::new(),
            timers: Timers::default(),
            delivered: 0,
            violations: 0,
            stale: 0,
        }
    }

    /// Says where the KV of the own ranks lies, one entry per rank. The first call starts the
    /// hellos; a call with other ranks (a rebuilt backend) ends all connections.
    pub fn set_ranks(&mut self, ranks: Vec<RankLayout>, turn: &mut PeerTurn<'_>) {
        let first = match &self.ranks {
            Some(old) if *old == ranks => return,
            old => old.is_none(),
        };
        self.ranks = Some(ranks);
        let connections: Vec<ConnectionId> = self.connections.keys().copied().collect();
        for id in connections {
            if first {
                self.connections.get_mut(&id).expect("listed above").start(turn.now);
                self.service(id, turn);
            } else {
                self.end(id, Failure::Fabric(FabricError::Closed), turn);
            }
        }
    }

    /// The connection of a prefill at an endpoint; starts a connection if there is none. While a
    /// peer that just failed is being left alone, the new connection goes down at once, for the
    /// same reason, unless it is another `incarnation` that is wanted.
    pub fn reach(
        &mut self,
        engine: &EngineId,
        endpoint: &Endpoint,
        incarnation: Option<Incarnation>,
        turn: &mut PeerTurn<'_>,
    ) -> ConnectionId {
        let target = (engine.clone(), endpoint.clone());
        if let Some(connection) = self.targets.get(&target) {
            return *connection;
        }
        let id = self.next_connection_id();
        let other = |backoff: &Backoff| {
            incarnation
                .zip(backoff.incarnation)
                .is_some_and(|(incarnation, backoff)| incarnation != backoff)
        };
        let backoff = self
            .backoffs
            .get(&target)
            .filter(|backoff| turn.now < backoff.until && !other(backoff));
        let failure = match backoff {
            Some(backoff) => Some(backoff.failure.clone()),
            None if !self.has_room() || !self.has_link() => Some(Failure::Overload),
            None => None,
        };
        if let Some(failure) = failure {
            turn.events.push(PeerEvent::Down { connection: id, failure, unacked_releases: None });
            return id;
        }
        self.next_session += 1;
        let session = self.next_session;
        let channel = Channel::new(&self.config, self.local.incarnation, session);
        let connection = Connection::new(engine.clone(), Some(endpoint.clone()), session, channel);
        self.targets.insert(target, id);
        let connection = self.connections.entry(id).or_insert(connection);
        if self.ranks.is_some() {
            connection.start(turn.now);
            self.service(id, turn);
        }
        id
    }

    /// The connection of a peer that is spoken to there, or tried.
    pub fn connection_of(&self, engine: &EngineId, endpoint: &Endpoint) -> Option<ConnectionId> {
        self.targets.get(&(engine.clone(), endpoint.clone())).copied()
    }

    /// Queues a message; before `Up` it waits for it.
    ///
    /// # Errors
    /// `Overload` when the queue is full or the message is longer than a frame may be,
    /// `PeerSilent` when the connection is down.
    pub fn send(
        &mut self,
        connection: ConnectionId,
        message: Message,
        turn: &mut PeerTurn<'_>,
    ) -> Result<(), Failure> {
        let Some(state) = self.connections.get_mut(&connection) else {
            return Err(Failure::PeerSilent);
        };
        state.channel.send(turn.now, message, turn.commands)?;
        self.rearm(connection);
        Ok(())
    }

    /// True if one more message finds room in the queue of a connection.
    pub(super) fn has_room_for_more(&self, connection: ConnectionId) -> bool {
        let state = self.connections.get(&connection);
        state.is_some_and(|state| state.channel.queued() < self.config.queue_max as usize)
    }

    /// Says whether the owner waits for the peer, e.g. because transfers with it are under way.
    /// Only while it does, or while messages are unacknowledged, the peer is probed and its
    /// silence noticed. Unknown connections are ignored.
    pub fn watch(&mut self, connection: ConnectionId, waiting: bool, turn: &mut PeerTurn<'_>) {
        if let Some(state) = self.connections.get_mut(&connection) {
            state.channel.watch(turn.now, waiting);
            self.service(connection, turn);
        }
    }

    /// Does what is due.
    pub fn tick(&mut self, turn: &mut PeerTurn<'_>) {
        // Before the timer that tells it is gone.
        if self.process_stalled(turn.now) {
            for connection in self.connections.values_mut() {
                connection.compensate_stall(turn.now, &self.config);
            }
        }
        while let Some(timer) = self.timers.pop_due(turn.now) {
            match timer {
                ConnectionTimer::Link(link) => {
                    if self.links.contains_key(&link) {
                        self.hang_up(link, turn);
                    }
                }
                ConnectionTimer::Connection(id) => {
                    if let Some(connection) = self.connections.get_mut(&id) {
                        connection.armed = None;
                        self.service(id, turn);
                    }
                }
            }
        }
    }

    /// When [`Peers::tick`] is wanted, if at all.
    pub fn deadline(&self) -> Option<Nanos> {
        self.timers.next()
    }

    /// Says how many peers that are down are not done with yet; they count against `peers_max`.
    pub fn reserve(&mut self, places: usize) {
        self.reserved = places;
    }

    /// Ends a connection; no event follows. Unknown connections are ignored. Returns what is still
    /// to be said.
    pub fn close(
        &mut self,
        connection: ConnectionId,
        turn: &mut PeerTurn<'_>,
    ) -> Option<Box<UnackedReleases>> {
        self.retire(connection, turn).and_then(|connection| UnackedReleases::of(&connection))
    }

    /// The peer, once it is up and until it is down.
    pub fn info(&self, connection: ConnectionId) -> Option<&PeerInfo> {
        self.connections.get(&connection)?.info.as_ref()
    }

    /// Frames of another incarnation or session, since the start.
    pub fn stale(&self) -> u32 {
        self.stale
    }

    /// Sizes and counts; takes time in proportion to the number of peers.
    pub fn gauges(&self) -> Gauges {
        let remembered = [
            self.targets.len(),
            self.callers.len(),
            self.known.len(),
            self.backoffs.len(),
            self.from.len(),
            self.timers.len(),
            self.gone.len(),
        ];
        let connections = || self.connections.values();
        let early: usize = connections().map(|connection| connection.channel.early()).sum();
        let queued: usize = connections().map(|connection| connection.channel.queued()).sum();
        let without_link = connections().filter(|connection| connection.is_unlinked()).count();
        Gauges {
            peers: self.connections.len() as u32,
            links: self.links.len() as u32,
            queued: queued as u32,
            violations: self.violations,
            delivered: self.delivered,
            remembered: (early + remembered.iter().sum::<usize>()) as u32,
            failures: (self.backoffs.len() + without_link) as u32,
            ..Gauges::default()
        }
    }

    /// A connection that no connection had. The last one is for those that do not come about.
    fn next_connection_id(&mut self) -> ConnectionId {
        self.last_id = (self.last_id + 1).min(CONNECTION_MAX);
        ConnectionId(self.last_id)
    }

    fn has_room(&self) -> bool {
        self.has_room_beside(0)
    }

    /// True if there is room for one more connection after `ending` existing ones have ended.
    fn has_room_beside(&self, ending: usize) -> bool {
        let places = self.connections.len() - ending + self.reserved;
        let room = places < self.config.peers_max as usize;
        room && self.last_id < CONNECTION_MAX - 1
    }

    fn has_link(&self) -> bool {
        self.links.len() < self.config.links_max as usize
    }

    /// True if a peer that is up is known to have begun a new incarnation after this one.
    pub fn is_past(&self, connection: ConnectionId, incarnation: Incarnation) -> bool {
        let Some(info) = self.info(connection) else { return false };
        let past = self.known.get(&info.engine).and_then(|known| known.past);
        incarnation < info.incarnation
            || incarnation != info.incarnation && past.is_some_and(|past| incarnation <= past)
    }

    /// This incarnation of a peer that is up is over, though it may be higher than the one it is
    /// in.
    pub fn is_over(&mut self, connection: ConnectionId, incarnation: Incarnation) {
        let Some(info) =
            self.connections.get(&connection).and_then(|connection| connection.info.as_ref())
        else {
            return;
        };
        if let Some(known) =
            self.known.get_mut(&info.engine).filter(|known| incarnation > known.incarnation)
        {
            known.past = known.past.max(Some(incarnation));
        }
    }

    /// Keeps the latest incarnation and session of a peer. If need be, the one whose connections
    /// have been over for longest is forgotten: those that go on are no more than there may be
    /// peers.
    fn remember(&mut self, engine: &EngineId, incarnation: Incarnation, session: u64) {
        let before = self.known.get(engine).copied();
        self.gone.remove(engine);
        if before.is_none()
            && self.known.len() >= self.config.peers_max as usize
            && let Some(oldest) = self.gone.pop_oldest()
        {
            self.known.remove(&oldest);
        }
        let past = before.and_then(|known| known.past.max(Some(known.incarnation)));
        let past = past.filter(|past| *past > incarnation);
        self.known.insert(engine.clone(), PeerRecord { incarnation, past, session });
    }

    /// A connection with the peer is over; there may be another one.
    fn leave_known(&mut self, engine: &EngineId) {
        let goes_on =
            |connection: &Connection| connection.engine == *engine && connection.info.is_some();
        if self.connections.values().any(goes_on) {
            return;
        }
        if self.known.contains_key(engine)
            && let Some(oldest) = self.gone.insert(engine.clone())
        {
            self.known.remove(&oldest);
        }
    }

    /// True if this process stood still and may not have read what peers sent meanwhile.
    fn process_stalled(&self, now: Nanos) -> bool {
        self.timers.next().is_some_and(|due| due + self.config.retransmit_max < now)
    }

    /// Does everything that is due in a connection.
    fn service(&mut self, id: ConnectionId, turn: &mut PeerTurn<'_>) {
        if self.process_stalled(turn.now)
            && let Some(connection) = self.connections.get_mut(&id)
        {
            connection.compensate_stall(turn.now, &self.config);
        }
        while let Some(connection) = self.connections.get_mut(&id) {
            let Some((_, due)) = connection.next(&self.config).filter(|(at, _)| *at <= turn.now)
            else {
                break;
            };
            match due {
                ConnectionAction::Unreachable => self.end(id, Failure::Unreachable, turn),
                ConnectionAction::Silent => self.end(id, Failure::PeerSilent, turn),
                ConnectionAction::Channel => connection.channel.tick(turn.now, turn.commands),
                ConnectionAction::Hello(link) => self.try_hello(id, link, turn),
                ConnectionAction::Abandon(link) => {
                    connection.dial_again(turn.now, &self.config);
                    self.hang_up(link, turn);
                }
                ConnectionAction::ProbePath => {
                    connection.count_path_probe();
                    self.dial(id, turn);
                }
                ConnectionAction::Dial => self.dial(id, turn),
            }
        }
        self.rearm(id);
    }

    fn rearm(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let at = connection.next(&self.config).map(|(at, _)| at);
        if at != connection.armed {
            connection.armed = at;
            match at {
                Some(at) => self.timers.arm(ConnectionTimer::Connection(id), at),
                None => {
                    self.timers.cancel(&ConnectionTimer::Connection(id));
                }
            }
        }
    }

    /// Ends a connection with `Down`, and tells the peer if a link is left. Unknown connections are
    /// ignored.
    pub fn end(&mut self, id: ConnectionId, failure: Failure, turn: &mut PeerTurn<'_>) {
        let Some(connection) = self.retire(id, turn) else { return };
        let unacked_releases = UnackedReleases::of(&connection);
        if let (None, Some(endpoint)) = (&connection.info, connection.endpoint) {
            self.back_off(
                turn.now,
                (connection.engine, endpoint),
                failure.clone(),
                connection.refused,
            );
        }
        turn.events.push(PeerEvent::Down { connection: id, failure, unacked_releases });
    }

    /// After repeated failures a target is left alone for longer and longer.
    fn back_off(
        &mut self,
        now: Nanos,
        target: (EngineId, Endpoint),
        failure: Failure,
        incarnation: Option<Incarnation>,
    ) {
        let known = self.backoffs.contains_key(&target);
        if !known && self.backoffs.len() >= self.config.peers_max as usize {
            let over = self.backoffs.iter().find(|(_, backoff)| backoff.until <= now);
            let victim = over.or(self.backoffs.first_key_value()).map(|(target, _)| target.clone());
            if let Some(victim) = victim {
                self.backoffs.remove(&victim);
            }
        }
        let (first, most) = (self.config.retransmit, self.config.retransmit_max);
        let wait = self
            .backoffs
            .get(&target)
            .map_or(first, |backoff| (backoff.wait + backoff.wait).min(most));
        self.backoffs.insert(target, Backoff { until: now + wait, wait, failure, incarnation });
    }
}
