//! What does not come any more: streams that ended, processes that are gone, payloads that were
//! cleaned up.

use super::exchange::PayloadReceiver;
use super::io::{PayloadClient, PayloadFailure, PayloadStream};
use super::note::ScopedKey;
use super::slots::{PoolShare, ReservationOwner, ScopedStage};
use super::{PayloadCore, PayloadTimer, PayloadTurn};
use std::ops::RangeInclusive;
use std::sync::Arc;

/// A stream of one deployment.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ScopedStream {
    pub(super) deployment: Arc<str>,
    pub(super) stream: PayloadStream,
}

impl ScopedKey {
    pub(super) fn stream(&self) -> ScopedStream {
        ScopedStream { deployment: self.deployment.clone(), stream: self.key.stream.clone() }
    }
}

impl ScopedStream {
    /// All keys of it: the one without a number is the first.
    fn keys(&self) -> RangeInclusive<ScopedKey> {
        let scoped = |key| ScopedKey { deployment: self.deployment.clone(), key };
        scoped(self.stream.whole())..=scoped(self.stream.chunk(u64::MAX))
    }
}

impl PayloadCore {
    /// A chunk was put: its stream goes on, and its end is heard of if its producer dies.
    pub(super) fn begin_stream(&mut self, client: PayloadClient, place: &ScopedKey) {
        let stream = place.stream();
        self.ended.remove(&stream);
        if let Some(chunk) = place.key.chunk {
            let before = self.producers.get(&stream).map_or(0, |(_, chunks)| *chunks);
            self.producers.insert(stream, (client, before.max(chunk.saturating_add(1))));
        }
    }

    /// A stream has no further chunk.
    pub(super) fn end(
        &mut self,
        stream: ScopedStream,
        why: &PayloadFailure,
        turn: &mut PayloadTurn<'_>,
    ) {
        let chunks = self.producers.get(&stream).map_or(0, |(_, chunks)| *chunks);
        self.producers.remove(&stream);
        let waited = self.wants.range(stream.keys()).map(|(place, _)| place.clone());
        let waited: Vec<_> = waited.filter(|place| !self.payloads.contains_key(place)).collect();
        self.ended.insert(stream, (why.clone(), chunks));
        for place in waited {
            let why = self.lost(&place).unwrap_or_else(|| why.clone());
            self.fail_wants(&place, &why, turn);
        }
    }

    /// Why what is not here does not come any more, if it does not. What was put before
    /// its stream ended is not beyond the end, though it is so long gone that nobody knows why.
    pub(super) fn lost(&self, place: &ScopedKey) -> Option<PayloadFailure> {
        if let Some(why) = self.spent.get(place) {
            return Some(why.clone());
        }
        let (why, chunks) = self.ended.get(&place.stream())?;
        let was_put = place.key.chunk.is_some_and(|chunk| chunk < *chunks)
            && !planted!("what-is-forgotten-is-beyond-the-end");
        let is_forgotten = was_put && *why == PayloadFailure::Ended;
        Some(if is_forgotten { PayloadFailure::Expired } else { why.clone() })
    }

    /// Nobody gets what is there of a stream, nor waits for it.
    pub(super) fn clean_up(&mut self, stream: &ScopedStream, turn: &mut PayloadTurn<'_>) {
        let there = self.payloads.range(stream.keys()).map(|(place, _)| place.clone());
        for place in there.collect::<Vec<_>>() {
            self.forget(&place, &PayloadFailure::CleanedUp, turn);
        }
        self.end(stream.clone(), &PayloadFailure::CleanedUp, turn);
    }

    /// A process is gone with all that it has; what it put stays.
    pub(super) fn left(&mut self, client: PayloadClient, turn: &mut PayloadTurn<'_>) {
        let Some(state) = self.clients.remove(&client) else { return };
        let share = PoolShare { stage: state.stage.clone(), is_fetched: false };
        for ticket in state.tickets {
            let owner = ReservationOwner::Client(client, ticket);
            self.slots.stop_waiting(&share, owner);
            self.timers.cancel(&PayloadTimer::Wait(client, ticket));
        }
        let deployment = &state.stage.deployment;
        for key in state.wants {
            let place = ScopedKey { deployment: deployment.clone(), key };
            self.unwant(PayloadReceiver::Client(client), &place, turn);
        }
        for claim in state.claims {
            self.give_back(claim, turn);
        }
        for slot in state.reserved {
            self.let_go(slot, turn);
        }
        let its = |(_, producer): &(&ScopedStream, &(PayloadClient, u64))| producer.0 == client;
        let streams = self.producers.iter().filter(its).map(|(stream, _)| stream.clone());
        for stream in streams.collect::<Vec<_>>() {
            self.end(stream, &PayloadFailure::ProducerGone, turn);
        }
        self.fail_wants_of(client, turn);
        self.stage_left(state.stage, turn);
        // There may be a larger share for others.
        self.serve_reservations(turn);
    }

    /// With the last process of a stage goes all that others wait for from it.
    fn stage_left(&mut self, stage: ScopedStage, turn: &mut PayloadTurn<'_>) {
        let Some(processes) = self.stages.get_mut(&stage) else { return };
        *processes -= 1;
        if *processes > 0 || planted!("nobody-misses-a-stage") {
            return;
        }
        self.stages.remove(&stage);
        let ScopedStage { deployment, stage: from } = stage;
        let first = PayloadStream { from: from.clone(), to: "".into(), request: "".into() };
        let first = ScopedKey { deployment: deployment.clone(), key: first.whole() };
        let of_stage =
            |place: &ScopedKey| place.deployment == deployment && place.key.stream.from == from;
        let waited = self.wants.range(first..).map(|(place, _)| place.clone());
        let waited = waited.take_while(of_stage).filter(|place| !self.payloads.contains_key(place));
        for place in waited.collect::<Vec<_>>() {
            let gone = PayloadFailure::ProducerGone;
            self.fail_hosts(&place, &gone, turn);
            if self.asks.contains_key(&place) {
                self.settle_ask(&place, Some(&gone), turn);
            } else {
                self.fail_wants(&place, &gone, turn);
            }
        }
    }
}
