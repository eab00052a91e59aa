//! Inputs of the machines by kind, so that it can be counted which ones a machine has met: what the
//! simulator gives to a machine, its shell in a deployment has to produce as well.
//!
//! ```
//! use kvferry_engine::core::input_kinds::InputKinds;
//! use kvferry_engine::core::router::RouterInput;
//!
//! let kind = RouterInput::Drain.kind();
//! assert_eq!((RouterInput::MACHINE, RouterInput::KINDS[kind]), ("router", "Drain"));
//! ```

use super::decode::DecodeInput;
use super::dialect::moriio::frame_kind::{MoriioFrameKind, form};
use super::dialect::native::{MessageKind, peek};
use super::error::Failure;
use super::message::{DecodeHook, FlowState, PrefillHook, TransferJob, TransferReport};
use super::prefill::PrefillInput;
use super::router::{
    FailureSeverity, LegEvent, LegFailure, RegistrationKind, RegistrationProof, RouterInput,
    of_instance, registration_kind,
};
use super::transfer::TransferInput;
use crate::fabric::{Completion, ControlEvent, DataEvent};

/// An input of a machine that is of one of several kinds.
pub trait InputKinds {
    /// The machine that takes it.
    const MACHINE: &'static str;
    /// Names of all kinds.
    const KINDS: &'static [&'static str];

    /// Its kind, an index into [`InputKinds::KINDS`].
    fn kind(&self) -> usize;
}

/// What a frame looks like to a core: a few bytes of it tell.
enum FrameKind {
    Native(MessageKind),
    Moriio(MoriioFrameKind),
    Other,
}

fn frame_kind(parts: &[Vec<u8>]) -> FrameKind {
    let native = match parts {
        [part] => peek(part),
        _ => None,
    };
    native
        .map(FrameKind::Native)
        .or_else(|| form(parts).map(FrameKind::Moriio))
        .unwrap_or(FrameKind::Other)
}

/// An input that is a frame is of a kind by what the function named behind `by` makes of its parts,
/// any other by what it is.
macro_rules! kinds {
    (
        $machine:literal, $input:ident { $($kind:ident = $pattern:pat $(if $when:expr)?,)+ }
        $(by $of:ident { $($frame:ident = $form:pat,)+ })?
    ) => {
        impl InputKinds for $input {
            const MACHINE: &'static str = $machine;
            const KINDS: &'static [&'static str] =
                &[$(stringify!($kind),)+ $($(stringify!($frame),)+)?];

            fn kind(&self) -> usize {
                enum KindIndex {
                    $($kind,)+
                    $($($frame,)+)?
                }
                let kind = match self {
                    $($input::Control(ControlEvent::Frame { parts, .. }) => match $of(parts) {
                        $($form => KindIndex::$frame,)+
                    },)?
                    $($pattern $(if $when)? => KindIndex::$kind,)+
                };
                kind as usize
            }
        }
    };
}

macro_rules! failed {
    ($why:pat) => {
        RouterInput::Leg { event: LegEvent::Failed($why), .. }
    };
}

macro_rules! recomputed {
    ($why:pat) => {
        RouterInput::Leg { event: LegEvent::Done { recomputed: $why, .. }, .. }
    };
}

kinds!("router", RouterInput {
    LinkUp = RouterInput::Control(ControlEvent::LinkUp { .. }),
    LinkDown = RouterInput::Control(ControlEvent::LinkDown { .. }),
    ProofSigned = RouterInput::Proof { proof: RegistrationProof::Signed, .. },
    ProofWrong = RouterInput::Proof { proof: RegistrationProof::Wrong(_), .. },
    Register = RouterInput::Register(_),
    Static = RouterInput::Static(_),
    Request = RouterInput::Request(_),
    Gone = RouterInput::Gone { .. },
    LegFirstToken = RouterInput::Leg { event: LegEvent::FirstToken, .. },
    LegDone = recomputed!(None),
    LegRecomputedApart = recomputed!(Some(why)) if why.is_of_pair(),
    LegRecomputed = recomputed!(Some(_)),
    LegPrefilled = RouterInput::Leg { event: LegEvent::Prefilled { .. }, .. },
    LegFailedConnection = failed!(LegFailure::Connection | LegFailure::Left(_)),
    LegFailedBusy = failed!(LegFailure::Busy { .. }),
    LegFailedLife = failed!(LegFailure::Instance(Failure::OtherLife)),
    LegFailedGone = failed!(why @ LegFailure::Instance(_)) if of_instance(why) == FailureSeverity::Failure,
    LegFailedMoving = failed!(why @ LegFailure::Instance(_)) if of_instance(why) == FailureSeverity::Strike,
    LegFailedApart = failed!(LegFailure::Instance(why)) if why.is_of_pair(),
    LegFailedPrompt = failed!(LegFailure::Instance(_)),
    LegFailedAnswer = failed!(LegFailure::Answer(_)),
    LegFailedRequest = failed!(LegFailure::Request(_)),
    ProbeAnswered = RouterInput::Probed { answers: true, .. },
    ProbeLost = RouterInput::Probed { answers: false, .. },
    Load = RouterInput::Load { .. },
    Release = RouterInput::Release,
    Drain = RouterInput::Drain,
    Tick = RouterInput::Tick,
}
// Rare enough to be decoded twice.
by registration_kind {
    FrameRegister = RegistrationKind::Well,
    FrameTroubles = RegistrationKind::Troubles,
    FrameDrains = RegistrationKind::Drains,
    FrameHeartbeat = RegistrationKind::Heartbeat,
    FrameOther = RegistrationKind::Nothing,
});

