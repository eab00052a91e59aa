//! The backend is replaced: MoRI's queue pairs never recover, and only the end of a backend keeps
//! out what is under way. Sessions that go on are opened anew beside the work, each peer's once its
//! acceptor answers. Where MoRI cannot be started it is tried again until it can.

use super::{MoriParts, MoriPlane, MoriSession, Reopening};
use crate::MoriBackend;
use crate::engine_thread::MoriEngineCommand;
use kvferry_engine::fabric::{DataEvent, FabricError, OpId, PeerId, SessionId};
use kvferry_fabric_common::{LedgerSession, draw_incarnation};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pause before MoRI is started again after it could not be; doubles,
pub(super) const PAUSE: Duration = Duration::from_millis(50);

const PAUSE_MAX: Duration = Duration::from_millis(400);

/// Pause before a peer is asked again that did not answer.
const AGAIN: Duration = Duration::from_millis(200);

/// Least time between two replacements over the queue pairs of peers.
const WORN_PAUSE: Duration = Duration::from_secs(60);

/// How far a replacement is.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum MoriRecovery {
    #[default]
    Idle,
    /// Operations with peers that are not concerned may end until then.
    Draining(Instant),
    /// The thread is at it. These sessions go on, and these peers are kept out once it is done.
    Rebuilding(BTreeSet<SessionId>, BTreeSet<PeerId>),
    /// What is posted anew has to end before the reset; what could not be by then is not waited
    /// for.
    Retrying(Instant),
    /// There is no backend; it is tried then, and after this pause again.
    Unavailable(Instant, Duration),
}

impl MoriRecovery {
    pub(super) fn is_draining(&self) -> bool {
        matches!(self, MoriRecovery::Draining(_))
    }

    pub(super) fn until(&self) -> Option<Instant> {
        match self {
            MoriRecovery::Draining(at)
            | MoriRecovery::Retrying(at)
            | MoriRecovery::Unavailable(at, _) => Some(*at),
            _ => None,
        }
    }
}

impl MoriPlane {
    /// Has the backend replaced as soon as may be.
    pub(super) fn start_recovery(&mut self) {
        if self.recovery == MoriRecovery::Idle && self.broken.is_none() {
            let until = Instant::now() + self.drain_time();
            self.recovery = MoriRecovery::Draining(until);
            self.check_by(until);
        }
    }

    /// Has all that the owner knows voided, as after a failure: a reset follows, once nothing of it
    /// is under way. Over xGMI that is when all peers have left, however long that takes.
    pub(crate) fn renew(&mut self) {
        if self.ledger.events.iter().any(|event| matches!(event, DataEvent::Reset { .. })) {
            return;
        }
        self.renewing = true;
        if self.common.config.backend == MoriBackend::Xgmi {
            self.common.access_control.expel();
        }
        self.start_recovery();
        self.advance();
    }

    /// Who has to leave before the backend is replaced.
    fn awaited(&self) -> Vec<Arc<str>> {
        match (self.renewing, self.common.config.backend) {
            (true, MoriBackend::Xgmi) => self.common.access_control.insiders(),
            _ => Vec::new(),
        }
    }

    /// Has peers leave that were asked before. One whose copies did not end within the time of an
    /// operation has forgotten that it was.
    fn ask_again(&mut self, awaited: &[Arc<str>]) {
        if !std::mem::replace(&mut self.awaits, true) {
            tracing::warn!(
                key = %self.common.config.key,
                peers = ?awaited,
                "all peers have to connect anew, once these have left memory that xGMI has mapped \
                 for them"
            );
        }
        self.common.access_control.expel();
        let until =
            Instant::now() + 2 * Duration::from_millis(self.common.config.operation_ms.into());
        self.recovery = MoriRecovery::Draining(until);
        self.check_by(until);
    }

    /// Whether operations of sessions that go on have not ended; of those that are being opened
    /// anew only if `waiting`: MoRI does not have them yet.
    fn is_anything_live(&self, waiting: bool) -> bool {
        let live = |id| {
            let session = self.ledger.sessions.get(id).map(|session| &session.own);
            session.is_some_and(|own| !own.tainted && (waiting || own.reopening.is_none()))
        };
        self.ledger.operations.values().any(|operation| live(&operation.session))
    }

    /// Takes the next step if it is time.
    pub(super) fn advance(&mut self) {
        let now = Instant::now();
        match self.recovery {
            MoriRecovery::Draining(until) if !self.is_anything_live(false) || until <= now => {
                let awaited = self.awaited();
                if awaited.is_empty() {
                    self.replace();
                } else if until <= now {
                    self.ask_again(&awaited);
                }
            }
            MoriRecovery::Retrying(until) => {
                if until <= now {
                    self.give_up_reopening();
                }
                if self.is_anything_live(true) {
                    return;
                }
                if self.is_anything_tainted() { self.replace() } else { self.reset() }
            }
            MoriRecovery::Unavailable(at, _) if at <= now => self.replace(),
            MoriRecovery::Idle if self.ledger.operations.is_empty() && self.is_worn(now) => {
                let dead = self.common.access_control.dead_pairs();
                tracing::info!(key = %self.common.config.key, dead, "queue pairs of peers have ended");
                self.worn = Some(now);
                self.replace();
            }
            _ => {}
        }
    }

