//! Payloads that go to other hosts: lent to one host under a number, pulled from the pool, and let
//! go of when the host has it or does not want it, and reads no byte any more.
//!
//! A loan has an end of its own on each side: the prefill core says when nobody reads
//! ([`PrefillAnswer::SourceFree`]), the other host whether it has the payload
//! ([`PayloadNote::Done`]). As long as the host has not said so, the payload is its own and nobody
//! else's; if it does not say so any more, as it has begun anew or is out of reach for long, it counts
//! as having what it has read.

use super::exchange::{HeldPayload, PayloadReceiver, WantSource};
use super::io::{ClaimId, PayloadEffect, PayloadFailure};
use super::note::{DirectoryCall, DirectoryNews, PayloadNote, REMOTE_NAMES_MAX, ScopedKey};
use super::slots::ScopedStage;
use super::{PayloadCore, PayloadTimer, PayloadTurn, pool};
use crate::core::error::Failure;
use crate::core::ids::{EngineId, Incarnation, RequestId, StepId, TransferId, TransferKey};
use crate::core::layout::{BlockList, Geometry, KvGroup, LayerLayout};
use crate::core::message::{Chunk, FinishReason, Mode, PrefillAnswer, PrefillHook, PrefillLeg};
use crate::core::time::Nanos;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A host that gets payloads, in one incarnation, as this one numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PeerHost(u32);

/// A host that gets payloads, as long as it wants or has some.
#[derive(Debug)]
struct ReceivingHost {
    engine: EngineId,
    incarnation: Incarnation,
    is_up: bool,
    /// Numbers of its wants.
    wants: BTreeMap<ScopedKey, u64>,
    /// Loans that it has.
    loans: u32,
    /// Bytes of the names of all these.
    named: usize,
}

/// A payload that was offered to another host.
#[derive(Debug)]
struct PayloadLoan {
    host: PeerHost,
    claim: ClaimId,
    place: ScopedKey,
    /// It is a chunk of its stream.
    is_chunk: bool,
    /// The prefill core has not let go of it.
    is_pulled: bool,
    /// What the host said of it: whether it has it.
    got: Option<bool>,
    /// The host does not say it any more: it has it if it has read it.
    is_lost: bool,
    /// The want of the host that it answers.
    want: u64,
}

/// What other hosts get here.
#[derive(Debug, Default)]
pub(super) struct PayloadSource {
    hosts: BTreeMap<PeerHost, ReceivingHost>,
    by_name: BTreeMap<EngineId, PeerHost>,
    loans: BTreeMap<u64, PayloadLoan>,
    /// Loans of which the host has not said what became of them.
    open: BTreeMap<(ScopedKey, PeerHost), u64>,
    last_host: u32,
    last_number: u64,
    last_step: u64,
}

impl PayloadSource {
    /// A host does not want or have this any more.
    fn unname(&mut self, host: PeerHost, place: &ScopedKey) {
        if let Some(host) = self.hosts.get_mut(&host) {
            host.named -= place.text_len();
        }
    }

    pub(super) fn entries(&self) -> usize {
        let of_hosts = self.hosts.values().map(|host| host.wants.len()).sum::<usize>();
        of_hosts + self.loans.len() + self.open.len()
    }

    pub(super) fn remembered(&self) -> usize {
        self.hosts.len() + self.by_name.len()
    }
}

/// What the prompt that a payload travels as is called.
pub(super) fn transfer_key(host: &EngineId, incarnation: Incarnation, number: u64) -> TransferKey {
    let id: Arc<str> = format!("{host}.{incarnation}.{number}").into();
    TransferKey { id: TransferId(id), prompt: 0 }
}

/// Pages of a payload, one at least: a prompt has a token.
pub(super) fn tokens(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(pool::PAGE).max(1)).unwrap_or(u32::MAX)
}

/// The pages that a slot has, as blocks of a prompt.
pub(super) fn blocks((offset, bytes): (u64, u64)) -> Vec<BlockList> {
    let first = offset / pool::PAGE;
    let pages = first..first + bytes.div_ceil(pool::PAGE);
    vec![BlockList::new(pages.map(|page| u32::try_from(page).unwrap_or(u32::MAX)).collect())]
}

