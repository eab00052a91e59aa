//! Inputs of the machines by kind, so that it can be counted which ones a machine has met: what the
//! simulator gives to a machine, its shell in a deployment has to produce as well.

use super::decode::DecodeInput;
use super::message::{DecodeHook, FlowState, PrefillHook, Report};
use super::prefill::PrefillInput;
use super::router::{LegEvent, LegFailure, RouterInput};
use super::transfer::TransferInput;
use crate::fabric::ControlEvent;

/// An input of a machine that is of one of several kinds.
pub trait Kinds {
    /// The machine that takes it.
    const MACHINE: &'static str;
    /// Names of all kinds.
    const KINDS: &'static [&'static str];

    /// Its kind, an index into [`Kinds::KINDS`].
    fn kind(&self) -> usize;
}

macro_rules! kinds {
    ($machine:literal, $input:ident: $($kind:ident = $pattern:pat),+ $(,)?) => {
        impl Kinds for $input {
            const MACHINE: &'static str = $machine;
            const KINDS: &'static [&'static str] = &[$(stringify!($kind)),+];

            fn kind(&self) -> usize {
                enum Kind {
                    $($kind),+
                }
                let kind = match self {
                    $($pattern => Kind::$kind),+
                };
                kind as usize
            }
        }
    };
}

kinds!("router", RouterInput:
    LinkUp = RouterInput::Control(ControlEvent::LinkUp { .. }),
    LinkDown = RouterInput::Control(ControlEvent::LinkDown { .. }),
    Frame = RouterInput::Control(ControlEvent::Frame { .. }),
    Register = RouterInput::Register(_),
    Request = RouterInput::Request(_),
    Gone = RouterInput::Gone { .. },
    LegFirstToken = RouterInput::Leg { event: LegEvent::FirstToken, .. },
    LegDone = RouterInput::Leg { event: LegEvent::Done { recomputed: None, .. }, .. },
    LegRecomputed = RouterInput::Leg { event: LegEvent::Done { recomputed: Some(_), .. }, .. },
    LegPrefilled = RouterInput::Leg { event: LegEvent::Prefilled { .. }, .. },
    LegFailedConnection =
        RouterInput::Leg { event: LegEvent::Failed(LegFailure::Connection), .. },
    LegFailedBusy = RouterInput::Leg { event: LegEvent::Failed(LegFailure::Busy), .. },
    LegFailedInstance = RouterInput::Leg { event: LegEvent::Failed(LegFailure::Instance(_)), .. },
    LegFailedAnswer = RouterInput::Leg { event: LegEvent::Failed(LegFailure::Answer(_)), .. },
    LegFailedRequest = RouterInput::Leg { event: LegEvent::Failed(LegFailure::Request(_)), .. },
    ProbeAnswered = RouterInput::Probed { answers: true, .. },
    ProbeLost = RouterInput::Probed { answers: false, .. },
    Drain = RouterInput::Drain,
    Tick = RouterInput::Tick,
);

macro_rules! core_kinds {
    ($machine:literal, $input:ident: $($kind:ident = $pattern:pat),+ $(,)?) => {
        kinds!($machine, $input:
            $($kind = $input::Hook($pattern),)+
            LinkUp = $input::Control(ControlEvent::LinkUp { .. }),
            LinkDown = $input::Control(ControlEvent::LinkDown { .. }),
            Frame = $input::Control(ControlEvent::Frame { .. }),
            RankReady = $input::Report { report: Report::Ready { .. }, .. },
            RankUnusable = $input::Report { report: Report::Unusable { .. }, .. },
            PeerReady = $input::Report { report: Report::PeerReady { .. }, .. },
            PeerFailed = $input::Report { report: Report::PeerFailed { .. }, .. },
            Fenced = $input::Report { report: Report::Fenced { .. }, .. },
            FlowMoving = $input::Report { report: Report::Flow { state: FlowState::Moving, .. }, .. },
            FlowFailing =
                $input::Report { report: Report::Flow { state: FlowState::Failing(_), .. }, .. },
            FlowDone =
                $input::Report { report: Report::Flow { state: FlowState::Done { .. }, .. }, .. },
            FlowFailed =
                $input::Report { report: Report::Flow { state: FlowState::Failed(_), .. }, .. },
            Drain = $input::Drain,
            Tick = $input::Tick,
        );
    };
}

core_kinds!("prefill", PrefillInput:
    Arrived = PrefillHook::Arrived { .. },
    Scheduled = PrefillHook::Scheduled { .. },
    Finished = PrefillHook::Finished { .. },
    Preempted = PrefillHook::Preempted { .. },
);

core_kinds!("decode", DecodeInput:
    Arrived = DecodeHook::Arrived { .. },
    Allocated = DecodeHook::Allocated { .. },
    Finished = DecodeHook::Finished { .. },
);

kinds!("transfer", TransferInput:
    Start = TransferInput::Start,
    Job = TransferInput::Job(_),
    Layers = TransferInput::Layers { .. },
    Data = TransferInput::Data(_),
    Refused = TransferInput::Refused(_),
    Tick = TransferInput::Tick,
);
