//! What the threads tell, and what the clock does.

use super::{MoriParts, MoriPlane};
use crate::MoriBackend;
use crate::address::MoriRegionDescriptor;
use crate::engine_thread::{MoriEngineCommand, MoriSessionTarget};
use crate::event_queue::{MoriBatchOutcome, MoriWorkerEvent};
use crate::link::{MoriGrantResult, MoriLinkEvent};
use kvferry_engine::fabric::{
    Completion, DataEvent, FabricError, OpId, PeerId, RegionDesc, RegionId, SessionId,
};
use kvferry_fabric_common::{LedgerSession, SessionPhase};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

impl MoriPlane {
    pub(super) fn take_worker_events(&mut self) {
        let mut news = std::mem::take(&mut self.news);
        self.common.board.take(&mut news);
        for news in news.drain(..) {
            match news {
                MoriWorkerEvent::Registered { region, result } => self.registered(region, result),
                MoriWorkerEvent::Opened { session, result } => self.connected(session, result),
                MoriWorkerEvent::Ended { op, end } => self.ended(op, end),
                MoriWorkerEvent::Line(MoriLinkEvent::Told { session, answer }) => {
                    self.grant_received(session, answer)
                }
                MoriWorkerEvent::Line(MoriLinkEvent::Over { peer, line, why }) => {
                    self.link_closed(peer, line, &why)
                }
                MoriWorkerEvent::Rebuilt { again } => self.rebuilt(&again),
                MoriWorkerEvent::PeerLeft => self.complete_left_fences(),
                // Said to the thread that posts, unless there is none any more.
                MoriWorkerEvent::Line(MoriLinkEvent::Leave(..)) => {}
                MoriWorkerEvent::Closed { sessions } => self.closed_by_peer(&sessions),
                MoriWorkerEvent::Broken { why, quiet } => self.broken(&why, quiet),
            }
        }
        self.news = news;
        self.advance();
    }

    fn registered(&mut self, region: RegionId, result: Result<Vec<u8>, FabricError>) {
        // Not if it was deregistered, or a reset came between; or if one will, after which all is
        // registered anew.
        let is_void = result.is_err() && self.broken.is_some();
        if self.ledger.regions.contains_key(&region) && !is_void {
            if result.is_err() {
                self.ledger.regions.remove(&region);
            }
            let result = result.map(|desc| RegionDesc(desc.into()));
            self.ledger.events.push_back(DataEvent::Registered { region, result });
        }
    }

    /// What the acceptor says: the descriptors with which MoRI can open the session.
    pub(super) fn grant_received(&mut self, id: SessionId, answer: MoriGrantResult) {
        if self.recovery.is_draining() {
            return self.deferred_grants.push((id, answer));
        }
        let Some(session) = self.ledger.sessions.get_mut(&id) else { return };
        if !session.phase.is_opening() && session.own.reopening.is_none() {
            return;
        }
        match answer {
            Ok(grant) => {
                let claim = MoriRegionDescriptor::decode(&grant.memory);
                if claim.is_none_or(|claim| claim.len != session.lens[1]) {
                    let why = "the peer's acceptor tells of a region of another length";
                    return self.turned_away(id, FabricError::Backend(why.into()));
                }
                let line = self.ledger.peers.get(&session.peer).and_then(|peer| peer.link.as_ref());
                let line = line.map(|line| line.id);
                session.own.link = line;
                let remote = MoriSessionTarget { region: session.local, grant, link: line };
                self.tell(MoriEngineCommand::Open { session: id, remote });
            }
            Err(why) => {
                let why = format!("the peer's acceptor: {why}");
                self.turned_away(id, FabricError::Backend(why.into()));
            }
        }
    }

    /// The peer does not want this session.
    fn turned_away(&mut self, id: SessionId, cause: FabricError) {
        match self.ledger.sessions.get(&id) {
            Some(session) if session.own.reopening.is_some() => self.abandon_session(id, &cause),
            _ => self.opened(id, Err(cause)),
        }
    }

