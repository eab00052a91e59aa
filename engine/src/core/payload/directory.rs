//! Which other hosts are asked for what nobody puts here, and what they say.
//!
//! A host is believed of what it puts itself. It ends a want that names it; one that names nobody only
//! if the stream is known to be its own, or if nobody else has begun that stream.

use super::asks::{ASK_PAUSE, AskState, AskedHost, PayloadAsk};
use super::ends::former_use;
use super::exchange::{PayloadReceiver, WantSource};
use super::fetch::FETCHES_MAX;
use super::io::{FormerUse, PayloadEffect, PayloadFailure, PayloadHost};
use super::note::{DirectoryCall, PayloadNote, REMOTE_NAMES_MAX, ScopedKey};
use super::slots::ScopedStage;
use super::source::{LOST_WAIT, cut};
use super::{PayloadCore, PayloadTimer, PayloadTurn};
use crate::core::error::Failure;
use crate::core::ids::{EngineId, Incarnation};
use crate::core::time::Nanos;
use crate::fabric::Endpoint;
use std::collections::{BTreeMap, BTreeSet};

/// Pause before a host that was lost is looked for again: as long as it has been lost, within these.
const MEET_PAUSE: Nanos = Nanos::from_secs(1);
const MEET_PAUSE_MAX: Nanos = Nanos::from_secs(32);

