//! Payloads that senders have, on their way into the pool.

use super::io::{ForeignPayload, OmniMoriEffect, OmniMoriReport, PREAMBLE_BYTES};
use super::keys::request_id;
use super::{OmniMori, OmniMoriTimer, StageTurn};
use crate::core::dialect::omni_mori::{ConnectorCall, PullAnswer, PullRequest, QueryAnswer};
use crate::core::payload::{PayloadFailure, PayloadHook, PayloadKey, SlotId};
use crate::core::time::Nanos;
use crate::fabric::{Endpoint, LinkId, RegionDesc, RegionId};
use std::sync::Arc;

/// A payload that a sender is to write into the pool.
#[derive(Debug)]
pub(super) struct StageFetch {
    pub(super) sender: Endpoint,
    /// The connection by which it is asked for now; none while it waits for one.
    pub(super) link: Option<LinkId>,
    state: ForeignFetchState,
    failures: u32,
    polls: u32,
}

#[derive(Debug)]
enum ForeignFetchState {
    /// Its sender is asked whether it has it.
    Asking,
    /// It is asked again in a while.
    Pausing,
    /// There is no room for it yet.
    Reserving(u64, (u64, bool)),
    Registering(FetchSlot),
    Pulling(FetchSlot, RegionDesc),
    /// Its sender may write into its slot until this is answered.
    Revoking(FetchSlot, AfterRevoke),
}

/// A slot of the pool, of which its sender has a part.
#[derive(Clone, Copy, Debug)]
struct FetchSlot {
    slot: SlotId,
    region: RegionId,
    foreign: ForeignPayload,
}

#[derive(Debug)]
enum AfterRevoke {
    Put,
    Retry(Arc<str>),
    Fail(Arc<str>),
    Drop,
}

impl OmniMori {
    pub(super) fn fetch(&mut self, key: PayloadKey, sender: Endpoint, turn: &mut StageTurn<'_>) {
        if self.fetches.contains_key(&key) {
            return;
        }
        if self.fetches.len() >= self.config.settings.fetches_max as usize {
            return self.failed(&key, "too many payloads are fetched", turn);
        }
        let (state, link) = (ForeignFetchState::Asking, None);
        let fetch = StageFetch { sender: sender.clone(), link, state, failures: 0, polls: 0 };
        self.fetches.insert(key.clone(), fetch);
        let until = turn.now + self.config.settings.fetch;
        self.timers.arm(OmniMoriTimer::Fetch(key.clone()), until);
        self.enqueue(&sender, key, turn);
    }

    /// Nobody wants it. What its sender may write stays until it may not.
    pub(super) fn stop(&mut self, key: &PayloadKey, turn: &mut StageTurn<'_>) {
        self.end_with(key, AfterRevoke::Drop, turn);
    }

    pub(super) fn fetch_overdue(&mut self, key: &PayloadKey, turn: &mut StageTurn<'_>) {
        let Some(fetch) = self.fetches.get(key) else { return };
        let why = format!("{} does not have it, for too long", fetch.sender);
        self.end_with(key, AfterRevoke::Fail(why.into()), turn);
    }

    /// Ends a fetch as soon as its slot is nobody else's.
    fn end_with(&mut self, key: &PayloadKey, end: AfterRevoke, turn: &mut StageTurn<'_>) {
        self.give_up_link(key, turn);
        let Some(fetch) = self.fetches.get_mut(key) else { return };
        match &mut fetch.state {
            // It can be revoked when it is registered.
            ForeignFetchState::Registering(slot) => {
                fetch.state = ForeignFetchState::Revoking(*slot, end)
            }
            ForeignFetchState::Pulling(slot, _) => {
                fetch.state = ForeignFetchState::Revoking(*slot, end);
                self.revoke(key, turn);
            }
            // What is whole is put: its sender has it no more.
            ForeignFetchState::Revoking(_, AfterRevoke::Put) => {}
            ForeignFetchState::Revoking(_, after) => *after = end,
            ForeignFetchState::Reserving(ticket, _) => {
                self.tickets.remove(ticket);
                self.finish(key, end, turn);
            }
            ForeignFetchState::Asking | ForeignFetchState::Pausing => self.finish(key, end, turn),
        }
    }

