//! The decode side of transfers: one per engine core.
//!
//! `request` follows the engine's requests from arrival to the one answer that each gets; `read`
//! holds what only pull needs: leases and the flows of this engine's own transfer actors; `check`
//! verifies what arrived;
//! `pending_releases` tells prefills later what they could not be told at once.
//!
//! ```
//! use kvferry_engine::core::config::CoreConfig;
//! use kvferry_engine::core::decode::{Decode, DecodeEffect, DecodeInput};
//! use kvferry_engine::core::ids::{Incarnation, Mode, Role, TransferKey};
//! use kvferry_engine::core::layout::{Geometry, KvGroup};
//! use kvferry_engine::core::message::{DecodeAnswer, DecodeHook, DecodeLeg};
//! use kvferry_engine::core::prompt_hash::PromptHash;
//! use kvferry_engine::core::{Machine, Nanos, Outbox};
//!
//! let geometry = Geometry::new("llama", 8, vec![KvGroup::full(16, 0..32)]);
//! let control = "tcp://10.0.0.2:6301".into();
//! let config = CoreConfig::new(Role::Decode, "decode-0", Incarnation(1), geometry, control);
//! let (mut decode, mut out) = (Decode::new(config), Outbox::new());
//! let key = TransferKey { id: "t".into(), prompt: 0 };
//! let leg = DecodeLeg::new(key, Mode::Push, "prefill-0".into(), "tcp://10.0.0.1:6301".into());
//! for request in ["a", "b"] {
//!     let (leg, prompt_hash) = (leg.clone(), PromptHash::of_tokens(&[7; 100]));
//!     let arrived =
//!         DecodeHook::Arrived { request: request.into(), leg, tokens: 100, prompt_hash };
//!     decode.handle(Nanos::ZERO, DecodeInput::Hook(arrived), &mut out);
//! }
//! // One sample has one place: the second request for it is not taken.
//! let [DecodeEffect::Answer(DecodeAnswer::Rejected { request, failure })] = out.as_slice() else {
//!     panic!("{out:?}");
//! };
//! assert_eq!((&*request.0, failure.kind()), ("b", "duplicate-key"));
//! ```

mod check;
mod pending_releases;
mod read;
mod request;

use super::block_ledger::BlockLedger;
use super::by_peer::ByPeer;
use super::config::CoreConfig;
use super::dialect::native::MessageKind;
use super::engine_core::{CoreEffect, CoreInput, CoreTurn};
use super::error::Failure;
use super::ids::{ConnectionId, FlowId, RequestId, TransferKey};
use super::machine::{Gauges, Machine, Outbox, Turn};
use super::message::{AttemptTag, DecodeAnswer, DecodeHook, Message};
use super::moriio::MoriioCounters;
use super::peer_manager::{EngineCore, PeerManager, PeerManagerEvent};
use super::peers::PeerEvent;
use super::recent_set::RecentSet;
use super::time::Nanos;
use super::timers::Timers;
pub use check::VerifyCounters;
use pending_releases::{PendingRelease, PrefillIncarnation};
use request::DecodeRequest;
use std::collections::BTreeMap;

/// What can happen to a decode core.
pub type DecodeInput = CoreInput<DecodeHook>;

/// What a decode core wants done.
pub type DecodeEffect = CoreEffect<DecodeAnswer>;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum DecodeTimer {
    /// Ask for a longer lease.
    Renew(RequestId),
    /// The lease of a read ends.
    Expiry(RequestId),
    /// Try again to tell a prefill what was given up.
    RetryReleases(PrefillIncarnation),
}

/// The decode state machine of one engine core.
#[derive(Debug)]
pub struct Decode {
    config: CoreConfig,
    peer_manager: PeerManager,
    requests: BTreeMap<RequestId, DecodeRequest>,
    by_peer: ByPeer<RequestId>,
    /// The request of each transfer and sample: of one engine, and unique on both sides.
    by_transfer: BTreeMap<(TransferKey, u32), RequestId>,
    ledger: BlockLedger,
    flows: BTreeMap<FlowId, RequestId>,
    pending_releases: BTreeMap<PrefillIncarnation, PendingRelease>,
    tombstones: RecentSet<(TransferKey, u32)>,
    timers: Timers<DecodeTimer>,
    verified: VerifyCounters,
    next_id: u64,
}

type DecodeTurn<'a> = CoreTurn<'a, DecodeAnswer>;

impl Decode {
    /// A core that has done nothing; it registers when all its ranks are ready.
    pub fn new(config: CoreConfig) -> Decode {
        Decode {
            peer_manager: PeerManager::new(&config),
            requests: BTreeMap::new(),
            by_peer: ByPeer::default(),
            by_transfer: BTreeMap::new(),
            ledger: BlockLedger::default(),
            flows: BTreeMap::new(),
            pending_releases: BTreeMap::new(),
            tombstones: RecentSet::new(config.settings.tombstones_max),
            timers: Timers::default(),
            verified: VerifyCounters::default(),
            next_id: 0,
            config,
        }
    }

    fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn message_for(&mut self, request: RequestId, message: Message, turn: &mut DecodeTurn<'_>) {
        match message {
            Message::Begun { .. } => self.due(&request, turn),
            Message::Delivered { ranks, tokens, digest, .. } => {
                self.delivered(request, ranks, (tokens, digest), turn);
            }
            Message::Ended { failure, quiet, .. } => {
                self.ended(&request, failure, quiet, turn);
            }
            Message::Grant { blocks, tokens, lease, digest, .. } => {
                self.granted(&request, (tokens, digest), blocks, lease, turn);
            }
            Message::Renewed { count, lease, .. } => self.renewed(&request, count, lease, turn),
            _ => {}
        }
    }

