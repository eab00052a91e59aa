//! Processes of stages, which put and get payloads at the hosts, and who ends what does not end.

mod receivers;

use super::Simulation;
use super::event::SimEvent;
use crate::invariants::LivenessBounds;
use crate::observation::{Observation, PayloadSight, ProducerEnd, ReceiverOutcome};
use kvferry_engine::core::payload::{
    ClaimId, PayloadAnswer, PayloadClient, PayloadFailure, PayloadHook, PayloadInput, PayloadKey,
    PayloadStream, SlotId,
};
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::decide::{kind, mix};
use kvferry_scenarios::run::{Run, StreamReceiver, WorkloadChunk, WorkloadEnd, WorkloadStream};
use std::collections::{BTreeMap, BTreeSet};

/// Of what the bytes of a payload are made.
const CONTENT: u64 = kind("payload.content");

/// Bytes of a slot that nobody has written yet.
const UNWRITTEN: u8 = 0xA5;

/// Streams of the world's own, sent one after another, at most.
const PROBES: usize = 8;

/// What waits in the event queue for a process of a stage. Its client is void once it is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StageEvent {
    /// A producer begins.
    Begins { stream: u32 },
    /// A producer wants room for its next chunk.
    Reserves { stream: u32, client: PayloadClient },
    /// A producer has written a chunk.
    Writes { stream: u32, client: PayloadClient },
    /// A receiver begins.
    Asks { stream: u32, receiver: u16 },
    /// A receiver asks again for what may have been missed by an earlier request with its id.
    AsksAgain { stream: u32, receiver: u16, client: PayloadClient },
    /// A receiver has read a chunk.
    HasRead { stream: u32, receiver: u16, client: PayloadClient },
    /// A receiver goes away.
    Departs { stream: u32, receiver: u16, client: PayloadClient },
}

/// Whose process a client of a host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SimStageProcess {
    Producer(u32),
    Receiver(u32, u16),
}

#[derive(Debug, Default)]
struct SimProducer {
    client: Option<PayloadClient>,
    /// Payloads that it has put, each of `puts` of a chunk counted.
    put: u32,
    /// Where it writes.
    slot: Option<(SlotId, u64)>,
    end: Option<ProducerEnd>,
}

#[derive(Debug, Default)]
struct SimReceiver {
    client: Option<PayloadClient>,
    /// Chunks that it has read.
    chunk: u32,
    /// What it reads, and where that begins.
    claim: Option<(ClaimId, u64)>,
    /// Since when what it is told may be of an earlier request with its id.
    unsure: Option<Nanos>,
    /// It wants no more, and waits until its host says so.
    is_going: bool,
    end: Option<ReceiverOutcome>,
}

#[derive(Debug)]
struct SimStream {
    work: WorkloadStream,
    producer: SimProducer,
    receivers: Vec<SimReceiver>,
    /// When something of it last came a step further.
    moved: Nanos,
    /// Everybody has ended, and what was left is cleaned up.
    is_closed: bool,
}

impl SimStream {
    fn new(work: WorkloadStream) -> SimStream {
        let receivers = work.receivers.iter().map(|_| SimReceiver::default()).collect();
        let (producer, moved) = (SimProducer::default(), Nanos::ZERO);
        SimStream { work, producer, receivers, moved, is_closed: false }
    }

    fn is_over(&self) -> bool {
        self.producer.end.is_some() && self.receivers.iter().all(|one| one.end.is_some())
    }

    /// Hosts where it has processes.
    fn hosts(&self) -> BTreeSet<u16> {
        self.work.receivers.iter().map(|one| one.host).chain([self.work.from]).collect()
    }
}

/// All streams, those of the workload before the world's own.
#[derive(Debug)]
pub(super) struct SimStages {
    streams: Vec<SimStream>,
    /// Streams of the workload.
    own: usize,
    clients: BTreeMap<(u16, PayloadClient), SimStageProcess>,
    next_client: u32,
    /// Streams that are not closed.
    pub(super) open: usize,
    /// When the last of them begins.
    pub(super) last: Nanos,
    /// Without a step for this long, who orders the work ends a stream that has no producer.
    pub(super) patience: Nanos,
}

