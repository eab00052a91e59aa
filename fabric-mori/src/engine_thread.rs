//! The thread that has MoRI's engine: all of its calls but the looks at statuses and the connecting
//! of sessions are made here, one at a time, since MoRI locks little and may block for seconds.

use crate::access_control::MoriAccessControl;
use crate::address::{MoriAcceptorInfo, MoriPlaneAddress, MoriRegionDescriptor};
use crate::completion_poller::{InFlightBatch, MoriCompletionPoller, end_of};
use crate::counters::{MoriAtomicCounters, MoriCounters};
use crate::event_queue::{MoriBatchOutcome, MoriEventQueue, MoriWorkerEvent};
use crate::job::MoriBatch;
use crate::link::{MoriOutboundLink, MoriRegionGrant};
use crate::mori::{MoriCallError, MoriEngineHandle, MoriMemoryHandle, MoriSessionHandle, Shim};
use crate::process::set_close_on_exec;
use crate::session_opener::{MoriEngineState, MoriSessionOpener};
use crate::{MoriBackend, MoriConfig, preflight};
use kvferry_engine::fabric::{Address, FabricError, Memory, RegionId, SessionId};
use kvferry_fabric_common::{PlaneIdentity, lock};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Between two looks at what is under way.
const PAUSE: Duration = Duration::from_micros(50);

/// What the owner wants of the thread, in this order.
#[derive(Debug)]
pub(crate) enum MoriEngineCommand {
    Register {
        region: RegionId,
        memory: Memory,
    },
    /// `done` is told when no byte of a peer can land any more.
    Deregister {
        region: RegionId,
        done: SyncSender<()>,
    },
    /// Connects a session, for the first time or again after a rebuild.
    Open {
        session: SessionId,
        remote: MoriSessionTarget,
    },
    /// The opener has made connections, or failed to.
    Opened,
    Close {
        session: SessionId,
    },
    /// Gives back what waits for the connection of a session.
    Withdraw {
        session: SessionId,
    },
    /// Ends the sessions with a peer's region, or all and its line, once nothing of them is under
    /// way.
    Leave(Arc<MoriOutboundLink>, Option<RegionId>),
    Post(MoriBatch),
    /// A new engine in place of the old one. `keep` are the sessions that go on: they are to be
    /// opened anew, and what they have in flight is posted once they are. With an incarnation all
    /// that peers know is void from here on.
    Rebuild {
        keep: BTreeSet<SessionId>,
        incarnation: Option<u64>,
    },
    /// Forgets regions and sessions.
    Clear,
    /// The plane is dropped.
    End,
}

/// What the threads of a plane share.
#[derive(Debug)]
pub(crate) struct MoriPlaneShared {
    pub(crate) config: MoriConfig,
    pub(crate) shim: Arc<Shim>,
    pub(crate) access_control: Arc<MoriAccessControl>,
    pub(crate) watch: MoriCompletionPoller,
    pub(crate) board: Arc<MoriEventQueue>,
    pub(crate) address: Mutex<Address>,
    pub(crate) acceptor_port: u16,
    pub(crate) counts: MoriAtomicCounters,
}

impl MoriPlaneShared {
    pub(crate) fn who(&self) -> PlaneIdentity {
        PlaneIdentity {
            key: self.config.key.as_str().into(),
            incarnation: self.access_control.incarnation(),
        }
    }

    pub(crate) fn counters(&self) -> MoriCounters {
        self.counts.get(self.access_control.dead_pairs())
    }

    pub(crate) fn address(&self) -> Address {
        lock(&self.address).clone()
    }
}

/// What a session connects.
#[derive(Clone, Debug)]
pub(crate) struct MoriSessionTarget {
    pub(crate) region: RegionId,
    /// The peer's region, and MoRI's descriptors.
    pub(crate) grant: MoriRegionGrant,
    /// By which the peer told them; none of a peer without an acceptor.
    pub(crate) link: Option<u64>,
}