    pub(super) fn opened(&mut self, id: SessionId, result: Result<(), FabricError>) {
        let failed = result.as_ref().err().cloned();
        if self.ledger.opened(id, result) {
            let peer = self.ledger.sessions.get(&id).map(|session| session.peer.0);
            tracing::debug!(session = id.0, peer, ?failed, "a session was opened");
        }
    }

    fn ended(&mut self, op: OpId, end: MoriBatchOutcome) {
        let Some(operation) = self.ledger.operations.get(&op) else { return };
        let (session, bytes) = (operation.session, operation.own.bytes);
        match end {
            MoriBatchOutcome::Done if self.is_into_the_void(session) => {
                self.fail(op, &FabricError::PeerGone);
            }
            MoriBatchOutcome::Done => {
                self.common.counts.operations.add(1);
                self.common.counts.bytes.add(bytes);
                self.ledger.complete(op, Completion::Done);
            }
            MoriBatchOutcome::Failed(cause) => {
                self.fail(op, &cause);
                self.retire_operation(op);
                return self.suspect(session);
            }
            MoriBatchOutcome::Unposted(cause) => self.fail(op, &cause),
        }
        self.retire_operation(op);
        self.settle(session);
    }

    /// True if the peer is gone, whose memory stays mapped by xGMI: what is written there nobody
    /// sees.
    fn is_into_the_void(&self, session: SessionId) -> bool {
        let Some(session) = self.ledger.sessions.get(&session) else { return false };
        let Some(asked) = &session.own.link else { return false };
        let Some(peer) = self.ledger.peers.get(&session.peer) else { return false };
        let is_gone = || match &peer.link {
            Some(line) => line.id != *asked || line.is_closed(),
            None => true,
        };
        self.common.config.backend == MoriBackend::Xgmi && is_gone()
    }

    pub(super) fn fail(&mut self, op: OpId, cause: &FabricError) {
        let is_first = self.ledger.fail(op, cause.clone());
        self.common.counts.failed.add(u64::from(is_first));
    }

    pub(super) fn fail_all(&mut self, id: SessionId, cause: &FabricError) {
        for op in self.ledger.operations_of(id) {
            self.fail(op, cause);
        }
    }

    /// MoRI has nothing of an operation any more.
    pub(super) fn retire_operation(&mut self, op: OpId) {
        let Some(over) = self.ledger.retire(op) else { return };
        if let Some(session) = self.ledger.sessions.get(&over.session)
            && let Some(peer) = self.ledger.peers.get_mut(&session.peer)
        {
            peer.ranges -= over.own.ranges;
        }
    }

    /// After a failure of one session nothing with that peer can be trusted: MoRI's queue pairs are
    /// the same for all, and stay dead.
    pub(super) fn suspect(&mut self, id: SessionId) {
        let Some(session) = self.ledger.sessions.get_mut(&id) else { return };
        session.own.tainted = true;
        let peer = session.peer;
        tracing::debug!(
            session = id.0,
            peer = peer.0,
            "an operation failed, and with it the peer's sessions"
        );
        self.end_sessions(peer, &FabricError::QueuePair, |_| true);
        self.start_recovery();
    }

    /// Ends the sessions of some kind with a peer. True if MoRI has something of them.
    fn end_sessions(
        &mut self,
        peer: PeerId,
        cause: &FabricError,
        which: impl Fn(&LedgerSession<MoriParts>) -> bool,
    ) -> bool {
        let mut under_way = false;
        for id in self.ledger.sessions_where(|session| session.peer == peer && which(session)) {
            self.opened(id, Err(cause.clone()));
            under_way |= self.kill(id, cause);
        }
        under_way
    }

    /// Nothing of these is under way any more.
    fn closed_by_peer(&mut self, sessions: &BTreeSet<SessionId>) {
        for id in sessions {
            self.opened(*id, Err(FabricError::RemoteAccess));
            if let Some(session) = self.ledger.sessions.get_mut(id) {
                session.phase.end();
            }
        }
    }

