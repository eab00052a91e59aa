//! What the invariants see: the world tells it after each event, borrowed and without allocation.
//!
//! Instances are named by their index in [`scenarios::run::Run::instances`], blocks by group and
//! id. Everything is told once, when it happens, in the order in which it happens.

use crate::memory::Wrong;
use engine::core::dialect::native::Frame;
use engine::core::ids::{ClientId, LegId, RequestId};
use engine::core::machine::Gauges;
use engine::core::message::{DecodeAnswer, DecodeHook, Job, PrefillAnswer, PrefillHook, Report};
use engine::core::router::{Answer, LegBody, LegEvent};
use engine::fabric::{Direction, OpId, Outcome, Placement, Refused, SessionId, Ticket};
use scenarios::engine::PoolGauges;
use scenarios::lists::FaultKind;
use scenarios::run::Instance;
use std::fmt;

/// An instance in one of its lives, or the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Who {
    /// Index into the instances of the run.
    pub instance: u16,
    /// Counts its starts, from 0.
    pub life: u32,
}

impl Who {
    /// The router.
    pub const ROUTER: Who = Who { instance: u16::MAX, life: 0 };
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Who::ROUTER => f.write_str("router"),
            Who { instance, life } => write!(f, "instance {instance} life {life}"),
        }
    }
}

/// A TP rank: its memory, data plane and transfer actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank {
    /// Whose.
    pub who: Who,
    /// Which one.
    pub rank: u16,
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rank {}", self.who, self.rank)
    }
}

/// A KV block of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockRef {
    /// KV cache group.
    pub group: u16,
    /// Block id.
    pub block: u32,
}

/// Part of the memory of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
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
    /// Who submitted it.
    pub from: Rank,
    /// The other side.
    pub peer: Rank,
    /// Its id on the initiator.
    pub op: OpId,
    /// Its session on the initiator.
    pub session: SessionId,
    /// The pass under which its session was opened.
    pub pass: u64,
    /// Which way.
    pub direction: Direction,
    /// When its bytes count as placed.
    pub placement: Placement,
    /// Operations that the plane may have in flight, this one included.
    pub credits: u32,
    /// What of the initiator's memory it lies in.
    pub reach: Reach,
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
pub struct Landing<'a> {
    /// Who submitted the operation.
    pub from: Rank,
    /// Its id there.
    pub op: OpId,
    /// Whose memory was read.
    pub source: Rank,
    /// Blocks that were read; neighbours may repeat.
    pub read: &'a [BlockRef],
    /// Whose memory changed.
    pub target: Rank,
    /// Blocks that changed; neighbours may repeat.
    pub written: &'a [BlockRef],
}

/// Which machine of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Prefill or decode core, or the router.
    Core,
    /// Transfer actor of a rank.
    Transfer(u16),
    /// The serving engine.
    Engine,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Part::Core => f.write_str("core"),
            Part::Transfer(rank) => write!(f, "transfer actor {rank}"),
            Part::Engine => f.write_str("engine"),
        }
    }
}