    fn finish(&mut self, key: &PayloadKey, end: AfterRevoke, turn: &mut StageTurn<'_>) {
        match end {
            AfterRevoke::Retry(why) => self.try_again(key, why, turn),
            AfterRevoke::Fail(why) => self.failed(key, &why, turn),
            AfterRevoke::Drop | AfterRevoke::Put => self.forget_fetch(key),
        }
    }

    fn forget_fetch(&mut self, key: &PayloadKey) {
        let Some(fetch) = self.fetches.remove(key) else { return };
        for timer in [OmniMoriTimer::Fetch, OmniMoriTimer::Poll, OmniMoriTimer::Revoke] {
            self.timers.cancel(&timer(key.clone()));
        }
        self.dequeue(&fetch.sender, key);
    }

    /// Tells its receivers that it does not come.
    pub(super) fn failed(&mut self, key: &PayloadKey, why: &str, turn: &mut StageTurn<'_>) {
        self.forget_fetch(key);
        let (key, why): (_, Arc<str>) = (key.clone(), why.into());
        let given_up = (key.clone(), why.clone());
        turn.push(PayloadHook::GiveUp { key: given_up.0, is_chunk: false, failure: given_up.1 });
        turn.push(OmniMoriReport::Fetched { key, outcome: Err(why) });
    }

    /// Asks once more, unless that was in vain often enough.
    fn try_again(&mut self, key: &PayloadKey, why: Arc<str>, turn: &mut StageTurn<'_>) {
        let (tries, pause) = (self.config.settings.tries_max, self.config.settings.poll_max);
        let Some(fetch) = self.fetches.get_mut(key) else { return };
        fetch.failures += 1;
        if fetch.failures >= tries {
            let why = format!("{}: {why}", fetch.sender);
            return self.failed(key, &why, turn);
        }
        self.pause(key, pause, turn);
    }

    fn pause(&mut self, key: &PayloadKey, pause: Nanos, turn: &mut StageTurn<'_>) {
        if let Some(fetch) = self.fetches.get_mut(key) {
            fetch.state = ForeignFetchState::Pausing;
            self.timers.arm(OmniMoriTimer::Poll(key.clone()), turn.now + pause);
        }
    }

    pub(super) fn poll(&mut self, key: &PayloadKey, turn: &mut StageTurn<'_>) {
        let Some(fetch) = self.fetches.get_mut(key) else { return };
        fetch.state = ForeignFetchState::Asking;
        let sender = fetch.sender.clone();
        self.enqueue(&sender, key.clone(), turn);
    }

    /// What its sender is to be asked, and how long the answer may take; none if nothing.
    pub(super) fn call_of(&self, key: &PayloadKey) -> Option<(ConnectorCall, Nanos)> {
        let request_id = request_id(key).into();
        match &self.fetches.get(key)?.state {
            ForeignFetchState::Asking => {
                Some((ConnectorCall::Query { request_id }, self.config.settings.query))
            }
            ForeignFetchState::Pulling(slot, desc) => {
                let bytes = slot.foreign.bytes;
                let pull = PullRequest {
                    request_id,
                    engine: self.config.address.0.clone(),
                    memory: desc.0.clone(),
                    dst_offset: 0,
                    length: bytes,
                };
                Some((ConnectorCall::Pull(pull), self.config.settings.pull_time(bytes)))
            }
            _ => None,
        }
    }

