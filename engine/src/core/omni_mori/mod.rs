//! A host's payloads for stages whose connector is vLLM-Omni 0.30.0's `MoriTransferEngineConnector`,
//! and theirs for stages here: for the time in which a pipeline has both.
//!
//! To the payload core it is a client like others. `calls` has what receivers ask and what is kept
//! for them, `pulls` what is written into their memory, `targets` that memory; `fetches` gets
//! payloads from senders, which `senders` talks to. What it must not inherit from 0.30.0:
//!
//! - A destination is checked against the region that its owner described, and a length against the
//!   payload.
//! - A slot that is read for a peer is owned until the data plane says that it is read no more.
//! - A slot that a peer may write is registered for this alone, and belongs to nobody else before that
//!   registration has ended, whatever the peer says.
//! - Nothing is waited for without a limit, and nobody waits for what another peer does.
//!
//! ```
//! use kvferry_engine::core::omni_mori::{OmniMori, OmniMoriConfig, OmniMoriEffect, OmniMoriInput};
//! use kvferry_engine::core::payload::PayloadHook;
//! use kvferry_engine::core::{Machine, Nanos, Outbox};
//! use kvferry_engine::fabric::*;
//!
//! let caps = Caps {
//!     read: true,
//!     write: true,
//!     slices_max: 16,
//!     per_peer: Credits::UNLIMITED,
//!     in_all: Credits::of_operations(64),
//!     placement: Placement::OnCompletion,
//!     fence: FenceScope::Peer,
//!     patience: PlaneTimeouts::default(),
//! };
//! let address = Address(b"plane".as_slice().into());
//! let settings = Default::default();
//! let config = OmniMoriConfig { deployment: "a".into(), address, caps, pool: 1 << 20, settings };
//! let (mut stages, mut out) = (OmniMori::new(config), Outbox::new());
//! stages.handle(Nanos::ZERO, OmniMoriInput::Start, &mut out);
//! let [OmniMoriEffect::Hook(PayloadHook::Joined { stage, .. }), OmniMoriEffect::Register { .. }] =
//!     out.as_slice()
//! else {
//!     panic!("{out:?}");
//! };
//! assert_eq!(&**stage, "mori");
//! ```

mod calls;
mod fetches;
mod io;
mod keys;
mod pulls;
mod senders;
mod targets;

use super::command::DataRefusal;
use super::machine::{Gauges, Machine, Outbox, Turn};
use super::payload::{PayloadAnswer, PayloadHook, PayloadKey};
use super::time::Nanos;
use super::timers::Timers;
use crate::fabric::{
    ControlEvent, DataEvent, Endpoint, LinkId, OpId, PeerId, QuiesceTicket, RegionId, SessionId,
};
use calls::{CallLink, PayloadOffer};
use fetches::StageFetch;
pub use io::*;
use pulls::StagePull;
use senders::{ConnectorSender, SenderLink};
use std::collections::BTreeMap;
use std::sync::Arc;
use targets::{PullTarget, TargetPeer};

/// The stage that it is to the payload core.
const STAGE: &str = "mori";

/// The region that is the whole pool.
const POOL: RegionId = RegionId(0);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum OmniMoriTimer {
    /// Receivers ask no more for a key.
    Linger(PayloadKey),
    /// A pull takes too long.
    Pull(u64),
    /// A data plane that was busy may take an operation.
    Busy(u64),
    /// A region is not written.
    Session(SessionId),
    /// A sender is dialled again.
    Redial(Endpoint),
    /// A sender does not answer, or is not asked.
    Link(LinkId),
    /// A sender is asked again.
    Poll(PayloadKey),
    /// A sender does not have it.
    Fetch(PayloadKey),
    /// A region is to be deregistered once more.
    Revoke(PayloadKey),
}

type StageTurn<'a> = Turn<'a, OmniMoriEffect>;