#[derive(Debug)]
struct MoriBackendSession {
    remote: MoriSessionTarget,
    /// None while it is not connected.
    session: Option<MoriSessionHandle>,
    /// What is posted once it is.
    waiting: Vec<MoriBatch>,
}

#[derive(Debug)]
pub(crate) struct MoriRegisteredMemory {
    pub(crate) memory: Memory,
    pub(crate) region: MoriMemoryHandle,
}

/// Sessions go before MoRI's engine, which the order of the fields says.
#[derive(Debug)]
pub(crate) struct MoriEngineThread {
    common: Arc<MoriPlaneShared>,
    sessions: BTreeMap<SessionId, MoriBackendSession>,
    opener: Arc<MoriSessionOpener>,
    generation: u64,
}

fn backend(fault: &MoriCallError) -> FabricError {
    FabricError::Backend(fault.to_string().into())
}

impl MoriEngineThread {
    /// Makes the first engine.
    ///
    /// # Errors
    /// What MoRI says.
    pub(crate) fn new(
        common: Arc<MoriPlaneShared>,
        opener: Arc<MoriSessionOpener>,
    ) -> Result<MoriEngineThread, MoriCallError> {
        let mut thread =
            MoriEngineThread { common, sessions: BTreeMap::new(), opener, generation: 0 };
        let engine = thread.make_engine()?;
        thread.opener.with_exclusive(|mori| mori.engine = Some(engine));
        Ok(thread)
    }

    /// A new key each time: MoRI never dials again who comes back under an old one.
    fn make_engine(&mut self) -> Result<MoriEngineHandle, MoriCallError> {
        let common = &self.common;
        let who = common.who();
        let key = format!("{}~{:016x}.{}", who.key, who.incarnation, self.generation);
        // MoRI ends the process over what is missing.
        preflight::check(&common.config).map_err(|why| MoriCallError::of("kf_engine_new", why))?;
        let engine = MoriEngineHandle::new(&common.shim, &common.config, &key)?;
        self.generation += 1;
        let desc = engine.desc()?;
        if let Some(at) = MoriPlaneAddress::listens_at(&desc) {
            set_close_on_exec(at);
        }
        let acceptor =
            MoriAcceptorInfo { who, port: common.acceptor_port, layout: common.shim.info.layout };
        let address = MoriPlaneAddress::encode(&desc, &acceptor)
            .ok_or_else(|| MoriCallError::of("kf_engine_desc", "no msgpack array"))?;
        common.access_control.engine_is(desc.into());
        *lock(&common.address) = address;
        Ok(engine)
    }

    /// Ends with [`MoriEngineCommand::End`].
    pub(crate) fn run(mut self, inbox: &Receiver<MoriEngineCommand>) {
        while let Ok(order) = inbox.recv() {
            if matches!(order, MoriEngineCommand::End) {
                break;
            }
            self.perform(order);
        }
        if self.common.config.backend == MoriBackend::Xgmi {
            // Nothing else ends what GPUs are at.
            let _ended = self.drained(|_| true);
        }
        drop(self.common.watch.drain());
        self.common.watch.stop();
        self.opener.stop();
        self.sessions.clear();
        self.opener.with_exclusive(|mori| drop(mori.end()));
    }

