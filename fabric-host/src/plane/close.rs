//! How sessions end, and when they are quiet.

use super::{HostPlane, HostSessionPhase};
use crate::descriptor::HostPlaneAddress;
use crate::link::{HostDialRequest, HostLinkKind, HostReadJob, dial};
use crate::worker::HostWorkerCommand;
use kvferry_engine::fabric::{Completion, DataEvent, FabricError, Landed, SessionId};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Shortest and longest pause between two tries to learn what became of a peer.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(10)];

/// A peer whose connection broke: whether it still copies what it had received is learnt from
/// itself, when it answers a hello that names the broken links, or from its end.
#[derive(Debug)]
pub(super) struct HostQuiesceProbe {
    pub(super) location: Arc<HostPlaneAddress>,
    pub(super) fence_key: u64,
    pub(super) kind: HostLinkKind,
    pub(super) links: Vec<u64>,
    /// The dial that is going on.
    pub(super) dial: Option<u64>,
    pub(super) again: Instant,
    pub(super) pause: Duration,
}

impl HostPlane {
    /// Fails the operations of a session; it can take no more.
    pub(super) fn fail_all(&mut self, id: SessionId, cause: &FabricError) -> (u32, u32) {
        let Some(session) = self.sessions.get_mut(&id) else { return (0, 0) };
        let operations = std::mem::take(&mut session.operations);
        let (mut reads, mut writes) = (0, 0);
        for op in operations.into_values() {
            let Some(operation) = self.retire_operation(op) else { continue };
            *if operation.write { &mut writes } else { &mut reads } += 1;
            let outcome = Completion::Failed { cause: cause.clone(), landed: Landed::Unknown };
            self.events.push_back(DataEvent::Completed { op, outcome });
        }
        (reads, writes)
    }

