//! What planes, the data network and the world tell each other.

use crate::keyed_rng::InclusiveRange;
use crate::memory::{MemoryFidelity, OpSlice, RankStore};
use crate::queue::StepContext;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Address, Caps, DataEvent, DigestBatch, Direction, FabricError, Landed, Memory, OpId, PeerId,
    QuiesceTicket, RegionDesc, RegionId, SessionId,
};

/// A data plane in one incarnation; never reused, a restarted process gets a new one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DataPlaneIx(pub u32);

/// A network port with as much bandwidth out as in; planes may share one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NicIx(pub u32);

/// A region in the plane where it was registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SimRegionDesc {
    pub(crate) plane: DataPlaneIx,
    /// Counts the registrations of the plane, so that an old descriptor never fits a new region.
    pub(crate) serial: u32,
    pub(crate) len: u64,
}

const ADDRESS: &[u8; 4] = b"sim:";
const REGION: &[u8; 4] = b"reg:";

impl DataPlaneIx {
    /// The address of its backend with this number.
    pub(crate) fn address(self, generation: u32) -> Address {
        Address([&ADDRESS[..], &self.0.to_le_bytes(), &generation.to_le_bytes()].concat().into())
    }

    /// The plane that an address names, if it is one of this kind.
    pub fn of(address: &Address) -> Option<DataPlaneIx> {
        let (number, generation) = address.0.strip_prefix(&ADDRESS[..])?.split_first_chunk()?;
        (generation.len() == 4).then_some(DataPlaneIx(u32::from_le_bytes(*number)))
    }
}

impl SimRegionDesc {
    pub(crate) fn encode(self) -> RegionDesc {
        let (plane, serial) = (self.plane.0.to_le_bytes(), self.serial.to_le_bytes());
        RegionDesc([&REGION[..], &plane, &serial, &self.len.to_le_bytes()].concat().into())
    }

    pub(crate) fn decode(desc: &RegionDesc) -> Option<SimRegionDesc> {
        let (plane, rest) = desc.0.strip_prefix(&REGION[..])?.split_first_chunk()?;
        let (serial, len) = rest.split_first_chunk()?;
        Some(SimRegionDesc {
            plane: DataPlaneIx(u32::from_le_bytes(*plane)),
            serial: u32::from_le_bytes(*serial),
            len: u64::from_le_bytes(len.try_into().ok()?),
        })
    }
}

/// A call that a plane took.
#[derive(Clone, Debug)]
pub(crate) enum DmaCall {
    Register { region: RegionId, serial: u32, memory: Memory },
    Deregister { region: RegionId },
    Connect { peer: PeerId, plane: DataPlaneIx, fence_key: u64 },
    Disconnect { peer: PeerId },
    Open { session: SessionId, local: RegionId, peer: PeerId, remote: SimRegionDesc },
    Close { session: SessionId },
    Submit { op: OpId, session: SessionId, direction: Direction, slices: (u32, u32) },
    Digest { batch: DigestBatch, memory: Memory },
    Quiesce { session: SessionId, ticket: QuiesceTicket },
    Fence { peer: PeerId },
}

/// Calls that a plane took, on the way to the data network. Reuse it: it keeps its memory.
#[derive(Clone, Debug, Default)]
pub struct DmaCalls {
    pub(crate) list: Vec<DmaCall>,
    pub(crate) slices: Vec<OpSlice>,
}

impl DmaCalls {
    /// True if there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Forgets the calls, keeps the memory.
    pub fn clear(&mut self) {
        self.list.clear();
        self.slices.clear();
    }
}

/// What the data network tells a plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DmaMessage {
    /// To be polled by the owner.
    Event(DataEvent),
    /// The session takes no more operations.
    SessionDead(SessionId),
    /// Operations in flight from now on at most, see [`super::Dma::set_queue_full`].
    Credits(u32),
}

/// An operation that was submitted, as shown to [`DmaHooks`].
#[derive(Clone, Copy, Debug)]
pub struct OpInfo<'a> {
    pub plane: DataPlaneIx,
    pub peer: DataPlaneIx,
    /// Its id on the initiator.
    pub op: OpId,
    /// Its session on the initiator.
    pub session: SessionId,
    /// The fence key under which its session was opened.
    pub fence_key: u64,
    pub direction: Direction,
    /// Counts the operations of the plane, from 0.
    pub nth: u64,
    pub slices: &'a [OpSlice],
    /// Segment and offset in the initiator's store that the slices are relative to; none if the
    /// region is gone.
    pub local_at: Option<(u32, u64)>,
    /// The same in the other store; none if the peer does not let the initiator in.
    pub remote_at: Option<(u32, u64)>,
}

/// What the world decides about calls of planes.
pub trait DmaHooks {
    /// How an operation ends.
    fn decide_op(&mut self, now: Nanos, op: &OpInfo<'_>) -> OpDecision {
        let _unused = (now, op);
        OpDecision::default()
    }

    /// Why memory cannot be registered.
    fn register(&mut self, now: Nanos, plane: DataPlaneIx) -> Option<FabricError> {
        let _unused = (now, plane);
        None
    }
}

/// How an operation ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpDecision {
    /// Extra time before the first byte.
    pub delay: Nanos,
    /// What becomes of its bytes.
    pub bytes: BytesDecision,
    /// What becomes of its completion.
    pub ack: CompletionDecision,
    /// Extra time before the completion is reported, in which later ones overtake it.
    pub ack_delay: Nanos,
    /// The completion is not reported before this time.
    pub not_before: Nanos,
    /// The session dies when this operation ends: its others fail, submits are `Gone`.
    pub kill_session: bool,
}