/// What the pool is to the prefill and the decode core of a host: one layer with a token per page.
pub fn pool_geometry() -> Geometry {
    Geometry::new("kvferry-payloads", 1, vec![KvGroup::full(1, 0..1)])
}

/// Where that layer is in the registered region, of a pool of so many bytes.
pub fn pool_layout(bytes: u64) -> LayerLayout {
    let pages = u32::try_from(bytes / pool::PAGE).unwrap_or(u32::MAX);
    LayerLayout::contiguous(0, [pages, 1, 1, pool::PAGE as u32], 1)
}

fn request_of(number: u64) -> RequestId {
    RequestId(number.to_string().into())
}

/// How long a host that is out of reach may still say what became of what was lent to it; the host
/// says it for longer, see `directory`.
pub(super) const LOST_WAIT: Nanos = Nanos::from_secs(120);

/// Most bytes of names that one host can have remembered.
const HOST_NAMES_MAX: usize = 16 << 20;

/// A failure without what is too long of its text.
pub(super) fn cut(failure: &PayloadFailure) -> PayloadFailure {
    const TEXT_MAX: usize = 4_096;
    let mut failure = failure.clone();
    let (PayloadFailure::GivenUp(text)
    | PayloadFailure::PeerGone(text)
    | PayloadFailure::NotMoved(text)
    | PayloadFailure::Overload(text)
    | PayloadFailure::Unknown(text)) = &mut failure
    else {
        return failure;
    };
    if text.len() > TEXT_MAX {
        let end = (0..=TEXT_MAX).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        *text = text[..end].into();
    }
    failure
}

impl PayloadCore {
    /// News of hosts that get payloads here.
    pub(super) fn receiver_news(&mut self, news: DirectoryNews, turn: &mut PayloadTurn<'_>) {
        match news {
            DirectoryNews::Met { peer, incarnation } => self.receiver_met(peer, incarnation, turn),
            DirectoryNews::Parted { peer, incarnation, failure } => {
                let Some(host) = self.receiver(&peer, incarnation) else { return };
                self.receiver_parted(host, failure == Failure::PeerRestarted, turn);
            }
            DirectoryNews::Told { peer, incarnation, note } => {
                self.receiver_said((peer, incarnation), note, turn);
            }
            DirectoryNews::Untold { .. } => {}
        }
    }

    fn receiver(&self, peer: &EngineId, incarnation: Option<Incarnation>) -> Option<PeerHost> {
        let host = *self.source.by_name.get(peer)?;
        (Some(self.source.hosts.get(&host)?.incarnation) == incarnation).then_some(host)
    }

    fn receiver_met(
        &mut self,
        engine: EngineId,
        incarnation: Incarnation,
        turn: &mut PayloadTurn<'_>,
    ) {
        let Some(host) = self.source.by_name.get(&engine).copied() else { return };
        if self.receiver(&engine, Some(incarnation)).is_none() {
            return self.receiver_parted(host, true, turn);
        }
        self.timers.cancel(&PayloadTimer::Lost(host));
        if let Some(host) = self.source.hosts.get_mut(&host) {
            host.is_up = true;
        }
    }

    /// The entry of a host that wants something, if there is room for it.
    fn admit_receiver(
        &mut self,
        (engine, incarnation): (&EngineId, Incarnation),
        place: &ScopedKey,
        turn: &mut PayloadTurn<'_>,
    ) -> Option<PeerHost> {
        self.receiver_met(engine.clone(), incarnation, turn);
        if let Some(host) = self.receiver(engine, Some(incarnation)) {
            return Some(host);
        }
        let most = self.places_for(place) * self.config.hosts_max as usize;
        if self.source.hosts.len() >= most {
            return None;
        }
        self.source.last_host += 1;
        let host = PeerHost(self.source.last_host);
        self.source.by_name.insert(engine.clone(), host);
        let (engine, wants) = (engine.clone(), BTreeMap::new());
        let met = ReceivingHost { engine, incarnation, is_up: true, wants, loans: 0, named: 0 };
        self.source.hosts.insert(host, met);
        Some(host)
    }

