//! What the invariants see: the world tells it after each event, borrowed and without allocation.
//!
//! Instances are named by their index in [`kvferry_scenarios::run::Run::instances`], blocks by
//! group and id. Everything is told once, when it happens, in the order in which it happens.

pub use crate::memory::BlockRef;
use crate::memory::ContentMismatch;
use kvferry_engine::core::dialect::native::Frame;
use kvferry_engine::core::ids::{ClientId, LegId, RequestId};
use kvferry_engine::core::machine::Gauges;
use kvferry_engine::core::message::{
    DecodeAnswer, DecodeHook, PrefillAnswer, PrefillHook, TransferJob, TransferReport,
};
use kvferry_engine::core::payload::PayloadFailure;
use kvferry_engine::core::router::{ClientAnswer, LegBody, LegEvent, PrefixEstimate};
use kvferry_engine::fabric::{
    Completion, Direction, OpId, Placement, QuiesceTicket, Refused, SessionId,
};
use kvferry_scenarios::engine::PoolGauges;
use kvferry_scenarios::lists::FaultKind;
use kvferry_scenarios::run::InstanceSettings;
use std::fmt;

/// An instance in one of its incarnations, or the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SimProcessId {
    /// Index into the instances of the run.
    pub instance: u16,
    /// Counts its starts, from 0.
    pub incarnation: u32,
}

impl SimProcessId {
    pub const ROUTER: SimProcessId = SimProcessId { instance: u16::MAX, incarnation: 0 };
}

impl fmt::Display for SimProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            SimProcessId::ROUTER => f.write_str("router"),
            SimProcessId { instance, incarnation } => {
                write!(f, "instance {instance} incarnation {incarnation}")
            }
        }
    }
}

/// A TP rank: its memory, data plane and transfer actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SimRankId {
    pub who: SimProcessId,
    pub rank: u16,
}

impl fmt::Display for SimRankId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rank {}", self.who, self.rank)
    }
}

/// Part of the memory of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    /// Segment of the rank; `u32::MAX` for none that is known.
    pub segment: u32,
    /// Offset of the first byte in it.
    pub from: u64,
    /// Offset after the last byte.
    pub to: u64,
}

/// An operation that a data plane accepted.
#[derive(Clone, Copy, Debug)]
pub struct Submission<'a> {
    pub from: SimRankId,
    pub peer: SimRankId,
    /// Its id on the initiator.
    pub op: OpId,
    /// Its session on the initiator.
    pub session: SessionId,
    /// The pass under which its session was opened.
    pub fence_key: u64,
    pub direction: Direction,
    /// When its bytes count as placed.
    pub placement: Placement,
    /// Operations that the plane may have in flight, this one included.
    pub credits: u32,
    /// What of the initiator's memory it lies in.
    pub reach: MemoryRange,
    /// Offset of its first slice in the region of the other side.
    pub remote_at: u64,
    /// Bytes that it moves.
    pub bytes: u64,
    /// Blocks of the initiator that it touches; neighbours may repeat.
    pub local: &'a [BlockRef],
    /// Blocks of the other side that it touches; neighbours may repeat.
    pub remote: &'a [BlockRef],
}

/// Bytes that arrived: one slice, or all slices of an operation.
#[derive(Clone, Copy, Debug)]
pub struct ObservedLanding<'a> {
    /// Who submitted the operation.
    pub from: SimRankId,
    pub op: OpId,
    /// Whose memory was read.
    pub source: SimRankId,
    /// Blocks that were read; neighbours may repeat.
    pub read: &'a [BlockRef],
    pub target: SimRankId,
    /// Blocks that changed; neighbours may repeat.
    pub written: &'a [BlockRef],
}

/// Which machine of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InstanceMachine {
    /// Prefill or decode core, or the router.
    Core,
    /// Transfer actor of a rank.
    Transfer(u16),
    Engine,
    /// Payloads of a host, with its prefill core.
    Payload,
}

impl fmt::Display for InstanceMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InstanceMachine::Core => f.write_str("core"),
            InstanceMachine::Transfer(rank) => write!(f, "transfer actor {rank}"),
            InstanceMachine::Engine => f.write_str("engine"),
            InstanceMachine::Payload => f.write_str("payload core"),
        }
    }
}

/// How the producer of a stream ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProducerEnd {
    /// It said that there are no more chunks.
    Ended,
    /// It said that the rest does not come.
    GaveUp,
    CleanedUp,
    /// Its process was gone without a word.
    Left,
    /// There was no room for a chunk, which it said as if it gave up.
    NoRoom(PayloadFailure),
    /// Its host was gone or never answers.
    HostGone,
}

