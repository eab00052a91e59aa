//! What the owner of a plane has named and what is in flight: ids in use, the order of operations,
//! tickets, and the end of each operation, which is told once.

use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Completion, DataEvent, FabricError, Landed, Memory, NextPoll, OpId, PeerId, QuiesceTicket,
    Refused, RegionId, SessionId, Submit,
};
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

/// What a plane keeps of each thing beside what the ledger does.
pub trait PlaneParts {
    /// Of registered memory, e.g. its mapping.
    type Region;
    /// Of a peer, e.g. its address.
    type Peer;
    /// Of a session in any phase.
    type Session;
    /// Of a session that is being opened.
    type Opening;
    /// Of a session that is open.
    type Open;
    /// Of an operation in flight, e.g. where it was posted.
    type Operation;
}

/// Memory that is registered.
#[derive(Debug)]
pub struct LedgerRegion<T> {
    /// Length in bytes.
    pub len: u64,
    /// See [`PlaneParts::Region`].
    pub own: T,
    operations: u32,
}

impl<T> LedgerRegion<T> {
    /// Memory that nothing uses.
    pub fn new(len: u64, own: T) -> LedgerRegion<T> {
        LedgerRegion { len, own, operations: 0 }
    }
}

/// How far a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionPhase<A, B> {
    /// Its owner waits for the answer.
    Opening(A),
    /// Operations can be submitted.
    Open(B),
    /// Nothing can be submitted any more.
    Dead,
    /// Closed by its owner, not quiet yet.
    Closing,
}

impl<A, B> SessionPhase<A, B> {
    /// Whether its owner waits for the answer.
    pub fn is_opening(&self) -> bool {
        matches!(self, SessionPhase::Opening(_))
    }

    /// Whether operations can be submitted.
    pub fn is_open(&self) -> bool {
        matches!(self, SessionPhase::Open(_))
    }

    /// Whether its owner has closed it.
    pub fn is_closing(&self) -> bool {
        matches!(self, SessionPhase::Closing)
    }

    /// Nothing can be submitted from now on. What it was.
    pub fn end(&mut self) -> SessionPhase<A, B> {
        let to = if self.is_closing() { SessionPhase::Closing } else { SessionPhase::Dead };
        std::mem::replace(self, to)
    }
}

/// A session that its owner has not closed, or that is not quiet yet.
pub struct LedgerSession<T: PlaneParts> {
    /// The region of this side.
    pub local: RegionId,
    /// The owner of the remote region.
    pub peer: PeerId,
    /// Lengths of both regions in bytes, the local one first.
    pub lens: [u64; 2],
    /// How far it is.
    pub phase: SessionPhase<T::Opening, T::Open>,
    /// Until when it has to be open.
    pub deadline: Instant,
    /// Operations that are not over, in the order of their submission.
    pub operations: BTreeMap<u64, OpId>,
    /// See [`PlaneParts::Session`].
    pub own: T::Session,
    /// Each with the operation that is the first after it.
    tickets: VecDeque<(QuiesceTicket, u64)>,
}

impl<T: PlaneParts> LedgerSession<T> {
    /// A session that is being opened.
    pub fn new(
        (local, peer): (RegionId, PeerId),
        lens: [u64; 2],
        (opening, deadline): (T::Opening, Instant),
        own: T::Session,
    ) -> LedgerSession<T> {
        LedgerSession {
            local,
            peer,
            lens,
            phase: SessionPhase::Opening(opening),
            deadline,
            operations: BTreeMap::new(),
            own,
            tickets: VecDeque::new(),
        }
    }
}

/// An operation that is not over.
#[derive(Debug)]
pub struct LedgerOperation<T> {
    /// Which it was submitted to.
    pub session: SessionId,
    /// See [`PlaneParts::Operation`].
    pub own: T,
    region: RegionId,
    order: u64,
    /// The owner was told of its end.
    told: bool,
}

/// Everything that a data plane keeps for its owner, by the names that the owner gave.
pub struct PlaneLedger<T: PlaneParts> {
    /// Memory that is registered.
    pub regions: BTreeMap<RegionId, LedgerRegion<T::Region>>,
    /// Peers that the owner named.
    pub peers: BTreeMap<PeerId, T::Peer>,
    /// Sessions from `open` until they are closed and quiet.
    pub sessions: BTreeMap<SessionId, LedgerSession<T>>,
    /// Operations that are not over.
    pub operations: BTreeMap<OpId, LedgerOperation<T::Operation>>,
    /// What the owner is told when it polls.
    pub events: VecDeque<DataEvent>,
    /// Operations so far.
    order: u64,
}

