//! What receivers ask, and the payloads that are kept for them.

use super::io::{ForeignPayload, OmniMoriReport, PullRefusal};
use super::keys::key_of;
use super::{OmniMori, OmniMoriTimer, StageTurn};
use crate::core::command::ControlCommand;
use crate::core::dialect::omni_mori::{ConnectorCall, PullAnswer, PullRequest, QueryAnswer};
use crate::core::payload::{ClaimId, PayloadFailure, PayloadHook, PayloadKey, PayloadStream};
use crate::fabric::{Endpoint, LinkId};
use std::sync::Arc;

/// A call that is not answered.
#[derive(Debug)]
struct ReceiverCall {
    key: PayloadKey,
    request_id: Arc<str>,
    /// None of a query.
    pull: Option<PullRequest>,
}

/// A connection of a receiver, which says nothing before it is answered.
#[derive(Debug)]
pub(super) struct CallLink {
    from: Option<Endpoint>,
    call: Option<ReceiverCall>,
    /// The pull that it waits for.
    pub(super) pull: Option<u64>,
    /// What it was told that it has. The next call shows that it heard it.
    acked: Option<PayloadKey>,
}

/// A key that receivers ask for.
#[derive(Debug)]
pub(super) struct PayloadOffer {
    state: OfferState,
    /// Those whose calls wait for what the payload core says.
    pub(super) asked: Vec<LinkId>,
    /// Larger of those that were asked for later.
    number: u64,
}

#[derive(Debug)]
enum OfferState {
    /// The payload core has not said all that it knows as long as there is a barrier.
    Wanted {
        barrier: Option<u64>,
    },
    Here(OfferedPayload),
    /// It does not come, or receivers cannot have it.
    Unusable(Arc<str>),
}

/// A payload that is kept for receivers.
#[derive(Debug)]
pub(super) struct OfferedPayload {
    claim: ClaimId,
    pub(super) payload: ForeignPayload,
    failures: u32,
    pub(super) is_writing: bool,
    /// The engine that has it, though it may not know.
    pub(super) taken_by: Option<Arc<str>>,
    /// The connection by which it was told.
    acked: Option<LinkId>,
}

/// A key that is no payload's: the payload core answers what is said of it behind all before.
fn barrier_key(barrier: u64) -> PayloadKey {
    PayloadStream::new("", "", "").chunk(barrier)
}

impl OmniMori {
    pub(super) fn caller_up(
        &mut self,
        link: LinkId,
        from: Option<Endpoint>,
        turn: &mut StageTurn<'_>,
    ) {
        if self.links.len() >= self.config.settings.links_max as usize {
            turn.push(ControlCommand::HangUp { link });
            return;
        }
        self.links.insert(link, CallLink { from, call: None, pull: None, acked: None });
    }

    /// What it waits for goes on without it, and waits for it to come back.
    pub(super) fn caller_down(&mut self, link: LinkId, turn: &mut StageTurn<'_>) {
        let Some(gone) = self.links.remove(&link) else { return };
        if let Some(call) = gone.call
            && let Some(offer) = self.offers.get_mut(&call.key)
        {
            offer.asked.retain(|asked| *asked != link);
        }
        if let Some(pull) = gone.pull.and_then(|pull| self.pulls.get_mut(&pull)) {
            pull.link = None;
        }
        if let Some(key) = gone.acked
            && let Some(offered) = self.offered(&key).filter(|it| it.acked == Some(link))
        {
            offered.acked = None;
            self.linger(&key, turn);
        }
    }

