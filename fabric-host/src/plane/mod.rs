//! The data plane, from the side of its owner.

mod build;
mod calls;
mod close;
mod digest;
#[cfg(all(test, not(feature = "loom")))]
mod lost_rings;
mod submit;
mod worker_events;

pub use build::HostError;

use crate::copy::CopySlice;
use crate::descriptor::{HostPlaneAddress, HostRegionDescriptor};
use crate::link::{HostLinkEvent, HostLinkKind, HostOutboundLink};
use crate::memory::HostRegion;
use crate::proto::HostCopyStatus;
use crate::ring::{AtomicU64, Consumer};
use crate::shared::{HostCounters, HostPlaneShared, HostWorkerEvent, NegotiatedPaths};
use crate::{DataPath, HostConfig};
use digest::HostDigests;
use kvferry_engine::fabric::{PeerId, SessionId};
use kvferry_fabric_common::{ConnectionListener, PlaneLedger, PlaneParts, SessionPhase};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// What this plane keeps in its ledger.
struct HostParts;

impl PlaneParts for HostParts {
    type Region = Arc<HostRegion>;
    type Peer = HostPeer;
    type Session = HostSession;
    type Opening = HostOpening;
    type Open = (HostLinkBundle, NegotiatedPaths);
    type Operation = HostOperation;
}

/// The connections to a peer of one kind. Those by TCP share what goes there.
type HostLinkBundle = Arc<[Arc<HostOutboundLink>]>;

fn has_link(links: &HostLinkBundle, id: u64) -> bool {
    links.iter().any(|link| link.id == id)
}

/// A peer that the owner named.
#[derive(Debug)]
struct HostPeer {
    location: Arc<HostPlaneAddress>,
    fence_key: u64,
    links: BTreeMap<HostLinkKind, HostPeerLink>,
}

/// The links of a peer.
#[derive(Debug)]
enum HostPeerLink {
    Dialling,
    Up(HostLinkBundle),
}

/// What a session that is being opened waits for.
#[derive(Debug)]
enum HostOpening {
    /// For links of this kind.
    Link(HostLinkKind),
    /// For the peer's answers by these links, of which some are to come.
    Answers { links: HostLinkBundle, missing: BTreeSet<u64> },
}

/// What has to happen before a session is quiet, beside the end of its operations: links by which
/// it still may land something.
#[derive(Debug, Default)]
struct HostQuiescePending {
    /// Our thread leaves its reads.
    local: BTreeSet<u64>,
    /// The peer says that it writes no more.
    remote: BTreeSet<u64>,
    /// The peer's end, or a word of it, after its connection broke.
    proof: BTreeSet<u64>,
}

impl HostQuiescePending {
    fn is_over(&self) -> bool {
        self.local.is_empty() && self.remote.is_empty() && self.proof.is_empty()
    }
}

#[derive(Debug)]
struct HostSession {
    region: Arc<HostRegion>,
    location: Arc<HostPlaneAddress>,
    fence_key: u64,
    claim: HostRegionDescriptor,
    /// The links that carry it, or did.
    links: Option<HostLinkBundle>,
    awaits: HostQuiescePending,
}

#[derive(Clone, Copy, Debug)]
struct HostOperation {
    write: bool,
    path: DataPath,
    bytes: u64,
    /// Shares, each by a link of its own, that are under way.
    shares: u32,
    /// The worst of those that are over.
    status: HostCopyStatus,
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
    listener: Option<ConnectionListener>,
    threads: Vec<JoinHandle<()>>,
    outcomes: Vec<Consumer<Arc<[AtomicU64]>>>,
    ledger: PlaneLedger<HostParts>,
    dials: BTreeMap<u64, (PeerId, HostLinkKind)>,
    quiesce_probes: Vec<close::HostQuiesceProbe>,
    /// Links that are up, also those of peers that were forgotten.
    links: BTreeMap<u64, Arc<HostOutboundLink>>,
    /// Short operations in flight.
    short: u32,
    notices: Vec<HostWorkerEvent>,
    slices: Vec<CopySlice>,
    inline_copier: submit::InlineCopier,
    digests: HostDigests,
    record: Vec<u64>,
    heard: Vec<HostLinkEvent>,
    /// Polls without news.
    idle_polls: u32,
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

impl HostSession {
    fn has_link(&self, id: u64) -> bool {
        self.links.as_ref().is_some_and(|links| has_link(links, id))
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
        match &self.ledger.sessions.get(&session)?.phase {
            SessionPhase::Open((_, lane)) => {
                Some(SessionPaths { write: lane.write, read: lane.read })
            }
            _ => None,
        }
    }

    /// The open sessions of a peer and how their bytes go.
    pub fn paths_of(&self, peer: PeerId) -> Vec<(SessionId, SessionPaths)> {
        let its = self.ledger.sessions_where(|session| session.peer == peer);
        its.into_iter().filter_map(|id| Some((id, self.paths(id)?))).collect()
    }
}
