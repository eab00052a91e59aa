//! What is said and checked before anything else.

use super::{Connection, LocalEngine, PeerEvent, PeerInfo, PeerTurn, Peers};
use crate::core::channel::{Channel, capability};
use crate::core::command::ControlCommand;
use crate::core::dialect::moriio::handshake;
use crate::core::dialect::native::{self, ConnectionHeader, Frame, VERSION_MIN};
use crate::core::error::Failure;
use crate::core::ids::{ConnectionId, EngineId, Incarnation, hash};
use crate::core::layout::{self, RankLayout};
use crate::core::message::{Hello, Role};
use crate::fabric::LinkId;
use std::sync::Arc;

/// All modes that an engine can have.
pub(super) const MODES: u32 = capability::PUSH | capability::PULL;

/// The two ends of a connection, as both see them.
type EngineIncarnation<'a> = (&'a EngineId, Incarnation);

/// What both sides compute alike and nobody else does: 64-bit FNV-1a over names, incarnations,
/// session.
pub(super) fn fence_key(
    dialer: EngineIncarnation<'_>,
    acceptor: EngineIncarnation<'_>,
    session: u64,
) -> u64 {
    let end = |(engine, incarnation): EngineIncarnation<'_>| {
        let name = engine.0.as_bytes().to_vec();
        let length = name.len() as u64;
        length.to_le_bytes().into_iter().chain(name).chain(incarnation.0.to_le_bytes())
    };
    hash(end(dialer).chain(end(acceptor)).chain(session.to_le_bytes()))
}

/// What two engines agreed on.
pub(super) struct Negotiated {
    capabilities: u32,
    version: u16,
}

/// Why the two engines cannot work together, if they cannot; else what they share.
fn check(
    (me, newest): (&LocalEngine, u16),
    ranks: &[RankLayout],
    hello: &Hello,
) -> Result<Negotiated, Failure> {
    let refuse = |reason: String| Err(Failure::HelloRefused(reason.into()));
    let (mine, theirs) = (&me.engine, &hello.engine);
    let Some(version) = native::agree(newest, hello) else {
        return refuse(format!(
            "{mine} speaks protocol versions {VERSION_MIN} to {newest}, {theirs} {} to {}",
            hello.version_min, hello.version
        ));
    };
    if hello.expects != *mine {
        return refuse(format!("{theirs} expects {}, this is {mine}", hello.expects));
    }
    if hello.role == me.role {
        return refuse(format!("{mine} and {theirs} are both {}", me.role));
    }
    let fingerprint = hello.geometry.fingerprint();
    if hello.fingerprint != fingerprint {
        return refuse(format!(
            "geometry of {theirs} is damaged: fingerprint {:016x}, expected {fingerprint:016x}",
            hello.fingerprint
        ));
    }
    let capabilities = hello.capabilities & me.capabilities;
    if capabilities & MODES == 0 {
        return refuse(format!(
            "{mine} and {theirs} share no transfer mode: capabilities {:#x} and {:#x}",
            me.capabilities, hello.capabilities
        ));
    }
    let verifies = |capabilities: u32| capabilities & capability::VERIFY != 0;
    if verifies(me.capabilities) != verifies(hello.capabilities)
        && !planted!("who-does-not-verify-is-let-in")
    {
        let (one, other) = if verifies(me.capabilities) { (mine, theirs) } else { (theirs, mine) };
        return refuse(format!(
            "{one} verifies KV and {other} does not: set `verify` on both or on neither"
        ));
    }
    let (own, other) = ((&*me.geometry, ranks), (&hello.geometry, &*hello.ranks));
    let fit = match me.role {
        Role::Prefill => layout::check(own, other),
        Role::Decode => layout::check(other, own),
    };
    fit.map(|()| Negotiated { capabilities, version }).map_err(Failure::Mismatch)
}

/// What an incarnation is told that seems to be before one that is here.
fn before(hello: &Hello, last: Incarnation) -> Failure {
    let (engine, incarnation) = (&hello.engine, hello.incarnation);
    let reason = format!(
        "incarnation {incarnation} of {engine} seems to be before {last}, which is not over yet: another process has \
         its address, or its clock went back at a restart"
    );
    Failure::HelloRefused(reason.into())
}

impl Peers {
    /// Says hello on a link that is being tried, or asks whether it may be said.
    pub(super) fn say_hello(&self, connection: &Connection, link: LinkId, turn: &mut PeerTurn<'_>) {
        if self.cautious && connection.native != Some(link) {
            let frame = handshake::REQUEST.to_vec();
            turn.commands.push(ControlCommand::Send { link, frame });
            return;
        }
        self.greet(connection, link, Frame::Hello, turn);
    }