    pub(super) fn on_call(&mut self, link: LinkId, parts: &[Vec<u8>], turn: &mut StageTurn<'_>) {
        let Some(entry) = self.links.get_mut(&link) else { return };
        let from = entry.from.clone();
        if entry.call.is_some() {
            self.violation(from, "a call ahead of the answer to the one before", turn);
            turn.push(ControlCommand::HangUp { link });
            return self.caller_down(link, turn);
        }
        if let Some(key) = entry.acked.take()
            && self.offered(&key).is_some_and(|offered| offered.acked == Some(link))
        {
            self.forget_offer(&key, turn);
        }
        let call = ConnectorCall::decode(parts).map_err(|why| why.to_string());
        let named = call.and_then(|call| {
            let (request_id, pull) = match call {
                ConnectorCall::Query { request_id } => (request_id, None),
                ConnectorCall::Pull(pull) => (pull.request_id.clone(), Some(pull)),
            };
            let key = key_of(&request_id).ok_or("request_id without key@from_to")?;
            Ok(ReceiverCall { key, request_id, pull })
        });
        match named {
            Ok(call) => {
                let key = call.key.clone();
                if let Some(entry) = self.links.get_mut(&link) {
                    entry.call = Some(call);
                }
                self.ask(link, &key, turn);
            }
            Err(why) => {
                self.violation(from, &why, turn);
                let frame = PullAnswer::Failed(why.into()).encode();
                turn.push(ControlCommand::Reply { link, frame });
            }
        }
    }

    fn ask(&mut self, link: LinkId, key: &PayloadKey, turn: &mut StageTurn<'_>) {
        if !self.offers.contains_key(key) && !self.want(key, turn) {
            return self.refuse(link, "overload", "too many keys are asked for", turn);
        }
        let number = self.fresh();
        let Some(offer) = self.offers.get_mut(key) else { return };
        self.offer_order.remove(&offer.number);
        self.offer_order.insert(number, key.clone());
        offer.number = number;
        match &offer.state {
            OfferState::Wanted { .. } => self.linger(key, turn),
            OfferState::Here(offered) if offered.acked.is_none() => self.linger(key, turn),
            OfferState::Here(_) | OfferState::Unusable(_) => {}
        }
        self.serve(link, key, turn);
    }

    /// Has the payload core look for a key; false if there is no room for it.
    fn want(&mut self, key: &PayloadKey, turn: &mut StageTurn<'_>) -> bool {
        if self.offers.len() >= self.config.settings.offers_max as usize {
            // The one that was not asked for for longest and is not there.
            let idle = |key: &&PayloadKey| {
                let offer = self.offers.get(*key);
                offer.is_some_and(|it| {
                    !matches!(it.state, OfferState::Here(_)) && it.asked.is_empty()
                })
            };
            let Some(oldest) = self.offer_order.values().find(idle).cloned() else { return false };
            self.forget_offer(&oldest, turn);
        }
        let barrier = self.fresh();
        self.barriers.insert(barrier, key.clone());
        let state = OfferState::Wanted { barrier: Some(barrier) };
        self.offers.insert(key.clone(), PayloadOffer { state, asked: Vec::new(), number: 0 });
        turn.push(PayloadHook::Want { key: key.clone(), producer: None });
        turn.push(PayloadHook::Abandon { key: barrier_key(barrier) });
        true
    }

    /// Answers a call as far as that is known.
    fn serve(&mut self, link: LinkId, key: &PayloadKey, turn: &mut StageTurn<'_>) {
        let Some(call) = self.links.get(&link).and_then(|link| link.call.as_ref()) else { return };
        let Some(offer) = self.offers.get_mut(key) else { return };
        let is_query = call.pull.is_none();
        match &offer.state {
            OfferState::Wanted { barrier: Some(_) } => offer.asked.push(link),
            OfferState::Here(offered) if is_query && offered.acked.is_none() => {
                let answer = QueryAnswer::Found {
                    request_id: call.request_id.clone(),
                    data_size: offered.payload.bytes,
                    is_fast_path: offered.payload.is_fast_path,
                };
                self.reply(link, answer.encode(), turn);
            }
            _ if is_query => self.reply(link, QueryAnswer::NotFound.encode(), turn),
            OfferState::Wanted { barrier: None } => {
                self.refuse(link, "unknown", "there is no such payload, or not yet", turn);
            }
            OfferState::Unusable(why) => {
                let why = why.clone();
                self.refuse(link, "unusable", &why, turn);
            }
            OfferState::Here(_) => {
                if let Some(request) = call.pull.clone() {
                    self.begin_pull(link, key, &request, turn);
                }
            }
        }
    }

