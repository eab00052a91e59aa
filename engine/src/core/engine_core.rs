//! What the prefill and the decode core have in common as machines: inputs, effects, and the turn
//! of one input.

use super::command::ControlCommand;
use super::error::{Failure, PeerViolation};
use super::ids::EngineId;
use super::machine::Turn;
use super::message::{DecodeAnswer, PrefillAnswer, RouterEvent, TransferJob, TransferReport};
use super::peer_manager::{PeerManager, PeerManagerEvent};
use super::peers::PeerEvent;
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

    fn on_hook(&mut self, hook: Self::Hook, turn: &mut CoreTurn<'_, Self>);

    /// News of the peers and of the own ranks; what is only for the log does not come here.
    fn on_event(&mut self, event: PeerManagerEvent, turn: &mut CoreTurn<'_, Self>);

    /// Deadlines of the core's own.
    fn on_deadlines(&mut self, turn: &mut CoreTurn<'_, Self>);

    /// The turn of one input.
    fn turn(&mut self, input: CoreInput<Self::Hook>, turn: &mut CoreTurn<'_, Self>) {
        match input {
            CoreInput::Hook(hook) => self.on_hook(hook, turn),
            CoreInput::Control(event) => self.peer_manager().control(event, turn),
            CoreInput::Report { rank, report } => {
                self.peer_manager().report(rank, report, turn);
            }
            CoreInput::Drain => self.peer_manager().drain(turn),
            CoreInput::Tick => {
                self.peer_manager().tick(turn);
                self.on_deadlines(turn);
            }
        }
        loop {
            let events = self.peer_manager().take_events(turn);
            if events.is_empty() {
                break;
            }
            for event in events {
                match event {
                    PeerManagerEvent::Peer(PeerEvent::Violation(violation)) => {
                        turn.push(CoreEffect::Violation(violation));
                    }
                    PeerManagerEvent::Peer(PeerEvent::Refused { engine: peer, failure }) => {
                        turn.push(CoreEffect::Refused { peer, failure });
                    }
                    PeerManagerEvent::Router(event) => turn.push(CoreEffect::Router(event)),
                    event => self.on_event(event, turn),
                }
            }
        }
    }
}

/// The turn of a core.
pub(super) type CoreTurn<'a, C> = Turn<'a, CoreEffect<<C as EngineCore>::Answer>>;
