//! What an engine knows: its plane, regions, peers, sessions and the transfers under way.

use crate::audit::{AuditLog, AuditRecord};
use crate::fabric::CompatPlane;
use crate::status::{CompatFailure, CompatStatusCode, CompatTransferStatus};
use kvferry_engine::core::Nanos;
use kvferry_engine::fabric::{
    Completion, DataEvent, Direction, FabricError, Landed, NextPoll, OpId, PeerId, QuiesceTicket,
    Refused, RegionDesc, RegionId, SessionId, Submit,
};
use kvferry_faults::{FaultInjector, ReportFault};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// How long a late move waits for room in a full queue before it tries again.
const RETRY: Nanos = Nanos::from_ms(1);

#[derive(Debug)]
pub(crate) struct CompatRegion {
    pub(crate) base: u64,
    pub(crate) answer: Option<Result<RegionDesc, FabricError>>,
}

/// A registered engine of the other side.
#[derive(Debug)]
pub(crate) struct CompatPeer {
    pub(crate) id: PeerId,
    pub(crate) bytes: Arc<[u8]>,
}

#[derive(Debug)]
pub(crate) struct CompatSessionState {
    pub(crate) peer: PeerId,
    pub(crate) local: RegionId,
    pub(crate) answer: Option<Result<(), FabricError>>,
    /// Why it cannot be used any more.
    pub(crate) dead: Option<String>,
    /// A transfer of it failed, or a link with the peer ended: another session may do what this one
    /// cannot any more.
    pub(crate) is_stale: bool,
    pub(crate) busy: u32,
    /// Nobody can post on it any more: it is closed when it is not busy.
    pub(crate) orphan: bool,
}

/// One batch under way.
#[derive(Debug)]
pub(crate) struct CompatTransfer {
    pub(crate) status: Arc<CompatTransferStatus>,
    pub(crate) session: SessionId,
    /// Operations that are not complete, and one more while some are yet to be posted.
    pub(crate) outstanding: u32,
    pub(crate) failure: Option<CompatFailure>,
    /// Something of what failed may still land.
    pub(crate) needs_quiesce: bool,
    /// How its end is told, if a fault says so.
    pub(crate) tell: Option<ReportFault>,
    pub(crate) record: Option<AuditRecord>,
}

/// A transfer whose status can be settled, outside of all locks.
#[derive(Debug)]
pub(crate) struct FinishedTransfer {
    pub(crate) status: Arc<CompatTransferStatus>,
    pub(crate) verdict: Result<(), CompatFailure>,
    pub(crate) record: Option<AuditRecord>,
}

impl FinishedTransfer {
    pub(crate) fn settle(self, audit: Option<&AuditLog>) {
        let mut verdict = self.verdict;
        if let (Some(audit), Some(record)) = (audit, &self.record) {
            verdict = audit.write(record, &verdict).and(verdict);
        }
        self.status.settle(verdict);
    }
}

/// The slices of a batch; offsets and lengths in bytes.
#[derive(Clone, Debug)]
pub(crate) struct CompatBatch {
    pub(crate) session: SessionId,
    pub(crate) direction: Direction,
    pub(crate) local: Vec<u64>,
    pub(crate) remote: Vec<u64>,
    pub(crate) len: Vec<u64>,
}

/// What is to be done at a time.
#[derive(Debug)]
pub(crate) enum TimedAction {
    Tell(FinishedTransfer),
    /// Moves what was reported before.
    Move(CompatBatch),
}

/// Numbers that are given out.
#[derive(Debug, Default)]
pub(crate) struct IdCounter(u64);

impl IdCounter {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 += 1;
        self.0
    }
}

pub(crate) struct CompatState {
    /// None once the engine is closed.
    pub(crate) plane: Option<Box<dyn CompatPlane>>,
    pub(crate) faults: FaultInjector,
    pub(crate) regions: BTreeMap<RegionId, CompatRegion>,
    pub(crate) peers: BTreeMap<Arc<str>, CompatPeer>,
    pub(crate) sessions: HashMap<SessionId, CompatSessionState>,
    pub(crate) transfers: HashMap<u64, CompatTransfer>,
    pub(crate) ops: HashMap<OpId, u64>,
    pub(crate) ids: IdCounter,
    tickets: HashMap<QuiesceTicket, u64>,
    due: BTreeMap<(Nanos, u64), TimedAction>,
    events: Vec<DataEvent>,
}

