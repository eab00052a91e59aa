//! Payloads, and those who want them.

use super::ends::former_use;
use super::io::{
    ClaimId, FormerUse, KEY_BYTES_MAX, PayloadAnswer, PayloadClient, PayloadEffect, PayloadFailure,
    SlotId,
};
use super::note::ScopedKey;
use super::source::PeerHost;
use super::{PayloadCore, PayloadTimer, PayloadTurn};
use crate::core::ids::{EngineId, Incarnation};
use crate::core::time::Nanos;

/// Where a payload of another host came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CopyOrigin {
    pub(super) host: EngineId,
    pub(super) incarnation: Incarnation,
    /// As that host counts.
    pub(super) generation: u64,
    /// True if it is a chunk of the stream that its key names.
    pub(super) is_chunk: bool,
}

/// A payload that was put, until all its receivers have taken it. It owns its slot, as each claim
/// does.
#[derive(Debug)]
pub(super) struct HeldPayload {
    pub(super) slot: SlotId,
    generation: u64,
    /// True if it is a chunk of the stream that its key names, and was put here.
    pub(super) is_chunk: bool,
    /// Receivers that are still to come.
    left: u32,
    /// Receivers for whom it arrived, and who have not taken it.
    untaken: u32,
    /// The host that has it for those who want more of it; none if it was put here.
    pub(super) origin: Option<CopyOrigin>,
}

/// Producer of a payload.
#[derive(Debug)]
pub(super) enum PutOrigin {
    /// A client of this host, for so many receivers.
    Here { receivers: u32, is_chunk: bool },
    /// A client of another host, for one receiver of this one.
    Elsewhere(CopyOrigin),
}

impl HeldPayload {
    /// True if there is some of it for whoever comes.
    pub(super) fn is_free(&self) -> bool {
        self.left > 0
    }

    /// True if it is a chunk of its stream, wherever it was put.
    pub(super) fn was_put_as_chunk(&self) -> bool {
        self.is_chunk || self.origin.as_ref().is_some_and(|origin| origin.is_chunk)
    }
}

/// Who gets a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PayloadReceiver {
    Client(PayloadClient),
    /// All of another host.
    Host(PeerHost),
}

/// Who is to put what somebody waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WantSource {
    Anybody,
    /// Somebody of this host.
    Here,
    Process(PayloadClient),
    Host(EngineId),
}

/// Who waits for a payload, and for whom.
#[derive(Clone, Debug)]
pub(super) struct WaitingReceiver {
    pub(super) receiver: PayloadReceiver,
    pub(super) source: WantSource,
}

/// One payload for one receiver.
#[derive(Debug)]
pub(super) struct PayloadClaim {
    pub(super) receiver: PayloadReceiver,
    pub(super) slot: SlotId,
    place: ScopedKey,
    pub(super) generation: u64,
    is_taken: bool,
}

