//! What the threads tell, and what the clock does.

use super::{MoriPlane, Phase, Session};
use crate::Backend;
use crate::address::Claim;
use crate::desk::{Order, Remote};
use crate::door::{Answer, Said};
use crate::news::{End, News};
use engine::fabric::{
    Cause, DataEvent, Landed, OpId, Outcome, PeerId, RegionDesc, RegionId, SessionId,
};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

impl MoriPlane {
    pub(super) fn take_news(&mut self) {
        let mut news = std::mem::take(&mut self.news);
        self.common.board.take(&mut news);
        for news in news.drain(..) {
            match news {
                News::Registered { region, result } => self.registered(region, result),
                News::Opened { session, result } => self.connected(session, result),
                News::Ended { op, end } => self.ended(op, end),
                News::Line(Said::Told { session, answer }) => self.told(session, answer),
                News::Line(Said::Over { peer, line, why }) => self.line_over(peer, line, &why),
                News::Rebuilt { again } => self.rebuilt(&again),
                News::Left => self.look_who_left(),
                // Said to the thread that posts, unless there is none any more.
                News::Line(Said::Leave(..)) => {}
                News::Closed { sessions } => self.closed_by_peer(&sessions),
                News::Broken { why, quiet } => self.broken(&why, quiet),
            }
        }
        self.news = news;
        self.advance();
    }

    fn registered(&mut self, region: RegionId, result: Result<Vec<u8>, Cause>) {
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
    pub(super) fn told(&mut self, id: SessionId, answer: Answer) {
        if self.mending.is_draining() {
            return self.told.push((id, answer));
        }
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if !matches!(session.phase, Phase::Opening(_)) && session.reopening.is_none() {
            return;
        }
        match answer {
            Ok(grant) => {
                let claim = Claim::decode(&grant.memory);
                if claim.is_none_or(|claim| claim.len != session.lens[1]) {
                    let why = "the peer's door tells of a region of another length";
                    return self.turned_away(id, Cause::Backend(why.into()));
                }
                let line = self.peers.get(&session.peer).and_then(|peer| peer.line.as_ref());
                let line = line.map(|line| line.id);
                session.line = line;
                let remote = Remote { region: session.local, grant, line };
                self.tell(Order::Open { session: id, remote });
            }
            Err(why) => {
                let why = format!("the peer's door: {why}");
                self.turned_away(id, Cause::Backend(why.into()));
            }
        }
    }

    /// The peer does not want this session.
    fn turned_away(&mut self, id: SessionId, cause: Cause) {
        match self.sessions.get(&id).is_some_and(|session| session.reopening.is_some()) {
            true => self.lose(id, &cause),
            false => self.opened(id, Err(cause)),
        }
    }

    pub(super) fn opened(&mut self, id: SessionId, result: Result<(), Cause>) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if matches!(session.phase, Phase::Opening(_)) {
            session.phase = if result.is_ok() { Phase::Open } else { Phase::Dead };
            let (peer, failed) = (session.peer, result.as_ref().err());
            tracing::debug!(session = id.0, peer = peer.0, ?failed, "a session was opened");
            self.events.push_back(DataEvent::Opened { session: id, result });
        }
    }

    fn ended(&mut self, op: OpId, end: End) {
        let Some(operation) = self.operations.get(&op) else { return };
        let (session, bytes) = (operation.session, operation.bytes);
        match end {
            End::Done if self.is_into_the_void(session) => {
                self.fail(op, &Cause::PeerGone);
                self.landed(op);
                self.settle(session);
            }
            End::Done => {
                self.common.counts.operations.add(1);
                self.common.counts.bytes.add(bytes);
                self.complete(op, Outcome::Done);
                self.landed(op);
                self.settle(session);
            }
            End::Failed(cause) => {
                self.fail(op, &cause);
                self.landed(op);
                self.suspect(session);
            }
            End::Unposted(cause) => {
                self.fail(op, &cause);
                self.landed(op);
                self.settle(session);
            }
        }
    }

    /// True if the peer is gone, whose memory stays mapped by xGMI: what is written there nobody sees.
    fn is_into_the_void(&self, session: SessionId) -> bool {
        let Some(Session { line: Some(asked), peer, .. }) = self.sessions.get(&session) else {
            return false;
        };
        let Some(peer) = self.peers.get(peer) else { return false };
        let is_gone = || match &peer.line {
            Some(line) => line.id != *asked || line.is_closed(),
            None => true,
        };
        self.common.config.backend == Backend::Xgmi && is_gone()
    }