    /// Fails the operations of a session, which takes no more. True if MoRI has something of it.
    pub(super) fn kill(&mut self, id: SessionId, cause: &FabricError) -> bool {
        let Some(session) = self.ledger.sessions.get_mut(&id) else { return false };
        if session.own.reopening.is_some() {
            self.abandon_session(id, cause);
            return false;
        }
        session.phase.end();
        session.own.tainted |= !session.operations.is_empty();
        let tainted = session.own.tainted;
        self.fail_all(id, cause);
        tainted
    }

    fn link_closed(&mut self, id: PeerId, line: u64, why: &str) {
        let Some(peer) = self.ledger.peers.get_mut(&id) else { return };
        let is_last = peer.link.take_if(|its| its.id == line).is_some();
        // Those that wait for its answer have no line yet.
        let its = |session: &LedgerSession<MoriParts>| match session.own.link {
            Some(its) => its == line,
            None => is_last,
        };
        let cause = FabricError::Backend(format!("the peer's acceptor: {why}").into());
        self.end_sessions(id, &cause, |session| its(session) && session.phase.is_opening());
        if self.end_sessions(id, &FabricError::PeerGone, its) {
            self.start_recovery();
        }
        if is_last {
            self.ledger.events.push_back(DataEvent::PeerDown { peer: id });
        }
    }

    /// Ends a session at the owner's wish.
    pub(super) fn shut(&mut self, id: SessionId) {
        let Some(session) = self.ledger.sessions.get_mut(&id) else { return };
        session.phase = SessionPhase::Closing;
        match session.own.reopening {
            Some(_) => self.abandon_session(id, &FabricError::Closed),
            None => self.fail_all(id, &FabricError::Closed),
        }
        self.settle(id);
    }

    /// Answers the tickets of a session that have nothing to wait for, and forgets a closed one.
    pub(super) fn settle(&mut self, id: SessionId) {
        let is_tainted = self.ledger.sessions.get(&id).is_none_or(|session| session.own.tainted);
        if !is_tainted && self.ledger.settle(id) {
            self.tell(MoriEngineCommand::Close { session: id });
        }
    }

    /// Has the clock looked at no later than then.
    pub(super) fn check_by(&mut self, then: Instant) {
        self.check_at = Some(self.check_at.map_or(then, |at| at.min(then)));
    }

    /// Ends what took too long.
    pub(super) fn check_deadlines(&mut self) {
        let now = Instant::now();
        if self.check_at.is_none_or(|at| now < at) {
            return;
        }
        self.keep_reopening(now);
        // What waits for a session to be opened anew has the time of that.
        let goes_on = |id: &SessionId| {
            let session = self.ledger.sessions.get(id).map(|session| &session.own);
            session.is_some_and(|own| !own.tainted && own.reopening.is_none())
        };
        let operations = self.ledger.operations.iter();
        let late: Vec<_> = operations
            .filter(|(_, operation)| operation.own.deadline <= now && goes_on(&operation.session))
            .map(|(op, operation)| (*op, operation.session))
            .collect();
        for (op, session) in late {
            self.fail(op, &FabricError::AckTimeout);
            self.suspect(session);
        }
        for session in self.ledger.late(now) {
            self.opened(session, Err(FabricError::Unreachable));
        }
        self.advance();
        self.check_at = self.next_deadline(now);
    }

    fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let operations = self.ledger.operations.values().map(|operation| operation.own.deadline);
        let opening = self.ledger.deadlines();
        let reopening = self.ledger.sessions.values().filter_map(|session| session.own.reopening);
        let reopening = reopening.flat_map(|it| [Some(it.until), it.again].into_iter().flatten());
        let later = |at: &Instant| *at > now;
        operations.chain(opening).chain(reopening).chain(self.recovery.until()).filter(later).min()
    }

    /// Operations that were posted anew have their time from now on.
    pub(super) fn prolong(&mut self, ops: &[OpId]) {
        let patience = Duration::from_millis(self.common.config.operation_ms.into());
        let deadline = Instant::now() + patience;
        for op in ops {
            if let Some(operation) = self.ledger.operations.get_mut(op) {
                operation.own.deadline = deadline;
            }
        }
        self.check_by(deadline);
    }
}
