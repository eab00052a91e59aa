//! The peers of one engine core: links, hellos and channels.
//!
//! Decode dials with [`Peers::reach`], prefill answers; from then on both have a [`PeerSlot`] for
//! one conversation between two incarnations. A slot survives its link and ends for good with
//! [`PeerEvent::Down`]; whatever follows has another slot.

mod hello;
mod links;
mod slot;
#[cfg(test)]
mod tests;

use super::channel::{Channel, ChannelConfig};
use super::command::Commands;
use super::dialect::native::{MessageKind, VERSION, VERSION_MIN};
use super::error::{Failure, PeerViolation};
use super::ids::{EngineId, Incarnation, PeerSlot};
use super::layout::{Geometry, RankLayout};
use super::message::{Message, Role, Tag};
use super::time::Nanos;
use super::timers::Timers;
use crate::fabric::{Cause, Endpoint, LinkId};
pub(super) use links::unused;
use slot::{Due, Slot};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Who an engine core is.
#[derive(Clone, Debug)]
pub struct Me {
    /// Its configured name.
    pub engine: EngineId,
    /// Its life.
    pub incarnation: Incarnation,
    /// What it does. Decode dials, prefill answers.
    pub role: Role,
    /// Its KV cache.
    pub geometry: Arc<Geometry>,
    /// What it can do, at least one mode of [`super::channel::capability`].
    pub capabilities: u32,
}

/// What is known of a peer once it is up.
#[derive(Clone, Debug)]
pub struct PeerInfo {
    /// Its name.
    pub engine: EngineId,
    /// Its life.
    pub incarnation: Incarnation,
    /// Its KV cache.
    pub geometry: Arc<Geometry>,
    /// Its ranks.
    pub ranks: Arc<Vec<RankLayout>>,
    /// What both sides can do, see [`super::channel::capability`].
    pub capabilities: u32,
    /// Version of the native dialect that the conversation is held in; 0 for another dialect.
    pub version: u16,
    /// The same on both sides and in no other conversation; see
    /// [`crate::fabric::DataPlane::connect`].
    pub pass: u64,
}

/// What happened to the peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerEvent {
    /// The hello is done; [`Peers::info`] is there.
    Up {
        /// The peer.
        slot: PeerSlot,
    },
    /// A message, in order and exactly once.
    Message {
        /// Who sent it.
        slot: PeerSlot,
        /// The message.
        message: Message,
    },
    /// A message that could not be read, in its place; `violation` was told as well.
    Lost {
        /// Who sent it.
        slot: PeerSlot,
        /// What it was about.
        tag: Tag,
        /// Which message it was.
        kind: MessageKind,
        /// Why it could not be read.
        violation: PeerViolation,
    },
    /// The conversation is over; last event of the slot. May come without `Up`.
    Down {
        /// The peer.
        slot: PeerSlot,
        /// Why.
        failure: Failure,
        /// What is still to be said, if this side dialled and the peer was up.
        unsaid: Option<Box<Unsaid>>,
    },
    /// A hello was refused by this side; the peer was told the reason.
    Refused {
        /// Who said hello.
        engine: EngineId,
        /// Why it does not fit.
        failure: Failure,
    },
    /// A frame broke the protocol and was dropped.
    Violation(PeerViolation),
}

/// Releases that a peer has not acknowledged when the conversation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsaid {
    /// Its name.
    pub engine: EngineId,
    /// Where it listens.
    pub control: Endpoint,
    /// The life that has what is released.
    pub life: Incarnation,
    /// What is released.
    pub tags: Vec<Tag>,
}

impl Unsaid {
    fn of(slot: &Slot) -> Option<Box<Unsaid>> {
        let (control, info) = (slot.endpoint.clone()?, slot.info.as_ref()?);
        let releases = slot.channel.unacknowledged().filter_map(|message| match message {
            Message::Release { tag, .. } => Some(tag.clone()),
            _ => None,
        });
        let tags: Vec<Tag> = releases.collect();
        let (engine, life) = (slot.engine.clone(), info.incarnation);
        (!tags.is_empty()).then(|| Box::new(Unsaid { engine, control, life, tags }))
    }
}