    /// Tells the owner of an operation's end, once.
    fn complete(&mut self, op: OpId, outcome: Outcome) {
        let Some(operation) = self.operations.get_mut(&op) else { return };
        if !std::mem::replace(&mut operation.told, true) {
            self.common.counts.failed.add(u64::from(outcome != Outcome::Done));
            self.events.push_back(DataEvent::Completed { op, outcome });
        }
    }

    pub(super) fn fail(&mut self, op: OpId, cause: &Cause) {
        let outcome = Outcome::Failed { cause: cause.clone(), landed: Landed::Unknown };
        self.complete(op, outcome);
    }

    /// MoRI has nothing of an operation any more.
    pub(super) fn landed(&mut self, op: OpId) {
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
        self.end_sessions(peer, &Cause::QueuePair, |_| true);
        self.mend();
    }

    /// Ends the sessions of some kind with a peer. True if MoRI has something of them.
    fn end_sessions(
        &mut self,
        peer: PeerId,
        cause: &Cause,
        which: impl Fn(&Session) -> bool,
    ) -> bool {
        let its = |session: &Session| session.peer == peer && which(session);
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
            self.opened(*id, Err(Cause::RemoteAccess));
            if let Some(session) = self.sessions.get_mut(id)
                && session.phase != Phase::Closing
            {
                session.phase = Phase::Dead;
            }
        }
    }

    /// Fails the operations of a session, which takes no more. True if MoRI has something of it.
    pub(super) fn kill(&mut self, id: SessionId, cause: &Cause) -> bool {
        let Some(session) = self.sessions.get_mut(&id) else { return false };
        if session.reopening.is_some() {
            self.lose(id, cause);
            return false;
        }
        if session.phase != Phase::Closing {
            session.phase = Phase::Dead;
        }
        session.tainted |= !session.wire.is_empty();
        let tainted = session.tainted;
        let ops: Vec<OpId> = session.wire.values().copied().collect();
        for op in ops {
            self.fail(op, cause);
        }
        tainted
    }

    fn line_over(&mut self, id: PeerId, line: u64, why: &str) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let is_last = peer.line.take_if(|its| its.id == line).is_some();
        // Those that wait for its answer have no line yet.
        let its = |session: &Session| match session.line {
            Some(its) => its == line,
            None => is_last,
        };
        let opening = |session: &Session| matches!(session.phase, Phase::Opening(_));
        let cause = Cause::Backend(format!("the peer's door: {why}").into());
        self.end_sessions(id, &cause, |session| its(session) && opening(session));
        if self.end_sessions(id, &Cause::PeerGone, its) {
            self.mend();
        }
        if is_last {
            self.events.push_back(DataEvent::PeerDown { peer: id });
        }
    }

    /// Ends a session at the owner's wish.
    pub(super) fn shut(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.phase = Phase::Closing;
        if session.reopening.is_some() {
            self.lose(id, &Cause::Closed);
            return self.settle(id);
        }
        let ops: Vec<OpId> = session.wire.values().copied().collect();
        for op in ops {
            self.fail(op, &Cause::Closed);
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
        if session.phase == Phase::Closing && session.wire.is_empty() {
            self.sessions.remove(&id);
            self.tell(Order::Close { session: id });
        }
    }

    /// Has the clock looked at no later than then.
    pub(super) fn check_by(&mut self, then: Instant) {
        self.check_at = Some(self.check_at.map_or(then, |at| at.min(then)));
    }

    /// Ends what took too long.
    pub(super) fn keep_time(&mut self) {
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
            self.fail(op, &Cause::AckTimeout);
            self.suspect(session);
        }
        let late: Vec<_> = self
            .sessions
            .iter()
            .filter(|(_, session)| matches!(session.phase, Phase::Opening(at) if at <= now))
            .map(|(id, _)| *id)
            .collect();
        for session in late {
            self.opened(session, Err(Cause::Unreachable));
        }
        self.advance();
        self.check_at = self.next_deadline(now);
    }

    fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let operations = self.operations.values().map(|operation| operation.deadline);
        let opening = self.sessions.values().filter_map(|session| match session.phase {
            Phase::Opening(at) => Some(at),
            _ => None,
        });
        let reopening = self.sessions.values().filter_map(|session| session.reopening);
        let reopening = reopening.flat_map(|it| [Some(it.until), it.again].into_iter().flatten());
        let later = |at: &Instant| *at > now;
        operations.chain(opening).chain(reopening).chain(self.mending.until()).filter(later).min()
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
