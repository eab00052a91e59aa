//! The decode side of transfers: one per engine core.
//!
//! `request` follows the engine's requests from arrival to the one answer that each gets; `read`
//! holds what only pull needs: leases and the flows of this engine's own transfer actors; `debts`
//! tells prefills later what they could not be told at once.

mod debts;
mod read;
mod request;

use super::blocks::{Ledger, Owner};
use super::by_peer::ByPeer;
use super::command::ControlCommand;
use super::dialect::native::MessageKind;
use super::error::{Failure, PeerViolation};
use super::idmap::IdMap;
use super::ids::{EngineId, FlowId, PeerSlot, RequestId, TransferKey};
use super::machine::{Gauges, Machine, Outbox};
use super::message::{DecodeAnswer, DecodeHook, Job, Message, Report, RouterNews, Tag};
use super::moriio::MoriioCounters;
use super::peers::PeerEvent;
use super::station::{CoreConfig, News, Station};
use super::time::Nanos;
use super::timers::Timers;
use super::tombstones::Tombstones;
use crate::fabric::ControlEvent;
use debts::{Creditor, Debt};
use request::Request;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What can happen to a decode core.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DecodeInput {
    /// The engine tells.
    Hook(DecodeHook),
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

/// What a decode core wants done.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DecodeEffect {
    /// Call the control plane.
    Control(ControlCommand),
    /// Give a job to the transfer actors of all ranks.
    Job(Job),
    /// Tell the engine.
    Answer(DecodeAnswer),
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

impl From<ControlCommand> for DecodeEffect {
    fn from(command: ControlCommand) -> Self {
        DecodeEffect::Control(command)
    }
}

impl From<Job> for DecodeEffect {
    fn from(job: Job) -> Self {
        DecodeEffect::Job(job)
    }
}

impl From<DecodeAnswer> for DecodeEffect {
    fn from(answer: DecodeAnswer) -> Self {
        DecodeEffect::Answer(answer)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// Ask for a longer lease.
    Renew(RequestId),
    /// The lease of a read ends.
    Expiry(RequestId),
    /// Try again to tell a prefill what was given up.
    Remind(Creditor),
}

/// The decode state machine of one engine core.
#[derive(Debug)]
pub struct Decode {
    config: CoreConfig,
    station: Station,
    requests: BTreeMap<RequestId, Request>,
    by_peer: ByPeer<RequestId>,
    ids: IdMap,
    ledger: Ledger,
    flows: BTreeMap<FlowId, RequestId>,
    debts: BTreeMap<Creditor, Debt>,
    tombstones: Tombstones<(TransferKey, u32)>,
    timers: Timers<Timer>,
    news: Vec<News>,
    next_id: u64,
}

type Out = Outbox<DecodeEffect>;

impl Decode {
    /// A core that has done nothing; it registers when all its ranks are ready.
    pub fn new(config: CoreConfig) -> Decode {
        Decode {
            station: Station::new(&config),
            requests: BTreeMap::new(),
            by_peer: ByPeer::default(),
            ids: IdMap::default(),
            ledger: Ledger::default(),
            flows: BTreeMap::new(),
            debts: BTreeMap::new(),
            tombstones: Tombstones::new(config.settings.tombstones_max),
            timers: Timers::default(),
            news: Vec::new(),
            next_id: 0,
            config,
        }
    }

    fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn fresh_owner(&mut self) -> Owner {
        Owner(self.fresh())
    }

    fn hook(&mut self, now: Nanos, hook: DecodeHook, out: &mut Out) {
        match hook {
            DecodeHook::Arrived { request, leg, tokens } => {
                self.arrived(now, request, leg, tokens, out);
            }
            DecodeHook::Allocated { request, computed, blocks } => {
                self.allocated(now, request, computed, blocks, out);
            }
            DecodeHook::Finished { request, .. } => self.finished(now, &request, out),
        }
    }

    fn news(&mut self, now: Nanos, news: News, out: &mut Out) {
        match news {
            News::Peer(event) => self.peer(now, event, out),
            News::Fenced { slot } => self.peer_fenced(now, slot, out),
            News::Abandoned { .. } => {}
            News::Flow { rank, flow, state } => self.flow_news(now, rank, flow, state, out),
            News::Unusable { failure } => self.give_up(now, &failure, out),
            News::Router(said) => out.push(DecodeEffect::Router(said)),
        }
    }

    fn peer(&mut self, now: Nanos, event: PeerEvent, out: &mut Out) {
        match event {
            PeerEvent::Message { slot, message } => self.message(now, slot, message, out),
            PeerEvent::Lost { slot, tag, kind, violation } => {
                self.lost(now, slot, tag, (kind, Failure::Violation(violation)), out);
            }
            PeerEvent::Up { slot } => {
                self.peer_up(now, slot, out);
                self.pay(now, slot, out);
            }
            PeerEvent::Down { slot, failure, unsaid } => {
                if let Some(unsaid) = unsaid {
                    self.owe(now, *unsaid);
                }
                self.peer_down(now, slot, &failure, out);
            }
            PeerEvent::Violation(violation) => out.push(DecodeEffect::Violation(violation)),
            PeerEvent::Refused { engine: peer, failure } => {
                out.push(DecodeEffect::Refused { peer, failure });
            }
        }
    }

    fn message(&mut self, now: Nanos, slot: PeerSlot, message: Message, out: &mut Out) {
        match message {
            Message::Ask { .. }
            | Message::Announce { .. }
            | Message::Pull { .. }
            | Message::Renew { .. }
            | Message::Release { .. }
            | Message::Cancel { .. } => {
                out.push(DecodeEffect::Violation(self.station.violation(slot, &message)));
            }
            message => {
                if let Some(request) = self.request_of(slot, message.tag()) {
                    self.message_for(now, request, message, out);
                }
            }
        }
    }

    fn message_for(&mut self, now: Nanos, request: RequestId, message: Message, out: &mut Out) {
        match message {
            Message::Begun { .. } => self.due(&request, out),
            Message::Delivered { ranks, tokens, .. } => {
                self.delivered(now, request, ranks, tokens, out);
            }
            Message::Ended { failure, quiet, .. } => {
                self.ended(now, &request, failure, quiet, out);
            }
            Message::Grant { blocks, tokens, lease, .. } => {
                self.granted(now, &request, tokens, blocks, lease, out);
            }
            Message::Renewed { count, lease, .. } => self.renewed(&request, count, lease, out),
            _ => {}
        }
    }

    /// A message of a prefill could not be read: what it was about ends, whatever it said. A lease
    /// that was not extended is asked for again.
    fn lost(
        &mut self,
        now: Nanos,
        slot: PeerSlot,
        tag: Tag,
        (kind, failure): (MessageKind, Failure),
        out: &mut Out,
    ) {
        let Some(id) = self.request_of(slot, &tag).filter(|_| kind != MessageKind::Renewed) else {
            return;
        };
        if self.requests.get(&id).is_some_and(Request::is_ending) {
            // Perhaps it said that the prefill has stopped writing. It says so again.
            let _ = self.station.send(now, slot, Message::Cancel { tag }, out);
        }
        self.fail(now, &id, failure, out);
    }

    /// The request that a tag of this peer is about, if that attempt is the current one.
    fn request_of(&self, slot: PeerSlot, tag: &Tag) -> Option<RequestId> {
        let id = self.ids.request(&(tag.key.clone(), tag.sibling))?;
        let request = self.requests.get(id)?;
        let current = request.tag.attempt == tag.attempt || planted!("decode-ignores-attempts");
        let same = request.slot == slot || planted!("decode-ignores-who-speaks");
        (same && current).then(|| id.clone())
    }

    fn tick(&mut self, now: Nanos, out: &mut Out) {
        while let Some(timer) = self.timers.pop_due(now) {
            match timer {
                Timer::Renew(request) => self.renew(now, &request, out),
                Timer::Expiry(request) => self.fail(now, &request, Failure::LeaseExpired, out),
                Timer::Remind(creditor) => self.remind(now, &creditor, out),
            }
        }
    }

    /// The engine's memory cannot be used.
    fn give_up(&mut self, now: Nanos, failure: &Failure, out: &mut Out) {
        let ids: Vec<_> = self.requests.keys().cloned().collect();
        for id in ids {
            self.fail(now, &id, failure.clone(), out);
        }
    }
}

impl Decode {
    /// What was counted of peers that speak MoRIIO.
    pub fn moriio(&self) -> MoriioCounters {
        self.station.moriio()
    }
}

impl Machine for Decode {
    type Input = DecodeInput;
    type Effect = DecodeEffect;

    fn handle(&mut self, now: Nanos, input: DecodeInput, out: &mut Out) {
        match input {
            DecodeInput::Hook(hook) => self.hook(now, hook, out),
            DecodeInput::Control(event) => {
                self.station.control(now, event, &mut self.news, out);
            }
            DecodeInput::Report { rank, report } => {
                self.station.report(now, rank, report, &mut self.news, out);
            }
            DecodeInput::Drain => self.station.drain(now, out),
            DecodeInput::Tick => {
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
        let names = self.ids.len() + self.by_peer.len() + self.ledger.owners();
        let told = self.debts.len() + self.ledger.receiving() as usize;
        let entries = names + told + self.flows.len() + self.timers.len();
        Gauges {
            entries: station.entries + entries as u32,
            remembered: station.remembered + self.ledger.places() as u32,
            transfers: self.requests.len() as u32,
            quarantined: self.ledger.quarantined(),
            queued: station.queued + self.owed(),
            tombstones: self.tombstones.len(),
            ..station
        }
    }
}
