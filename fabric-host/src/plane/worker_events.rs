//! What the threads tell the owner.

use super::{HostOperation, HostPeerLink, HostPlane, HostSessionPhase};
use crate::DataPath;
use crate::link::{HostLinkDriver, HostLinkEvent, HostLinkKind, HostOutboundLink};
use crate::proto::HostCopyStatus;
use crate::shared::HostWorkerEvent;
use crate::worker::{HostWorkerCommand, SHORT_MAX};
use kvferry_engine::fabric::{Completion, DataEvent, FabricError, Landed, OpId, SessionId};
use std::sync::Arc;
use std::time::{Duration, Instant};

impl HostPlane {
    pub(super) fn take_worker_events(&mut self) {
        // Outcomes that were told ahead of a notice are looked at ahead of it.
        let notices = self.hub.take_events();
        self.take_outcomes();
        self.poll_completion_rings();
        for notice in notices {
            match notice {
                HostWorkerEvent::LinkUp { dial, link, station } => {
                    self.link_up(dial, link, station)
                }
                HostWorkerEvent::DialFailed { dial, why, unreachable, gone } => {
                    self.dial_failed(dial, &why, unreachable, gone);
                }
                HostWorkerEvent::LinkDown { link, proven } => self.link_down(link, proven),
                HostWorkerEvent::Opened { session, link, result } => {
                    self.answered(session, link, result)
                }
                HostWorkerEvent::Closed { session, local } => self.closed(session, local),
            }
        }
        self.expire();
        self.run_quiesce_probes();
    }

    /// Takes what peers answered by their rings, if that is ours to do.
    fn poll_completion_rings(&mut self) {
        if self.busy_polling_since.is_none() && self.hub.bell().is_none() {
            return;
        }
        let mut heard = std::mem::take(&mut self.heard);
        self.links.values().for_each(|link| link.poll_completions_as_owner(&mut heard));
        for answer in heard.drain(..) {
            match answer {
                HostLinkEvent::Done { op, status } => self.completed(OpId(op), status),
                HostLinkEvent::Closed { session } => self.closed(SessionId(session), false),
            }
        }
        self.heard = heard;
    }

    fn closed(&mut self, session: SessionId, local: bool) {
        if let Some(known) = self.sessions.get_mut(&session) {
            *if local { &mut known.awaits.local } else { &mut known.awaits.remote } = false;
            self.settle(session);
        }
    }

    /// A short operation was posted: its end is looked for.
    pub(super) fn start_busy_polling(&mut self) {
        if self.busy_polling_since.is_none() {
            self.links.values().for_each(|link| {
                link.set_busy_polling(true);
            });
        }
        self.busy_polling_since = Some(Instant::now());
    }

    /// True if the owner is to look again at once: short operations are under way and the last news
    /// are not long ago.
    pub(super) fn keep_busy_polling(&mut self, news: bool) -> bool {
        let Some(since) = self.busy_polling_since else { return false };
        if news {
            self.busy_polling_since = Some(Instant::now());
        }
        let spin = Duration::from_micros(self.hub.config.spin_us.into());
        if self.short > 0 && (news || since.elapsed() < spin) {
            return true;
        }
        self.busy_polling_since = None;
        let mut idle = true;
        for link in self.links.values() {
            idle &= link.set_busy_polling(false);
        }
        if !idle {
            self.start_busy_polling();
        }
        !idle
    }

    fn take_outcomes(&mut self) {
        let mut record = std::mem::take(&mut self.record);
        for at in 0..self.outcomes.len() {
            // The ring is of this process: it is never corrupt.
            while let Ok(true) = self.outcomes[at].pop(&mut record) {
                if let [op, code] = record[..]
                    && let Some(status) = HostCopyStatus::of(code)
                {
                    self.completed(OpId(op), status);
                }
                if self.outcomes[at].made_room() {
                    self.hub.workers[at].wake();
                }
            }
        }
        self.record = record;
    }

    /// An operation is in flight no more.
    pub(super) fn retire_operation(&mut self, op: OpId) -> Option<HostOperation> {
        let operation = self.operations.remove(&op)?;
        if let Some(held) = self.regions.get_mut(&operation.region) {
            held.operations -= 1;
        }
        self.short -= u32::from(operation.bytes <= SHORT_MAX);
        Some(operation)
    }

    pub(super) fn completed(&mut self, op: OpId, status: HostCopyStatus) {
        // Those of closed sessions have failed already.
        let Some(operation) = self.retire_operation(op) else { return };
        let failed = |cause, landed| Completion::Failed { cause, landed };
        let outcome = match (status, operation.write) {
            (HostCopyStatus::Done, _) => {
                self.count(operation.path, operation.bytes);
                Completion::Done
            }
            (HostCopyStatus::Refused, _) => failed(FabricError::RemoteAccess, Landed::Unknown),
            (HostCopyStatus::Source, true) | (HostCopyStatus::Destination, false) => {
                failed(FabricError::LocalAccess, Landed::Unknown)
            }
            (HostCopyStatus::Source, false) | (HostCopyStatus::Destination, true) => {
                failed(FabricError::RemoteAccess, Landed::Unknown)
            }
        };
        self.events.push_back(DataEvent::Completed { op, outcome });
        if let Some(session) = self.sessions.get_mut(&operation.session) {
            session.operations.remove(&operation.order);
            self.settle(operation.session);
        }
    }

