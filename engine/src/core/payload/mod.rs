//! Keyed payloads between the stages of a pipeline: what one process puts another gets, once, out of
//! one pool that both see.
//!
//! `slots` has who owns which range of the pool; a range is free when nobody does, whatever else
//! becomes of the payload. `exchange` brings payloads and those who want them together, `ends` says
//! what does not come any more, and `clients` what each process has. Between the states of a payload
//! only these ways lead:
//!
//! ```text
//! reserved --Put--> queued --Want--> arrived --Take--> taken --Release--> (free)
//!     |               |  ^------Abandon--'  |            |
//!     |               |       or Left       |            |
//!     '-Return, Left--+--hold, CleanUp,-----+---Left-----+----> (free when nobody owns the slot)
//!                        or put again
//! ```
//!
//! ```
//! use kvferry_engine::core::payload::{
//!     FormerUse, PayloadAnswer, PayloadClient, PayloadConfig, PayloadCore, PayloadEffect, PayloadFailure,
//!     PayloadHook, PayloadInput, PayloadStream, SlotId,
//! };
//! use kvferry_engine::core::{Machine, Nanos, Outbox};
//!
//! let (mut core, mut out) = (PayloadCore::new(PayloadConfig::default()), Outbox::new());
//! let [thinker, talker] = [PayloadClient(0), PayloadClient(1)];
//! let mut tell = |client, hook| {
//!     core.handle(Nanos::ZERO, PayloadInput::Hook { client, hook }, &mut out);
//!     let answer = |effect| match effect {
//!         PayloadEffect::Answer { client, answer } => (client, answer),
//!         effect => panic!("{effect:?}"),
//!     };
//!     out.drain().map(answer).collect::<Vec<_>>()
//! };
//! for (client, stage) in [(thinker, "0"), (talker, "1")] {
//!     tell(client, PayloadHook::Joined { deployment: "a".into(), stage: stage.into() });
//! }
//! let stream = PayloadStream::new("0", "1", "request-7");
//! for chunk in [0, 1] {
//!     let key = stream.chunk(chunk);
//!     let want = PayloadHook::Want { key: key.clone(), producer: Some(thinker) };
//!     assert_eq!(tell(talker, want), [(talker, PayloadAnswer::Waits { key })]);
//! }
//! let reserve = PayloadHook::Reserve { ticket: 1, bytes: 3_305, wait: Nanos::from_ms(10) };
//! let reserved = PayloadAnswer::Reserved { ticket: 1, slot: SlotId(1), offset: 0 };
//! assert_eq!(tell(thinker, reserve), [(thinker, reserved)]);
//! let put = PayloadHook::Put { slot: SlotId(1), key: stream.chunk(0), receivers: 1, is_chunk: true };
//! let [(_, PayloadAnswer::Arrived { bytes: 3_305, .. }), (_, PayloadAnswer::Stored { .. })] =
//!     tell(thinker, put)[..]
//! else {
//!     panic!()
//! };
//! // Who waits for what never comes is told at once.
//! let ended = PayloadHook::End { stream: stream.clone(), failure: None, is_own: true };
//! let (key, failure, former) = (stream.chunk(1), PayloadFailure::Ended, FormerUse::No);
//! assert_eq!(tell(thinker, ended), [(talker, PayloadAnswer::Missing { key, failure, former })]);
//! ```

mod asks;
mod clients;
mod directory;
mod ends;
mod exchange;
mod fetch;
mod holes;
mod io;
mod note;
pub mod pool;
mod slots;
mod source;

use super::ids::{EngineId, Incarnation};
use super::machine::{Gauges, Machine, Outbox, Turn};
use super::recent_set::RecentMap;
use super::time::Nanos;
use super::timers::Timers;
use asks::PayloadAsk;
use clients::PayloadClientState;
use directory::SourceHost;
use ends::{EndedStream, ScopedStream, StreamLife};
use exchange::{HeldPayload, PayloadClaim, WaitingReceiver, WantSource};
use fetch::PayloadFetch;
pub use io::*;
pub use note::{DirectoryCall, DirectoryNews, PayloadNote, REMOTE_NAMES_MAX, ScopedKey};
use slots::{PoolShare, ReservationOwner, ScopedStage, SlotTable};
use source::{PayloadSource, PeerHost};
pub use source::{pool_geometry, pool_layout};
use std::collections::{BTreeMap, VecDeque};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PayloadTimer {
    /// A client waits no longer for a slot.
    Wait(PayloadClient, u64),
    /// A payload waits no longer for receivers.
    Hold(ScopedKey),
    /// A host that was lost is looked for again.
    Meet(EngineId),
    /// A host with loans is out of reach for long.
    Lost(PeerHost),
    /// A host that had no room for this, or did not have it, is asked again.
    Ask(ScopedKey, EngineId),
    /// A payload that comes waits no longer for room.
    Room(u64),
}

