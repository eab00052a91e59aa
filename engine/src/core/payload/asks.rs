//! What other hosts are asked for, how far each is with it, and when it is asked again.

use super::fetch::share_of;
use super::io::PayloadFailure;
use super::note::ScopedKey;
use super::{PayloadCore, PayloadTimer, PayloadTurn};
use crate::core::ids::EngineId;
use crate::core::time::Nanos;
use std::collections::BTreeMap;

/// Pause before a host is asked again that had no room, or lacked what was wanted; doubles, so that
/// what is refused costs little.
pub(super) const ASK_PAUSE: Nanos = Nanos::from_ms(100);

/// How often it doubles; less often if it is here that there was no room, where it may come any time.
const DOUBLINGS_MAX: u32 = 6;
const DOUBLINGS_HERE_MAX: u32 = 3;

/// How far one host is with what it is asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum AskState {
    /// It is to be asked.
    #[default]
    Unasked,
    Asked {
        want: u64,
    },
    /// Nobody there has begun the stream; somebody may, perhaps one of the stage that is there.
    Absent {
        want: u64,
        has_stage: bool,
    },
    /// There is no room, there for the question or here for the answer: it is asked again.
    Full,
    Missing(PayloadFailure),
}

/// A host that is asked for a payload.
#[derive(Debug, Default)]
pub(super) struct AskedHost {
    pub(super) state: AskState,
    /// Times in a row that it was to be asked again.
    again: u32,
}

/// A payload that other hosts are asked for.
#[derive(Debug, Default)]
pub(super) struct PayloadAsk {
    pub(super) hosts: BTreeMap<EngineId, AskedHost>,
    /// Times in a row that its bytes did not come.
    pub(super) failed: u32,
    /// Since when there is no room for it here.
    roomless: Option<Nanos>,
}

impl AskState {
    /// The want that the host is to answer, if any.
    pub(super) fn open_want(&self) -> Option<u64> {
        match self {
            AskState::Asked { want } | AskState::Absent { want, .. } => Some(*want),
            AskState::Unasked | AskState::Full | AskState::Missing(_) => None,
        }
    }
}

impl PayloadAsk {
    pub(super) fn entries(&self) -> usize {
        1 + self.hosts.len()
    }

    pub(super) fn missing(&self, host: &EngineId) -> Option<&PayloadFailure> {
        match &self.hosts.get(host)?.state {
            AskState::Missing(failure) => Some(failure),
            _ => None,
        }
    }
}

impl PayloadCore {
    pub(super) fn asks_of(&self, host: &EngineId) -> Vec<ScopedKey> {
        let asks = self.asks.iter().filter(|(_, ask)| ask.hosts.contains_key(host));
        asks.map(|(place, _)| place.clone()).collect()
    }

    fn asked_mut(&mut self, host: &EngineId, place: &ScopedKey) -> Option<&mut AskedHost> {
        self.asks.get_mut(place)?.hosts.get_mut(host)
    }

    pub(super) fn set_ask(&mut self, host: &EngineId, place: &ScopedKey, state: AskState) {
        if let Some(asked) = self.asked_mut(host, place) {
            asked.state = state;
        }
    }

    /// The want that the host is to answer, if any.
    pub(super) fn open_want(&self, host: &EngineId, place: &ScopedKey) -> Option<u64> {
        self.asks.get(place)?.hosts.get(host)?.state.open_want()
    }

    /// A host is asked again in a while, if it is asked at all.
    pub(super) fn ask_in(
        &mut self,
        host: &EngineId,
        place: &ScopedKey,
        pause: Nanos,
        turn: &mut PayloadTurn<'_>,
    ) {
        if self.asked_mut(host, place).is_some() {
            let timer = PayloadTimer::Ask(place.clone(), host.clone());
            self.timers.arm_if_idle(timer, turn.now + pause);
        }
    }

    pub(super) fn ask_after_pause(
        &mut self,
        host: &EngineId,
        place: &ScopedKey,
        turn: &mut PayloadTurn<'_>,
    ) {
        let Some(asked) = self.asked_mut(host, place) else { return };
        let pause = ASK_PAUSE.scale(1 << asked.again, 1);
        if !planted!("what-is-refused-is-asked-for-at-once") {
            asked.again = (asked.again + 1).min(DOUBLINGS_MAX);
        }
        self.ask_in(host, place, pause, turn);
    }

    /// There is no room at the host: it is asked again.
    pub(super) fn ask_later(
        &mut self,
        host: &EngineId,
        place: &ScopedKey,
        turn: &mut PayloadTurn<'_>,
    ) {
        self.set_ask(host, place, AskState::Full);
        self.ask_after_pause(host, place, turn);
    }

    /// A host has not acknowledged so much that it cannot be asked now.
    pub(super) fn want_untold(
        &mut self,
        host: &EngineId,
        (place, want): (&ScopedKey, u64),
        turn: &mut PayloadTurn<'_>,
    ) {
        if self.open_want(host, place) == Some(want) {
            self.ask_later(host, place, turn);
        }
    }

    /// There was no room here since then for what the host has, which is so long: it is asked again, or
    /// those who wait are told.
    pub(super) fn ask_when_there_is_room(
        &mut self,
        (host, place): (&EngineId, &ScopedKey),
        (since, bytes): (Nanos, u64),
        turn: &mut PayloadTurn<'_>,
    ) {
        let room = self.config.room;
        let Some(ask) = self.asks.get_mut(place) else { return };
        let since = *ask.roomless.get_or_insert(since);
        let is_over = room != Nanos::ZERO && turn.now >= since + room;
        if is_over && !planted!("room-is-waited-for-for-ever") {
            ask.roomless = None;
            let failure = self.slots.full(&share_of(place), bytes, self.shares());
            return self.fail_clients(place, &failure, turn);
        }
        if let Some(asked) = self.asked_mut(host, place) {
            asked.again = asked.again.min(DOUBLINGS_HERE_MAX);
            self.ask_later(host, place, turn);
        }
    }

    /// What was asked for came.
    pub(super) fn ask_is_met(&mut self, place: &ScopedKey) {
        let Some(ask) = self.asks.get_mut(place) else { return };
        ask.roomless = None;
        for asked in ask.hosts.values_mut() {
            asked.again = 0;
        }
    }

    /// What came from another host is gone: for those who wait there may be more.
    pub(super) fn ask_again(&mut self, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        if let Some(ask) = self.asks.get_mut(place) {
            for asked in ask.hosts.values_mut() {
                if matches!(asked.state, AskState::Missing(_)) {
                    asked.state = AskState::Unasked;
                }
            }
        }
        self.say_wants(place, turn);
    }

    /// Asks a host again that had no room, was out of reach, or did not have it.
    pub(super) fn ask_is_due(
        &mut self,
        host: &EngineId,
        place: &ScopedKey,
        turn: &mut PayloadTurn<'_>,
    ) {
        let Some(asked) = self.asked_mut(host, place) else { return };
        if matches!(asked.state, AskState::Full | AskState::Missing(_)) {
            asked.state = AskState::Unasked;
            self.say_wants(place, turn);
        }
    }
}
