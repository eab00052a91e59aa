//! Brings payloads and those who want them together.

use super::io::{
    ClaimId, PayloadAnswer, PayloadClient, PayloadEffect, PayloadFailure, PayloadKey, SlotId,
};
use super::{PayloadCore, PayloadTimer, PayloadTurn};
use crate::core::time::Nanos;
use std::sync::Arc;

/// A key of one deployment.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ScopedKey {
    pub(super) deployment: Arc<str>,
    pub(super) key: PayloadKey,
}

/// A payload that was put, until all its receivers have taken it. It owns its slot, as each claim
/// does.
#[derive(Debug)]
pub(super) struct HeldPayload {
    slot: SlotId,
    generation: u64,
    /// Receivers that are still to come.
    left: u32,
    /// Receivers for whom it arrived, and who have not taken it.
    untaken: u32,
}

/// Who waits for a payload, and for whom.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitingReceiver {
    pub(super) client: PayloadClient,
    pub(super) producer: Option<PayloadClient>,
}

/// One payload for one receiver.
#[derive(Debug)]
pub(super) struct PayloadClaim {
    client: PayloadClient,
    slot: SlotId,
    place: ScopedKey,
    generation: u64,
    is_taken: bool,
}

impl PayloadCore {
    pub(super) fn put(
        &mut self,
        client: PayloadClient,
        slot: SlotId,
        (place, receivers): (ScopedKey, u32),
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
        // What has the same key is an earlier generation: nobody gets it any more.
        self.withdraw(&place, turn);
        self.spent.remove(&place);
        self.begin_stream(client, &place);
        let generation = self.fresh();
        if self.config.hold != Nanos::ZERO {
            self.timers.arm(PayloadTimer::Hold(place.clone()), turn.now + self.config.hold);
        }
        let payload = HeldPayload { slot, generation, left: receivers, untaken: 0 };
        self.payloads.insert(place.clone(), payload);
        self.offer(&place, turn);
    }

    pub(super) fn wanted(
        &mut self,
        client: PayloadClient,
        (place, producer): (ScopedKey, Option<PayloadClient>),
        turn: &mut PayloadTurn<'_>,
    ) {
        let is_gone = producer.is_some_and(|producer| !self.clients.contains_key(&producer));
        let Some(state) = self.clients.get_mut(&client) else { return };
        if state.wants.contains(&place.key) || state.arrived.contains_key(&place.key) {
            return;
        }
        let failure = if self.payloads.contains_key(&place) {
            None
        } else {
            let over = self.spent.get(&place).or_else(|| self.ended.get(&place.stream())).cloned();
            over.or(is_gone.then_some(PayloadFailure::ProducerGone))
        };
        let has = state.wants.len() + state.claims.len();
        let full = has >= self.config.payloads_max as usize;
        let full = full.then(|| PayloadFailure::Overload("payloads that one process wants".into()));
        let failure = failure.or(full);
        if let Some(failure) = failure {
            let answer = PayloadAnswer::Missing { key: place.key, failure };
            return turn.push(PayloadEffect::Answer { client, answer });
        }
        state.wants.insert(place.key.clone());
        let receiver = WaitingReceiver { client, producer };
        self.wants.entry(place.clone()).or_default().push_back(receiver);
        self.offer(&place, turn);
    }

    /// Hands a payload to those who want it.
    fn offer(&mut self, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        loop {
            let Some(payload) = self.payloads.get_mut(place).filter(|payload| payload.left > 0)
            else {
                return;
            };
            let Some(waiting) = self.wants.get_mut(place) else { return };
            let Some(WaitingReceiver { client, .. }) = waiting.pop_front() else { return };
            if waiting.is_empty() {
                self.wants.remove(place);
            }
            payload.left -= 1;
            payload.untaken += 1;
            let (slot, generation) = (payload.slot, payload.generation);
            self.slots.add_owner(slot);
            let claim = ClaimId(self.fresh());
            if let Some(state) = self.clients.get_mut(&client) {
                state.wants.remove(&place.key);
                state.claims.insert(claim);
                state.arrived.insert(place.key.clone(), claim);
            }
            let place = place.clone();
            let (offset, bytes) = self.slots.place(slot);
            let key = place.key.clone();
            let answer = PayloadAnswer::Arrived { key, claim, offset, bytes, generation };
            turn.push(PayloadEffect::Answer { client, answer });
            let is_taken = false;
            self.claims.insert(claim, PayloadClaim { client, slot, place, generation, is_taken });
        }
    }

