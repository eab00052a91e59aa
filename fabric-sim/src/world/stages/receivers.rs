//! Receivers of streams: each asks for one chunk after another until it is told that there is none.

use super::super::Simulation;
use super::{SimReceiver, SimStageProcess, StageEvent, each_word};
use crate::observation::{PayloadSight, ReceiverOutcome};
use kvferry_engine::core::payload::{
    ClaimId, FormerUse, PayloadAnswer, PayloadClient, PayloadFailure, PayloadHook, PayloadKey,
};
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::run::{Departure, StreamReceiver};

/// How often and for how long a receiver asks again, as `kvferry.omni.receiving` has it.
const ASKS_AGAIN: Nanos = Nanos::from_ms(20);
const UNSURE: Nanos = Nanos::from_secs(30);

/// A receiver: its stream, and which of its receivers.
type ReceiverIx = (u32, u16);

impl Simulation {
    pub(super) fn receiver_of(&mut self, (stream, receiver): ReceiverIx) -> &mut SimReceiver {
        &mut self.stages.streams[stream as usize].receivers[usize::from(receiver)]
    }

    fn receiver_work(&self, (stream, receiver): ReceiverIx) -> StreamReceiver {
        self.stages.streams[stream as usize].work.receivers[usize::from(receiver)]
    }

    fn is_receiver(&mut self, at: ReceiverIx, client: PayloadClient) -> bool {
        let receiver = self.receiver_of(at);
        receiver.client == Some(client) && receiver.end.is_none()
    }

    pub(super) fn receiver_begins(&mut self, at: ReceiverIx) {
        self.stream_moved(at.0);
        let StreamReceiver { host, gone, .. } = self.receiver_work(at);
        let process = Some(SimStageProcess::Receiver(at.0, at.1));
        let Some(client) = self.stage_joins(host, "1", process) else {
            return self.receiver_ends(at, ReceiverOutcome::HostGone);
        };
        self.receiver_of(at).client = Some(client);
        if let Some((after, _)) = gone {
            let (stream, receiver) = at;
            self.stage_after(after, StageEvent::Departs { stream, receiver, client });
        }
        self.receiver_asks(at, client);
    }

    fn receiver_key(&mut self, at: ReceiverIx) -> PayloadKey {
        let chunk = self.receiver_of(at).chunk;
        self.key_of(at.0, chunk)
    }

    fn receiver_asks(&mut self, at: ReceiverIx, client: PayloadClient) {
        let (key, chunk) = (self.receiver_key(at), self.receiver_of(at).chunk);
        let StreamReceiver { host, is_named, .. } = self.receiver_work(at);
        let from = self.stages.streams[at.0 as usize].work.from;
        let producer = usize::from(self.run.hosts[usize::from(from)].instance);
        let hook = match is_named {
            true => PayloadHook::WantFrom {
                key,
                host: self.run.instances[producer].name.as_str().into(),
            },
            false => PayloadHook::Want { key, producer: None },
        };
        let (stream, receiver) = at;
        self.see_payload(host, PayloadSight::Asked { stream, receiver, chunk, is_named });
        self.stage_tells(host, client, hook);
    }

    pub(super) fn receiver_told(
        &mut self,
        at: ReceiverIx,
        client: PayloadClient,
        answer: PayloadAnswer,
    ) {
        let key = self.receiver_key(at);
        let host = self.receiver_work(at).host;
        let is_going = self.receiver_of(at).is_going;
        match answer {
            PayloadAnswer::Abandoned { .. } if is_going => {
                self.receiver_ends(at, ReceiverOutcome::Departed);
            }
            PayloadAnswer::Waits { .. } => {}
            // It crossed with the abandonment, and is for nobody.
            _ if is_going => {}
            PayloadAnswer::Arrived { key: came, claim, offset, bytes, .. }
                if came == key && self.receiver_of(at).claim.is_none() =>
            {
                self.stream_moved(at.0);
                self.receiver_of(at).claim = Some((claim, offset));
                self.stage_tells(host, client, PayloadHook::Take { claim });
                self.compare_payload(at, (offset, Some(bytes)));
                let (stream, receiver) = at;
                let reads = self.receiver_work(at).reads;
                self.stage_after(reads, StageEvent::HasRead { stream, receiver, client });
            }
            PayloadAnswer::Missing { key: missed, former, .. }
                if missed == key && self.is_unsure(at, former) =>
            {
                let (stream, receiver) = at;
                self.stage_after(ASKS_AGAIN, StageEvent::AsksAgain { stream, receiver, client });
            }
            PayloadAnswer::Missing { key: missed, failure, former } if missed == key => {
                let work = &self.stages.streams[at.0 as usize].work;
                let is_former = work.of.is_some() && former != FormerUse::No;
                let has_end = !work.is_whole && !is_former;
                let outcome = match failure {
                    PayloadFailure::Ended if has_end => ReceiverOutcome::Finished,
                    failure => ReceiverOutcome::Missing(failure),
                };
                self.receiver_ends(at, outcome);
            }
            other => {
                let rule = format!("who waits for {key} was told {other:?}");
                self.see_payload(host, PayloadSight::Misuse { rule: &rule });
            }
        }
    }

    /// Whether what a receiver is told may be of an earlier request with its id, for which it waits as
    /// long as the connector does.
    fn is_unsure(&mut self, at: ReceiverIx, former: FormerUse) -> bool {
        let is_again = self.stages.streams[at.0 as usize].work.of.is_some();
        let now = self.now;
        let since = *self.receiver_of(at).unsure.get_or_insert(now);
        is_again && former != FormerUse::No && now < since + UNSURE
    }