/// Where the calls of [`Peers`] put what they produce, both in order.
pub struct Out<'a> {
    /// For the control plane.
    pub commands: &'a mut dyn Commands,
    /// For the owner.
    pub events: &'a mut Vec<PeerEvent>,
}

/// Sizes and counts of [`Peers`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerGauges {
    /// Slots that are not down.
    pub peers: u32,
    /// Of these, those whose hello is done.
    pub up: u32,
    /// Links of any state.
    pub links: u32,
    /// Messages sent and not acknowledged, or waiting to be sent.
    pub queued: u32,
    /// Frames that broke the protocol, since the start.
    pub violations: u32,
    /// Frames of another incarnation or session, since the start.
    pub stale: u32,
    /// Messages handed on or given up, since the start; wraps.
    pub delivered: u32,
    /// Entries of all tables beside those of slots and links; messages that came before their turn.
    pub remembered: u32,
}

/// The last number of a slot of native peers.
const SLOT_MAX: u32 = PeerSlot::MORIIO - 1;

/// Whose a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// Opened by the other side, which did not get through with a hello.
    Guest,
    /// Of a slot, whichever side opened it.
    Slot(PeerSlot),
    /// Of a slot that is down; stands for a while so that the last frame gets through.
    Last,
}

/// What a deadline is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Slot(PeerSlot),
    Link(LinkId),
}

/// A target that is left alone after a failure.
#[derive(Clone, Debug)]
struct Shun {
    until: Nanos,
    wait: Nanos,
    failure: Failure,
    /// The life that this is about, if it said so.
    life: Option<Incarnation>,
}

/// What was last seen of a peer.
#[derive(Clone, Copy, Debug)]
struct Known {
    life: Incarnation,
    /// The highest life that is over, if that is higher: its clock went back.
    past: Option<Incarnation>,
    session: u64,
    /// Its place among those whose conversations are over.
    gone: Option<u64>,
}

/// All peers of one engine core.
#[derive(Debug)]
pub struct Peers {
    config: ChannelConfig,
    me: Me,
    cautious: bool,
    ranks: Option<Vec<RankLayout>>,
    fingerprint: u64,
    next_link: u32,
    /// The link of the owner.
    lent: Option<LinkId>,
    next_slot: u32,
    next_session: u64,
    /// Places that conversations which are over still take.
    reserved: usize,
    slots: BTreeMap<PeerSlot, Slot>,
    /// Slots that this side dials.
    targets: BTreeMap<(EngineId, Endpoint), PeerSlot>,
    /// Slots of peers that dialled.
    callers: BTreeMap<EngineId, PeerSlot>,
    /// The latest life and session seen of each peer.
    known: BTreeMap<EngineId, Known>,
    /// Peers whose conversations are over, in the order of their ends.
    gone: BTreeMap<u64, EngineId>,
    next_gone: u64,
    shunned: BTreeMap<(EngineId, Endpoint), Shun>,
    links: BTreeMap<LinkId, Owner>,
    /// Whence the links of others came, as far as known.
    from: BTreeMap<LinkId, Endpoint>,
    timers: Timers<Timer>,
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
    pub fn new(mut config: ChannelConfig, me: Me, cautious: bool) -> Peers {
        (config.retransmit, config.retransmit_max) = config.waits();
        config.version = config.version.clamp(VERSION_MIN, VERSION);
        assert!(me.capabilities & hello::MODES != 0, "{} has no transfer mode", me.engine);
        let fingerprint = me.geometry.fingerprint();
        Peers {
            config,
            me,
            cautious,
            ranks: None,
            fingerprint,
            next_link: 0,
            lent: None,
            next_slot: 0,
            next_session: 0,
            reserved: 0,
            slots: BTreeMap::new(),
            targets: BTreeMap::new(),
            callers: BTreeMap::new(),
            known: BTreeMap::new(),
            gone: BTreeMap::new(),
            next_gone: 0,
            shunned: BTreeMap::new(),
            links: BTreeMap::new(),
            from: BTreeMap::new(),
            timers: Timers::default(),
            delivered: 0,
            violations: 0,
            stale: 0,
        }
    }