    fn perform(&mut self, order: MoriEngineCommand) {
        match order {
            MoriEngineCommand::Register { region, memory } => {
                let common = &self.common;
                let result =
                    self.opener.with_exclusive(|mori| register(common, mori, region, memory, true));
                let result = result.map_err(|fault| backend(&fault));
                self.common.board.tell(MoriWorkerEvent::Registered { region, result });
            }
            MoriEngineCommand::Deregister { region, done } => {
                self.opener.clone().with_exclusive(|mori| {
                    self.take_opened(mori);
                    self.sessions.retain(|_, wire| wire.remote.region != region);
                    mori.regions.remove(&region);
                });
                let _gone = done.send(());
            }
            MoriEngineCommand::Open { session, remote } => self.open(session, remote),
            MoriEngineCommand::Opened => {
                self.opener.clone().with_exclusive(|mori| self.take_opened(mori))
            }
            MoriEngineCommand::Close { session } => {
                self.withdraw(session);
                self.sessions.remove(&session);
            }
            MoriEngineCommand::Withdraw { session } => self.withdraw(session),
            MoriEngineCommand::Leave(line, region) => self.leave(&line, region),
            MoriEngineCommand::Post(job) => self.post(job),
            MoriEngineCommand::Rebuild { keep, incarnation } => self.rebuild(&keep, incarnation),
            MoriEngineCommand::Clear => {
                self.opener.clear();
                self.opener.clone().with_exclusive(|mori| {
                    drop(mori.opened());
                    self.sessions.clear();
                    mori.regions.clear();
                });
            }
            MoriEngineCommand::End => {}
        }
    }

    fn open(&mut self, id: SessionId, remote: MoriSessionTarget) {
        let wire = self.sessions.entry(id).or_insert_with(|| MoriBackendSession {
            remote: remote.clone(),
            session: None,
            waiting: Vec::new(),
        });
        if wire.session.is_none() {
            wire.remote = remote.clone();
            self.opener.ask(id, remote);
        }
    }

    /// Waits for what these sessions have under way. False if it does not end.
    fn drained(&self, whose: impl Fn(SessionId) -> bool) -> bool {
        let patience = Duration::from_millis(self.common.config.operation_ms.into());
        let until = Instant::now() + patience;
        while self.common.watch.has(&whose) {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(PAUSE);
        }
        true
    }

    fn leave(&mut self, line: &MoriOutboundLink, region: Option<RegionId>) {
        let its = |wire: &MoriBackendSession| {
            wire.remote.link == Some(line.id)
                && region.is_none_or(|region| wire.remote.grant.region == region)
        };
        let ended: BTreeSet<SessionId> =
            self.sessions.iter().filter(|(_, wire)| its(wire)).map(|(id, _)| *id).collect();
        for id in &ended {
            self.withdraw(*id);
            self.sessions.remove(id);
        }
        // Otherwise the peer waits, for the end of this process if need be.
        if !self.drained(|id| ended.contains(&id)) {
            return;
        }
        match region {
            Some(region) => line.released(region),
            None => line.hang_up(),
        }
        self.common.board.tell(MoriWorkerEvent::Closed { sessions: ended });
    }

    fn post(&mut self, job: MoriBatch) {
        let op = job.op;
        let posted = match self.sessions.get_mut(&job.session) {
            None => return self.unposted(job),
            Some(MoriBackendSession { session: None, waiting, .. }) => return waiting.push(job),
            Some(MoriBackendSession { session: Some(session), .. }) => {
                try_post(&self.common, session, job)
            }
        };
        if let Err((job, cause)) = posted {
            self.common.watch.recycle(job);
            let end = MoriBatchOutcome::Failed(cause);
            self.common.board.tell(MoriWorkerEvent::Ended { op, end });
        }
    }

    /// Puts connected sessions to use.
    fn take_opened(&mut self, mori: &mut MoriEngineState) {
        for (id, result) in mori.opened() {
            let Some(wire) = self.sessions.get_mut(&id) else { continue };
            let result = result.map(|session| {
                wire.session.get_or_insert(session);
            });
            let waiting =
                if result.is_ok() { std::mem::take(&mut wire.waiting) } else { Vec::new() };
            self.common.board.tell(MoriWorkerEvent::Opened { session: id, result });
            for job in waiting {
                self.post(job);
            }
        }
    }

    fn withdraw(&mut self, session: SessionId) {
        let Some(wire) = self.sessions.get_mut(&session) else { return };
        std::mem::take(&mut wire.waiting).into_iter().for_each(|job| self.unposted(job));
    }

