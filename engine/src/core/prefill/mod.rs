//! The prefill side of transfers: one per engine core.
//!
//! A *key* is one prompt that travels; a *sink* is one receiver of it (a sibling on a decode
//! engine). Keys and sinks may appear in either order: a decode may announce before the prefill
//! leg arrives. `request` follows the engine's requests, `sink` the receivers.

mod request;
mod sink;

use super::by_peer::ByPeer;
use super::command::ControlCommand;
use super::error::{Failure, PeerViolation};
use super::ids::{EngineId, FlowId, PeerSlot, RankSet, RequestId, SourceId, TransferKey};
use super::machine::{Gauges, Machine, Outbox};
use super::message::{FlowState, Job, Message, PrefillAnswer, PrefillHook, Report, RouterNews};
use super::moriio::MoriioCounters;
use super::peers::PeerEvent;
use super::station::{CoreConfig, News, Station};
use super::time::Nanos;
use super::timers::Timers;
use super::tombstones::Tombstones;
use crate::fabric::ControlEvent;
use request::Request;
use serde::{Deserialize, Serialize};
use sink::Sink;
use std::collections::{BTreeMap, BTreeSet};

/// What can happen to a prefill core.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PrefillInput {
    /// The engine tells.
    Hook(PrefillHook),
    /// The control plane reports.
    Control(ControlEvent),
    /// The transfer actor of a rank reports.
    Report {
        /// Its TP rank.
        rank: u16,
        /// What it says.
        report: Report,
    },
    /// Register as draining from now on.
    Drain,
    /// A deadline may be due.
    Tick,
}

/// What a prefill core wants done.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PrefillEffect {
    /// Call the control plane.
    Control(ControlCommand),
    /// Give a job to the transfer actors of all ranks.
    Job(Job),
    /// Tell the engine.
    Answer(PrefillAnswer),
    /// For the log: a peer broke the protocol, and the frame was dropped.
    Violation(PeerViolation),
    /// For the log: what becomes of the registrations.
    Router(RouterNews),
    /// For the log: a peer's hello was refused, and the peer was told why.
    Refused {
        /// What it calls itself.
        peer: EngineId,
        /// Why the two do not work together.
        failure: Failure,
    },
}

impl From<ControlCommand> for PrefillEffect {
    fn from(command: ControlCommand) -> Self {
        PrefillEffect::Control(command)
    }
}

impl From<Job> for PrefillEffect {
    fn from(job: Job) -> Self {
        PrefillEffect::Job(job)
    }
}

impl From<PrefillAnswer> for PrefillEffect {
    fn from(answer: PrefillAnswer) -> Self {
        PrefillEffect::Answer(answer)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// An announced key whose prefill leg has not arrived.
    Orphan(TransferKey),
    /// A computed prompt whose receivers have not come.
    Hold(TransferKey),
    /// A preempted prompt that receivers have blocks for.
    Resume(TransferKey),
    /// A computed prompt whose receivers have asked for it and have not said where to.
    Claim(TransferKey),
    /// A granted source that a reader may be reading.
    Lease(TransferKey, u32),
}

/// One prompt that travels.
#[derive(Debug, Default)]
struct Key {
    /// The engine's request that has the KV; none before its leg arrives.
    request: Option<RequestId>,
    /// Prefill legs seen (samples of one prompt may each have one).
    copies: u32,
    /// Receivers that have not ended, by sibling.
    sinks: BTreeMap<u32, Sink>,
    /// Siblings that have ended, well or not; those of the prompt once its leg is there.
    served: BTreeSet<u32>,
    /// Why the first that did not end well did not.
    failure: Option<Failure>,
    /// No more receivers are waited for.
    closed: bool,
}

/// A flow of this engine, until every rank has reported its end.
#[derive(Debug)]
struct FlowEntry {
    key: TransferKey,
    sibling: u32,
    source: SourceId,
    left: RankSet,
    failure: Option<Failure>,
}

/// The prefill state machine of one engine core.
#[derive(Debug)]
pub struct Prefill {
    config: CoreConfig,
    station: Station,
    keys: BTreeMap<TransferKey, Key>,
    requests: BTreeMap<RequestId, Request>,
    flows: BTreeMap<FlowId, FlowEntry>,
    /// Receivers that have not ended.
    by_peer: ByPeer<(TransferKey, u32)>,
    /// Siblings that have ended, of all keys.
    served: usize,
    tombstones: Tombstones<TransferKey>,
    /// Those of `tombstones` whose receivers left before the prefill leg came.
    abandoned: Tombstones<TransferKey>,
    timers: Timers<Timer>,
    news: Vec<News>,
    /// Blocks of all requests.
    held: u32,
    next_id: u64,
}

type Out = Outbox<PrefillEffect>;

impl Prefill {
    /// A core that has done nothing; it registers when all its ranks are ready.
    pub fn new(config: CoreConfig) -> Prefill {
        Prefill {
            station: Station::new(&config),
            keys: BTreeMap::new(),
            requests: BTreeMap::new(),
            flows: BTreeMap::new(),
            by_peer: ByPeer::default(),
            served: 0,
            tombstones: Tombstones::new(config.settings.tombstones_max),
            abandoned: Tombstones::new(config.settings.tombstones_max),
            timers: Timers::default(),
            news: Vec::new(),
            held: 0,
            next_id: 0,
            config,
        }
    }

    fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn hook(&mut self, now: Nanos, hook: PrefillHook, out: &mut Out) {
        match hook {
            PrefillHook::Arrived { request, leg, tokens } => {
                self.arrived(now, request, leg, tokens, out);
            }
            PrefillHook::Scheduled { step, chunks } => {
                for chunk in chunks {
                    self.scheduled(now, step, chunk, out);
                }
            }
            PrefillHook::Finished { request, reason } => self.finished(now, request, reason, out),
            PrefillHook::Preempted { request } => self.preempted(now, request, out),
        }
    }