    fn serve_all(&mut self, key: &PayloadKey, turn: &mut StageTurn<'_>) {
        let Some(offer) = self.offers.get_mut(key) else { return };
        for link in std::mem::take(&mut offer.asked) {
            self.serve(link, key, turn);
        }
    }

    fn reply(&mut self, link: LinkId, frame: Vec<u8>, turn: &mut StageTurn<'_>) {
        if let Some(entry) = self.links.get_mut(&link) {
            (entry.call, entry.pull) = (None, None);
            turn.push(ControlCommand::Reply { link, frame });
        }
    }

    /// Answers that a call failed.
    pub(super) fn refuse(
        &mut self,
        link: LinkId,
        kind: &'static str,
        why: &str,
        turn: &mut StageTurn<'_>,
    ) {
        let call = self.links.get_mut(&link).and_then(|link| link.call.take());
        self.reply(link, PullAnswer::Failed(why.into()).encode(), turn);
        if let Some(ReceiverCall { key, pull: Some(_), .. }) = call {
            let outcome = Err(PullRefusal { kind, why: why.into() });
            turn.push(OmniMoriReport::Pulled { key, outcome });
        }
    }

    /// The payload of a key, if it is there.
    pub(super) fn offered(&mut self, key: &PayloadKey) -> Option<&mut OfferedPayload> {
        match &mut self.offers.get_mut(key)?.state {
            OfferState::Here(offered) => Some(offered),
            _ => None,
        }
    }

    pub(super) fn arrived(
        &mut self,
        key: PayloadKey,
        claim: ClaimId,
        found: Result<ForeignPayload, Arc<str>>,
        turn: &mut StageTurn<'_>,
    ) {
        // Of a want that was abandoned, by which it is for others.
        if self.abandoned.contains_key(&key) {
            return;
        }
        let Some(offer) = self.offers.get_mut(&key) else { return };
        match found {
            Ok(payload) => {
                offer.state = OfferState::Here(OfferedPayload {
                    claim,
                    payload,
                    failures: 0,
                    is_writing: false,
                    taken_by: None,
                    acked: None,
                });
            }
            Err(why) => {
                offer.state = OfferState::Unusable(why.clone());
                self.abandon(&key, turn);
                self.linger(&key, turn);
                turn.push(OmniMoriReport::Unusable { key: key.clone(), why });
            }
        }
        self.serve_all(&key, turn);
    }

    pub(super) fn missing(
        &mut self,
        key: &PayloadKey,
        failure: &PayloadFailure,
        turn: &mut StageTurn<'_>,
    ) {
        if self.abandoned.contains_key(key) {
            return;
        }
        let Some(offer) = self.offers.get_mut(key) else { return };
        if let OfferState::Wanted { .. } = offer.state {
            offer.state = OfferState::Unusable(failure.to_string().into());
            let until = turn.now + self.config.settings.missing;
            self.timers.arm(OmniMoriTimer::Linger(key.clone()), until);
            self.serve_all(key, turn);
        }
    }