impl SimStages {
    pub(super) fn new(run: &Run) -> SimStages {
        let streams: Vec<_> = run.streams.iter().cloned().map(SimStream::new).collect();
        SimStages {
            own: streams.len(),
            open: streams.len(),
            streams,
            clients: BTreeMap::new(),
            next_client: 0,
            last: last_start(run),
            patience: patience(run),
        }
    }

    /// Receivers of the workload that ended so.
    pub(super) fn ended(&self, is_it: impl Fn(&ReceiverOutcome) -> bool) -> u64 {
        let all = self.streams[..self.own].iter().flat_map(|stream| &stream.receivers);
        all.filter(|one| one.end.as_ref().is_some_and(&is_it)).count() as u64
    }

    pub(super) fn all_probed(&self) -> bool {
        self.streams.len() - self.own >= PROBES
    }
}

/// How long a stream without a producer is waited for: for a lost host, twice the lease of what was
/// lent before, and the time that what comes from another host waits for room. Zero without hosts.
pub(super) fn patience(run: &Run) -> Nanos {
    let Some(room) = run.hosts.iter().map(|host| host.config.room).max() else {
        return Nanos::ZERO;
    };
    let limits = LivenessBounds::of(run);
    limits.end() + limits.lease.scale(2, 1) + room + Nanos::from_secs(5)
}

/// When the last process of a stage begins.
pub(super) fn last_start(run: &Run) -> Nanos {
    let starts = |stream: &WorkloadStream| {
        stream.receivers.iter().map(|one| one.start).fold(stream.start, Nanos::max)
    };
    run.streams.iter().map(starts).max().unwrap_or(Nanos::ZERO)
}

/// Puts the content of a payload into a slot, or compares it: the first offset where it differs.
fn each_word(stamp: u64, len: usize, mut each: impl FnMut(usize, &[u8]) -> bool) -> Option<usize> {
    (0..len).step_by(8).find(|at| {
        let word = mix(stamp, *at as u64).to_le_bytes();
        !each(*at, &word[..(len - at).min(8)])
    })
}

impl Simulation {
    pub(super) fn plan_streams(&mut self) {
        for stream in 0..self.stages.streams.len() as u32 {
            if self.stages.streams[stream as usize].work.of.is_none() {
                self.plan_stream(stream, Nanos::ZERO);
            }
        }
    }

    /// Plans the processes of a stream, whose times count from `since`.
    fn plan_stream(&mut self, stream: u32, since: Nanos) {
        let work = &self.stages.streams[stream as usize].work;
        let begins = (work.start, StageEvent::Begins { stream });
        let asks = (0..).zip(&work.receivers);
        let asks = asks.map(|(receiver, one)| (one.start, StageEvent::Asks { stream, receiver }));
        for (at, event) in std::iter::once(begins).chain(asks) {
            self.queue.push(since + at, SimEvent::Stage(event));
        }
    }

    fn stage_after(&mut self, after: Nanos, event: StageEvent) {
        self.queue.push(self.now + after, SimEvent::Stage(event));
    }

    /// A process of a stage begins at a host; none if that is down.
    fn stage_joins(
        &mut self,
        host: u16,
        stage: &str,
        process: Option<SimStageProcess>,
    ) -> Option<PayloadClient> {
        if !self.host_lives(host) {
            return None;
        }
        let client = PayloadClient(self.stages.next_client);
        self.stages.next_client += 1;
        if let Some(process) = process {
            self.stages.clients.insert((host, client), process);
        }
        let (deployment, stage) = ("a".into(), stage.into());
        self.stage_tells(host, client, PayloadHook::Joined { deployment, stage });
        Some(client)
    }

    /// Each host has a process of either stage that does nothing, so that no stage is ever gone.
    pub(super) fn stages_begin(&mut self, host: u16) {
        for stage in ["0", "1"] {
            self.stage_joins(host, stage, None);
        }
    }

    fn stage_tells(&mut self, host: u16, client: PayloadClient, hook: PayloadHook) {
        if matches!(hook, PayloadHook::Left) {
            self.stages.clients.remove(&(host, client));
        }
        self.tell_payloads(host, PayloadInput::Hook { client, hook }, 0);
    }

    fn see_payload(&mut self, host: u16, sight: PayloadSight<'_>) {
        let host = self.host_process(host);
        self.observer.observe(self.now, &Observation::Payload { host, sight });
    }

    /// A stream came a step further.
    fn stream_moved(&mut self, stream: u32) {
        self.stages.streams[stream as usize].moved = self.now;
        self.quiescence.progressed(self.now);
    }

