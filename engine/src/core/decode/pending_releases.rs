//! Releases that a prefill out of reach has not got. Until it is met again, or a lease is over, it
//! keeps blocks that nobody reads. One that stood still may hear in the same connection, after the
//! lease, who asks for them, and then keeps them for a claim; a connection that ends, ends that.

use super::{Decode, DecodeTimer, DecodeTurn};
use crate::core::ids::{ConnectionId, EngineId, Incarnation, RankSet, RequestId};
use crate::core::message::{AttemptTag, Message};
use crate::core::peers::UnackedReleases;
use crate::core::time::Nanos;
use crate::fabric::Endpoint;

/// Who is owed: a prefill, in the incarnation that has the prompts. No other incarnation has any of
/// them, and which of two is the later one their numbers do not say.
pub(super) type PrefillIncarnation = (EngineId, Incarnation);

/// What a prefill is still to be told.
#[derive(Clone, Debug)]
pub(super) struct PendingRelease {
    control: Endpoint,
    /// By then leases have freed all of it, but for what is said in a connection that goes on.
    until: Nanos,
    /// What was given up: what waited in a queue of messages, and what the requests at that time
    /// asked for.
    tags: Vec<AttemptTag>,
}

impl Decode {
    /// Notes that a prefill could not be told that a request is done with its source.
    pub(super) fn add_pending_release(&mut self, now: Nanos, id: &RequestId) {
        let Some(request) = self.requests.get(id) else { return };
        let met =
            self.peer_manager.info(request.connection).filter(|_| !request.connection.is_moriio());
        let Some(incarnation) = request.incarnation.or(met.map(|info| info.incarnation)) else {
            return;
        };
        let (engine, control) = request.prefill.clone();
        self.add_pending(
            now,
            UnackedReleases { engine, control, incarnation, tags: vec![request.tag.clone()] },
        );
    }

    /// Notes what a prefill is still to be told. There is room for all that one connection can
    /// leave behind, see [`Decode::flush_pending`]; of more, the lease ends what is left.
    pub(super) fn add_pending(&mut self, now: Nanos, unacked_releases: UnackedReleases) {
        let UnackedReleases { engine, control, incarnation, tags } = unacked_releases;
        let prefill = (engine, incarnation);
        let full = self.pending_releases.len() >= self.config.channel.peers_max as usize;
        if full && !self.pending_releases.contains_key(&prefill) {
            return;
        }
        let again = now + self.config.channel.retransmit_max;
        self.timers.arm_if_idle(DecodeTimer::RetryReleases(prefill.clone()), again);
        let until = now + self.config.settings.lease;
        let fresh = || PendingRelease { control, until, tags: Vec::new() };
        let pending = self.pending_releases.entry(prefill).or_insert_with(fresh);
        pending.until = until;
        let most = self.config.channel.queue_max.saturating_add(self.config.settings.requests_max);
        let room = (most as usize).saturating_sub(pending.tags.len());
        pending.tags.extend(tags.into_iter().take(room));
    }

    /// Looks for a prefill that is to be told something.
    pub(super) fn retry_pending(
        &mut self,
        prefill: &PrefillIncarnation,
        turn: &mut DecodeTurn<'_>,
    ) {
        let (engine, incarnation) = prefill;
        let Some(PendingRelease { control, until, .. }) = self.pending_releases.get(prefill) else {
            return;
        };
        let connection = if turn.now < *until {
            Some(self.peer_manager.reach(engine, control, Some(*incarnation), turn))
        } else {
            let connection = self.peer_manager.peers.connection_of(engine, control);
            let info = connection.and_then(|connection| self.peer_manager.info(connection));
            connection.filter(|_| info.is_some_and(|info| info.incarnation == *incarnation))
        };
        let Some(connection) = connection else {
            self.pending_releases.remove(prefill);
            return;
        };
        let again = turn.now + self.config.channel.retransmit_max;
        self.timers.arm(DecodeTimer::RetryReleases(prefill.clone()), again);
        self.send_pending(connection, turn);
    }

    /// Tells a prefill what it is still to be told, if it is up. What its other incarnations are
    /// owed is forgotten, but for one that may still come.
    pub(super) fn send_pending(&mut self, connection: ConnectionId, turn: &mut DecodeTurn<'_>) {
        let Some(info) = self.peer_manager.info(connection) else { return };
        let (engine, incarnation) = (info.engine.clone(), info.incarnation);
        let of_engine = (engine.clone(), Incarnation(0))..=(engine, Incarnation(u64::MAX));
        let owed: Vec<PrefillIncarnation> =
            self.pending_releases.range(of_engine).map(|(prefill, _)| prefill.clone()).collect();
        for prefill in owed {
            let settled =
                if prefill.1 == incarnation || planted!("debt-paid-to-a-later-incarnation") {
                    self.send_releases(connection, &prefill, turn)
                } else {
                    self.peer_manager.peers.is_past(connection, prefill.1)
                };
            if settled {
                self.pending_releases.remove(&prefill);
                self.timers.cancel(&DecodeTimer::RetryReleases(prefill));
            }
        }
    }

    /// Queues what a prefill is owed, and says whether all of it found room.
    fn send_releases(
        &mut self,
        connection: ConnectionId,
        prefill: &PrefillIncarnation,
        turn: &mut DecodeTurn<'_>,
    ) -> bool {
        let Some(pending) = self.pending_releases.get_mut(prefill) else { return true };
        let ranks = RankSet::first(self.config.geometry.tp);
        while let Some(tag) = pending.tags.last() {
            let message = Message::Release { tag: tag.clone(), ranks };
            if self.peer_manager.send(connection, message, turn).is_err() {
                return false;
            }
            pending.tags.pop();
        }
        true
    }

    /// Tells a prefill what it is still to be told, and says whether that was all. Nothing new is
    /// asked of one before: what is given up while its queue is full would grow without end, and a
    /// prefill that hears of its reader keeps for it what nobody reads.
    pub(super) fn flush_pending(
        &mut self,
        connection: ConnectionId,
        turn: &mut DecodeTurn<'_>,
    ) -> bool {
        if self.pending_releases.is_empty() {
            return true;
        }
        self.send_pending(connection, turn);
        let Some(info) = self.peer_manager.info(connection) else { return true };
        !self.pending_releases.contains_key(&(info.engine.clone(), info.incarnation))
    }

    /// Messages that wait for prefills out of reach.
    pub(super) fn pending_len(&self) -> u32 {
        self.pending_releases.values().map(|pending| pending.tags.len() as u32).sum()
    }
}
