//! The data plane, from the side of its owner.

mod build;
mod calls;
mod close;
mod submit;
mod worker_events;

pub use build::HostError;

use crate::copy::CopySlice;
use crate::descriptor::{HostPlaneAddress, HostRegionDescriptor};
use crate::link::{HostAcceptor, HostLinkEvent, HostLinkKind, HostOutboundLink};
use crate::memory::HostRegion;
use crate::ring::Consumer;
use crate::shared::{HostCounters, HostPlaneShared, NegotiatedPaths};
use crate::sync::AtomicU64;
use crate::{DataPath, HostConfig};
use kvferry_engine::fabric::{DataEvent, OpId, PeerId, QuiesceTicket, RegionId, SessionId};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// A region and the operations in flight that use it.
#[derive(Debug)]
struct HostRegionEntry {
    region: Arc<HostRegion>,
    operations: u32,
}

/// A peer that the owner named.
#[derive(Debug)]
struct HostPeer {
    location: Arc<HostPlaneAddress>,
    fence_key: u64,
    links: BTreeMap<HostLinkKind, HostPeerLink>,
}

/// The link of a peer.
#[derive(Debug)]
enum HostPeerLink {
    Dialling,
    Up(Arc<HostOutboundLink>),
}

#[derive(Debug)]
enum HostSessionPhase {
    /// For a link of this kind.
    Waiting(HostLinkKind),
    /// For the peer's answer.
    Opening(Arc<HostOutboundLink>),
    Open(Arc<HostOutboundLink>, NegotiatedPaths),
    /// Nothing can be submitted any more.
    Dead,
    /// Closed by its owner, not quiet yet.
    Closing,
}

/// What has to happen before a session is quiet, beside the end of its operations.
#[derive(Clone, Copy, Debug, Default)]
struct HostQuiescePending {
    /// Our thread leaves its reads.
    local: bool,
    /// The peer says that it writes no more.
    remote: bool,
    /// The peer's end, or a word of it, after its connection broke.
    proof: bool,
}

#[derive(Debug)]
struct HostSession {
    local: RegionId,
    region: Arc<HostRegion>,
    peer: PeerId,
    location: Arc<HostPlaneAddress>,
    fence_key: u64,
    claim: HostRegionDescriptor,
    phase: HostSessionPhase,
    /// Until when it has to be open.
    deadline: Instant,
    /// The link that carries it, or did.
    link: Option<u64>,
    /// Operations in flight in the order of their submission.
    operations: BTreeMap<u64, OpId>,
    tickets: VecDeque<(QuiesceTicket, u64)>,
    awaits: HostQuiescePending,
}

#[derive(Debug)]
struct HostOperation {
    session: SessionId,
    order: u64,
    region: RegionId,
    write: bool,
    path: DataPath,
    bytes: u64,
}

/// How the bytes of a session go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionPaths {
    /// Writes, which the peer copies.
    pub write: DataPath,
    /// Reads, which this plane copies.
    pub read: DataPath,
}

/// A data plane for host memory: memory files, memory of this process and, by cross-memory attach,
/// memory of other processes of this host.
///
/// Its address is the descriptor of a MoRI engine, its region descriptors are those of MoRI's
/// memory. While operations are under way its poll says
/// [`Ready`](kvferry_engine::fabric::NextPoll::Ready) for a while; who yields to other threads
/// before it comes again gets answers soonest where cores are few. Dropping it waits for its
/// threads, so that nothing lands any more.
pub struct HostPlane {
    hub: Arc<HostPlaneShared>,
    listener: Option<HostAcceptor>,
    threads: Vec<JoinHandle<()>>,
    outcomes: Vec<Consumer<Arc<[AtomicU64]>>>,
    regions: BTreeMap<RegionId, HostRegionEntry>,
    peers: BTreeMap<PeerId, HostPeer>,
    dials: BTreeMap<u64, (PeerId, HostLinkKind)>,
    quiesce_probes: Vec<close::HostQuiesceProbe>,
    /// Links that are up, also those of peers that were forgotten.
    links: BTreeMap<u64, Arc<HostOutboundLink>>,
    sessions: BTreeMap<SessionId, HostSession>,
    operations: BTreeMap<OpId, HostOperation>,
    /// Operations so far.
    order: u64,
    /// Short operations in flight.
    short: u32,
    events: VecDeque<DataEvent>,
    slices: Vec<CopySlice>,
    inline_copier: submit::InlineCopier,
    record: Vec<u64>,
    heard: Vec<HostLinkEvent>,
    /// Since when there is nothing new, if we look at the rings of answers ourselves.
    busy_polling_since: Option<Instant>,
}

impl std::fmt::Debug for HostPlane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostPlane").field("at", &self.hub.location).finish_non_exhaustive()
    }
}

/// Reads the counters of a plane, also after its end.
#[derive(Clone, Debug)]
pub struct HostCounterReader(Arc<HostPlaneShared>);

impl HostCounterReader {
    /// What the plane did so far.
    pub fn read(&self) -> HostCounters {
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
    pub fn counters(&self) -> HostCounters {
        self.hub.counts.get()
    }

    /// The same for who has no access to the plane itself, such as an exporter of metrics.
    pub fn meter(&self) -> HostCounterReader {
        HostCounterReader(self.hub.clone())
    }

    /// How the bytes of a session go; none unless it is open.
    pub fn paths(&self, session: SessionId) -> Option<SessionPaths> {
        match &self.sessions.get(&session)?.phase {
            HostSessionPhase::Open(_, lane) => {
                Some(SessionPaths { write: lane.write, read: lane.read })
            }
            _ => None,
        }
    }

    /// The open sessions of a peer and how their bytes go.
    pub fn paths_of(&self, peer: PeerId) -> Vec<(SessionId, SessionPaths)> {
        let its = self.sessions.iter().filter(|(_, session)| session.peer == peer);
        its.filter_map(|(id, _)| Some((*id, self.paths(*id)?))).collect()
    }
}