    /// Says who this is, in a hello or the answer to one; nothing while the ranks are unknown.
    fn greet(
        &self,
        connection: &Connection,
        link: LinkId,
        frame: fn(Box<Hello>) -> Frame,
        turn: &mut PeerTurn<'_>,
    ) {
        let Some(ranks) = &self.ranks else { return };
        let hello = Hello {
            version: self.config.version,
            version_min: VERSION_MIN,
            engine: self.local.engine.clone(),
            incarnation: self.local.incarnation,
            session: connection.session,
            expects: connection.engine.clone(),
            role: self.local.role,
            capabilities: self.local.capabilities,
            geometry: (*self.local.geometry).clone(),
            fingerprint: self.fingerprint,
            ranks: ranks.clone(),
        };
        let frame = native::encode(&frame(Box::new(hello)));
        turn.commands.push(ControlCommand::Send { link, frame });
    }

    /// Tells the peer why not.
    fn refuse(&self, link: LinkId, hello: &Hello, failure: &Failure, turn: &mut PeerTurn<'_>) {
        let reason = match failure {
            Failure::HelloRefused(reason) => reason.clone(),
            other => other.to_string().into(),
        };
        let envelope = self.envelope_to(hello);
        let frame = Frame::Refuse { envelope, engine: self.local.engine.clone(), reason };
        turn.commands.push(ControlCommand::Send { link, frame: native::encode(&frame) });
    }

    /// Whoever said hello has nobody to talk to now.
    fn say_bye(&self, link: LinkId, hello: &Hello, turn: &mut PeerTurn<'_>) {
        let frame = native::encode(&Frame::Bye { envelope: self.envelope_to(hello) });
        turn.commands.push(ControlCommand::Send { link, frame });
    }

    fn envelope_to(&self, hello: &Hello) -> ConnectionHeader {
        let Hello { incarnation: to, session, .. } = *hello;
        let version = native::agree(self.config.version, hello).unwrap_or(VERSION_MIN);
        ConnectionHeader { version, from: self.local.incarnation, to, session }
    }

    fn info_of(&self, hello: Hello, agreed: Negotiated) -> PeerInfo {
        let me = (&self.local.engine, self.local.incarnation);
        let peer = (&hello.engine, hello.incarnation);
        let fence_key = match self.local.role {
            Role::Decode => fence_key(me, peer, hello.session),
            Role::Prefill => fence_key(peer, me, hello.session),
        };
        PeerInfo {
            engine: hello.engine,
            incarnation: hello.incarnation,
            geometry: Arc::new(hello.geometry),
            ranks: Arc::new(hello.ranks),
            capabilities: agreed.capabilities,
            version: agreed.version,
            fence_key,
        }
    }

    /// A hello on a link that the other side opened.
    pub(super) fn on_hello(&mut self, link: LinkId, hello: Hello, turn: &mut PeerTurn<'_>) {
        if self.ranks.is_none() {
            // The dialer says it again.
            return;
        }
        if self.local.role == Role::Decode {
            let reason = format!("{} is a decode: it dials, it is not dialled", self.local.engine);
            return self.turn_away(link, &hello, Failure::HelloRefused(reason.into()), turn);
        }
        let current = self.callers.get(&hello.engine).copied();
        if let Some(connection) = current
            && planted!("hello-is-checked-too-late")
        {
            self.end(connection, Failure::PeerSilent, turn);
        }
        let ranks = self.ranks.as_deref().unwrap_or_default();
        // Checked before the hello changes a connection that is up.
        let agreed = match check((&self.local, self.config.version), ranks, &hello) {
            Ok(agreed) => agreed,
            Err(failure) => return self.turn_away(link, &hello, failure, turn),
        };
        let this = (hello.incarnation, hello.session);
        if let Some(known) = self.known.get(&hello.engine).copied() {
            let last = (known.incarnation, known.session);
            if let Some(connection) = current.filter(|_| this == last) {
                return self.resume(connection, link, turn);
            }
            // An incarnation that seems to be before the last one is one of the past, as one that
            // is known to be over, or the clock went back at a restart. Once nothing is left of the
            // other, to believe it costs at most a connection with nobody, so that a clock locks
            // nobody out for good.
            let is_before = hello.incarnation < last.0 || known.past == Some(hello.incarnation);
            if let Some(connection) = current.filter(|_| is_before) {
                self.stale = self.stale.saturating_add(1);
                return self.challenge_peer(connection, link, &hello, turn);
            }
            if !is_before && this <= last && !planted!("hello-of-an-ended-session") {
                self.stale = self.stale.saturating_add(1);
                return self.say_bye(link, &hello, turn);
            }
        }
        if !self.has_room_beside(usize::from(current.is_some())) {
            return self.turn_away(link, &hello, Failure::Overload, turn);
        }
        if let Some(connection) = current {
            let before = self.info(connection).map(|info| info.incarnation);
            let restarted = before.is_some_and(|before| hello.incarnation > before);
            let failure = if restarted { Failure::PeerRestarted } else { Failure::PeerSilent };
            self.end(connection, failure, turn);
        }
        self.welcome(link, hello, agreed, turn);
    }

