//! The handshake: asked of a peer before its memory is used, and answered to whoever asks.

use super::prefill_proxy::PrefillProxy;
use super::{DialPurpose as PortOf, MoriioPeers, MoriioTimer, OPEN_FENCE_KEY, memory};
use crate::core::command::ControlCommand;
use crate::core::dialect::moriio::DecodeError;
use crate::core::dialect::moriio::handshake::{
    AgentMetadata, HandshakeRequest, LayerMemory, decode_call,
};
use crate::core::error::Failure;
use crate::core::ids::{ConnectionId, EngineId, Incarnation};
use crate::core::message::Message;
use crate::core::peers::{PeerEvent, PeerInfo, PeerTurn};
use crate::core::time::Nanos;
use crate::fabric::{Endpoint, LinkId, LinkKind};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Messages that wait for one handshake; more end it.
pub(in crate::core) const PENDING_MAX: usize = 65_536;

/// What a TP rank answers.
pub(super) type RankReplies = (AgentMetadata, LayerMemory);

/// The handshake with one TP rank of a peer.
#[derive(Debug)]
pub(super) struct RankHandshake {
    pub(super) endpoint: Endpoint,
    /// By which it is under way.
    pub(super) link: Option<LinkId>,
    metadata: Option<AgentMetadata>,
    replies: Option<RankReplies>,
}

/// A peer whose memory is or will be known.
#[derive(Debug)]
pub(super) struct MoriioConnection {
    /// All its TP ranks, at least one.
    pub(super) ranks: Vec<RankHandshake>,
    pub(super) info: Option<PeerInfo>,
    /// What the ranks answered when it was met.
    replies: Option<Vec<RankReplies>>,
    verified: Nanos,
    /// What the core is told when the handshake is done.
    pending: Vec<Message>,
}

impl MoriioConnection {
    pub(super) fn new(endpoints: Vec<Endpoint>) -> MoriioConnection {
        let rank = |endpoint| RankHandshake { endpoint, link: None, metadata: None, replies: None };
        MoriioConnection {
            ranks: endpoints.into_iter().map(rank).collect(),
            info: None,
            replies: None,
            verified: Nanos(0),
            pending: Vec::new(),
        }
    }

    /// By what the peer is known: where its first rank listens, and how many there are.
    pub(super) fn target(&self) -> (Endpoint, u16) {
        (self.ranks[0].endpoint.clone(), self.ranks.len() as u16)
    }

    /// Messages that wait for the handshake.
    pub(super) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// True if it is of vLLM 0.33.0 or later, as far as is known.
    pub(super) fn is_of_0_33(&self) -> bool {
        self.metadata().is_some_and(AgentMetadata::is_of_0_33)
    }

    /// True if it speaks the native dialect, too, as one core for all its ranks.
    pub(super) fn is_ours(&self) -> bool {
        self.metadata().is_some_and(|metadata| metadata.native)
    }

    /// What its first rank said, once all have.
    fn metadata(&self) -> Option<&AgentMetadata> {
        self.replies.as_deref()?.first().map(|(metadata, _)| metadata)
    }

    fn is_ready(&self) -> bool {
        self.info.is_some() && self.ranks.iter().all(|rank| rank.link.is_none())
    }
}

/// True for a frame with which a handshake begins.
pub(super) fn is_call(parts: &[Vec<u8>]) -> bool {
    decode_call(parts) == Ok(HandshakeRequest::Metadata)
}

impl MoriioPeers {
    /// Starts the handshakes with all ranks of a connection that has none under way.
    pub(super) fn dial(&mut self, id: ConnectionId, turn: &mut PeerTurn<'_>) {
        let count = self.connections.get(&id).map_or(0, |connection| connection.ranks.len());
        if self.ranks.is_none() || count == 0 {
            return;
        }
        for number in 0..count {
            let link = self.fresh_link();
            let Some(connection) = self.connections.get_mut(&id) else { return };
            let rank = &mut connection.ranks[number];
            (rank.link, rank.metadata, rank.replies) = (Some(link), None, None);
            self.handshakes.insert(link, (id, number));
            let to = rank.endpoint.clone();
            turn.commands.push(ControlCommand::Dial { link, to, channel: LinkKind::Handshake });
        }
        let until = turn.now + self.config.settings.handshake;
        self.timers.arm_if_idle(MoriioTimer::Handshake(id), until);
    }

    /// Repeats a handshake that is too old.
    pub(super) fn verify(&mut self, id: ConnectionId, turn: &mut PeerTurn<'_>) {
        let trust = self.config.settings.trust;
        let old = |connection: &&MoriioConnection| {
            connection.is_ready() && connection.verified + trust < turn.now
        };
        if self.connections.get(&id).filter(old).is_some() {
            self.dial(id, turn);
        }
    }

