//! How sessions end, and when they are quiet.

use super::{HostPlane, Phase};
use crate::descriptor::Location;
use crate::link::{Dial, Kind, Read, dial};
use crate::worker::Command;
use engine::fabric::{Cause, DataEvent, Landed, Outcome, SessionId};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Shortest and longest pause between two tries to learn what became of a peer.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(10)];

/// A peer whose connection broke: whether it still copies what it had received is learnt from
/// itself, when it answers a hello that names the broken links, or from its end.
#[derive(Debug)]
pub(super) struct Proof {
    pub(super) location: Arc<Location>,
    pub(super) pass: u64,
    pub(super) kind: Kind,
    /// Links that broke.
    pub(super) links: Vec<u64>,
    /// The dial that is going on.
    pub(super) dial: Option<u64>,
    pub(super) again: Instant,
    pub(super) pause: Duration,
}

impl HostPlane {
    /// Fails the operations of a session; it can take no more.
    pub(super) fn fail_all(&mut self, id: SessionId, cause: &Cause) -> (u32, u32) {
        let Some(session) = self.sessions.get_mut(&id) else { return (0, 0) };
        let operations = std::mem::take(&mut session.operations);
        let (mut reads, mut writes) = (0, 0);
        for op in operations.into_values() {
            let Some(operation) = self.over(op) else { continue };
            *if operation.write { &mut writes } else { &mut reads } += 1;
            let outcome = Outcome::Failed { cause: cause.clone(), landed: Landed::Unknown };
            self.events.push_back(DataEvent::Completed { op, outcome });
        }
        (reads, writes)
    }

    /// Ends a session for good at the owner's wish.
    pub(super) fn shut(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get(&id) else { return };
        if matches!(session.phase, Phase::Closing) {
            return;
        }
        self.kill(id);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.phase = Phase::Closing;
        }
        self.settle(id);
    }

    /// Ends a session; its id stays in use.
    pub(super) fn kill(&mut self, id: SessionId) {
        let (reads, writes) = self.fail_all(id, &Cause::Closed);
        let Some(session) = self.sessions.get_mut(&id) else { return };
        match std::mem::replace(&mut session.phase, Phase::Dead) {
            Phase::Opening(link) => link.close(id.0),
            Phase::Open(link, lane) => {
                if let Some(source) = &lane.source {
                    source.cancelled.store(true, Ordering::SeqCst);
                }
                if reads > 0 {
                    session.awaits.local = true;
                    link.read(Read::Barrier { session: id.0 });
                }
                session.awaits.remote |= writes > 0;
                link.close(id.0);
            }
            Phase::Closing => session.phase = Phase::Closing,
            Phase::Waiting(_) | Phase::Dead => {}
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
        if matches!(session.phase, Phase::Closing) {
            self.sessions.remove(&id);
            self.reap();
        }
    }

    /// Ends links that no peer and no session has any more.
    pub(super) fn reap(&mut self) {
        let kept = |id: u64| {
            let by_peer = |peer: &super::Peer| {
                peer.links.values().any(|way| matches!(way, super::Way::Up(up) if up.id == id))
            };
            self.peers.values().any(by_peer)
                || self.sessions.values().any(|session| session.link == Some(id))
        };
        let dead: Vec<u64> = self.links.keys().copied().filter(|id| !kept(*id)).collect();
        for id in dead {
            self.links.remove(&id);
            self.hub.worker_of(id).tell(Command::Remove(id));
        }
    }

    /// A link ended, and its sessions with it.
    pub(super) fn link_down(&mut self, link: u64, proven: bool) {
        let Some(gone) = self.links.remove(&link) else { return };
        let mut whose = Vec::new();
        for (id, peer) in &mut self.peers {
            let before = peer.links.len();
            peer.links.retain(|_, way| !matches!(way, super::Way::Up(up) if up.id == link));
            if peer.links.len() < before {
                whose.push(*id);
            }
        }
        let ids = self.sessions.iter().filter(|(_, session)| session.link == Some(link));
        let ids: Vec<SessionId> = ids.map(|(id, _)| *id).collect();
        for id in ids {
            let opening = matches!(self.sessions[&id].phase, Phase::Opening(_));
            let (reads, writes) = self.fail_all(id, &Cause::PeerGone);
            if opening {
                self.opened(id, Err(Cause::PeerGone));
            }
            let Some(session) = self.sessions.get_mut(&id) else { continue };
            if !matches!(session.phase, Phase::Closing) {
                session.phase = Phase::Dead;
            }
            let remote = session.awaits.remote || writes > 0;
            // Our thread has left the link, so that it reads no more.
            let _ = reads;
            session.awaits.local = false;
            session.awaits.remote = false;
            if remote && !proven {
                session.awaits.proof = true;
                let (location, pass) = (session.location.clone(), session.pass);
                self.seek_proof(location, pass, gone.kind, link);
            }
            self.settle(id);
        }
        self.events.extend(whose.into_iter().map(|peer| DataEvent::PeerDown { peer }));
    }

    fn seek_proof(&mut self, location: Arc<Location>, pass: u64, kind: Kind, link: u64) {
        let same = self
            .proofs
            .iter_mut()
            .find(|p| p.location == location && p.pass == pass && p.kind == kind);
        match same {
            Some(proof) if proof.links.contains(&link) => {}
            Some(proof) if proof.dial.is_none() => proof.links.push(link),
            _ => {
                let (dial, again) = (None, Instant::now());
                let (links, pause) = (vec![link], PAUSES[0]);
                self.proofs.push(Proof { location, pass, kind, links, dial, again, pause });
            }
        }
    }

    /// Goes on with the proofs that are due.
    pub(super) fn pursue_proofs(&mut self) {
        let now = Instant::now();
        for proof in &mut self.proofs {
            if proof.dial.is_none() && proof.again <= now {
                let id = self.hub.fresh();
                proof.dial = Some(id);
                let (to, pass, kind) = ((*proof.location).clone(), proof.pass, proof.kind);
                dial(&self.hub, Dial { id, to, pass, kind, ends: proof.links.clone() });
            }
        }
    }

    /// The dial of a proof has its answer; false if it is of none.
    pub(super) fn proof_answered(&mut self, dial: u64, proven: bool) -> bool {
        let Some(at) = self.proofs.iter().position(|proof| proof.dial == Some(dial)) else {
            return false;
        };
        if !proven {
            let proof = &mut self.proofs[at];
            proof.dial = None;
            proof.again = Instant::now() + proof.pause;
            proof.pause = (2 * proof.pause).min(PAUSES[1]);
            return true;
        }
        let proof = self.proofs.remove(at);
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