    /// A host does not wait any more. What was lent to it stays so for a while, unless it has begun
    /// anew: then nobody knows whether it gave it to somebody.
    fn receiver_parted(&mut self, host: PeerHost, is_over: bool, turn: &mut PayloadTurn<'_>) {
        let Some(parted) = self.source.hosts.get_mut(&host) else { return };
        parted.is_up = false;
        let has_loans = parted.loans > 0;
        for place in parted.wants.keys().cloned().collect::<Vec<_>>() {
            self.unwanted(host, &place, turn);
        }
        if is_over && !planted!("a-restarted-host-keeps-its-loans") {
            self.receiver_lost(host, turn);
        } else if has_loans && !planted!("a-lost-host-keeps-its-loans") {
            self.timers.arm_if_idle(PayloadTimer::Lost(host), turn.now + LOST_WAIT);
        }
        self.forget_receiver(host);
    }

    /// What a host may have got goes to nobody else, and is waited for no longer: the host has begun
    /// anew, or is out of reach for so long that it does not say any more what became of it.
    pub(super) fn receiver_lost(&mut self, host: PeerHost, turn: &mut PayloadTurn<'_>) {
        let open = self.source.open.iter().filter(|((_, of), _)| *of == host);
        for number in open.map(|(_, number)| *number).collect::<Vec<_>>() {
            match self.source.loans.get_mut(&number) {
                Some(loan) if loan.is_pulled && !planted!("what-nobody-read-is-lost") => {
                    loan.is_lost = true;
                }
                _ => self.loan_done(number, true, turn),
            }
        }
    }

    /// A host that neither wants nor has anything leaves its place to others.
    fn forget_receiver(&mut self, host: PeerHost) {
        let Some(idle) = self.source.hosts.get(&host) else { return };
        let is_idle = idle.wants.is_empty() && idle.loans == 0;
        if !is_idle || idle.is_up && planted!("idle-hosts-take-a-place") {
            return;
        }
        if self.source.by_name.get(&idle.engine) == Some(&host) {
            self.source.by_name.remove(&idle.engine);
        }
        self.source.hosts.remove(&host);
        self.timers.cancel(&PayloadTimer::Lost(host));
    }

    /// A host does not wait for a payload any more.
    fn unwanted(&mut self, host: PeerHost, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        let of = self.source.hosts.get_mut(&host);
        if of.is_some_and(|of| of.wants.remove(place).is_some()) {
            self.source.unname(host, place);
            self.unwant(PayloadReceiver::Host(host), place, turn);
        }
    }

    fn tell_receiver(&self, host: PeerHost, note: PayloadNote, turn: &mut PayloadTurn<'_>) {
        if let Some(ReceivingHost { engine, incarnation, is_up: true, .. }) =
            self.source.hosts.get(&host)
        {
            let (peer, incarnation) = (engine.clone(), *incarnation);
            turn.push(PayloadEffect::PrefillPeer(DirectoryCall::Tell { peer, incarnation, note }));
        }
    }

    /// Tells a host that waits for a payload that it does not come.
    pub(super) fn tell_missing(
        &mut self,
        host: PeerHost,
        place: &ScopedKey,
        why: &PayloadFailure,
        turn: &mut PayloadTurn<'_>,
    ) {
        let of = self.source.hosts.get_mut(&host);
        if let Some(want) = of.and_then(|of| of.wants.remove(place)) {
            self.source.unname(host, place);
            let note = PayloadNote::Missing { place: place.clone(), failure: cut(why), want };
            self.tell_receiver(host, note, turn);
        }
        self.forget_receiver(host);
    }

