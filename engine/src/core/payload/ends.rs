//! What does not come any more: streams that ended, processes that are gone, payloads that were
//! cleaned up.

use super::clients::PayloadClientState;
use super::exchange::{HeldPayload, PayloadReceiver};
use super::io::{FormerUse, PayloadClient, PayloadFailure, PayloadStream};
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
        let whole = ScopedKey { deployment: self.deployment.clone(), key: self.stream.whole() };
        whole..=self.key(u64::MAX)
    }

    /// The key of one of its chunks.
    fn key(&self, chunk: u64) -> ScopedKey {
        ScopedKey { deployment: self.deployment.clone(), key: self.stream.chunk(chunk) }
    }
}

/// A stream from its first chunk on, until it has ended.
#[derive(Debug)]
pub(super) struct StreamLife {
    producer: PayloadClient,
    /// Chunks that were put.
    chunks: u64,
    /// The client that took a chunk last.
    receiver: Option<PayloadClient>,
}

/// A stream without further chunks.
#[derive(Debug)]
pub(super) struct EndedStream {
    why: PayloadFailure,
    /// Chunks that there were.
    chunks: u64,
    /// True if a receiver of its first chunk waited, and learned of the end.
    is_known: bool,
}

/// Whether a failure that is told before the first chunk may be of an earlier request.
pub(super) fn former_use(why: &PayloadFailure) -> FormerUse {
    match why {
        PayloadFailure::Taken => FormerUse::Yes,
        PayloadFailure::Ended
        | PayloadFailure::GivenUp(_)
        | PayloadFailure::ProducerGone
        | PayloadFailure::Expired
        | PayloadFailure::CleanedUp => FormerUse::Perhaps,
        _ => FormerUse::No,
    }
}

impl PayloadCore {
    /// Takes a chunk into its stream. The first one begins the stream anew; a later one belongs to the
    /// stream of its producer. Returns why nobody gets the chunk, if so.
    pub(super) fn begin_stream(
        &mut self,
        client: PayloadClient,
        place: &ScopedKey,
        turn: &mut PayloadTurn<'_>,
    ) -> Option<PayloadFailure> {
        let chunk = place.key.chunk?;
        let stream = place.stream();
        let is_first = chunk == 0 && !planted!("an-id-goes-on-where-it-ended");
        if is_first {
            self.begin_anew(&stream, turn);
        }
        let is_others = |life: &StreamLife| {
            life.producer != client && !planted!("any-process-goes-on-with-a-stream")
        };
        let life = self.lives.get(&stream);
        let ended = self.ended.get(&stream);
        if life.is_some_and(is_others) {
            return Some(PayloadFailure::Superseded);
        } else if ended.is_some_and(|ended| ended.why == PayloadFailure::CleanedUp) {
            return Some(PayloadFailure::CleanedUp);
        }
        let (before, receiver) = life.map_or((0, None), |life| (life.chunks, life.receiver));
        let chunks = before.max(chunk.saturating_add(1));
        self.ended.remove(&stream);
        // What the host of an earlier request with this id lacks is put here.
        if !self.sources.is_empty() && !planted!("an-id-comes-from-where-it-came") {
            self.stream_host.insert(stream.clone(), self.host.clone());
        }
        self.lives.insert(stream, StreamLife { producer: client, chunks, receiver });
        None
    }

    /// Forgets what is known of an earlier stream with this name. Those who wait for a later chunk
    /// wait on.
    fn begin_anew(&mut self, stream: &ScopedStream, turn: &mut PayloadTurn<'_>) {
        let later = stream.key(1)..=stream.key(u64::MAX);
        self.spent.remove_range(later.clone());
        let there = self.payloads.range(later).filter(|(_, payload)| payload.is_chunk);
        for place in there.map(|(place, _)| place.clone()).collect::<Vec<_>>() {
            self.withdraw(&place, turn);
        }
        self.ended.remove(stream);
        self.lives.remove(stream);
    }

    /// Forgets what became of an earlier stream with this name that was put here: the first chunk of the next one
    /// came from another host.
    pub(super) fn begun_elsewhere(&mut self, stream: &ScopedStream) {
        if self.lives.get(stream).is_none() && !planted!("a-host-answers-for-all-hosts") {
            self.spent.remove_range(stream.keys());
            self.ended.remove(stream);
        }
    }

    /// A chunk of a stream was taken.
    pub(super) fn took_chunk(&mut self, stream: &ScopedStream, client: PayloadClient) {
        if let Some(life) = self.lives.get_mut(stream) {
            life.receiver = Some(client);
        }
    }

    /// False if another process has begun the stream.
    pub(super) fn puts_stream(&self, client: PayloadClient, stream: &ScopedStream) -> bool {
        self.lives.get(stream).is_none_or(|life| life.producer == client)
            || planted!("an-end-is-of-any-request")
    }

    /// True if the client puts the stream or took its last chunk, or nobody has begun it.
    pub(super) fn has_part_in(&self, client: PayloadClient, stream: &ScopedStream) -> bool {
        let receives = |life: &StreamLife| life.receiver == Some(client);
        self.puts_stream(client, stream) || self.lives.get(stream).is_some_and(receives)
    }

