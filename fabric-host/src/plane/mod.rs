//! The data plane, from the side of its owner.

mod build;
mod calls;
mod close;
mod news;
mod submit;

pub use build::HostError;

use crate::copy::Slice;
use crate::descriptor::{Claim, Location};
use crate::hub::{Counters, Hub, Lane};
use crate::link::{Heard, Kind, Listener, OutLink};
use crate::memory::Region;
use crate::ring::Consumer;
use crate::sync::AtomicU64;
use crate::{HostConfig, Path};
use engine::fabric::{DataEvent, OpId, PeerId, RegionId, SessionId, Ticket};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// A region and the operations in flight that use it.
#[derive(Debug)]
struct Held {
    region: Arc<Region>,
    operations: u32,
}

/// A peer that the owner named.
#[derive(Debug)]
struct Peer {
    location: Arc<Location>,
    pass: u64,
    links: BTreeMap<Kind, Way>,
}

/// The link of a peer.
#[derive(Debug)]
enum Way {
    Dialling,
    Up(Arc<OutLink>),
}

#[derive(Debug)]
enum Phase {
    /// For a link of this kind.
    Waiting(Kind),
    /// For the peer's answer.
    Opening(Arc<OutLink>),
    Open(Arc<OutLink>, Lane),
    /// Nothing can be submitted any more.
    Dead,
    /// Closed by its owner, not quiet yet.
    Closing,
}

/// What has to happen before a session is quiet, beside the end of its operations.
#[derive(Clone, Copy, Debug, Default)]
struct Awaits {
    /// Our thread leaves its reads.
    local: bool,
    /// The peer says that it writes no more.
    remote: bool,
    /// The peer's end, or a word of it, after its connection broke.
    proof: bool,
}

#[derive(Debug)]
struct Session {
    local: RegionId,
    region: Arc<Region>,
    peer: PeerId,
    location: Arc<Location>,
    pass: u64,
    claim: Claim,
    phase: Phase,
    /// Until when it has to be open.
    deadline: Instant,
    /// The link that carries it, or did.
    link: Option<u64>,
    /// Operations in flight in the order of their submission.
    operations: BTreeMap<u64, OpId>,
    tickets: VecDeque<(Ticket, u64)>,
    awaits: Awaits,
}

#[derive(Debug)]
struct Operation {
    session: SessionId,
    order: u64,
    region: RegionId,
    write: bool,
    path: Path,
    bytes: u64,
}

/// How the bytes of a session go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionPaths {
    /// Writes, which the peer copies.
    pub write: Path,
    /// Reads, which this plane copies.
    pub read: Path,
}

/// A data plane for host memory: memory files, memory of this process and, by cross-memory attach,
/// memory of other processes of this host.
///
/// Its address is the descriptor of a MoRI engine, its region descriptors are those of MoRI's
/// memory. While operations are under way its poll says [`Ready`](engine::fabric::Wake::Ready) for
/// a while; who yields to other threads before it comes again gets answers soonest where cores are
/// few. Dropping it waits for its threads, so that nothing lands any more.
pub struct HostPlane {
    hub: Arc<Hub>,
    listener: Option<Listener>,
    threads: Vec<JoinHandle<()>>,
    outcomes: Vec<Consumer<Arc<[AtomicU64]>>>,
    regions: BTreeMap<RegionId, Held>,
    peers: BTreeMap<PeerId, Peer>,
    dials: BTreeMap<u64, (PeerId, Kind)>,
    proofs: Vec<close::Proof>,
    /// Links that are up, also those of peers that were forgotten.
    links: BTreeMap<u64, Arc<OutLink>>,
    sessions: BTreeMap<SessionId, Session>,
    operations: BTreeMap<OpId, Operation>,
    /// Operations so far.
    order: u64,
    /// Short operations in flight.
    short: u32,
    events: VecDeque<DataEvent>,
    slices: Vec<Slice>,
    desk: submit::Desk,
    record: Vec<u64>,
    heard: Vec<Heard>,
    /// Since when there is nothing new, if we look at the rings of answers ourselves.
    attending: Option<Instant>,
}

impl std::fmt::Debug for HostPlane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostPlane").field("at", &self.hub.location).finish_non_exhaustive()
    }
}

/// Reads the counters of a plane, also after its end.
#[derive(Clone, Debug)]
pub struct Meter(Arc<Hub>);

impl Meter {
    /// What the plane did so far.
    pub fn read(&self) -> Counters {
        self.0.counts.get()
    }
}

impl HostPlane {
    /// The settings that it was made with.
    pub fn config(&self) -> &HostConfig {
        &self.hub.config
    }

    /// The TCP port that it listens at.
    pub fn port(&self) -> u16 {
        self.hub.location.port
    }

    /// What it did so far.
    pub fn counters(&self) -> Counters {
        self.hub.counts.get()
    }

    /// The same for who has no access to the plane itself, such as an exporter of metrics.
    pub fn meter(&self) -> Meter {
        Meter(self.hub.clone())
    }

    /// How the bytes of a session go; none unless it is open.
    pub fn paths(&self, session: SessionId) -> Option<SessionPaths> {
        match &self.sessions.get(&session)?.phase {
            Phase::Open(_, lane) => Some(SessionPaths { write: lane.write, read: lane.read }),
            _ => None,
        }
    }

    /// The open sessions of a peer and how their bytes go.
    pub fn paths_of(&self, peer: PeerId) -> Vec<(SessionId, SessionPaths)> {
        let its = self.sessions.iter().filter(|(_, session)| session.peer == peer);
        its.filter_map(|(id, _)| Some((*id, self.paths(*id)?))).collect()
    }
}
