//! Payloads that come from other hosts: what is offered is pulled into a slot of the own pool, and is
//! then handed out as if it had been put here. `directory` has whom to ask.

use super::asks::AskState;
use super::exchange::{CopyOrigin, PutOrigin};
use super::io::{PayloadEffect, PayloadFailure, SlotId};
use super::note::{DirectoryNews, PayloadNote, ScopedKey};
use super::slots::{PoolShare, ReservationOwner, ScopedStage};
use super::source::{blocks, tokens, transfer_key};
use super::{PayloadCore, PayloadTimer, PayloadTurn};
use crate::core::error::Failure;
use crate::core::ids::{EngineId, Incarnation, RequestId};
use crate::core::layout::BlockList;
use crate::core::message::{DecodeAnswer, DecodeHook, DecodeLeg, FinishReason, Mode};
use crate::core::time::Nanos;

/// Times in a row that the bytes of a payload fail to come, before those who wait are told.
pub(super) const FETCHES_MAX: u32 = 3;

/// How long a host that has no room keeps a payload which others may have room for.
const ROOM_WAIT: Nanos = Nanos::from_secs(1);

/// How far a payload is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FetchState {
    /// The other host has not said that it can be read.
    Asked,
    /// There is no room for it.
    Waiting,
    /// It is being read into this slot; into none if nothing is to be read.
    Reading(Option<SlotId>),
}

/// A payload that was offered by another host, until it is here or is not wanted.
#[derive(Debug)]
pub(super) struct PayloadFetch {
    place: ScopedKey,
    origin: CopyOrigin,
    number: u64,
    bytes: u64,
    state: FetchState,
    /// Nobody waits for it any more.
    is_cancelled: bool,
}

impl PayloadFetch {
    pub(super) fn is_from(&self, host: &EngineId) -> bool {
        self.origin.host == *host
    }
}

pub(super) fn share_of(place: &ScopedKey) -> PoolShare {
    let is_fetched = !planted!("what-comes-has-the-share-of-what-is-put");
    PoolShare { stage: ScopedStage::that_puts(place), is_fetched }
}

fn request_of(fetch: u64) -> RequestId {
    RequestId(fetch.to_string().into())
}

impl PayloadCore {
    /// News of hosts that put payloads.
    pub(super) fn source_news(&mut self, news: DirectoryNews, turn: &mut PayloadTurn<'_>) {
        match news {
            DirectoryNews::Met { peer, incarnation } => self.source_met(&peer, incarnation, turn),
            DirectoryNews::Parted { peer, .. } => self.source_parted(&peer, turn),
            DirectoryNews::Told { peer, incarnation, note } => {
                self.source_said((peer, incarnation), note, turn);
            }
            DirectoryNews::Untold { peer, note, .. } => match note {
                PayloadNote::Want { place, want } => self.want_untold(&peer, (&place, want), turn),
                _ => self.done_untold(&peer, turn),
            },
        }
    }

    fn source_said(
        &mut self,
        (peer, incarnation): (EngineId, Incarnation),
        note: PayloadNote,
        turn: &mut PayloadTurn<'_>,
    ) {
        match note {
            PayloadNote::Offer { place, number, bytes, generation, is_chunk, want } => {
                let origin = CopyOrigin { host: peer, incarnation, generation, is_chunk };
                self.offered((place, want), origin, (number, bytes), turn);
            }
            PayloadNote::Missing { place, failure, want } => {
                self.source_lacks(&peer, (&place, want), Err(failure), turn);
            }
            PayloadNote::Absent { place, has_stage, want } => {
                self.source_lacks(&peer, (&place, want), Ok(has_stage), turn);
            }
            PayloadNote::Settled { number } => self.source_settled(&peer, number, turn),
            PayloadNote::Want { .. } | PayloadNote::Unwant { .. } | PayloadNote::Done { .. } => {
                self.peer_misused(peer, "it puts payloads, and gets none here", turn);
            }
        }
    }