/// The machine.
#[derive(Debug)]
pub struct OmniMori {
    config: OmniMoriConfig,
    /// Whether the data plane has the pool.
    is_registered: bool,
    links: BTreeMap<LinkId, CallLink>,
    offers: BTreeMap<PayloadKey, PayloadOffer>,
    /// How often the payload core has not said that a key is abandoned.
    abandoned: BTreeMap<PayloadKey, u32>,
    /// Who is answered when the payload core has said all that it knows by now.
    barriers: BTreeMap<u64, PayloadKey>,
    /// Keys by the number of their offer, so that the one that was asked for last is the last.
    offer_order: BTreeMap<u64, PayloadKey>,
    pulls: BTreeMap<u64, StagePull>,
    /// Writes that have not completed, and the pulls that they are of.
    operations: BTreeMap<OpId, u64>,
    tickets_of_pulls: BTreeMap<QuiesceTicket, u64>,
    /// Peers by their addresses, which are their engines' descriptors.
    peers: BTreeMap<Arc<[u8]>, TargetPeer>,
    sessions: BTreeMap<SessionId, PullTarget>,
    targets: BTreeMap<(PeerId, Arc<[u8]>), SessionId>,
    fetches: BTreeMap<PayloadKey, StageFetch>,
    /// Fetches that wait for room in the pool; none of those that were stopped.
    tickets: BTreeMap<u64, PayloadKey>,
    regions: BTreeMap<RegionId, PayloadKey>,
    senders: BTreeMap<Endpoint, ConnectorSender>,
    sender_links: BTreeMap<LinkId, SenderLink>,
    timers: Timers<OmniMoriTimer>,
    next_id: u64,
    next_region: u32,
    next_link: u32,
    violations: u32,
}

impl OmniMori {
    /// A machine that has done nothing; its first input is [`OmniMoriInput::Start`].
    pub fn new(config: OmniMoriConfig) -> OmniMori {
        OmniMori {
            config,
            is_registered: false,
            links: BTreeMap::new(),
            offers: BTreeMap::new(),
            abandoned: BTreeMap::new(),
            barriers: BTreeMap::new(),
            offer_order: BTreeMap::new(),
            pulls: BTreeMap::new(),
            operations: BTreeMap::new(),
            tickets_of_pulls: BTreeMap::new(),
            peers: BTreeMap::new(),
            sessions: BTreeMap::new(),
            targets: BTreeMap::new(),
            fetches: BTreeMap::new(),
            tickets: BTreeMap::new(),
            regions: BTreeMap::new(),
            senders: BTreeMap::new(),
            sender_links: BTreeMap::new(),
            timers: Timers::default(),
            next_id: 0,
            next_region: POOL.0,
            next_link: 0,
            violations: 0,
        }
    }

    fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn start(&mut self, turn: &mut StageTurn<'_>) {
        let deployment = self.config.deployment.clone();
        turn.push(PayloadHook::Joined { deployment, stage: STAGE.into() });
        self.register_pool(turn);
    }

    fn register_pool(&mut self, turn: &mut StageTurn<'_>) {
        turn.push(OmniMoriEffect::Register { region: POOL, at: 0, bytes: self.config.pool });
    }

    fn violation(&mut self, from: Option<Endpoint>, rule: &str, turn: &mut StageTurn<'_>) {
        self.violations = self.violations.saturating_add(1);
        turn.push(OmniMoriReport::Violation { from, rule: rule.into() });
    }

    fn control(&mut self, event: ControlEvent, turn: &mut StageTurn<'_>) {
        match event {
            ControlEvent::LinkUp { link, from, .. } if link.is_inbound() => {
                self.caller_up(link, from, turn);
            }
            ControlEvent::LinkUp { link, .. } => self.sender_up(link, turn),
            ControlEvent::Frame { link, parts } if link.is_inbound() => {
                self.on_call(link, &parts, turn);
            }
            ControlEvent::Frame { link, parts } => self.on_answer(link, &parts, turn),
            ControlEvent::LinkDown { link } if link.is_inbound() => self.caller_down(link, turn),
            ControlEvent::LinkDown { link } => self.sender_down(link, turn),
        }
    }

    fn data(&mut self, event: DataEvent, turn: &mut StageTurn<'_>) {
        match event {
            DataEvent::Registered { region: POOL, result } => match result {
                Ok(_) => self.is_registered = true,
                Err(why) => turn.push(OmniMoriReport::Unregistered(why.to_string().into())),
            },
            DataEvent::Registered { region, result } => match result {
                Ok(desc) => self.fetch_registered(region, desc, turn),
                Err(why) => self.fetch_unregistered(region, &why.to_string(), turn),
            },
            DataEvent::Opened { session, result: Ok(()) } => self.target_opened(session, turn),
            DataEvent::Opened { session, result: Err(why) } => {
                self.target_failed(session, &format!("the region cannot be reached: {why}"), turn);
            }
            DataEvent::Completed { op, outcome } => self.completed(op, outcome, turn),
            DataEvent::Quiet { ticket, .. } => self.quiet(ticket, turn),
            DataEvent::PeerDown { peer } => self.target_peer_down(peer, turn),
            DataEvent::Fenced { .. } | DataEvent::Digested { .. } => {}
            DataEvent::Reset { address } => {
                self.config.address = address;
                self.is_registered = false;
                self.targets_void(turn);
                self.fetches_void(turn);
                self.register_pool(turn);
            }
        }
    }