    pub(super) fn stage_event(&mut self, event: StageEvent) {
        match event {
            StageEvent::Begins { stream } => self.producer_begins(stream),
            StageEvent::Reserves { stream, client } => {
                if self.is_producer(stream, client) {
                    self.producer_reserves(stream, client);
                }
            }
            StageEvent::Writes { stream, client } => {
                if self.is_producer(stream, client) {
                    self.producer_writes(stream, client);
                }
            }
            StageEvent::Asks { stream, receiver } => self.receiver_begins((stream, receiver)),
            StageEvent::AsksAgain { stream, receiver, client } => {
                self.receiver_asks_again((stream, receiver), client);
            }
            StageEvent::HasRead { stream, receiver, client } => {
                self.receiver_has_read((stream, receiver), client);
            }
            StageEvent::Departs { stream, receiver, client } => {
                self.receiver_departs((stream, receiver), client);
            }
        }
    }

    /// A host answers a process.
    pub(super) fn stage_told(&mut self, host: u16, client: PayloadClient, answer: PayloadAnswer) {
        match self.stages.clients.get(&(host, client)).copied() {
            Some(SimStageProcess::Producer(stream)) => self.producer_told(stream, client, answer),
            Some(SimStageProcess::Receiver(stream, receiver)) => {
                self.receiver_told((stream, receiver), client, answer);
            }
            None => {}
        }
    }

    /// A host is gone: its stages are cut off from it, and give up.
    pub(super) fn stages_cut_off(&mut self, host: u16) {
        let cut = self.stages.clients.range((host, PayloadClient(0))..);
        let cut = cut.take_while(|(key, _)| key.0 == host);
        let cut: Vec<_> = cut.map(|(key, process)| (*key, *process)).collect();
        for (key, process) in cut {
            self.stages.clients.remove(&key);
            self.process_lost(process);
        }
    }

    fn process_lost(&mut self, process: SimStageProcess) {
        match process {
            SimStageProcess::Producer(stream) => {
                self.stages.streams[stream as usize].producer.client = None;
                self.producer_ends(stream, ProducerEnd::HostGone);
            }
            SimStageProcess::Receiver(stream, receiver) => {
                self.receiver_of((stream, receiver)).client = None;
                self.receiver_ends((stream, receiver), ReceiverOutcome::HostGone);
            }
        }
    }

    fn is_producer(&self, stream: u32, client: PayloadClient) -> bool {
        let producer = &self.stages.streams[stream as usize].producer;
        producer.client == Some(client) && producer.end.is_none()
    }

    fn producer_begins(&mut self, stream: u32) {
        self.stream_moved(stream);
        let from = self.stages.streams[stream as usize].work.from;
        self.see_payload(from, PayloadSight::Begins { stream });
        let process = Some(SimStageProcess::Producer(stream));
        match self.stage_joins(from, "0", process) {
            Some(client) => {
                self.stages.streams[stream as usize].producer.client = Some(client);
                self.next_chunk(stream, client);
            }
            None => self.producer_ends(stream, ProducerEnd::HostGone),
        }
    }

    fn chunk_of(&self, stream: u32) -> Option<WorkloadChunk> {
        let SimStream { work, producer, .. } = &self.stages.streams[stream as usize];
        work.chunks.get((producer.put / work.puts) as usize).copied()
    }

    /// A producer goes on with its next chunk, or ends.
    fn next_chunk(&mut self, stream: u32, client: PayloadClient) {
        if let Some(chunk) = self.chunk_of(stream) {
            return self.stage_after(chunk.pause, StageEvent::Reserves { stream, client });
        }
        let SimStream { work, .. } = &self.stages.streams[stream as usize];
        let (from, end, name) = (work.from, work.end, self.stream_name(stream));
        let (hook, how) = match end {
            WorkloadEnd::Ends => (
                PayloadHook::End { stream: name, failure: None, is_own: false },
                ProducerEnd::Ended,
            ),
            WorkloadEnd::GivesUp => {
                let failure = Some("it was aborted".into());
                (PayloadHook::End { stream: name, failure, is_own: false }, ProducerEnd::GaveUp)
            }
            WorkloadEnd::CleansUp => {
                (PayloadHook::CleanUp { stream: name, is_own: false }, ProducerEnd::CleanedUp)
            }
            WorkloadEnd::Leaves => (PayloadHook::Left, ProducerEnd::Left),
        };
        if how == ProducerEnd::Left {
            self.stages.streams[stream as usize].producer.client = None;
        }
        self.stage_tells(from, client, hook);
        self.producer_ends(stream, how);
    }