    /// Says where the KV of the own ranks lies, one entry per rank. The first call starts the
    /// hellos; a call with other ranks (a rebuilt backend) ends all conversations.
    pub fn set_ranks(&mut self, now: Nanos, ranks: Vec<RankLayout>, out: &mut Out<'_>) {
        let first = match &self.ranks {
            Some(old) if *old == ranks => return,
            old => old.is_none(),
        };
        self.ranks = Some(ranks);
        let slots: Vec<PeerSlot> = self.slots.keys().copied().collect();
        for id in slots {
            if first {
                self.slots.get_mut(&id).expect("listed above").start(now);
                self.service(now, id, out);
            } else {
                self.end(now, id, Failure::Fabric(Cause::Closed), out);
            }
        }
    }

    /// The slot of a prefill at an endpoint; starts a conversation if there is none. While a peer
    /// that just failed is being left alone, the new slot goes down at once, for the same reason,
    /// unless it is another `life` that is wanted.
    pub fn reach(
        &mut self,
        now: Nanos,
        engine: &EngineId,
        endpoint: &Endpoint,
        life: Option<Incarnation>,
        out: &mut Out<'_>,
    ) -> PeerSlot {
        let target = (engine.clone(), endpoint.clone());
        if let Some(slot) = self.targets.get(&target) {
            return *slot;
        }
        let id = self.fresh_slot();
        let other = |shun: &Shun| life.zip(shun.life).is_some_and(|(life, shun)| life != shun);
        let shun = self.shunned.get(&target).filter(|shun| now < shun.until && !other(shun));
        let failure = match shun {
            Some(shun) => Some(shun.failure.clone()),
            None if !self.has_room() || !self.has_link() => Some(Failure::Overload),
            None => None,
        };
        if let Some(failure) = failure {
            out.events.push(PeerEvent::Down { slot: id, failure, unsaid: None });
            return id;
        }
        self.next_session += 1;
        let session = self.next_session;
        let channel = Channel::new(&self.config, self.me.incarnation, session);
        let slot = Slot::new(engine.clone(), Some(endpoint.clone()), session, channel);
        self.targets.insert(target, id);
        let slot = self.slots.entry(id).or_insert(slot);
        if self.ranks.is_some() {
            slot.start(now);
            self.service(now, id, out);
        }
        id
    }

    /// The slot of a peer that is spoken to there, or tried.
    pub fn slot_of(&self, engine: &EngineId, endpoint: &Endpoint) -> Option<PeerSlot> {
        self.targets.get(&(engine.clone(), endpoint.clone())).copied()
    }

    /// Queues a message; before `Up` it waits for it.
    ///
    /// # Errors
    /// `Overload` when the queue is full or the message is longer than a frame may be,
    /// `PeerSilent` when the slot is down.
    pub fn send(
        &mut self,
        now: Nanos,
        slot: PeerSlot,
        message: Message,
        out: &mut Out<'_>,
    ) -> Result<(), Failure> {
        let Some(state) = self.slots.get_mut(&slot) else {
            return Err(Failure::PeerSilent);
        };
        state.channel.send(now, message, out.commands)?;
        self.rearm(slot);
        Ok(())
    }

    /// Says whether the owner waits for the peer, e.g. because transfers with it are under way.
    /// Only while it does, or while messages are unacknowledged, the peer is probed and its
    /// silence noticed. Unknown slots are ignored.
    pub fn watch(&mut self, now: Nanos, slot: PeerSlot, waiting: bool, out: &mut Out<'_>) {
        if let Some(state) = self.slots.get_mut(&slot) {
            state.channel.watch(now, waiting);
            self.service(now, slot, out);
        }
    }