    pub(super) fn was_abandoned(&mut self, key: &PayloadKey, turn: &mut StageTurn<'_>) {
        if let Some(count) = self.abandoned.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                self.abandoned.remove(key);
            }
            return;
        }
        let number = key.chunk.filter(|number| *key == barrier_key(*number));
        let Some(number) = number else { return };
        let Some(key) = self.barriers.remove(&number) else { return };
        if let Some(PayloadOffer { state: OfferState::Wanted { barrier }, .. }) =
            self.offers.get_mut(&key)
            && *barrier == Some(number)
        {
            *barrier = None;
            self.serve_all(&key, turn);
        }
    }

    fn abandon(&mut self, key: &PayloadKey, turn: &mut StageTurn<'_>) {
        *self.abandoned.entry(key.clone()).or_default() += 1;
        turn.push(PayloadHook::Abandon { key: key.clone() });
    }

    pub(super) fn linger(&mut self, key: &PayloadKey, turn: &mut StageTurn<'_>) {
        let until = turn.now + self.config.settings.linger;
        self.timers.arm(OmniMoriTimer::Linger(key.clone()), until);
    }

    pub(super) fn linger_over(&mut self, key: &PayloadKey, turn: &mut StageTurn<'_>) {
        match self.offered(key) {
            // The end of the write says for how much longer.
            Some(offered) if offered.is_writing => {}
            _ => self.forget_offer(key, turn),
        }
    }

    /// A payload that is written to nobody is for others, or free if a receiver has it.
    fn forget_offer(&mut self, key: &PayloadKey, turn: &mut StageTurn<'_>) {
        if self.offered(key).is_some_and(|offered| offered.is_writing) {
            return;
        }
        let Some(offer) = self.offers.remove(key) else { return };
        self.offer_order.remove(&offer.number);
        self.timers.cancel(&OmniMoriTimer::Linger(key.clone()));
        match offer.state {
            OfferState::Wanted { .. } => self.abandon(key, turn),
            OfferState::Unusable(_) => {}
            OfferState::Here(offered) => {
                if let Some(link) = offered.acked.and_then(|link| self.links.get_mut(&link)) {
                    link.acked = None;
                }
                match offered.taken_by {
                    Some(_) => turn.push(PayloadHook::Release { claim: offered.claim }),
                    None => self.abandon(key, turn),
                }
            }
        }
        for link in offer.asked {
            match self.links.get(&link).and_then(|link| link.call.as_ref()) {
                Some(call) if call.pull.is_none() => {
                    self.reply(link, QueryAnswer::NotFound.encode(), turn);
                }
                _ => self.refuse(link, "unknown", "there is no such payload, or not yet", turn),
            }
        }
    }

    /// All of a payload is with a receiver, who may be gone.
    pub(super) fn pull_done(
        &mut self,
        key: &PayloadKey,
        (link, engine): (Option<LinkId>, Arc<str>),
        turn: &mut StageTurn<'_>,
    ) {
        let until = turn.now + self.config.settings.acked;
        let Some(offered) = self.offered(key) else { return };
        offered.is_writing = false;
        let bytes = offered.payload.bytes;
        let Some(link) = link else {
            self.linger(key, turn);
            let why = "the receiver is gone".into();
            let outcome = Err(PullRefusal { kind: "gone", why });
            return turn.push(OmniMoriReport::Pulled { key: key.clone(), outcome });
        };
        if offered.taken_by.replace(engine).is_none() {
            turn.push(PayloadHook::Take { claim: offered.claim });
        }
        offered.acked = Some(link);
        if let Some(entry) = self.links.get_mut(&link) {
            entry.acked = Some(key.clone());
        }
        self.timers.arm(OmniMoriTimer::Linger(key.clone()), until);
        self.reply(link, PullAnswer::Done.encode(), turn);
        turn.push(OmniMoriReport::Pulled { key: key.clone(), outcome: Ok(bytes) });
    }

    /// It is kept for another try, unless there were enough.
    pub(super) fn pull_failed(
        &mut self,
        key: &PayloadKey,
        (link, refusal): (Option<LinkId>, PullRefusal),
        turn: &mut StageTurn<'_>,
    ) {
        match link {
            Some(link) => self.refuse(link, refusal.kind, &refusal.why, turn),
            None => {
                turn.push(OmniMoriReport::Pulled { key: key.clone(), outcome: Err(refusal) });
            }
        }
        let tries = self.config.settings.tries_max;
        let Some(offered) = self.offered(key) else { return };
        offered.is_writing = false;
        offered.failures += 1;
        match offered.failures >= tries {
            true => self.forget_offer(key, turn),
            false => self.linger(key, turn),
        }
    }
}