    /// Its sender does not answer, or the connection to it is lost.
    pub(super) fn call_lost(&mut self, key: &PayloadKey, why: &str, turn: &mut StageTurn<'_>) {
        if let Some(fetch) = self.fetches.get_mut(key) {
            fetch.link = None;
            self.end_with(key, AfterRevoke::Retry(why.into()), turn);
        }
    }

    /// Its sender cannot be reached.
    pub(super) fn call_unreachable(
        &mut self,
        key: &PayloadKey,
        sender: &Endpoint,
        turn: &mut StageTurn<'_>,
    ) {
        let why = format!("{sender} cannot be reached");
        self.end_with(key, AfterRevoke::Fail(why.into()), turn);
    }

    /// Its sender answered.
    pub(super) fn call_answered(
        &mut self,
        key: &PayloadKey,
        parts: &[Vec<u8>],
        turn: &mut StageTurn<'_>,
    ) {
        let Some(fetch) = self.fetches.get_mut(key) else { return };
        let sender = fetch.sender.clone();
        fetch.link = None;
        let broken = match fetch.state {
            ForeignFetchState::Asking => match QueryAnswer::decode(parts) {
                Ok(answer) => return self.query_answered(key, answer, turn),
                Err(why) => why,
            },
            ForeignFetchState::Pulling(..) => match PullAnswer::decode(parts) {
                Ok(PullAnswer::Done) => return self.end_with(key, AfterRevoke::Put, turn),
                Ok(PullAnswer::Failed(why)) => {
                    let why = if why.is_empty() { "it says trans_error".into() } else { why };
                    return self.end_with(key, AfterRevoke::Retry(why), turn);
                }
                Err(why) => why,
            },
            _ => return,
        };
        self.violation(Some(sender), &broken.to_string(), turn);
        self.end_with(key, AfterRevoke::Retry(broken.to_string().into()), turn);
    }

    fn query_answered(&mut self, key: &PayloadKey, answer: QueryAnswer, turn: &mut StageTurn<'_>) {
        let (first, most) = (self.config.settings.poll, self.config.settings.poll_max);
        let ticket = self.fresh();
        let Some(fetch) = self.fetches.get_mut(key) else { return };
        match answer {
            QueryAnswer::NotFound => {
                let pause = Nanos(first.0.saturating_mul(1 << fetch.polls.min(30))).min(most);
                fetch.polls += 1;
                if !planted!("failures-of-a-whole-wait-count") {
                    fetch.failures = 0;
                }
                self.pause(key, pause, turn);
            }
            QueryAnswer::Found { request_id: id, data_size, is_fast_path } => {
                let bytes = data_size.checked_add(PREAMBLE_BYTES).filter(|_| data_size > 0);
                let Some(bytes) = bytes.filter(|_| *id == *request_id(key)) else {
                    let why = format!("it has {data_size} bytes of {id}");
                    return self.end_with(key, AfterRevoke::Retry(why.into()), turn);
                };
                fetch.state = ForeignFetchState::Reserving(ticket, (data_size, is_fast_path));
                self.tickets.insert(ticket, key.clone());
                let wait = self.config.settings.room;
                turn.push(PayloadHook::Reserve { ticket, bytes, wait });
            }
            QueryAnswer::Failed(why) => self.end_with(key, AfterRevoke::Retry(why), turn),
        }
    }

    pub(super) fn reserved(
        &mut self,
        ticket: u64,
        slot: SlotId,
        offset: u64,
        turn: &mut StageTurn<'_>,
    ) {
        self.next_region += 1;
        let region = RegionId(self.next_region);
        let key = self.tickets.remove(&ticket);
        let fetch = key.as_ref().and_then(|key| self.fetches.get_mut(key));
        let (Some(key), Some(fetch)) = (&key, fetch) else {
            // It was stopped.
            turn.push(PayloadHook::Return { slot });
            return;
        };
        let ForeignFetchState::Reserving(_, (bytes, is_fast_path)) = fetch.state else { return };
        let foreign = ForeignPayload { at: offset + PREAMBLE_BYTES, bytes, is_fast_path };
        fetch.state = ForeignFetchState::Registering(FetchSlot { slot, region, foreign });
        self.regions.insert(region, key.clone());
        turn.push(OmniMoriEffect::Register { region, at: foreign.at, bytes });
    }

