//! Clients, the pool's memory, and what has to hold.

use crate::names::{key, stream};
use crate::step::PayloadStep;
use kvferry_engine::core::payload::{
    ClaimId, PayloadAnswer, PayloadClient, PayloadConfig, PayloadCore, PayloadEffect,
    PayloadFailure, PayloadHook, PayloadInput, PayloadKey, PayloadStream, SlotId,
};
use kvferry_engine::core::{Gauges, Machine, Nanos, Outbox};
use std::collections::{BTreeMap, BTreeSet};

const PAGE: u64 = 4096;

/// What was put, as the one who put it knows.
#[derive(Clone, Debug)]
struct PutRecord {
    key: PayloadKey,
    deployment: usize,
    is_chunk: bool,
    left: u32,
    untaken: u32,
    /// Cleaned up, replaced or expired.
    is_over: bool,
}

/// A slot that a client may write.
#[derive(Debug)]
struct WritableSlot {
    slot: SlotId,
    pages: (u64, u64),
    stamp: u64,
    key: PayloadKey,
    receivers: u32,
}

#[derive(Debug)]
struct ReadClaim {
    claim: ClaimId,
    key: PayloadKey,
    pages: (u64, u64),
    stamp: u64,
    is_taken: bool,
}

#[derive(Debug)]
struct PayloadActor {
    id: PayloadClient,
    deployment: usize,
    stage: u8,
    tickets: BTreeMap<u64, (PayloadKey, u64, u32, Nanos)>,
    reserved: Vec<WritableSlot>,
    wants: BTreeSet<PayloadKey>,
    claims: Vec<ReadClaim>,
    /// Was abandoned and not answered.
    abandoned: Option<PayloadKey>,
}

pub(crate) struct PayloadWorld {
    core: PayloadCore,
    config: PayloadConfig,
    now: Nanos,
    out: Outbox<PayloadEffect>,
    actors: Vec<PayloadActor>,
    /// Who wrote each page last.
    memory: Vec<u64>,
    puts: BTreeMap<u64, PutRecord>,
    /// The latest put of each key.
    latest: BTreeMap<(usize, PayloadKey), u64>,
    /// When what was put expires.
    holds: BTreeMap<u64, Nanos>,
    ended: BTreeSet<(usize, PayloadStream)>,
    /// Streams that were cleaned up and have not begun anew.
    cleaned: BTreeSet<(usize, PayloadStream)>,
    /// The process that puts a stream which has begun, and the one that took a chunk of it last.
    lives: BTreeMap<(usize, PayloadStream), (PayloadClient, Option<PayloadClient>)>,
    /// Why what was put last is for nobody.
    refused: Option<PayloadFailure>,
    next: u64,
    misuses: u32,
}

fn stage_of(client: usize) -> (usize, u8) {
    [(0, 0), (0, 0), (0, 1), (0, 1), (1, 1)][client]
}

