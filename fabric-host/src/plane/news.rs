//! What the threads tell the owner.

use super::{HostPlane, Operation, Phase, Way};
use crate::Path;
use crate::hub::Notice;
use crate::link::{Heard, Kind, OutLink, Station};
use crate::proto::Status;
use crate::worker::{Command, SHORT_MAX};
use engine::fabric::{Cause, DataEvent, Landed, OpId, Outcome, SessionId};
use std::sync::Arc;
use std::time::{Duration, Instant};

impl HostPlane {
    pub(super) fn take_news(&mut self) {
        // Outcomes that were told ahead of a notice are looked at ahead of it.
        let notices = self.hub.take_notices();
        self.take_outcomes();
        self.look();
        for notice in notices {
            match notice {
                Notice::LinkUp { dial, link, station } => self.link_up(dial, link, station),
                Notice::DialFailed { dial, why, unreachable, gone } => {
                    self.dial_failed(dial, &why, unreachable, gone);
                }
                Notice::LinkDown { link, proven } => self.link_down(link, proven),
                Notice::Opened { session, link, result } => self.answered(session, link, result),
                Notice::Closed { session, local } => self.closed(session, local),
            }
        }
        self.expire();
        self.pursue_proofs();
    }

    /// Takes what peers answered by their rings, if that is ours to do.
    fn look(&mut self) {
        if self.attending.is_none() && self.hub.bell().is_none() {
            return;
        }
        let mut heard = std::mem::take(&mut self.heard);
        self.links.values().for_each(|link| link.look(&mut heard));
        for answer in heard.drain(..) {
            match answer {
                Heard::Done { op, status } => self.completed(OpId(op), status),
                Heard::Closed { session } => self.closed(SessionId(session), false),
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
    pub(super) fn look_soon(&mut self) {
        if self.attending.is_none() {
            self.links.values().for_each(|link| {
                link.attend(true);
            });
        }
        self.attending = Some(Instant::now());
    }

    /// True if the owner is to look again at once: short operations are under way and the last news
    /// are not long ago.
    pub(super) fn attend(&mut self, news: bool) -> bool {
        let Some(since) = self.attending else { return false };
        if news {
            self.attending = Some(Instant::now());
        }
        let spin = Duration::from_micros(self.hub.config.spin_us.into());
        if self.short > 0 && (news || since.elapsed() < spin) {
            return true;
        }
        self.attending = None;
        let mut idle = true;
        for link in self.links.values() {
            idle &= link.attend(false);
        }
        if !idle {
            self.look_soon();
        }
        !idle
    }

    fn take_outcomes(&mut self) {
        let mut record = std::mem::take(&mut self.record);
        for at in 0..self.outcomes.len() {
            // The ring is of this process: it is never corrupt.
            while let Ok(true) = self.outcomes[at].pop(&mut record) {
                if let [op, code] = record[..]
                    && let Some(status) = Status::of(code)
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
    pub(super) fn over(&mut self, op: OpId) -> Option<Operation> {
        let operation = self.operations.remove(&op)?;
        if let Some(held) = self.regions.get_mut(&operation.region) {
            held.operations -= 1;
        }
        self.short -= u32::from(operation.bytes <= SHORT_MAX);
        Some(operation)
    }

    pub(super) fn completed(&mut self, op: OpId, status: Status) {
        // Those of closed sessions have failed already.
        let Some(operation) = self.over(op) else { return };
        let failed = |cause, landed| Outcome::Failed { cause, landed };
        let outcome = match (status, operation.write) {
            (Status::Done, _) => {
                self.count(operation.path, operation.bytes);
                Outcome::Done
            }
            (Status::Refused, _) => failed(Cause::RemoteAccess, Landed::Unknown),
            (Status::Source, true) | (Status::Destination, false) => {
                failed(Cause::LocalAccess, Landed::Unknown)
            }
            (Status::Source, false) | (Status::Destination, true) => {
                failed(Cause::RemoteAccess, Landed::Unknown)
            }
        };
        self.events.push_back(DataEvent::Completed { op, outcome });
        if let Some(session) = self.sessions.get_mut(&operation.session) {
            session.operations.remove(&operation.order);
            self.settle(operation.session);
        }
    }

    fn waiting(&self, peer: engine::fabric::PeerId, kind: Kind) -> Vec<SessionId> {
        let waits = |session: &super::Session| {
            session.peer == peer && matches!(session.phase, Phase::Waiting(k) if k == kind)
        };
        self.sessions.iter().filter(|(_, session)| waits(session)).map(|(id, _)| *id).collect()
    }

    fn link_up(&mut self, dial: u64, link: Arc<OutLink>, station: Box<dyn Station>) {
        // Nobody else wants it: it ends with its station.
        if self.proof_answered(dial, true) {
            return;
        }
        let Some((peer, kind)) = self.dials.remove(&dial) else { return };
        self.hub.worker_of(link.id).tell(Command::Add(link.id, station));
        self.links.insert(link.id, link.clone());
        if let Some(known) = self.peers.get_mut(&peer) {
            known.links.insert(kind, Way::Up(link));
        }
        for session in self.waiting(peer, kind) {
            self.seek(session, kind);
        }
    }

    fn dial_failed(&mut self, dial: u64, why: &str, unreachable: bool, gone: bool) {
        if self.proof_answered(dial, gone) {
            return;
        }
        let Some((peer, kind)) = self.dials.remove(&dial) else { return };
        if let Some(known) = self.peers.get_mut(&peer) {
            known.links.remove(&kind);
        }
        let config = &self.hub.config;
        let detour = kind == Kind::Local && unreachable && !gone;
        let detour = detour && config.slower && config.allows(Path::Tcp);
        for session in self.waiting(peer, kind) {
            if detour {
                self.seek(session, Kind::Tcp);
            } else {
                let cause =
                    if unreachable { Cause::Unreachable } else { Cause::Backend(why.into()) };
                self.opened(session, Err(cause));
            }
        }
    }

    fn answered(
        &mut self,
        id: SessionId,
        link: u64,
        result: Result<crate::hub::Lane, crate::proto::Denial>,
    ) {
        let opening = self
            .sessions
            .get(&id)
            .is_some_and(|session| matches!(&session.phase, Phase::Opening(by) if by.id == link));
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
                self.opened(id, Err(Cause::Backend(why.into())));
            }
            Ok(lane) => {
                if let (Some(session), Some(link)) =
                    (self.sessions.get_mut(&id), self.links.get(&link))
                {
                    session.phase = Phase::Open(link.clone(), lane);
                    self.opened(id, Ok(()));
                }
            }
            Err(denial) if denial.tcp => self.seek(id, Kind::Tcp),
            Err(denial) => self.opened(id, Err(Cause::Backend(denial.why.into()))),
        }
    }

    /// True if reads find all of the region where the descriptor says.
    fn covers(&self, id: SessionId, lane: &crate::hub::Lane) -> bool {
        let len = lane.source.as_ref().map(|source| source.len);
        self.sessions.get(&id).is_some_and(|session| len.is_none_or(|len| len >= session.claim.len))
    }

    /// Tells how an opening ended.
    pub(super) fn opened(&mut self, session: SessionId, result: Result<(), Cause>) {
        if let (Err(_), Some(known)) = (&result, self.sessions.get_mut(&session)) {
            known.phase = Phase::Dead;
        }
        self.events.push_back(DataEvent::Opened { session, result });
    }

    fn is_opening(session: &super::Session) -> bool {
        matches!(session.phase, Phase::Waiting(_) | Phase::Opening(_))
    }

    /// Gives up sessions that took too long.
    fn expire(&mut self) {
        let now = Instant::now();
        let late = self.sessions.iter().filter(|(_, s)| Self::is_opening(s) && s.deadline <= now);
        let late: Vec<SessionId> = late.map(|(id, _)| *id).collect();
        for id in late {
            self.kill(id);
            self.opened(id, Err(Cause::Unreachable));
        }
    }

    /// When there is something to do though nobody wakes the owner.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let opening = self.sessions.values().filter(|s| Self::is_opening(s)).map(|s| s.deadline);
        let proofs = self.proofs.iter().filter(|p| p.dial.is_none()).map(|p| p.again);
        opening.chain(proofs).min()
    }
}