    /// The name of a stream, which those have in common that use one id again.
    fn stream_name(&self, mut stream: u32) -> PayloadStream {
        while let Some(of) = self.stages.streams[stream as usize].work.of {
            stream = of;
        }
        PayloadStream::new("0", "1", &format!("r{stream}"))
    }

    fn key_of(&self, stream: u32, chunk: u32) -> PayloadKey {
        let name = self.stream_name(stream);
        match self.stages.streams[stream as usize].work.is_whole {
            true => name.whole(),
            false => name.chunk(u64::from(chunk)),
        }
    }

    fn producer_reserves(&mut self, stream: u32, client: PayloadClient) {
        let Some(WorkloadChunk { bytes, .. }) = self.chunk_of(stream) else { return };
        let SimStream { work, producer, .. } = &self.stages.streams[stream as usize];
        let (from, ticket, wait) = (work.from, u64::from(producer.put), work.wait);
        self.stream_moved(stream);
        self.stage_tells(from, client, PayloadHook::Reserve { ticket, bytes, wait });
    }

    fn producer_told(&mut self, stream: u32, client: PayloadClient, answer: PayloadAnswer) {
        let from = self.stages.streams[stream as usize].work.from;
        if let PayloadAnswer::Stored { failure, .. } = &answer {
            // Of a stream that a receiver cleaned up nobody needs more.
            if !matches!(failure, None | Some(PayloadFailure::CleanedUp)) {
                let rule = format!("what a producer put was refused: {failure:?}");
                self.see_payload(from, PayloadSight::Misuse { rule: &rule });
            }
            return;
        }
        let Some(chunk) = self.chunk_of(stream) else { return };
        match answer {
            PayloadAnswer::Reserved { slot, offset, .. } => {
                self.stream_moved(stream);
                if chunk.bytes > 0 {
                    self.slot_taken(from, (offset, chunk.bytes));
                }
                if let Some(pool) = self.pool_mut(from) {
                    pool[offset as usize..][..chunk.bytes as usize].fill(UNWRITTEN);
                }
                self.stages.streams[stream as usize].producer.slot = Some((slot, offset));
                self.stage_after(chunk.write, StageEvent::Writes { stream, client });
            }
            PayloadAnswer::NotReserved { failure, .. } => {
                self.stream_moved(stream);
                let (name, why) = (self.stream_name(stream), Some("there was no room".into()));
                self.stage_tells(
                    from,
                    client,
                    PayloadHook::End { stream: name, failure: why, is_own: false },
                );
                self.producer_ends(stream, ProducerEnd::NoRoom(failure));
            }
            other => {
                let rule = format!("a producer was told {other:?}");
                self.see_payload(from, PayloadSight::Misuse { rule: &rule });
            }
        }
    }

    /// Names the content of what a producer puts as its `nth`.
    fn stamp(&self, stream: u32, nth: u32) -> u64 {
        mix(mix(self.run.seed, CONTENT), u64::from(stream) << 32 | u64::from(nth))
    }

    fn producer_writes(&mut self, stream: u32, client: PayloadClient) {
        let Some(WorkloadChunk { bytes, .. }) = self.chunk_of(stream) else { return };
        let SimStream { work, producer, .. } = &mut self.stages.streams[stream as usize];
        let (from, nth, receivers) = (work.from, producer.put, work.copies);
        let chunk = nth / work.puts;
        let Some((slot, offset)) = producer.slot.take() else { return };
        producer.put += 1;
        let stamp = self.stamp(stream, nth);
        if let Some(pool) = self.pool_mut(from) {
            let target = &mut pool[offset as usize..][..bytes as usize];
            each_word(stamp, bytes as usize, |at, word| {
                target[at..at + word.len()].copy_from_slice(word);
                true
            });
        }
        self.stream_moved(stream);
        let key = self.key_of(stream, chunk);
        let is_chunk = key.chunk.is_some();
        self.stage_tells(from, client, PayloadHook::Put { slot, key, receivers, is_chunk });
        self.next_chunk(stream, client);
    }