    /// Does what is due.
    pub fn tick(&mut self, now: Nanos, out: &mut Out<'_>) {
        // Before the timer that tells it is gone.
        if self.stood_still(now) {
            for slot in self.slots.values_mut() {
                slot.excuse(now, &self.config);
            }
        }
        while let Some(timer) = self.timers.pop_due(now) {
            match timer {
                Timer::Link(link) => {
                    if self.links.contains_key(&link) {
                        self.hang_up(link, out);
                    }
                }
                Timer::Slot(id) => {
                    if let Some(slot) = self.slots.get_mut(&id) {
                        slot.armed = None;
                        self.service(now, id, out);
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

    /// Ends a conversation with `Down`. Unknown slots are ignored.
    pub fn fail(&mut self, now: Nanos, slot: PeerSlot, failure: Failure, out: &mut Out<'_>) {
        self.end(now, slot, failure, out);
    }

    /// Ends a conversation; no event follows. Unknown slots are ignored. Returns what is still to
    /// be said.
    pub fn close(&mut self, now: Nanos, slot: PeerSlot, out: &mut Out<'_>) -> Option<Box<Unsaid>> {
        self.retire(now, slot, out).and_then(|slot| Unsaid::of(&slot))
    }

    /// The peer, once it is up and until it is down.
    pub fn info(&self, slot: PeerSlot) -> Option<&PeerInfo> {
        self.slots.get(&slot)?.info.as_ref()
    }

    /// Sizes and counts; takes time in proportion to the number of peers.
    pub fn gauges(&self) -> PeerGauges {
        let remembered = [
            self.targets.len(),
            self.callers.len(),
            self.known.len(),
            self.shunned.len(),
            self.from.len(),
            self.timers.len(),
            self.gone.len(),
        ];
        let early: usize = self.slots.values().map(|slot| slot.channel.early()).sum();
        PeerGauges {
            peers: self.slots.len() as u32,
            up: self.slots.values().filter(|slot| slot.info.is_some()).count() as u32,
            links: self.links.len() as u32,
            queued: self.slots.values().map(|slot| slot.channel.queued() as u32).sum(),
            violations: self.violations,
            stale: self.stale,
            delivered: self.delivered,
            remembered: (early + remembered.iter().sum::<usize>()) as u32,
        }
    }

    /// A slot that no conversation had. The last one is for those that do not come about.
    fn fresh_slot(&mut self) -> PeerSlot {
        self.next_slot = (self.next_slot + 1).min(SLOT_MAX);
        PeerSlot(self.next_slot)
    }

    fn has_room(&self) -> bool {
        let room = self.slots.len() + self.reserved < self.config.peers_max as usize;
        room && self.next_slot < SLOT_MAX - 1
    }

    fn has_link(&self) -> bool {
        self.links.len() < self.config.links_max as usize
    }

    /// True if a peer that is up is known to have begun a new life after this one.
    pub fn is_past(&self, slot: PeerSlot, life: Incarnation) -> bool {
        let Some(info) = self.info(slot) else { return false };
        let past = self.known.get(&info.engine).and_then(|known| known.past);
        life < info.incarnation || life != info.incarnation && past.is_some_and(|past| life <= past)
    }

    /// This life of a peer that is up is over, though it may be higher than the one it is in.
    pub fn is_over(&mut self, slot: PeerSlot, life: Incarnation) {
        let Some(info) = self.slots.get(&slot).and_then(|slot| slot.info.as_ref()) else { return };
        if let Some(known) = self.known.get_mut(&info.engine).filter(|known| life > known.life) {
            known.past = known.past.max(Some(life));
        }
    }

    /// Keeps the latest life and session of a peer. If need be, the one whose conversations have
    /// been over for longest is forgotten: those that go on are no more than there may be peers.
    fn remember(&mut self, engine: &EngineId, life: Incarnation, session: u64) {
        let before = self.known.get(engine).copied();
        if let Some(place) = before.and_then(|known| known.gone) {
            self.gone.remove(&place);
        }
        if before.is_none()
            && self.known.len() >= self.config.peers_max as usize
            && let Some((_, oldest)) = self.gone.pop_first()
        {
            self.known.remove(&oldest);
        }
        let past = before.and_then(|known| known.past.max(Some(known.life)));
        let past = past.filter(|past| *past > life);
        self.known.insert(engine.clone(), Known { life, past, session, gone: None });
    }

    /// A conversation with the peer is over; there may be another one.
    fn leave_known(&mut self, engine: &EngineId) {
        let goes_on = |slot: &Slot| slot.engine == *engine && slot.info.is_some();
        if self.slots.values().any(goes_on) {
            return;
        }
        if let Some(known) = self.known.get_mut(engine).filter(|known| known.gone.is_none()) {
            self.next_gone += 1;
            known.gone = Some(self.next_gone);
            self.gone.insert(self.next_gone, engine.clone());
        }
    }

    /// True if this process stood still and may not have read what peers sent meanwhile.
    fn stood_still(&self, now: Nanos) -> bool {
        self.timers.next().is_some_and(|due| due + self.config.retransmit_max < now)
    }

    /// Does everything that is due in a slot.
    fn service(&mut self, now: Nanos, id: PeerSlot, out: &mut Out<'_>) {
        if self.stood_still(now)
            && let Some(slot) = self.slots.get_mut(&id)
        {
            slot.excuse(now, &self.config);
        }
        while let Some(slot) = self.slots.get_mut(&id) {
            let Some((_, due)) = slot.next(&self.config).filter(|(at, _)| *at <= now) else {
                break;
            };
            match due {
                Due::Unreachable => self.end(now, id, Failure::Unreachable, out),
                Due::Silent => self.end(now, id, Failure::PeerSilent, out),
                Due::Channel => slot.channel.tick(now, out.commands),
                Due::Hello(link) => self.repeat_hello(now, id, link, out),
                Due::Abandon(link) => {
                    slot.dial_again(now, &self.config);
                    self.hang_up(link, out);
                }
                Due::Mend => {
                    slot.mend();
                    self.dial(now, id, out);
                }
                Due::Dial => self.dial(now, id, out),
            }
        }
        self.rearm(id);
    }

    fn rearm(&mut self, id: PeerSlot) {
        let Some(slot) = self.slots.get_mut(&id) else { return };
        let at = slot.next(&self.config).map(|(at, _)| at);
        if at != slot.armed {
            slot.armed = at;
            match at {
                Some(at) => self.timers.arm(Timer::Slot(id), at),
                None => {
                    self.timers.cancel(&Timer::Slot(id));
                }
            }
        }
    }

    /// The conversation ends by itself: tells the owner, and the peer if a link is left.
    fn end(&mut self, now: Nanos, id: PeerSlot, failure: Failure, out: &mut Out<'_>) {
        let Some(slot) = self.retire(now, id, out) else { return };
        let unsaid = Unsaid::of(&slot);
        if let (None, Some(endpoint)) = (&slot.info, slot.endpoint) {
            self.shun(now, (slot.engine, endpoint), failure.clone(), slot.refused);
        }
        out.events.push(PeerEvent::Down { slot: id, failure, unsaid });
    }

    /// After repeated failures a target is left alone for longer and longer.
    fn shun(
        &mut self,
        now: Nanos,
        target: (EngineId, Endpoint),
        failure: Failure,
        life: Option<Incarnation>,
    ) {
        let known = self.shunned.contains_key(&target);
        if !known && self.shunned.len() >= self.config.peers_max as usize {
            let over = self.shunned.iter().find(|(_, shun)| shun.until <= now);
            let victim = over.or(self.shunned.first_key_value()).map(|(target, _)| target.clone());
            if let Some(victim) = victim {
                self.shunned.remove(&victim);
            }
        }
        let (first, most) = (self.config.retransmit, self.config.retransmit_max);
        let wait =
            self.shunned.get(&target).map_or(first, |shun| (shun.wait + shun.wait).min(most));
        self.shunned.insert(target, Shun { until: now + wait, wait, failure, life });
    }
}