    /// Another host has a payload for this one.
    fn offered(
        &mut self,
        (place, want): (ScopedKey, u64),
        origin: CopyOrigin,
        (number, bytes): (u64, u64),
        turn: &mut PayloadTurn<'_>,
    ) {
        let host = origin.host.clone();
        let open = self.open_want(&host, &place);
        let is_earlier = open.is_some_and(|open| open != want);
        if is_earlier && !planted!("an-offer-answers-any-want") {
            // The host answers the later want, too: by then it may have dropped what it offers here.
            return;
        }
        if !self.is_new_offer(&host, origin.incarnation, number) {
            // It was offered before the host knew that this is over, and what was asked is answered.
            if self.is_done(&host, number) && open.is_some() {
                self.ask_later(&host, &place, turn);
            }
            return;
        }
        if open.is_some() {
            // For more it has to be asked anew.
            self.set_ask(&host, &place, AskState::Unasked);
        }
        if self.fetching.contains_key(&place) || open.is_none() {
            return self.fetch_done(&host, origin.incarnation, (number, false), turn);
        }
        let checked =
            if self.is_draining { Err(PayloadFailure::Closed) } else { self.slots.check(bytes) };
        if let Err(failure) = checked {
            self.fetch_done(&host, origin.incarnation, (number, false), turn);
            return self.fail_clients(&place, &failure, turn);
        }
        let Some(control) = self.control_of(&host) else { return };
        let id = self.fresh();
        let key = transfer_key(&host, origin.incarnation, number);
        let incarnation = Some(origin.incarnation);
        let leg = DecodeLeg { incarnation, ..DecodeLeg::new(key, Mode::Pull, host, control) };
        let (request, tokens) = (request_of(id), tokens(bytes));
        let prompt_hash = place.prompt_hash();
        turn.push(DecodeHook::Arrived { request, leg, tokens, prompt_hash });
        self.fetching.insert(place.clone(), id);
        let (state, is_cancelled) = (FetchState::Asked, false);
        self.fetches.insert(id, PayloadFetch { place, origin, number, bytes, state, is_cancelled });
    }

    /// True if a payload is on its way from this host.
    pub(super) fn comes_from(&self, host: &EngineId, place: &ScopedKey) -> bool {
        let fetch = self.fetching.get(place).and_then(|id| self.fetches.get(id));
        fetch.is_some_and(|fetch| fetch.origin.host == *host)
    }

    /// The decode core tells.
    pub(super) fn fetched(&mut self, answer: DecodeAnswer, turn: &mut PayloadTurn<'_>) {
        let Ok(id) = answer.request().0.parse::<u64>() else { return };
        match answer {
            DecodeAnswer::Allocate { .. } => self.fetch_due(id, turn),
            DecodeAnswer::Loaded { .. } => self.fetch_ended(id, None, turn),
            DecodeAnswer::LoadFailed { failure, .. } | DecodeAnswer::Rejected { failure, .. } => {
                self.fetch_ended(id, Some(failure), turn);
            }
        }
    }

    /// The other host keeps the payload to be read.
    fn fetch_due(&mut self, id: u64, turn: &mut PayloadTurn<'_>) {
        let Some(fetch) = self.fetches.get_mut(&id) else { return };
        if fetch.state != FetchState::Asked {
            return;
        }
        let copy = self.payloads.get(&fetch.place).and_then(|payload| payload.origin.as_ref());
        if copy == Some(&fetch.origin) {
            // The bytes are here.
            fetch.state = FetchState::Reading(None);
            let blocks = vec![BlockList::default()];
            let (request, computed) = (request_of(id), tokens(fetch.bytes));
            return turn.push(DecodeHook::Allocated { request, computed, blocks });
        }
        fetch.state = FetchState::Waiting;
        self.timers.arm(PayloadTimer::Room(id), turn.now + ROOM_WAIT);
        self.slots.wait(&share_of(&fetch.place), ReservationOwner::Fetch(id), fetch.bytes);
        self.serve_reservations(turn);
    }

    /// There is a slot for a payload that comes.
    pub(super) fn fetch_into(&mut self, id: u64, slot: SlotId, turn: &mut PayloadTurn<'_>) {
        let Some(fetch) = self.fetches.get_mut(&id) else { return };
        fetch.state = FetchState::Reading(Some(slot));
        self.timers.cancel(&PayloadTimer::Room(id));
        let computed = if fetch.bytes == 0 { tokens(0) } else { 0 };
        let (request, blocks) = (request_of(id), blocks(self.slots.place(slot)));
        turn.push(DecodeHook::Allocated { request, computed, blocks });
    }

    /// There was no room for a payload in time: who waits for it waits on, behind others.
    pub(super) fn room_is_over(&mut self, id: u64, turn: &mut PayloadTurn<'_>) {
        let Some(fetch) = self
            .fetches
            .get(&id)
            .filter(|_| !planted!("a-full-host-keeps-what-it-has-no-room-for"))
        else {
            return;
        };
        let (host, place, bytes) = (fetch.origin.host.clone(), fetch.place.clone(), fetch.bytes);
        let since = turn.now - ROOM_WAIT;
        self.ask_when_there_is_room((&host, &place), (since, bytes), turn);
        self.cancel_fetch(&place, turn);
    }

    /// The host that offered a payload has no room to have it pulled: not now.
    pub(super) fn offer_is_void(
        &mut self,
        host: &EngineId,
        place: &ScopedKey,
        turn: &mut PayloadTurn<'_>,
    ) {
        let fetch = self.fetching.get(place).and_then(|id| self.fetches.get(id));
        if fetch.is_some_and(|fetch| fetch.is_from(host) && fetch.state == FetchState::Asked) {
            self.ask_later(host, place, turn);
            self.cancel_fetch(place, turn);
        }
    }