    fn unposted(&self, job: MoriBatch) {
        let (op, end) = (job.op, MoriBatchOutcome::Unposted(FabricError::Closed));
        self.common.watch.recycle(job);
        self.common.board.tell(MoriWorkerEvent::Ended { op, end });
    }

    fn rebuild(&mut self, keep: &BTreeSet<SessionId>, incarnation: Option<u64>) {
        if let Some(incarnation) = incarnation {
            self.common.access_control.renew(incarnation);
        }
        // The end of xGMI's backend stops nothing that a GPU is at.
        if self.common.config.backend == MoriBackend::Xgmi && !self.drained(|_| true) {
            let why = "copies between GPUs do not end".into();
            return self.common.board.tell(MoriWorkerEvent::Broken { why, quiet: false });
        }
        let mut again = Vec::new();
        for InFlightBatch { job, status } in self.common.watch.drain() {
            match end_of(&status) {
                Some(MoriBatchOutcome::Done) => {
                    let (op, end) = (job.op, MoriBatchOutcome::Done);
                    self.common.board.tell(MoriWorkerEvent::Ended { op, end });
                    self.common.watch.recycle(job);
                }
                _ if keep.contains(&job.session) => again.push(job),
                _ => self.common.watch.recycle(job),
            }
        }
        self.sessions.retain(|id, _| keep.contains(id));
        self.opener.clear();
        match self.opener.clone().with_exclusive(|mori| self.replace(mori, incarnation.is_none())) {
            Ok(()) => {
                let ops = again.iter().map(|job| job.op).collect();
                // Behind those that wait already, which is no order that anybody was promised.
                again.into_iter().for_each(|job| self.post(job));
                self.common.board.tell(MoriWorkerEvent::Rebuilt { again: ops });
            }
            Err(fault) => {
                again.into_iter().for_each(|job| self.common.watch.recycle(job));
                let sessions = std::mem::take(&mut self.sessions);
                let waiting = sessions.into_values().flat_map(|wire| wire.waiting);
                waiting.for_each(|job| self.common.watch.recycle(job));
                let why = fault.to_string();
                self.common.board.tell(MoriWorkerEvent::Broken { why, quiet: true });
            }
        }
    }

    /// A new engine with the memory of the old one, which is `offered` to peers as before.
    fn replace(&mut self, mori: &mut MoriEngineState, offered: bool) -> Result<(), MoriCallError> {
        for wire in self.sessions.values_mut() {
            wire.session = None;
        }
        let memories = mori.end();
        mori.engine = Some(self.make_engine()?);
        for (id, memory) in memories {
            register(&self.common, mori, id, memory, offered)?;
        }
        Ok(())
    }
}

/// MoRI's descriptor, which peers are given if it is `offered`.
fn register(
    common: &MoriPlaneShared,
    mori: &mut MoriEngineState,
    id: RegionId,
    memory: Memory,
    offered: bool,
) -> Result<Vec<u8>, MoriCallError> {
    let region = mori.engine()?.register(memory)?;
    let desc = region.desc()?;
    let claim = MoriRegionDescriptor::decode(&desc)
        .ok_or_else(|| MoriCallError::of("kf_memory_desc", "bytes that are no descriptor"))?;
    if offered {
        common.access_control.add_region(id, claim.name, claim.memory);
    }
    mori.regions.insert(id, MoriRegisteredMemory { memory, region });
    Ok(desc)
}

fn try_post(
    common: &MoriPlaneShared,
    session: &MoriSessionHandle,
    job: MoriBatch,
) -> Result<(), (MoriBatch, FabricError)> {
    let status = match session.status() {
        Ok(status) => status,
        Err(fault) => return Err((job, backend(&fault))),
    };
    if let Err(fault) = session.post(&job, &status) {
        return Err((job, backend(&fault)));
    }
    common.watch.add(InFlightBatch { job, status });
    Ok(())
}
