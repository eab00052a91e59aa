//! What is said and checked before anything else.

use super::{Me, Out, PeerEvent, PeerInfo, Peers, Slot};
use crate::core::channel::{Channel, capability};
use crate::core::command::ControlCommand;
use crate::core::dialect::moriio::handshake;
use crate::core::dialect::native::{self, Envelope, Frame, VERSION_MIN};
use crate::core::error::Failure;
use crate::core::ids::{EngineId, Incarnation, PeerSlot};
use crate::core::layout::{self, RankLayout};
use crate::core::message::{Hello, Role};
use crate::core::time::Nanos;
use crate::fabric::LinkId;
use std::sync::Arc;

/// All modes that an engine can have.
pub(super) const MODES: u32 = capability::PUSH | capability::PULL;

/// The two ends of a conversation, as both see them.
type End<'a> = (&'a EngineId, Incarnation);

/// What both sides compute alike and nobody else does: 64-bit FNV-1a over names, lives, session.
pub(super) fn pass(dialer: End<'_>, acceptor: End<'_>, session: u64) -> u64 {
    let end = |(engine, life): End<'_>| {
        let name = engine.0.as_bytes().to_vec();
        let length = name.len() as u64;
        length.to_le_bytes().into_iter().chain(name).chain(life.0.to_le_bytes())
    };
    native::hash(end(dialer).chain(end(acceptor)).chain(session.to_le_bytes()))
}

/// What two engines agreed on.
pub(super) struct Agreed {
    capabilities: u32,
    version: u16,
}

/// Why the two engines cannot work together, if they cannot; else what they share.
fn check((me, newest): (&Me, u16), ranks: &[RankLayout], hello: &Hello) -> Result<Agreed, Failure> {
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
    let (own, other) = ((&*me.geometry, ranks), (&hello.geometry, &*hello.ranks));
    let fit = match me.role {
        Role::Prefill => layout::check(own, other),
        Role::Decode => layout::check(other, own),
    };
    fit.map(|()| Agreed { capabilities, version }).map_err(Failure::Mismatch)
}

/// What a life is told that seems to be before one that is here.
fn before(hello: &Hello, last: Incarnation) -> Failure {
    let (engine, life) = (&hello.engine, hello.incarnation);
    let reason = format!(
        "life {life} of {engine} seems to be before {last}, which is not over yet: another process has \
         its address, or its clock went back at a restart"
    );
    Failure::HelloRefused(reason.into())
}

impl Peers {
    /// The own hello; None while the ranks are unknown.
    fn hello(&self, session: u64, expects: &EngineId) -> Option<Box<Hello>> {
        let ranks = self.ranks.as_ref()?;
        Some(Box::new(Hello {
            version: self.config.version,
            version_min: VERSION_MIN,
            engine: self.me.engine.clone(),
            incarnation: self.me.incarnation,
            session,
            expects: expects.clone(),
            role: self.me.role,
            capabilities: self.me.capabilities,
            geometry: (*self.me.geometry).clone(),
            fingerprint: self.fingerprint,
            ranks: ranks.clone(),
        }))
    }

    /// Says hello on a link that is being tried, or asks whether it may be said.
    pub(super) fn say_hello(&self, slot: &Slot, link: LinkId, out: &mut Out<'_>) {
        if self.cautious && slot.native != Some(link) {
            let frame = handshake::REQUEST.to_vec();
            out.commands.push(ControlCommand::Send { link, frame });
            return;
        }
        if let Some(hello) = self.hello(slot.session, &slot.engine) {
            let frame = native::encode(&Frame::Hello(hello));
            out.commands.push(ControlCommand::Send { link, frame });
        }
    }

    fn say_welcome(&self, slot: &Slot, link: LinkId, out: &mut Out<'_>) {
        if let Some(hello) = self.hello(slot.session, &slot.engine) {
            let frame = native::encode(&Frame::Welcome(hello));
            out.commands.push(ControlCommand::Send { link, frame });
        }
    }

    /// Tells the peer why not.
    fn refuse(&self, link: LinkId, hello: &Hello, failure: &Failure, out: &mut Out<'_>) {
        let reason = match failure {
            Failure::HelloRefused(reason) => reason.clone(),
            other => other.to_string().into(),
        };
        let envelope = self.envelope_to(hello);
        let frame = Frame::Refuse { envelope, engine: self.me.engine.clone(), reason };
        out.commands.push(ControlCommand::Send { link, frame: native::encode(&frame) });
    }

