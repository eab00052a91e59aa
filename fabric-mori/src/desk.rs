//! The thread that has MoRI's engine: all of its calls but the looks at statuses are made here, one
//! at a time, since MoRI locks little and may block for seconds.

use crate::address::{Claim, Door, Identity, Location};
use crate::counters::Counts;
use crate::door::{Grant, Line};
use crate::gate::Gate;
use crate::job::Job;
use crate::mori::{Engine, Fault, Region, Session, Shim};
use crate::news::{Board, End, News};
use crate::watch::{Flight, Watch, end_of};
use crate::{Backend, MoriConfig};
use engine::fabric::{Address, Cause, Memory, OpId, RegionId, SessionId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Between two looks at what is under way.
const PAUSE: Duration = Duration::from_micros(50);

/// What the owner wants of the thread, in this order.
#[derive(Debug)]
pub(crate) enum Order {
    Register {
        region: RegionId,
        memory: Memory,
    },
    /// `done` is told when no byte of a peer can land any more.
    Deregister {
        region: RegionId,
        done: SyncSender<()>,
    },
    Open {
        session: SessionId,
        remote: Remote,
    },
    Close {
        session: SessionId,
    },
    /// Ends the sessions with a peer's region, or all and its line, once nothing of them is under way.
    Leave(Arc<Line>, Option<RegionId>),
    Post(Job),
    /// A new engine in place of the old one. `keep` are the sessions that go on; what they have in
    /// flight is posted anew. With an incarnation all that peers know is void from here on.
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
pub(crate) struct Common {
    pub(crate) config: MoriConfig,
    pub(crate) shim: Arc<Shim>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) watch: Watch,
    pub(crate) board: Arc<Board>,
    pub(crate) address: Mutex<Address>,
    pub(crate) door_port: u16,
    pub(crate) counts: Counts,
}

impl Common {
    pub(crate) fn who(&self) -> Identity {
        Identity { key: self.config.key.as_str().into(), incarnation: self.gate.incarnation() }
    }

    pub(crate) fn address(&self) -> Address {
        self.address.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What a session connects.
#[derive(Clone, Debug)]
pub(crate) struct Remote {
    pub(crate) region: RegionId,
    /// The peer's region, and MoRI's descriptors.
    pub(crate) grant: Grant,
    /// By which the peer told them; none of a peer without a door.
    pub(crate) line: Option<u64>,
}

#[derive(Debug)]
struct Wire {
    remote: Remote,
    session: Session,
}

#[derive(Debug)]
struct Held {
    memory: Memory,
    region: Region,
}

/// Sessions go before regions, and both before the engine, which the order of the fields says.
#[derive(Debug)]
pub(crate) struct Desk {
    common: Arc<Common>,
    sessions: BTreeMap<SessionId, Wire>,
    regions: BTreeMap<RegionId, Held>,
    peers: BTreeSet<Arc<[u8]>>,
    engine: Option<Engine>,
    generation: u64,
}

fn backend(fault: &Fault) -> Cause {
    Cause::Backend(fault.to_string().into())
}

impl Desk {
    /// Makes the first engine.
    ///
    /// # Errors
    /// What MoRI says.
    pub(crate) fn new(common: Arc<Common>) -> Result<Desk, Fault> {
        let (sessions, regions) = (BTreeMap::new(), BTreeMap::new());
        let (peers, engine) = (BTreeSet::new(), None);
        let mut desk = Desk { common, sessions, regions, peers, engine, generation: 0 };
        desk.make_engine()?;
        Ok(desk)
    }

    /// A new key each time: MoRI never dials again who comes back under an old one.
    fn make_engine(&mut self) -> Result<(), Fault> {
        let common = &self.common;
        let who = common.who();
        let key = format!("{}~{:016x}.{}", who.key, who.incarnation, self.generation);
        self.generation += 1;
        let engine = Engine::new(&common.shim, &common.config, &key)?;
        let desc = engine.desc()?;
        let door = Door { who, port: common.door_port, layout: common.shim.info.layout };
        let address = Location::encode(&desc, &door)
            .ok_or_else(|| Fault::of("kf_engine_desc", "no msgpack array"))?;
        common.gate.engine_is(desc.into());
        *common.address.lock().unwrap_or_else(PoisonError::into_inner) = address;
        self.engine = Some(engine);
        Ok(())
    }

    /// Ends with [`Order::End`].
    pub(crate) fn run(mut self, inbox: &Receiver<Order>) {
        while let Ok(order) = inbox.recv() {
            if matches!(order, Order::End) {
                break;
            }
            self.perform(order);
        }
        if self.common.config.backend == Backend::Xgmi {
            // Nothing else ends what GPUs are at.
            let _ended = self.drained(|_| true);
        }
        drop(self.common.watch.drain());
        self.common.watch.stop();
    }

    fn perform(&mut self, order: Order) {
        match order {
            Order::Register { region, memory } => {
                let result = self.register(region, memory, true);
                let result = result.map_err(|fault| backend(&fault));
                self.common.board.tell(News::Registered { region, result });
            }
            Order::Deregister { region, done } => {
                self.sessions.retain(|_, wire| wire.remote.region != region);
                self.regions.remove(&region);
                let _gone = done.send(());
            }
            Order::Open { session, remote } => {
                let result = self.open(session, remote);
                self.common.board.tell(News::Opened { session, result });
            }
            Order::Close { session } => drop(self.sessions.remove(&session)),
            Order::Leave(line, region) => self.leave(&line, region),
            Order::Post(job) => self.post(job),
            Order::Rebuild { keep, incarnation } => self.rebuild(&keep, incarnation),
            Order::Clear => {
                self.sessions.clear();
                self.regions.clear();
            }
            Order::End => {}
        }
    }

    fn engine(&self) -> Result<&Engine, Fault> {
        self.engine
            .as_ref()
            .ok_or_else(|| Fault::of("engine", "there is none since a rebuild failed"))
    }

    /// MoRI's descriptor, which peers are given if it is `offered`.
    fn register(&mut self, id: RegionId, memory: Memory, offered: bool) -> Result<Vec<u8>, Fault> {
        let region = self.engine()?.register(memory)?;
        let desc = region.desc()?;
        let claim = Claim::decode(&desc)
            .ok_or_else(|| Fault::of("kf_memory_desc", "bytes that are no descriptor"))?;
        if offered {
            self.common.gate.add_region(id, claim.name, claim.memory);
        }
        self.regions.insert(id, Held { memory, region });
        Ok(desc)
    }

    fn open(&mut self, id: SessionId, remote: Remote) -> Result<(), Cause> {
        let session = self.session(&remote).map_err(|fault| match fault.is_system() {
            true => Cause::Unreachable,
            false => backend(&fault),
        })?;
        self.sessions.insert(id, Wire { remote, session });
        Ok(())
    }

    fn session(&mut self, to: &Remote) -> Result<Session, Fault> {
        if !self.peers.contains(&to.grant.engine) {
            self.engine()?.add_peer(&to.grant.engine)?;
            self.peers.insert(to.grant.engine.clone());
        }
        let held = self.regions.get(&to.region);
        let held = held.ok_or_else(|| Fault::of("session", "its region is not registered"))?;
        self.engine()?.session(&held.region, &to.grant.memory)
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

    fn leave(&mut self, line: &Line, region: Option<RegionId>) {
        let its = |wire: &Wire| {
            wire.remote.line == Some(line.id)
                && region.is_none_or(|region| wire.remote.grant.region == region)
        };
        let ended: BTreeSet<SessionId> =
            self.sessions.iter().filter(|(_, wire)| its(wire)).map(|(id, _)| *id).collect();
        self.sessions.retain(|id, _| !ended.contains(id));
        // Otherwise the peer waits, for the end of this process if need be.
        if !self.drained(|id| ended.contains(&id)) {
            return;
        }
        match region {
            Some(region) => line.released(region),
            None => line.hang_up(),
        }
        self.common.board.tell(News::Closed { sessions: ended });
    }

    fn post(&mut self, job: Job) {
        let op = job.op;
        if let Err((job, cause)) = self.try_post(job) {
            self.common.watch.give(job);
            self.common.board.tell(News::Ended { op, end: End::Failed(cause) });
        }
    }

    fn try_post(&mut self, job: Job) -> Result<(), (Job, Cause)> {
        let Some(wire) = self.sessions.get(&job.session) else { return Err((job, Cause::Closed)) };
        let status = match self.engine().and_then(Engine::status) {
            Ok(status) => status,
            Err(fault) => return Err((job, backend(&fault))),
        };
        if let Err(fault) = wire.session.post(&job, &status) {
            return Err((job, backend(&fault)));
        }
        self.common.watch.add(Flight { job, status });
        Ok(())
    }

    fn rebuild(&mut self, keep: &BTreeSet<SessionId>, incarnation: Option<u64>) {
        if let Some(incarnation) = incarnation {
            self.common.gate.renew(incarnation);
        }
        // The end of xGMI's backend stops nothing that a GPU is at.
        if self.common.config.backend == Backend::Xgmi && !self.drained(|_| true) {
            let why = "copies between GPUs do not end".into();
            return self.common.board.tell(News::Broken { why, quiet: false });
        }
        let mut jobs = Vec::new();
        for Flight { job, status } in self.common.watch.drain() {
            match end_of(&status) {
                Some(End::Done) => {
                    self.common.board.tell(News::Ended { op: job.op, end: End::Done });
                    self.common.watch.give(job);
                }
                _ if keep.contains(&job.session) => jobs.push(job),
                _ => self.common.watch.give(job),
            }
        }
        let sessions = std::mem::take(&mut self.sessions);
        let wires: Vec<_> = sessions
            .into_iter()
            .filter(|(id, _)| keep.contains(id))
            .map(|(id, wire)| (id, wire.remote))
            .collect();
        let memories: Vec<_> = std::mem::take(&mut self.regions)
            .into_iter()
            .map(|(id, held)| (id, held.memory))
            .collect();
        self.peers.clear();
        self.engine = None;
        if let Err(fault) = self.make_engine() {
            return self.broken(&fault);
        }
        for (id, memory) in memories {
            if let Err(fault) = self.register(id, memory, incarnation.is_none()) {
                return self.broken(&fault);
            }
        }
        let mut lost = Vec::new();
        for (id, remote) in wires {
            if let Err(cause) = self.open(id, remote) {
                lost.push((id, cause));
            }
        }
        let again: Vec<OpId> = jobs.iter().map(|job| job.op).collect();
        self.common.board.tell(News::Rebuilt { again, lost });
        for job in jobs {
            self.post(job);
        }
    }

    fn broken(&self, fault: &Fault) {
        self.common.board.tell(News::Broken { why: fault.to_string(), quiet: true });
    }
}
