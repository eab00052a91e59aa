//! The thread that has MoRI's engine: all of its calls but the looks at statuses and the connecting
//! of sessions are made here, one at a time, since MoRI locks little and may block for seconds.

use crate::address::{Claim, Door, Identity, Location};
use crate::counters::{Counters, Counts};
use crate::door::{Grant, Line};
use crate::gate::Gate;
use crate::job::Job;
use crate::mori::{Engine, Fault, Region, Session, Shim};
use crate::news::{Board, End, News};
use crate::opener::{Mori, Opener};
use crate::sockets::keep_from_children;
use crate::watch::{Flight, Watch, end_of};
use crate::{Backend, MoriConfig, preflight};
use engine::fabric::{Address, Cause, Memory, RegionId, SessionId};
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
    /// Connects a session, for the first time or again after a rebuild.
    Open {
        session: SessionId,
        remote: Remote,
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
    /// Ends the sessions with a peer's region, or all and its line, once nothing of them is under way.
    Leave(Arc<Line>, Option<RegionId>),
    Post(Job),
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

    pub(crate) fn counters(&self) -> Counters {
        self.counts.get(self.gate.dead_pairs())
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
    /// None while it is not connected.
    session: Option<Session>,
    /// What is posted once it is.
    waiting: Vec<Job>,
}

/// Registered memory.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) memory: Memory,
    pub(crate) region: Region,
}

/// Sessions go before MoRI's engine, which the order of the fields says.
#[derive(Debug)]
pub(crate) struct Desk {
    common: Arc<Common>,
    sessions: BTreeMap<SessionId, Wire>,
    opener: Arc<Opener>,
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
    pub(crate) fn new(common: Arc<Common>, opener: Arc<Opener>) -> Result<Desk, Fault> {
        let mut desk = Desk { common, sessions: BTreeMap::new(), opener, generation: 0 };
        let engine = desk.make_engine()?;
        desk.opener.alone(|mori| mori.engine = Some(engine));
        Ok(desk)
    }

    /// A new key each time: MoRI never dials again who comes back under an old one.
    fn make_engine(&mut self) -> Result<Engine, Fault> {
        let common = &self.common;
        let who = common.who();
        let key = format!("{}~{:016x}.{}", who.key, who.incarnation, self.generation);
        // MoRI ends the process over what is missing.
        preflight::check(&common.config).map_err(|why| Fault::of("kf_engine_new", why))?;
        let engine = Engine::new(&common.shim, &common.config, &key)?;
        self.generation += 1;
        let desc = engine.desc()?;
        if let Some(at) = Location::listens_at(&desc) {
            keep_from_children(at);
        }
        let door = Door { who, port: common.door_port, layout: common.shim.info.layout };
        let address = Location::encode(&desc, &door)
            .ok_or_else(|| Fault::of("kf_engine_desc", "no msgpack array"))?;
        common.gate.engine_is(desc.into());
        *common.address.lock().unwrap_or_else(PoisonError::into_inner) = address;
        Ok(engine)
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
        self.opener.stop();
        self.sessions.clear();
        self.opener.alone(|mori| drop(mori.end()));
    }

    fn perform(&mut self, order: Order) {
        match order {
            Order::Register { region, memory } => {
                let common = &self.common;
                let result = self.opener.alone(|mori| register(common, mori, region, memory, true));
                let result = result.map_err(|fault| backend(&fault));
                self.common.board.tell(News::Registered { region, result });
            }
            Order::Deregister { region, done } => {
                self.opener.clone().alone(|mori| {
                    self.take_opened(mori);
                    self.sessions.retain(|_, wire| wire.remote.region != region);
                    mori.regions.remove(&region);
                });
                let _gone = done.send(());
            }
            Order::Open { session, remote } => self.open(session, remote),
            Order::Opened => self.opener.clone().alone(|mori| self.take_opened(mori)),
            Order::Close { session } => {
                self.withdraw(session);
                self.sessions.remove(&session);
            }
            Order::Withdraw { session } => self.withdraw(session),
            Order::Leave(line, region) => self.leave(&line, region),
            Order::Post(job) => self.post(job),
            Order::Rebuild { keep, incarnation } => self.rebuild(&keep, incarnation),
            Order::Clear => {
                self.opener.clear();
                self.opener.clone().alone(|mori| {
                    drop(mori.opened());
                    self.sessions.clear();
                    mori.regions.clear();
                });
            }
            Order::End => {}
        }
    }