type PayloadTurn<'a> = Turn<'a, PayloadEffect>;

/// The payloads of one host.
#[derive(Debug)]
pub struct PayloadCore {
    config: PayloadConfig,
    slots: SlotTable,
    clients: BTreeMap<PayloadClient, PayloadClientState>,
    /// Processes of each stage.
    stages: BTreeMap<ScopedStage, u32>,
    payloads: BTreeMap<ScopedKey, HeldPayload>,
    claims: BTreeMap<ClaimId, PayloadClaim>,
    /// Who waits for a payload, in the order in which they came.
    wants: BTreeMap<ScopedKey, VecDeque<WaitingReceiver>>,
    /// Streams that have begun and not ended.
    lives: RecentMap<ScopedStream, StreamLife>,
    /// Streams without further chunks.
    ended: RecentMap<ScopedStream, EndedStream>,
    /// Keys whose payload is gone, why, and whether that may be of an earlier request.
    spent: RecentMap<ScopedKey, (PayloadFailure, FormerUse)>,
    /// What other hosts get here.
    source: PayloadSource,
    /// The other hosts that put payloads.
    sources: BTreeMap<EngineId, SourceHost>,
    /// What they are asked for.
    asks: BTreeMap<ScopedKey, PayloadAsk>,
    /// What comes from them, and of which payload each is.
    fetches: BTreeMap<u64, PayloadFetch>,
    fetching: BTreeMap<ScopedKey, u64>,
    /// The host that puts the chunks of a stream, in which incarnation: another one, or this one if there
    /// are others.
    stream_host: RecentMap<ScopedStream, (EngineId, Incarnation)>,
    /// The prefill core of this host.
    host: (EngineId, Incarnation),
    timers: Timers<PayloadTimer>,
    next_id: u64,
    is_draining: bool,
    misuses: u32,
}

impl PayloadCore {
    /// A host without payloads, which has nothing to do with other hosts.
    pub fn new(config: PayloadConfig) -> PayloadCore {
        PayloadCore {
            slots: SlotTable::new(config.pool, config.slots_max),
            clients: BTreeMap::new(),
            stages: BTreeMap::new(),
            payloads: BTreeMap::new(),
            claims: BTreeMap::new(),
            wants: BTreeMap::new(),
            lives: RecentMap::new(config.streams_max),
            ended: RecentMap::new(config.tombstones_max),
            spent: RecentMap::new(config.tombstones_max),
            source: PayloadSource::default(),
            sources: BTreeMap::new(),
            asks: BTreeMap::new(),
            fetches: BTreeMap::new(),
            fetching: BTreeMap::new(),
            stream_host: RecentMap::new(config.streams_max),
            host: ("".into(), Incarnation(0)),
            timers: Timers::default(),
            next_id: 0,
            is_draining: false,
            misuses: 0,
            config,
        }
    }

    /// The payloads of a host whose pool a prefill and a decode core have, too: the engine of the
    /// prefill core, from which other hosts pull.
    pub fn with_peers(
        config: PayloadConfig,
        engine: EngineId,
        incarnation: Incarnation,
    ) -> PayloadCore {
        PayloadCore { host: (engine, incarnation), ..PayloadCore::new(config) }
    }

    fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn misused(&mut self, client: PayloadClient, rule: &str, turn: &mut PayloadTurn<'_>) {
        self.misuses = self.misuses.saturating_add(1);
        turn.push(PayloadEffect::Misuse { client, rule: rule.into() });
    }