    /// Drops what was left here by a deployment of which no process is there.
    pub(super) fn forget_deployment(&mut self, deployment: &Arc<str>, turn: &mut PayloadTurn<'_>) {
        let first = PayloadStream { from: "".into(), to: "".into(), request: "".into() };
        let first = ScopedKey { deployment: deployment.clone(), key: first.whole() };
        let its = |place: &ScopedKey| place.deployment == *deployment;
        let left = self.payloads.range(first..).map(|(place, _)| place).take_while(|at| its(at));
        for place in left.cloned().collect::<Vec<_>>() {
            self.withdraw(&place, turn);
        }
        self.spent.retain(|place| !its(place));
        let is_others = |stream: &ScopedStream| stream.deployment != *deployment;
        self.ended.retain(is_others);
        self.lives.retain(is_others);
        self.stream_host.retain(is_others);
    }

    /// A payload will not be put, which its receivers learn.
    pub(super) fn give_up(
        &mut self,
        place: &ScopedKey,
        is_chunk: bool,
        why: Arc<str>,
        turn: &mut PayloadTurn<'_>,
    ) {
        if self.payloads.contains_key(place) {
            return;
        }
        let why = PayloadFailure::GivenUp(why);
        let is_later = is_chunk && place.key.chunk > Some(0);
        let former = if is_later { FormerUse::No } else { FormerUse::Perhaps };
        self.spent.insert(place.clone(), (why.clone(), former));
        self.fail_wants(place, &why, turn);
    }

    /// Nobody gets a payload that was not taken.
    pub(super) fn dropped(&mut self, place: &ScopedKey, turn: &mut PayloadTurn<'_>) {
        if self.payloads.contains_key(place) {
            self.forget(place, &PayloadFailure::CleanedUp, turn);
        }
    }

    /// A stream has no further chunk.
    pub(super) fn end(
        &mut self,
        stream: ScopedStream,
        why: &PayloadFailure,
        turn: &mut PayloadTurn<'_>,
    ) {
        let chunks = self.lives.get(&stream).map(|life| life.chunks);
        // What was cleaned up lacks chunks, so that it is not complete when its producer ends it.
        let is_cleaned =
            self.ended.get(&stream).is_some_and(|ended| ended.why == PayloadFailure::CleanedUp);
        if chunks.is_none() && is_cleaned && !planted!("an-end-completes-what-was-cleaned-up") {
            return;
        }
        let chunks = chunks.unwrap_or(0);
        self.lives.remove(&stream);
        let waited = self.wants.range(stream.keys()).map(|(place, _)| place.clone());
        let waited: Vec<_> = waited.filter(|place| !self.payloads.contains_key(place)).collect();
        let is_known = waited.contains(&stream.key(0));
        self.ended.insert(stream, EndedStream { why: why.clone(), chunks, is_known });
        for place in waited {
            let why = self.lost(&place).unwrap_or_else(|| why.clone());
            self.fail_wants(&place, &why, turn);
        }
    }

    /// Why what is not here does not come any more, if it does not. What was put before
    /// its stream ended is not beyond the end, though it is so long gone that nobody knows why.
    pub(super) fn lost(&self, place: &ScopedKey) -> Option<PayloadFailure> {
        if let Some((why, _)) = self.spent.get(place) {
            return Some(why.clone());
        }
        let EndedStream { why, chunks, .. } = self.ended.get(&place.stream())?;
        let was_put = place.key.chunk.is_some_and(|chunk| chunk < *chunks)
            && !planted!("what-is-forgotten-is-beyond-the-end");
        let is_forgotten = was_put && *why == PayloadFailure::Ended;
        Some(if is_forgotten { PayloadFailure::Expired } else { why.clone() })
    }

    /// Whether the failure of a payload that is asked for now may be of an earlier request.
    pub(super) fn former(&self, place: &ScopedKey) -> FormerUse {
        if let Some((_, former)) = self.spent.get(place) {
            return *former;
        }
        match (place.key.chunk, self.ended.get(&place.stream())) {
            (Some(1..), _) | (_, None) => FormerUse::No,
            (_, Some(ended)) if ended.is_known => FormerUse::Yes,
            (_, Some(_)) => FormerUse::Perhaps,
        }
    }

    /// Nobody gets the chunks that are there of a stream, nor waits for one. What has such a key and
    /// is no chunk stays.
    pub(super) fn clean_up(
        &mut self,
        client: PayloadClient,
        stream: &ScopedStream,
        turn: &mut PayloadTurn<'_>,
    ) {
        let there = self.payloads.range(stream.keys());
        let is_its = |(place, payload): &(&ScopedKey, &HeldPayload)| {
            payload.is_chunk || payload.origin.is_some() || place.key.chunk.is_none()
        };
        let there = there.filter(is_its).map(|(place, _)| place.clone());
        for place in there.collect::<Vec<_>>() {
            self.forget(&place, &PayloadFailure::CleanedUp, turn);
        }
        let puts = |of: &PayloadClientState| of.stage.stage == stream.stream.from;
        let is_put_here = self.lives.get(stream).is_some() || self.ended.get(stream).is_some();
        let is_elsewhere = !is_put_here
            && !self.sources.is_empty()
            && !self.clients.get(&client).is_some_and(puts);
        self.end(stream.clone(), &PayloadFailure::CleanedUp, turn);
        // What is not put here may be put elsewhere, for the next request with the same id.
        if is_elsewhere && !planted!("an-end-is-of-all-hosts") {
            self.ended.remove(stream);
        }
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
        let its = |(_, life): &(&ScopedStream, &StreamLife)| life.producer == client;
        let streams = self.lives.iter().filter(its).map(|(stream, _)| stream.clone());
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
