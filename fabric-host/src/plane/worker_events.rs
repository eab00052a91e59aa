//! What the threads tell the owner.

use super::{HostOpening, HostOperation, HostPeerLink, HostPlane};
use crate::DataPath;
use crate::link::{HostLinkEvent, HostLinkKind};
use crate::proto::{HostCopyStatus, SessionDenial};
use crate::shared::{
    DialledLink, HostDialError, HostWorkerCommand, HostWorkerEvent, NegotiatedPaths, SHORT_MAX,
};
use kvferry_engine::fabric::{Completion, FabricError, Landed, OpId, PeerId, SessionId};
use kvferry_fabric_common::SessionPhase;
use std::time::{Duration, Instant};

impl HostPlane {
    pub(super) fn take_worker_events(&mut self) {
        // Outcomes that were told ahead of a notice are looked at ahead of it.
        let mut notices = std::mem::take(&mut self.notices);
        self.hub.news.take(&mut notices);
        self.take_outcomes();
        self.poll_completion_rings();
        for notice in notices.drain(..) {
            match notice {
                HostWorkerEvent::Dialled { dial, result } => self.dialled(dial, result),
                HostWorkerEvent::LinkDown { link, proven } => self.link_down(link, proven),
                HostWorkerEvent::Opened { session, link, result } => {
                    self.answered(session, link, result)
                }
                HostWorkerEvent::Closed { session, link, local } => {
                    self.closed(session, link, local)
                }
            }
        }
        self.notices = notices;
        for id in self.ledger.late(Instant::now()) {
            self.give_up(id, FabricError::Unreachable);
        }
        self.run_quiesce_probes();
    }