impl CompatState {
    pub(crate) fn new(plane: Box<dyn CompatPlane>, faults: FaultInjector) -> CompatState {
        CompatState {
            plane: Some(plane),
            faults,
            regions: BTreeMap::new(),
            peers: BTreeMap::new(),
            sessions: HashMap::new(),
            transfers: HashMap::new(),
            ops: HashMap::new(),
            ids: IdCounter::default(),
            tickets: HashMap::new(),
            due: BTreeMap::new(),
            events: Vec::new(),
        }
    }

    pub(crate) fn at(&mut self, when: Nanos, due: TimedAction) {
        let serial = self.ids.next();
        self.due.insert((when, serial), due);
    }

    /// Polls the plane and does what is due. Tells when to come again, and whether anything
    /// changed that somebody could wait for.
    pub(crate) fn step(
        &mut self,
        now: Nanos,
        done: &mut Vec<FinishedTransfer>,
    ) -> (NextPoll, bool) {
        let Some(plane) = &mut self.plane else { return (NextPoll::External, false) };
        let mut events = std::mem::take(&mut self.events);
        let mut wake = plane.poll(now, &mut events);
        let changed = !events.is_empty();
        // Answering an event can call the plane, and what that does wakes nobody.
        let mut called = changed;
        for event in events.drain(..) {
            self.on_event(now, event, done);
        }
        self.events = events;
        while let Some(entry) = self.due.first_entry()
            && entry.key().0 <= now
        {
            called = true;
            match entry.remove() {
                TimedAction::Tell(finished) => done.push(finished),
                TimedAction::Move(batch) => self.move_late(now, batch),
            }
        }
        if called {
            wake = NextPoll::Ready;
        }
        if let Some(((due, _), _)) = self.due.first_key_value() {
            wake = match wake {
                NextPoll::Ready => NextPoll::Ready,
                NextPoll::At(at) => NextPoll::At(at.min(*due)),
                NextPoll::External => NextPoll::At(*due),
            };
        }
        (wake, changed)
    }

    fn on_event(&mut self, now: Nanos, event: DataEvent, done: &mut Vec<FinishedTransfer>) {
        match event {
            DataEvent::Registered { region, result } => {
                if let Some(region) = self.regions.get_mut(&region) {
                    region.answer = Some(result);
                }
            }
            DataEvent::Opened { session, result } => {
                if let Some(line) = self.sessions.get_mut(&session) {
                    line.answer = Some(result);
                }
            }
            DataEvent::Completed { op, outcome } => self.on_completed(now, op, outcome, done),
            DataEvent::Quiet { ticket, .. } => {
                if let Some(transfer) = self.tickets.remove(&ticket) {
                    self.finish(now, transfer, done);
                }
            }
            DataEvent::Reset { .. } => {
                self.kill(|_| true, "the fabric was rebuilt; register everything again");
                self.fail_all("the fabric was rebuilt", done);
            }
            // Operations fail one by one, and later submits are refused.
            DataEvent::PeerDown { peer } => {
                for line in self.sessions.values_mut().filter(|line| line.peer == peer) {
                    line.is_stale = true;
                }
            }
            _ => {}
        }
    }

    fn on_completed(
        &mut self,
        now: Nanos,
        op: OpId,
        outcome: Completion,
        done: &mut Vec<FinishedTransfer>,
    ) {
        let Some(key) = self.ops.remove(&op) else { return };
        let Some(transfer) = self.transfers.get_mut(&key) else { return };
        if let Completion::Failed { cause, landed } = outcome {
            transfer.needs_quiesce |= landed == Landed::Unknown;
            if let Some(line) = self.sessions.get_mut(&transfer.session) {
                line.is_stale = true;
            }
            let failure = || CompatFailure::new(CompatStatusCode::RdmaOp, cause.to_string());
            transfer.failure.get_or_insert_with(failure);
        }
        self.release(now, key, 1, done);
    }

    /// Takes back `count` of what a transfer waits for; at none it ends, as soon as it is quiet.
    pub(crate) fn release(
        &mut self,
        now: Nanos,
        key: u64,
        count: u32,
        done: &mut Vec<FinishedTransfer>,
    ) {
        let Some(transfer) = self.transfers.get_mut(&key) else { return };
        transfer.outstanding -= count;
        if transfer.outstanding > 0 {
            return;
        }
        match &mut self.plane {
            Some(plane) if transfer.needs_quiesce => {
                let ticket = QuiesceTicket(self.ids.next());
                plane.quiesce(transfer.session, ticket);
                self.tickets.insert(ticket, key);
            }
            _ => self.finish(now, key, done),
        }
    }

