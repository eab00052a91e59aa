//! Which other hosts are asked for what nobody puts here, and what they say.
//!
//! A host is believed of what it puts itself. It ends a want that names it; one that names nobody only
//! if the stream is known to be its own, or if nobody else has begun that stream.

use super::exchange::{PayloadReceiver, WantSource};
use super::fetch::FETCHES_MAX;
use super::io::{PayloadEffect, PayloadFailure, PayloadHost};
use super::note::{DirectoryCall, PayloadNote, REMOTE_NAMES_MAX, ScopedKey};
use super::slots::ScopedStage;
use super::source::cut;
use super::{PayloadCore, PayloadTimer, PayloadTurn};
use crate::core::error::Failure;
use crate::core::ids::{EngineId, Incarnation};
use crate::core::time::Nanos;
use crate::fabric::Endpoint;
use std::collections::{BTreeMap, BTreeSet};

/// Pause before a host that was lost is looked for again; doubles.
const MEET_PAUSE: Nanos = Nanos::from_secs(1);

/// Pause before a host is asked again, as there was no room.
const ASK_PAUSE: Nanos = Nanos::from_ms(100);

/// How often in a row that is tried to tell it what became of what it offered.
const MEET_TRIES_MAX: u32 = 6;

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
    state: HostState,
    /// The incarnation that was met last.
    incarnation: Option<Incarnation>,
    /// The highest number that it offered in that incarnation.
    offered: u64,
    /// What became of what it offered, as long as it may not know.
    done: BTreeMap<u64, bool>,
    /// Payloads that it is asked for.
    asks: u32,
    /// Times in a row that it was lost.
    lost: u32,
}

/// How far one host is with what it is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum AskState {
    /// It is to be asked.
    Unasked,
    Asked,
    /// Nobody there has begun the stream; somebody may, perhaps one of the stage that is there.
    Absent {
        has_stage: bool,
    },
    /// There is no room, there for the question or here for the answer: it is asked again.
    Full,
    Missing(PayloadFailure),
}

/// A payload that other hosts are asked for.
#[derive(Debug, Default)]
pub(super) struct PayloadAsk {
    hosts: BTreeMap<EngineId, AskState>,
    /// Times in a row that its bytes did not come.
    failed: u32,
}

impl PayloadAsk {
    pub(super) fn entries(&self) -> usize {
        1 + self.hosts.len()
    }
}

impl SourceHost {
    pub(super) fn entries(&self) -> usize {
        self.done.len()
    }
}

impl PayloadCore {
    /// Whether a host is known as one that puts payloads.
    pub(super) fn knows(&self, host: &EngineId) -> bool {
        self.sources.contains_key(host)
    }

    pub(super) fn control_of(&self, host: &EngineId) -> Option<Endpoint> {
        self.sources.get(host).map(|host| host.control.clone())
    }