    fn receiver_said(
        &mut self,
        (peer, incarnation): (EngineId, Incarnation),
        note: PayloadNote,
        turn: &mut PayloadTurn<'_>,
    ) {
        let host = self.receiver(&peer, Some(incarnation));
        match note {
            PayloadNote::Want { place, want } => {
                match self.admit_receiver((&peer, incarnation), &place, turn) {
                    Some(host) => {
                        self.receiver_wants(host, (place, want), turn);
                        self.forget_receiver(host);
                    }
                    None => {
                        let full = || PayloadFailure::Overload("hosts that get payloads".into());
                        let over = self
                            .over(&place)
                            .filter(|_| !planted!("what-never-comes-waits-for-a-place"));
                        let failure = over.map_or_else(full, |why| cut(&why));
                        let note = PayloadNote::Missing { place, failure, want };
                        turn.push(PayloadEffect::PrefillPeer(DirectoryCall::Tell {
                            peer,
                            incarnation,
                            note,
                        }));
                    }
                }
            }
            PayloadNote::Unwant { place } => {
                let Some(host) = host else { return };
                self.unwanted(host, &place, turn);
                self.forget_receiver(host);
            }
            PayloadNote::Done { number, got } => {
                let is_its = |loan: &PayloadLoan| {
                    Some(loan.host) == host || planted!("any-host-ends-a-loan")
                };
                if self.source.loans.get(&number).is_some_and(is_its) {
                    self.loan_done(number, got, turn);
                }
                let note = PayloadNote::Settled { number };
                turn.push(PayloadEffect::PrefillPeer(DirectoryCall::Tell {
                    peer,
                    incarnation,
                    note,
                }));
            }
            PayloadNote::Offer { .. }
            | PayloadNote::Missing { .. }
            | PayloadNote::Absent { .. }
            | PayloadNote::Settled { .. } => {
                self.peer_misused(peer, "it gets payloads here, and puts none", turn);
            }
        }
    }

    /// How many times as many may want this: what is there needs no waiting, and does not wait behind
    /// what nobody may ever put.
    fn places_for(&self, place: &ScopedKey) -> usize {
        let is_there = self.payloads.get(place).is_some_and(HeldPayload::is_free);
        if is_there && !planted!("what-is-there-waits-behind-what-is-not") { 2 } else { 1 }
    }