    fn finish(&mut self, now: Nanos, key: u64, done: &mut Vec<FinishedTransfer>) {
        let Some(transfer) = self.transfers.remove(&key) else { return };
        self.idle(transfer.session);
        let verdict = match (transfer.failure, transfer.tell) {
            (Some(failure), _) => Err(failure),
            (None, Some(ReportFault::AsFailed)) => Err(injected("acknowledgement lost")),
            (None, _) => Ok(()),
        };
        let finished =
            FinishedTransfer { status: transfer.status, verdict, record: transfer.record };
        match transfer.tell {
            Some(ReportFault::Never) => {}
            Some(ReportFault::Late(by)) => self.at(now + by, TimedAction::Tell(finished)),
            None | Some(ReportFault::AsFailed) => done.push(finished),
        }
    }

    /// A session has one transfer less.
    fn idle(&mut self, session: SessionId) {
        if let Some(line) = self.sessions.get_mut(&session) {
            line.busy -= 1;
            if line.orphan && line.busy == 0 {
                self.close(session);
            }
        }
    }

    /// Nobody posts on a session any more.
    pub(crate) fn abandon(&mut self, session: SessionId) {
        if let Some(line) = self.sessions.get_mut(&session) {
            line.orphan = true;
            if line.busy == 0 {
                self.close(session);
            }
        }
    }

    pub(crate) fn close(&mut self, session: SessionId) {
        let line = self.sessions.remove(&session);
        if let (Some(plane), Some(CompatSessionState { dead: None, .. })) = (&mut self.plane, line)
        {
            plane.close(session);
        }
    }

    /// Ends some sessions; their operations fail one by one.
    pub(crate) fn kill(&mut self, which: impl Fn(&CompatSessionState) -> bool, why: &str) {
        for (session, line) in &mut self.sessions {
            if line.dead.is_none() && which(line) {
                line.dead = Some(why.into());
                if let Some(plane) = &mut self.plane {
                    plane.close(*session);
                }
            }
        }
    }

    /// Ends the sessions with a peer, and lets it in no more.
    pub(crate) fn forget(&mut self, peer: PeerId, why: &str) {
        self.kill(|line| line.peer == peer, why);
        if let Some(plane) = &mut self.plane {
            plane.disconnect(peer);
        }
    }

    /// Everything under way fails, without a word from the plane.
    pub(crate) fn fail_all(&mut self, why: &str, done: &mut Vec<FinishedTransfer>) {
        self.ops.clear();
        self.tickets.clear();
        for (_, transfer) in self.transfers.drain() {
            let verdict = Err(CompatFailure::new(CompatStatusCode::BadState, why));
            done.push(FinishedTransfer {
                status: transfer.status,
                verdict,
                record: transfer.record,
            });
        }
        for line in self.sessions.values_mut() {
            line.busy = 0;
        }
    }

    /// Moves a batch whose end was told before; nobody hears of it any more.
    fn move_late(&mut self, now: Nanos, mut batch: CompatBatch) {
        let Some(plane) = &mut self.plane else { return };
        let most = plane.caps().slices_max as usize;
        while !batch.len.is_empty() {
            let count = batch.len.len().min(most);
            let op = OpId(self.ids.next());
            match plane.submit(batch.part(op, 0..count)) {
                Ok(()) => {}
                Err(Refused::Busy) => return self.at(now + RETRY, TimedAction::Move(batch)),
                Err(_) => return,
            }
            for list in [&mut batch.local, &mut batch.remote, &mut batch.len] {
                list.drain(..count);
            }
        }
    }
}

impl CompatBatch {
    /// Some of its slices as one operation.
    pub(crate) fn part(&self, op: OpId, range: std::ops::Range<usize>) -> Submit<'_> {
        Submit {
            op,
            session: self.session,
            direction: self.direction,
            local: &self.local[range.clone()],
            remote: &self.remote[range.clone()],
            len: &self.len[range],
        }
    }
}

/// A failure that a fault file asked for.
pub(crate) fn injected(what: &str) -> CompatFailure {
    CompatFailure::new(CompatStatusCode::RdmaOp, format!("{what} (injected by KVFERRY_FAULTS)"))
}
