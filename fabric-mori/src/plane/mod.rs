//! The data plane, from the side of its owner.

mod build;
mod calls;
mod recovery;
mod submit;
mod worker_events;

pub use build::MoriError;

use crate::address::{MoriPlaneAddress, MoriRegionDescriptor};
use crate::counters::MoriCounters;
use crate::engine_thread::{MoriEngineCommand, MoriPlaneShared};
use crate::event_queue::MoriWorkerEvent;
use crate::link::{MoriGrantResult, MoriOutboundLink};
use crate::{DeviceEvents, MoriBackend, MoriConfig};
use kvferry_engine::fabric::{OpId, PeerId, RegionId, SessionId};
use kvferry_fabric_common::{ConnectionListener, LedgerSession, PlaneLedger, PlaneParts};
use recovery::MoriRecovery;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What this plane keeps in its ledger. MoRI has the operations there, also those of whose end the
/// owner was told already.
struct MoriParts;

impl PlaneParts for MoriParts {
    type Region = ();
    type Peer = MoriPeer;
    type Session = MoriSession;
    type Opening = ();
    type Open = ();
    type Operation = MoriOperation;
}

/// A peer that the owner named.
#[derive(Debug)]
struct MoriPeer {
    location: MoriPlaneAddress,
    fence_key: u64,
    link: Option<Arc<MoriOutboundLink>>,
    /// Ranges in flight to it.
    ranges: u64,
}

/// A session whose backend was replaced.
#[derive(Clone, Copy, Debug)]
struct Reopening {
    /// It is over if it is not open by then.
    until: Instant,
    /// When the peer is asked again, which did not answer.
    again: Option<Instant>,
}

#[derive(Debug)]
struct MoriSession {
    /// The peer's region.
    claim: MoriRegionDescriptor,
    /// How far it is, if it is open to its owner and has to be opened anew in MoRI.
    reopening: Option<Reopening>,
    /// The line by which the peer told of its memory.
    link: Option<u64>,
    /// Bytes of something that failed may move until the backend is gone.
    tainted: bool,
}

impl MoriSession {
    /// Whether it is to be opened anew after a rebuild.
    fn goes_on(session: &LedgerSession<MoriParts>) -> bool {
        session.phase.is_open() || session.phase.is_opening()
    }
}

/// A batch that MoRI has.
#[derive(Debug)]
struct MoriOperation {
    ranges: u64,
    bytes: u64,
    /// Until then it has to be over.
    deadline: Instant,
}

/// A data plane over MoRI-IO.
///
/// Its address is the descriptor of a MoRI engine with more at its end, its region descriptors are
/// MoRI's. MoRI neither cancels nor recovers: after a failure the whole backend is replaced, which
/// is when what it had in flight is quiet. Operations with other peers are waited for before, and
/// posted anew if that takes too long. Dropping it waits for its threads and for MoRI's.
pub struct MoriPlane {
    common: Arc<MoriPlaneShared>,
    orders: Option<Sender<MoriEngineCommand>>,
    acceptor: Option<ConnectionListener>,
    threads: Vec<JoinHandle<()>>,
    ledger: PlaneLedger<MoriParts>,
    news: Vec<MoriWorkerEvent>,
    lines: u64,
    recovery: MoriRecovery,
    /// Peers know descriptors that are void: a reset is due.
    resetting: bool,
    /// The owner of the plane wants a reset.
    renewing: bool,
    /// It was said who has to leave before that.
    awaits: bool,
    /// No deadline passes before.
    check_at: Option<Instant>,
    /// Peers to be fenced by the next rebuild.
    fences: BTreeSet<PeerId>,
    /// What doors told while the backend was not to be used.
    deferred_grants: Vec<(SessionId, MoriGrantResult)>,
    /// Why there is no backend at present.
    broken: Option<Arc<str>>,
    /// How long it is waited before it is tried again.
    pause: Duration,
    /// When the backend was replaced over the queue pairs of peers.
    worn: Option<Instant>,
}

impl std::fmt::Debug for MoriPlane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MoriPlane").field("config", &self.common.config).finish_non_exhaustive()
    }
}

/// Reads the counters of a plane, also after its end.
#[derive(Clone, Debug)]
pub struct MoriCounterReader(Arc<MoriPlaneShared>);

impl MoriCounterReader {
    /// What the plane did so far.
    pub fn read(&self) -> MoriCounters {
        self.0.counters()
    }

    /// What moves its bytes.
    pub fn backend(&self) -> MoriBackend {
        self.0.config.backend
    }
}

impl MoriPlane {
    /// The settings that it was made with.
    pub fn config(&self) -> &MoriConfig {
        &self.common.config
    }

    /// What it did so far.
    pub fn counters(&self) -> MoriCounters {
        self.common.counters()
    }

    /// The same for who has no access to the plane itself, such as an exporter of metrics.
    pub fn meter(&self) -> MoriCounterReader {
        MoriCounterReader(self.common.clone())
    }

    /// What tells when kernels are done, for memory of a GPU: nothing here waits for them.
    pub fn device_events(&self) -> DeviceEvents {
        DeviceEvents::of(&self.common.shim)
    }

    /// What was submitted and is not over.
    pub(crate) fn in_flight(&self) -> usize {
        self.ledger.operations.len()
    }

    pub(crate) fn has_operation(&self, op: OpId) -> bool {
        self.ledger.operations.contains_key(&op)
    }

    pub(crate) fn has_region(&self, region: RegionId) -> bool {
        self.ledger.regions.contains_key(&region)
    }

    pub(crate) fn has_peer(&self, peer: PeerId) -> bool {
        self.ledger.peers.contains_key(&peer)
    }

    /// True until it is closed and quiet.
    pub(crate) fn has_session(&self, session: SessionId) -> bool {
        self.ledger.sessions.contains_key(&session)
    }

    /// The peer of a session, by the name that it gives itself.
    pub(crate) fn peer_of(&self, session: SessionId) -> Option<Arc<str>> {
        let session = self.ledger.sessions.get(&session)?;
        Some(self.ledger.peers.get(&session.peer)?.location.name())
    }

    fn tell(&self, order: MoriEngineCommand) {
        if let Some(orders) = &self.orders {
            // The thread ends after this plane only.
            let _taken = orders.send(order);
        }
    }
}
