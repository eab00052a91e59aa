//! Links, and where the frames that come by them go.

use super::connection::{DialState, REDIALS_MAX};
use super::{Connection, ConnectionTimer, LinkOwner, PeerEvent, PeerTurn, Peers};
use crate::core::channel::Received;
use crate::core::command::ControlCommand;
use crate::core::dialect::moriio::handshake::AgentMetadata;
use crate::core::dialect::native::{
    self, ConnectionHeader, DecodeError, Frame, UnreadableFrame, UnreadableMessage,
};
use crate::core::error::speaks_only_moriio;
use crate::core::error::{Failure, stranger};
use crate::core::ids::ConnectionId;
use crate::core::time::Nanos;
use crate::fabric::{ControlEvent, Endpoint, FabricError, LinkId, LinkKind};

/// The next id after `last` of a link that is not in use. `kind` keeps those of peers that speak
/// MoRIIO apart. Of so many the oldest come again.
pub(in crate::core) fn unused(
    kind: u32,
    last: &mut u32,
    is_used: impl Fn(LinkId) -> bool,
) -> LinkId {
    loop {
        *last = *last % (LinkId::MORIIO - 1) + 1;
        let link = LinkId(kind | *last);
        if !is_used(link) {
            return link;
        }
    }
}

impl Peers {
    /// Takes an event of the control plane. One of a link that is none of these peers' changes
    /// nothing.
    pub fn control(&mut self, event: ControlEvent, turn: &mut PeerTurn<'_>) {
        match event {
            ControlEvent::LinkUp { link, channel, from } if link.is_inbound() => {
                if channel == LinkKind::Handshake {
                    self.on_guest(link, from, turn);
                }
            }
            ControlEvent::LinkUp { link, .. } => self.on_link_up(link, turn),
            ControlEvent::Frame { link, parts } => self.on_frame(link, &parts, turn),
            ControlEvent::LinkDown { link } => self.on_link_down(link, turn),
        }
    }

    fn on_guest(&mut self, link: LinkId, from: Option<Endpoint>, turn: &mut PeerTurn<'_>) {
        if !self.has_link() {
            turn.commands.push(ControlCommand::HangUp { link });
            return;
        }
        self.links.insert(link, LinkOwner::Unidentified);
        self.from.extend(from.map(|from| (link, from)));
        self.timers.arm(ConnectionTimer::Link(link), turn.now + self.config.hello);
    }

    fn on_link_up(&mut self, link: LinkId, turn: &mut PeerTurn<'_>) {
        if let Some(LinkOwner::Connection(id)) = self.links.get(&link).copied() {
            self.try_hello(id, link, turn);
            self.rearm(id);
        }
    }

    fn on_link_down(&mut self, link: LinkId, turn: &mut PeerTurn<'_>) {
        self.from.remove(&link);
        let Some(owner) = self.links.remove(&link) else { return };
        self.timers.cancel(&ConnectionTimer::Link(link));
        let LinkOwner::Connection(id) = owner else { return };
        if let Some(connection) = self.connections.get_mut(&id) {
            if connection.channel.link() == Some(link) {
                connection.unlink(turn.now, &self.config);
            } else {
                connection.dial_again(turn.now, &self.config);
            }
            self.service(id, turn);
        }
    }

    fn on_frame(&mut self, link: LinkId, parts: &[Vec<u8>], turn: &mut PeerTurn<'_>) {
        let Some(owner) = self.links.get(&link).copied() else { return };
        if let (LinkOwner::Connection(id), [empty, _]) = (owner, parts)
            && self.cautious
            && empty.is_empty()
        {
            return self.on_handshake(id, link, parts, turn);
        }
        let frame = match parts {
            [part] => native::read(part),
            _ => {
                let error = DecodeError { frame: "frame", rule: "not one part".into() };
                Err(UnreadableFrame { error, message: None, later: false })
            }
        };
        match (owner, frame) {
            (LinkOwner::Closing, _) => {}
            (owner, Err(unread)) => {
                if !unread.later {
                    self.violation(link, &unread.error, turn);
                }
                if let LinkOwner::Connection(id) = owner {
                    self.on_unread(id, link, unread, turn);
                    self.rearm(id);
                }
            }
            (LinkOwner::Unidentified, Ok(frame)) => self.on_guest_frame(link, frame, turn),
            (LinkOwner::Connection(id), Ok(frame)) => {
                self.on_slot_frame(id, link, frame, turn);
                self.rearm(id);
            }
        }
    }