/// How a receiver of a stream ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceiverOutcome {
    /// It was told that the stream has ended.
    Finished,
    /// It was told that a chunk does not come.
    Missing(PayloadFailure),
    /// It went away, or was told to.
    Departed,
    /// Its host was gone or never answers.
    HostGone,
}

/// What happens to the payloads of stages. Streams count from 0 by the workload, those of the world's
/// own follow; receivers count within a stream.
#[derive(Clone, Copy, Debug)]
pub enum PayloadSight<'a> {
    /// A payload core says that somebody broke a rule, or a stage was told what it did not ask.
    Misuse { rule: &'a str },
    /// The producer of a stream begins.
    Begins { stream: u32 },
    /// The producer of a stream is done, with so many chunks put.
    Produced { stream: u32, put: u32, how: &'a ProducerEnd },
    /// A receiver asks for a chunk, and may name the host that has it.
    Asked { stream: u32, receiver: u16, chunk: u32, is_named: bool },
    /// A receiver begins or ends to read a chunk. `wrong`: in what it is not what was put.
    Got { stream: u32, receiver: u16, chunk: u32, wrong: Option<&'a str> },
    /// A receiver waits for what nobody puts, and was not told so in time.
    Overdue { stream: u32, receiver: u16, chunk: u32 },
    /// A receiver is done, the next chunk being this.
    Ended { stream: u32, receiver: u16, chunk: u32, outcome: &'a ReceiverOutcome },
}

/// One thing that happened.
#[derive(Clone, Copy, Debug)]
pub enum Observation<'a> {
    /// An instance started, its pools empty and its memory zero.
    Started {
        /// The instance in its new incarnation.
        who: SimProcessId,
        /// What it is in this incarnation.
        spec: &'a InstanceSettings,
    },
    /// An instance lost its state and its memory.
    Crashed {
        /// The instance in the incarnation that ended.
        who: SimProcessId,
    },
    /// A machine panicked or an assertion failed.
    Panicked { who: SimProcessId, text: &'a str },

    /// A client sent a request.
    Asked { client: ClientId },
    /// A request of the world's own, which shows whether the fast path is back.
    Probed {
        client: ClientId,
        /// The prefill and the decode that alone may serve it.
        pair: Option<(u16, u16)>,
    },
    /// A client went away without an answer.
    ClientGone { client: ClientId },
    /// A client got its answer.
    Answered {
        client: ClientId,
        /// How its request ended.
        answer: &'a ClientAnswer,
    },
    /// The router sent a leg; it may never arrive.
    Dispatched {
        leg: LegId,
        client: ClientId,
        /// Index of the instance that is to serve it.
        instance: u16,
        body: &'a LegBody,
        /// What the router expects of its prefix cache.
        expected: PrefixEstimate,
    },
    /// An engine took a leg in.
    LegTaken {
        who: SimProcessId,
        leg: LegId,
        /// The request that the engine made of it.
        request: &'a RequestId,
    },
    /// An engine said something about a leg.
    Leg { who: SimProcessId, leg: LegId, event: &'a LegEvent },
    /// The connection of a leg broke, or its caller closed it.
    LegClosed { leg: LegId },

    /// A prefill engine told its core.
    PrefillHook { who: SimProcessId, hook: &'a PrefillHook },
    /// A prefill core told its engine.
    PrefillAnswer { who: SimProcessId, answer: &'a PrefillAnswer },
    /// A decode engine told its core.
    DecodeHook { who: SimProcessId, hook: &'a DecodeHook },
    /// A decode core told its engine.
    DecodeAnswer { who: SimProcessId, answer: &'a DecodeAnswer },
    /// A core gave a job to all its transfer actors.
    Job { who: SimProcessId, job: &'a TransferJob },
    /// A transfer actor reported to its core.
    Report { from: SimRankId, report: &'a TransferReport },

    /// Blocks got a new owner, who may write them.
    Taken {
        who: SimProcessId,
        request: &'a RequestId,
        /// Block ids per group.
        blocks: &'a [Vec<u32>],
    },
    /// Blocks went back to the pool and may be handed out again.
    Freed {
        who: SimProcessId,
        request: &'a RequestId,
        /// Block ids per group.
        blocks: &'a [Vec<u32>],
    },
    /// A request begins to use KV that it did not compute, and one rank's memory was compared with
    /// what the KV must be.
    Used { at: SimRankId, request: &'a RequestId, tokens: u32, wrong: Option<&'a ContentMismatch> },
    /// The serving engine got an answer that it does not wait for.
    EngineFault { who: SimProcessId, text: &'a str },
    /// An engine finished a step.
    Stepped { who: SimProcessId },

    /// A data plane accepted an operation.
    Submitted(Submission<'a>),
    /// A data plane did not accept an operation.
    Refused { from: SimRankId, op: OpId, why: &'a Refused },
    /// Bytes arrived.
    Landed(ObservedLanding<'a>),
    /// An operation was reported to its transfer actor as complete.
    Completed { from: SimRankId, op: OpId, outcome: &'a Completion },
    /// A transfer actor asked for a barrier.
    Quiesced { from: SimRankId, session: SessionId, ticket: QuiesceTicket },
    /// A transfer actor was told that a session is quiet.
    Quiet {
        from: SimRankId,
        session: SessionId,
        /// The ticket of the question.
        ticket: QuiesceTicket,
    },
    /// Nothing of a peer lands under a fence key in the memory of a rank any more, and its actor was
    /// told so.
    Fenced {
        at: SimRankId,
        /// Who is kept out.
        peer: SimRankId,
        /// The pass that is void, of one connection.
        fence_key: u64,
    },
    /// The backend of a rank is gone: nothing of it lands anywhere any more, and nothing in its
    /// memory.
    Void { at: SimRankId },

    /// A control frame was sent (each retransmission counts) and may be lost.
    FrameSent {
        /// Sender.
        from: SimProcessId,
        /// Owner of the other end of the link.
        to: SimProcessId,
        frame: &'a Frame,
    },
    /// A control frame arrived.
    FrameArrived {
        /// Sender.
        from: SimProcessId,
        /// Receiver.
        to: SimProcessId,
        frame: &'a Frame,
    },
    /// A frame arrived that is damaged or was not written for this link, or whose link is gone.
    Stray {
        /// Receiver.
        to: SimProcessId,
        /// The frame, if it can be read.
        frame: Option<&'a Frame>,
    },
    /// An engine core or an actor dialled a peer.
    Dialled {
        from: SimProcessId,
        /// Index of the instance at the address; none for addresses where nobody is.
        to: Option<u16>,
    },

    /// State of a pool, told at audits and at rest.
    Pool {
        who: SimProcessId,
        /// KV cache group.
        group: u16,
        /// How its blocks are used.
        pool: PoolGauges,
    },
    /// State of a machine, told at audits and at rest.
    Gauges {
        who: SimProcessId,
        part: InstanceMachine,
        /// Sizes of its tables.
        gauges: Gauges,
        /// Their declared limits; `u32::MAX` for none.
        limits: Gauges,
    },

    /// A deadline of a machine was due, and it had nothing to do.
    Woken {
        who: SimProcessId,
        /// Which of its machines.
        part: InstanceMachine,
        /// What it heard in this incarnation, deadlines apart.
        heard: u64,
    },
    /// Stages put and get payloads at a host.
    Payload {
        /// Its prefill core.
        host: SimProcessId,
        sight: PayloadSight<'a>,
    },
    /// A fault hit something.
    Faulted {
        kind: FaultKind,
        /// The instance it happens to, or where the frame or operation comes from.
        from: Option<u16>,
        /// The peer, if it concerns one pair only.
        to: Option<u16>,
    },
    /// The liveness phase begins; everything that lasts now is permanent.
    Settled {
        /// Instances that were healed and stay connected.
        core: &'a [u16],
        /// Instances that never make a step again, though their memory is there.
        frozen: &'a [u16],
        /// Instances, or ordered pairs, with a fault for good.
        broken: &'a [(u16, Option<u16>)],
    },
    /// All transient faults are over; from now on only permanent ones are left.
    Healed,
}

macro_rules! kinds {
    ($($kind:ident)*) => {
        /// Kind of an [`Observation`], to look up who wants it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum ObservationKind {
            $($kind,)*
        }

        impl ObservationKind {
            pub const COUNT: usize = [$(ObservationKind::$kind),*].len();
        }

        impl Observation<'_> {
            #[inline]
            pub const fn kind(&self) -> ObservationKind {
                match self {
                    $(Observation::$kind { .. } => ObservationKind::$kind,)*
                }
            }
        }
    };
}

kinds! {
    Started Crashed Panicked Asked Probed ClientGone Answered Dispatched LegTaken Leg LegClosed
    PrefillHook PrefillAnswer DecodeHook DecodeAnswer Job Report Taken Freed Used EngineFault
    Stepped Submitted Refused Landed Completed Quiesced Quiet Fenced Void FrameSent FrameArrived
    Stray Dialled Pool Gauges Woken Payload Faulted Settled Healed
}