impl PayloadCore {
    pub(super) fn put(
        &mut self,
        client: PayloadClient,
        slot: SlotId,
        (place, receivers, is_chunk): (ScopedKey, u32, bool),
        turn: &mut PayloadTurn<'_>,
    ) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        if !state.reserved.remove(&slot) {
            return self.misused(client, "it has not reserved what it puts", turn);
        }
        if receivers == 0 {
            self.misused(client, "a payload has one receiver at least", turn);
            return self.let_go(slot, turn);
        }
        let failure = if is_chunk { self.begin_stream(client, &place, turn) } else { None };
        let answer = PayloadAnswer::Stored { slot, failure: failure.clone() };
        if failure.is_some() {
            self.let_go(slot, turn);
        } else {
            self.spent.remove(&place);
            self.hold(place, slot, PutOrigin::Here { receivers, is_chunk }, turn);
        }
        turn.push(PayloadEffect::Answer { client, answer });
    }

    /// There is a payload for so many receivers, which owns a slot.
    pub(super) fn hold(
        &mut self,
        place: ScopedKey,
        slot: SlotId,
        put: PutOrigin,
        turn: &mut PayloadTurn<'_>,
    ) {
        // What has the same key is an earlier generation: nobody gets it any more.
        self.withdraw(&place, turn);
        let generation = self.fresh();
        if self.config.hold != Nanos::ZERO {
            self.timers.arm(PayloadTimer::Hold(place.clone()), turn.now + self.config.hold);
        }
        let (left, is_chunk, origin) = match put {
            PutOrigin::Here { receivers, is_chunk } => (receivers, is_chunk, None),
            PutOrigin::Elsewhere(origin) => (1, false, Some(origin)),
        };
        let payload = HeldPayload { slot, generation, is_chunk, left, untaken: 0, origin };
        self.payloads.insert(place.clone(), payload);
        self.offer(&place, turn);
    }

    /// There is a payload for one receiver more.
    pub(super) fn hold_more(&mut self, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        if let Some(payload) = self.payloads.get_mut(place) {
            payload.left += 1;
        }
        self.offer(place, turn);
    }

    /// Why nobody waits for this here, if nobody does.
    pub(super) fn over(&self, place: &ScopedKey) -> Option<PayloadFailure> {
        if self.payloads.contains_key(place) {
            return None;
        }
        self.lost(place)
    }

    pub(super) fn wanted(
        &mut self,
        client: PayloadClient,
        (place, source): (ScopedKey, WantSource),
        turn: &mut PayloadTurn<'_>,
    ) {
        let over = match &source {
            // It is the other host that knows.
            WantSource::Host(host) if self.payloads.contains_key(&place) || self.knows(host) => {
                None
            }
            WantSource::Host(host) => Some(PayloadFailure::PeerGone(host.0.clone())),
            WantSource::Process(producer)
                if !self.clients.contains_key(producer) && !self.payloads.contains_key(&place) =>
            {
                self.over(&place).or(Some(PayloadFailure::ProducerGone))
            }
            WantSource::Anybody if self.may_be_put_elsewhere(&place) => None,
            _ => self.over(&place),
        };
        let Some(state) = self.clients.get_mut(&client) else { return };
        if state.wants.contains(&place.key) || state.arrived.contains_key(&place.key) {
            return;
        }
        let has = state.wants.len() + state.claims.len();
        let full = has >= self.config.payloads_max as usize;
        let long = place.key.text_len() > KEY_BYTES_MAX;
        let what = if long {
            "bytes in the names of a payload"
        } else {
            "payloads that one process wants"
        };
        let full = (full || long).then(|| PayloadFailure::Overload(what.into()));
        if let Some(failure) = over.or(full) {
            let former = self.former(&place);
            let answer = PayloadAnswer::Missing { key: place.key, failure, former };
            return turn.push(PayloadEffect::Answer { client, answer });
        }
        state.wants.insert(place.key.clone());
        self.await_payload(PayloadReceiver::Client(client), source, &place, turn);
        let state = self.clients.get(&client);
        if state.is_some_and(|state| state.wants.contains(&place.key)) {
            let answer = PayloadAnswer::Waits { key: place.key };
            turn.push(PayloadEffect::Answer { client, answer });
        }
    }

    /// One more waits for a payload, which may be there.
    pub(super) fn await_payload(
        &mut self,
        receiver: PayloadReceiver,
        source: WantSource,
        place: &ScopedKey,
        turn: &mut PayloadTurn<'_>,
    ) {
        let waiting = WaitingReceiver { receiver, source };
        self.wants.entry(place.clone()).or_default().push_back(waiting);
        self.offer(place, turn);
        self.ask_hosts(place, turn);
    }

    /// The next one who gets what is there.
    fn next_waiting(&mut self, place: &ScopedKey, is_copy: bool) -> Option<PayloadReceiver> {
        let waiting = self.wants.get_mut(place)?;
        // What came from another host came for those of this one. Only what they leave is for others.
        let is_client =
            |waits: &WaitingReceiver| matches!(waits.receiver, PayloadReceiver::Client(_));
        let client = waiting.iter().position(is_client);
        let next = match client.filter(|_| is_copy) {
            Some(client) => client,
            None if is_copy && planted!("what-is-left-of-a-copy-is-for-nobody") => return None,
            None => 0,
        };
        let receiver = waiting.remove(next)?.receiver;
        if waiting.is_empty() {
            self.wants.remove(place);
        }
        Some(receiver)
    }

    /// Hands a payload to those who want it.
    fn offer(&mut self, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        while let Some(payload) = self.payloads.get(place).filter(|payload| payload.left > 0) {
            let is_copy = payload.origin.is_some();
            let Some(receiver) = self.next_waiting(place, is_copy) else { return };
            let Some(payload) = self.payloads.get_mut(place) else { return };
            payload.left -= 1;
            payload.untaken += 1;
            let (slot, generation) = (payload.slot, payload.generation);
            self.slots.add_owner(slot);
            let claim = ClaimId(self.fresh());
            let (place, is_taken) = (place.clone(), false);
            let held = PayloadClaim { receiver, slot, place: place.clone(), generation, is_taken };
            self.claims.insert(claim, held);
            match receiver {
                PayloadReceiver::Client(client) => self.arrived(client, claim, place, turn),
                PayloadReceiver::Host(host) => self.lend(host, claim, place, turn),
            }
        }
    }

    fn arrived(
        &mut self,
        client: PayloadClient,
        claim: ClaimId,
        place: ScopedKey,
        turn: &mut PayloadTurn<'_>,
    ) {
        let Some(&PayloadClaim { slot, generation, .. }) = self.claims.get(&claim) else { return };
        if let Some(state) = self.clients.get_mut(&client) {
            state.wants.remove(&place.key);
            state.claims.insert(claim);
            state.arrived.insert(place.key.clone(), claim);
        }
        let (offset, bytes) = self.slots.place(slot);
        let answer =
            PayloadAnswer::Arrived { key: place.key.clone(), claim, offset, bytes, generation };
        turn.push(PayloadEffect::Answer { client, answer });
        self.ask_hosts(&place, turn);
    }

    pub(super) fn take(
        &mut self,
        client: PayloadClient,
        claim: ClaimId,
        turn: &mut PayloadTurn<'_>,
    ) {
        let its = PayloadReceiver::Client(client);
        if self.claims.get(&claim).is_none_or(|claim| claim.receiver != its) {
            return self.misused(client, "it has no such claim to take", turn);
        }
        self.take_claim(claim, turn);
    }

    /// A receiver has what it claims: it does not go to anybody else.
    pub(super) fn take_claim(&mut self, claim: ClaimId, turn: &mut PayloadTurn<'_>) {
        let Some(found) = self.claims.get_mut(&claim) else { return };
        if std::mem::replace(&mut found.is_taken, true) {
            return;
        }
        let (place, generation) = (found.place.clone(), found.generation);
        let client = match found.receiver {
            PayloadReceiver::Client(client) => Some(client),
            PayloadReceiver::Host(_) => None,
        };
        if let Some(state) = client.and_then(|client| self.clients.get_mut(&client)) {
            state.arrived.remove(&place.key);
        }
        let Some(payload) = self.same_generation(&place, generation) else { return };
        payload.untaken -= 1;
        let is_chunk = payload.is_chunk;
        if let Some(client) = client.filter(|_| is_chunk) {
            self.took_chunk(&place.stream(), client);
        }
        let Some(payload) = self.payloads.get(&place) else { return };
        if payload.left == 0 && payload.untaken == 0 {
            self.forget(&place, &PayloadFailure::Taken, turn);
        }
    }

    pub(super) fn release(
        &mut self,
        client: PayloadClient,
        claim: ClaimId,
        turn: &mut PayloadTurn<'_>,
    ) {
        let its = PayloadReceiver::Client(client);
        if self.claims.get(&claim).is_none_or(|claim| claim.receiver != its) {
            return self.misused(client, "it has no such claim to release", turn);
        }
        self.take_claim(claim, turn);
        if let Some(state) = self.clients.get_mut(&client) {
            state.claims.remove(&claim);
        }
        self.drop_claim(claim, turn);
    }

    /// A claim is over, and its owner of the slot with it.
    pub(super) fn drop_claim(&mut self, claim: ClaimId, turn: &mut PayloadTurn<'_>) {
        if let Some(claim) = self.claims.remove(&claim) {
            self.let_go(claim.slot, turn);
        }
    }

    pub(super) fn abandoned(
        &mut self,
        client: PayloadClient,
        place: &ScopedKey,
        turn: &mut PayloadTurn<'_>,
    ) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        let answer = PayloadAnswer::Abandoned { key: place.key.clone() };
        turn.push(PayloadEffect::Answer { client, answer });
        if state.wants.remove(&place.key) {
            return self.unwant(PayloadReceiver::Client(client), place, turn);
        }
        if let Some(claim) = state.arrived.remove(&place.key) {
            state.claims.remove(&claim);
            self.give_back(claim, turn);
        }
    }

    /// Takes one out of those who wait for a payload.
    pub(super) fn unwant(
        &mut self,
        receiver: PayloadReceiver,
        place: &ScopedKey,
        turn: &mut PayloadTurn<'_>,
    ) {
        let Some(waiting) = self.wants.get_mut(place) else { return };
        waiting.retain(|waits| waits.receiver != receiver);
        if waiting.is_empty() {
            self.wants.remove(place);
        }
        self.ask_hosts(place, turn);
    }

    /// What arrived for a receiver that did not take it is for the next one.
    pub(super) fn give_back(&mut self, claim: ClaimId, turn: &mut PayloadTurn<'_>) {
        let Some(claim) = self.claims.remove(&claim) else { return };
        if !claim.is_taken
            && !planted!("what-is-abandoned-is-lost")
            && let Some(payload) = self.same_generation(&claim.place, claim.generation)
        {
            payload.untaken -= 1;
            payload.left += 1;
            self.offer(&claim.place, turn);
        }
        self.let_go(claim.slot, turn);
    }

    pub(super) fn same_generation(
        &mut self,
        place: &ScopedKey,
        generation: u64,
    ) -> Option<&mut HeldPayload> {
        let same = |payload: &&mut HeldPayload| {
            payload.generation == generation || planted!("claims-know-no-generation")
        };
        self.payloads.get_mut(place).filter(same)
    }

    /// Nobody else gets what has this key. Its slot is free when those who have it let go of it.
    pub(super) fn withdraw(&mut self, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        if let Some(payload) = self.payloads.remove(place) {
            self.timers.cancel(&PayloadTimer::Hold(place.clone()));
            self.let_go(payload.slot, turn);
            self.settle_loans_of(place, turn);
        }
    }

    /// Withdraws a payload, and tells those who wait for it why. Of what came from another host there
    /// may be more.
    pub(super) fn forget(
        &mut self,
        place: &ScopedKey,
        why: &PayloadFailure,
        turn: &mut PayloadTurn<'_>,
    ) {
        let payload = self.payloads.get(place);
        let is_copy = payload.is_some_and(|payload| payload.origin.is_some());
        let is_chunk = payload.is_some_and(|payload| payload.is_chunk);
        self.withdraw(place, turn);
        if is_copy {
            self.ask_again(place, turn);
            return self.fail_local_wants(place, turn);
        }
        let is_later = is_chunk && place.key.chunk > Some(0);
        let former = if is_later { FormerUse::No } else { former_use(why) };
        self.spent.insert(place.clone(), (why.clone(), former));
        self.fail_wants(place, why, turn);
    }

    /// Tells all who wait for a payload that it does not come.
    pub(super) fn fail_wants(
        &mut self,
        place: &ScopedKey,
        why: &PayloadFailure,
        turn: &mut PayloadTurn<'_>,
    ) {
        for WaitingReceiver { receiver, .. } in self.wants.remove(place).unwrap_or_default() {
            self.fail_want(receiver, place, why, turn);
        }
        self.ask_hosts(place, turn);
    }

    /// What came from another host is gone. Who waits for what is put here waits in vain if that is
    /// over.
    fn fail_local_wants(&mut self, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        let over = self.over(place).filter(|_| !planted!("a-copy-leaves-others-waiting"));
        let Some(why) = over else { return };
        let waiting = self.wants.get(place).into_iter().flatten();
        let is_local = |waits: &&WaitingReceiver| {
            matches!(waits.source, WantSource::Here | WantSource::Process(_))
        };
        let local = waiting.filter(is_local).map(|waits| waits.receiver);
        for receiver in local.collect::<Vec<_>>() {
            self.unwant(receiver, place, turn);
            self.fail_want(receiver, place, &why, turn);
        }
    }

    /// Tells all hosts that wait for a payload that it does not come.
    pub(super) fn fail_hosts(
        &mut self,
        place: &ScopedKey,
        why: &PayloadFailure,
        turn: &mut PayloadTurn<'_>,
    ) {
        let waiting = self.wants.get(place).into_iter().flatten();
        let is_host = |receiver: &PayloadReceiver| matches!(receiver, PayloadReceiver::Host(_));
        let hosts = waiting.map(|waits| waits.receiver).filter(is_host);
        for receiver in hosts.collect::<Vec<_>>() {
            self.unwant(receiver, place, turn);
            self.fail_want(receiver, place, why, turn);
        }
    }

    pub(super) fn fail_want(
        &mut self,
        receiver: PayloadReceiver,
        place: &ScopedKey,
        why: &PayloadFailure,
        turn: &mut PayloadTurn<'_>,
    ) {
        self.fail_want_as(receiver, place, (why, FormerUse::No), turn);
    }

    pub(super) fn fail_want_as(
        &mut self,
        receiver: PayloadReceiver,
        place: &ScopedKey,
        (why, former): (&PayloadFailure, FormerUse),
        turn: &mut PayloadTurn<'_>,
    ) {
        let client = match receiver {
            PayloadReceiver::Client(client) => client,
            PayloadReceiver::Host(host) => return self.tell_missing(host, place, why, turn),
        };
        if let Some(state) = self.clients.get_mut(&client) {
            state.wants.remove(&place.key);
        }
        let (key, failure) = (place.key.clone(), why.clone());
        let answer = PayloadAnswer::Missing { key, failure, former };
        turn.push(PayloadEffect::Answer { client, answer });
    }

    /// Tells those who wait for what a process was to put that it is gone.
    pub(super) fn fail_wants_of(&mut self, producer: PayloadClient, turn: &mut PayloadTurn<'_>) {
        let mut lost = Vec::new();
        for (place, waiting) in &self.wants {
            let source = WantSource::Process(producer);
            let its = waiting.iter().filter(|waits| waits.source == source);
            if !self.payloads.contains_key(place) {
                lost.extend(its.map(|waits| (waits.receiver, place.clone())));
            }
        }
        for (receiver, place) in lost {
            self.unwant(receiver, &place, turn);
            self.fail_want(receiver, &place, &PayloadFailure::ProducerGone, turn);
        }
    }
}