    fn open(&mut self, id: SessionId, remote: Remote) {
        let wire = self.sessions.entry(id).or_insert_with(|| Wire {
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

    fn leave(&mut self, line: &Line, region: Option<RegionId>) {
        let its = |wire: &Wire| {
            wire.remote.line == Some(line.id)
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
        self.common.board.tell(News::Closed { sessions: ended });
    }

    fn post(&mut self, job: Job) {
        let op = job.op;
        let posted = match self.sessions.get_mut(&job.session) {
            None => return self.unposted(job),
            Some(Wire { session: None, waiting, .. }) => return waiting.push(job),
            Some(Wire { session: Some(session), .. }) => try_post(&self.common, session, job),
        };
        if let Err((job, cause)) = posted {
            self.common.watch.give(job);
            self.common.board.tell(News::Ended { op, end: End::Failed(cause) });
        }
    }

    /// Puts connected sessions to use.
    fn take_opened(&mut self, mori: &mut Mori) {
        for (id, result) in mori.opened() {
            let Some(wire) = self.sessions.get_mut(&id) else { continue };
            let result = result.map(|session| {
                wire.session.get_or_insert(session);
            });
            let waiting =
                if result.is_ok() { std::mem::take(&mut wire.waiting) } else { Vec::new() };
            self.common.board.tell(News::Opened { session: id, result });
            for job in waiting {
                self.post(job);
            }
        }
    }

    fn withdraw(&mut self, session: SessionId) {
        let Some(wire) = self.sessions.get_mut(&session) else { return };
        std::mem::take(&mut wire.waiting).into_iter().for_each(|job| self.unposted(job));
    }

    fn unposted(&self, job: Job) {
        let (op, end) = (job.op, End::Unposted(Cause::Closed));
        self.common.watch.give(job);
        self.common.board.tell(News::Ended { op, end });
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
        let mut again = Vec::new();
        for Flight { job, status } in self.common.watch.drain() {
            match end_of(&status) {
                Some(End::Done) => {
                    self.common.board.tell(News::Ended { op: job.op, end: End::Done });
                    self.common.watch.give(job);
                }
                _ if keep.contains(&job.session) => again.push(job),
                _ => self.common.watch.give(job),
            }
        }
        self.sessions.retain(|id, _| keep.contains(id));
        self.opener.clear();
        match self.opener.clone().alone(|mori| self.replace(mori, incarnation.is_none())) {
            Ok(()) => {
                let ops = again.iter().map(|job| job.op).collect();
                // Behind those that wait already, which is no order that anybody was promised.
                again.into_iter().for_each(|job| self.post(job));
                self.common.board.tell(News::Rebuilt { again: ops });
            }
            Err(fault) => {
                again.into_iter().for_each(|job| self.common.watch.give(job));
                let sessions = std::mem::take(&mut self.sessions);
                let waiting = sessions.into_values().flat_map(|wire| wire.waiting);
                waiting.for_each(|job| self.common.watch.give(job));
                self.common.board.tell(News::Broken { why: fault.to_string(), quiet: true });
            }
        }
    }

    /// A new engine with the memory of the old one, which is `offered` to peers as before.
    fn replace(&mut self, mori: &mut Mori, offered: bool) -> Result<(), Fault> {
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
    common: &Common,
    mori: &mut Mori,
    id: RegionId,
    memory: Memory,
    offered: bool,
) -> Result<Vec<u8>, Fault> {
    let region = mori.engine()?.register(memory)?;
    let desc = region.desc()?;
    let claim = Claim::decode(&desc)
        .ok_or_else(|| Fault::of("kf_memory_desc", "bytes that are no descriptor"))?;
    if offered {
        common.gate.add_region(id, claim.name, claim.memory);
    }
    mori.regions.insert(id, Held { memory, region });
    Ok(desc)
}

fn try_post(common: &Common, session: &Session, job: Job) -> Result<(), (Job, Cause)> {
    let status = match session.status() {
        Ok(status) => status,
        Err(fault) => return Err((job, backend(&fault))),
    };
    if let Err(fault) = session.post(&job, &status) {
        return Err((job, backend(&fault)));
    }
    common.watch.add(Flight { job, status });
    Ok(())
}