    fn producer_ends(&mut self, stream: u32, how: ProducerEnd) {
        let state = &mut self.stages.streams[stream as usize];
        if state.producer.end.is_some() {
            return;
        }
        state.producer.end = Some(how.clone());
        let (from, put) = (state.work.from, state.producer.put.div_ceil(state.work.puts));
        self.stream_moved(stream);
        self.see_payload(from, PayloadSight::Produced { stream, put, how: &how });
        self.close_stream(stream);
    }

    /// Once everybody has ended, nobody gets what is left, and the processes end.
    fn close_stream(&mut self, stream: u32) {
        let state = &mut self.stages.streams[stream as usize];
        if !state.is_over() || std::mem::replace(&mut state.is_closed, true) {
            return;
        }
        self.stages.open -= 1;
        let state = &mut self.stages.streams[stream as usize];
        let hosts = state.hosts();
        let mut clients = vec![(state.work.from, state.producer.client.take())];
        let receivers = state.work.receivers.iter().zip(&mut state.receivers);
        clients.extend(receivers.map(|(at, one)| (at.host, one.client.take())));
        for (host, client) in clients {
            if let Some(client) = client {
                self.stage_tells(host, client, PayloadHook::Left);
            }
        }
        for host in hosts {
            let Some(client) = self.stage_joins(host, "2", None) else { continue };
            let name = self.stream_name(stream);
            self.stage_tells(host, client, PayloadHook::CleanUp { stream: name, is_own: false });
            self.stage_tells(host, client, PayloadHook::Left);
        }
        let next = (0..).zip(&self.stages.streams).find(|(_, next)| next.work.of == Some(stream));
        if let Some((next, _)) = next {
            self.plan_stream(next, self.now);
        }
    }

    /// Looks for streams that do not end by themselves: their stages stand at hosts that never answer,
    /// or nobody puts what is waited for.
    pub(super) fn check_streams(&mut self) {
        if self.stages.open == 0 || !self.quiescence.is_settled() {
            return;
        }
        let lost =
            self.stages.clients.iter().filter(|((host, _), _)| {
                self.is_frozen(self.run.hosts[usize::from(*host)].instance)
            });
        let lost: Vec<_> = lost.map(|(_, process)| *process).collect();
        lost.into_iter().for_each(|process| self.process_lost(process));
        let begun = self.quiescence.settled_at();
        for stream in 0..self.stages.streams.len() as u32 {
            let state = &self.stages.streams[stream as usize];
            let since = state.moved.max(begun);
            if state.is_closed
                || state.producer.end.is_none()
                || self.now <= since + self.stages.patience
            {
                continue;
            }
            for receiver in 0..state.receivers.len() as u16 {
                self.receiver_overdue((stream, receiver));
            }
        }
    }

    /// The world itself puts a payload, at a host of the core for another one.
    pub(super) fn stage_probes(&mut self) {
        let lives = |host: &u16| {
            let instance = self.run.hosts[usize::from(*host)].instance;
            self.host_lives(*host) && !self.is_frozen(instance)
        };
        let hosts: Vec<u16> = (0..self.run.hosts.len() as u16).filter(lives).collect();
        let n = self.stages.streams.len() - self.stages.own;
        let count = hosts.len().max(1);
        let (from, by) = (n % count, 1 + n / count % count.saturating_sub(1).max(1));
        let [from, to] = [from, (from + by) % count].map(|at| hosts.get(at).copied());
        let receiver = |host| StreamReceiver {
            host,
            start: self.now,
            reads: Nanos::ZERO,
            is_named: n % 2 == 1,
            gone: None,
        };
        let chunk = WorkloadChunk { bytes: 100, pause: Nanos::ZERO, write: Nanos::ZERO };
        let work = WorkloadStream {
            of: None,
            from: from.unwrap_or(0),
            start: self.now,
            chunks: vec![chunk],
            is_whole: false,
            puts: 1,
            copies: 1,
            // What was lent before is kept for a lease.
            wait: self.stages.patience,
            end: WorkloadEnd::Ends,
            receivers: to.into_iter().map(receiver).collect(),
        };
        let stream = self.stages.streams.len() as u32;
        self.stages.streams.push(SimStream::new(work));
        self.stages.open += 1;
        self.plan_stream(stream, Nanos::ZERO);
    }
}