    /// A reply of MoRIIO's handshake: the first one says whether a hello may follow.
    fn on_handshake(
        &mut self,
        id: ConnectionId,
        link: LinkId,
        parts: &[Vec<u8>],
        turn: &mut PeerTurn<'_>,
    ) {
        let Some(connection) =
            self.connections.get_mut(&id).filter(|connection| connection.native != Some(link))
        else {
            // The second reply, or that to a question that was repeated.
            return;
        };
        match AgentMetadata::decode(parts) {
            Ok(AgentMetadata { native: true, .. }) => {
                connection.native = Some(link);
                self.say_hello(&self.connections[&id], link, turn);
            }
            Ok(_) => {
                let failure = speaks_only_moriio(&connection.engine);
                self.end(id, failure, turn);
            }
            Err(error) => self.violation(link, &error, turn),
        }
    }

    fn on_guest_frame(&mut self, link: LinkId, frame: Frame, turn: &mut PeerTurn<'_>) {
        match frame {
            Frame::Hello(hello) => self.on_hello(link, *hello, turn),
            Frame::Welcome(_) | Frame::Register(_) | Frame::Abandon { .. } => {
                self.misplaced(&frame, link, turn);
            }
            _ => self.stale = self.stale.saturating_add(1),
        }
    }

    fn on_slot_frame(
        &mut self,
        id: ConnectionId,
        link: LinkId,
        frame: Frame,
        turn: &mut PeerTurn<'_>,
    ) {
        match frame {
            Frame::Hello(hello) if link.is_inbound() => {
                if self
                    .connections
                    .get(&id)
                    .is_none_or(|connection| connection.engine == hello.engine)
                {
                    return self.on_hello(link, *hello, turn);
                }
                // One of the two does not use this link, and the other dials again.
                self.misplaced(&Frame::Hello(hello), link, turn);
                turn.commands.push(ControlCommand::HangUp { link });
                self.on_link_down(link, turn);
            }
            Frame::Welcome(hello) if !link.is_inbound() => {
                self.on_welcome(id, link, *hello, turn);
            }
            Frame::Hello(_) | Frame::Welcome(_) | Frame::Register(_) | Frame::Abandon { .. } => {
                self.misplaced(&frame, link, turn);
            }
            Frame::Refuse { envelope, reason, .. } => {
                self.on_last_frame(id, envelope, Failure::HelloRefused(reason), turn);
            }
            Frame::Bye { envelope } => {
                self.on_last_frame(id, envelope, Failure::Fabric(FabricError::PeerGone), turn);
            }
            Frame::Data { .. } | Frame::Ack { .. } | Frame::Probe { .. } => {
                self.on_channel_frame(id, link, frame, turn);
            }
        }
    }