    pub(super) fn take(
        &mut self,
        client: PayloadClient,
        claim: ClaimId,
        turn: &mut PayloadTurn<'_>,
    ) {
        let found = self.claims.get_mut(&claim).filter(|claim| claim.client == client);
        let Some(found) = found else {
            return self.misused(client, "it has no such claim to take", turn);
        };
        if std::mem::replace(&mut found.is_taken, true) {
            return;
        }
        let (place, generation) = (found.place.clone(), found.generation);
        if let Some(state) = self.clients.get_mut(&client) {
            state.arrived.remove(&place.key);
        }
        let Some(payload) = self.same_generation(&place, generation) else { return };
        payload.untaken -= 1;
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
        if self.claims.get(&claim).is_none_or(|claim| claim.client != client) {
            return self.misused(client, "it has no such claim to release", turn);
        }
        self.take(client, claim, turn);
        if let Some(state) = self.clients.get_mut(&client) {
            state.claims.remove(&claim);
        }
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
            return self.unwant(client, place);
        }
        if let Some(claim) = state.arrived.remove(&place.key) {
            state.claims.remove(&claim);
            self.give_back(claim, turn);
        }
    }

    /// Takes a client out of those who wait for a payload.
    pub(super) fn unwant(&mut self, client: PayloadClient, place: &ScopedKey) {
        let Some(waiting) = self.wants.get_mut(place) else { return };
        waiting.retain(|waits| waits.client != client);
        if waiting.is_empty() {
            self.wants.remove(place);
        }
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

    fn same_generation(&mut self, place: &ScopedKey, generation: u64) -> Option<&mut HeldPayload> {
        let same = |payload: &&mut HeldPayload| {
            payload.generation == generation || planted!("claims-know-no-generation")
        };
        self.payloads.get_mut(place).filter(same)
    }

    /// Nobody else gets what has this key. Its slot is free when those who have it let go of it.
    fn withdraw(&mut self, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        if let Some(payload) = self.payloads.remove(place) {
            self.timers.cancel(&PayloadTimer::Hold(place.clone()));
            self.let_go(payload.slot, turn);
        }
    }

    /// Withdraws a payload, and tells those who wait for it why.
    pub(super) fn forget(
        &mut self,
        place: &ScopedKey,
        why: &PayloadFailure,
        turn: &mut PayloadTurn<'_>,
    ) {
        self.withdraw(place, turn);
        self.spent.insert(place.clone(), why.clone());
        self.fail_wants(place, why, turn);
    }

    /// Tells all who wait for a payload that it does not come.
    pub(super) fn fail_wants(
        &mut self,
        place: &ScopedKey,
        why: &PayloadFailure,
        turn: &mut PayloadTurn<'_>,
    ) {
        for WaitingReceiver { client, .. } in self.wants.remove(place).unwrap_or_default() {
            self.fail_want(client, place, why, turn);
        }
    }

    fn fail_want(
        &mut self,
        client: PayloadClient,
        place: &ScopedKey,
        why: &PayloadFailure,
        turn: &mut PayloadTurn<'_>,
    ) {
        if let Some(state) = self.clients.get_mut(&client) {
            state.wants.remove(&place.key);
        }
        let answer = PayloadAnswer::Missing { key: place.key.clone(), failure: why.clone() };
        turn.push(PayloadEffect::Answer { client, answer });
    }

    /// Tells those who wait for what a process was to put that it is gone.
    pub(super) fn fail_wants_of(&mut self, producer: PayloadClient, turn: &mut PayloadTurn<'_>) {
        let mut lost = Vec::new();
        for (place, waiting) in &self.wants {
            let its = waiting.iter().filter(|waits| waits.producer == Some(producer));
            if !self.payloads.contains_key(place) {
                lost.extend(its.map(|waits| (waits.client, place.clone())));
            }
        }
        for (client, place) in lost {
            self.unwant(client, &place);
            self.fail_want(client, &place, &PayloadFailure::ProducerGone, turn);
        }
    }
}