/// One thing that happened.
#[derive(Clone, Copy, Debug)]
pub enum Observation<'a> {
    /// An instance started, its pools empty and its memory zero.
    Started {
        /// The instance in its new life.
        who: Who,
        /// What it is in this life.
        spec: &'a Instance,
    },
    /// An instance lost its state and its memory.
    Crashed {
        /// The instance in the life that ended.
        who: Who,
    },
    /// A machine panicked or an assertion failed.
    Panicked {
        /// Where.
        who: Who,
        /// What it said.
        text: &'a str,
    },

    /// A client sent a request.
    Asked {
        /// Who.
        client: ClientId,
    },
    /// A request of the world's own, which shows whether the fast path is back.
    Probed {
        /// Who asks.
        client: ClientId,
    },
    /// A client went away without an answer.
    ClientGone {
        /// Who.
        client: ClientId,
    },
    /// A client got its answer.
    Answered {
        /// Who.
        client: ClientId,
        /// How its request ended.
        answer: &'a Answer,
    },
    /// The router sent a leg; it may never arrive.
    Dispatched {
        /// The leg.
        leg: LegId,
        /// On whose behalf.
        client: ClientId,
        /// Index of the instance that is to serve it.
        instance: u16,
        /// What is asked.
        body: &'a LegBody,
    },
    /// An engine took a leg in.
    LegTaken {
        /// Where.
        who: Who,
        /// The leg.
        leg: LegId,
        /// The request that the engine made of it.
        request: &'a RequestId,
    },
    /// An engine said something about a leg.
    Leg {
        /// Where.
        who: Who,
        /// The leg.
        leg: LegId,
        /// What.
        event: &'a LegEvent,
    },
    /// The connection of a leg broke, or its caller closed it.
    LegClosed {
        /// The leg.
        leg: LegId,
    },

    /// A prefill engine told its core.
    PrefillHook {
        /// Where.
        who: Who,
        /// What.
        hook: &'a PrefillHook,
    },
    /// A prefill core told its engine.
    PrefillAnswer {
        /// Where.
        who: Who,
        /// What.
        answer: &'a PrefillAnswer,
    },
    /// A decode engine told its core.
    DecodeHook {
        /// Where.
        who: Who,
        /// What.
        hook: &'a DecodeHook,
    },
    /// A decode core told its engine.
    DecodeAnswer {
        /// Where.
        who: Who,
        /// What.
        answer: &'a DecodeAnswer,
    },
    /// A core gave a job to all its transfer actors.
    Job {
        /// Where.
        who: Who,
        /// What.
        job: &'a Job,
    },
    /// A transfer actor reported to its core.
    Report {
        /// Which actor.
        from: Rank,
        /// What.
        report: &'a Report,
    },

    /// Blocks got a new owner, who may write them.
    Taken {
        /// Where.
        who: Who,
        /// The owner.
        request: &'a RequestId,
        /// Block ids per group.
        blocks: &'a [Vec<u32>],
    },
    /// Blocks went back to the pool and may be handed out again.
    Freed {
        /// Where.
        who: Who,
        /// The last owner.
        request: &'a RequestId,
        /// Block ids per group.
        blocks: &'a [Vec<u32>],
    },
    /// A request begins to use KV that it did not compute, and one rank's memory was compared with
    /// what the KV must be.
    Used {
        /// Which memory.
        at: Rank,
        /// The request.
        request: &'a RequestId,
        /// Tokens compared.
        tokens: u32,
        /// The first difference.
        wrong: Option<&'a Wrong>,
    },
    /// The serving engine got an answer that it does not wait for.
    EngineFault {
        /// Where.
        who: Who,
        /// What is wrong.
        text: &'a str,
    },
    /// An engine finished a step.
    Stepped {
        /// Where.
        who: Who,
    },

    /// A data plane accepted an operation.
    Submitted(Submission<'a>),
    /// A data plane did not accept an operation.
    Refused {
        /// Who submitted it.
        from: Rank,
        /// Its id.
        op: OpId,
        /// Why.
        why: &'a Refused,
    },
    /// Bytes arrived.
    Landed(Landing<'a>),
    /// An operation was reported to its transfer actor as complete.
    Completed {
        /// Who submitted it.
        from: Rank,
        /// Its id.
        op: OpId,
        /// How it ended.
        outcome: &'a Outcome,
    },
    /// A transfer actor asked for a barrier.
    Quiesced {
        /// Who.
        from: Rank,
        /// The session.
        session: SessionId,
        /// Names the answer.
        ticket: Ticket,
    },
    /// A transfer actor was told that a session is quiet.
    Quiet {
        /// Who.
        from: Rank,
        /// The session.
        session: SessionId,
        /// The ticket of the question.
        ticket: Ticket,
    },
    /// Nothing of a peer lands under a pass in the memory of a rank any more, and its actor was told
    /// so.
    Fenced {
        /// Whose memory.
        at: Rank,
        /// Who is kept out.
        peer: Rank,
        /// The pass that is void, of one conversation.
        pass: u64,
    },
    /// The backend of a rank is gone: nothing of it lands anywhere any more, and nothing in its
    /// memory.
    Void {
        /// Whose backend.
        at: Rank,
    },

    /// A control frame was sent (each retransmission counts) and may be lost.
    FrameSent {
        /// Sender.
        from: Who,
        /// Owner of the other end of the link.
        to: Who,
        /// The frame.
        frame: &'a Frame,
    },
    /// A control frame arrived.
    FrameArrived {
        /// Sender.
        from: Who,
        /// Receiver.
        to: Who,
        /// The frame.
        frame: &'a Frame,
    },
    /// A frame arrived that is damaged or was not written for this link, or whose link is gone.
    Stray {
        /// Receiver.
        to: Who,
        /// The frame, if it can be read.
        frame: Option<&'a Frame>,
    },
    /// An engine core or an actor dialled a peer.
    Dialled {
        /// Who.
        from: Who,
        /// Index of the instance at the address; none for addresses where nobody is.
        to: Option<u16>,
    },

    /// State of a pool, told at audits and at rest.
    Pool {
        /// Where.
        who: Who,
        /// KV cache group.
        group: u16,
        /// How its blocks are used.
        pool: PoolGauges,
    },
    /// State of a machine, told at audits and at rest.
    Gauges {
        /// Where.
        who: Who,
        /// Which machine.
        part: Part,
        /// Sizes of its tables.
        gauges: Gauges,
        /// Their declared limits; `u32::MAX` for none.
        limits: Gauges,
    },

    /// A deadline of a machine was due, and it had nothing to do.
    Woken {
        /// The instance.
        who: Who,
        /// Which of its machines.
        part: Part,
        /// What it heard in this life, deadlines apart.
        heard: u64,
    },
    /// A fault hit something.
    Faulted {
        /// What it does.
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

/// Kind of an [`Observation`], to look up who wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)]
pub enum Kind {
    Started,
    Crashed,
    Panicked,
    Asked,
    Probed,
    ClientGone,
    Answered,
    Dispatched,
    LegTaken,
    Leg,
    LegClosed,
    PrefillHook,
    PrefillAnswer,
    DecodeHook,
    DecodeAnswer,
    Job,
    Report,
    Taken,
    Freed,
    Used,
    EngineFault,
    Stepped,
    Submitted,
    Refused,
    Landed,
    Completed,
    Quiesced,
    Quiet,
    Fenced,
    Void,
    FrameSent,
    FrameArrived,
    Stray,
    Dialled,
    Pool,
    Gauges,
    Woken,
    Faulted,
    Settled,
    Healed,
}

impl Kind {
    /// Number of kinds.
    pub const COUNT: usize = Kind::Healed as usize + 1;
}

impl Observation<'_> {
    /// Its kind.
    #[inline]
    pub const fn kind(&self) -> Kind {
        match self {
            Observation::Started { .. } => Kind::Started,
            Observation::Crashed { .. } => Kind::Crashed,
            Observation::Panicked { .. } => Kind::Panicked,
            Observation::Asked { .. } => Kind::Asked,
            Observation::Probed { .. } => Kind::Probed,
            Observation::ClientGone { .. } => Kind::ClientGone,
            Observation::Answered { .. } => Kind::Answered,
            Observation::Dispatched { .. } => Kind::Dispatched,
            Observation::LegTaken { .. } => Kind::LegTaken,
            Observation::Leg { .. } => Kind::Leg,
            Observation::LegClosed { .. } => Kind::LegClosed,
            Observation::PrefillHook { .. } => Kind::PrefillHook,
            Observation::PrefillAnswer { .. } => Kind::PrefillAnswer,
            Observation::DecodeHook { .. } => Kind::DecodeHook,
            Observation::DecodeAnswer { .. } => Kind::DecodeAnswer,
            Observation::Job { .. } => Kind::Job,
            Observation::Report { .. } => Kind::Report,
            Observation::Taken { .. } => Kind::Taken,
            Observation::Freed { .. } => Kind::Freed,
            Observation::Used { .. } => Kind::Used,
            Observation::EngineFault { .. } => Kind::EngineFault,
            Observation::Stepped { .. } => Kind::Stepped,
            Observation::Submitted(..) => Kind::Submitted,
            Observation::Refused { .. } => Kind::Refused,
            Observation::Landed(..) => Kind::Landed,
            Observation::Completed { .. } => Kind::Completed,
            Observation::Quiesced { .. } => Kind::Quiesced,
            Observation::Quiet { .. } => Kind::Quiet,
            Observation::Fenced { .. } => Kind::Fenced,
            Observation::Void { .. } => Kind::Void,
            Observation::FrameSent { .. } => Kind::FrameSent,
            Observation::FrameArrived { .. } => Kind::FrameArrived,
            Observation::Stray { .. } => Kind::Stray,
            Observation::Dialled { .. } => Kind::Dialled,
            Observation::Pool { .. } => Kind::Pool,
            Observation::Gauges { .. } => Kind::Gauges,
            Observation::Woken { .. } => Kind::Woken,
            Observation::Faulted { .. } => Kind::Faulted,
            Observation::Settled { .. } => Kind::Settled,
            Observation::Healed => Kind::Healed,
        }
    }
}
