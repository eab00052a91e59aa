//! The prefill side of transfers: one per engine core.
//!
//! A *key* is one prompt that travels; a *receiver* is a sibling on a decode engine that wants it.
//! Keys and receivers may appear in either order: a decode may announce before the prefill
//! leg arrives. `request` follows the engine's requests, `receivers` the receivers.

mod receiver;
mod receivers;
mod request;

use super::by_peer::ByPeer;
use super::command::ControlCommand;
use super::config::CoreConfig;
use super::error::{Failure, PeerViolation};
use super::ids::{ConnectionId, EngineId, FlowId, RankSet, RequestId, SourceId, TransferKey};
use super::machine::{Gauges, Machine, Outbox};
use super::message::{
    FlowState, Message, PrefillAnswer, PrefillHook, RouterEvent, TransferJob, TransferReport,
};
use super::moriio::MoriioCounters;
use super::peer_manager::{PeerManager, PeerManagerEvent};
use super::peers::PeerEvent;
use super::time::Nanos;
use super::timers::Timers;
use super::tombstones::Tombstones;
use crate::fabric::ControlEvent;
use receiver::{Receiver, ReceiverRequest};
use request::PrefillRequest;
use serde::{Deserialize, Serialize};
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
        report: TransferReport,
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
    Job(TransferJob),
    /// Tell the engine.
    Answer(PrefillAnswer),
    /// For the log: a peer broke the protocol, and the frame was dropped.
    Violation(PeerViolation),
    /// For the log: what becomes of the registrations.
    Router(RouterEvent),
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

impl From<TransferJob> for PrefillEffect {
    fn from(job: TransferJob) -> Self {
        PrefillEffect::Job(job)
    }
}

