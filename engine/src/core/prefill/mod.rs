//! The prefill side of transfers: one per engine core.
//!
//! A *key* is one prompt that travels; a *receiver* is a sibling on a decode engine that wants it.
//! Keys and receivers may appear in either order: a decode may announce before the prefill
//! leg arrives. `request` follows the engine's requests, `receivers` the receivers.
//!
//! ```
//! use kvferry_engine::core::config::CoreConfig;
//! use kvferry_engine::core::error::Failure;
//! use kvferry_engine::core::ids::{Incarnation, TransferKey};
//! use kvferry_engine::core::layout::{Geometry, KvGroup};
//! use kvferry_engine::core::message::*;
//! use kvferry_engine::core::prefill::{Prefill, PrefillEffect, PrefillInput};
//! use kvferry_engine::core::prompt_hash::PromptHash;
//! use kvferry_engine::core::{Machine, Nanos, Outbox};
//!
//! let geometry = Geometry::new("llama", 8, vec![KvGroup::full(16, 0..32)]);
//! let control = "tcp://10.0.0.1:6301".into();
//! let config = CoreConfig::new(Role::Prefill, "prefill-0", Incarnation(1), geometry, control);
//! let (mut prefill, mut out) = (Prefill::new(config), Outbox::new());
//! let leg = PrefillLeg::new(TransferKey { id: "t".into(), prompt: 0 }, Mode::Push);
//! let prompt_hash = PromptHash::of_tokens(&[7; 100]);
//! let arrived = PrefillHook::Arrived { request: "a".into(), leg, tokens: 100, prompt_hash };
//! let aborted = PrefillHook::Finished { request: "a".into(), reason: FinishReason::Aborted };
//! for hook in [arrived, aborted] {
//!     prefill.handle(Nanos::ZERO, PrefillInput::Hook(hook), &mut out);
//! }
//! // Nobody has asked for it: its blocks are free at once.
//! let [PrefillEffect::Answer(PrefillAnswer::SourceFree { request, failure })] = out.as_slice() else {
//!     panic!("{out:?}");
//! };
//! assert_eq!((&*request.0, failure), ("a", &Some(Failure::PrefillEnded)));
//! ```

mod receiver;
mod receivers;
mod request;
mod verify;

use super::by_peer::ByPeer;
use super::config::CoreConfig;
use super::dialect::native::MessageKind;
use super::engine_core::{CoreEffect, CoreInput, CoreTurn};
use super::error::Failure;
use super::ids::{ConnectionId, FlowId, RankSet, RequestId, SourceId, TransferKey};
use super::machine::{Gauges, Machine, Outbox, Turn};
use super::message::{FlowState, Message, PrefillAnswer, PrefillHook};
use super::moriio::MoriioCounters;
use super::peer_manager::{EngineCore, PeerManager, PeerManagerEvent};
use super::peers::PeerEvent;
use super::recent_set::RecentSet;
use super::time::Nanos;
use super::timers::Timers;
use super::verify::{DigestPlan, KvDigest};
use receiver::{Receiver, ReceiverRequest, WantedPrompt};
use request::PrefillRequest;
use std::collections::{BTreeMap, BTreeSet};

/// What can happen to a prefill core.
pub type PrefillInput = CoreInput<PrefillHook>;

/// What a prefill core wants done.
pub type PrefillEffect = CoreEffect<PrefillAnswer>;

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
    /// What they digest of it.
    plan: Option<DigestPlan>,
    /// What the ranks have digested so far, if the receiver wants that.
    digest: Option<Box<KvDigest>>,
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
    tombstones: RecentSet<TransferKey>,
    /// Those of `tombstones` whose receivers left before the prefill leg came.
    abandoned: RecentSet<TransferKey>,
    timers: Timers<PrefillTimer>,
    /// Blocks of all requests.
    held: u32,
    next_id: u64,
}

