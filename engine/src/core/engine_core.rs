//! What the prefill and the decode core take and want: inputs and effects.

use super::command::ControlCommand;
use super::error::{Failure, PeerViolation};
use super::ids::{EngineId, RequestId};
use super::machine::Turn;
use super::message::{DecodeAnswer, PrefillAnswer, RouterEvent, TransferJob, TransferReport};
use super::payload::{DirectoryCall, DirectoryNews};
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
    /// What the payload core has it do with its peers.
    Directory(DirectoryCall),
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
    /// Tell the payload core of the peers.
    Directory(DirectoryNews),
    /// For the log: a peer broke the protocol, and the frame was dropped.
    Violation(PeerViolation),
    /// For the log: what becomes of the registrations.
    Router(RouterEvent),
    /// For the log: the hello of who calls itself `peer` was refused, and it was told why.
    Refused { peer: EngineId, failure: Failure },
    /// For the log: who is to have the KV of this request speaks MoRIIO, and is spoken to so.
    SpeaksMoriio { request: RequestId },
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

/// The turn of a core.
pub(super) type CoreTurn<'a, A> = Turn<'a, CoreEffect<A>>;