impl<T: PlaneParts> Default for PlaneLedger<T> {
    fn default() -> Self {
        PlaneLedger {
            regions: BTreeMap::new(),
            peers: BTreeMap::new(),
            sessions: BTreeMap::new(),
            operations: BTreeMap::new(),
            events: VecDeque::new(),
            order: 0,
        }
    }
}

/// A refusal that names the offender.
///
/// # Errors
/// Always.
pub fn invalid<T>(why: impl Into<String>) -> Result<T, Refused> {
    Err(Refused::Invalid(why.into().into()))
}

/// What a poll at `now` answers if the plane has nothing to do before `deadline`.
pub fn next_poll(now: Nanos, deadline: Option<Instant>) -> NextPoll {
    match deadline {
        Some(at) => {
            let left = at.saturating_duration_since(Instant::now());
            NextPoll::At(now + Nanos(left.as_nanos() as u64))
        }
        None => NextPoll::External,
    }
}

/// Whether calls of the trait can be taken. An error is the refusal to answer with.
impl<T: PlaneParts> PlaneLedger<T> {
    /// Memory that begins at an address can be registered: somebody has vouched for that.
    pub fn check_register(
        &self,
        region: RegionId,
        memory: Memory,
        base: u64,
    ) -> Result<(), Refused> {
        if self.regions.contains_key(&region) {
            return invalid(format!("region {region} is registered already"));
        }
        if memory.is_empty() || base.checked_add(memory.len()).is_none() {
            return invalid(format!("region {region} of {} bytes at {base:#x}", memory.len()));
        }
        memory.unproven().map_or(Ok(()), invalid)
    }

    /// No operation uses a region.
    pub fn check_deregister(&self, region: RegionId) -> Result<(), Refused> {
        match self.regions.get(&region) {
            None => invalid(format!("region {region} is not registered")),
            Some(held) if held.operations > 0 => Err(Refused::Busy),
            Some(_) => Ok(()),
        }
    }

    /// A peer can be connected.
    pub fn check_connect(&self, peer: PeerId) -> Result<(), Refused> {
        match self.peers.contains_key(&peer) {
            true => invalid(format!("peer {peer} is connected already")),
            false => Ok(()),
        }
    }

    /// A session can be opened; its region and its peer.
    pub fn check_open(
        &self,
        session: SessionId,
        local: RegionId,
        peer: PeerId,
    ) -> Result<(&LedgerRegion<T::Region>, &T::Peer), Refused> {
        if self.sessions.contains_key(&session) {
            return invalid(format!("session {session} is open already"));
        }
        let Some(held) = self.regions.get(&local) else {
            return invalid(format!("region {local} is not registered"));
        };
        let Some(named) = self.peers.get(&peer) else {
            return invalid(format!("peer {peer} is not connected"));
        };
        Ok((held, named))
    }

    /// A batch can be submitted, as far as is known before its ranges are looked at; its session.
    pub fn check_submit(
        &self,
        batch: &Submit<'_>,
        slices_max: u32,
    ) -> Result<(&LedgerSession<T>, &T::Open), Refused> {
        let Some(session) = self.sessions.get(&batch.session) else { return Err(Refused::Gone) };
        let SessionPhase::Open(open) = &session.phase else { return Err(Refused::Gone) };
        let count = batch.len.len();
        if batch.local.len() != count || batch.remote.len() != count {
            let (local, remote) = (batch.local.len(), batch.remote.len());
            return invalid(format!(
                "lists of different length: {local} local, {remote} remote, {count} lengths"
            ));
        }
        if count > slices_max as usize {
            return invalid(format!("{count} slices, {slices_max} is the most"));
        }
        if self.operations.contains_key(&batch.op) {
            return invalid(format!("operation {} is in flight", batch.op));
        }
        Ok((session, open))
    }
}