impl From<PrefillAnswer> for PrefillEffect {
    fn from(answer: PrefillAnswer) -> Self {
        PrefillEffect::Answer(answer)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PrefillTimer {
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
struct PromptTransfer {
    /// The engine's request that has the KV; none before its leg arrives.
    request: Option<RequestId>,
    /// Prefill legs seen (samples of one prompt may each have one).
    copies: u32,
    /// Receivers that have not ended, by sibling.
    receivers: BTreeMap<u32, Receiver>,
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
    peer_manager: PeerManager,
    keys: BTreeMap<TransferKey, PromptTransfer>,
    requests: BTreeMap<RequestId, PrefillRequest>,
    flows: BTreeMap<FlowId, FlowEntry>,
    /// Receivers that have not ended.
    by_peer: ByPeer<(TransferKey, u32)>,
    /// Siblings that have ended, of all keys.
    served: usize,
    tombstones: Tombstones<TransferKey>,
    /// Those of `tombstones` whose receivers left before the prefill leg came.
    abandoned: Tombstones<TransferKey>,
    timers: Timers<PrefillTimer>,
    events: Vec<PeerManagerEvent>,
    /// Blocks of all requests.
    held: u32,
    next_id: u64,
}

type PrefillOutbox = Outbox<PrefillEffect>;

impl Prefill {
    /// A core that has done nothing; it registers when all its ranks are ready.
    pub fn new(config: CoreConfig) -> Prefill {
        Prefill {
            peer_manager: PeerManager::new(&config),
            keys: BTreeMap::new(),
            requests: BTreeMap::new(),
            flows: BTreeMap::new(),
            by_peer: ByPeer::default(),
            served: 0,
            tombstones: Tombstones::new(config.settings.tombstones_max),
            abandoned: Tombstones::new(config.settings.tombstones_max),
            timers: Timers::default(),
            events: Vec::new(),
            held: 0,
            next_id: 0,
            config,
        }
    }

    fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn hook(&mut self, now: Nanos, hook: PrefillHook, out: &mut PrefillOutbox) {
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

    fn on_peer_manager_event(
        &mut self,
        now: Nanos,
        news: PeerManagerEvent,
        out: &mut PrefillOutbox,
    ) {
        match news {
            PeerManagerEvent::Peer(event) => self.peer(now, event, out),
            PeerManagerEvent::Flow { rank, flow, state } => {
                self.flow_news(now, rank, flow, state, out)
            }
            PeerManagerEvent::Fenced { .. } => {}
            PeerManagerEvent::Abandoned { key } => self.abandoned(now, &key, out),
            PeerManagerEvent::Unusable { failure } => self.give_up(now, &failure, out),
            PeerManagerEvent::Router(said) => out.push(PrefillEffect::Router(said)),
        }
    }

    fn peer(&mut self, now: Nanos, event: PeerEvent, out: &mut PrefillOutbox) {
        match event {
            PeerEvent::Message { connection, message } => {
                self.message(now, connection, message, out)
            }
            PeerEvent::Lost { connection, tag, kind, violation } => {
                self.lost(now, connection, tag, (kind, Failure::Violation(violation)), out);
            }
            PeerEvent::Up { .. } => {}
            PeerEvent::Down { connection, failure, .. } => {
                self.peer_down(now, connection, &failure, out)
            }
            PeerEvent::Violation(violation) => out.push(PrefillEffect::Violation(violation)),
            PeerEvent::Refused { engine: peer, failure } => {
                out.push(PrefillEffect::Refused { peer, failure });
            }
        }
    }

    fn message(
        &mut self,
        now: Nanos,
        connection: ConnectionId,
        message: Message,
        out: &mut PrefillOutbox,
    ) {
        match message {
            Message::Ask { tag, tokens } => {
                self.wanted(now, connection, tag, tokens, ReceiverRequest::Ask, out);
            }
            Message::Announce { tag, tokens, from, blocks } => {
                let want = ReceiverRequest::Push { from, blocks: blocks.into() };
                self.wanted(now, connection, tag, tokens, want, out);
            }
            Message::Pull { tag, tokens } => {
                self.wanted(now, connection, tag, tokens, ReceiverRequest::Pull, out);
            }
            Message::Renew { tag, count } => self.renew(now, connection, tag, count, out),
            Message::Release { tag, ranks } => self.released(now, connection, &tag, ranks, out),
            Message::Cancel { tag } => self.cancelled(now, connection, tag, out),
            Message::Begun { .. }
            | Message::Grant { .. }
            | Message::Renewed { .. }
            | Message::Delivered { .. }
            | Message::Ended { .. } => {
                out.push(PrefillEffect::Violation(
                    self.peer_manager.violation(connection, &message),
                ));
            }
        }
    }

    fn flow_news(
        &mut self,
        now: Nanos,
        rank: u16,
        id: FlowId,
        state: FlowState,
        out: &mut PrefillOutbox,
    ) {
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

    fn tick(&mut self, now: Nanos, out: &mut PrefillOutbox) {
        while let Some(timer) = self.timers.pop_due(now) {
            match timer {
                PrefillTimer::Orphan(key) => self.orphaned(now, &key, out),
                PrefillTimer::Hold(key) => self.hold_ended(&key, out),
                PrefillTimer::Resume(key) => self.not_resumed(now, &key, out),
                PrefillTimer::Claim(key) => self.unclaimed(now, &key, out),
                PrefillTimer::Lease(key, sibling) => self.lease_ended(now, &key, sibling, out),
            }
        }
    }
}

impl Prefill {
    /// What was counted of peers that speak MoRIIO.
    pub fn moriio(&self) -> MoriioCounters {
        self.peer_manager.moriio()
    }
}

impl Machine for Prefill {
    type Input = PrefillInput;
    type Effect = PrefillEffect;

    fn handle(&mut self, now: Nanos, input: PrefillInput, out: &mut PrefillOutbox) {
        match input {
            PrefillInput::Hook(hook) => self.hook(now, hook, out),
            PrefillInput::Control(event) => {
                self.peer_manager.control(now, event, &mut self.events, out);
            }
            PrefillInput::Report { rank, report } => {
                self.peer_manager.report(now, rank, report, &mut self.events, out);
            }
            PrefillInput::Drain => self.peer_manager.drain(now, out),
            PrefillInput::Tick => {
                self.peer_manager.tick(now, out);
                self.tick(now, out);
            }
        }
        loop {
            self.peer_manager.process_peer_events(&mut self.events, out);
            if self.events.is_empty() {
                break;
            }
            for news in std::mem::take(&mut self.events) {
                self.on_peer_manager_event(now, news, out);
            }
        }
    }

    fn deadline(&self) -> Option<Nanos> {
        [self.peer_manager.deadline(), self.timers.next()].into_iter().flatten().min()
    }

    fn gauges(&self) -> Gauges {
        let shared = self.peer_manager.gauges();
        let receivers = self.keys.values().map(|key| key.receivers.len() + key.served.len());
        let given_up = self.requests.values().map(|request| request.draining.len());
        let tables = self.requests.len() + self.timers.len() + self.by_peer.len();
        let entries = tables + receivers.sum::<usize>() + given_up.sum::<usize>();
        Gauges {
            entries: shared.entries + entries as u32,
            remembered: shared.remembered + self.abandoned.len(),
            transfers: (self.keys.len() + self.flows.len()) as u32,
            held: self.held,
            tombstones: self.tombstones.len(),
            ..shared
        }
    }
}
