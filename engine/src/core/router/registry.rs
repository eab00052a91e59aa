//! The instances that registered.

use super::abandoned::Abandoned;
use super::discovery::{Entry, rank_name};
use super::health::Health;
use super::io::{Party, RouterConfig};
use super::prefixes::PrefixMemory;
use crate::core::dialect::moriio::address::ZmqAddress;
use crate::core::dialect::moriio::registration::Heartbeat;
use crate::core::ids::{ClientId, EngineId, Incarnation, LegId, TP_MAX};
use crate::core::layout::{Fit, Mismatch};
use crate::core::message::{Registration, Role, TROUBLES_MAX};
use crate::core::time::Nanos;
use crate::fabric::{Endpoint, LinkId};
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Longest name of an engine or endpoint, in bytes.
const TEXT_MAX: usize = 512;

/// One life of one engine core as the router numbers it; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Slot(pub(super) u64);

/// An engine core in one life.
#[derive(Clone, Debug)]
pub(super) struct Instance {
    /// What it said last.
    pub(super) registration: Registration,
    /// Where MoRIIO peers find it, if it speaks MoRIIO.
    pub(super) zmq: Option<ZmqAddress>,
    /// True if it speaks the native dialect.
    pub(super) native: bool,
    /// True until it answered a probe.
    pub(super) unproven: bool,
    /// When it said so.
    pub(super) registered: Nanos,
    /// No leg is sent from here on. Kept beside the timer because several instances expire at one
    /// moment, and the first must not fail over to the next.
    pub(super) expires: Nanos,
    /// What its legs told of it.
    pub(super) health: Health,
    /// True once the registration has expired; only streams are left.
    pub(super) lost: bool,
    /// Tokens of its legs in flight, as charged by the pairing.
    pub(super) tokens: u64,
    /// Its legs in flight.
    pub(super) legs: BTreeMap<LegId, ClientId>,
    /// What it has computed lately.
    pub(super) prefixes: PrefixMemory,
    /// When it was chosen last, counted in choices.
    pub(super) picked: u64,
    /// Of a prefill: when each decode was last chosen with it, counted in choices.
    pub(super) paired: BTreeMap<Slot, u64>,
    /// Of a prefill: the decodes that went without its KV since one last got it.
    pub(super) failing: BTreeMap<Slot, Health>,
    /// Of a prefill: what nobody fetches any more.
    pub(super) abandoned: Abandoned,
    /// Of a prefill: the decodes that do not fit, and why.
    pub(super) misfits: BTreeMap<Slot, Mismatch>,
    /// Of a decode: the prefills that it said are out of reach, with the number of the last prompt
    /// that did not come.
    pub(super) troubles: BTreeMap<Slot, u32>,
}

impl Instance {
    /// True if it is registered to take legs, whether or not it takes any now.
    pub(super) fn is_there(&self, now: Nanos) -> bool {
        !self.lost
            && (now < self.expires || planted!("expired-instances-get-legs"))
            && (!self.registration.draining || planted!("draining-instances-get-legs"))
    }

    /// True if a leg of `client` may be sent to it.
    pub(super) fn takes(&self, now: Nanos, client: ClientId) -> bool {
        self.is_there(now)
            && !self.unproven
            && (!self.health.is_suspect(now) || planted!("suspects-get-legs"))
            && self.health.on_trial().is_none_or(|since| {
                self.legs.range(since..).next().is_none_or(|(_, tries)| *tries == client)
            })
    }

    /// True if a decode and a prefill have a dialect in common.
    pub(super) fn understands(&self, other: &Instance) -> bool {
        self.native && other.native || self.zmq.is_some() && other.zmq.is_some()
    }

    /// What it said last.
    fn entry(&self) -> Entry {
        let (registration, zmq) = (self.registration.clone(), self.zmq.clone());
        Entry { registration, zmq, native: self.native }
    }

    /// What the other side of a transfer has to know.
    pub(super) fn party(&self) -> Party {
        let Registration { dp_rank, dp_size, tp, .. } = self.registration;
        Party { zmq: self.zmq.clone(), native: self.native, dp_rank, dp_size, tp }
    }

    /// True if nothing is expected of it any more.
    fn is_over(&self) -> bool {
        self.legs.is_empty() && (self.lost || self.registration.draining)
    }
}