    fn is_anything_tainted(&self) -> bool {
        self.ledger.sessions.values().any(|session| session.own.tainted)
    }

    /// What counts is what peers say, so that it does not count too often.
    fn is_worn(&self, now: Instant) -> bool {
        self.worn.is_none_or(|last| now - last >= WORN_PAUSE)
            && self.common.access_control.wants_rebuild()
    }

    fn replace(&mut self) {
        self.resetting |= self.renewing
            || self.broken.is_some()
            || self.fences_by_rebuild()
            || self.common.access_control.is_anyone_inside();
        let incarnation = match self.resetting.then(draw_incarnation).transpose() {
            Ok(incarnation) => incarnation,
            Err(why) => return self.broken(&why, false),
        };
        let kept =
            |session: &LedgerSession<_>| MoriSession::goes_on(session) && !session.own.tainted;
        let keep: BTreeSet<SessionId> = self.ledger.sessions_where(kept).into_iter().collect();
        self.common.counts.rebuilds.add(1);
        let (sessions, is_reset) = (keep.len(), self.resetting);
        tracing::debug!(key = %self.common.config.key, sessions, is_reset, "MoRI's backend is replaced");
        self.tell(MoriEngineCommand::Rebuild { keep: keep.clone(), incarnation });
        let fences = match self.common.config.backend {
            MoriBackend::Rdma => std::mem::take(&mut self.fences),
            MoriBackend::Xgmi => BTreeSet::new(),
        };
        if let MoriRecovery::Unavailable(_, pause) = self.recovery {
            self.pause = (2 * pause).min(PAUSE_MAX);
        }
        self.recovery = MoriRecovery::Rebuilding(keep, fences);
        for (session, answer) in std::mem::take(&mut self.deferred_grants) {
            self.grant_received(session, answer);
        }
    }

    pub(super) fn rebuilt(&mut self, again: &[OpId]) {
        let MoriRecovery::Rebuilding(keep, fenced) = std::mem::take(&mut self.recovery) else {
            return;
        };
        self.common.counts.retried.add(again.len() as u64);
        let gone = self.ledger.operations.iter().filter(|(_, o)| !keep.contains(&o.session));
        let gone: Vec<OpId> = gone.map(|(op, _)| *op).collect();
        for op in gone {
            self.retire_operation(op);
        }
        let quiet: Vec<SessionId> =
            self.ledger.sessions.keys().filter(|id| !keep.contains(id)).copied().collect();
        for id in quiet {
            if let Some(session) = self.ledger.sessions.get_mut(&id) {
                session.own.tainted = false;
            }
            self.settle(id);
        }
        self.fenced(fenced);
        self.reopen(&keep);
        if self.resetting {
            let until = Instant::now() + self.drain_time();
            self.recovery = MoriRecovery::Retrying(until);
            self.check_by(until);
        } else if self.renewing || self.fences_by_rebuild() || self.is_anything_tainted() {
            self.start_recovery();
        }
        self.advance();
    }

    /// Has the sessions that go on opened anew.
    fn reopen(&mut self, keep: &BTreeSet<SessionId>) {
        let until = Instant::now() + Duration::from_millis(self.common.config.open_ms.into());
        let goes_on = |id: &SessionId| {
            keep.contains(id) && self.ledger.sessions.get(id).is_some_and(MoriSession::goes_on)
        };
        if self.common.config.backend == MoriBackend::Rdma && !self.resetting {
            for line in self.ledger.peers.values().filter_map(|peer| peer.link.as_ref()) {
                line.renew(goes_on);
            }
        }
        for id in keep {
            let Some(session) = self.ledger.sessions.get_mut(id) else { continue };
            if session.phase.is_open() {
                let until = session.own.reopening.map_or(until, |before| before.until);
                session.own.reopening = Some(Reopening { until, again: None });
            }
            if MoriSession::goes_on(session) {
                self.start_opening(*id);
            }
        }
        self.check_by(until);
    }

    /// MoRI has connected a session, or failed to.
    pub(super) fn connected(&mut self, id: SessionId, result: Result<(), FabricError>) {
        let Some(session) = self.ledger.sessions.get_mut(&id) else { return };
        match (&mut session.own.reopening, &result) {
            (None, _) => self.opened(id, result),
            (Some(reopening), Err(_)) => {
                let again = Instant::now() + AGAIN;
                reopening.again = Some(again);
                self.check_by(again);
            }
            (reopening, Ok(())) => {
                *reopening = None;
                self.prolong(&self.ledger.operations_of(id));
            }
        }
    }

