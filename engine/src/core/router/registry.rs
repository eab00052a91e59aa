//! The instances that registered.

use super::abandon_queue::AbandonQueue;
use super::discovery::{RegistrationEntry, rank_name};
use super::health::Health;
use super::io::{Dialects, PairMember, RouterConfig};
use super::load::{KnownLoad, LegWeights};
use super::prefixes::PrefixMemory;
use super::rejections::RejectReason;
use super::room::LegRoom;
use crate::core::dialect::moriio::address::ZmqAddress;
use crate::core::dialect::moriio::registration::MoriioRegistration;
use crate::core::ids::{ClientId, EngineId, Incarnation, LegId};
use crate::core::layout::{LayoutDigest, Mismatch};
use crate::core::message::{Registration, Role, ServedModels, TROUBLES_MAX};
use crate::core::recent_set::RecentSet;
use crate::core::time::Nanos;
use crate::fabric::{Endpoint, LinkId};
use crate::source::PeerSource;
pub(super) use hosts::HostLoss;
use models::ServedBefore;
use shares::NewPlace;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

/// One incarnation of one engine core as the router numbers it; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct InstanceId(pub(super) u64);

/// An engine core in one incarnation.
#[derive(Clone, Debug)]
pub(super) struct RegisteredInstance {
    /// What it said last.
    pub(super) registration: Registration,
    /// Where MoRIIO peers find it, if it speaks MoRIIO.
    pub(super) zmq: Option<ZmqAddress>,
    /// True if it speaks the native dialect.
    pub(super) native: bool,
    /// True if who registered it has proven to know the secret.
    pub(super) signed: bool,
    /// True until it answered a probe.
    pub(super) unproven: bool,
    /// Whence it registered first, if that is known.
    pub(super) source: Option<PeerSource>,
    /// When it said so.
    pub(super) registered: Nanos,
    /// No leg is sent from here on. Kept beside the timer because several instances expire at one
    /// moment, and the first must not fail over to the next.
    pub(super) expires: Nanos,
    /// What its legs told of it.
    pub(super) health: Health,
    /// Number of legs that it takes, learned from its busy answers.
    pub(super) room: LegRoom,
    /// True once the registration is over; only streams are left.
    pub(super) lost: bool,
    /// Tokens of its legs in flight, as charged by the pairing.
    pub(super) tokens: u64,
    /// The models that it listed when it was asked.
    pub(super) listed_models: Option<Arc<ServedModels>>,
    /// Its legs in flight.
    pub(super) legs: BTreeMap<LegId, ClientId>,
    /// Those of them that are held until the prefill has answered.
    pub(super) held: usize,
    /// What it has computed lately.
    pub(super) prefixes: PrefixMemory,
    /// When it was chosen last, counted in choices.
    pub(super) picked: u64,
    /// Of a prefill: when each decode was last chosen with it, counted in choices.
    pub(super) paired: BTreeMap<InstanceId, u64>,
    /// Of a prefill: the decodes that went without its KV since one last got it.
    pub(super) failing: BTreeMap<InstanceId, Health>,
    /// The link that it registered by last, while that is up.
    pub(super) link: Option<LinkId>,
    /// Why it is known to have no host that serves it now. It gets no legs until it registers again.
    pub(super) hostless: Option<HostLoss>,
    /// True if a later incarnation has its place: what is left here are its streams, which end with
    /// their HTTP connections.
    pub(super) replaced: bool,
    /// Of a prefill: what nobody fetches any more.
    pub(super) abandoned: AbandonQueue,
    /// Of a prefill: the decodes that do not fit, and why.
    pub(super) misfits: BTreeMap<InstanceId, Mismatch>,
    /// Of a decode: the prefills that it said are out of reach, with the number of the last prompt
    /// that did not come.
    pub(super) troubles: BTreeMap<InstanceId, u32>,
    /// The instance of the other role in the same server, which has the same KV cache.
    pub(super) beside: Option<InstanceId>,
    /// True if it registered anew in another role: what is left here are its legs in this one.
    pub(super) switched: bool,
    /// What it was in the other role, while that has legs.
    pub(super) follows: Option<InstanceId>,
    /// What its server said of its load.
    pub(super) load: Option<KnownLoad>,
    /// Its legs when its server was last asked for that.
    pub(super) legs_asked: usize,
}

