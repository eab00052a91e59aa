//! The backend is replaced: MoRI's queue pairs never recover, and only the end of a backend keeps
//! out what is under way.

use super::build::random;
use super::{MoriPlane, Phase};
use crate::Backend;
use crate::desk::Order;
use engine::fabric::{Cause, DataEvent, OpId, PeerId, SessionId};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How far a replacement is.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum Mending {
    #[default]
    No,
    /// Operations with peers that are not concerned may end until then.
    Draining(Instant),
    /// The thread is at it. These sessions go on, and these peers are kept out once it is done.
    Working(BTreeSet<SessionId>, BTreeSet<PeerId>),
    /// What was posted anew has to end before the reset.
    Retrying,
}

impl Mending {
    pub(super) fn is_draining(&self) -> bool {
        matches!(self, Mending::Draining(_))
    }

    pub(super) fn until(&self) -> Option<Instant> {
        match self {
            Mending::Draining(until) => Some(*until),
            _ => None,
        }
    }
}

impl MoriPlane {
    /// Has the backend replaced as soon as may be.
    pub(super) fn mend(&mut self) {
        if self.mending == Mending::No && self.broken.is_none() {
            let patience = Duration::from_millis(self.common.config.drain_ms.into());
            let until = Instant::now() + patience;
            self.mending = Mending::Draining(until);
            self.check_by(until);
        }
    }

    /// Operations of sessions that go on.
    fn is_anything_live(&self) -> bool {
        let live = |id| self.sessions.get(id).is_some_and(|session| !session.tainted);
        self.operations.values().any(|operation| live(&operation.session))
    }

    /// Takes the next step if it is time.
    pub(super) fn advance(&mut self) {
        match &self.mending {
            Mending::Draining(until) if !self.is_anything_live() || *until <= Instant::now() => {
                self.replace();
            }
            Mending::Retrying if !self.is_anything_live() => {
                let tainted = self.sessions.values().any(|session| session.tainted);
                if tainted { self.replace() } else { self.reset() }
            }
            _ => {}
        }
    }

    fn replace(&mut self) {
        self.resetting |= self.fences_by_rebuild() || self.common.gate.is_anyone_inside();
        let incarnation = match self.resetting.then(random).transpose() {
            Ok(incarnation) => incarnation,
            Err(why) => return self.broken(&why.to_string(), false),
        };
        let goes_on = |phase| matches!(phase, Phase::Open | Phase::Opening(_));
        let kept = self.sessions.iter().filter(|(_, s)| goes_on(s.phase) && !s.tainted);
        let keep: BTreeSet<SessionId> = kept.map(|(id, _)| *id).collect();
        self.common.counts.rebuilds.add(1);
        self.tell(Order::Rebuild { keep: keep.clone(), incarnation });
        let fences = match self.common.config.backend {
            Backend::Rdma => std::mem::take(&mut self.fences),
            Backend::Xgmi => BTreeSet::new(),
        };
        self.mending = Mending::Working(keep, fences);
        for (session, answer) in std::mem::take(&mut self.told) {
            self.told(session, answer);
        }
    }

    pub(super) fn rebuilt(&mut self, again: &[OpId], lost: Vec<(SessionId, Cause)>) {
        let Mending::Working(keep, fenced) = std::mem::take(&mut self.mending) else { return };
        self.common.counts.retried.add(again.len() as u64);
        self.prolong(again);
        let gone = self.operations.iter().filter(|(_, o)| !keep.contains(&o.session));
        let gone: Vec<OpId> = gone.map(|(op, _)| *op).collect();
        for op in gone {
            self.landed(op);
        }
        let quiet: Vec<SessionId> =
            self.sessions.keys().filter(|id| !keep.contains(id)).copied().collect();
        for id in quiet {
            if let Some(session) = self.sessions.get_mut(&id) {
                session.tainted = false;
            }
            self.settle(id);
        }
        self.fenced(fenced);
        for (session, cause) in lost {
            self.opened(session, Err(cause.clone()));
            self.kill(session, &cause);
        }
        if self.resetting {
            self.mending = Mending::Retrying;
        } else if self.fences_by_rebuild() || self.sessions.values().any(|session| session.tainted)
        {
            self.mend();
        }
        self.advance();
    }

    fn fences_by_rebuild(&self) -> bool {
        self.common.config.backend == Backend::Rdma && !self.fences.is_empty()
    }

    /// Answers fences of peers that left by themselves.
    pub(super) fn look_who_left(&mut self) {
        if self.common.config.backend == Backend::Rdma {
            return;
        }
        let gone = |peer: &PeerId| {
            let Some(known) = self.peers.get(peer) else { return true };
            // Who has no door cannot be asked, and so never says that it has left.
            known.who().is_some_and(|who| !self.common.gate.is_inside(who, known.pass))
        };
        let (left, inside) = self.fences.iter().copied().partition(gone);
        self.fences = inside;
        self.fenced(left);
    }

    fn fenced(&mut self, peers: BTreeSet<PeerId>) {
        self.events.extend(peers.into_iter().map(|peer| DataEvent::Fenced { peer }));
    }

    /// All that the owner knows is void.
    fn reset(&mut self) {
        self.tell(Order::Clear);
        for peer in self.peers.values() {
            if let Some(line) = &peer.line {
                line.hang_up();
            }
        }
        self.regions.clear();
        self.peers.clear();
        self.sessions.clear();
        self.operations.clear();
        self.told.clear();
        let fences = std::mem::take(&mut self.fences);
        self.fenced(fences);
        (self.mending, self.resetting) = (Mending::No, false);
        self.common.counts.resets.add(1);
        self.events.push_back(DataEvent::Reset { address: self.common.address() });
    }

    /// There is no backend any more, and none can be had. If it is gone it is quiet.
    pub(super) fn broken(&mut self, why: &str, quiet: bool) {
        let why: std::sync::Arc<str> = format!("MoRI could not be started again: {why}").into();
        let mut fences = std::mem::take(&mut self.fences);
        if let Mending::Working(_, fenced) = std::mem::take(&mut self.mending) {
            fences.extend(fenced);
        }
        self.broken = Some(why.clone());
        let cause = Cause::Backend(why);
        let ops: Vec<OpId> = self.operations.keys().copied().collect();
        for op in ops {
            self.fail(op, &cause);
            self.landed(op);
        }
        let ids: Vec<SessionId> = self.sessions.keys().copied().collect();
        for id in ids {
            self.opened(id, Err(cause.clone()));
            if let Some(session) = self.sessions.get_mut(&id) {
                session.tainted &= !quiet;
                if session.phase != Phase::Closing {
                    session.phase = Phase::Dead;
                }
            }
            self.settle(id);
        }
        self.fenced(fences);
    }
}