    fn on_channel_frame(
        &mut self,
        id: ConnectionId,
        link: LinkId,
        frame: Frame,
        turn: &mut PeerTurn<'_>,
    ) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if connection.info.is_none() {
            self.stale = self.stale.saturating_add(1);
            return;
        }
        let (name, place) = (frame.name(), turn.events.len());
        let deliver =
            &mut |message| turn.events.push(PeerEvent::Message { connection: id, message });
        let received = connection.channel.receive(turn.now, frame, deliver, turn.commands);
        self.handed_on(turn.events.len() - place);
        self.sort(id, link, name, received, turn);
    }

    /// A message that cannot be read, or of a later version.
    fn on_unread(
        &mut self,
        id: ConnectionId,
        link: LinkId,
        unread: UnreadableFrame,
        turn: &mut PeerTurn<'_>,
    ) {
        let Some(connection) =
            self.connections.get_mut(&id).filter(|connection| connection.info.is_some())
        else {
            return;
        };
        let place = turn.events.len();
        let deliver =
            &mut |message| turn.events.push(PeerEvent::Message { connection: id, message });
        let received = connection.channel.pass_over(turn.now, &unread, deliver, turn.commands);
        let given_up = received == Received::GivenUp;
        self.handed_on(turn.events.len() - place + usize::from(given_up));
        self.sort(id, link, "message", received, turn);
        if given_up {
            let violation = unread.error.violation(&self.connections[&id].engine.0);
            let Some(UnreadableMessage { about: Some((kind, tag)), .. }) = unread.message else {
                // Nobody can say which transfer would wait for it.
                turn.events.truncate(place);
                return self.end(id, Failure::Violation(violation), turn);
            };
            turn.events.insert(place, PeerEvent::Lost { connection: id, tag, kind, violation });
        }
    }

    fn handed_on(&mut self, messages: usize) {
        self.delivered = self.delivered.wrapping_add(messages as u32);
    }

    /// Notes what a frame did to its connection.
    fn sort(
        &mut self,
        id: ConnectionId,
        link: LinkId,
        frame: &'static str,
        received: Received,
        turn: &mut PeerTurn<'_>,
    ) {
        match received {
            Received::Progress | Received::GivenUp => {
                if let Some(connection) = self.connections.get_mut(&id)
                    && !planted!("dials-of-a-life-count")
                {
                    connection.redials = 0;
                }
            }
            Received::Nothing => {}
            Received::Stale => self.stale = self.stale.saturating_add(1),
            Received::Violation(rule) => {
                let error = DecodeError { frame, rule: rule.into() };
                self.violation(link, &error, turn);
            }
        }
    }

    /// The peer does not want the connection, or no longer.
    fn on_last_frame(
        &mut self,
        id: ConnectionId,
        envelope: ConnectionHeader,
        failure: Failure,
        turn: &mut PeerTurn<'_>,
    ) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let incarnation = connection.info.as_ref().map(|info| info.incarnation);
        let ours = envelope.to == self.local.incarnation && envelope.session == connection.session;
        if ours && incarnation.is_none_or(|incarnation| envelope.from >= incarnation) {
            connection.refused = Some(envelope.from);
            self.end(id, failure, turn);
        } else {
            self.stale = self.stale.saturating_add(1);
        }
    }

    fn misplaced(&mut self, frame: &Frame, link: LinkId, turn: &mut PeerTurn<'_>) {
        let rule = "not said by this side or on this link".into();
        self.violation(link, &DecodeError { frame: frame.name(), rule }, turn);
    }

    /// Counts and drops; a link that never said hello is closed as well.
    fn violation(&mut self, link: LinkId, error: &DecodeError, turn: &mut PeerTurn<'_>) {
        self.violations = self.violations.saturating_add(1);
        let owner = self.links.get(&link).copied();
        let violation = match owner {
            Some(LinkOwner::Connection(id)) if self.connections.contains_key(&id) => {
                error.violation(&self.connections[&id].engine.0)
            }
            _ => error.violation(&stranger(link, self.from.get(&link))),
        };
        turn.events.push(PeerEvent::Violation(violation));
        if owner == Some(LinkOwner::Unidentified) {
            self.timers.cancel(&ConnectionTimer::Link(link));
            self.hang_up(link, turn);
        }
    }

    pub(super) fn hang_up(&mut self, link: LinkId, turn: &mut PeerTurn<'_>) {
        self.links.remove(&link);
        self.from.remove(&link);
        turn.commands.push(ControlCommand::HangUp { link });
    }

    /// An id for a link that the owner dials itself on the same control plane, in place of the one
    /// before.
    pub fn fresh_link(&mut self) -> LinkId {
        let link = self.next_link();
        self.owner_link = Some(link);
        link
    }

    /// An id that no link has.
    pub(super) fn next_link(&mut self) -> LinkId {
        let is_used = |link| self.owner_link == Some(link) || self.links.contains_key(&link);
        unused(0, &mut self.next_link, is_used)
    }

    /// Opens the next link of a connection, or gives up.
    pub(super) fn dial(&mut self, id: ConnectionId, turn: &mut PeerTurn<'_>) {
        let room = self.has_link();
        let link = self.next_link();
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.redials += 1;
        if connection.redials > REDIALS_MAX {
            return self.end(id, Failure::PeerSilent, turn);
        }
        if !room {
            return connection.dial_again(turn.now, &self.config);
        }
        let to = connection.endpoint.clone().expect("only who has an endpoint dials");
        let until = turn.now + self.config.hello.scale(1, 2);
        connection.dial = DialState::Trying { link, until, hello: None };
        self.links.insert(link, LinkOwner::Connection(id));
        turn.commands.push(ControlCommand::Dial { link, to, channel: LinkKind::Handshake });
    }

    /// Says hello on the link that is being tried, for the first time or again.
    pub(super) fn try_hello(&mut self, id: ConnectionId, link: LinkId, turn: &mut PeerTurn<'_>) {
        let (first, most) = (self.config.retransmit, self.config.retransmit_max);
        let Some(connection) = self.connections.get_mut(&id) else { return };
        match &mut connection.dial {
            DialState::Trying { link: tried, hello, .. } if *tried == link => {
                let wait = hello.map_or(first, |(_, wait)| (wait + wait).min(most));
                *hello = Some((turn.now + wait, wait));
            }
            _ => return,
        }
        self.say_hello(&self.connections[&id], link, turn);
    }

    /// Gives a link of a unidentified peer to a connection.
    pub(super) fn adopt(&mut self, link: LinkId, id: ConnectionId) {
        self.links.insert(link, LinkOwner::Connection(id));
        self.timers.cancel(&ConnectionTimer::Link(link));
    }

    /// Continues the connection over a link; the one before is closed.
    pub(super) fn attach(&mut self, id: ConnectionId, link: LinkId, turn: &mut PeerTurn<'_>) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let Some(info) = &connection.info else { return };
        let peer = (info.incarnation, info.version);
        if let Some(old) = connection.channel.detach() {
            self.hang_up(old, turn);
        }
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.channel.attach(turn.now, link, peer, turn.commands);
        connection.link(turn.now);
        self.rearm(id);
    }

    /// Removes a connection. A link in use says goodbye and stands for a while.
    pub(super) fn retire(
        &mut self,
        id: ConnectionId,
        turn: &mut PeerTurn<'_>,
    ) -> Option<Connection> {
        let mut connection = self.connections.remove(&id)?;
        self.leave_known(&connection.engine);
        self.timers.cancel(&ConnectionTimer::Connection(id));
        match &connection.endpoint {
            Some(endpoint) => {
                self.targets.remove(&(connection.engine.clone(), endpoint.clone()));
            }
            None => {
                self.callers.remove(&connection.engine);
            }
        }
        if let Some(link) = connection.channel.detach() {
            let frame = native::encode(&Frame::Bye { envelope: connection.channel.envelope() });
            turn.commands.push(ControlCommand::Send { link, frame });
            self.leave(turn.now, link);
        }
        if let DialState::Trying { link, .. } = connection.dial {
            self.leave(turn.now, link);
        }
        Some(connection)
    }

    /// Lets the last frame of a link get through before it is closed.
    fn leave(&mut self, now: Nanos, link: LinkId) {
        self.links.insert(link, LinkOwner::Closing);
        self.timers.arm(ConnectionTimer::Link(link), now + self.config.hello);
    }
}