    /// These are the other hosts.
    pub(super) fn set_hosts(&mut self, hosts: Vec<PayloadHost>, turn: &mut PayloadTurn<'_>) {
        let named: BTreeSet<EngineId> = hosts.iter().map(|host| host.engine.clone()).collect();
        let left = self.sources.keys().filter(|host| !named.contains(*host)).cloned();
        for host in left.collect::<Vec<_>>() {
            self.source_parted(&host, turn);
            self.sources.remove(&host);
            self.timers.cancel(&PayloadTimer::Meet(host.clone()));
            turn.push(PayloadEffect::DecodePeer(DirectoryCall::Leave { peer: host }));
        }
        for PayloadHost { engine, control } in hosts {
            let fresh = SourceHost {
                control: control.clone(),
                state: HostState::Unmet,
                incarnation: None,
                offered: 0,
                done: BTreeMap::new(),
                asks: 0,
                lost: 0,
            };
            if engine != self.host.0 {
                self.sources.entry(engine).or_insert(fresh).control = control;
            }
        }
        for place in self.wants.keys().cloned().collect::<Vec<_>>() {
            self.ask_hosts(&place, turn);
            self.settle_ask(&place, None, turn);
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
                WantSource::Anybody => wanted.extend(self.sources.keys().cloned()),
                WantSource::Host(host) => {
                    wanted.insert(host);
                }
                WantSource::Here | WantSource::Process(_) => {}
            }
        }
        wanted.retain(|host| self.sources.contains_key(host));
        let asked = self.asks.get(place).map(|ask| ask.hosts.keys().cloned());
        let asked: BTreeSet<EngineId> = asked.into_iter().flatten().collect();
        for host in asked.difference(&wanted) {
            self.unask(host, place, turn);
        }
        for host in wanted.difference(&asked) {
            let ask = self.asks.entry(place.clone()).or_default();
            ask.hosts.insert(host.clone(), AskState::Unasked);
            if let Some(source) = self.sources.get_mut(host) {
                source.asks += 1;
            }
        }
        if wanted.is_empty() {
            self.asks.remove(place);
            self.timers.cancel(&PayloadTimer::Ask(place.clone()));
            return self.cancel_fetch(place, turn);
        }
        self.say_wants(place, turn);
    }

    /// A host is not asked for a payload any more.
    fn unask(&mut self, host: &EngineId, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        let Some(ask) = self.asks.get_mut(place) else { return };
        let state = ask.hosts.remove(host);
        if state.as_ref().is_some_and(AskState::is_open) {
            self.tell_source(host, PayloadNote::Unwant { place: place.clone() }, turn);
        }
        if let Some(source) = self.sources.get_mut(host).filter(|_| state.is_some()) {
            source.asks -= 1;
        }
        self.leave_if_idle(host, turn);
    }

    /// Asks the hosts that are to be asked, unless one of them sends it already.
    fn say_wants(&mut self, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        if self.fetching.contains_key(place) {
            return;
        }
        if place.text_len() > REMOTE_NAMES_MAX {
            let what = "bytes in the names of a payload that is on another host";
            return self.fail_clients(place, &PayloadFailure::Overload(what.into()), turn);
        }
        let Some(ask) = self.asks.get_mut(place) else { return };
        let unasked = ask.hosts.iter_mut().filter(|(_, state)| **state == AskState::Unasked);
        let mut asked = Vec::new();
        for (host, state) in unasked {
            if self.sources.get(host).is_some_and(|source| source.state == HostState::Met) {
                *state = AskState::Asked;
            }
            asked.push((host.clone(), state.clone()));
        }
        for (host, state) in asked {
            if state == AskState::Asked {
                self.tell_source(&host, PayloadNote::Want { place: place.clone() }, turn);
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
        if source.asks == 0 && source.done.is_empty() && source.state != HostState::Unmet {
            source.state = HostState::Unmet;
            turn.push(PayloadEffect::DecodePeer(DirectoryCall::Leave { peer: host.clone() }));
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
        if source.incarnation.replace(incarnation) != Some(incarnation) {
            source.offered = 0;
            source.done.clear();
        }
        (source.state, source.lost) = (HostState::Met, 0);
        // What it offers next may be what it is still to hear of.
        for (number, got) in source.done.clone() {
            self.tell_source(host, PayloadNote::Done { number, got }, turn);
        }
        for place in self.asks_of(host) {
            self.set_ask(host, &place, AskState::Unasked);
            self.say_wants(&place, turn);
        }
        self.leave_if_idle(host, turn);
    }

    fn asks_of(&self, host: &EngineId) -> Vec<ScopedKey> {
        let asks = self.asks.iter().filter(|(_, ask)| ask.hosts.contains_key(host));
        asks.map(|(place, _)| place.clone()).collect()
    }

    fn set_ask(&mut self, host: &EngineId, place: &ScopedKey, state: AskState) {
        if let Some(ask) = self.asks.get_mut(place).and_then(|ask| ask.hosts.get_mut(host)) {
            *ask = state;
        }
    }

    /// A host is gone, or out of reach: who waits for it learns that.
    pub(super) fn source_parted(&mut self, host: &EngineId, turn: &mut PayloadTurn<'_>) {
        let Some(source) = self.sources.get_mut(host) else { return };
        if source.state == HostState::Unmet {
            return;
        }
        source.state = HostState::Unmet;
        let pause = MEET_PAUSE.scale(1 << source.lost.min(MEET_TRIES_MAX - 1), 1);
        source.lost += 1;
        if source.lost > MEET_TRIES_MAX {
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
            if self.asks.contains_key(&place) {
                self.timers.arm_if_idle(PayloadTimer::Ask(place), turn.now + pause);
            }
        }
    }

    /// Looks for a host that does not know yet what became of what it offered.
    pub(super) fn meet_again(&mut self, host: &EngineId, turn: &mut PayloadTurn<'_>) {
        if self.sources.get(host).is_some_and(|source| !source.done.is_empty()) {
            self.meet(host, turn);
        }
    }

    /// A host says that it does not have what it was asked for, and never will; or that nobody there
    /// has begun the stream, and whether somebody of the stage is there.
    pub(super) fn source_lacks(
        &mut self,
        host: &EngineId,
        place: &ScopedKey,
        said: Result<bool, PayloadFailure>,
        turn: &mut PayloadTurn<'_>,
    ) {
        if self.is_asked(host, place) {
            let state = match said {
                Ok(has_stage) => AskState::Absent { has_stage },
                Err(PayloadFailure::Overload(_)) => return self.ask_later(host, place, turn),
                Err(failure) => AskState::Missing(cut(&failure)),
            };
            self.set_ask(host, place, state);
            self.settle_ask(place, None, turn);
        }
    }

    /// There is no room: the host is asked again.
    pub(super) fn ask_later(
        &mut self,
        host: &EngineId,
        place: &ScopedKey,
        turn: &mut PayloadTurn<'_>,
    ) {
        if self.asks.contains_key(place) {
            self.timers.arm_if_idle(PayloadTimer::Ask(place.clone()), turn.now + ASK_PAUSE);
            self.set_ask(host, place, AskState::Full);
        }
    }

    /// Whether an answer of the host is due.
    pub(super) fn is_asked(&self, host: &EngineId, place: &ScopedKey) -> bool {
        let state = self.asks.get(place).and_then(|ask| ask.hosts.get(host));
        state.is_some_and(AskState::is_open)
    }

    /// Whether an offer is none that was heard of before.
    pub(super) fn is_new_offer(
        &mut self,
        host: &EngineId,
        incarnation: Incarnation,
        number: u64,
    ) -> bool {
        let Some(source) = self.sources.get_mut(host) else { return false };
        if source.incarnation != Some(incarnation) || number <= source.offered {
            return false;
        }
        source.offered = number;
        true
    }

    /// Tells a host what became of what it offered, until it knows.
    pub(super) fn fetch_done(
        &mut self,
        host: &EngineId,
        incarnation: Incarnation,
        (number, got): (u64, bool),
        turn: &mut PayloadTurn<'_>,
    ) {
        let most = self.config.host_payloads_max as usize;
        let Some(source) = self.sources.get_mut(host) else { return };
        if source.incarnation != Some(incarnation) {
            return;
        }
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

    /// A host offers something, and has to be asked anew for more; false if it was not asked.
    pub(super) fn answered(&mut self, host: &EngineId, place: &ScopedKey) -> bool {
        let is_asked = self.is_asked(host, place);
        if is_asked {
            self.set_ask(host, place, AskState::Unasked);
        }
        is_asked
    }

    /// A fetch is over: who still waits is asked for, or told if the bytes do not come.
    pub(super) fn fetch_is_over(
        &mut self,
        place: &ScopedKey,
        failure: Option<&Failure>,
        turn: &mut PayloadTurn<'_>,
    ) {
        if let Some(ask) = self.asks.get_mut(place) {
            ask.failed = if failure.is_some() { ask.failed + 1 } else { 0 };
            if let Some(failure) = failure.filter(|_| ask.failed >= FETCHES_MAX) {
                ask.failed = 0;
                let failure = PayloadFailure::NotMoved(failure.to_string().into());
                return self.fail_clients(place, &failure, turn);
            }
        }
        self.say_wants(place, turn);
        self.settle_ask(place, None, turn);
    }

    /// What came from another host is gone: for those who wait there may be more.
    pub(super) fn ask_again(&mut self, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        self.ask_those(place, |state| matches!(state, AskState::Missing(_)), turn);
    }

    /// Asks the hosts again that had no room, or were out of reach.
    pub(super) fn ask_lost(&mut self, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        let is_lost = |state: &AskState| {
            matches!(state, AskState::Full | AskState::Missing(PayloadFailure::PeerGone(_)))
        };
        self.ask_those(place, is_lost, turn);
    }

    fn ask_those(
        &mut self,
        place: &ScopedKey,
        which: impl Fn(&AskState) -> bool,
        turn: &mut PayloadTurn<'_>,
    ) {
        if let Some(ask) = self.asks.get_mut(place) {
            for state in ask.hosts.values_mut().filter(|state| which(state)) {
                *state = AskState::Unasked;
            }
        }
        self.say_wants(place, turn);
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
                self.fail_want(receiver, place, &failure, turn);
            }
        }
    }

    fn missing_everywhere(
        &self,
        place: &ScopedKey,
        ask: &PayloadAsk,
        stage_left: Option<&PayloadFailure>,
    ) -> Option<PayloadFailure> {
        let told = self.stream_host.get(&place.stream()).and_then(|host| ask.missing(host));
        if told.is_some() {
            return told.cloned();
        }
        let is_here = self.stages.contains_key(&ScopedStage::that_puts(place));
        let open = |state: &AskState| {
            matches!(state, AskState::Unasked | AskState::Asked | AskState::Full)
        };
        let is_begun = self.producers.get(&place.stream()).is_some();
        if !planted!("any-host-ends-a-stream") && (is_begun || ask.hosts.values().any(open)) {
            return None;
        }
        let said = || ask.hosts.keys().filter_map(|host| ask.missing(host));
        // That nobody puts it there any more does not mean that nobody does elsewhere.
        let is_gone = |failure: &&PayloadFailure| {
            matches!(failure, PayloadFailure::PeerGone(_) | PayloadFailure::ProducerGone)
        };
        if let Some(failure) = said().find(|failure| !is_gone(failure)) {
            return Some(failure.clone());
        }
        let has_stage = |state: &AskState| *state == AskState::Absent { has_stage: true };
        if is_here || ask.hosts.values().any(has_stage) {
            return None;
        }
        said().next().or(stage_left).cloned()
    }
}

impl AskState {
    /// True if an answer may come.
    fn is_open(&self) -> bool {
        matches!(self, AskState::Asked | AskState::Absent { .. })
    }
}

impl PayloadAsk {
    fn missing(&self, host: &EngineId) -> Option<&PayloadFailure> {
        match self.hosts.get(host)? {
            AskState::Missing(failure) => Some(failure),
            _ => None,
        }
    }
}