    /// Whoever said hello has nobody to talk to now.
    fn say_bye(&self, link: LinkId, hello: &Hello, out: &mut Out<'_>) {
        let frame = native::encode(&Frame::Bye { envelope: self.envelope_to(hello) });
        out.commands.push(ControlCommand::Send { link, frame });
    }

    fn envelope_to(&self, hello: &Hello) -> Envelope {
        let Hello { incarnation: to, session, .. } = *hello;
        let version = native::agree(self.config.version, hello).unwrap_or(VERSION_MIN);
        Envelope { version, from: self.me.incarnation, to, session }
    }

    fn info_of(&self, hello: Hello, agreed: Agreed) -> PeerInfo {
        let me = (&self.me.engine, self.me.incarnation);
        let peer = (&hello.engine, hello.incarnation);
        let pass = match self.me.role {
            Role::Decode => pass(me, peer, hello.session),
            Role::Prefill => pass(peer, me, hello.session),
        };
        PeerInfo {
            engine: hello.engine,
            incarnation: hello.incarnation,
            geometry: Arc::new(hello.geometry),
            ranks: Arc::new(hello.ranks),
            capabilities: agreed.capabilities,
            version: agreed.version,
            pass,
        }
    }

    /// A hello on a link that the other side opened.
    pub(super) fn on_hello(&mut self, now: Nanos, link: LinkId, hello: Hello, out: &mut Out<'_>) {
        if self.ranks.is_none() {
            // The dialer says it again.
            return;
        }
        if self.me.role == Role::Decode {
            let reason = format!("{} is a decode: it dials, it is not dialled", self.me.engine);
            return self.turn_away(link, &hello, Failure::HelloRefused(reason.into()), out);
        }
        let current = self.callers.get(&hello.engine).copied();
        let this = (hello.incarnation, hello.session);
        if let Some(known) = self.known.get(&hello.engine).copied() {
            let last = (known.life, known.session);
            if let Some(slot) = current.filter(|_| this == last) {
                return self.resume(now, slot, link, out);
            }
            // A life that seems to be before the last one is one of the past, as one that is known
            // to be over, or the clock went back at a restart. Once nothing is left of the other, to
            // believe it costs at most a conversation with nobody, so that a clock locks nobody out
            // for good.
            let is_before = hello.incarnation < last.0 || known.past == Some(hello.incarnation);
            if let Some(slot) = current.filter(|_| is_before) {
                self.stale = self.stale.saturating_add(1);
                return self.doubt(now, slot, link, &hello, out);
            }
            if !is_before && this <= last && !planted!("hello-of-an-ended-session") {
                self.stale = self.stale.saturating_add(1);
                return self.say_bye(link, &hello, out);
            }
            if let Some(slot) = current {
                let restarted = hello.incarnation > last.0;
                let failure = if restarted { Failure::PeerRestarted } else { Failure::PeerSilent };
                self.end(now, slot, failure, out);
            }
        }
        let ranks = self.ranks.as_deref().unwrap_or_default();
        match check((&self.me, self.config.version), ranks, &hello) {
            Err(failure) => self.turn_away(link, &hello, failure, out),
            Ok(_) if !self.has_room() => self.turn_away(link, &hello, Failure::Overload, out),
            Ok(agreed) => self.welcome(now, link, hello, agreed, out),
        }
    }

    /// Asks a peer that a life before it says hello for whether it is still there. Who says hello is
    /// refused when the peer has shown that it is; until then it may try again, as nobody knows.
    fn doubt(&mut self, now: Nanos, id: PeerSlot, link: LinkId, hello: &Hello, out: &mut Out<'_>) {
        let Some(slot) = self.slots.get_mut(&id) else { return };
        let life = slot.info.as_ref().map_or(Incarnation(0), |info| info.incarnation);
        let asked = slot.rival.replace(hello.incarnation) == Some(hello.incarnation);
        if asked && !slot.channel.is_doubted() {
            slot.rival = None;
            self.refuse(link, hello, &before(hello, life), out);
        } else {
            slot.channel.doubt(now);
            self.say_bye(link, hello, out);
            self.service(now, id, out);
        }
    }

    fn turn_away(&self, link: LinkId, hello: &Hello, failure: Failure, out: &mut Out<'_>) {
        self.refuse(link, hello, &failure, out);
        out.events.push(PeerEvent::Refused { engine: hello.engine.clone(), failure });
    }