/// Why a registration was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Reject {
    /// The frame is not a registration of a version that we speak.
    Malformed,
    /// A MoRIIO registration with an address or size with which every request would fail.
    Unusable,
    /// The name is empty, too long, or has control characters.
    Name,
    /// An endpoint is empty, too long, has control characters or spaces, or port 0 or above 65535.
    Endpoint,
    /// `dp_size` is 0 or `dp_rank` is not below it.
    DataParallel,
    /// `tp` is 0 or above [`TP_MAX`].
    TensorParallel,
    /// No engine can have the geometry or the rows that it says.
    Fit,
    /// Role, HTTP address, sizes or what has to fit changed within one incarnation.
    Changed,
    /// There are `instances_max` instances.
    Full,
    /// A newer engine serves at its HTTP address.
    Superseded,
}

/// Number of reasons.
pub(super) const REASONS: usize = Reject::Superseded as usize + 1;

impl fmt::Display for Reject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reject::Malformed => "not a registration",
            Reject::Unusable => "unusable address or size",
            Reject::Name => "bad engine name",
            Reject::Endpoint => "bad endpoint",
            Reject::DataParallel => "bad DP rank or size",
            Reject::TensorParallel => "bad TP size",
            Reject::Fit => "bad geometry or rows",
            Reject::Changed => {
                "role, HTTP address, sizes or geometry changed within one incarnation"
            }
            Reject::Full => "too many instances",
            Reject::Superseded => "a newer engine serves at its HTTP address",
        })
    }
}

/// What a registration that is in order did.
#[derive(Debug)]
pub(super) enum Registered {
    /// Nothing: it repeats or precedes what is known.
    Stale,
    /// The instance is known by it now.
    Current {
        /// The instance; none if it only came to say that it is draining.
        slot: Option<Slot>,
        /// The lives before, which are over: its own, and that of another engine at its place.
        replaced: Vec<Slot>,
    },
}

#[derive(Clone, Copy, Debug)]
enum Place {
    Live(Slot),
    /// Left; the number orders the ones that left.
    Left(u64),
}

#[derive(Clone, Debug)]
struct Known {
    incarnation: Incarnation,
    sequence: u64,
    place: Place,
    /// A registration of a life that seems to be before this one, heard when this one was over.
    set_back: Option<(Incarnation, u64)>,
}

impl Known {
    /// True if a life that seems to be before this one, which is over, registers for another time: a
    /// clock went back at a restart. What was only late comes once.
    fn comes_again(&mut self, life: Incarnation, sequence: u64) -> bool {
        let before = self.set_back.replace((life, sequence));
        before.is_some_and(|(known, earlier)| known == life && earlier < sequence)
    }
}

/// All instances, and the names of as many that left.
#[derive(Debug, Default)]
pub(super) struct Registry {
    instances: BTreeMap<Slot, Instance>,
    known: BTreeMap<EngineId, Known>,
    left: BTreeMap<u64, EngineId>,
    next_slot: u64,
    next_left: u64,
    choices: u64,
}

