//! The peers that the payload core behind a prefill or decode core has to do with, and the notes
//! between both.

use super::{CoreTurn, PeerManager, PeerManagerEvent, peer_turn};
use crate::core::channel::capability;
use crate::core::engine_core::CoreEffect;
use crate::core::error::Failure;
use crate::core::ids::{ConnectionId, EngineId, Incarnation};
use crate::core::message::{Message, Role};
use crate::core::payload::{DirectoryCall, DirectoryNews, PayloadNote};
use crate::core::peers::PeerEvent;
use std::collections::BTreeMap;

/// A peer that something is expected of, or may be.
#[derive(Debug)]
struct PayloadPeer {
    engine: EngineId,
    /// Once it was met.
    incarnation: Option<Incarnation>,
}

#[derive(Debug)]
pub(super) struct PayloadPeers {
    /// There is a payload core.
    is_there: bool,
    role: Role,
    peers: BTreeMap<ConnectionId, PayloadPeer>,
}

impl PayloadPeers {
    pub(super) fn new(is_there: bool, role: Role) -> PayloadPeers {
        PayloadPeers { is_there, role, peers: BTreeMap::new() }
    }

    /// True if the silence of the peer is to be noticed.
    pub(super) fn watches(&self, connection: ConnectionId) -> bool {
        self.peers.contains_key(&connection) && !planted!("payload-peers-fall-silent")
    }

    pub(super) fn len(&self) -> usize {
        self.peers.len()
    }
}

impl PeerManager {
    /// The payload core wants something of the peers.
    pub(super) fn directory<A>(&mut self, call: DirectoryCall, turn: &mut CoreTurn<'_, A>) {
        match call {
            DirectoryCall::Meet { peer, control } => {
                let connection = self.reach(&peer, &control, None, turn);
                let met = PayloadPeer { engine: peer, incarnation: None };
                self.payload_peers.peers.insert(connection, met);
                self.watch(connection, turn);
                self.meet(connection, turn);
            }
            DirectoryCall::Leave { peer } => {
                let peers = self.payload_peers.peers.iter();
                let its = peers.filter(|(_, of)| of.engine == peer).map(|(id, _)| *id);
                for connection in its.collect::<Vec<_>>() {
                    self.payload_peers.peers.remove(&connection);
                    self.watch(connection, turn);
                }
            }
            DirectoryCall::Tell { peer, incarnation, note } => {
                let is_it =
                    |of: &PayloadPeer| of.engine == peer && of.incarnation == Some(incarnation);
                let peers = &self.payload_peers.peers;
                let found = peers.iter().find(|(_, of)| is_it(of)).map(|(id, _)| *id);
                let Some(connection) = found else { return };
                let full = !note.is_awaited()
                    && !self.peers.has_room_for_more(connection)
                    && !planted!("wants-without-room-are-lost");
                if full {
                    let untold = DirectoryNews::Untold { peer, incarnation, note };
                    return turn.push(CoreEffect::Directory(untold));
                }
                let _ = self.send(connection, Message::Payload { note }, turn);
            }
        }
    }

    /// Both sides of the connection have payloads.
    fn has_payloads(&self, connection: ConnectionId) -> bool {
        self.payload_peers.is_there
            && self
                .info(connection)
                .is_some_and(|info| info.capabilities & capability::PAYLOADS != 0)
    }

    /// A peer that something is expected of may be up.
    fn meet<A>(&mut self, connection: ConnectionId, turn: &mut CoreTurn<'_, A>) {
        let Some(info) = self.info(connection) else { return };
        let (peer, incarnation) = (info.engine.clone(), info.incarnation);
        if self.has_payloads(connection) {
            if let Some(met) = self.payload_peers.peers.get_mut(&connection) {
                met.incarnation = Some(incarnation);
                turn.push(CoreEffect::Directory(DirectoryNews::Met { peer, incarnation }));
            }
        } else if self.payload_peers.peers.remove(&connection).is_some() {
            self.watch(connection, turn);
            let failure = Failure::mismatch("it has no payloads");
            let parted = DirectoryNews::Parted { peer, incarnation: None, failure };
            turn.push(CoreEffect::Directory(parted));
        }
    }

    /// Tells the payload core what concerns it of an event; true if that was all of it.
    pub(super) fn tell_payloads<A>(
        &mut self,
        event: &PeerManagerEvent,
        turn: &mut CoreTurn<'_, A>,
    ) -> bool {
        match event {
            PeerManagerEvent::Peer(PeerEvent::Up { connection }) => {
                if self.payload_peers.role == Role::Prefill && self.has_payloads(*connection) {
                    let Some(info) = self.info(*connection) else { return false };
                    let peer = PayloadPeer { engine: info.engine.clone(), incarnation: None };
                    self.payload_peers.peers.insert(*connection, peer);
                    self.watch(*connection, turn);
                }
                self.meet(*connection, turn);
                false
            }
            PeerManagerEvent::Peer(PeerEvent::Down { connection, failure, .. }) => {
                if let Some(PayloadPeer { engine: peer, incarnation }) =
                    self.payload_peers.peers.remove(connection)
                {
                    let failure = failure.clone();
                    let parted = DirectoryNews::Parted { peer, incarnation, failure };
                    turn.push(CoreEffect::Directory(parted));
                }
                false
            }
            PeerManagerEvent::Peer(PeerEvent::Message {
                connection,
                message: Message::Payload { note },
            }) if self.has_payloads(*connection) => self.told(*connection, note, turn),
            // It came together with what ended the connection.
            PeerManagerEvent::Peer(PeerEvent::Message {
                connection,
                message: Message::Payload { .. },
            }) if self.info(*connection).is_none() => true,
            _ => false,
        }
    }

    fn told<A>(
        &mut self,
        connection: ConnectionId,
        note: &PayloadNote,
        turn: &mut CoreTurn<'_, A>,
    ) -> bool {
        if let Some(info) = self.info(connection) {
            let (peer, incarnation) = (info.engine.clone(), info.incarnation);
            let told = DirectoryNews::Told { peer, incarnation, note: note.clone() };
            turn.push(CoreEffect::Directory(told));
        }
        true
    }

    /// Notices if the peer falls silent, as long as something is expected of it.
    pub(super) fn watch<A>(&mut self, connection: ConnectionId, turn: &mut CoreTurn<'_, A>) {
        let waits = self.uses.contains_key(&connection) || self.payload_peers.watches(connection);
        self.peers.watch(connection, waits, &mut peer_turn(turn, &mut self.peer_events));
    }
}
