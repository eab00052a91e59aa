//! What the prefill and the decode core have in common as machines: inputs, effects, and the turn
//! of one input.

use super::command::ControlCommand;
use super::error::{Failure, PeerViolation};
use super::ids::EngineId;
use super::machine::Outbox;
use super::message::{DecodeAnswer, PrefillAnswer, RouterEvent, TransferJob, TransferReport};
use super::peer_manager::{PeerManager, PeerManagerEvent};
use super::peers::PeerEvent;
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

    fn peer_manager(&mut self) -> &mut PeerManager;

    fn on_hook(&mut self, now: Nanos, hook: Self::Hook, out: &mut Effects<Self>);

    /// News of the peers and of the own ranks; what is only for the log does not come here.
    fn on_event(&mut self, now: Nanos, event: PeerManagerEvent, out: &mut Effects<Self>);

    /// Deadlines of the core's own.
    fn on_deadlines(&mut self, now: Nanos, out: &mut Effects<Self>);

    /// The turn of one input.
    fn turn(&mut self, now: Nanos, input: CoreInput<Self::Hook>, out: &mut Effects<Self>) {
        match input {
            CoreInput::Hook(hook) => self.on_hook(now, hook, out),
            CoreInput::Control(event) => self.peer_manager().control(now, event, out),
            CoreInput::Report { rank, report } => {
                self.peer_manager().report(now, rank, report, out);
            }
            CoreInput::Drain => self.peer_manager().drain(now, out),
            CoreInput::Tick => {
                self.peer_manager().tick(now, out);
                self.on_deadlines(now, out);
            }
        }
        loop {
            let events = self.peer_manager().take_events(out);
            if events.is_empty() {
                break;
            }
            for event in events {
                match event {
                    PeerManagerEvent::Peer(PeerEvent::Violation(violation)) => {
                        out.push(CoreEffect::Violation(violation));
                    }
                    PeerManagerEvent::Peer(PeerEvent::Refused { engine: peer, failure }) => {
                        out.push(CoreEffect::Refused { peer, failure });
                    }
                    PeerManagerEvent::Router(event) => out.push(CoreEffect::Router(event)),
                    event => self.on_event(now, event, out),
                }
            }
        }
    }
}

/// The outbox of a core.
pub(super) type Effects<C> = Outbox<CoreEffect<<C as EngineCore>::Answer>>;