    /// What there is no room for in what a host wants, if so.
    fn full_of_wants(&self, host: PeerHost, place: &ScopedKey) -> Option<&'static str> {
        let of = self.source.hosts.get(&host)?;
        let share = self.places_for(place);
        let has = of.wants.len() + of.loans as usize;
        if place.text_len() > REMOTE_NAMES_MAX {
            Some("bytes in the names of a payload that another host wants")
        } else if has >= share * self.config.host_payloads_max as usize
            && !planted!("hosts-want-without-limit")
        {
            Some("payloads that one host wants")
        } else if of.named + place.text_len() > share * HOST_NAMES_MAX
            && !planted!("hosts-want-names-of-any-length")
        {
            Some("bytes in the names of the payloads that one host wants")
        } else {
            None
        }
    }

    fn receiver_wants(
        &mut self,
        host: PeerHost,
        (place, want): (ScopedKey, u64),
        turn: &mut PayloadTurn<'_>,
    ) {
        if let Some(number) = self.source.open.get(&(place.clone(), host)).copied() {
            if self.is_lent_yet(number) || planted!("what-was-withdrawn-is-offered-again") {
                return self.lend_again(number, want, turn);
            }
            // Whoever asks now does not mean what was withdrawn since it was offered.
            self.loan_done(number, false, turn);
        }
        let of = self.source.hosts.get_mut(&host);
        if let Some(known) = of.and_then(|of| of.wants.get_mut(&place)) {
            *known = want;
            return self.tell_absent(host, place, turn);
        }
        let full = self.full_of_wants(host, &place);
        let overload = full.map(|what| PayloadFailure::Overload(what.into()));
        // What does not come is not worth another question.
        let over = self.over(&place);
        let waits = overload.is_some() && planted!("what-never-comes-waits-for-a-place");
        if let Some(failure) = over.filter(|_| !waits).or(overload) {
            let note = PayloadNote::Missing { place, failure: cut(&failure), want };
            return self.tell_receiver(host, note, turn);
        }
        if let Some(of) = self.source.hosts.get_mut(&host) {
            of.named += place.text_len();
            of.wants.insert(place.clone(), want);
        }
        self.await_payload(PayloadReceiver::Host(host), WantSource::Here, &place, turn);
        self.tell_absent(host, place, turn);
    }

    /// Tells a host that waits if nobody here has begun the stream.
    fn tell_absent(&self, host: PeerHost, place: ScopedKey, turn: &mut PayloadTurn<'_>) {
        let is_put = self.payloads.get(&place).is_some_and(|payload| payload.origin.is_none());
        let want = self.source.hosts.get(&host).and_then(|of| of.wants.get(&place).copied());
        let is_begun = is_put || self.lives.get(&place.stream()).is_some();
        if let Some(want) = want.filter(|_| !is_begun) {
            let has_stage = self.stages.contains_key(&ScopedStage::that_puts(&place));
            self.tell_receiver(host, PayloadNote::Absent { place, has_stage, want }, turn);
        }
    }

    /// A payload is there for another host.
    pub(super) fn lend(
        &mut self,
        host: PeerHost,
        claim: ClaimId,
        place: ScopedKey,
        turn: &mut PayloadTurn<'_>,
    ) {
        let Some(of) = self.source.hosts.get_mut(&host) else { return };
        let Some(want) = of.wants.remove(&place) else { return };
        of.loans += 1;
        let is_chunk = self.payloads.get(&place).is_some_and(HeldPayload::was_put_as_chunk);
        let (got, is_lost) = (None, false);
        self.pull(
            PayloadLoan { host, claim, place, is_chunk, is_pulled: true, got, is_lost, want },
            turn,
        );
    }

    /// True if what was lent was not withdrawn since.
    fn is_lent_yet(&mut self, number: u64) -> bool {
        let Some(loan) = self.source.loans.get(&number) else { return false };
        let Some(claim) = self.claims.get(&loan.claim) else { return false };
        let (place, generation) = (loan.place.clone(), claim.generation);
        self.same_generation(&place, generation).is_some()
    }

    /// The host that a payload was offered to asks again.
    fn lend_again(&mut self, number: u64, want: u64, turn: &mut PayloadTurn<'_>) {
        let Some(loan) = self.source.loans.get_mut(&number) else { return };
        loan.want = want;
        if loan.is_pulled {
            return self.tell_offer(number, turn);
        }
        if let Some(loan) = self.source.loans.remove(&number) {
            self.pull(PayloadLoan { is_pulled: true, ..loan }, turn);
        }
    }

    /// Has a payload pulled, under a number that none had before.
    fn pull(&mut self, loan: PayloadLoan, turn: &mut PayloadTurn<'_>) {
        self.source.last_number += 1;
        self.source.last_step += 1;
        let (number, step) = (self.source.last_number, StepId(self.source.last_step));
        let Some(claim) = self.claims.get(&loan.claim) else { return };
        let (offset, bytes) = self.slots.place(claim.slot);
        let (request, to) = (request_of(number), tokens(bytes));
        let key = transfer_key(&self.host.0, self.host.1, number);
        let leg = PrefillLeg::new(key, Mode::Pull);
        let (arrived, prompt_hash) = (request.clone(), loan.place.prompt_hash());
        turn.push(PrefillHook::Arrived { request: arrived, leg, tokens: to, prompt_hash });
        let blocks = blocks((offset, bytes));
        let chunks = vec![Chunk { request: request.clone(), from: 0, to, blocks }];
        turn.push(PrefillHook::Scheduled { step, chunks });
        turn.push(PrefillHook::Finished { request, reason: FinishReason::Length });
        self.source.open.insert((loan.place.clone(), loan.host), number);
        self.source.loans.insert(number, loan);
        self.tell_offer(number, turn);
    }

    fn tell_offer(&self, number: u64, turn: &mut PayloadTurn<'_>) {
        let Some(loan) = self.source.loans.get(&number) else { return };
        let Some(claim) = self.claims.get(&loan.claim) else { return };
        let (_, bytes) = self.slots.place(claim.slot);
        let (place, generation) = (loan.place.clone(), claim.generation);
        let PayloadLoan { is_chunk, want, .. } = *loan;
        let note = PayloadNote::Offer { place, number, bytes, generation, is_chunk, want };
        self.tell_receiver(loan.host, note, turn);
    }

    /// The prefill core tells.
    pub(super) fn lent(&mut self, answer: PrefillAnswer, turn: &mut PayloadTurn<'_>) {
        let (request, unread, is_refused) = match answer {
            PrefillAnswer::SourceFree { request, failure } => {
                let is_unread =
                    |failure| matches!(failure, Failure::NotFetched | Failure::Cancelled);
                (request, failure.is_some_and(is_unread), false)
            }
            PrefillAnswer::Rejected { request, .. } => (request, true, true),
            PrefillAnswer::PreemptionSafe { .. } => return,
        };
        let Ok(number) = request.0.parse::<u64>() else { return };
        let Some(loan) = self.source.loans.get_mut(&number) else { return };
        loan.is_pulled = false;
        if is_refused && !planted!("an-offer-that-is-void-stands") {
            let what = "payloads that other hosts pull here";
            let failure = PayloadFailure::Overload(what.into());
            let (host, place, want) = (loan.host, loan.place.clone(), loan.want);
            self.tell_receiver(host, PayloadNote::Missing { place, failure, want }, turn);
        }
        let Some(loan) = self.source.loans.get(&number) else { return };
        if unread && loan.got.is_none() {
            // Nobody came for it, nor can any more.
            return self.loan_done(number, false, turn);
        }
        if loan.is_lost {
            return self.loan_done(number, true, turn);
        }
        self.settle_loan(number, turn);
    }

    /// It is known whether the host has what was lent to it.
    fn loan_done(&mut self, number: u64, got: bool, turn: &mut PayloadTurn<'_>) {
        let Some(loan) = self.source.loans.get_mut(&number) else { return };
        if loan.got.is_none() {
            loan.got = Some(got);
            if !got && loan.is_pulled && !planted!("what-nobody-pulls-waits-for-its-lease") {
                // The host does not come for it, and others wait for it or for its place.
                let (request, reason) = (request_of(number), FinishReason::Aborted);
                turn.push(PrefillHook::Finished { request, reason });
            }
            self.source.open.remove(&(loan.place.clone(), loan.host));
            self.settle_loan(number, turn);
        }
    }

    /// Ends a loan as far as both sides have.
    fn settle_loan(&mut self, number: u64, turn: &mut PayloadTurn<'_>) {
        let Some(loan) = self.source.loans.get(&number) else { return };
        let (claim, place, host) = (loan.claim, loan.place.clone(), loan.host);
        let is_read = loan.is_pulled && !planted!("what-is-read-is-let-go");
        let got = match loan.got {
            Some(got) => got,
            // The host may still say that it has it, which only counts as long as somebody else
            // could get it.
            None if is_read => return,
            None => {
                let Some(generation) = self.claims.get(&claim).map(|claim| claim.generation) else {
                    return;
                };
                if self.same_generation(&place, generation).is_some() {
                    return;
                }
                true
            }
        };
        if got {
            self.take_claim(claim, turn);
        }
        if is_read || self.source.loans.remove(&number).is_none() {
            return;
        }
        self.source.open.remove(&(place.clone(), host));
        if let Some(of) = self.source.hosts.get_mut(&host) {
            of.loans -= 1;
            of.named -= place.text_len();
        }
        self.forget_receiver(host);
        if got {
            self.drop_claim(claim, turn);
        } else {
            self.give_back(claim, turn);
        }
    }

    /// Nobody else gets what has this key: loans that nobody reads are over.
    pub(super) fn settle_loans_of(&mut self, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        if self.source.open.is_empty() {
            return;
        }
        let first = (place.clone(), PeerHost(0));
        let last = (place.clone(), PeerHost(u32::MAX));
        let open = self.source.open.range(first..=last).map(|(_, number)| *number);
        for number in open.collect::<Vec<_>>() {
            self.settle_loan(number, turn);
        }
    }

    pub(super) fn peer_misused(&mut self, peer: EngineId, rule: &str, turn: &mut PayloadTurn<'_>) {
        self.misuses = self.misuses.saturating_add(1);
        turn.push(PayloadEffect::PeerMisuse { peer, rule: rule.into() });
    }
}
