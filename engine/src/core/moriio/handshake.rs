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

/// A peer whose memory is or will be known.
#[derive(Debug)]
pub(super) struct MoriioConnection {
    pub(super) endpoint: Endpoint,
    /// The handshake that is under way.
    pub(super) link: Option<LinkId>,
    pub(super) info: Option<PeerInfo>,
    metadata: Option<AgentMetadata>,
    replies: Option<(AgentMetadata, LayerMemory)>,
    verified: Nanos,
    /// What the core is told when the handshake is done.
    pending: Vec<Message>,
}

impl MoriioConnection {
    pub(super) fn new(endpoint: Endpoint) -> MoriioConnection {
        MoriioConnection {
            endpoint,
            link: None,
            info: None,
            metadata: None,
            replies: None,
            verified: Nanos(0),
            pending: Vec::new(),
        }
    }

    /// Messages that wait for the handshake.
    pub(super) fn pending(&self) -> usize {
        self.pending.len()
    }

    fn is_ready(&self) -> bool {
        self.info.is_some() && self.link.is_none()
    }
}

/// True for a frame with which a handshake begins.
pub(super) fn is_call(parts: &[Vec<u8>]) -> bool {
    decode_call(parts) == Ok(HandshakeRequest::Metadata)
}

impl MoriioPeers {
    /// Starts the handshake of a connection that has none under way.
    pub(super) fn dial(&mut self, id: ConnectionId, turn: &mut PeerTurn<'_>) {
        if self.ranks.is_none() {
            return;
        }
        let link = self.fresh_link();
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.link = Some(link);
        connection.metadata = None;
        self.handshakes.insert(link, id);
        let to = connection.endpoint.clone();
        self.timers
            .arm_if_idle(MoriioTimer::Handshake(id), turn.now + self.config.settings.handshake);
        turn.commands.push(ControlCommand::Dial { link, to, channel: LinkKind::Handshake });
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
            let endpoint = self.endpoint(PortOf::RemoteBlocks, peer, 0).ok()?;
            (endpoint == *to).then_some(fetch.connection)
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
    pub(super) fn handshake_broke(&mut self, id: ConnectionId, turn: &mut PeerTurn<'_>) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.link = None;
        }
        self.fail(id, Failure::Unreachable, turn);
    }

    pub(super) fn on_reply(&mut self, link: LinkId, parts: &[Vec<u8>], turn: &mut PeerTurn<'_>) {
        let Some(id) = self.handshakes.get(&link).copied() else {
            let error = DecodeError { frame: "notify", rule: "answer to a notice".into() };
            return self.violation(link, &error, turn);
        };
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let broken = match connection.metadata.take() {
            None => match AgentMetadata::decode(parts) {
                Ok(metadata) => {
                    connection.metadata = Some(metadata);
                    return;
                }
                Err(error) => error,
            },
            Some(metadata) => match LayerMemory::decode(parts) {
                Ok(memory) => return self.on_handshake_done(id, (metadata, memory), turn),
                Err(error) => error,
            },
        };
        let peer = connection.endpoint.to_string();
        self.violation(link, &broken, turn);
        self.fail(id, Failure::Violation(broken.violation(&peer)), turn);
    }

    /// Both replies are there.
    fn on_handshake_done(
        &mut self,
        id: ConnectionId,
        replies: (AgentMetadata, LayerMemory),
        turn: &mut PeerTurn<'_>,
    ) {
        let (Some(connection), Some(ranks)) = (self.connections.get_mut(&id), &self.ranks) else {
            return;
        };
        if let Some(link) = connection.link.take() {
            self.handshakes.remove(&link);
            turn.commands.push(ControlCommand::HangUp { link });
        }
        self.timers.cancel(&MoriioTimer::Handshake(id));
        connection.verified = turn.now;
        if let Some(before) = &connection.replies {
            if *before != replies {
                return self.fail(id, Failure::PeerRestarted, turn);
            }
        } else {
            let own = (&*self.geometry, &ranks[..]);
            match memory::peer(&self.config, self.role, own, &replies) {
                Ok((geometry, ranks)) => {
                    connection.info = Some(PeerInfo {
                        engine: EngineId(replies.0.engine_id.clone()),
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

    /// Answers whoever asks for this engine's memory.
    pub(super) fn answer(&mut self, link: LinkId, turn: &mut PeerTurn<'_>) {
        if self.ranks.is_none() {
            if self.early_calls.len() < self.config.settings.links_max as usize {
                self.early_calls.insert(link);
            } else {
                turn.commands.push(ControlCommand::HangUp { link });
            }
            return;
        }
        let frames = match &self.replies {
            Ok((metadata, memory)) => [metadata.encode(), memory.encode()],
            Err(_) => {
                let (metadata, memory) = memory::native_only(&self.config);
                [metadata.encode(), memory.encode()]
            }
        };
        for [_, frame] in frames {
            turn.commands.push(ControlCommand::Reply { link, frame });
        }
    }
}