    /// Hears peers that rang for nothing: what the owner watches would be readable for ever.
    pub(super) fn hear_strays(&self) {
        if let Some(bell) = self.hub.bell() {
            bell.rung(|link| {
                if let Some(link) = self.links.get(&link) {
                    link.hear_bell();
                }
            });
        }
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
                HostLinkEvent::Closed { session, link } => {
                    self.closed(SessionId(session), link, false)
                }
            }
        }
        self.heard = heard;
    }

    fn closed(&mut self, session: SessionId, link: u64, local: bool) {
        if let Some(known) = self.ledger.sessions.get_mut(&session) {
            let awaits = &mut known.own.awaits;
            if local { &mut awaits.local } else { &mut awaits.remote }.remove(&link);
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

    /// Tells the owner of an operation's end; it is in flight no more.
    pub(super) fn finish(&mut self, op: OpId, outcome: Completion) -> Option<HostOperation> {
        self.ledger.complete(op, outcome);
        let operation = self.ledger.retire(op)?.own;
        self.short -= u32::from(operation.bytes <= SHORT_MAX);
        Some(operation)
    }

    pub(super) fn completed(&mut self, op: OpId, status: HostCopyStatus) {
        // Those of closed sessions have failed already.
        let Some(known) = self.ledger.operations.get_mut(&op) else { return };
        if known.own.status == HostCopyStatus::Done {
            known.own.status = status;
        }
        known.own.shares = known.own.shares.saturating_sub(1);
        if known.own.shares > 0 {
            return;
        }
        let (session, operation) = (known.session, known.own);
        let failed = |cause| Completion::Failed { cause, landed: Landed::Unknown };
        let outcome = match (operation.status, operation.write) {
            (HostCopyStatus::Done, _) => {
                self.hub.counts.initiated[operation.path as usize].add(operation.bytes);
                Completion::Done
            }
            (HostCopyStatus::Source, true) | (HostCopyStatus::Destination, false) => {
                failed(FabricError::LocalAccess)
            }
            (HostCopyStatus::Refused, _)
            | (HostCopyStatus::Source, false)
            | (HostCopyStatus::Destination, true) => failed(FabricError::RemoteAccess),
        };
        self.finish(op, outcome);
        self.settle(session);
    }

    fn waiting(&self, peer: PeerId, kind: HostLinkKind) -> Vec<SessionId> {
        self.ledger.sessions_where(|session| match &session.phase {
            SessionPhase::Opening(HostOpening::Link(by)) => session.peer == peer && *by == kind,
            _ => false,
        })
    }

    /// A dial has its answer. Links that nobody wants any more end with their drivers.
    fn dialled(&mut self, dial: u64, result: Result<Vec<DialledLink>, HostDialError>) {
        let proven = result.as_ref().map_or_else(|error| error.gone, |_| true);
        if self.quiesce_probe_answered(dial, proven) {
            return;
        }
        let Some((peer, kind)) = self.dials.remove(&dial) else { return };
        let waiting = self.waiting(peer, kind);
        let links = self.ledger.peers.get_mut(&peer).map(|known| &mut known.links);
        match result {
            Ok(dialled) => {
                let up = dialled.into_iter().map(|(link, driver)| {
                    self.hub.tell_worker(link.id, HostWorkerCommand::Add(link.id, driver));
                    self.links.insert(link.id, link.clone());
                    link
                });
                let up = up.collect();
                links.map(|links| links.insert(kind, HostPeerLink::Up(up)));
                waiting.into_iter().for_each(|session| self.start_opening(session, kind));
            }
            Err(HostDialError { why, unreachable, gone }) => {
                links.map(|links| links.remove(&kind));
                let config = &self.hub.config;
                let detour = kind == HostLinkKind::Local && unreachable && !gone;
                let detour = detour && config.slower && config.allows(DataPath::Tcp);
                for session in waiting {
                    match (detour, unreachable) {
                        (true, _) => self.start_opening(session, HostLinkKind::Tcp),
                        (_, true) => _ = self.ledger.opened(session, Err(FabricError::Unreachable)),
                        _ => {
                            let cause = FabricError::Backend(why.as_str().into());
                            self.ledger.opened(session, Err(cause));
                        }
                    }
                }
            }
        }
    }

    fn answered(
        &mut self,
        id: SessionId,
        link: u64,
        result: Result<NegotiatedPaths, SessionDenial>,
    ) {
        let Some(link) = self.links.get(&link) else { return };
        let session = self.ledger.sessions.get_mut(&id);
        let Some((session, links, is_last)) = session.and_then(|session| {
            let SessionPhase::Opening(HostOpening::Answers { links, missing }) = &mut session.phase
            else {
                return None;
            };
            let (links, is_first) = (links.clone(), missing.remove(&link.id));
            let is_last = missing.is_empty();
            is_first.then_some((session, links, is_last))
        }) else {
            // Closed meanwhile, maybe before the peer knew it.
            return link.close(id.0);
        };
        match result {
            // Reads have to find all of the region where the descriptor says.
            Ok(lane) if lane.source.as_ref().is_some_and(|from| from.len < session.lens[1]) => {
                let why = "the peer's region is shorter than its descriptor says";
                self.give_up(id, FabricError::Backend(why.into()));
            }
            Ok(lane) if is_last => _ = self.ledger.opened(id, Ok((links, lane))),
            Ok(_) => {}
            Err(denial) if denial.tcp => self.start_opening(id, HostLinkKind::Tcp),
            Err(denial) => self.give_up(id, FabricError::Backend(denial.why.into())),
        }
    }

    /// Ends an opening, of which the peer may know.
    pub(super) fn give_up(&mut self, id: SessionId, cause: FabricError) {
        if let Some(session) = self.ledger.sessions.get(&id)
            && let SessionPhase::Opening(HostOpening::Answers { links, .. }) = &session.phase
        {
            links.iter().for_each(|link| link.close(id.0));
        }
        self.ledger.opened(id, Err(cause));
    }

    /// When there is something to do though nobody wakes the owner.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let proofs = self.quiesce_probes.iter().filter(|p| p.dial.is_none()).map(|p| p.again);
        self.ledger.deadlines().chain(proofs).min()
    }
}
