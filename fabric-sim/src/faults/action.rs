//! What the fault engine asks the world to do, and what it is told.

use kvferry_engine::core::ids::ClientId;
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::lists::{FaultKind, MessageName, TriggerEvent};
use kvferry_scenarios::run::InstanceSettings;

/// Index of the router where instances are named.
pub const ROUTER: u16 = u16::MAX;

/// Something for the world to do, at once unless it says otherwise. Instances are indices into
/// those of the run; [`ROUTER`] is the router.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// All sessions between two instances go to error.
    KillSessions { a: u16, b: u16 },
    /// The data planes of an instance answer `Busy`, or do so no more.
    QueueFull { instance: u16, full: bool },
    /// Data planes of an instance have no backend, or get a new one.
    Port {
        instance: u16,
        /// Of one rank; `None` is all.
        rank: Option<u16>,
        /// Whether they have none.
        down: bool,
    },
    /// Bandwidth from one instance to another is divided; 1 restores it.
    LinkRate {
        /// Where bytes come from.
        from: u16,
        to: u16,
        divided_by: u32,
    },
    /// Frames and operations from one instance to another are cut, or pass again.
    Cut {
        /// Sender.
        from: u16,
        /// Receiver.
        to: u16,
        /// Whether they are cut.
        cut: bool,
    },
    /// An instance loses its state and memory; with `back_after` it starts again.
    Crash {
        instance: u16,
        /// How long it stays down; `None` is for good.
        back_after: Option<Nanos>,
        /// What it is then, if something else.
        becomes: Option<Box<InstanceSettings>>,
    },
    /// The router loses its state, and another one starts.
    CrashRouter {
        /// How long there is none.
        back_after: Nanos,
    },
    /// The connection breaks of the leg that an instance took in last.
    CutLeg {
        instance: u16,
        /// When the router notices, after the instance.
        noticed: Nanos,
    },
    /// The clock of an instance steps back, which it sees when it starts.
    ClockBack { instance: u16 },
    /// An instance registers as one that takes no more legs.
    Drain { instance: u16 },
    /// An instance is in the other role from its next start on.
    SwitchRole {
        instance: u16,
        /// It registers so, ends the legs that it has, and starts anew.
        registers: bool,
    },
    /// An instance that still has legs of its former role starts anew all the same.
    EndSwitch { instance: u16 },
    /// An instance makes no step, or goes on; its memory can be read and written all the time.
    Pause {
        instance: u16,
        /// Whether it stands still.
        paused: bool,
    },
    /// The engine preempts a request.
    Preempt { instance: u16 },
    /// The registration that an instance sent last reaches the router once more.
    StaleRegistration { instance: u16, after: Nanos },
    /// In one instant an instance learns that a read is done and its lease ends.
    Race {
        instance: u16,
        at: Nanos,
        /// It is told of the read before its timer.
        done_first: bool,
    },
    /// A client goes away.
    Abort {
        /// Which; `None` is the one that came last of those without an answer.
        client: Option<ClientId>,
        after: Nanos,
        /// Both engines are told at the same instant, not through the router.
        both: bool,
    },
}

/// What an operation, frame, leg or other event is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultSubject {
    /// The instance where it happens, or that sends.
    pub from: u16,
    pub to: Option<u16>,
    /// The TP rank, of operations.
    pub rank: u16,
    /// Of reads: when the lease of the source ends, as its reader counts it.
    pub lease: Option<Nanos>,
    /// The kind of frame.
    pub message: Option<MessageName>,
    /// The client on whose behalf it happens.
    pub client: Option<ClientId>,
    /// Counts the operations of the rank, the frames or the steps of `from`; 0 if nobody counts.
    pub nth: u64,
}

impl FaultSubject {
    /// An event at an instance without a peer.
    pub fn at(from: u16) -> FaultSubject {
        FaultSubject { from, ..FaultSubject::default() }
    }

    /// An event between two instances.
    pub fn between(from: u16, to: u16) -> FaultSubject {
        FaultSubject { from, to: Some(to), ..FaultSubject::default() }
    }
}

/// A hit of a fault with `chance`: the event at which one with `on` would hit the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChanceHit {
    /// Names the decisions of the fault.
    pub key: u64,
    pub event: TriggerEvent,
    /// The instance of the event; [`ROUTER`] is the router.
    pub from: u16,
    /// The how many-th of these events there, from 1.
    pub nth: u32,
    /// Values drawn for this hit.
    pub lasts: Option<Nanos>,
    pub delay: Option<Nanos>,
}

/// What becomes of a leg on its way to an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LegDecision {
    /// It never arrives; the router finds its connection cut.
    pub lost: bool,
    /// It arrives again this long after.
    pub twice: Option<Nanos>,
    /// It takes this much longer.
    pub delay: Nanos,
}

/// A fault that hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultHit {
    pub kind: FaultKind,
    /// The instance that it happens to, or where the frame or operation comes from.
    pub from: Option<u16>,
    /// The peer, if it concerns one pair only.
    pub to: Option<u16>,
}

/// How far the newest transfer of an instance is; for the table of fault kinds and phases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CoveragePhase {
    /// No transfer yet, or the last one ended.
    #[default]
    Idle,
    Announced,
    Granted,
    /// Bytes move.
    Moving,
    /// All bytes are reported.
    Delivered,
}

impl CoveragePhase {
    pub const ALL: [CoveragePhase; 5] = [
        CoveragePhase::Idle,
        CoveragePhase::Announced,
        CoveragePhase::Granted,
        CoveragePhase::Moving,
        CoveragePhase::Delivered,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            CoveragePhase::Idle => "no transfer",
            CoveragePhase::Announced => "announced",
            CoveragePhase::Granted => "granted",
            CoveragePhase::Moving => "moving",
            CoveragePhase::Delivered => "delivered",
        }
    }
}
