//! What the threads tell, and what the clock does.

use super::{MoriPlane, MoriSession, MoriSessionPhase};
use crate::MoriBackend;
use crate::address::MoriRegionDescriptor;
use crate::engine_thread::{MoriEngineCommand, MoriSessionTarget};
use crate::event_queue::{MoriBatchOutcome, MoriWorkerEvent};
use crate::link::{MoriGrantResult, MoriLinkEvent};
use kvferry_engine::fabric::{
    Completion, DataEvent, FabricError, Landed, OpId, PeerId, RegionDesc, RegionId, SessionId,
};
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
        if self.regions.contains_key(&region) && !is_void {
            if result.is_err() {
                self.regions.remove(&region);
            }
            let result = result.map(|desc| RegionDesc(desc.into()));
            self.events.push_back(DataEvent::Registered { region, result });
        }
    }

    /// What the door says: the descriptors with which MoRI can open the session.
    pub(super) fn grant_received(&mut self, id: SessionId, answer: MoriGrantResult) {
        if self.recovery.is_draining() {
            return self.deferred_grants.push((id, answer));
        }
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if !matches!(session.phase, MoriSessionPhase::Opening(_)) && session.reopening.is_none() {
            return;
        }
        match answer {
            Ok(grant) => {
                let claim = MoriRegionDescriptor::decode(&grant.memory);
                if claim.is_none_or(|claim| claim.len != session.lens[1]) {
                    let why = "the peer's door tells of a region of another length";
                    return self.turned_away(id, FabricError::Backend(why.into()));
                }
                let line = self.peers.get(&session.peer).and_then(|peer| peer.link.as_ref());
                let line = line.map(|line| line.id);
                session.link = line;
                let remote = MoriSessionTarget { region: session.local, grant, link: line };
                self.tell(MoriEngineCommand::Open { session: id, remote });
            }
            Err(why) => {
                let why = format!("the peer's door: {why}");
                self.turned_away(id, FabricError::Backend(why.into()));
            }
        }
    }

    /// The peer does not want this session.
    fn turned_away(&mut self, id: SessionId, cause: FabricError) {
        match self.sessions.get(&id).is_some_and(|session| session.reopening.is_some()) {
            true => self.abandon_session(id, &cause),
            false => self.opened(id, Err(cause)),
        }
    }

    pub(super) fn opened(&mut self, id: SessionId, result: Result<(), FabricError>) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if matches!(session.phase, MoriSessionPhase::Opening(_)) {
            session.phase =
                if result.is_ok() { MoriSessionPhase::Open } else { MoriSessionPhase::Dead };
            let (peer, failed) = (session.peer, result.as_ref().err());
            tracing::debug!(session = id.0, peer = peer.0, ?failed, "a session was opened");
            self.events.push_back(DataEvent::Opened { session: id, result });
        }
    }

    fn ended(&mut self, op: OpId, end: MoriBatchOutcome) {
        let Some(operation) = self.operations.get(&op) else { return };
        let (session, bytes) = (operation.session, operation.bytes);
        match end {
            MoriBatchOutcome::Done if self.is_into_the_void(session) => {
                self.fail(op, &FabricError::PeerGone);
                self.retire_operation(op);
                self.settle(session);
            }
            MoriBatchOutcome::Done => {
                self.common.counts.operations.add(1);
                self.common.counts.bytes.add(bytes);
                self.complete(op, Completion::Done);
                self.retire_operation(op);
                self.settle(session);
            }
            MoriBatchOutcome::Failed(cause) => {
                self.fail(op, &cause);
                self.retire_operation(op);
                self.suspect(session);
            }
            MoriBatchOutcome::Unposted(cause) => {
                self.fail(op, &cause);
                self.retire_operation(op);
                self.settle(session);
            }
        }
    }

    /// True if the peer is gone, whose memory stays mapped by xGMI: what is written there nobody
    /// sees.
    fn is_into_the_void(&self, session: SessionId) -> bool {
        let Some(MoriSession { link: Some(asked), peer, .. }) = self.sessions.get(&session) else {
            return false;
        };
        let Some(peer) = self.peers.get(peer) else { return false };
        let is_gone = || match &peer.link {
            Some(line) => line.id != *asked || line.is_closed(),
            None => true,
        };
        self.common.config.backend == MoriBackend::Xgmi && is_gone()
    }

    /// Tells the owner of an operation's end, once.
    fn complete(&mut self, op: OpId, outcome: Completion) {
        let Some(operation) = self.operations.get_mut(&op) else { return };
        if !std::mem::replace(&mut operation.told, true) {
            self.common.counts.failed.add(u64::from(outcome != Completion::Done));
            self.events.push_back(DataEvent::Completed { op, outcome });
        }
    }

    pub(super) fn fail(&mut self, op: OpId, cause: &FabricError) {
        let outcome = Completion::Failed { cause: cause.clone(), landed: Landed::Unknown };
        self.complete(op, outcome);
    }

    /// MoRI has nothing of an operation any more.
    pub(super) fn retire_operation(&mut self, op: OpId) {
        let Some(over) = self.operations.remove(&op) else { return };
        if let Some(held) = self.regions.get_mut(&over.region) {
            held.operations -= 1;
        }
        let Some(session) = self.sessions.get_mut(&over.session) else { return };
        session.wire.remove(&over.order);
        if let Some(peer) = self.peers.get_mut(&session.peer) {
            peer.ranges -= over.ranges;
        }
    }

    /// After a failure of one session nothing with that peer can be trusted: MoRI's queue pairs are
    /// the same for all, and stay dead.
    pub(super) fn suspect(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.tainted = true;
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
        which: impl Fn(&MoriSession) -> bool,
    ) -> bool {
        let its = |session: &MoriSession| session.peer == peer && which(session);
        let ids = self.sessions.iter().filter(|(_, session)| its(session));
        let ids: Vec<SessionId> = ids.map(|(id, _)| *id).collect();
        let mut under_way = false;
        for id in ids {
            self.opened(id, Err(cause.clone()));
            under_way |= self.kill(id, cause);
        }
        under_way
    }

    /// Nothing of these is under way any more.
    fn closed_by_peer(&mut self, sessions: &BTreeSet<SessionId>) {
        for id in sessions {
            self.opened(*id, Err(FabricError::RemoteAccess));
            if let Some(session) = self.sessions.get_mut(id)
                && session.phase != MoriSessionPhase::Closing
            {
                session.phase = MoriSessionPhase::Dead;
            }
        }
    }

    /// Fails the operations of a session, which takes no more. True if MoRI has something of it.
    pub(super) fn kill(&mut self, id: SessionId, cause: &FabricError) -> bool {
        let Some(session) = self.sessions.get_mut(&id) else { return false };
        if session.reopening.is_some() {
            self.abandon_session(id, cause);
            return false;
        }
        if session.phase != MoriSessionPhase::Closing {
            session.phase = MoriSessionPhase::Dead;
        }
        session.tainted |= !session.wire.is_empty();
        let tainted = session.tainted;
        let ops: Vec<OpId> = session.wire.values().copied().collect();
        for op in ops {
            self.fail(op, cause);
        }
        tainted
    }

    fn link_closed(&mut self, id: PeerId, line: u64, why: &str) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let is_last = peer.link.take_if(|its| its.id == line).is_some();
        // Those that wait for its answer have no line yet.
        let its = |session: &MoriSession| match session.link {
            Some(its) => its == line,
            None => is_last,
        };
        let opening = |session: &MoriSession| matches!(session.phase, MoriSessionPhase::Opening(_));
        let cause = FabricError::Backend(format!("the peer's door: {why}").into());
        self.end_sessions(id, &cause, |session| its(session) && opening(session));
        if self.end_sessions(id, &FabricError::PeerGone, its) {
            self.start_recovery();
        }
        if is_last {
            self.events.push_back(DataEvent::PeerDown { peer: id });
        }
    }

    /// Ends a session at the owner's wish.
    pub(super) fn shut(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.phase = MoriSessionPhase::Closing;
        if session.reopening.is_some() {
            self.abandon_session(id, &FabricError::Closed);
            return self.settle(id);
        }
        let ops: Vec<OpId> = session.wire.values().copied().collect();
        for op in ops {
            self.fail(op, &FabricError::Closed);
        }
        self.settle(id);
    }

    /// Answers the tickets of a session that have nothing to wait for, and forgets a closed one.
    pub(super) fn settle(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if session.tainted {
            return;
        }
        let first = session.wire.keys().next().copied().unwrap_or(u64::MAX);
        while let Some(&(ticket, order)) = session.tickets.front() {
            // Operations from `order` on came after the ticket.
            if first < order {
                return;
            }
            session.tickets.pop_front();
            self.events.push_back(DataEvent::Quiet { session: id, ticket });
        }
        if session.phase == MoriSessionPhase::Closing && session.wire.is_empty() {
            self.sessions.remove(&id);
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
        let over = |id: &SessionId| {
            self.sessions
                .get(id)
                .is_none_or(|session| session.tainted || session.reopening.is_some())
        };
        let late: Vec<_> = self
            .operations
            .iter()
            .filter(|(_, operation)| operation.deadline <= now && !over(&operation.session))
            .map(|(op, operation)| (*op, operation.session))
            .collect();
        for (op, session) in late {
            self.fail(op, &FabricError::AckTimeout);
            self.suspect(session);
        }
        let late: Vec<_> = self
            .sessions
            .iter()
            .filter(
                |(_, session)| matches!(session.phase, MoriSessionPhase::Opening(at) if at <= now),
            )
            .map(|(id, _)| *id)
            .collect();
        for session in late {
            self.opened(session, Err(FabricError::Unreachable));
        }
        self.advance();
        self.check_at = self.next_deadline(now);
    }

    fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let operations = self.operations.values().map(|operation| operation.deadline);
        let opening = self.sessions.values().filter_map(|session| match session.phase {
            MoriSessionPhase::Opening(at) => Some(at),
            _ => None,
        });
        let reopening = self.sessions.values().filter_map(|session| session.reopening);
        let reopening = reopening.flat_map(|it| [Some(it.until), it.again].into_iter().flatten());
        let later = |at: &Instant| *at > now;
        operations.chain(opening).chain(reopening).chain(self.recovery.until()).filter(later).min()
    }

    /// Operations that were posted anew have their time from now on.
    pub(super) fn prolong(&mut self, ops: &[OpId]) {
        let patience = Duration::from_millis(self.common.config.operation_ms.into());
        let deadline = Instant::now() + patience;
        for op in ops {
            if let Some(operation) = self.operations.get_mut(op) {
                operation.deadline = deadline;
            }
        }
        self.check_by(deadline);
    }
}