impl Registry {
    /// Takes a registration in. The legs of a replaced life are still in its instance; the caller
    /// fails them over and removes it.
    pub(super) fn register(
        &mut self,
        now: Nanos,
        mut entry: Entry,
        config: &RouterConfig,
    ) -> Result<Registered, Reject> {
        entry.registration.troubles.truncate(TROUBLES_MAX);
        let registration = &entry.registration;
        check(registration)?;
        let (incarnation, sequence) = (registration.incarnation, registration.sequence);
        let mut replaced = Vec::new();
        if let Some(known) = self.known.get_mut(&registration.engine) {
            let is_over = match known.place {
                Place::Live(slot) => self.instances.get(&slot).is_none_or(|instance| instance.lost),
                Place::Left(_) => true,
            };
            let is_stale = match incarnation.cmp(&known.incarnation) {
                Ordering::Less => !is_over || !known.comes_again(incarnation, sequence),
                Ordering::Equal => sequence <= known.sequence,
                Ordering::Greater => false,
            };
            if is_stale && !planted!("older-registrations-are-taken") {
                return Ok(Registered::Stale);
            }
            match known.place {
                Place::Live(slot) if known.incarnation == incarnation => {
                    let instance = self.instances.get_mut(&slot).expect("a live name has a slot");
                    refresh(instance, now, entry)?;
                    instance.expires = now + config.expiry;
                    known.sequence = sequence;
                    return Ok(Registered::Current { slot: Some(slot), replaced });
                }
                Place::Live(slot) => replaced.push(slot),
                Place::Left(_) => {}
            }
        }
        let draining = registration.draining;
        if !draining {
            replaced.extend(self.outdone(&entry, &replaced)?);
        }
        let live = self.instances.len() - replaced.len();
        if !draining && live >= config.instances_max as usize {
            return Err(Reject::Full);
        }
        for slot in &replaced {
            self.instance_mut(*slot).lost = true;
        }
        let engine = registration.engine.clone();
        let slot = (!draining).then(|| self.insert(now, entry, config));
        let place = match slot {
            Some(slot) => Place::Live(slot),
            None => self.new_left(&engine),
        };
        let set_back = None;
        let before = self.known.insert(engine, Known { incarnation, sequence, place, set_back });
        if let Some(Known { place: Place::Left(order), .. }) = before {
            self.left.remove(&order);
        }
        self.forget_oldest(config);
        Ok(Registered::Current { slot, replaced })
    }

    /// The other engine that had the place of a new life: a server that was restarted with other ports
    /// has another name, and what is left of the old one may go on registering. Newer is who was born
    /// later by its own word, which is the clock of one machine as both serve at one HTTP address; who
    /// lies about it takes the place, as by the name of the engine it could before. An instance that
    /// speaks MoRIIO only tells no birth and is older than all others.
    fn outdone(&self, new: &Entry, replaced: &[Slot]) -> Result<Option<Slot>, Reject> {
        fn place(it: &Registration) -> (Role, u16, &Endpoint) {
            (it.role, it.dp_rank, &it.http)
        }
        let wanted = place(&new.registration);
        let mut here = self.instances.iter().filter(|(slot, instance)| {
            !instance.lost && !replaced.contains(slot) && place(&instance.registration) == wanted
        });
        let Some((slot, old)) = here.next() else { return Ok(None) };
        let born = |native: bool, it: &Registration| (native, it.incarnation);
        if born(new.native, &new.registration) > born(old.native, &old.registration) {
            Ok(Some(*slot))
        } else {
            Err(Reject::Superseded)
        }
    }

    /// What the next instance will be numbered.
    pub(super) fn next_slot(&self) -> Slot {
        Slot(self.next_slot)
    }

    /// What a heartbeat of MoRIIO says: an entry for each of its DP ranks, and one that drains for
    /// each rank that its last life had beyond. Such an instance has no incarnation; a heartbeat
    /// that says something else than the one before is taken for a new life.
    pub(super) fn entries(&self, beat: &Heartbeat) -> Vec<Entry> {
        let entry = |rank: u16| {
            let name = rank_name(beat, rank);
            let Some(known) = self.known.get(&name) else {
                return (Entry::of_rank(beat, rank, Incarnation(1), 1), 0);
            };
            // An instance may have said any number.
            let sequence = known.sequence.saturating_add(1);
            let next = Entry::of_rank(beat, rank, known.incarnation, sequence);
            let before = match known.place {
                Place::Live(slot) => self.instances.get(&slot),
                Place::Left(_) => None,
            };
            let is_same = before.is_some_and(|instance| instance.entry().is_same_life(&next));
            let size = before.map_or(0, |instance| instance.registration.dp_size);
            let life = Incarnation(known.incarnation.0.saturating_add(1));
            (if is_same { next } else { Entry::of_rank(beat, rank, life, 1) }, size)
        };
        let (first, before) = entry(0);
        let told = beat.dp_size().get();
        let mut entries = vec![first];
        entries.extend((1..told).map(|rank| entry(rank).0));
        entries.extend((told..before).map(|rank| {
            let (mut gone, _) = entry(rank);
            gone.registration.dp_size = rank + 1;
            gone.registration.draining = true;
            gone
        }));
        entries
    }