    /// Asks a peer that an incarnation before it says hello for whether it is still there. Who says
    /// hello is refused when the peer has shown that it is; until then it may try again, as nobody
    /// knows.
    fn challenge_peer(
        &mut self,
        id: ConnectionId,
        link: LinkId,
        hello: &Hello,
        turn: &mut PeerTurn<'_>,
    ) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let incarnation = connection.info.as_ref().map_or(Incarnation(0), |info| info.incarnation);
        let asked = connection.rival.replace(hello.incarnation) == Some(hello.incarnation);
        if asked && !connection.channel.is_checking_liveness() {
            connection.rival = None;
            self.refuse(link, hello, &before(hello, incarnation), turn);
        } else {
            connection.channel.check_liveness(turn.now);
            self.say_bye(link, hello, turn);
            self.service(id, turn);
        }
    }

    fn turn_away(&self, link: LinkId, hello: &Hello, failure: Failure, turn: &mut PeerTurn<'_>) {
        self.refuse(link, hello, &failure, turn);
        turn.events.push(PeerEvent::Refused { engine: hello.engine.clone(), failure });
    }

    /// A peer that dialled gets a connection.
    fn welcome(&mut self, link: LinkId, hello: Hello, agreed: Negotiated, turn: &mut PeerTurn<'_>) {
        let (engine, session, incarnation) =
            (hello.engine.clone(), hello.session, hello.incarnation);
        self.remember(&engine, incarnation, session);
        let channel = Channel::new(&self.config, self.local.incarnation, session);
        let mut connection = Connection::new(engine.clone(), None, session, channel);
        connection.info = Some(self.info_of(hello, agreed));
        let id = self.next_connection_id();
        self.callers.insert(engine, id);
        self.connections.insert(id, connection);
        self.resume(id, link, turn);
        turn.events.push(PeerEvent::Up { connection: id });
    }

    /// Answers a hello and continues the connection over its link.
    fn resume(&mut self, id: ConnectionId, link: LinkId, turn: &mut PeerTurn<'_>) {
        let Some(connection) = self.connections.get(&id) else { return };
        self.greet(connection, link, Frame::Welcome, turn);
        if connection.channel.link() != Some(link) {
            self.adopt(link, id);
            self.attach(id, link, turn);
        }
    }

    /// The answer to a hello.
    pub(super) fn on_welcome(
        &mut self,
        id: ConnectionId,
        link: LinkId,
        hello: Hello,
        turn: &mut PeerTurn<'_>,
    ) {
        let Some(connection) = self.connections.get(&id) else { return };
        let peer = connection.info.as_ref().map(|info| info.incarnation);
        // Who repeats a session that was never said before has just been told it, whichever
        // incarnation was met earlier. An answer to another engine says nothing of the own hello.
        let is_past = peer.is_some_and(|incarnation| hello.incarnation < incarnation);
        let mine = hello.session == connection.session && hello.expects == self.local.engine;
        let other = !mine || is_past;
        if other || connection.channel.link() == Some(link) {
            self.stale = self.stale.saturating_add(u32::from(other));
            return;
        }
        if hello.engine != connection.engine {
            let reason = format!("dialled {}, {} answered", connection.engine, hello.engine);
            return self.reject(id, link, &hello, Failure::HelloRefused(reason.into()), turn);
        }
        match peer {
            Some(incarnation)
                if incarnation == hello.incarnation || planted!("restart-keeps-the-slot") =>
            {
                return self.attach(id, link, turn);
            }
            Some(_) => {
                self.say_bye(link, &hello, turn);
                return self.end(id, Failure::PeerRestarted, turn);
            }
            None => {}
        }
        let ranks = self.ranks.as_deref().unwrap_or_default();
        match check((&self.local, self.config.version), ranks, &hello) {
            Err(failure) => self.reject(id, link, &hello, failure, turn),
            Ok(agreed) => self.came_up(id, link, hello, agreed, turn),
        }
    }

    /// This side, having dialled, finds that it cannot work with who answered.
    fn reject(
        &mut self,
        id: ConnectionId,
        link: LinkId,
        hello: &Hello,
        failure: Failure,
        turn: &mut PeerTurn<'_>,
    ) {
        self.refuse(link, hello, &failure, turn);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.refused = Some(hello.incarnation);
        }
        self.end(id, failure, turn);
    }

    fn came_up(
        &mut self,
        id: ConnectionId,
        link: LinkId,
        hello: Hello,
        agreed: Negotiated,
        turn: &mut PeerTurn<'_>,
    ) {
        let incarnation = hello.incarnation;
        let older: Vec<ConnectionId> = (self.connections.iter())
            .filter(|(other, connection)| {
                **other != id && connection.engine == hello.engine && connection.info.is_some()
            })
            .map(|(other, _)| *other)
            .collect();
        for other in older {
            let restarted = self.info(other).is_some_and(|info| info.incarnation != incarnation);
            let failure = if restarted { Failure::PeerRestarted } else { Failure::PeerSilent };
            self.end(other, failure, turn);
        }
        self.remember(&hello.engine, incarnation, hello.session);
        let info = self.info_of(hello, agreed);
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.info = Some(info);
        if let Some(endpoint) = &connection.endpoint {
            self.backoffs.remove(&(connection.engine.clone(), endpoint.clone()));
        }
        self.attach(id, link, turn);
        turn.events.push(PeerEvent::Up { connection: id });
    }
}