    fn hook(&mut self, client: PayloadClient, hook: PayloadHook, turn: &mut PayloadTurn<'_>) {
        if let PayloadHook::Joined { deployment, stage } = hook {
            let stage = ScopedStage { deployment, stage };
            return self.joined(client, stage, turn);
        }
        let Some(state) = self.clients.get(&client) else {
            return self.misused(client, "it has not joined", turn);
        };
        let is_want = matches!(hook, PayloadHook::Want { .. } | PayloadHook::WantFrom { .. });
        if hook.text_len() > KEY_BYTES_MAX && !is_want {
            return self.misused(client, "the names of a payload are too long", turn);
        }
        let deployment = state.stage.deployment.clone();
        let scoped = |key| ScopedKey { deployment: deployment.clone(), key };
        match hook {
            PayloadHook::Joined { .. } => {}
            PayloadHook::Left => self.left(client, turn),
            PayloadHook::Reserve { ticket, bytes, wait } => {
                self.reserve(client, ticket, (bytes, wait), turn);
            }
            PayloadHook::Put { slot, key, receivers, is_chunk } => {
                self.put(client, slot, (scoped(key), receivers, is_chunk), turn);
            }
            PayloadHook::Return { slot } => self.returned(client, slot, turn),
            PayloadHook::Want { key, producer } => {
                let source = producer.map_or(WantSource::Anybody, WantSource::Process);
                self.wanted(client, (scoped(key), source), turn);
            }
            PayloadHook::WantFrom { key, host } => {
                let is_here = host == self.host.0;
                let source = if is_here { WantSource::Here } else { WantSource::Host(host) };
                self.wanted(client, (scoped(key), source), turn);
            }
            PayloadHook::Abandon { key } => self.abandoned(client, &scoped(key), turn),
            PayloadHook::Take { claim } => self.take(client, claim, turn),
            PayloadHook::Release { claim } => self.release(client, claim, turn),
            PayloadHook::GiveUp { key, is_chunk, failure } => {
                self.give_up(&scoped(key), is_chunk, failure, turn);
            }
            PayloadHook::Drop { key } => self.dropped(&scoped(key), turn),
            PayloadHook::End { stream, failure, is_own } => {
                let why = failure.map_or(PayloadFailure::Ended, PayloadFailure::GivenUp);
                let stream = ScopedStream { deployment, stream };
                if !is_own || self.puts_stream(client, &stream) {
                    self.end(stream, &why, turn);
                }
            }
            PayloadHook::CleanUp { stream, is_own } => {
                let stream = ScopedStream { deployment, stream };
                if !is_own || self.has_part_in(client, &stream) {
                    self.clean_up(client, &stream, turn);
                }
            }
        }
    }

    fn joined(&mut self, client: PayloadClient, stage: ScopedStage, turn: &mut PayloadTurn<'_>) {
        if self.clients.contains_key(&client) {
            return self.misused(client, "it has joined already", turn);
        }
        if self.clients.len() >= self.config.clients_max as usize {
            return self.misused(client, "there are clients_max processes already", turn);
        }
        let has_others = self.clients.values().any(|of| of.stage.deployment == stage.deployment);
        if !has_others && !planted!("a-deployment-inherits") {
            self.forget_deployment(&stage.deployment, turn);
        }
        *self.stages.entry(stage.clone()).or_default() += 1;
        self.clients.insert(client, PayloadClientState::new(stage));
    }