/// What becomes of the bytes of an operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum BytesDecision {
    #[default]
    Whole,
    /// It fails with this cause after none, some, or all of its slices.
    Fails {
        cause: FabricError,
        /// How much arrives before, and what is told of it.
        landed: Landed,
        /// With [`Landed::Unknown`]: the rest lands this long after the failure, unless the session
        /// is quiet by then. None: never.
        late: Option<Nanos>,
    },
    /// It completes well before some of its slices land, which do this much later; for planes with
    /// [`kvferry_engine::fabric::Placement::OnQuiet`].
    Overtaken { by: Nanos },
    /// None arrive, and it completes all the same: no fabric may do that.
    Missing,
}

/// What becomes of a completion, the best first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum CompletionDecision {
    /// Reported after the latency of the way back.
    #[default]
    Given,
    /// Lost: reported as failed with landed unknown after [`DmaConfig::ack_timeout`].
    Lost,
    /// Not reported, and no quiesce of the session answered, before the session is closed or dead.
    Never,
}

/// Settings of the data network; spans in nanoseconds.
#[derive(Clone, Debug)]
pub struct DmaConfig {
    /// Seed of all draws.
    pub seed: u64,
    /// How exactly memory is simulated; the same for all stores.
    pub fidelity: MemoryFidelity,
    /// One way between nodes.
    pub latency: InclusiveRange,
    /// One way within a node.
    pub latency_local: InclusiveRange,
    /// Until a region is registered.
    pub register: InclusiveRange,
    /// Until a session is open.
    pub open: InclusiveRange,
    /// Between a quiesce and the end of what may land late.
    pub barrier: InclusiveRange,
    /// Between a fence (which works at once) and its answer.
    pub fence: InclusiveRange,
    /// In which the operations of a closed or dead session fail.
    pub teardown: Nanos,
    /// After which an unacknowledged operation fails.
    pub ack_timeout: Nanos,
    /// A failed remote access kills the session, as with reliable connected queue pairs.
    pub failure_kills: bool,
}

impl Default for DmaConfig {
    fn default() -> Self {
        DmaConfig {
            seed: 0,
            fidelity: MemoryFidelity::Bytes,
            latency: InclusiveRange::new(2_000, 5_000),
            latency_local: InclusiveRange::new(800, 1_500),
            register: InclusiveRange::new(10_000, 100_000),
            open: InclusiveRange::new(100_000, 3_000_000),
            barrier: InclusiveRange::new(5_000, 50_000),
            fence: InclusiveRange::new(10_000, 1_000_000),
            teardown: Nanos::from_us(200),
            ack_timeout: Nanos::from_ms(500),
            failure_kills: true,
        }
    }
}

/// A plane to be made.
#[derive(Debug)]
pub struct PlaneSpec {
    /// The node it is on.
    pub node: u32,
    /// Its port to other nodes.
    pub nic: NicIx,
    /// Its port to planes of the same node.
    pub nic_local: NicIx,
    /// What it can do.
    pub caps: Caps,
    pub store: RankStore,
}

/// An operation in its slot. Others use the slot later, and events of this one are stale then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OpSlot {
    pub(super) key: u32,
    pub(super) generation: u32,
}

/// An entry of the event queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaEvent {
    /// An operation starts to move.
    Start(OpSlot),
    Land(OpSlot),
    Report(OpSlot),
    /// A stalled operation gives up.
    Timeout(OpSlot),
    /// A port has served an operation.
    Serve {
        server: u32,
        generation: u32,
    },
    /// News reach a plane.
    Deliver {
        slot: u32,
    },
    /// A session can be used, or not.
    Opened {
        session: u32,
    },
    /// Nothing lands late any more from before a ticket.
    Barrier {
        session: u32,
        ticket: QuiesceTicket,
    },
    /// A closed session is quiet.
    Closed {
        session: u32,
    },
    /// Nothing comes from a crashed plane any more.
    Gone {
        plane: DataPlaneIx,
    },
}

/// With what the data network does something.
pub type DmaContext<'a> = StepContext<'a, DmaEvent, DmaOutput>;

/// What a step did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DmaOutput {
    /// To be handed to [`super::SimDataPlane::deliver`].
    Deliver { plane: DataPlaneIx, message: DmaMessage },
    /// Bytes changed.
    Landed(DmaLanding),
    /// An operation was reported as complete; the event itself is delivered apart.
    Completed {
        plane: DataPlaneIx,
        op: OpId,
        /// How it was reported.
        outcome: kvferry_engine::fabric::Completion,
    },
    /// From here on nothing of `peer` lands under this fence key in the memory of `plane`.
    Fenced {
        plane: DataPlaneIx,
        /// Who is kept out.
        peer: DataPlaneIx,
        /// The fence key that is void.
        fence_key: u64,
    },
    /// From here on nothing that the plane submitted lands anywhere, and nothing in its memory that
    /// was submitted before.
    Void {
        /// Whose backend is gone.
        plane: DataPlaneIx,
    },
}

/// Slices of an operation that landed: one, or several with cells and when a session is closed.
/// [`super::Dma::slices`] has their ranges, until the next step or call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaLanding {
    /// Who submitted the operation.
    pub plane: DataPlaneIx,
    pub op: OpId,
    /// Which way it moves bytes.
    pub direction: Direction,
    /// Whose memory was read.
    pub source: DataPlaneIx,
    /// Segment and offset in the source's store that the slices are relative to.
    pub source_at: (u32, u64),
    pub target: DataPlaneIx,
    /// Segment and offset in the target's store that the slices are relative to.
    pub target_at: (u32, u64),
    /// True if it was reported as complete or failed before.
    pub late: bool,
    pub(crate) slot: u32,
    pub(crate) first: u32,
    pub(crate) count: u32,
}