    fn on_message(
        &mut self,
        connection: ConnectionId,
        message: Message,
        turn: &mut DecodeTurn<'_>,
    ) {
        match message {
            Message::Ask { .. }
            | Message::Announce { .. }
            | Message::Pull { .. }
            | Message::Renew { .. }
            | Message::Release { .. }
            | Message::Cancel { .. }
            | Message::Payload { .. } => {
                turn.push(DecodeEffect::Violation(
                    self.peer_manager.violation(connection, &message),
                ));
            }
            message => {
                let request = message.tag().and_then(|tag| self.request_of(connection, tag));
                if let Some(request) = request {
                    self.message_for(request, message, turn);
                }
            }
        }
    }

    /// A message of a prefill could not be read: what it was about ends, whatever it said. A lease
    /// that was not extended is asked for again.
    fn lost(
        &mut self,
        connection: ConnectionId,
        tag: AttemptTag,
        (kind, failure): (MessageKind, Failure),
        turn: &mut DecodeTurn<'_>,
    ) {
        let Some(id) = self.request_of(connection, &tag).filter(|_| kind != MessageKind::Renewed)
        else {
            return;
        };
        if self.requests.get(&id).is_some_and(DecodeRequest::is_ending) {
            // Perhaps it said that the prefill has stopped writing. It says so again.
            let _ = self.peer_manager.send(connection, Message::Cancel { tag }, turn);
        }
        self.fail(&id, failure, turn);
    }

    /// The request that a tag of this peer is about, if that attempt is the current one.
    fn request_of(&self, connection: ConnectionId, tag: &AttemptTag) -> Option<RequestId> {
        let id = self.by_transfer.get(&(tag.key.clone(), tag.sibling))?;
        let request = self.requests.get(id)?;
        let current = request.tag.attempt == tag.attempt || planted!("decode-ignores-attempts");
        let same = request.connection == connection || planted!("decode-ignores-who-speaks");
        (same && current).then(|| id.clone())
    }
}

impl EngineCore for Decode {
    type Hook = DecodeHook;
    type Answer = DecodeAnswer;

    fn peer_manager(&mut self) -> &mut PeerManager {
        &mut self.peer_manager
    }

    fn on_hook(&mut self, hook: DecodeHook, turn: &mut DecodeTurn<'_>) {
        match hook {
            DecodeHook::Arrived { request, leg, tokens, prompt_hash } => {
                self.arrived(request, leg, (tokens, prompt_hash), turn);
            }
            DecodeHook::Allocated { request, computed, blocks } => {
                self.allocated(request, computed, blocks, turn);
            }
            DecodeHook::Finished { request, .. } => self.finished(&request, turn),
        }
    }

    fn on_event(&mut self, event: PeerManagerEvent, turn: &mut DecodeTurn<'_>) {
        match event {
            PeerManagerEvent::Peer(PeerEvent::Message { connection, message }) => {
                self.on_message(connection, message, turn);
            }
            PeerManagerEvent::Peer(PeerEvent::Lost { connection, tag, kind, violation }) => {
                self.lost(connection, tag, (kind, Failure::Violation(violation)), turn);
            }
            PeerManagerEvent::Peer(PeerEvent::Up { connection }) => {
                self.peer_up(connection, turn);
                self.send_pending(connection, turn);
            }
            PeerManagerEvent::Peer(PeerEvent::Down { connection, failure, unacked_releases }) => {
                if let Some(unacked) = unacked_releases {
                    self.add_pending(turn.now, *unacked);
                }
                self.peer_down(connection, &failure, turn);
            }
            PeerManagerEvent::Fenced { connection } => self.peer_fenced(connection, turn),
            PeerManagerEvent::Flow { rank, flow, state } => {
                self.flow_news(rank, flow, state, turn);
            }
            PeerManagerEvent::Unusable { failure } => {
                let ids: Vec<_> = self.requests.keys().cloned().collect();
                for id in ids {
                    self.fail(&id, failure.clone(), turn);
                }
            }
            // Nobody abandons what a decode has, and the rest is for the log.
            _ => {}
        }
    }

    fn on_deadlines(&mut self, turn: &mut DecodeTurn<'_>) {
        while let Some(timer) = self.timers.pop_due(turn.now) {
            match timer {
                DecodeTimer::Renew(request) => self.renew(&request, turn),
                DecodeTimer::Expiry(request) => self.fail(&request, Failure::LeaseExpired, turn),
                DecodeTimer::RetryReleases(prefill) => self.retry_pending(&prefill, turn),
            }
        }
    }
}

impl Decode {
    /// What was counted of peers that speak MoRIIO.
    pub fn moriio(&self) -> MoriioCounters {
        self.peer_manager.moriio()
    }
}

impl Machine for Decode {
    type Input = DecodeInput;
    type Effect = DecodeEffect;

    fn handle(&mut self, now: Nanos, input: DecodeInput, out: &mut Outbox<DecodeEffect>) {
        self.turn(input, &mut Turn::new(now, out));
    }

    fn deadline(&self) -> Option<Nanos> {
        [self.peer_manager.deadline(), self.timers.next()].into_iter().flatten().min()
    }

    fn gauges(&self) -> Gauges {
        let shared = self.peer_manager.gauges();
        let names = self.by_transfer.len() + self.by_peer.len() + self.ledger.owners();
        let told = self.pending_releases.len() + self.ledger.receiving() as usize;
        let entries = names + told + self.flows.len() + self.timers.len();
        Gauges {
            entries: shared.entries + entries as u32,
            remembered: shared.remembered + self.ledger.places() as u32,
            transfers: self.requests.len() as u32,
            quarantined: self.ledger.quarantined(),
            queued: shared.queued + self.pending_len(),
            tombstones: self.tombstones.len() as u32,
            ..shared
        }
    }
}