    /// Takes the lives that are replaced by these entries out of traffic, all before the first is
    /// replaced: its legs must not fail over to the next.
    pub(super) fn outlive(&mut self, entries: &[Entry]) {
        for Registration { engine, incarnation, .. } in entries.iter().map(|it| &it.registration) {
            if let Some(Known { incarnation: before, place: Place::Live(slot), .. }) =
                self.known.get(engine)
                && before < incarnation
            {
                self.instances.get_mut(slot).expect("a live name has a slot").lost = true;
            }
        }
    }

    fn insert(&mut self, now: Nanos, entry: Entry, config: &RouterConfig) -> Slot {
        let Entry { registration, zmq, native } = entry;
        let slot = Slot(self.next_slot);
        self.next_slot += 1;
        self.instances.insert(
            slot,
            Instance {
                registration,
                zmq,
                native,
                unproven: false,
                registered: now,
                expires: now + config.expiry,
                health: Health::default(),
                lost: false,
                tokens: 0,
                legs: BTreeMap::new(),
                prefixes: PrefixMemory::new(config.prefixes_max),
                picked: 0,
                paired: BTreeMap::new(),
                failing: BTreeMap::new(),
                abandoned: Abandoned::default(),
                misfits: BTreeMap::new(),
                troubles: BTreeMap::new(),
            },
        );
        self.compare(slot);
        slot
    }

    /// Compares an instance with all that it could be paired with.
    fn compare(&mut self, slot: Slot) {
        let new = &self.instances[&slot];
        let (Some(fit), role) = (new.registration.fit.clone(), new.registration.role) else {
            return;
        };
        let mut found = Vec::new();
        for (other, instance) in &self.instances {
            let theirs = &instance.registration;
            let Some(their_fit) = theirs.fit.as_ref().filter(|_| theirs.role != role) else {
                continue;
            };
            let (source, sink, pair) = match role {
                Role::Prefill => (&fit, their_fit, (slot, *other)),
                Role::Decode => (their_fit, &fit, (*other, slot)),
            };
            found.extend(source.check(sink).err().map(|why| (pair, why)));
        }
        for ((prefill, decode), why) in found {
            self.instance_mut(prefill).misfits.insert(decode, why);
        }
    }

    /// Why a pair is not made, if there are prefills and decodes that could talk and none of them
    /// fit.
    pub(super) fn only_misfits(&self) -> Option<&Mismatch> {
        let mut why = None;
        for (_, prefill) in self.of_role(Role::Prefill) {
            for (slot, decode) in self.of_role(Role::Decode) {
                let mode = prefill.registration.mode == decode.registration.mode;
                if !mode || !decode.understands(prefill) {
                    continue;
                }
                match prefill.misfits.get(&slot) {
                    Some(misfit) => why = Some(misfit),
                    None => return None,
                }
            }
        }
        why
    }

    fn new_left(&mut self, engine: &EngineId) -> Place {
        let order = self.next_left;
        self.next_left += 1;
        self.left.insert(order, engine.clone());
        Place::Left(order)
    }

    fn forget_oldest(&mut self, config: &RouterConfig) {
        while self.left.len() > config.instances_max as usize {
            let (_, engine) = self.left.pop_first().expect("longer than a limit");
            self.known.remove(&engine);
        }
    }

    /// Removes an instance whose legs have ended; its name is remembered.
    pub(super) fn remove(&mut self, slot: Slot, config: &RouterConfig) {
        let Some(instance) = self.instances.remove(&slot) else { return };
        assert!(instance.legs.is_empty() && instance.tokens == 0, "legs left on {slot:?}");
        for other in self.instances.values_mut() {
            other.paired.remove(&slot);
            other.failing.remove(&slot);
            other.misfits.remove(&slot);
            other.troubles.remove(&slot);
        }
        let engine = &instance.registration.engine;
        if matches!(self.known.get(engine), Some(Known { place: Place::Live(s), .. }) if *s == slot)
        {
            let place = self.new_left(engine);
            self.known.get_mut(engine).expect("just seen").place = place;
            self.forget_oldest(config);
        }
    }

    /// Charges a leg to an instance.
    pub(super) fn assign(&mut self, slot: Slot, leg: LegId, client: ClientId, tokens: u64) {
        self.choices += 1;
        let picked = self.choices;
        let instance = self.instance_mut(slot);
        instance.picked = picked;
        instance.tokens += tokens;
        let before = instance.legs.insert(leg, client);
        assert!(before.is_none(), "leg {leg} was sent twice");
    }

