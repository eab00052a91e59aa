//! A data plane that has faults: what tests of a deployment inject.

use crate::error::ScenarioError;
use crate::injector::{FaultInjector, InjectedEffect, ReportFault};
use crate::lists::FaultKind;
use kvferry_engine::core::Nanos;
use kvferry_engine::fabric::{
    Address, Caps, Completion, DataEvent, DataPlane, DigestBatch, Direction, FabricError, Landed,
    Memory, NextPoll, OpId, PeerId, QuiesceTicket, Refused, RegionDesc, RegionId, SessionId,
    Submit,
};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::task::Waker;

/// A batch that moves though it was reported as failed.
#[derive(Debug)]
struct LateBatch {
    session: SessionId,
    direction: Direction,
    local: Vec<u64>,
    remote: Vec<u64>,
    len: Vec<u64>,
}

#[derive(Debug)]
enum DelayedAction {
    Report(DataEvent),
    Move(LateBatch),
}

/// The plane below and what is done to it.
pub struct FaultyDataPlane {
    plane: Box<dyn DataPlane>,
    faults: FaultInjector,
    /// As of the last poll.
    now: Nanos,
    completion_faults: BTreeMap<OpId, ReportFault>,
    delayed: BTreeMap<(Nanos, u64), DelayedAction>,
    serial: u64,
    events: Vec<DataEvent>,
    /// Late moves that were posted; nobody hears of their end.
    silent: BTreeSet<OpId>,
    /// Tickets that wait for late moves of their session.
    tickets: Vec<(SessionId, QuiesceTicket)>,
    /// Sessions whose queue pair is in its error state.
    broken: BTreeSet<SessionId>,
}

fn failed(cause: FabricError, landed: Landed) -> Completion {
    Completion::Failed { cause, landed }
}

impl FaultyDataPlane {
    /// The plane with the faults of a file.
    ///
    /// # Errors
    /// With file, line, what cannot be injected and what can.
    pub fn load(plane: Box<dyn DataPlane>, file: &Path) -> Result<FaultyDataPlane, ScenarioError> {
        // Bytes of a plane are there when their operation is done, so no notice overtakes them.
        let kinds = FaultInjector::KINDS.into_iter();
        let kinds: Vec<_> = kinds.filter(|kind| *kind != FaultKind::NotifyOvertakes).collect();
        Ok(FaultyDataPlane {
            plane,
            faults: FaultInjector::load(file, &kinds)?,
            now: Nanos::ZERO,
            completion_faults: BTreeMap::new(),
            delayed: BTreeMap::new(),
            serial: 0,
            events: Vec::new(),
            silent: BTreeSet::new(),
            tickets: Vec::new(),
            broken: BTreeSet::new(),
        })
    }

    fn at(&mut self, when: Nanos, due: DelayedAction) {
        self.serial += 1;
        self.delayed.insert((when, self.serial), due);
    }

    /// An operation that never gets to the plane.
    fn end(&mut self, op: OpId, outcome: Completion) -> Result<(), Refused> {
        self.events.push(DataEvent::Completed { op, outcome });
        Ok(())
    }

    fn moves_late(&self, session: SessionId) -> bool {
        let of = |due: &DelayedAction| matches!(due, DelayedAction::Move(late) if late.session == session);
        self.delayed.values().any(of)
    }

    fn post_late(&mut self, late: &LateBatch) {
        self.serial += 1;
        // The owner counts from the other end.
        let op = OpId(u64::MAX - self.serial);
        let LateBatch { session, direction, local, remote, len } = late;
        let (session, direction) = (*session, *direction);
        // A session that is gone moves nothing, which is what a fault may do as well.
        if self.plane.submit(Submit { op, session, direction, local, remote, len }).is_ok() {
            self.silent.insert(op);
        }
        if !self.moves_late(session) {
            self.ask_for_quiet(session);
        }
    }