    /// Ends a session for good at the owner's wish.
    pub(super) fn shut(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get(&id) else { return };
        if matches!(session.phase, HostSessionPhase::Closing) {
            return;
        }
        self.kill(id);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.phase = HostSessionPhase::Closing;
        }
        self.settle(id);
    }

    /// Ends a session; its id stays in use.
    pub(super) fn kill(&mut self, id: SessionId) {
        let (reads, writes) = self.fail_all(id, &FabricError::Closed);
        let Some(session) = self.sessions.get_mut(&id) else { return };
        match std::mem::replace(&mut session.phase, HostSessionPhase::Dead) {
            HostSessionPhase::Opening(link) => link.close(id.0),
            HostSessionPhase::Open(link, lane) => {
                if let Some(source) = &lane.source {
                    source.cancelled.store(true, Ordering::SeqCst);
                }
                if reads > 0 {
                    session.awaits.local = true;
                    link.read(HostReadJob::Barrier { session: id.0 });
                }
                session.awaits.remote |= writes > 0;
                link.close(id.0);
            }
            HostSessionPhase::Closing => session.phase = HostSessionPhase::Closing,
            HostSessionPhase::Waiting(_) | HostSessionPhase::Dead => {}
        }
    }

    /// Answers the tickets of a session that have nothing to wait for, and forgets a closed one.
    pub(super) fn settle(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let awaits = session.awaits;
        if awaits.local || awaits.remote || awaits.proof {
            return;
        }
        let first = session.operations.keys().next().copied().unwrap_or(u64::MAX);
        while let Some(&(ticket, order)) = session.tickets.front() {
            // Operations from `order` on came after the ticket.
            if first < order {
                return;
            }
            session.tickets.pop_front();
            self.events.push_back(DataEvent::Quiet { session: id, ticket });
        }
        if matches!(session.phase, HostSessionPhase::Closing) {
            self.sessions.remove(&id);
            self.reap();
        }
    }

    /// Ends links that no peer and no session has any more.
    pub(super) fn reap(&mut self) {
        let kept = |id: u64| {
            let by_peer = |peer: &super::HostPeer| {
                peer.links
                    .values()
                    .any(|way| matches!(way, super::HostPeerLink::Up(up) if up.id == id))
            };
            self.peers.values().any(by_peer)
                || self.sessions.values().any(|session| session.link == Some(id))
        };
        let dead: Vec<u64> = self.links.keys().copied().filter(|id| !kept(*id)).collect();
        for id in dead {
            self.links.remove(&id);
            self.hub.worker_of(id).tell(HostWorkerCommand::Remove(id));
        }
    }

    /// A link ended, and its sessions with it.
    pub(super) fn link_down(&mut self, link: u64, proven: bool) {
        let Some(gone) = self.links.remove(&link) else { return };
        let mut whose = Vec::new();
        for (id, peer) in &mut self.peers {
            let before = peer.links.len();
            peer.links
                .retain(|_, way| !matches!(way, super::HostPeerLink::Up(up) if up.id == link));
            if peer.links.len() < before {
                whose.push(*id);
            }
        }
        let ids = self.sessions.iter().filter(|(_, session)| session.link == Some(link));
        let ids: Vec<SessionId> = ids.map(|(id, _)| *id).collect();
        for id in ids {
            let opening = matches!(self.sessions[&id].phase, HostSessionPhase::Opening(_));
            let (reads, writes) = self.fail_all(id, &FabricError::PeerGone);
            if opening {
                self.opened(id, Err(FabricError::PeerGone));
            }
            let Some(session) = self.sessions.get_mut(&id) else { continue };
            if !matches!(session.phase, HostSessionPhase::Closing) {
                session.phase = HostSessionPhase::Dead;
            }
            let remote = session.awaits.remote || writes > 0;
            // Our thread has left the link, so that it reads no more.
            let _ = reads;
            session.awaits.local = false;
            session.awaits.remote = false;
            if remote && !proven {
                session.awaits.proof = true;
                let (location, fence_key) = (session.location.clone(), session.fence_key);
                self.add_quiesce_probe(location, fence_key, gone.kind, link);
            }
            self.settle(id);
        }
        self.events.extend(whose.into_iter().map(|peer| DataEvent::PeerDown { peer }));
    }

    fn add_quiesce_probe(
        &mut self,
        location: Arc<HostPlaneAddress>,
        fence_key: u64,
        kind: HostLinkKind,
        link: u64,
    ) {
        let same = self
            .quiesce_probes
            .iter_mut()
            .find(|p| p.location == location && p.fence_key == fence_key && p.kind == kind);
        match same {
            Some(proof) if proof.links.contains(&link) => {}
            Some(proof) if proof.dial.is_none() => proof.links.push(link),
            _ => {
                let (dial, again) = (None, Instant::now());
                let (links, pause) = (vec![link], PAUSES[0]);
                self.quiesce_probes.push(HostQuiesceProbe {
                    location,
                    fence_key,
                    kind,
                    links,
                    dial,
                    again,
                    pause,
                });
            }
        }
    }

    /// Goes on with the proofs that are due.
    pub(super) fn run_quiesce_probes(&mut self) {
        let now = Instant::now();
        for proof in &mut self.quiesce_probes {
            if proof.dial.is_none() && proof.again <= now {
                let id = self.hub.fresh();
                proof.dial = Some(id);
                let (to, fence_key, kind) =
                    ((*proof.location).clone(), proof.fence_key, proof.kind);
                dial(
                    &self.hub,
                    HostDialRequest { id, to, fence_key, kind, ends: proof.links.clone() },
                );
            }
        }
    }

    /// The dial of a proof has its answer; false if it is of none.
    pub(super) fn quiesce_probe_answered(&mut self, dial: u64, proven: bool) -> bool {
        let Some(at) = self.quiesce_probes.iter().position(|proof| proof.dial == Some(dial)) else {
            return false;
        };
        if !proven {
            let proof = &mut self.quiesce_probes[at];
            proof.dial = None;
            proof.again = Instant::now() + proof.pause;
            proof.pause = (2 * proof.pause).min(PAUSES[1]);
            return true;
        }
        let proof = self.quiesce_probes.remove(at);
        let ids = self.sessions.iter().filter(|(_, session)| {
            session.awaits.proof && session.link.is_some_and(|link| proof.links.contains(&link))
        });
        let ids: Vec<SessionId> = ids.map(|(id, _)| *id).collect();
        for id in ids {
            if let Some(session) = self.sessions.get_mut(&id) {
                session.awaits.proof = false;
            }
            self.settle(id);
        }
        true
    }
}