impl RegisteredInstance {
    /// True if it is registered to take legs, whether or not it takes any now.
    pub(super) fn is_there(&self, now: Nanos) -> bool {
        !self.lost
            && !self.switched
            && (now < self.expires || planted!("expired-instances-get-legs"))
            && (!self.registration.draining || planted!("draining-instances-get-legs"))
    }

    /// True if a leg of `client` may be sent to it.
    pub(super) fn takes(&self, now: Nanos, client: ClientId) -> bool {
        self.is_there(now)
            && !self.unproven
            && (self.hostless.is_none() || planted!("instances-without-a-host-get-legs"))
            && (self.follows.is_none() || planted!("a-new-role-is-served-at-once"))
            && (self.has_room(now) || planted!("full-instances-get-legs"))
            && (!self.health.is_suspect(now) || planted!("suspects-get-legs"))
            && self.health.on_trial().is_none_or(|since| {
                self.legs.range(since..).next().is_none_or(|(_, tries)| *tries == client)
            })
    }

    /// True if a decode and a prefill have a dialect in common.
    pub(super) fn understands(&self, other: &RegisteredInstance) -> bool {
        self.dialects().meet(other.dialects())
    }

    /// How it is spoken to.
    pub(super) fn dialects(&self) -> Dialects {
        Dialects { native: self.native, moriio: self.zmq.is_some() }
    }

    /// What it said last.
    fn entry(&self) -> RegistrationEntry {
        let (registration, zmq) = (self.registration.clone(), self.zmq.clone());
        RegistrationEntry { registration, zmq, native: self.native, signed: self.signed }
    }

    /// What the other side of a transfer has to know.
    pub(super) fn party(&self) -> PairMember {
        let Registration { dp_rank, dp_size, tp, .. } = self.registration;
        PairMember { zmq: self.zmq.clone(), native: self.native, dp_rank, dp_size, tp }
    }

    /// What is kept of it while it is there, whether it has legs or not.
    fn remembered(&self) -> usize {
        let pairs =
            [self.paired.len(), self.failing.len(), self.misfits.len(), self.troubles.len()];
        let told = self.registration.troubles.len() + self.abandoned.len();
        pairs.iter().sum::<usize>() + told + self.prefixes.len()
    }

    /// True if it takes nothing more, and finishes what it has.
    pub(super) fn is_leaving(&self) -> bool {
        self.registration.draining || self.switched
    }

    /// True if nothing is expected of it any more.
    fn is_over(&self) -> bool {
        self.legs.is_empty() && (self.lost || self.is_leaving())
    }
}