impl PayloadWorld {
    pub(crate) fn new(config: PayloadConfig) -> PayloadWorld {
        let mut world = PayloadWorld {
            core: PayloadCore::new(config.clone()),
            memory: vec![0; (config.pool / PAGE) as usize],
            config,
            now: Nanos::ZERO,
            out: Outbox::new(),
            actors: Vec::new(),
            puts: BTreeMap::new(),
            latest: BTreeMap::new(),
            holds: BTreeMap::new(),
            ended: BTreeSet::new(),
            cleaned: BTreeSet::new(),
            lives: BTreeMap::new(),
            refused: None,
            next: 0,
            misuses: 0,
        };
        for client in 0..5 {
            let actor = world.begin(client);
            world.actors.push(actor);
        }
        world
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn begin(&mut self, client: usize) -> PayloadActor {
        let (deployment, stage) = stage_of(client);
        let id = PayloadClient(self.fresh() as u32);
        let joined = PayloadHook::Joined {
            deployment: deployment.to_string().into(),
            stage: stage.to_string().into(),
        };
        let actor = PayloadActor {
            id,
            deployment,
            stage,
            tickets: BTreeMap::new(),
            reserved: Vec::new(),
            wants: BTreeSet::new(),
            claims: Vec::new(),
            abandoned: None,
        };
        self.tell(id, joined);
        actor
    }

    fn tell(&mut self, client: PayloadClient, hook: PayloadHook) {
        let input = PayloadInput::Hook { client, hook };
        self.core.handle(self.now, input, &mut self.out);
        self.answers();
    }

    fn answers(&mut self) {
        for effect in self.out.take() {
            match effect {
                PayloadEffect::Misuse { .. } => self.misuses += 1,
                PayloadEffect::Answer { client, answer } => self.answer(client, answer),
                effect => panic!("{effect:?}, without other hosts"),
            }
        }
    }

    fn actor(&mut self, id: PayloadClient) -> usize {
        self.actors.iter().position(|actor| actor.id == id).expect("nobody else is answered")
    }

    fn answer(&mut self, client: PayloadClient, answer: PayloadAnswer) {
        let at = self.actor(client);
        match answer {
            PayloadAnswer::Reserved { ticket, slot, offset } => {
                self.reserved(at, ticket, slot, offset)
            }
            PayloadAnswer::NotReserved { ticket, failure } => {
                let (_, bytes, _, until) =
                    self.actors[at].tickets.remove(&ticket).expect("it waits");
                match failure {
                    PayloadFailure::PoolFull { bytes: said, .. } => {
                        assert_eq!(
                            (said, until <= self.now),
                            (bytes, true),
                            "it waited for all of its time"
                        );
                    }
                    PayloadFailure::TooLong { .. } => assert!(bytes > self.config.pool),
                    PayloadFailure::Overload(what) if what.contains("slots") => {
                        assert!(until <= self.now, "it waited for all of its time");
                    }
                    PayloadFailure::Overload(_) => {
                        let waiting = self.actors[at].tickets.len();
                        assert!(waiting >= self.config.reservations_max as usize);
                    }
                    failure => panic!("{failure}"),
                }
            }
            PayloadAnswer::Arrived { key, claim, offset, bytes, .. } => {
                self.arrived(at, key, claim, (offset, bytes));
            }
            PayloadAnswer::Missing { key, failure, .. } => self.missing(at, &key, &failure),
            PayloadAnswer::Waits { key } => assert!(self.actors[at].wants.contains(&key)),
            PayloadAnswer::Stored { failure, .. } => self.refused = failure,
            PayloadAnswer::Abandoned { key } => {
                assert_eq!(self.actors[at].abandoned.take(), Some(key), "it is told what it said");
            }
        }
    }

    fn reserved(&mut self, at: usize, ticket: u64, slot: SlotId, offset: u64) {
        let (key, bytes, receivers, _) = self.actors[at].tickets.remove(&ticket).expect("it waits");
        let pages = (offset / PAGE, bytes.div_ceil(PAGE));
        assert_eq!(offset % PAGE, 0);
        assert!(offset + bytes <= self.config.pool);
        let stamp = self.fresh();
        // Whoever reads or writes there sees it.
        self.memory[pages.0 as usize..(pages.0 + pages.1) as usize].fill(stamp);
        self.actors[at].reserved.push(WritableSlot { slot, pages, stamp, key, receivers });
    }

    /// The pages have what was written for one payload.
    fn check(&self, pages: (u64, u64), stamp: u64) {
        let found = &self.memory[pages.0 as usize..(pages.0 + pages.1) as usize];
        assert!(found.iter().all(|page| *page == stamp), "{stamp} at {pages:?}: {found:?}");
    }

    fn arrived(&mut self, at: usize, key: PayloadKey, claim: ClaimId, place: (u64, u64)) {
        let actor = &mut self.actors[at];
        assert!(actor.wants.remove(&key), "{key} was wanted");
        let stamp = self.latest[&(actor.deployment, key.clone())];
        let put = self.puts.get_mut(&stamp).expect("it was put");
        assert!(!put.is_over && put.left > 0, "{key} is there for somebody: {put:?}");
        assert_eq!((put.deployment, &put.key), (actor.deployment, &key));
        (put.left, put.untaken) = (put.left - 1, put.untaken + 1);
        let pages = (place.0 / PAGE, place.1.div_ceil(PAGE));
        actor.claims.push(ReadClaim { claim, key, pages, stamp, is_taken: false });
        self.check(pages, stamp);
    }

    fn missing(&mut self, at: usize, key: &PayloadKey, failure: &PayloadFailure) {
        let actor = &mut self.actors[at];
        assert!(actor.wants.remove(key), "{key} was wanted");
        let latest = self.latest.get(&(actor.deployment, key.clone()));
        let is_there = latest.is_some_and(|put| !self.puts[put].is_over);
        match failure {
            PayloadFailure::Overload(_) => {
                let has = actor.wants.len() + actor.claims.len();
                assert!(has >= self.config.payloads_max as usize);
            }
            failure => assert!(!is_there, "{key} is there, and it is said that {failure}"),
        }
        if *failure == PayloadFailure::Ended {
            assert!(self.ended.contains(&(actor.deployment, key.stream.clone())), "{key}");
        }
    }

    pub(crate) fn step(&mut self, step: PayloadStep) {
        match step {
            PayloadStep::Reserve { client, key: named, bytes, receivers, wait } => {
                let ticket = self.fresh();
                let wait = Nanos::from_ms(wait);
                let wanted = (key(named), bytes, receivers, self.now + wait);
                self.actors[client].tickets.insert(ticket, wanted);
                self.tell(self.actors[client].id, PayloadHook::Reserve { ticket, bytes, wait });
            }
            PayloadStep::Written { client, put, is_chunk } => self.written(client, put, is_chunk),
            PayloadStep::GiveUp { client, key: named, is_chunk } => {
                let (key, failure) = (key(named), "no more".into());
                let deployment = self.actors[client].deployment;
                let hook = PayloadHook::GiveUp { key: key.clone(), is_chunk, failure };
                self.tell(self.actors[client].id, hook);
                self.nobody_waits(deployment, |waited| *waited == key);
            }
            PayloadStep::Drop { client, key: named } => {
                let (key, deployment) = (key(named), self.actors[client].deployment);
                if let Some(put) = self.latest.get(&(deployment, key.clone())) {
                    self.puts.get_mut(put).expect("it was put").is_over = true;
                }
                self.tell(self.actors[client].id, PayloadHook::Drop { key });
            }
            PayloadStep::Want { client, key: named } => self.want(client, key(named)),
            PayloadStep::Abandon { client, key: named } => self.abandon(client, key(named)),
            PayloadStep::Take { client } => self.take(client),
            PayloadStep::Release { client } => self.release(client),
            PayloadStep::End { client, request, fails, is_own } => {
                self.end(client, request, (fails, is_own));
            }
            PayloadStep::CleanUp { client, request, is_own } => {
                self.clean_up(client, request, is_own);
            }
            PayloadStep::Replace { client } => self.replace(client),
            PayloadStep::Lie { id, what } => self.lie(id, what),
            PayloadStep::Wait { ms } => self.wait(self.now + Nanos::from_ms(ms)),
        }
        self.holds();
    }

    fn end(&mut self, client: usize, request: u8, (fails, is_own): (bool, bool)) {
        let (stream, id) = (stream(request), self.actors[client].id);
        let deployment = self.actors[client].deployment;
        let at = (deployment, stream.clone());
        let holds = !is_own || self.lives.get(&at).is_none_or(|(producer, _)| *producer == id);
        // What was cleaned up stays so until its next first chunk.
        let ends = holds && (self.lives.contains_key(&at) || !self.cleaned.contains(&at));
        if ends {
            self.lives.remove(&at);
            self.cleaned.remove(&at);
        }
        if ends && !fails {
            self.ended.insert(at);
        }
        let failure = fails.then(|| "no more".into());
        self.tell(id, PayloadHook::End { stream: stream.clone(), failure, is_own });
        if holds {
            self.nobody_waits(deployment, |key| key.stream == stream);
        }
    }

    fn written(&mut self, client: usize, put: bool, is_chunk: bool) {
        if self.actors[client].reserved.is_empty() {
            return;
        }
        let WritableSlot { slot, pages, stamp, key, receivers } =
            self.actors[client].reserved.remove(0);
        self.check(pages, stamp);
        let id = self.actors[client].id;
        if !put {
            return self.tell(id, PayloadHook::Return { slot });
        }
        let deployment = self.actors[client].deployment;
        let is_chunk = is_chunk && key.chunk.is_some();
        if is_chunk && self.is_refused((id, slot), (deployment, &key)) {
            return;
        }
        if let Some(old) = self.latest.insert((deployment, key.clone()), stamp) {
            self.puts.get_mut(&old).expect("it was put").is_over = true;
        }
        let (left, key_) = (receivers, key.clone());
        let record =
            PutRecord { key: key_, deployment, is_chunk, left, untaken: 0, is_over: false };
        self.puts.insert(stamp, record);
        if self.config.hold != Nanos::ZERO {
            self.holds.insert(stamp, self.now + self.config.hold);
        }
        self.tell(id, PayloadHook::Put { slot, key, receivers, is_chunk });
        assert_eq!(self.refused.take(), None);
    }

    /// Puts a chunk of another process's stream, or of one that was cleaned up, which is for nobody.
    /// Otherwise the chunk belongs to the stream of this process, which the first chunk begins anew.
    fn is_refused(
        &mut self,
        (id, slot): (PayloadClient, SlotId),
        (deployment, key): (usize, &PayloadKey),
    ) -> bool {
        let at = (deployment, key.stream.clone());
        if key.chunk == Some(0) {
            let later = |put: &&mut PutRecord| {
                put.is_chunk && (put.deployment, &put.key.stream) == (at.0, &at.1)
            };
            self.puts.values_mut().filter(later).for_each(|put| put.is_over = true);
            self.lives.remove(&at);
            self.cleaned.remove(&at);
        }
        let is_others = self.lives.get(&at).is_some_and(|(producer, _)| *producer != id);
        let is_clean = self.cleaned.contains(&at) && !self.lives.contains_key(&at);
        if is_others || is_clean {
            let (key, receivers) = (key.clone(), 1);
            self.tell(id, PayloadHook::Put { slot, key, receivers, is_chunk: true });
            let failure =
                if is_others { PayloadFailure::Superseded } else { PayloadFailure::CleanedUp };
            assert_eq!(self.refused.take(), Some(failure));
            return true;
        }
        let taker = self.lives.get(&at).and_then(|(_, taker)| *taker);
        self.lives.insert(at.clone(), (id, taker));
        self.ended.remove(&at);
        false
    }

    fn want(&mut self, client: usize, key: PayloadKey) {
        let actor = &mut self.actors[client];
        let arrived = actor.claims.iter().any(|claim| claim.key == key && !claim.is_taken);
        if !arrived {
            actor.wants.insert(key.clone());
        }
        // Of one process of the stage that puts, or of any.
        let producer = match key.chunk {
            Some(1) => Some(self.actors[0].id),
            _ => None,
        };
        self.tell(self.actors[client].id, PayloadHook::Want { key, producer });
    }

    fn abandon(&mut self, client: usize, key: PayloadKey) {
        let actor = &mut self.actors[client];
        actor.wants.remove(&key);
        let arrived = |claim: &ReadClaim| claim.key == key && !claim.is_taken;
        if let Some(at) = actor.claims.iter().position(arrived) {
            let claim = actor.claims.remove(at);
            self.given_back(&claim);
        }
        self.actors[client].abandoned = Some(key.clone());
        self.tell(self.actors[client].id, PayloadHook::Abandon { key });
        assert_eq!(self.actors[client].abandoned, None, "it is answered");
    }

    fn given_back(&mut self, claim: &ReadClaim) {
        self.check(claim.pages, claim.stamp);
        let put = self.puts.get_mut(&claim.stamp).expect("it was put");
        (put.left, put.untaken) = (put.left + 1, put.untaken - 1);
    }

    fn taken(&mut self, client: PayloadClient, stamp: u64) {
        let put = self.puts.get_mut(&stamp).expect("it was put");
        put.untaken -= 1;
        let at = (put.deployment, put.key.stream.clone());
        let is_current = put.is_chunk && !put.is_over;
        if let Some((_, taker)) = self.lives.get_mut(&at).filter(|_| is_current) {
            *taker = Some(client);
        }
        put.is_over |= put.left == 0 && put.untaken == 0;
    }

    fn take(&mut self, client: usize) {
        let untaken = self.actors[client].claims.iter_mut().find(|claim| !claim.is_taken);
        let Some(claim) = untaken else { return };
        claim.is_taken = true;
        let (claim, stamp) = (claim.claim, claim.stamp);
        self.taken(self.actors[client].id, stamp);
        self.tell(self.actors[client].id, PayloadHook::Take { claim });
    }

    fn release(&mut self, client: usize) {
        let Some(claim) = self.actors[client].claims.pop() else { return };
        self.check(claim.pages, claim.stamp);
        if !claim.is_taken {
            self.taken(self.actors[client].id, claim.stamp);
        }
        self.tell(self.actors[client].id, PayloadHook::Release { claim: claim.claim });
    }

    fn clean_up(&mut self, client: usize, request: u8, is_own: bool) {
        let (stream, deployment) = (stream(request), self.actors[client].deployment);
        let (at, id) = ((deployment, stream.clone()), self.actors[client].id);
        let has_part = |(producer, taker): &(PayloadClient, Option<PayloadClient>)| {
            *producer == id || *taker == Some(id)
        };
        let holds = !is_own || self.lives.get(&at).is_none_or(has_part);
        let of_stream = |put: &&mut PutRecord| {
            let is_its = put.is_chunk || put.key.chunk.is_none();
            is_its && put.deployment == deployment && put.key.stream == stream
        };
        if holds {
            self.puts.values_mut().filter(of_stream).for_each(|put| put.is_over = true);
            self.lives.remove(&at);
            self.cleaned.insert(at);
        }
        self.tell(id, PayloadHook::CleanUp { stream: stream.clone(), is_own });
        if holds {
            self.nobody_waits(deployment, |key| key.stream == stream);
        }
    }

    fn replace(&mut self, client: usize) {
        let new = self.begin(client);
        let old = std::mem::replace(&mut self.actors[client], new);
        for claim in &old.claims {
            self.check(claim.pages, claim.stamp);
            if !claim.is_taken {
                self.given_back(claim);
            }
        }
        self.lives.retain(|_, (producer, _)| *producer != old.id);
        self.tell(old.id, PayloadHook::Left);
    }

    /// All of a stage die at once: whoever waits for it knows.
    fn stage_dies(&mut self, stage: (usize, u8)) {
        let of_stage = |actor: &PayloadActor| (actor.deployment, actor.stage) == stage;
        while let Some(at) = self.actors.iter().position(of_stage) {
            let old = self.actors.remove(at);
            for claim in old.claims.iter().filter(|claim| !claim.is_taken) {
                self.given_back(claim);
            }
            self.tell(old.id, PayloadHook::Left);
        }
        if stage.1 == 0 {
            self.nobody_waits(stage.0, |_| true);
        }
    }

    /// Nobody waits for what is not there.
    fn nobody_waits(&self, deployment: usize, of: impl Fn(&PayloadKey) -> bool) {
        for actor in self.actors.iter().filter(|actor| actor.deployment == deployment) {
            for key in actor.wants.iter().filter(|key| of(key)) {
                let latest = self.latest.get(&(deployment, key.clone()));
                let is_there = latest.is_some_and(|put| !self.puts[put].is_over);
                assert!(is_there, "{} waits for {key}", actor.id);
            }
        }
    }

    fn lie(&mut self, id: u64, what: u8) {
        let liar = PayloadClient(self.fresh() as u32);
        let hook = match what % 6 {
            0 => PayloadHook::Take { claim: ClaimId(id) },
            1 => PayloadHook::Release { claim: ClaimId(id) },
            2 => PayloadHook::Return { slot: SlotId(id) },
            3 => PayloadHook::Put {
                slot: SlotId(id),
                key: key((0, 0)),
                receivers: 1,
                is_chunk: true,
            },
            4 => PayloadHook::Want { key: key((0, 0)), producer: None },
            _ => PayloadHook::Reserve { ticket: id, bytes: 1, wait: Nanos::ZERO },
        };
        let before = self.misuses;
        // Whoever has not joined has nothing, and whoever has, nothing of others.
        if what < 128 && what % 6 < 4 {
            let joined = PayloadHook::Joined { deployment: "0".into(), stage: "9".into() };
            self.tell(liar, joined);
        }
        self.tell(liar, hook);
        assert_eq!(self.misuses, before + 1);
        if what < 128 && what % 6 < 4 {
            self.tell(liar, PayloadHook::Left);
        }
    }

    fn wait(&mut self, until: Nanos) {
        while let Some(at) = self.core.deadline().filter(|at| *at <= until) {
            self.now = self.now.max(at);
            let (due, held): (Vec<_>, Vec<_>) =
                self.holds.iter().map(|(put, at)| (*put, *at)).partition(|(_, at)| *at <= self.now);
            self.holds = held.into_iter().collect();
            for (put, _) in due {
                self.puts.get_mut(&put).expect("it was put").is_over = true;
            }
            self.core.handle(self.now, PayloadInput::Tick, &mut self.out);
            self.answers();
        }
        self.now = self.now.max(until);
    }

    /// Whoever waits, waits for something.
    fn holds(&mut self) {
        for actor in &self.actors {
            for key in &actor.wants {
                let latest = self.latest.get(&(actor.deployment, key.clone()));
                let for_it =
                    latest.map(|put| &self.puts[put]).filter(|put| !put.is_over && put.left > 0);
                assert!(
                    for_it.is_none(),
                    "{} waits for {key}, which is there: {for_it:?}",
                    actor.id
                );
            }
            for (ticket, (_, _, _, until)) in &actor.tickets {
                assert!(*until >= self.now, "ticket {ticket} of {} is overdue", actor.id);
            }
            for claim in &actor.claims {
                self.check(claim.pages, claim.stamp);
            }
            for slot in &actor.reserved {
                self.check(slot.pages, slot.stamp);
            }
        }
        let (gauges, limits) = (self.core.gauges(), self.config.limits());
        assert_eq!(gauges.violations, self.misuses);
        for (what, is, most) in [
            ("payloads", gauges.transfers, limits.transfers),
            ("slots", gauges.held, limits.held),
            ("reservations", gauges.queued, limits.queued),
            ("tombstones", gauges.tombstones, limits.tombstones),
            ("clients", gauges.peers, limits.peers),
            ("entries", gauges.entries, limits.entries),
            ("remembered", gauges.remembered, limits.remembered),
        ] {
            assert!(is <= most, "{is} {what}, {most} at most");
        }
    }

    /// When all are gone, nothing is left.
    pub(crate) fn finish(&mut self) {
        self.stage_dies((0, 0));
        self.holds();
        self.stage_dies((0, 1));
        self.stage_dies((1, 1));
        let last = PayloadClient(self.fresh() as u32);
        self.tell(last, PayloadHook::Joined { deployment: "0".into(), stage: "9".into() });
        for request in 0..3 {
            self.tell(last, PayloadHook::CleanUp { stream: stream(request), is_own: false });
        }
        self.tell(last, PayloadHook::Left);
        let other = PayloadClient(self.fresh() as u32);
        self.tell(other, PayloadHook::Joined { deployment: "1".into(), stage: "9".into() });
        for request in 0..3 {
            self.tell(other, PayloadHook::CleanUp { stream: stream(request), is_own: false });
        }
        self.tell(other, PayloadHook::Left);
        let Gauges { transfers, held, queued, peers, entries, .. } = self.core.gauges();
        assert_eq!([transfers, held, queued, peers, entries], [0; 5]);
        assert_eq!(self.core.free_bytes(), self.config.pool);
    }
}