    fn waiting(&self, peer: kvferry_engine::fabric::PeerId, kind: HostLinkKind) -> Vec<SessionId> {
        let waits = |session: &super::HostSession| {
            session.peer == peer
                && matches!(session.phase, HostSessionPhase::Waiting(k) if k == kind)
        };
        self.sessions.iter().filter(|(_, session)| waits(session)).map(|(id, _)| *id).collect()
    }

    fn link_up(
        &mut self,
        dial: u64,
        link: Arc<HostOutboundLink>,
        station: Box<dyn HostLinkDriver>,
    ) {
        // Nobody else wants it: it ends with its driver.
        if self.quiesce_probe_answered(dial, true) {
            return;
        }
        let Some((peer, kind)) = self.dials.remove(&dial) else { return };
        self.hub.worker_of(link.id).tell(HostWorkerCommand::Add(link.id, station));
        self.links.insert(link.id, link.clone());
        if let Some(known) = self.peers.get_mut(&peer) {
            known.links.insert(kind, HostPeerLink::Up(link));
        }
        for session in self.waiting(peer, kind) {
            self.start_opening(session, kind);
        }
    }

    fn dial_failed(&mut self, dial: u64, why: &str, unreachable: bool, gone: bool) {
        if self.quiesce_probe_answered(dial, gone) {
            return;
        }
        let Some((peer, kind)) = self.dials.remove(&dial) else { return };
        if let Some(known) = self.peers.get_mut(&peer) {
            known.links.remove(&kind);
        }
        let config = &self.hub.config;
        let detour = kind == HostLinkKind::Local && unreachable && !gone;
        let detour = detour && config.slower && config.allows(DataPath::Tcp);
        for session in self.waiting(peer, kind) {
            if detour {
                self.start_opening(session, HostLinkKind::Tcp);
            } else {
                let cause = if unreachable {
                    FabricError::Unreachable
                } else {
                    FabricError::Backend(why.into())
                };
                self.opened(session, Err(cause));
            }
        }
    }

    fn answered(
        &mut self,
        id: SessionId,
        link: u64,
        result: Result<crate::shared::NegotiatedPaths, crate::proto::SessionDenial>,
    ) {
        let opening = self.sessions.get(&id).is_some_and(
            |session| matches!(&session.phase, HostSessionPhase::Opening(by) if by.id == link),
        );
        if !opening {
            // Closed meanwhile, maybe before the peer knew it.
            if let Some(link) = self.links.get(&link) {
                link.close(id.0);
            }
            return;
        }
        match result {
            Ok(lane) if !self.covers(id, &lane) => {
                let why = "the peer's region is shorter than its descriptor says";
                self.kill(id);
                self.opened(id, Err(FabricError::Backend(why.into())));
            }
            Ok(lane) => {
                if let (Some(session), Some(link)) =
                    (self.sessions.get_mut(&id), self.links.get(&link))
                {
                    session.phase = HostSessionPhase::Open(link.clone(), lane);
                    self.opened(id, Ok(()));
                }
            }
            Err(denial) if denial.tcp => self.start_opening(id, HostLinkKind::Tcp),
            Err(denial) => self.opened(id, Err(FabricError::Backend(denial.why.into()))),
        }
    }

    /// True if reads find all of the region where the descriptor says.
    fn covers(&self, id: SessionId, lane: &crate::shared::NegotiatedPaths) -> bool {
        let len = lane.source.as_ref().map(|source| source.len);
        self.sessions.get(&id).is_some_and(|session| len.is_none_or(|len| len >= session.claim.len))
    }

    /// Tells how an opening ended.
    pub(super) fn opened(&mut self, session: SessionId, result: Result<(), FabricError>) {
        if let (Err(_), Some(known)) = (&result, self.sessions.get_mut(&session)) {
            known.phase = HostSessionPhase::Dead;
        }
        self.events.push_back(DataEvent::Opened { session, result });
    }

    fn is_opening(session: &super::HostSession) -> bool {
        matches!(session.phase, HostSessionPhase::Waiting(_) | HostSessionPhase::Opening(_))
    }

    /// Gives up sessions that took too long.
    fn expire(&mut self) {
        let now = Instant::now();
        let late = self.sessions.iter().filter(|(_, s)| Self::is_opening(s) && s.deadline <= now);
        let late: Vec<SessionId> = late.map(|(id, _)| *id).collect();
        for id in late {
            self.kill(id);
            self.opened(id, Err(FabricError::Unreachable));
        }
    }

    /// When there is something to do though nobody wakes the owner.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let opening = self.sessions.values().filter(|s| Self::is_opening(s)).map(|s| s.deadline);
        let proofs = self.quiesce_probes.iter().filter(|p| p.dial.is_none()).map(|p| p.again);
        opening.chain(proofs).min()
    }
}