    fn refused(&mut self, refusal: DataRefusal, turn: &mut StageTurn<'_>) {
        match refusal {
            DataRefusal::Register { region: POOL, why } => {
                turn.push(OmniMoriReport::Unregistered(why.to_string().into()));
            }
            DataRefusal::Register { region, why } => {
                self.fetch_unregistered(region, &why.to_string(), turn);
            }
            DataRefusal::Connect { peer, why } => {
                let sessions = self.sessions.iter().filter(|(_, target)| target.peer == peer);
                for session in sessions.map(|(id, _)| *id).collect::<Vec<_>>() {
                    self.target_failed(session, &format!("the engine: {why}"), turn);
                }
            }
            DataRefusal::Open { session, why } => {
                self.target_failed(session, &format!("the region: {why}"), turn);
            }
            DataRefusal::Submit { op, why } => self.not_submitted(op, why, turn),
            DataRefusal::Digest { .. } => {}
        }
    }

    fn answered(&mut self, answer: PayloadAnswer, turn: &mut StageTurn<'_>) {
        match answer {
            PayloadAnswer::Reserved { ticket, slot, offset } => {
                self.reserved(ticket, slot, offset, turn);
            }
            PayloadAnswer::NotReserved { ticket, failure } => {
                self.not_reserved(ticket, &failure, turn);
            }
            PayloadAnswer::Missing { key, failure, .. } => self.missing(&key, &failure, turn),
            PayloadAnswer::Abandoned { key } => self.was_abandoned(&key, turn),
            PayloadAnswer::Arrived { .. }
            | PayloadAnswer::Stored { .. }
            | PayloadAnswer::Waits { .. } => {}
        }
    }

    fn tick(&mut self, turn: &mut StageTurn<'_>) {
        while let Some(timer) = self.timers.pop_due(turn.now) {
            match timer {
                OmniMoriTimer::Linger(key) => self.linger_over(&key, turn),
                OmniMoriTimer::Pull(pull) => self.pull_overdue(pull, turn),
                OmniMoriTimer::Busy(pull) => self.advance(pull, turn),
                OmniMoriTimer::Session(session) => self.drop_target(session, turn),
                OmniMoriTimer::Redial(sender) => self.pump(&sender, turn),
                OmniMoriTimer::Link(link) => self.link_overdue(link, turn),
                OmniMoriTimer::Poll(key) => self.poll(&key, turn),
                OmniMoriTimer::Fetch(key) => self.fetch_overdue(&key, turn),
                OmniMoriTimer::Revoke(key) => self.revoke(&key, turn),
            }
        }
    }
}

impl Machine for OmniMori {
    type Input = OmniMoriInput;
    type Effect = OmniMoriEffect;

    fn handle(&mut self, now: Nanos, input: OmniMoriInput, out: &mut Outbox<OmniMoriEffect>) {
        let turn = &mut Turn::new(now, out);
        match input {
            OmniMoriInput::Start => self.start(turn),
            OmniMoriInput::Control(event) => self.control(event, turn),
            OmniMoriInput::Data(event) => self.data(event, turn),
            OmniMoriInput::Refused(refusal) => self.refused(refusal, turn),
            OmniMoriInput::Deregistered { region, is_done } => {
                self.deregistered(region, is_done, turn);
            }
            OmniMoriInput::Answer(answer) => self.answered(answer, turn),
            OmniMoriInput::Arrived { key, claim, found } => {
                self.arrived(key, claim, found, turn);
            }
            OmniMoriInput::Fetch { key, sender } => self.fetch(key, sender, turn),
            OmniMoriInput::Stop { key } => self.stop(&key, turn),
            OmniMoriInput::Tick => {}
        }
        self.tick(turn);
    }

    fn deadline(&self) -> Option<Nanos> {
        self.timers.next()
    }

    fn gauges(&self) -> Gauges {
        let asked = self.offers.values().map(|offer| 1 + offer.asked.len()).sum::<usize>();
        let names = self.tickets.len() + self.regions.len() + self.barriers.len();
        let targets = self.sessions.len() + self.targets.len() + self.senders.len();
        Gauges {
            transfers: (self.pulls.len() + self.fetches.len()) as u32,
            operations: self.pulls.values().filter(|pull| pull.is_moving()).count() as u32,
            queued: self.senders.values().map(|sender| sender.queue.len()).sum::<usize>() as u32,
            peers: self.peers.len() as u32,
            links: (self.links.len() + self.sender_links.len()) as u32,
            entries: (asked + names + self.abandoned.len()) as u32,
            remembered: (targets + self.timers.len()) as u32,
            violations: self.violations,
            ..Gauges::default()
        }
    }
}