    /// Asks peers again, and ends the sessions with those that have not answered for too long.
    pub(super) fn keep_reopening(&mut self, now: Instant) {
        let due = |session: &LedgerSession<MoriParts>| {
            let reopening = session.own.reopening?;
            let is_due = |at: Instant| at <= now;
            (is_due(reopening.until) || reopening.again.is_some_and(is_due)).then_some(reopening)
        };
        let sessions = self.ledger.sessions.iter();
        let due: Vec<_> = sessions.filter_map(|(id, it)| Some((*id, due(it)?))).collect();
        for (id, reopening) in due {
            if reopening.until <= now {
                self.abandon_session(id, &FabricError::Unreachable);
            } else if let Some(session) = self.ledger.sessions.get_mut(&id) {
                session.own.reopening = Some(Reopening { again: None, ..reopening });
                self.start_opening(id);
            }
        }
    }

    /// Ends a session of which MoRI has nothing.
    pub(super) fn abandon_session(&mut self, id: SessionId, cause: &FabricError) {
        let Some(session) = self.ledger.sessions.get_mut(&id) else { return };
        session.own.reopening = None;
        if session.phase.is_open() {
            session.phase.end();
        }
        self.fail_all(id, cause);
        self.prolong(&self.ledger.operations_of(id));
        self.tell(MoriEngineCommand::Withdraw { session: id });
    }

    fn give_up_reopening(&mut self) {
        for id in self.ledger.sessions_where(|session| session.own.reopening.is_some()) {
            self.abandon_session(id, &FabricError::Unreachable);
        }
    }

    fn fences_by_rebuild(&self) -> bool {
        self.common.config.backend == MoriBackend::Rdma && !self.fences.is_empty()
    }

    /// Answers fences of peers that left by themselves.
    pub(super) fn complete_left_fences(&mut self) {
        if self.common.config.backend == MoriBackend::Rdma {
            return;
        }
        let gone = |peer: &PeerId| {
            let Some(known) = self.ledger.peers.get(peer) else { return true };
            // Who has no acceptor cannot be asked, and so never says that it has left.
            known
                .who()
                .is_some_and(|who| !self.common.access_control.is_inside(who, known.fence_key))
        };
        let (left, inside) = self.fences.iter().copied().partition(gone);
        self.fences = inside;
        self.fenced(left);
    }

    fn fenced(&mut self, peers: BTreeSet<PeerId>) {
        self.ledger.events.extend(peers.into_iter().map(|peer| DataEvent::Fenced { peer }));
    }

    /// All that the owner knows is void.
    fn reset(&mut self) {
        self.tell(MoriEngineCommand::Clear);
        for peer in self.ledger.peers.values() {
            if let Some(line) = &peer.link {
                line.hang_up();
            }
        }
        self.ledger.clear();
        self.deferred_grants.clear();
        let fences = std::mem::take(&mut self.fences);
        self.fenced(fences);
        (self.recovery, self.resetting) = (MoriRecovery::Idle, false);
        (self.renewing, self.awaits) = (false, false);
        if self.broken.take().is_some() {
            self.common.counts.without.set(0);
            tracing::warn!(key = %self.common.config.key, "MoRI is started again");
        }
        self.pause = PAUSE;
        self.common.counts.resets.add(1);
        self.ledger.events.push_back(DataEvent::Reset { address: self.common.address() });
    }

    /// There is no backend, and none can be had at present. If it is gone it is quiet.
    pub(super) fn broken(&mut self, why: &str, quiet: bool) {
        let why: Arc<str> = format!("MoRI could not be started again: {why}").into();
        if self.broken.is_none() {
            self.common.counts.without.set(1);
            tracing::error!(key = %self.common.config.key, %why, "no backend; it is tried again");
        }
        let at = Instant::now() + self.pause;
        let before =
            std::mem::replace(&mut self.recovery, MoriRecovery::Unavailable(at, self.pause));
        self.check_by(at);
        if let MoriRecovery::Rebuilding(_, fenced) = before {
            self.fenced(fenced);
        }
        if quiet && self.common.config.backend == MoriBackend::Rdma {
            let fences = std::mem::take(&mut self.fences);
            self.fenced(fences);
        }
        let cause = FabricError::Backend(why.clone());
        self.broken = Some(why);
        let ops: Vec<OpId> = self.ledger.operations.keys().copied().collect();
        for op in ops {
            self.fail(op, &cause);
            self.retire_operation(op);
        }
        for id in self.ledger.sessions_where(|_| true) {
            self.opened(id, Err(cause.clone()));
            if let Some(session) = self.ledger.sessions.get_mut(&id) {
                session.own.reopening = None;
                session.own.tainted &= !quiet;
                session.phase.end();
            }
            self.settle(id);
        }
    }

    fn drain_time(&self) -> Duration {
        Duration::from_millis(self.common.config.drain_ms.into())
    }
}
