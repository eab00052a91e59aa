//! How sessions end, and when they are quiet.

use super::{HostOpening, HostPeer, HostPeerLink, HostPlane, HostSession, has_link};
use crate::descriptor::HostPlaneAddress;
use crate::link::{HostDialRequest, HostLinkKind, HostOutboundLink, HostReadJob, dial};
use crate::shared::HostWorkerCommand;
use kvferry_engine::fabric::{Completion, DataEvent, FabricError, Landed, SessionId};
use kvferry_fabric_common::SessionPhase;
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

impl HostSession {
    /// Ends it at a link, by which some reads and writes of it may be under way.
    fn leave(&mut self, id: SessionId, link: &HostOutboundLink, (reads, writes): (u32, u32)) {
        if reads > 0 {
            self.awaits.local.insert(link.id);
            link.read(HostReadJob::Barrier { session: id.0 });
        }
        if writes > 0 {
            self.awaits.remote.insert(link.id);
        }
        link.close(id.0);
    }
}

impl HostPlane {
    /// Fails the operations of a session, which can take no more; how many reads and writes.
    pub(super) fn fail_all(&mut self, id: SessionId, cause: &FabricError) -> (u32, u32) {
        let (mut reads, mut writes) = (0, 0);
        for op in self.ledger.operations_of(id) {
            let outcome = Completion::Failed { cause: cause.clone(), landed: Landed::Unknown };
            if let Some(operation) = self.finish(op, outcome) {
                *if operation.write { &mut writes } else { &mut reads } += 1;
            }
        }
        (reads, writes)
    }

    /// Ends a session for good at the owner's wish.
    pub(super) fn shut(&mut self, id: SessionId) {
        let session = self.ledger.sessions.get(&id);
        if session.is_none_or(|session| session.phase.is_closing()) {
            return;
        }
        self.kill(id, &FabricError::Closed);
        if let Some(session) = self.ledger.sessions.get_mut(&id) {
            session.phase = SessionPhase::Closing;
        }
        self.settle(id);
    }

    /// Ends a session; its id stays in use.
    pub(super) fn kill(&mut self, id: SessionId, cause: &FabricError) {
        let under_way = self.fail_all(id, cause);
        let Some(session) = self.ledger.sessions.get_mut(&id) else { return };
        match session.phase.end() {
            SessionPhase::Opening(HostOpening::Answers { links, .. }) => {
                links.iter().for_each(|link| link.close(id.0));
            }
            SessionPhase::Open((links, lane)) => {
                if let Some(source) = &lane.source {
                    source.cancelled.store(true, Ordering::SeqCst);
                }
                links.iter().for_each(|link| session.own.leave(id, link, under_way));
            }
            _ => {}
        }
    }

    /// Answers the tickets of a session that have nothing to wait for, and forgets a closed one.
    pub(super) fn settle(&mut self, id: SessionId) {
        let Some(session) = self.ledger.sessions.get(&id) else { return };
        if session.own.awaits.is_over() && self.ledger.settle(id) {
            self.reap();
        }
    }

    /// Ends links that no peer and no session has any more.
    pub(super) fn reap(&mut self) {
        let kept = |id: u64| {
            let is_up =
                |way: &HostPeerLink| matches!(way, HostPeerLink::Up(up) if has_link(up, id));
            let by_peer = |peer: &HostPeer| peer.links.values().any(is_up);
            self.ledger.peers.values().any(by_peer)
                || self.ledger.sessions.values().any(|session| session.own.has_link(id))
        };
        let dead: Vec<u64> = self.links.keys().copied().filter(|id| !kept(*id)).collect();
        for id in dead {
            self.links.remove(&id);
            self.hub.tell_worker(id, HostWorkerCommand::Remove(id));
        }
    }

    /// A link ended, and its sessions with it: at other links that they have, they are closed.
    pub(super) fn link_down(&mut self, link: u64, proven: bool) {
        let Some(gone) = self.links.remove(&link) else { return };
        let mut whose = Vec::new();
        for (id, peer) in &mut self.ledger.peers {
            let before = peer.links.len();
            peer.links.retain(|_, way| !matches!(way, HostPeerLink::Up(up) if has_link(up, link)));
            if peer.links.len() < before {
                whose.push(*id);
            }
        }
        for id in self.ledger.sessions_where(|session| session.own.has_link(link)) {
            self.give_up(id, FabricError::PeerGone);
            self.kill(id, &FabricError::PeerGone);
            let Some(session) = self.ledger.sessions.get_mut(&id) else { continue };
            let awaits = &mut session.own.awaits;
            // Our thread has left the link, so that it reads no more.
            awaits.local.remove(&link);
            if awaits.remote.remove(&link) && !proven {
                awaits.proof.insert(link);
                let (location, fence_key) = (session.own.location.clone(), session.own.fence_key);
                self.add_quiesce_probe(location, fence_key, gone.kind, link);
            }
            self.settle(id);
        }
        self.ledger.events.extend(whose.into_iter().map(|peer| DataEvent::PeerDown { peer }));
        self.reap();
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
                self.quiesce_probes.push(HostQuiesceProbe {
                    location,
                    fence_key,
                    kind,
                    links: vec![link],
                    dial: None,
                    again: Instant::now(),
                    pause: PAUSES[0],
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
                let (to, ends) = ((*proof.location).clone(), proof.links.clone());
                let (fence_key, kind) = (proof.fence_key, proof.kind);
                dial(&self.hub, HostDialRequest { id, to, fence_key, kind, streams: 1, ends });
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
        let is_of = |link: &u64| proof.links.contains(link);
        for id in self.ledger.sessions_where(|session| session.own.awaits.proof.iter().any(is_of)) {
            if let Some(session) = self.ledger.sessions.get_mut(&id) {
                session.own.awaits.proof.retain(|link| !is_of(link));
            }
            self.settle(id);
        }
        true
    }
}
