//! What the prefill and the decode core have in common as machines: inputs, effects, and the turn
//! of one input.

use super::command::ControlCommand;
use super::dialect::native::MessageKind;
use super::error::{Failure, PeerViolation};
use super::ids::{ConnectionId, EngineId, FlowId, TransferKey};
use super::machine::Outbox;
use super::message::{
    AttemptTag, DecodeAnswer, FlowState, Message, PrefillAnswer, RouterEvent, TransferJob,
    TransferReport,
};
use super::peer_manager::{PeerManager, PeerManagerEvent};
use super::peers::{PeerEvent, UnackedReleases};
use super::time::Nanos;
use crate::fabric::ControlEvent;
use serde::{Deserialize, Serialize};

/// What can happen to a prefill or decode core. `H` is what its engine tells it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CoreInput<H> {
    /// The engine tells.
    Hook(H),
    /// The control plane reports.
    Control(ControlEvent),
    /// The transfer actor of a TP rank reports.
    Report { rank: u16, report: TransferReport },
    /// Register as draining from now on.
    Drain,
    /// A deadline may be due.
    Tick,
}

/// What a prefill or decode core wants done. `A` is what it tells its engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CoreEffect<A> {
    /// Call the control plane.
    Control(ControlCommand),
    /// Give a job to the transfer actors of all ranks.
    Job(TransferJob),
    /// Tell the engine.
    Answer(A),
    /// For the log: a peer broke the protocol, and the frame was dropped.
    Violation(PeerViolation),
    /// For the log: what becomes of the registrations.
    Router(RouterEvent),
    /// For the log: the hello of who calls itself `peer` was refused, and it was told why.
    Refused { peer: EngineId, failure: Failure },
}

impl<A> From<ControlCommand> for CoreEffect<A> {
    fn from(command: ControlCommand) -> Self {
        CoreEffect::Control(command)
    }
}

impl<A> From<TransferJob> for CoreEffect<A> {
    fn from(job: TransferJob) -> Self {
        CoreEffect::Job(job)
    }
}

impl From<PrefillAnswer> for CoreEffect<PrefillAnswer> {
    fn from(answer: PrefillAnswer) -> Self {
        CoreEffect::Answer(answer)
    }
}

impl From<DecodeAnswer> for CoreEffect<DecodeAnswer> {
    fn from(answer: DecodeAnswer) -> Self {
        CoreEffect::Answer(answer)
    }
}

/// A prefill or decode core behind its peer manager.
pub(super) trait EngineCore {
    type Hook;
    type Answer;

    fn peer_manager(&mut self) -> (&mut PeerManager, &mut Vec<PeerManagerEvent>);

    fn on_hook(&mut self, now: Nanos, hook: Self::Hook, out: &mut Effects<Self>);

    fn on_message(
        &mut self,
        now: Nanos,
        connection: ConnectionId,
        message: Message,
        out: &mut Effects<Self>,
    );

    /// A message could not be read: the attempt that it was about, its kind, and what is wrong.
    fn on_lost(
        &mut self,
        now: Nanos,
        connection: ConnectionId,
        tag: AttemptTag,
        lost: (MessageKind, Failure),
        out: &mut Effects<Self>,
    );

    fn on_peer_up(&mut self, _: Nanos, _: ConnectionId, _: &mut Effects<Self>) {}

    fn on_peer_down(
        &mut self,
        now: Nanos,
        connection: ConnectionId,
        failure: &Failure,
        unacked: Option<Box<UnackedReleases>>,
        out: &mut Effects<Self>,
    );

    /// Nothing moves between the peer and this engine any more.
    fn on_fenced(&mut self, _: Nanos, _: ConnectionId, _: &mut Effects<Self>) {}

    fn on_flow(
        &mut self,
        now: Nanos,
        rank: u16,
        flow: FlowId,
        state: FlowState,
        out: &mut Effects<Self>,
    );

    /// The router says that nobody will fetch what is left of a transfer.
    fn on_abandoned(&mut self, _: Nanos, _: &TransferKey, _: &mut Effects<Self>) {}

    /// The engine's memory cannot be used.
    fn give_up(&mut self, now: Nanos, failure: &Failure, out: &mut Effects<Self>);

    /// Deadlines of the core's own.
    fn on_deadlines(&mut self, now: Nanos, out: &mut Effects<Self>);

    /// The turn of one input.
    fn turn(&mut self, now: Nanos, input: CoreInput<Self::Hook>, out: &mut Effects<Self>) {
        let (manager, events) = self.peer_manager();
        match input {
            CoreInput::Hook(hook) => self.on_hook(now, hook, out),
            CoreInput::Control(event) => manager.control(now, event, events, out),
            CoreInput::Report { rank, report } => manager.report(now, rank, report, events, out),
            CoreInput::Drain => manager.drain(now, out),
            CoreInput::Tick => {
                manager.tick(now, out);
                self.on_deadlines(now, out);
            }
        }
        loop {
            let (manager, events) = self.peer_manager();
            manager.process_peer_events(events, out);
            if events.is_empty() {
                break;
            }
            for event in std::mem::take(events) {
                self.on_event(now, event, out);
            }
        }
    }

    fn on_event(&mut self, now: Nanos, event: PeerManagerEvent, out: &mut Effects<Self>) {
        match event {
            PeerManagerEvent::Peer(event) => match event {
                PeerEvent::Message { connection, message } => {
                    self.on_message(now, connection, message, out);
                }
                PeerEvent::Lost { connection, tag, kind, violation } => {
                    let lost = (kind, Failure::Violation(violation));
                    self.on_lost(now, connection, tag, lost, out);
                }
                PeerEvent::Up { connection } => self.on_peer_up(now, connection, out),
                PeerEvent::Down { connection, failure, unacked_releases } => {
                    self.on_peer_down(now, connection, &failure, unacked_releases, out);
                }
                PeerEvent::Violation(violation) => out.push(CoreEffect::Violation(violation)),
                PeerEvent::Refused { engine: peer, failure } => {
                    out.push(CoreEffect::Refused { peer, failure });
                }
            },
            PeerManagerEvent::Flow { rank, flow, state } => {
                self.on_flow(now, rank, flow, state, out);
            }
            PeerManagerEvent::Fenced { connection } => self.on_fenced(now, connection, out),
            PeerManagerEvent::Abandoned { key } => self.on_abandoned(now, &key, out),
            PeerManagerEvent::Unusable { failure } => self.give_up(now, &failure, out),
            PeerManagerEvent::Router(event) => out.push(CoreEffect::Router(event)),
        }
    }
}

/// The outbox of a core.
pub(super) type Effects<C> = Outbox<CoreEffect<<C as EngineCore>::Answer>>;