    fn reserve(
        &mut self,
        client: PayloadClient,
        ticket: u64,
        (bytes, wait): (u64, Nanos),
        turn: &mut PayloadTurn<'_>,
    ) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        if state.tickets.contains(&ticket) {
            return self.misused(client, "the ticket is in use", turn);
        }
        let full = state.tickets.len() >= self.config.reservations_max as usize;
        let refusal = match (self.is_draining, full, self.slots.check(bytes)) {
            (true, ..) => Some(PayloadFailure::Closed),
            (_, true, _) => Some(PayloadFailure::Overload("reservations that wait".into())),
            (.., checked) => checked.err(),
        };
        if let Some(failure) = refusal {
            return self.refuse(client, ticket, failure, turn);
        }
        state.tickets.insert(ticket);
        let share = PoolShare { stage: state.stage.clone(), is_fetched: false };
        self.slots.wait(&share, ReservationOwner::Client(client, ticket), bytes);
        self.timers.arm(PayloadTimer::Wait(client, ticket), turn.now + wait);
        self.serve_reservations(turn);
        if wait == Nanos::ZERO {
            self.wait_over(client, ticket, turn);
        }
    }

    /// Gives slots to those who wait, in their order, as long as there is room.
    fn serve_reservations(&mut self, turn: &mut PayloadTurn<'_>) {
        while let Some((reservation, slot, offset)) = self.slots.serve(self.shares()) {
            let (client, ticket) = match reservation.owner {
                ReservationOwner::Client(client, ticket) => (client, ticket),
                ReservationOwner::Fetch(fetch) => {
                    self.fetch_into(fetch, slot, turn);
                    continue;
                }
            };
            self.timers.cancel(&PayloadTimer::Wait(client, ticket));
            if let Some(state) = self.clients.get_mut(&client) {
                state.tickets.remove(&ticket);
                state.reserved.insert(slot);
            }
            let answer = PayloadAnswer::Reserved { ticket, slot, offset };
            turn.push(PayloadEffect::Answer { client, answer });
        }
    }

    /// Nobody is kept waiting for a slot longer than it said; those behind it may find room.
    fn wait_over(&mut self, client: PayloadClient, ticket: u64, turn: &mut PayloadTurn<'_>) {
        let Some(state) = self.clients.get(&client) else { return };
        let owner = ReservationOwner::Client(client, ticket);
        let share = PoolShare { stage: state.stage.clone(), is_fetched: false };
        let waited = self.slots.stop_waiting(&share, owner);
        let Some(bytes) = waited else { return };
        let failure = self.slots.full(&share, bytes, self.shares());
        self.refuse(client, ticket, failure, turn);
        self.serve_reservations(turn);
    }

    /// A client gets no slot, for which it does not wait any more.
    fn refuse(
        &mut self,
        client: PayloadClient,
        ticket: u64,
        failure: PayloadFailure,
        turn: &mut PayloadTurn<'_>,
    ) {
        self.timers.cancel(&PayloadTimer::Wait(client, ticket));
        if let Some(state) = self.clients.get_mut(&client) {
            state.tickets.remove(&ticket);
        }
        let answer = PayloadAnswer::NotReserved { ticket, failure };
        turn.push(PayloadEffect::Answer { client, answer });
    }

    fn returned(&mut self, client: PayloadClient, slot: SlotId, turn: &mut PayloadTurn<'_>) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        if !state.reserved.remove(&slot) {
            return self.misused(client, "it has not reserved what it returns", turn);
        }
        self.let_go(slot, turn);
    }

    /// One owner of a slot less; who waits for room may get it.
    fn let_go(&mut self, slot: SlotId, turn: &mut PayloadTurn<'_>) {
        self.slots.let_go(slot);
        self.serve_reservations(turn);
    }

    fn drain(&mut self, turn: &mut PayloadTurn<'_>) {
        self.is_draining = true;
        for reservation in self.slots.drain_waiting() {
            match reservation.owner {
                ReservationOwner::Client(client, ticket) => {
                    self.refuse(client, ticket, PayloadFailure::Closed, turn);
                }
                ReservationOwner::Fetch(fetch) => self.fetch_refused(fetch, turn),
            }
        }
    }

    fn tick(&mut self, turn: &mut PayloadTurn<'_>) {
        while let Some(timer) = self.timers.pop_due(turn.now) {
            match timer {
                PayloadTimer::Wait(client, ticket) => self.wait_over(client, ticket, turn),
                PayloadTimer::Hold(place) => self.forget(&place, &PayloadFailure::Expired, turn),
                PayloadTimer::Ask(place, host) => self.ask_is_due(&host, &place, turn),
                PayloadTimer::Room(fetch) => self.room_is_over(fetch, turn),
                PayloadTimer::Meet(host) => self.meet_again(&host, turn),
                PayloadTimer::Lost(host) => self.receiver_lost(host, turn),
            }
        }
    }

    /// Parts of the pool: one per stage, and one of what each puts on other hosts.
    fn shares(&self) -> usize {
        self.stages.len() + self.slots.shares_beside(&self.stages)
    }

    /// Bytes of the pool in no slot.
    pub fn free_bytes(&self) -> u64 {
        self.slots.free_bytes()
    }
}

impl Machine for PayloadCore {
    type Input = PayloadInput;
    type Effect = PayloadEffect;

    fn handle(&mut self, now: Nanos, input: PayloadInput, out: &mut Outbox<PayloadEffect>) {
        let turn = &mut Turn::new(now, out);
        match input {
            PayloadInput::Hook { client, hook } => self.hook(client, hook, turn),
            PayloadInput::Hosts(hosts) => self.set_hosts(hosts, turn),
            PayloadInput::Prefill(answer) => self.lent(answer, turn),
            PayloadInput::PrefillPeer(news) => self.receiver_news(news, turn),
            PayloadInput::Decode(answer) => self.fetched(answer, turn),
            PayloadInput::DecodePeer(news) => self.source_news(news, turn),
            PayloadInput::Drain => self.drain(turn),
            PayloadInput::Tick => self.tick(turn),
        }
    }

    fn deadline(&self) -> Option<Nanos> {
        self.timers.next()
    }

    fn gauges(&self) -> Gauges {
        let of_clients = self.clients.values().map(PayloadClientState::entries).sum::<usize>();
        let waiting = self.wants.values().map(|clients| 1 + clients.len()).sum::<usize>();
        let of_slots = self.slots.entries() + self.claims.len() + self.timers.len();
        let asked = self.asks.values().map(PayloadAsk::entries).sum::<usize>();
        let fetched = self.fetches.len() + self.fetching.len();
        let done = self.sources.values().map(SourceHost::entries).sum::<usize>();
        let of_hosts = self.source.entries() + asked + fetched + done;
        let entries = of_clients + waiting + of_slots + of_hosts;
        Gauges {
            transfers: self.payloads.len() as u32,
            held: self.slots.len() as u32,
            queued: self.slots.pending_len() as u32,
            tombstones: (self.ended.len() + self.spent.len()) as u32,
            peers: self.clients.len() as u32,
            entries: entries as u32,
            remembered: (self.lives.len()
                + self.stages.len()
                + self.stream_host.len()
                + self.sources.len()
                + self.source.remembered()) as u32,
            violations: self.misuses,
            ..Gauges::default()
        }
    }
}
