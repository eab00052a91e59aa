//! The regions of receivers, and the sessions by which they are written.

use super::io::PullRefusal;
use super::{OmniMori, OmniMoriTimer, POOL, StageTurn};
use crate::core::command::DataCommand;
use crate::fabric::{Address, PeerId, RegionDesc, SessionId};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A receiver's engine.
#[derive(Debug)]
pub(super) struct TargetPeer {
    id: PeerId,
    /// Its regions that there are sessions with.
    sessions: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PullTargetState {
    Opening,
    Open,
    /// Nothing more is posted on it.
    Retired,
    /// The same, and the data plane was told to end it.
    Closed,
}

/// A receiver's region.
#[derive(Debug)]
pub(super) struct PullTarget {
    pub(super) peer: PeerId,
    engine: Arc<[u8]>,
    memory: Arc<[u8]>,
    pub(super) state: PullTargetState,
    /// Pulls that have not ended.
    pub(super) users: BTreeSet<u64>,
}

impl OmniMori {
    /// The session with a region; opens it if there is none.
    pub(super) fn target(
        &mut self,
        engine: &Arc<[u8]>,
        memory: &Arc<[u8]>,
        turn: &mut StageTurn<'_>,
    ) -> Result<SessionId, PullRefusal> {
        let overload = |why: &str| PullRefusal { kind: "overload", why: why.into() };
        if !self.is_registered {
            return Err(overload("the pool is not registered"));
        }
        let known = self
            .peers
            .get(engine)
            .and_then(|peer| self.targets.get(&(peer.id, memory.clone())).copied());
        if let Some(session) = known {
            self.timers.cancel(&OmniMoriTimer::Session(session));
            return Ok(session);
        }
        if self.sessions.len() >= self.config.settings.sessions_max as usize {
            // Of those without pulls the one that was opened first.
            let idle = self.sessions.iter().find(|(_, target)| target.users.is_empty());
            let idle = idle.map(|(session, _)| *session);
            let Some(idle) = idle else { return Err(overload("too many receivers at a time")) };
            self.drop_target(idle, turn);
        }
        let peer = match self.peers.get_mut(engine) {
            Some(peer) => {
                peer.sessions += 1;
                peer.id
            }
            None => {
                let peer = PeerId(self.fresh() as u32);
                self.peers.insert(engine.clone(), TargetPeer { id: peer, sessions: 1 });
                let address = Address(engine.clone());
                turn.push(DataCommand::Connect { peer, address, fence_key: 0 });
                peer
            }
        };
        let session = SessionId(self.fresh() as u32);
        self.targets.insert((peer, memory.clone()), session);
        let target = PullTarget {
            peer,
            engine: engine.clone(),
            memory: memory.clone(),
            state: PullTargetState::Opening,
            users: BTreeSet::new(),
        };
        self.sessions.insert(session, target);
        let remote = RegionDesc(memory.clone());
        turn.push(DataCommand::Open { session, local: POOL, peer, remote });
        Ok(session)
    }

    pub(super) fn target_opened(&mut self, session: SessionId, turn: &mut StageTurn<'_>) {
        let Some(target) = self.sessions.get_mut(&session) else { return };
        if target.state == PullTargetState::Opening {
            target.state = PullTargetState::Open;
            for pull in target.users.clone() {
                self.advance(pull, turn);
            }
        }
    }

    pub(super) fn target_failed(
        &mut self,
        session: SessionId,
        why: &str,
        turn: &mut StageTurn<'_>,
    ) {
        self.retire(session);
        self.fail_waiting(session, why, turn);
    }

    /// Operations of a peer that is gone fail one by one.
    pub(super) fn target_peer_down(&mut self, peer: PeerId, turn: &mut StageTurn<'_>) {
        let sessions = self.sessions.iter().filter(|(_, target)| target.peer == peer);
        for session in sessions.map(|(session, _)| *session).collect::<Vec<_>>() {
            self.target_failed(session, "the receiver's engine is gone", turn);
        }
    }

    /// The next pull opens another session.
    pub(super) fn retire(&mut self, session: SessionId) {
        let Some(target) = self.sessions.get_mut(&session) else { return };
        if let PullTargetState::Opening | PullTargetState::Open = target.state {
            target.state = PullTargetState::Retired;
            self.targets.remove(&(target.peer, target.memory.clone()));
        }
    }

    /// Has the data plane end what it does for a session.
    pub(super) fn close_target(&mut self, session: SessionId, turn: &mut StageTurn<'_>) {
        self.retire(session);
        let Some(target) = self.sessions.get_mut(&session) else { return };
        if target.state != PullTargetState::Closed {
            target.state = PullTargetState::Closed;
            turn.push(DataCommand::Close { session });
        }
    }

    /// A pull has ended.
    pub(super) fn unuse_target(&mut self, session: SessionId, pull: u64, turn: &mut StageTurn<'_>) {
        let Some(target) = self.sessions.get_mut(&session) else { return };
        target.users.remove(&pull);
        if !target.users.is_empty() {
            return;
        }
        match target.state {
            PullTargetState::Opening | PullTargetState::Open => {
                let until = turn.now + self.config.settings.session_idle;
                self.timers.arm(OmniMoriTimer::Session(session), until);
            }
            PullTargetState::Retired | PullTargetState::Closed => self.drop_target(session, turn),
        }
    }

    /// Forgets a session without pulls, and a peer without sessions.
    pub(super) fn drop_target(&mut self, session: SessionId, turn: &mut StageTurn<'_>) {
        self.timers.cancel(&OmniMoriTimer::Session(session));
        self.close_target(session, turn);
        let Some(target) = self.sessions.remove(&session) else { return };
        let Some(peer) = self.peers.get_mut(&target.engine) else { return };
        peer.sessions -= 1;
        if peer.sessions == 0 {
            turn.push(DataCommand::Disconnect { peer: peer.id });
            self.peers.remove(&target.engine);
        }
    }

    /// The data plane was built anew, and knows none of them.
    pub(super) fn targets_void(&mut self, turn: &mut StageTurn<'_>) {
        for session in std::mem::take(&mut self.sessions).into_keys() {
            self.timers.cancel(&OmniMoriTimer::Session(session));
        }
        self.targets.clear();
        self.peers.clear();
        self.end_all_pulls(turn);
    }
}