/// How long a host that was lost is to be told what became of what it offered: for longer than it waits
/// for that.
const DONE_WAIT: Nanos = LOST_WAIT.scale(2, 1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostState {
    /// Nothing is expected of it.
    Unmet,
    Meeting,
    Met,
}

/// Another host that puts payloads.
#[derive(Debug)]
pub(super) struct SourceHost {
    control: Endpoint,
    /// One that is not named any more stays until it knows what became of what it offered.
    is_named: bool,
    state: HostState,
    /// The incarnation that was met last.
    incarnation: Option<Incarnation>,
    /// What it offered, by number, that is on its way.
    coming: BTreeSet<u64>,
    /// What became of what it offered, as long as it may not know.
    done: BTreeMap<u64, bool>,
    /// Payloads that it is asked for.
    asks: u32,
    /// Since when it is lost.
    lost: Option<Nanos>,
}

impl SourceHost {
    pub(super) fn entries(&self) -> usize {
        self.done.len() + self.coming.len()
    }
}

impl PayloadCore {
    /// Whether a host is known as one that puts payloads.
    pub(super) fn knows(&self, host: &EngineId) -> bool {
        self.sources.get(host).is_some_and(|source| source.is_named)
    }

    pub(super) fn control_of(&self, host: &EngineId) -> Option<Endpoint> {
        self.sources.get(host).map(|host| host.control.clone())
    }

    /// These are the other hosts.
    pub(super) fn set_hosts(&mut self, hosts: Vec<PayloadHost>, turn: &mut PayloadTurn<'_>) {
        let named: BTreeSet<EngineId> = hosts.iter().map(|host| host.engine.clone()).collect();
        let left = self.sources.keys().filter(|host| !named.contains(*host)).cloned();
        let left: Vec<EngineId> = left.collect();
        for host in &left {
            self.unname_source(host, turn);
        }
        for PayloadHost { engine, control } in hosts {
            let fresh = SourceHost {
                control: control.clone(),
                is_named: true,
                state: HostState::Unmet,
                incarnation: None,
                coming: BTreeSet::new(),
                done: BTreeMap::new(),
                asks: 0,
                lost: None,
            };
            if engine != self.host.0 {
                let source = self.sources.entry(engine).or_insert(fresh);
                (source.control, source.is_named) = (control, true);
            }
        }
        for place in self.wants.keys().cloned().collect::<Vec<_>>() {
            self.ask_hosts(&place, turn);
            self.settle_ask(&place, None, turn);
        }
        for host in left {
            self.leave_if_idle(&host, turn);
        }
    }

    /// A host is none of those that are asked any more.
    fn unname_source(&mut self, host: &EngineId, turn: &mut PayloadTurn<'_>) {
        if planted!("who-is-named-no-more-hears-nothing") {
            self.source_parted(host, turn);
            self.sources.remove(host);
            self.timers.cancel(&PayloadTimer::Meet(host.clone()));
            turn.push(PayloadEffect::DecodePeer(DirectoryCall::Leave { peer: host.clone() }));
        } else if let Some(source) = self.sources.get_mut(host) {
            source.is_named = false;
        }
    }

    /// Local receivers that wait for a payload, and who is to put it.
    fn clients_waiting(&self, place: &ScopedKey) -> Vec<(PayloadReceiver, WantSource)> {
        let waiting = self.wants.get(place).into_iter().flatten();
        let clients = waiting.filter(|waits| matches!(waits.receiver, PayloadReceiver::Client(_)));
        clients.map(|waits| (waits.receiver, waits.source.clone())).collect()
    }

    pub(super) fn is_waited(&self, place: &ScopedKey) -> bool {
        !self.clients_waiting(place).is_empty()
    }

    /// Asks those hosts that those who wait for a payload have in mind, and no others.
    pub(super) fn ask_hosts(&mut self, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        if self.sources.is_empty() && self.asks.is_empty() {
            return;
        }
        let mut wanted = BTreeSet::new();
        // Of what was put here nobody else has more.
        let is_here = self.payloads.get(place).is_some_and(|payload| payload.origin.is_none())
            && !planted!("what-was-put-here-is-looked-for-elsewhere");
        for (_, source) in self.clients_waiting(place).into_iter().filter(|_| !is_here) {
            match source {
                WantSource::Anybody => {
                    let named = self.sources.keys().filter(|host| self.knows(host));
                    wanted.extend(named.cloned());
                }
                WantSource::Host(host) => {
                    wanted.insert(host);
                }
                WantSource::Here | WantSource::Process(_) => {}
            }
        }
        wanted.retain(|host| self.knows(host));
        let asked = self.asks.get(place).map(|ask| ask.hosts.keys().cloned());
        let asked: BTreeSet<EngineId> = asked.into_iter().flatten().collect();
        for host in asked.difference(&wanted) {
            self.unask(host, place, turn);
        }
        for host in wanted.difference(&asked) {
            let ask = self.asks.entry(place.clone()).or_default();
            ask.hosts.insert(host.clone(), AskedHost::default());
            if let Some(source) = self.sources.get_mut(host) {
                source.asks += 1;
            }
        }
        if wanted.is_empty() {
            self.asks.remove(place);
            return self.cancel_fetch(place, turn);
        }
        self.say_wants(place, turn);
    }

    /// A host is not asked for a payload any more.
    fn unask(&mut self, host: &EngineId, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        let Some(ask) = self.asks.get_mut(place) else { return };
        let asked = ask.hosts.remove(host);
        self.timers.cancel(&PayloadTimer::Ask(place.clone(), host.clone()));
        if asked.as_ref().is_some_and(|asked| asked.state.open_want().is_some()) {
            self.tell_source(host, PayloadNote::Unwant { place: place.clone() }, turn);
        }
        if let Some(source) = self.sources.get_mut(host).filter(|_| asked.is_some()) {
            source.asks -= 1;
        }
        self.leave_if_idle(host, turn);
    }

    /// Asks the hosts that are to be asked, unless one of them sends it already.
    pub(super) fn say_wants(&mut self, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        if self.fetching.contains_key(place) {
            return;
        }
        if place.text_len() > REMOTE_NAMES_MAX {
            let what = "bytes in the names of a payload that is on another host";
            return self.fail_clients(place, &PayloadFailure::Overload(what.into()), turn);
        }
        let want = self.fresh();
        let Some(ask) = self.asks.get_mut(place) else { return };
        let unasked = ask.hosts.iter_mut().filter(|(_, of)| of.state == AskState::Unasked);
        let mut asked = Vec::new();
        for (host, of) in unasked {
            let is_met =
                self.sources.get(host).is_some_and(|source| source.state == HostState::Met);
            if is_met {
                of.state = AskState::Asked { want };
            }
            asked.push((host.clone(), is_met));
        }
        for (host, is_met) in asked {
            if is_met {
                self.tell_source(&host, PayloadNote::Want { place: place.clone(), want }, turn);
            } else {
                self.meet(&host, turn);
            }
        }
    }

    fn tell_source(&self, host: &EngineId, note: PayloadNote, turn: &mut PayloadTurn<'_>) {
        let Some(source) = self.sources.get(host) else { return };
        if let (HostState::Met, Some(incarnation)) = (source.state, source.incarnation) {
            let peer = host.clone();
            turn.push(PayloadEffect::DecodePeer(DirectoryCall::Tell { peer, incarnation, note }));
        }
    }

    /// Gets in touch with a host.
    pub(super) fn meet(&mut self, host: &EngineId, turn: &mut PayloadTurn<'_>) {
        let Some(source) = self.sources.get_mut(host) else { return };
        if source.state == HostState::Unmet {
            source.state = HostState::Meeting;
            let (peer, control) = (host.clone(), source.control.clone());
            turn.push(PayloadEffect::DecodePeer(DirectoryCall::Meet { peer, control }));
        }
    }

    fn leave_if_idle(&mut self, host: &EngineId, turn: &mut PayloadTurn<'_>) {
        let Some(source) = self.sources.get_mut(host) else { return };
        if source.asks > 0 || !source.done.is_empty() {
            return;
        }
        if source.state != HostState::Unmet {
            source.state = HostState::Unmet;
            turn.push(PayloadEffect::DecodePeer(DirectoryCall::Leave { peer: host.clone() }));
        }
        if !source.is_named && !self.fetches.values().any(|fetch| fetch.is_from(host)) {
            self.sources.remove(host);
            self.timers.cancel(&PayloadTimer::Meet(host.clone()));
        }
    }

    pub(super) fn source_met(
        &mut self,
        host: &EngineId,
        incarnation: Incarnation,
        turn: &mut PayloadTurn<'_>,
    ) {
        let Some(source) = self.sources.get_mut(host) else { return };
        if source.state == HostState::Unmet {
            return;
        }
        let before = source.incarnation.replace(incarnation);
        if before != Some(incarnation) {
            source.coming.clear();
            source.done.clear();
        }
        (source.state, source.lost) = (HostState::Met, None);
        if before.is_some_and(|before| before != incarnation) {
            self.source_began_anew(host, turn);
        }
        // What it offers next may be what it is still to hear of.
        self.tell_done(host, turn);
        for place in self.asks_of(host) {
            // Who is told when what comes has failed is not to wait for what is put anew.
            let is_lost = self.comes_from(host, &place)
                && self.asks.get(&place).is_some_and(|ask| ask.missing(host).is_some());
            if !is_lost {
                self.set_ask(host, &place, AskState::Unasked);
                self.say_wants(&place, turn);
            }
        }
        self.leave_if_idle(host, turn);
    }

    /// What was asked of a host before it began anew is gone with that.
    fn source_began_anew(&mut self, host: &EngineId, turn: &mut PayloadTurn<'_>) {
        if planted!("who-begins-anew-has-what-it-had") {
            return;
        }
        for place in self.asks_of(host) {
            let asked = self.asks.get(&place).and_then(|ask| ask.hosts.get(host));
            let is_asked = asked.is_some_and(|asked| {
                asked.state.open_want().is_some() || asked.state == AskState::Full
            });
            if is_asked || self.comes_from(host, &place) {
                let gone = PayloadFailure::PeerGone(host.0.clone());
                self.set_ask(host, &place, AskState::Missing(gone));
                self.settle_ask(&place, None, turn);
                self.ask_in(host, &place, MEET_PAUSE, turn);
            }
        }
    }

    /// A host is gone, or out of reach: who waits for it learns that.
    pub(super) fn source_parted(&mut self, host: &EngineId, turn: &mut PayloadTurn<'_>) {
        let Some(source) = self.sources.get_mut(host) else { return };
        if source.state == HostState::Unmet {
            return;
        }
        source.state = HostState::Unmet;
        let since = turn.now - *source.lost.get_or_insert(turn.now);
        let pause = since.clamp(MEET_PAUSE, MEET_PAUSE_MAX);
        if since >= DONE_WAIT {
            source.done.clear();
        } else if !source.done.is_empty() {
            self.timers.arm_if_idle(PayloadTimer::Meet(host.clone()), turn.now + pause);
        }
        if planted!("nobody-misses-a-host") {
            return;
        }
        for place in self.asks_of(host) {
            let gone = PayloadFailure::PeerGone(host.0.clone());
            self.set_ask(host, &place, AskState::Missing(gone));
            self.settle_ask(&place, None, turn);
            // Others may put it, or this one when it is there again.
            self.ask_in(host, &place, pause, turn);
        }
        self.leave_if_idle(host, turn);
    }

    /// Looks for a host that does not know yet what became of what it offered.
    pub(super) fn meet_again(&mut self, host: &EngineId, turn: &mut PayloadTurn<'_>) {
        let Some(source) = self.sources.get(host) else { return };
        if source.state == HostState::Met {
            self.tell_done(host, turn);
        } else if !source.done.is_empty() {
            self.meet(host, turn);
        }
    }

    fn tell_done(&self, host: &EngineId, turn: &mut PayloadTurn<'_>) {
        let done = self.sources.get(host).into_iter().flat_map(|source| &source.done);
        for (&number, &got) in done {
            self.tell_source(host, PayloadNote::Done { number, got }, turn);
        }
    }

    /// A host has not acknowledged so much that it cannot be told this now.
    pub(super) fn done_untold(&mut self, host: &EngineId, turn: &mut PayloadTurn<'_>) {
        if self.sources.contains_key(host) {
            self.timers.arm_if_idle(PayloadTimer::Meet(host.clone()), turn.now + ASK_PAUSE);
        }
    }

    /// A host says that it does not have what it was asked for, and never will; or that nobody there
    /// has begun the stream, and whether somebody of the stage is there.
    pub(super) fn source_lacks(
        &mut self,
        host: &EngineId,
        (place, want): (&ScopedKey, u64),
        said: Result<bool, PayloadFailure>,
        turn: &mut PayloadTurn<'_>,
    ) {
        if self.open_want(host, place) != Some(want) {
            if let Err(PayloadFailure::Overload(_)) = said {
                self.offer_is_void(host, place, turn);
            }
        } else {
            let state = match said {
                Ok(_) if self.was_of_former(host, place) => {
                    // The host waits for it, as for what may be put anew.
                    if !planted!("a-host-waits-for-what-is-gone") {
                        self.tell_source(host, PayloadNote::Unwant { place: place.clone() }, turn);
                    }
                    AskState::Missing(PayloadFailure::PeerGone(host.0.clone()))
                }
                Ok(has_stage) => AskState::Absent { want, has_stage },
                Err(PayloadFailure::Overload(_)) => return self.ask_later(host, place, turn),
                Err(failure) => AskState::Missing(cut(&failure)),
            };
            let is_missing = matches!(state, AskState::Missing(_));
            self.set_ask(host, place, state);
            self.settle_ask(place, None, turn);
            // Who waits on, as others may put it, waits for what is put here anew, too.
            if is_missing && !planted!("who-lacks-it-once-lacks-it-for-ever") {
                self.ask_after_pause(host, place, turn);
            }
        }
    }

    /// Whether an offer is none that is on its way, or ended before the host knew. What is offered again
    /// has its number, and may come behind those with larger ones.
    pub(super) fn is_new_offer(
        &mut self,
        host: &EngineId,
        incarnation: Incarnation,
        number: u64,
    ) -> bool {
        let Some(source) = self.sources.get_mut(host) else { return false };
        let mut known = source.coming.iter().chain(source.done.keys());
        if planted!("an-offer-has-the-largest-number") && known.any(|it| *it > number) {
            return false;
        }
        source.incarnation == Some(incarnation)
            && !source.done.contains_key(&number)
            && source.coming.insert(number)
    }

    /// True if an offer has ended here, and the host may not know.
    pub(super) fn is_done(&self, host: &EngineId, number: u64) -> bool {
        let is_it = !planted!("an-answer-that-is-over-is-waited-for");
        self.sources.get(host).is_some_and(|source| source.done.contains_key(&number) && is_it)
    }

    /// True if a stream came from an incarnation of this host that is gone.
    fn was_of_former(&self, host: &EngineId, place: &ScopedKey) -> bool {
        let now = self.sources.get(host).and_then(|source| source.incarnation);
        let of_stream = self.stream_host.get(&place.stream());
        of_stream.is_some_and(|(whose, of)| whose == host && Some(*of) != now)
    }

    /// Tells a host what became of what it offered, until it knows.
    pub(super) fn fetch_done(
        &mut self,
        host: &EngineId,
        incarnation: Incarnation,
        (number, got): (u64, bool),
        turn: &mut PayloadTurn<'_>,
    ) {
        let most = 2 * self.config.host_payloads_max as usize;
        let Some(source) = self.sources.get_mut(host) else { return };
        if source.incarnation != Some(incarnation) {
            return self.leave_if_idle(host, turn);
        }
        source.coming.remove(&number);
        if source.done.len() < most {
            source.done.insert(number, got);
        }
        self.tell_source(host, PayloadNote::Done { number, got }, turn);
        self.meet(host, turn);
    }

    pub(super) fn source_settled(
        &mut self,
        host: &EngineId,
        number: u64,
        turn: &mut PayloadTurn<'_>,
    ) {
        if let Some(source) = self.sources.get_mut(host) {
            source.done.remove(&number);
        }
        self.leave_if_idle(host, turn);
    }

    /// A fetch is over: who still waits is asked for, or told if the bytes do not come.
    pub(super) fn fetch_is_over(
        &mut self,
        place: &ScopedKey,
        failure: Option<&Failure>,
        turn: &mut PayloadTurn<'_>,
    ) {
        if let Some(ask) = self.asks.get_mut(place) {
            ask.failed = match failure {
                Some(_) => ask.failed + 1,
                None if planted!("failed-fetches-of-a-life-count") => ask.failed,
                None => 0,
            };
            if let Some(failure) = failure.filter(|_| ask.failed >= FETCHES_MAX) {
                ask.failed = 0;
                let failure = PayloadFailure::NotMoved(failure.to_string().into());
                return self.fail_clients(place, &failure, turn);
            }
        }
        self.say_wants(place, turn);
        self.settle_ask(place, None, turn);
    }

    /// Tells those of this host who wait for a payload that it does not come.
    pub(super) fn fail_clients(
        &mut self,
        place: &ScopedKey,
        why: &PayloadFailure,
        turn: &mut PayloadTurn<'_>,
    ) {
        for (receiver, _) in self.clients_waiting(place) {
            self.unwant(receiver, place, turn);
            self.fail_want(receiver, place, why, turn);
        }
    }

    /// Tells those who wait in vain, by what the hosts have said. `stage_left` is what those are told
    /// who waited for a process of this host, if the last one has left.
    pub(super) fn settle_ask(
        &mut self,
        place: &ScopedKey,
        stage_left: Option<&PayloadFailure>,
        turn: &mut PayloadTurn<'_>,
    ) {
        // What is there may come back.
        if self.payloads.contains_key(place) {
            return;
        }
        let comes = self.fetching.contains_key(place);
        for (receiver, source) in self.clients_waiting(place) {
            let ask = self.asks.get(place);
            let failure = match source {
                // What comes may be for them.
                WantSource::Host(_) | WantSource::Anybody if comes => None,
                WantSource::Host(host) if !self.knows(&host) => {
                    Some(PayloadFailure::PeerGone(host.0))
                }
                WantSource::Host(host) => ask.and_then(|ask| ask.missing(&host)).cloned(),
                WantSource::Anybody => {
                    ask.and_then(|ask| self.missing_everywhere(place, ask, stage_left))
                }
                WantSource::Here | WantSource::Process(_) => stage_left.cloned(),
            };
            if let Some(failure) = failure {
                self.unwant(receiver, place, turn);
                let former = match place.key.chunk {
                    // The other host may have meant an earlier request.
                    None | Some(0) if stage_left.is_none() => former_use(&failure),
                    _ => FormerUse::No,
                };
                self.fail_want_as(receiver, place, (&failure, former), turn);
            }
        }
    }

    /// True if what this host knows of a payload may be of an earlier request, and another host may have the
    /// payload of the next one.
    pub(super) fn may_be_put_elsewhere(&self, place: &ScopedKey) -> bool {
        self.former(place) != FormerUse::No
            && self.sources.keys().any(|host| self.knows(host))
            && !planted!("a-host-answers-for-all-hosts")
    }

    /// Why a payload comes from no host, if all have answered. What this host knows of it counts as an answer.
    fn missing_everywhere(
        &self,
        place: &ScopedKey,
        ask: &PayloadAsk,
        stage_left: Option<&PayloadFailure>,
    ) -> Option<PayloadFailure> {
        // Where a first chunk came from says nothing of the next request with the same id.
        let is_later = place.key.chunk > Some(0) || planted!("an-id-stays-with-its-host");
        let of_stream = self.stream_host.get(&place.stream()).filter(|_| is_later);
        let told = of_stream.and_then(|(host, _)| ask.missing(host));
        if told.is_some() {
            return told.cloned();
        }
        let is_here = self.stages.contains_key(&ScopedStage::that_puts(place));
        let open = |of: &AskedHost| {
            matches!(of.state, AskState::Unasked | AskState::Asked { .. } | AskState::Full)
        };
        let is_begun = self.lives.get(&place.stream()).is_some();
        if !planted!("any-host-ends-a-stream") && (is_begun || ask.hosts.values().any(open)) {
            return None;
        }
        let own = self.lost(place).filter(|_| self.may_be_put_elsewhere(place));
        let said = || ask.hosts.keys().filter_map(|host| ask.missing(host)).chain(&own);
        // That nobody puts it there any more does not mean that nobody does elsewhere.
        let is_gone = |failure: &&PayloadFailure| {
            matches!(failure, PayloadFailure::PeerGone(_) | PayloadFailure::ProducerGone)
        };
        // What was taken is of an earlier request, unless nothing else is known.
        let known = said().filter(|failure| !is_gone(failure));
        if let Some(failure) = known.min_by_key(|failure| **failure == PayloadFailure::Taken) {
            // Where the stream came from nobody knows of it any more, and others know an earlier one.
            let is_forgotten = of_stream.is_some()
                && !matches!(failure, PayloadFailure::GivenUp(_))
                && !planted!("others-answer-for-who-forgot-a-stream");
            return Some(if is_forgotten { PayloadFailure::Expired } else { failure.clone() });
        }
        let has_stage =
            |of: &AskedHost| matches!(of.state, AskState::Absent { has_stage: true, .. });
        if is_here || ask.hosts.values().any(has_stage) {
            return None;
        }
        said().next().or(stage_left).cloned()
    }
}