    /// A peer that dialled gets a slot.
    fn welcome(
        &mut self,
        now: Nanos,
        link: LinkId,
        hello: Hello,
        agreed: Agreed,
        out: &mut Out<'_>,
    ) {
        let (engine, session, life) = (hello.engine.clone(), hello.session, hello.incarnation);
        self.remember(&engine, life, session);
        let channel = Channel::new(&self.config, self.me.incarnation, session);
        let mut slot = Slot::new(engine.clone(), None, session, channel);
        slot.info = Some(self.info_of(hello, agreed));
        let id = self.fresh_slot();
        self.callers.insert(engine, id);
        self.slots.insert(id, slot);
        self.resume(now, id, link, out);
        out.events.push(PeerEvent::Up { slot: id });
    }

    /// Answers a hello and continues the conversation over its link.
    fn resume(&mut self, now: Nanos, id: PeerSlot, link: LinkId, out: &mut Out<'_>) {
        let Some(slot) = self.slots.get(&id) else { return };
        self.say_welcome(slot, link, out);
        if slot.channel.link() != Some(link) {
            self.adopt(link, id);
            self.attach(now, id, link, out);
        }
    }

    /// The answer to a hello.
    pub(super) fn on_welcome(
        &mut self,
        now: Nanos,
        id: PeerSlot,
        link: LinkId,
        hello: Hello,
        out: &mut Out<'_>,
    ) {
        let Some(slot) = self.slots.get(&id) else { return };
        let peer = slot.info.as_ref().map(|info| info.incarnation);
        // Who repeats a session that was never said before has just been told it, whichever life
        // was met earlier. An answer to another engine says nothing of the own hello.
        let is_past = peer.is_some_and(|life| hello.incarnation < life);
        let mine = hello.session == slot.session && hello.expects == self.me.engine;
        let other = !mine || is_past;
        if other || slot.channel.link() == Some(link) {
            self.stale = self.stale.saturating_add(u32::from(other));
            return;
        }
        if hello.engine != slot.engine {
            let reason = format!("dialled {}, {} answered", slot.engine, hello.engine);
            return self.reject(now, id, link, &hello, Failure::HelloRefused(reason.into()), out);
        }
        match peer {
            Some(life) if life == hello.incarnation || planted!("restart-keeps-the-slot") => {
                return self.attach(now, id, link, out);
            }
            Some(_) => {
                self.say_bye(link, &hello, out);
                return self.end(now, id, Failure::PeerRestarted, out);
            }
            None => {}
        }
        let ranks = self.ranks.as_deref().unwrap_or_default();
        match check((&self.me, self.config.version), ranks, &hello) {
            Err(failure) => self.reject(now, id, link, &hello, failure, out),
            Ok(agreed) => self.came_up(now, id, link, hello, agreed, out),
        }
    }

    /// This side, having dialled, finds that it cannot work with who answered.
    fn reject(
        &mut self,
        now: Nanos,
        id: PeerSlot,
        link: LinkId,
        hello: &Hello,
        failure: Failure,
        out: &mut Out<'_>,
    ) {
        self.refuse(link, hello, &failure, out);
        if let Some(slot) = self.slots.get_mut(&id) {
            slot.refused = Some(hello.incarnation);
        }
        self.end(now, id, failure, out);
    }

    fn came_up(
        &mut self,
        now: Nanos,
        id: PeerSlot,
        link: LinkId,
        hello: Hello,
        agreed: Agreed,
        out: &mut Out<'_>,
    ) {
        let life = hello.incarnation;
        let older: Vec<PeerSlot> = (self.slots.iter())
            .filter(|(other, slot)| {
                **other != id && slot.engine == hello.engine && slot.info.is_some()
            })
            .map(|(other, _)| *other)
            .collect();
        for other in older {
            let restarted = self.info(other).is_some_and(|info| info.incarnation != life);
            let failure = if restarted { Failure::PeerRestarted } else { Failure::PeerSilent };
            self.end(now, other, failure, out);
        }
        self.remember(&hello.engine, life, hello.session);
        let info = self.info_of(hello, agreed);
        let Some(slot) = self.slots.get_mut(&id) else { return };
        slot.info = Some(info);
        if let Some(endpoint) = &slot.endpoint {
            self.shunned.remove(&(slot.engine.clone(), endpoint.clone()));
        }
        self.attach(now, id, link, out);
        out.events.push(PeerEvent::Up { slot: id });
    }
}