    pub(super) fn receiver_asks_again(&mut self, at: ReceiverIx, client: PayloadClient) {
        if self.is_receiver(at, client) && !self.receiver_of(at).is_going {
            self.receiver_asks(at, client);
        }
    }

    /// Compares what a receiver reads with what was put.
    fn compare_payload(&mut self, at: ReceiverIx, (offset, said): (u64, Option<u64>)) {
        let (host, chunk) = (self.receiver_work(at).host, self.receiver_of(at).chunk);
        let state = &self.stages.streams[at.0 as usize];
        let (puts, put) = (state.work.puts, state.producer.put);
        // Any that was put under the key may come.
        let nths = (chunk * puts..(chunk + 1) * puts).take_while(|nth| *nth < put);
        let stamps: Vec<u64> = nths.map(|nth| self.stamp(at.0, nth)).collect();
        let bytes = state.work.chunks.get(chunk as usize).filter(|_| !stamps.is_empty());
        let bytes = bytes.map(|chunk| chunk.bytes);
        let wrong = match (bytes, self.pool(host)) {
            (None, _) => Some("which was not put".to_string()),
            (Some(bytes), _) if said.is_some_and(|said| said != bytes) => {
                Some(format!("{bytes} B, as {said:?} B"))
            }
            (Some(bytes), Some(pool)) => {
                let slot = &pool[offset as usize..][..bytes as usize];
                let differs = |stamp: &u64| {
                    each_word(*stamp, bytes as usize, |at, word| slot[at..at + word.len()] == *word)
                };
                // Where the one that is the same for longest ends.
                let ends = stamps.iter().map(|stamp| differs(stamp).unwrap_or(usize::MAX));
                let differs = ends.max().filter(|end| *end < usize::MAX);
                differs.map(|at| format!("of which bytes from {at} on are not what was put"))
            }
            (Some(_), None) => None,
        };
        let (stream, receiver, wrong) = (at.0, at.1, wrong.as_deref());
        self.see_payload(host, PayloadSight::Got { stream, receiver, chunk, wrong });
    }

    pub(super) fn receiver_has_read(&mut self, at: ReceiverIx, client: PayloadClient) {
        if !self.is_receiver(at, client) {
            return;
        }
        let Some((claim, offset)) = self.receiver_of(at).claim.take() else { return };
        self.stream_moved(at.0);
        self.compare_payload(at, (offset, None));
        self.released(at, client, claim);
        self.receiver_of(at).chunk += 1;
        match self.stages.streams[at.0 as usize].work.is_whole {
            true => self.receiver_ends(at, ReceiverOutcome::Finished),
            false => self.receiver_asks(at, client),
        }
    }

    fn released(&mut self, at: ReceiverIx, client: PayloadClient, claim: ClaimId) {
        let host = self.receiver_work(at).host;
        self.stage_tells(host, client, PayloadHook::Release { claim });
    }

    pub(super) fn receiver_departs(&mut self, at: ReceiverIx, client: PayloadClient) {
        let StreamReceiver { host, gone, .. } = self.receiver_work(at);
        let Some((_, how)) = gone.filter(|_| self.is_receiver(at, client)) else { return };
        self.stream_moved(at.0);
        if how == Departure::Leaves {
            self.receiver_of(at).client = None;
            self.stage_tells(host, client, PayloadHook::Left);
            return self.receiver_ends(at, ReceiverOutcome::Departed);
        }
        if how == Departure::CleansUp {
            let stream = self.stream_name(at.0);
            self.stage_tells(host, client, PayloadHook::CleanUp { stream, is_own: false });
        }
        self.receiver_stops(at, client);
    }

    /// A receiver wants no more.
    fn receiver_stops(&mut self, at: ReceiverIx, client: PayloadClient) {
        let (host, key) = (self.receiver_work(at).host, self.receiver_key(at));
        match self.receiver_of(at).claim.take() {
            Some((claim, _)) => {
                self.released(at, client, claim);
                self.receiver_ends(at, ReceiverOutcome::Departed);
            }
            None if self.receiver_of(at).is_going => {}
            None => {
                self.receiver_of(at).is_going = true;
                self.stage_tells(host, client, PayloadHook::Abandon { key });
            }
        }
    }

    /// Nobody puts what a receiver waits for, and it was not told so. One that was told what may be of an
    /// earlier request asks again, and gives up by itself.
    pub(super) fn receiver_overdue(&mut self, at: ReceiverIx) {
        let (host, now) = (self.receiver_work(at).host, self.now);
        let receiver = self.receiver_of(at);
        if receiver.unsure.is_some_and(|since| now <= since + UNSURE + ASKS_AGAIN) {
            return;
        }
        let (client, chunk, is_going) = (receiver.client, receiver.chunk, receiver.is_going);
        let Some(client) = client.filter(|client| self.is_receiver(at, *client)) else { return };
        let (stream, receiver) = at;
        if !is_going {
            self.see_payload(host, PayloadSight::Overdue { stream, receiver, chunk });
            self.stream_moved(stream);
            self.receiver_stops(at, client);
        }
    }

    pub(super) fn receiver_ends(&mut self, at: ReceiverIx, outcome: ReceiverOutcome) {
        let host = self.receiver_work(at).host;
        let receiver = self.receiver_of(at);
        if receiver.end.is_some() {
            return;
        }
        let chunk = receiver.chunk;
        receiver.end = Some(outcome.clone());
        self.stream_moved(at.0);
        let (stream, receiver) = at;
        let sight = PayloadSight::Ended { stream, receiver, chunk, outcome: &outcome };
        self.see_payload(host, sight);
        self.close_stream(stream);
    }
}