    /// There is no room for a payload that comes, as the host ends.
    pub(super) fn fetch_refused(&mut self, id: u64, turn: &mut PayloadTurn<'_>) {
        let Some(place) = self.fetches.get(&id).map(|fetch| fetch.place.clone()) else { return };
        self.fail_clients(&place, &PayloadFailure::Closed, turn);
        self.cancel_fetch(&place, turn);
    }

    /// Nobody waits for a payload that comes.
    pub(super) fn cancel_fetch(&mut self, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        let Some(id) = self.fetching.get(place).copied() else { return };
        let Some(fetch) = self.fetches.get_mut(&id).filter(|fetch| !fetch.is_cancelled) else {
            return;
        };
        fetch.is_cancelled = true;
        let is_reading = matches!(fetch.state, FetchState::Reading(_));
        turn.push(DecodeHook::Finished { request: request_of(id), reason: FinishReason::Aborted });
        // Of what has blocks the decode says when no byte can land in them any more.
        if !is_reading || planted!("a-cancelled-slot-is-free-at-once") {
            self.fetch_ended(id, Some(Failure::Cancelled), turn);
        }
    }

    /// Of a payload that was to come no byte moves any more.
    fn fetch_ended(&mut self, id: u64, failure: Option<Failure>, turn: &mut PayloadTurn<'_>) {
        let Some(fetch) = self.fetches.remove(&id) else { return };
        self.fetching.remove(&fetch.place);
        let (place, number) = (fetch.place.clone(), fetch.number);
        let CopyOrigin { host, incarnation, .. } = fetch.origin.clone();
        let slot = match fetch.state {
            FetchState::Asked => None,
            FetchState::Waiting => {
                self.slots.stop_waiting(&share_of(&place), ReservationOwner::Fetch(id));
                self.timers.cancel(&PayloadTimer::Room(id));
                None
            }
            FetchState::Reading(slot) => slot,
        };
        // Who wants by now what was cancelled may be a later request with its id.
        let is_wanted = self.is_waited(&place)
            && (!fetch.is_cancelled || planted!("what-was-cancelled-is-handed-out"));
        let got = failure.is_none() && is_wanted && self.may_keep(&fetch, slot);
        if let Some(slot) = slot.filter(|_| !got) {
            self.let_go(slot, turn);
        }
        self.serve_reservations(turn);
        // Before somebody is asked for more: the other host would take that for the same.
        let is_late = got && planted!("more-is-asked-for-before-it-is-done");
        if !is_late {
            self.fetch_done(&host, incarnation, (number, got), turn);
        }
        if got {
            self.ask_is_met(&place);
            self.keep(fetch, slot, turn);
        }
        if is_late {
            self.fetch_done(&host, incarnation, (number, got), turn);
        }
        match failure {
            // One of the hosts is at its limit: that ends.
            Some(Failure::Overload) if !planted!("a-full-table-fails-a-fetch") => {
                self.ask_later(&host, &place, turn);
                self.fetch_is_over(&place, None, turn);
            }
            Some(failure) if failure != Failure::Cancelled => {
                let peer = host.clone();
                self.fetch_is_over(&place, Some(&failure), turn);
                turn.push(PayloadEffect::FetchFailed { peer, failure });
            }
            failure => {
                if !got && failure.is_none() {
                    // It came, and could not be used: not again at once.
                    self.ask_later(&host, &place, turn);
                }
                self.fetch_is_over(&place, None, turn);
            }
        }
    }

    /// Whether what came can be handed out.
    fn may_keep(&self, fetch: &PayloadFetch, slot: Option<SlotId>) -> bool {
        let there = self.payloads.get(&fetch.place).map(|payload| payload.origin.as_ref());
        match (slot, there) {
            // It was put here, too.
            (_, Some(None)) => false,
            (Some(_), _) => true,
            (None, there) => there == Some(Some(&fetch.origin)),
        }
    }

    /// Hands out what came.
    fn keep(&mut self, fetch: PayloadFetch, slot: Option<SlotId>, turn: &mut PayloadTurn<'_>) {
        let PayloadFetch { place, origin, .. } = fetch;
        let host = (origin.host.clone(), origin.incarnation);
        self.stream_host.insert(place.stream(), host);
        let is_chunk = origin.is_chunk || planted!("a-whole-payload-begins-a-stream");
        if is_chunk && place.key.chunk == Some(0) {
            self.begun_elsewhere(&place.stream());
        }
        match slot {
            None => self.hold_more(&place, turn),
            Some(slot) => self.hold(place, slot, PutOrigin::Elsewhere(origin), turn),
        }
    }
}