    /// Passes on the tickets of a session of which nothing moves late any more.
    fn ask_for_quiet(&mut self, session: SessionId) {
        let plane = &mut self.plane;
        self.tickets.retain(|(of, ticket)| {
            if *of == session {
                plane.quiesce(session, *ticket);
            }
            *of != session
        });
    }

    fn filter_event(&mut self, event: DataEvent, out: &mut Vec<DataEvent>) {
        let DataEvent::Completed { op, outcome } = &event else { return out.push(event) };
        let op = *op;
        if self.silent.remove(&op) {
            return;
        }
        match self.completion_faults.remove(&op) {
            Some(ReportFault::Never) => {}
            Some(ReportFault::Late(by)) => self.at(self.now + by, DelayedAction::Report(event)),
            Some(ReportFault::AsFailed) if *outcome == Completion::Done => {
                let outcome = failed(FabricError::AckTimeout, Landed::Unknown);
                out.push(DataEvent::Completed { op, outcome });
            }
            _ => out.push(event),
        }
    }
}

impl DataPlane for FaultyDataPlane {
    fn caps(&self) -> Caps {
        self.plane.caps()
    }

    fn address(&self) -> Address {
        self.plane.address()
    }

    fn register(&mut self, region: RegionId, memory: Memory) -> Result<(), Refused> {
        self.plane.register(region, memory)
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), Refused> {
        self.plane.deregister(region)
    }

    fn connect(&mut self, peer: PeerId, address: &Address, fence_key: u64) -> Result<(), Refused> {
        self.plane.connect(peer, address, fence_key)
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.plane.disconnect(peer);
    }

    fn open(
        &mut self,
        session: SessionId,
        local: RegionId,
        peer: PeerId,
        remote: &RegionDesc,
    ) -> Result<(), Refused> {
        self.plane.open(session, local, peer, remote)
    }

    fn close(&mut self, session: SessionId) {
        self.delayed
            .retain(|_, due| !matches!(due, DelayedAction::Move(late) if late.session == session));
        self.broken.remove(&session);
        self.plane.close(session);
        self.ask_for_quiet(session);
    }

    fn submit(&mut self, batch: Submit<'_>) -> Result<(), Refused> {
        if self.broken.contains(&batch.session) {
            return Err(Refused::Gone);
        }
        if self.faults.queue_full(self.now) {
            return Err(Refused::Busy);
        }
        let (op, session) = (batch.op, batch.session);
        let tell = match self.faults.posted(self.now) {
            None => return self.plane.submit(batch),
            Some(InjectedEffect::Reported(fault)) => fault,
            Some(InjectedEffect::Fails) => {
                return self.end(op, failed(FabricError::Backend("injected".into()), Landed::None));
            }
            Some(InjectedEffect::KillsPeer) => {
                self.broken.insert(session);
                return self.end(op, failed(FabricError::QueuePair, Landed::Unknown));
            }
            Some(InjectedEffect::FailsAndMoves(by)) => {
                let (local, remote) = (batch.local.into(), batch.remote.into());
                let (direction, len) = (batch.direction, batch.len.into());
                let late = LateBatch { session, direction, local, remote, len };
                self.at(self.now + by, DelayedAction::Move(late));
                return self.end(op, failed(FabricError::AckTimeout, Landed::Unknown));
            }
            Some(InjectedEffect::NoCopy) => return self.end(op, Completion::Done),
            Some(InjectedEffect::MovedLate(_)) => unreachable!("it is not loaded"),
        };
        self.plane.submit(batch)?;
        self.completion_faults.insert(op, tell);
        Ok(())
    }

    fn digests(&self) -> bool {
        self.plane.digests()
    }

    fn digest(&mut self, batch: DigestBatch) -> Result<(), Refused> {
        self.plane.digest(batch)
    }

    fn quiesce(&mut self, session: SessionId, ticket: QuiesceTicket) {
        if self.moves_late(session) {
            self.tickets.push((session, ticket));
        } else {
            self.plane.quiesce(session, ticket);
        }
    }