    fn news(&mut self, now: Nanos, news: News, out: &mut Out) {
        match news {
            News::Peer(event) => self.peer(now, event, out),
            News::Flow { rank, flow, state } => self.flow_news(now, rank, flow, state, out),
            News::Fenced { .. } => {}
            News::Abandoned { key } => self.abandoned(now, &key, out),
            News::Unusable { failure } => self.give_up(now, &failure, out),
            News::Router(said) => out.push(PrefillEffect::Router(said)),
        }
    }

    fn peer(&mut self, now: Nanos, event: PeerEvent, out: &mut Out) {
        match event {
            PeerEvent::Message { slot, message } => self.message(now, slot, message, out),
            PeerEvent::Lost { slot, tag, kind, violation } => {
                self.lost(now, slot, tag, (kind, Failure::Violation(violation)), out);
            }
            PeerEvent::Up { .. } => {}
            PeerEvent::Down { slot, failure, .. } => self.peer_down(now, slot, &failure, out),
            PeerEvent::Violation(violation) => out.push(PrefillEffect::Violation(violation)),
            PeerEvent::Refused { engine: peer, failure } => {
                out.push(PrefillEffect::Refused { peer, failure });
            }
        }
    }

    fn message(&mut self, now: Nanos, slot: PeerSlot, message: Message, out: &mut Out) {
        match message {
            Message::Ask { tag, tokens } => {
                self.wanted(now, slot, tag, tokens, sink::Want::Ask, out);
            }
            Message::Announce { tag, tokens, from, blocks } => {
                let want = sink::Want::Push { from, blocks: blocks.into() };
                self.wanted(now, slot, tag, tokens, want, out);
            }
            Message::Pull { tag, tokens } => {
                self.wanted(now, slot, tag, tokens, sink::Want::Pull, out);
            }
            Message::Renew { tag, count } => self.renew(now, slot, tag, count, out),
            Message::Release { tag, ranks } => self.released(now, slot, &tag, ranks, out),
            Message::Cancel { tag } => self.cancelled(now, slot, tag, out),
            Message::Begun { .. }
            | Message::Grant { .. }
            | Message::Renewed { .. }
            | Message::Delivered { .. }
            | Message::Ended { .. } => {
                out.push(PrefillEffect::Violation(self.station.violation(slot, &message)));
            }
        }
    }

    fn flow_news(&mut self, now: Nanos, rank: u16, id: FlowId, state: FlowState, out: &mut Out) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        match state {
            FlowState::Moving => return,
            FlowState::Failing(failure) => {
                flow.failure.get_or_insert(failure);
                return self.flow_failing(now, id, out);
            }
            FlowState::Done { .. } => flow.left.remove(rank),
            FlowState::Failed(failure) => {
                flow.failure.get_or_insert(failure);
                flow.left.remove(rank);
                if !flow.left.is_empty() {
                    return self.flow_failing(now, id, out);
                }
            }
        }
        if flow.left.is_empty() || planted!("first-rank-ends-the-flow") {
            self.flow_ended(now, id, out);
        }
    }

    fn tick(&mut self, now: Nanos, out: &mut Out) {
        while let Some(timer) = self.timers.pop_due(now) {
            match timer {
                Timer::Orphan(key) => self.orphaned(now, &key, out),
                Timer::Hold(key) => self.hold_ended(&key, out),
                Timer::Resume(key) => self.not_resumed(now, &key, out),
                Timer::Claim(key) => self.unclaimed(now, &key, out),
                Timer::Lease(key, sibling) => self.lease_ended(now, &key, sibling, out),
            }
        }
    }
}

impl Prefill {
    /// What was counted of peers that speak MoRIIO.
    pub fn moriio(&self) -> MoriioCounters {
        self.station.moriio()
    }
}

impl Machine for Prefill {
    type Input = PrefillInput;
    type Effect = PrefillEffect;

    fn handle(&mut self, now: Nanos, input: PrefillInput, out: &mut Out) {
        match input {
            PrefillInput::Hook(hook) => self.hook(now, hook, out),
            PrefillInput::Control(event) => {
                self.station.control(now, event, &mut self.news, out);
            }
            PrefillInput::Report { rank, report } => {
                self.station.report(now, rank, report, &mut self.news, out);
            }
            PrefillInput::Drain => self.station.drain(now, out),
            PrefillInput::Tick => {
                self.station.tick(now, out);
                self.tick(now, out);
            }
        }
        loop {
            self.station.digest(&mut self.news, out);
            if self.news.is_empty() {
                break;
            }
            for news in std::mem::take(&mut self.news) {
                self.news(now, news, out);
            }
        }
    }

    fn deadline(&self) -> Option<Nanos> {
        [self.station.deadline(), self.timers.next()].into_iter().flatten().min()
    }

    fn gauges(&self) -> Gauges {
        let station = self.station.gauges();
        let receivers = self.keys.values().map(|key| key.sinks.len() + key.served.len());
        let given_up = self.requests.values().map(|request| request.draining.len());
        let tables = self.requests.len() + self.timers.len() + self.by_peer.len();
        let entries = tables + receivers.sum::<usize>() + given_up.sum::<usize>();
        Gauges {
            entries: station.entries + entries as u32,
            remembered: station.remembered + self.abandoned.len(),
            transfers: (self.keys.len() + self.flows.len()) as u32,
            held: self.held,
            tombstones: self.tombstones.len(),
            ..station
        }
    }
}