    /// A receiver of notices hung up, and what it was told may be lost: whoever waits for it finds
    /// out whether it is still there.
    pub(super) fn check_liveness(&mut self, to: &Endpoint, turn: &mut PeerTurn<'_>) {
        let told = |fetch: &PrefillProxy| {
            let peer = fetch.peer.peer.as_ref()?;
            let mut ranks = 0..self.tp_of(peer);
            let hears = |rank| self.endpoint(PortOf::RemoteBlocks, peer, rank).as_ref() == Ok(to);
            ranks.any(hears).then_some(fetch.connection)
        };
        let connections: BTreeSet<ConnectionId> = self.fetches.values().filter_map(told).collect();
        for connection in connections {
            if self.connections.get(&connection).is_some_and(MoriioConnection::is_ready) {
                self.dial(connection, turn);
            }
        }
    }

    /// Nobody listens there now. A peer that was known is gone; one that is starting is asked again
    /// by the next leg.
    pub(super) fn handshake_broke(
        &mut self,
        (id, rank): (ConnectionId, usize),
        turn: &mut PeerTurn<'_>,
    ) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.ranks[rank].link = None;
        }
        self.fail(id, Failure::Unreachable, turn);
    }

    pub(super) fn on_reply(&mut self, link: LinkId, parts: &[Vec<u8>], turn: &mut PeerTurn<'_>) {
        let Some((id, number)) = self.handshakes.get(&link).copied() else {
            let error = DecodeError { frame: "notify", rule: "answer to a notice".into() };
            return self.violation(link, &error, turn);
        };
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let rank = &mut connection.ranks[number];
        let broken = match rank.metadata.take() {
            None => match AgentMetadata::decode(parts) {
                Ok(metadata) => {
                    rank.metadata = Some(metadata);
                    return;
                }
                Err(error) => error,
            },
            Some(metadata) => match LayerMemory::decode(parts) {
                Ok(memory) => {
                    (rank.link, rank.replies) = (None, Some((metadata, memory)));
                    self.handshakes.remove(&link);
                    turn.commands.push(ControlCommand::HangUp { link });
                    return self.on_rank_known(id, turn);
                }
                Err(error) => error,
            },
        };
        let peer = rank.endpoint.to_string();
        self.violation(link, &broken, turn);
        self.fail(id, Failure::Violation(broken.violation(&peer)), turn);
    }

    /// Both replies of a rank are there; the handshake is done with those of the last one.
    fn on_rank_known(&mut self, id: ConnectionId, turn: &mut PeerTurn<'_>) {
        let (Some(connection), Some(ranks)) = (self.connections.get_mut(&id), &self.ranks) else {
            return;
        };
        if connection.ranks.iter().any(|rank| rank.replies.is_none()) {
            return;
        }
        let replies = connection.ranks.iter_mut().filter_map(|rank| rank.replies.take());
        let replies: Vec<RankReplies> = replies.collect();
        self.timers.cancel(&MoriioTimer::Handshake(id));
        connection.verified = turn.now;
        if let Some(before) = &connection.replies {
            if *before != replies {
                return self.fail(id, Failure::PeerRestarted, turn);
            }
        } else {
            let own = (&*self.geometry, &ranks[..]);
            match memory::peer(&self.config, (self.role, self.mode), own, &replies) {
                Ok((geometry, ranks)) => {
                    connection.info = Some(PeerInfo {
                        engine: EngineId(replies[0].0.engine_id.clone()),
                        incarnation: Incarnation(0),
                        geometry: Arc::new(geometry),
                        ranks: Arc::new(ranks),
                        capabilities: 0,
                        version: 0,
                        fence_key: OPEN_FENCE_KEY,
                    });
                    connection.replies = Some(replies);
                    turn.events.push(PeerEvent::Up { connection: id });
                }
                Err(mismatch) => return self.fail(id, Failure::Mismatch(mismatch), turn),
            }
        }
        let pending = connection.pending.drain(..);
        turn.events.extend(pending.map(|message| PeerEvent::Message { connection: id, message }));
    }

    /// Tells the core something in the name of a peer, once its memory is known.
    pub(super) fn tell(&mut self, id: ConnectionId, message: Message, turn: &mut PeerTurn<'_>) {
        match self.connections.get_mut(&id) {
            Some(connection) if !connection.is_ready() => {
                if connection.pending.len() >= PENDING_MAX {
                    return self.fail(id, Failure::Overload, turn);
                }
                connection.pending.push(message);
            }
            Some(_) => turn.events.push(PeerEvent::Message { connection: id, message }),
            // Its `Down` has dealt with what was under way.
            None => {}
        }
    }

    /// Answers whoever asks for the memory of a rank of this engine.
    pub(super) fn answer(&mut self, (link, rank): (LinkId, u16), turn: &mut PeerTurn<'_>) {
        if self.ranks.is_none() {
            if self.early_calls.len() < self.config.settings.links_max as usize {
                self.early_calls.insert(link, rank);
            } else {
                turn.commands.push(ControlCommand::HangUp { link });
            }
            return;
        }
        let replies = self.replies.as_ref().ok().and_then(|ranks| ranks.get(usize::from(rank)));
        let frames = match replies {
            Some((metadata, memory)) => [metadata.encode(), memory.encode()],
            None => {
                let (metadata, memory) = memory::native_only(&self.config);
                [metadata.encode(), memory.encode()]
            }
        };
        for [_, frame] in frames {
            turn.commands.push(ControlCommand::Reply { link, frame });
        }
    }
}
