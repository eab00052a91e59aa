//! How sessions end, and when they are quiet.

use super::{HostOpening, HostPeer, HostPeerLink, HostPlane};
use crate::descriptor::HostPlaneAddress;
use crate::link::{HostDialRequest, HostLinkKind, HostReadJob, dial};
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
        self.kill(id);
        if let Some(session) = self.ledger.sessions.get_mut(&id) {
            session.phase = SessionPhase::Closing;
        }
        self.settle(id);
    }

    /// Ends a session; its id stays in use.
    pub(super) fn kill(&mut self, id: SessionId) {
        let (reads, writes) = self.fail_all(id, &FabricError::Closed);
        let Some(session) = self.ledger.sessions.get_mut(&id) else { return };
        match session.phase.end() {
            SessionPhase::Opening(HostOpening::Answer(link)) => link.close(id.0),
            SessionPhase::Open((link, lane)) => {
                if let Some(source) = &lane.source {
                    source.cancelled.store(true, Ordering::SeqCst);
                }
                if reads > 0 {
                    session.own.awaits.local = true;
                    link.read(HostReadJob::Barrier { session: id.0 });
                }
                session.own.awaits.remote |= writes > 0;
                link.close(id.0);
            }
            _ => {}
        }
    }

    /// Answers the tickets of a session that have nothing to wait for, and forgets a closed one.
    pub(super) fn settle(&mut self, id: SessionId) {
        let Some(session) = self.ledger.sessions.get(&id) else { return };
        let awaits = session.own.awaits;
        if !(awaits.local || awaits.remote || awaits.proof) && self.ledger.settle(id) {
            self.reap();
        }
    }

    /// Ends links that no peer and no session has any more.
    pub(super) fn reap(&mut self) {
        let kept = |id: u64| {
            let is_up = |way: &HostPeerLink| matches!(way, HostPeerLink::Up(up) if up.id == id);
            let by_peer = |peer: &HostPeer| peer.links.values().any(is_up);
            self.ledger.peers.values().any(by_peer)
                || self.ledger.sessions.values().any(|session| session.own.link == Some(id))
        };
        let dead: Vec<u64> = self.links.keys().copied().filter(|id| !kept(*id)).collect();
        for id in dead {
            self.links.remove(&id);
            self.hub.tell_worker(id, HostWorkerCommand::Remove(id));
        }
    }

    /// A link ended, and its sessions with it.
    pub(super) fn link_down(&mut self, link: u64, proven: bool) {
        let Some(gone) = self.links.remove(&link) else { return };
        let mut whose = Vec::new();
        for (id, peer) in &mut self.ledger.peers {
            let before = peer.links.len();
            peer.links.retain(|_, way| !matches!(way, HostPeerLink::Up(up) if up.id == link));
            if peer.links.len() < before {
                whose.push(*id);
            }
        }
        for id in self.ledger.sessions_where(|session| session.own.link == Some(link)) {
            let (_, writes) = self.fail_all(id, &FabricError::PeerGone);
            self.ledger.opened(id, Err(FabricError::PeerGone));
            let Some(session) = self.ledger.sessions.get_mut(&id) else { continue };
            session.phase.end();
            let awaits = &mut session.own.awaits;
            // Our thread has left the link, so that it reads no more.
            awaits.local = false;
            let remote = std::mem::take(&mut awaits.remote) || writes > 0;
            if remote && !proven {
                awaits.proof = true;
                let (location, fence_key) = (session.own.location.clone(), session.own.fence_key);
                self.add_quiesce_probe(location, fence_key, gone.kind, link);
            }
            self.settle(id);
        }
        self.ledger.events.extend(whose.into_iter().map(|peer| DataEvent::PeerDown { peer }));
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
                dial(&self.hub, HostDialRequest { id, to, fence_key, kind, ends });
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
        for id in self.ledger.sessions_where(|session| {
            let link = session.own.link.filter(|link| proof.links.contains(link));
            session.own.awaits.proof && link.is_some()
        }) {
            if let Some(session) = self.ledger.sessions.get_mut(&id) {
                session.own.awaits.proof = false;
            }
            self.settle(id);
        }
        true
    }
}