    pub(super) fn not_reserved(
        &mut self,
        ticket: u64,
        failure: &PayloadFailure,
        turn: &mut StageTurn<'_>,
    ) {
        if let Some(key) = self.tickets.remove(&ticket) {
            self.failed(&key, &failure.to_string(), turn);
        }
    }

    pub(super) fn fetch_registered(
        &mut self,
        region: RegionId,
        desc: RegionDesc,
        turn: &mut StageTurn<'_>,
    ) {
        let Some(key) = self.regions.get(&region).cloned() else { return };
        let Some(fetch) = self.fetches.get_mut(&key) else { return };
        match fetch.state {
            ForeignFetchState::Registering(slot) => {
                fetch.state = ForeignFetchState::Pulling(slot, desc);
                let sender = fetch.sender.clone();
                self.enqueue(&sender, key, turn);
            }
            ForeignFetchState::Revoking(..) => self.revoke(&key, turn),
            _ => {}
        }
    }

    /// Nobody can write there.
    pub(super) fn fetch_unregistered(
        &mut self,
        region: RegionId,
        why: &str,
        turn: &mut StageTurn<'_>,
    ) {
        let Some(key) = self.regions.remove(&region) else { return };
        let Some(fetch) = self.fetches.get_mut(&key) else { return };
        match fetch.state {
            ForeignFetchState::Registering(slot) => {
                turn.push(PayloadHook::Return { slot: slot.slot });
                self.failed(&key, &format!("the slot cannot be registered: {why}"), turn);
            }
            ForeignFetchState::Revoking(..) => {
                self.regions.insert(region, key);
                self.deregistered(region, true, turn);
            }
            _ => {}
        }
    }

    pub(super) fn revoke(&mut self, key: &PayloadKey, turn: &mut StageTurn<'_>) {
        if let Some(fetch) = self.fetches.get(key)
            && let ForeignFetchState::Revoking(FetchSlot { region, .. }, _) = fetch.state
        {
            turn.push(OmniMoriEffect::Deregister { region });
        }
    }

    /// A slot is its fetch's alone, or will be.
    pub(super) fn deregistered(
        &mut self,
        region: RegionId,
        is_done: bool,
        turn: &mut StageTurn<'_>,
    ) {
        let Some(key) = self.regions.get(&region).cloned() else { return };
        let Some(fetch) = self.fetches.get_mut(&key) else { return };
        if !is_done {
            let at = turn.now + self.config.settings.redial;
            return self.timers.arm(OmniMoriTimer::Revoke(key), at);
        }
        let state = std::mem::replace(&mut fetch.state, ForeignFetchState::Asking);
        let ForeignFetchState::Revoking(FetchSlot { slot, foreign, .. }, after) = state else {
            fetch.state = state;
            return;
        };
        self.regions.remove(&region);
        if let AfterRevoke::Put = after {
            turn.push(OmniMoriEffect::Preamble(foreign));
            turn.push(PayloadHook::Put { slot, key: key.clone(), receivers: 1, is_chunk: false });
            let outcome = Ok(foreign.bytes);
            turn.push(OmniMoriReport::Fetched { key: key.clone(), outcome });
        } else {
            turn.push(PayloadHook::Return { slot });
        }
        self.finish(&key, after, turn);
    }

    /// The data plane was built anew: no region is reachable any more.
    pub(super) fn fetches_void(&mut self, turn: &mut StageTurn<'_>) {
        for (region, key) in self.regions.clone() {
            let why = "the data plane was built anew";
            self.call_lost(&key, why, turn);
            self.deregistered(region, true, turn);
        }
    }
}