type PrefillTurn<'a> = CoreTurn<'a, PrefillAnswer>;

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
            tombstones: RecentSet::new(config.settings.tombstones_max),
            abandoned: RecentSet::new(config.settings.tombstones_max),
            timers: Timers::default(),
            held: 0,
            next_id: 0,
            config,
        }
    }

    fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn on_message(
        &mut self,
        connection: ConnectionId,
        message: Message,
        turn: &mut PrefillTurn<'_>,
    ) {
        match message {
            Message::Ask { tag, tokens, prompt_hash } => {
                let hash = Some(prompt_hash);
                let prompt = WantedPrompt { tokens, hash, verify: None };
                self.wanted(connection, tag, prompt, ReceiverRequest::Ask, turn);
            }
            Message::Announce { tag, tokens, from, blocks, verify } => {
                let want = ReceiverRequest::Push { from, blocks: blocks.into() };
                let prompt = WantedPrompt { tokens, hash: None, verify };
                self.wanted(connection, tag, prompt, want, turn);
            }
            Message::Pull { tag, tokens, prompt_hash, verify } => {
                let prompt = WantedPrompt { tokens, hash: Some(prompt_hash), verify };
                self.wanted(connection, tag, prompt, ReceiverRequest::Pull, turn);
            }
            Message::Renew { tag, count } => self.renew(connection, tag, count, turn),
            Message::Release { tag, ranks } => self.released(connection, &tag, ranks, turn),
            Message::Cancel { tag } => self.give_up(connection, tag, Failure::Cancelled, turn),
            Message::Begun { .. }
            | Message::Grant { .. }
            | Message::Renewed { .. }
            | Message::Delivered { .. }
            | Message::Ended { .. }
            | Message::Payload { .. } => {
                turn.push(PrefillEffect::Violation(
                    self.peer_manager.violation(connection, &message),
                ));
            }
        }
    }

    fn on_flow(&mut self, rank: u16, id: FlowId, state: FlowState, turn: &mut PrefillTurn<'_>) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        match state {
            FlowState::Moving => return,
            FlowState::Digested(digest) => return self.flow_digested(id, &digest),
            FlowState::Failing(failure) => {
                flow.failure.get_or_insert(failure);
                return self.flow_failing(id, turn);
            }
            FlowState::Done { .. } => flow.left.remove(rank),
            FlowState::Failed(failure) => {
                flow.failure.get_or_insert(failure);
                flow.left.remove(rank);
                if !flow.left.is_empty() {
                    return self.flow_failing(id, turn);
                }
            }
        }
        if flow.left.is_empty() || planted!("first-rank-ends-the-flow") {
            self.flow_ended(id, turn);
        }
    }
}

impl EngineCore for Prefill {
    type Hook = PrefillHook;
    type Answer = PrefillAnswer;

    fn peer_manager(&mut self) -> &mut PeerManager {
        &mut self.peer_manager
    }

    fn on_hook(&mut self, hook: PrefillHook, turn: &mut PrefillTurn<'_>) {
        match hook {
            PrefillHook::Arrived { request, leg, tokens, prompt_hash } => {
                self.arrived(request, leg, (tokens, prompt_hash), turn);
            }
            PrefillHook::Scheduled { step, chunks } => {
                for chunk in chunks {
                    self.scheduled(step, chunk, turn);
                }
            }
            PrefillHook::Finished { request, reason } => self.finished(request, reason, turn),
            PrefillHook::Preempted { request } => self.preempted(request, turn),
        }
    }

    fn on_event(&mut self, event: PeerManagerEvent, turn: &mut PrefillTurn<'_>) {
        match event {
            PeerManagerEvent::Peer(PeerEvent::Message { connection, message }) => {
                self.on_message(connection, message, turn);
            }
            // A renewal comes again.
            PeerManagerEvent::Peer(PeerEvent::Lost { connection, tag, kind, violation })
                if kind != MessageKind::Renew =>
            {
                self.give_up(connection, tag, Failure::Violation(violation), turn);
            }
            PeerManagerEvent::Peer(PeerEvent::Down { connection, failure, .. }) => {
                self.peer_down(connection, &failure, turn);
            }
            PeerManagerEvent::Flow { rank, flow, state } => {
                self.on_flow(rank, flow, state, turn);
            }
            PeerManagerEvent::Abandoned { key } => self.abandoned(&key, turn),
            PeerManagerEvent::Unusable { failure } => {
                let keys: Vec<_> = self.keys.keys().cloned().collect();
                for key in keys {
                    self.end_key(&key, &failure, turn);
                    self.try_free(&key, turn);
                }
            }
            // A decode asks when it is there, and a fence ends nothing that waits here; the rest
            // is for the log.
            _ => {}
        }
    }

    fn on_deadlines(&mut self, turn: &mut PrefillTurn<'_>) {
        while let Some(timer) = self.timers.pop_due(turn.now) {
            match timer {
                PrefillTimer::Orphan(key) => self.orphaned(&key, turn),
                PrefillTimer::Hold(key) => self.close(&key, Failure::NotFetched, turn),
                PrefillTimer::Resume(key) => {
                    let failure = Failure::Preempted;
                    self.end_receivers(&key, Receiver::binds_blocks, &failure, turn);
                }
                PrefillTimer::Claim(key) => {
                    let failure = Failure::NotFetched;
                    self.end_receivers(&key, Receiver::only_asked, &failure, turn);
                }
                PrefillTimer::Lease(key, sibling) => {
                    self.end_quiet(&key, sibling, Failure::LeaseExpired, turn);
                }
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

    fn handle(&mut self, now: Nanos, input: PrefillInput, out: &mut Outbox<PrefillEffect>) {
        self.turn(input, &mut Turn::new(now, out));
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
            remembered: shared.remembered + self.abandoned.len() as u32,
            transfers: (self.keys.len() + self.flows.len()) as u32,
            held: self.held,
            tombstones: self.tombstones.len() as u32,
            ..shared
        }
    }
}