macro_rules! core_kinds {
    (
        $machine:literal, $input:ident { $($kind:ident = $pattern:pat,)+ }
        native { $($message:ident,)+ }
        moriio { $($notice:ident = $form:ident,)+ }
    ) => {
        kinds!($machine, $input {
            $($kind = $input::Hook($pattern),)+
            LinkUp = $input::Control(ControlEvent::LinkUp { .. }),
            LinkDown = $input::Control(ControlEvent::LinkDown { .. }),
            RankReady = $input::Report { report: TransferReport::Ready { .. }, .. },
            RankUnusable = $input::Report { report: TransferReport::Unusable { .. }, .. },
            PeerReady = $input::Report { report: TransferReport::PeerReady { .. }, .. },
            PeerFailed = $input::Report { report: TransferReport::PeerFailed { .. }, .. },
            Fenced = $input::Report { report: TransferReport::Fenced { .. }, .. },
            FlowMoving = $input::Report { report: TransferReport::Flow { state: FlowState::Moving, .. }, .. },
            FlowFailing =
                $input::Report { report: TransferReport::Flow { state: FlowState::Failing(_), .. }, .. },
            FlowDigested =
                $input::Report { report: TransferReport::Flow { state: FlowState::Digested(_), .. }, .. },
            FlowDone =
                $input::Report { report: TransferReport::Flow { state: FlowState::Done { .. }, .. }, .. },
            FlowFailed =
                $input::Report { report: TransferReport::Flow { state: FlowState::Failed(_), .. }, .. },
            Directory = $input::Directory(_),
            Drain = $input::Drain,
            Tick = $input::Tick,
        } by frame_kind {
            $($message = FrameKind::Native(MessageKind::$message),)+
            $($notice = FrameKind::Moriio(MoriioFrameKind::$form),)+
            FrameOther = _,
        });
    };
}

core_kinds!("prefill", PrefillInput {
    Arrived = PrefillHook::Arrived { .. },
    Scheduled = PrefillHook::Scheduled { .. },
    Finished = PrefillHook::Finished { .. },
    Preempted = PrefillHook::Preempted { .. },
}
native {
    Hello, Welcome, Refuse, Ack, Probe, Bye, Abandon, Ask, Announce, Pull, Renew, Release, Cancel,
    Payload,
}
moriio {
    MoriioCall = Call,
    MoriioMetadata = Metadata,
    MoriioMemory = Memory,
    MoriioBlocks = Blocks,
    MoriioRelease = Release,
    MoriioText = Text,
});

core_kinds!("decode", DecodeInput {
    Arrived = DecodeHook::Arrived { .. },
    Allocated = DecodeHook::Allocated { .. },
    Finished = DecodeHook::Finished { .. },
}
native {
    Hello, Welcome, Refuse, Ack, Probe, Bye, Begun, Grant, Renewed, Delivered, Ended,
    Payload,
}
moriio {
    MoriioCall = Call,
    MoriioMetadata = Metadata,
    MoriioMemory = Memory,
    MoriioWritten = Written,
    MoriioFailed = Failed,
    MoriioText = Text,
});

kinds!("transfer", TransferInput {
    Start = TransferInput::Start,
    JobPeer = TransferInput::Job(TransferJob::Peer { .. }),
    JobFence = TransferInput::Job(TransferJob::Fence { .. }),
    JobSource = TransferInput::Job(TransferJob::Source { .. }),
    JobForget = TransferInput::Job(TransferJob::Forget { .. }),
    JobWrite = TransferInput::Job(TransferJob::Write { .. }),
    JobRead = TransferInput::Job(TransferJob::Read { .. }),
    JobDigest = TransferInput::Job(TransferJob::Digest { .. }),
    JobStop = TransferInput::Job(TransferJob::Stop { .. }),
    Layers = TransferInput::Layers { .. },
    Registered = TransferInput::Data(DataEvent::Registered { result: Ok(_), .. }),
    Unregistered = TransferInput::Data(DataEvent::Registered { result: Err(_), .. }),
    Opened = TransferInput::Data(DataEvent::Opened { result: Ok(_), .. }),
    Unopened = TransferInput::Data(DataEvent::Opened { result: Err(_), .. }),
    Moved = TransferInput::Data(DataEvent::Completed { outcome: Completion::Done, .. }),
    Unmoved = TransferInput::Data(DataEvent::Completed { outcome: Completion::Failed { .. }, .. }),
    Quiet = TransferInput::Data(DataEvent::Quiet { .. }),
    Digested = TransferInput::Data(DataEvent::Digested { .. }),
    Fenced = TransferInput::Data(DataEvent::Fenced { .. }),
    PeerDown = TransferInput::Data(DataEvent::PeerDown { .. }),
    Reset = TransferInput::Data(DataEvent::Reset { .. }),
    Refused = TransferInput::Refused(_),
    Tick = TransferInput::Tick,
});