/// What a registration that is in order did.
#[derive(Debug)]
pub(super) enum RegisterOutcome {
    /// Nothing: it repeats or precedes what is known.
    Stale,
    /// The instance is known by it now.
    Current {
        /// The instance; none if it only came to say that it is draining.
        instance_id: Option<InstanceId>,
        /// The incarnations before, which are over: its own, and that of another engine at its
        /// place. One that only makes room in the table is not
        /// [replaced](RegisteredInstance::replaced).
        replaced: Vec<InstanceId>,
        /// What it was in another role, which has legs.
        switched: Option<InstanceId>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InstancePresence {
    Live(InstanceId),
    Left,
}

#[derive(Clone, Debug)]
struct InstanceRecord {
    incarnation: Incarnation,
    sequence: u64,
    /// True if who said so has proven to know the secret.
    signed: bool,
    place: InstancePresence,
    /// A registration of an incarnation that seems to be before this one, heard when this one was
    /// over.
    set_back: Option<(Incarnation, u64)>,
}

impl InstanceRecord {
    /// True if an incarnation that seems to be before this one, which is over, registers for
    /// another time: a clock went back at a restart. What was only late comes once.
    fn clock_went_back(&mut self, incarnation: Incarnation, sequence: u64) -> bool {
        let before = self.set_back.replace((incarnation, sequence));
        before.is_some_and(|(known, earlier)| known == incarnation && earlier < sequence)
    }
}

/// All instances, and the names of as many that left.
#[derive(Debug)]
pub(super) struct Registry {
    pub(super) instances: BTreeMap<InstanceId, RegisteredInstance>,
    /// What legs weigh.
    pub(super) weights: LegWeights,
    known: BTreeMap<EngineId, InstanceRecord>,
    left: RecentSet<EngineId>,
    /// The models that instances of each role have served.
    served: ServedBefore,
    next_instance: u64,
    choices: u64,
}

impl Registry {
    pub(super) fn new(instances_max: u32) -> Registry {
        Registry {
            instances: BTreeMap::new(),
            weights: LegWeights::default(),
            known: BTreeMap::new(),
            left: RecentSet::new(instances_max),
            served: ServedBefore::default(),
            next_instance: 0,
            choices: 0,
        }
    }

    /// Takes a registration in. The legs of a replaced incarnation are still in its instance; the
    /// caller fails them over and removes it.
    pub(super) fn register(
        &mut self,
        now: Nanos,
        (mut entry, source): (RegistrationEntry, Option<PeerSource>),
        config: &RouterConfig,
    ) -> Result<RegisterOutcome, RejectReason> {
        entry.registration.troubles.truncate(TROUBLES_MAX);
        let registration = &entry.registration;
        well_formed::check(registration, entry.dialects())?;
        let (incarnation, sequence) = (registration.incarnation, registration.sequence);
        let mut replaced = Vec::new();
        if let Some(known) = self.known.get_mut(&registration.engine) {
            let is_over = match known.place {
                InstancePresence::Live(instance_id) => {
                    self.instances.get(&instance_id).is_none_or(|instance| instance.lost)
                }
                InstancePresence::Left => true,
            };
            let is_known = matches!(known.place, InstancePresence::Live(_));
            if known.signed && !entry.signed && is_known {
                return Err(RejectReason::SignedBefore);
            }
            // What anybody could say is not held against who has proven to know the secret.
            let is_first_signed = entry.signed && !known.signed;
            let is_stale = match incarnation.cmp(&known.incarnation) {
                _ if is_first_signed => false,
                Ordering::Less => !is_over || !known.clock_went_back(incarnation, sequence),
                Ordering::Equal => sequence <= known.sequence,
                Ordering::Greater => false,
            };
            if is_stale && !planted!("older-registrations-are-taken") {
                return Ok(RegisterOutcome::Stale);
            }
            match known.place {
                InstancePresence::Live(instance_id)
                    if known.incarnation == incarnation && !is_first_signed =>
                {
                    let instance =
                        self.instances.get_mut(&instance_id).expect("a live name has a slot");
                    refresh(instance, now, entry)?;
                    instance.expires = now + config.expiry;
                    known.sequence = sequence;
                    return Ok(RegisterOutcome::Current {
                        instance_id: Some(instance_id),
                        replaced,
                        switched: None,
                    });
                }
                InstancePresence::Live(instance_id) => replaced.push(instance_id),
                InstancePresence::Left => {}
            }
        }
        let draining = registration.draining;
        let displaced = match draining {
            true => None,
            false => self.clear_place((&entry, source), &mut replaced, config)?,
        };
        let switched = self.retire(registration, &mut replaced, displaced, config);
        let (engine, signed) = (registration.engine.clone(), entry.signed);
        let instance_id = (!draining).then(|| self.insert(now, (entry, source), config));
        let place = instance_id.map_or(InstancePresence::Left, InstancePresence::Live);
        let record = InstanceRecord { incarnation, sequence, signed, place, set_back: None };
        self.known.insert(engine.clone(), record);
        self.left.remove(&engine);
        if draining {
            self.leave(engine);
        }
        Ok(RegisterOutcome::Current { instance_id, replaced, switched })
    }

    /// Adds the instances that have to leave for a new one to those that it replaces. Returns the one
    /// that only makes room in the table.
    fn clear_place(
        &self,
        (entry, source): (&RegistrationEntry, Option<PeerSource>),
        replaced: &mut Vec<InstanceId>,
        config: &RouterConfig,
    ) -> Result<Option<InstanceId>, RejectReason> {
        replaced.extend(self.superseded_instance(entry, replaced)?);
        let (signed, is_static) = (entry.signed, entry.dialects().is_static());
        let new = NewPlace { signed, is_static, source, replaced };
        let displaced = self.make_place(new, config)?;
        replaced.extend(displaced);
        Ok(displaced)
    }

    /// The other engine that had the place of a new incarnation: a server that was restarted with
    /// other ports has another name, and what is left of the old one may go on registering. Newer
    /// is who was born later by its own word, which is the clock of one machine as both serve at
    /// one HTTP address; who lies about it takes the place, as by the name of the engine it could
    /// before. An instance that speaks MoRIIO only tells no birth and is older than all others.
    fn superseded_instance(
        &self,
        new: &RegistrationEntry,
        replaced: &[InstanceId],
    ) -> Result<Option<InstanceId>, RejectReason> {
        fn place(it: &Registration) -> (Role, u16, &Endpoint) {
            (it.role, it.dp_rank, &it.http)
        }
        let wanted = place(&new.registration);
        let mut here = self.instances.iter().filter(|(instance_id, instance)| {
            !instance.lost
                && !replaced.contains(instance_id)
                && place(&instance.registration) == wanted
        });
        let Some((instance_id, old)) = here.next() else { return Ok(None) };
        let born = |signed: bool, native: bool, it: &Registration| (signed, native, it.incarnation);
        if old.signed && !new.signed {
            Err(RejectReason::SignedBefore)
        } else if born(new.signed, new.native, &new.registration)
            > born(old.signed, old.native, &old.registration)
        {
            Ok(Some(*instance_id))
        } else {
            Err(RejectReason::Superseded)
        }
    }

    /// What the next instance will be numbered.
    pub(super) fn next_instance(&self) -> InstanceId {
        InstanceId(self.next_instance)
    }

    /// What a heartbeat of MoRIIO says: an entry for each of its DP ranks, and one that drains for
    /// each rank that its last incarnation had beyond. Such an instance has no incarnation; a
    /// heartbeat that says something else than the one before is taken for a new incarnation.
    pub(super) fn entries(&self, beat: &MoriioRegistration) -> Vec<RegistrationEntry> {
        let entry = |rank: u16| {
            let name = rank_name(beat, rank);
            let Some(known) = self.known.get(&name) else {
                return (RegistrationEntry::of_rank(beat, rank, Incarnation(1), 1), 0);
            };
            // An instance may have said any number.
            let sequence = known.sequence.saturating_add(1);
            let next = RegistrationEntry::of_rank(beat, rank, known.incarnation, sequence);
            let before = match known.place {
                InstancePresence::Live(instance_id) => self.instances.get(&instance_id),
                InstancePresence::Left => None,
            };
            let is_same =
                before.is_some_and(|instance| instance.entry().is_same_incarnation(&next));
            let size = before.map_or(0, |instance| instance.registration.dp_size);
            let incarnation = Incarnation(known.incarnation.0.saturating_add(1));
            (
                if is_same { next } else { RegistrationEntry::of_rank(beat, rank, incarnation, 1) },
                size,
            )
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

    /// Takes the incarnations that are replaced by these entries out of traffic, all before the
    /// first is replaced: its legs must not fail over to the next.
    pub(super) fn retire_replaced(&mut self, entries: &[RegistrationEntry]) {
        for Registration { engine, incarnation, .. } in entries.iter().map(|it| &it.registration) {
            if let Some(InstanceRecord {
                incarnation: before,
                place: InstancePresence::Live(instance_id),
                ..
            }) = self.known.get(engine)
                && before < incarnation
            {
                let instance = self.instances.get_mut(instance_id).expect("a live name has a slot");
                // Only who is signed replaces who was.
                instance.lost |= !instance.signed;
            }
        }
    }

    fn insert(
        &mut self,
        now: Nanos,
        (entry, source): (RegistrationEntry, Option<PeerSource>),
        config: &RouterConfig,
    ) -> InstanceId {
        let RegistrationEntry { registration, zmq, native, signed } = entry;
        let instance_id = InstanceId(self.next_instance);
        self.next_instance += 1;
        self.instances.insert(
            instance_id,
            RegisteredInstance {
                registration,
                zmq,
                native,
                signed,
                unproven: false,
                source,
                registered: now,
                expires: now + config.expiry,
                health: Health::default(),
                room: LegRoom::default(),
                lost: false,
                tokens: 0,
                listed_models: None,
                legs: BTreeMap::new(),
                held: 0,
                prefixes: PrefixMemory::new(config.prefixes_max),
                picked: 0,
                paired: BTreeMap::new(),
                failing: BTreeMap::new(),
                link: None,
                hostless: None,
                replaced: false,
                abandoned: AbandonQueue::default(),
                misfits: BTreeMap::new(),
                troubles: BTreeMap::new(),
                beside: None,
                switched: false,
                follows: None,
                load: None,
                legs_asked: 0,
            },
        );
        self.compare(instance_id);
        self.find_beside(instance_id);
        self.find_former(instance_id);
        instance_id
    }

    /// Charges a leg to an instance.
    pub(super) fn assign(
        &mut self,
        instance_id: InstanceId,
        leg: LegId,
        client: ClientId,
        tokens: u64,
    ) {
        self.choices += 1;
        let picked = self.choices;
        let instance = self.instance_mut(instance_id);
        instance.picked = picked;
        instance.tokens += tokens;
        let role = instance.registration.role;
        if let Some(load) = &mut instance.load {
            load.sent += 1;
        }
        let before = instance.legs.insert(leg, client);
        assert!(before.is_none(), "leg {leg} was sent twice");
        self.weights.sent(role, tokens);
    }

    /// Notes that the last choice paired `decode` with `prefill`.
    pub(super) fn note_pair(&mut self, prefill: InstanceId, decode: InstanceId) {
        let choice = self.choices;
        self.instance_mut(prefill).paired.insert(decode, choice);
    }

    /// Takes the charge of a leg back. Returns true if the instance was only waiting for that.
    pub(super) fn release(&mut self, instance_id: InstanceId, leg: LegId, tokens: u64) -> bool {
        let instance = self.instance_mut(instance_id);
        let had = instance.legs.remove(&leg).is_some();
        assert!(had && instance.tokens >= tokens, "leg {leg} was not charged to {instance_id:?}");
        if !planted!("charges-are-not-taken-back") {
            instance.tokens -= tokens;
        }
        instance.is_over()
    }

    /// True if the instance is leaving and has nothing left to do.
    pub(super) fn is_over(&self, instance_id: InstanceId) -> bool {
        self.instances.get(&instance_id).is_some_and(RegisteredInstance::is_over)
    }

    /// An instance, if it has not left.
    pub(super) fn get(&self, instance_id: InstanceId) -> Option<&RegisteredInstance> {
        self.instances.get(&instance_id)
    }

    /// An instance that has a leg or was just chosen.
    pub(super) fn instance_mut(&mut self, instance_id: InstanceId) -> &mut RegisteredInstance {
        self.instances.get_mut(&instance_id).expect("an instance with legs stays")
    }

    /// All instances of a role, oldest first.
    pub(super) fn of_role(
        &self,
        role: Role,
    ) -> impl Iterator<Item = (InstanceId, &RegisteredInstance)> {
        self.iter().filter(move |(_, instance)| instance.registration.role == role)
    }

    /// All instances, oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = (InstanceId, &RegisteredInstance)> {
        self.instances.iter().map(|(instance_id, instance)| (*instance_id, instance))
    }

    /// Number of instances, without those of which only streams are left.
    pub(super) fn len(&self) -> usize {
        self.instances.values().filter(|instance| !instance.replaced).count()
    }

    /// Legs in flight, as the instances count them.
    pub(super) fn legs(&self) -> usize {
        self.instances.values().map(|instance| instance.legs.len()).sum()
    }

    /// Names of instances, also of those that left, and what is kept of each. Takes time in
    /// proportion to the number of instances.
    pub(super) fn remembered(&self) -> usize {
        let kept = self.instances.values().map(RegisteredInstance::remembered);
        self.known.len() + self.left.len() + self.served.len() + kept.sum::<usize>()
    }
}

fn refresh(
    instance: &mut RegisteredInstance,
    now: Nanos,
    new: RegistrationEntry,
) -> Result<(), RejectReason> {
    fn fixed(r: &Registration) -> (Role, &Endpoint, [u16; 3], &Option<Arc<LayoutDigest>>) {
        (r.role, &r.http, [r.dp_rank, r.dp_size, r.tp], &r.fit)
    }
    if fixed(&instance.registration) != fixed(&new.registration) {
        return Err(RejectReason::Changed);
    }
    instance.registration = new.registration;
    instance.zmq = new.zmq;
    instance.native = new.native;
    instance.registered = now;
    instance.lost = false;
    // That the operator still names an instance does not show that it is there.
    if !instance.dialects().is_static() {
        instance.health.registered();
    }
    Ok(())
}

mod departures;
mod failures;
mod hosts;
pub(super) mod models;
mod pairs;
mod role_switch;
mod shares;
mod static_instances;
#[cfg(test)]
pub(super) mod tests;
mod unreachable_prefills;
mod well_formed;