    fn fence(&mut self, peer: PeerId) {
        self.plane.fence(peer);
    }

    fn set_waker(&mut self, waker: Waker) {
        self.plane.set_waker(waker);
    }

    fn doorbell(&mut self) -> Option<BorrowedFd<'_>> {
        self.plane.doorbell()
    }

    fn poll(&mut self, now: Nanos, out: &mut Vec<DataEvent>) -> NextPoll {
        self.now = now;
        let mut events = std::mem::take(&mut self.events);
        let wake = self.plane.poll(now, &mut events);
        for event in events.drain(..) {
            self.filter_event(event, out);
        }
        self.events = events;
        let mut called = false;
        while let Some(entry) = self.delayed.first_entry()
            && entry.key().0 <= now
        {
            match entry.remove() {
                DelayedAction::Report(event) => out.push(event),
                DelayedAction::Move(late) => {
                    called = true;
                    self.post_late(&late);
                }
            }
        }
        let due = self.delayed.first_key_value().map(|((at, _), _)| *at);
        match (wake, due) {
            _ if called => NextPoll::Ready,
            (NextPoll::External, Some(at)) => NextPoll::At(at),
            (NextPoll::At(first), Some(at)) => NextPoll::At(first.min(at)),
            (wake, _) => wake,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_fabric_host::{HostConfig, HostPlane, HugePages, MemfdPool};
    use std::time::{Duration, Instant};

    const LEN: u64 = 4_096;
    const SESSION: SessionId = SessionId(1);

    /// A plane with faults, one that it writes to, and their memory.
    struct FaultyPair {
        from: FaultyDataPlane,
        to: HostPlane,
        pools: [MemfdPool; 2],
        begun: Instant,
        ops: u64,
    }

    fn plane(pool: &MemfdPool) -> (HostPlane, RegionDesc) {
        let config = HostConfig { open_door: true, ..HostConfig::default() };
        let mut plane = HostPlane::new(config).expect("a plane at loopback");
        plane.register(RegionId(1), pool.memory()).expect("a pool registers");
        let mut events = Vec::new();
        plane.poll(Nanos::ZERO, &mut events);
        match events.pop() {
            Some(DataEvent::Registered { result: Ok(desc), .. }) => (plane, desc),
            other => panic!("{other:?}"),
        }
    }

    impl FaultyPair {
        fn new(faults: &str) -> FaultyPair {
            let folder = std::env::temp_dir();
            let (process, thread) = (std::process::id(), std::thread::current().id());
            let name = format!("kvferry-drill-{process}-{thread:?}.toml");
            let file = folder.join(name);
            std::fs::write(&file, faults).expect("a file");
            let pools = [(), ()].map(|()| MemfdPool::new(LEN, HugePages::No).expect("a pool"));
            // SAFETY: The whole pool, which nobody else knows yet.
            unsafe { std::ptr::write_bytes(pools[0].start(), 7, LEN as usize) };
            let (mut from, _) = plane(&pools[0]);
            let (to, desc) = plane(&pools[1]);
            from.connect(PeerId(1), &to.address(), 0).expect("a peer");
            from.open(SESSION, RegionId(1), PeerId(1), &desc).expect("an open is taken");
            let from = FaultyDataPlane::load(Box::new(from), &file);
            let from = from.unwrap_or_else(|why| panic!("{why}"));
            let _ = std::fs::remove_file(file);
            let mut pair = FaultyPair { from, to, pools, begun: Instant::now(), ops: 0 };
            let opened = DataEvent::Opened { session: SESSION, result: Ok(()) };
            assert_eq!(pair.next(), opened);
            pair
        }

        fn next(&mut self) -> DataEvent {
            let mut events = Vec::new();
            while events.is_empty() {
                assert!(self.begun.elapsed() < Duration::from_secs(300), "no event");
                self.from.poll(Nanos(self.begun.elapsed().as_nanos() as u64), &mut events);
                self.to.poll(Nanos::ZERO, &mut Vec::new());
                std::thread::yield_now();
            }
            assert_eq!(events.len(), 1, "{events:?}");
            events.remove(0)
        }

        fn post(&mut self) -> Result<(), Refused> {
            self.ops += 1;
            let (op, direction) = (OpId(self.ops), Direction::Write);
            let (at, len) = (&[0], &[LEN]);
            self.from.submit(Submit { op, session: SESSION, direction, local: at, remote: at, len })
        }

        /// Outcome of a write.
        fn write(&mut self) -> Completion {
            self.post().expect("it is taken");
            match self.next() {
                DataEvent::Completed { op, outcome } if op.0 == self.ops => outcome,
                other => panic!("{other:?}"),
            }
        }

        fn quiet(&mut self) {
            self.from.quiesce(SESSION, QuiesceTicket(9));
            assert_eq!(
                self.next(),
                DataEvent::Quiet { session: SESSION, ticket: QuiesceTicket(9) }
            );
        }

        fn has_landed(&self) -> bool {
            // SAFETY: Inside the pool; nothing of it is under way.
            unsafe { *self.pools[1].start() == 7 }
        }
    }

    fn fault(kind: &str, more: &str) -> String {
        format!("[[fault]]\nkind = \"fabric.{kind}\"\non = {{ event = \"op.posted\" }}\n{more}")
    }

    #[test]
    fn what_is_reported_is_not_what_moved() {
        let mut pair = FaultyPair::new(&fault("no_copy", ""));
        assert_eq!(pair.write(), Completion::Done);
        assert!(!pair.has_landed());
        assert_eq!(pair.write(), Completion::Done);
        assert!(pair.has_landed());
        let mut pair = FaultyPair::new(&fault("ack_lost", ""));
        assert_eq!(pair.write(), failed(FabricError::AckTimeout, Landed::Unknown));
        assert!(pair.has_landed());
    }

    #[test]
    fn operations_fail_and_queues_are_full_for_a_while() {
        let mut pair = FaultyPair::new(&fault("sibling_failure", ""));
        assert!(matches!(pair.write(), Completion::Failed { landed: Landed::None, .. }));
        assert!(!pair.has_landed());
        let mut pair = FaultyPair::new(&fault("queue_full", "lasts = \"60s\"\n"));
        assert_eq!(pair.write(), Completion::Done);
        assert_eq!(pair.post(), Err(Refused::Busy));
        pair.from.poll(Nanos::from_secs(99), &mut Vec::new());
        assert_eq!(pair.write(), Completion::Done);
    }

    #[test]
    fn a_broken_queue_pair_is_gone_until_it_is_opened_again() {
        let mut pair = FaultyPair::new(&fault("qp_error", ""));
        assert_eq!(pair.write(), failed(FabricError::QueuePair, Landed::Unknown));
        assert_eq!(pair.post(), Err(Refused::Gone));
        pair.quiet();
        assert!(!pair.has_landed());
        pair.from.close(SESSION);
        assert!(!pair.from.broken.contains(&SESSION));
    }

    #[test]
    fn what_lands_late_is_waited_for_by_a_quiesce() {
        let mut pair = FaultyPair::new(&fault("late_landing", "delay = \"20ms\"\n"));
        assert_eq!(pair.write(), failed(FabricError::AckTimeout, Landed::Unknown));
        assert!(!pair.has_landed());
        pair.quiet();
        assert!(pair.has_landed());
    }

    #[test]
    fn completions_come_late_or_never() {
        let mut pair = FaultyPair::new(&fault("reorder", "delay = \"20ms\"\n"));
        pair.post().expect("it is taken");
        assert_eq!(pair.write(), Completion::Done);
        assert_eq!(pair.next(), DataEvent::Completed { op: OpId(1), outcome: Completion::Done });
        let mut pair = FaultyPair::new(&fault("completion_lost", ""));
        pair.post().expect("it is taken");
        pair.quiet();
        assert!(pair.has_landed());
        assert_eq!(pair.write(), Completion::Done);
    }
}