impl<T: PlaneParts> PlaneLedger<T> {
    /// A batch was taken.
    pub fn submitted(&mut self, batch: &Submit<'_>, own: T::Operation) {
        let Some(session) = self.sessions.get_mut(&batch.session) else { return };
        let (region, order) = (session.local, self.order);
        self.order += 1;
        session.operations.insert(order, batch.op);
        if let Some(held) = self.regions.get_mut(&region) {
            held.operations += 1;
        }
        let session = batch.session;
        let entry = LedgerOperation { session, own, region, order, told: false };
        self.operations.insert(batch.op, entry);
    }

    /// Tells the owner of an operation's end, once; true if this was it.
    pub fn complete(&mut self, op: OpId, outcome: Completion) -> bool {
        let operation = self.operations.get_mut(&op);
        let is_first = operation.is_some_and(|known| !std::mem::replace(&mut known.told, true));
        if is_first {
            self.events.push_back(DataEvent::Completed { op, outcome });
        }
        is_first
    }

    /// An operation failed, of whose bytes nothing is known; as [`PlaneLedger::complete`].
    pub fn fail(&mut self, op: OpId, cause: FabricError) -> bool {
        self.complete(op, Completion::Failed { cause, landed: Landed::Unknown })
    }

    /// Nothing of an operation is under way any more.
    pub fn retire(&mut self, op: OpId) -> Option<LedgerOperation<T::Operation>> {
        let over = self.operations.remove(&op)?;
        if let Some(held) = self.regions.get_mut(&over.region) {
            held.operations -= 1;
        }
        if let Some(session) = self.sessions.get_mut(&over.session) {
            session.operations.remove(&over.order);
        }
        Some(over)
    }

    /// The operations of a session that are not over.
    pub fn operations_of(&self, session: SessionId) -> Vec<OpId> {
        let session = self.sessions.get(&session);
        session.map_or(Vec::new(), |session| session.operations.values().copied().collect())
    }

    /// The sessions of some kind.
    pub fn sessions_where(&self, which: impl Fn(&LedgerSession<T>) -> bool) -> Vec<SessionId> {
        let found = self.sessions.iter().filter(|(_, session)| which(session));
        found.map(|(id, _)| *id).collect()
    }

    /// Tells how an opening ended; false if nobody waits for that any more.
    pub fn opened(&mut self, id: SessionId, result: Result<T::Open, FabricError>) -> bool {
        let Some(session) = self.sessions.get_mut(&id) else { return false };
        if !session.phase.is_opening() {
            return false;
        }
        let (phase, result) = match result {
            Ok(open) => (SessionPhase::Open(open), Ok(())),
            Err(cause) => (SessionPhase::Dead, Err(cause)),
        };
        session.phase = phase;
        self.events.push_back(DataEvent::Opened { session: id, result });
        true
    }

    /// The sessions that are not open in time.
    pub fn late(&self, now: Instant) -> Vec<SessionId> {
        self.sessions_where(|session| session.phase.is_opening() && session.deadline <= now)
    }

    /// Until when sessions have to be open.
    pub fn deadlines(&self) -> impl Iterator<Item = Instant> {
        let opening = self.sessions.values().filter(|session| session.phase.is_opening());
        opening.map(|session| session.deadline)
    }

    /// Takes a ticket, which is to be settled; a session that is unknown is quiet.
    pub fn quiesce(&mut self, id: SessionId, ticket: QuiesceTicket) {
        match self.sessions.get_mut(&id) {
            None => self.events.push_back(DataEvent::Quiet { session: id, ticket }),
            Some(session) => session.tickets.push_back((ticket, self.order)),
        }
    }

    /// Answers the tickets of a session that have nothing to wait for. Forgets one that is closed
    /// and has no operations, and then is true.
    pub fn settle(&mut self, id: SessionId) -> bool {
        let Some(session) = self.sessions.get_mut(&id) else { return false };
        let first = session.operations.keys().next().copied().unwrap_or(u64::MAX);
        // Operations from `order` on came after the ticket.
        while let Some(&(ticket, order)) = session.tickets.front()
            && first >= order
        {
            session.tickets.pop_front();
            self.events.push_back(DataEvent::Quiet { session: id, ticket });
        }
        let is_over = session.phase.is_closing() && session.operations.is_empty();
        is_over && self.sessions.remove(&id).is_some()
    }

    /// Forgets all but what the owner is still to be told.
    pub fn clear(&mut self) {
        self.regions.clear();
        self.peers.clear();
        self.sessions.clear();
        self.operations.clear();
    }
}