    /// Notes that the last choice paired `decode` with `prefill`.
    pub(super) fn note_pair(&mut self, prefill: Slot, decode: Slot) {
        let choice = self.choices;
        self.instance_mut(prefill).paired.insert(decode, choice);
    }

    /// Takes the charge of a leg back. Returns true if the instance was only waiting for that.
    pub(super) fn release(&mut self, slot: Slot, leg: LegId, tokens: u64) -> bool {
        let instance = self.instance_mut(slot);
        let had = instance.legs.remove(&leg).is_some();
        assert!(had && instance.tokens >= tokens, "leg {leg} was not charged to {slot:?}");
        if !planted!("charges-are-not-taken-back") {
            instance.tokens -= tokens;
        }
        instance.is_over()
    }

    /// A link of registrations is down.
    pub(super) fn unlink(&mut self, link: LinkId) {
        self.instances.values_mut().for_each(|instance| instance.abandoned.unlink(link));
    }

    /// True if the instance is leaving and has nothing left to do.
    pub(super) fn is_over(&self, slot: Slot) -> bool {
        self.instances.get(&slot).is_some_and(Instance::is_over)
    }

    /// An instance, if it has not left.
    pub(super) fn get(&self, slot: Slot) -> Option<&Instance> {
        self.instances.get(&slot)
    }

    /// An instance that has a leg or was just chosen.
    pub(super) fn instance_mut(&mut self, slot: Slot) -> &mut Instance {
        self.instances.get_mut(&slot).expect("an instance with legs stays")
    }

    /// All instances of a role, oldest first.
    pub(super) fn of_role(&self, role: Role) -> impl Iterator<Item = (Slot, &Instance)> {
        self.iter().filter(move |(_, instance)| instance.registration.role == role)
    }

    /// All instances, oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Slot, &Instance)> {
        self.instances.iter().map(|(slot, instance)| (*slot, instance))
    }

    /// Number of instances.
    pub(super) fn len(&self) -> usize {
        self.instances.len()
    }
}

fn refresh(instance: &mut Instance, now: Nanos, new: Entry) -> Result<(), Reject> {
    fn fixed(r: &Registration) -> (Role, &Endpoint, [u16; 3], &Option<Arc<Fit>>) {
        (r.role, &r.http, [r.dp_rank, r.dp_size, r.tp], &r.fit)
    }
    if fixed(&instance.registration) != fixed(&new.registration) {
        return Err(Reject::Changed);
    }
    instance.registration = new.registration;
    instance.zmq = new.zmq;
    instance.native = new.native;
    instance.registered = now;
    instance.lost = false;
    instance.health.registered();
    Ok(())
}

fn check(registration: &Registration) -> Result<(), Reject> {
    let Registration { engine, http, control, dp_rank, dp_size, tp, fit, .. } = registration;
    if engine.0.is_empty() || engine.0.len() > TEXT_MAX || engine.0.contains(char::is_control) {
        return Err(Reject::Name);
    }
    if !is_endpoint(&http.0) || !is_endpoint(&control.0) {
        return Err(Reject::Endpoint);
    }
    if dp_rank >= dp_size {
        return Err(Reject::DataParallel);
    }
    if !(1..=TP_MAX).contains(tp) {
        return Err(Reject::TensorParallel);
    }
    if fit.as_ref().is_some_and(|fit| fit.check(fit).is_err()) {
        return Err(Reject::Fit);
    }
    Ok(())
}

/// An endpoint may name its host and scheme as it likes; only what would break a header or can
/// never be dialled is refused.
fn is_endpoint(text: &str) -> bool {
    let plain = |c: char| !c.is_control() && !c.is_whitespace();
    let port_fits = match text.rsplit_once(':') {
        Some((_, port)) if !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) => {
            port.parse::<u16>().is_ok_and(|port| port > 0)
        }
        _ => true,
    };
    !text.is_empty() && text.len() <= TEXT_MAX && text.chars().all(plain) && port_fits
}

mod sizes;
#[cfg(test)]
pub(super) mod tests;
mod troubles;
