//! Pull: the lease on the source, and the flow that reads it.

use super::request::{DecodePhase, KvRead, Lease};
use super::{Decode, DecodeTimer, DecodeTurn};
use crate::core::error::Failure;
use crate::core::ids::{FlowId, RankSet, RequestId};
use crate::core::layout::BlockList;
use crate::core::message::{FlowState, Message, TransferJob};
use crate::core::time::Nanos;
use crate::core::verify::KvDigest;
use std::sync::Arc;

impl Decode {
    fn read_mut(&mut self, id: &RequestId) -> Option<&mut KvRead> {
        match &mut self.requests.get_mut(id)?.phase {
            DecodePhase::Reading(read) => Some(read),
            _ => None,
        }
    }

    /// The lease of a request that has not failed.
    fn lease_mut(&mut self, id: &RequestId) -> Option<&mut Lease> {
        let request = self.requests.get_mut(id)?;
        match &request.phase {
            DecodePhase::Reading(KvRead { failure: Some(_), .. }) => None,
            _ => request.lease.as_mut(),
        }
    }

    /// A lease less the margin for clocks that differ.
    fn usable(&self, lease: Nanos) -> Nanos {
        let margin = self.config.settings.drift_percent.min(100);
        let percent = if planted!("lease-without-margin") { 100 } else { 100 - margin };
        lease.scale(u64::from(percent), 100)
    }

    pub(super) fn granted(
        &mut self,
        id: &RequestId,
        (tokens, digest): (u32, Option<Box<KvDigest>>),
        remote: Vec<BlockList>,
        length: Nanos,
        turn: &mut DecodeTurn<'_>,
    ) {
        let usable = self.usable(length);
        let Some(lease) = self.lease_mut(id) else { return };
        if lease.remote.is_some() {
            return;
        }
        lease.remote = Some(Arc::new(remote));
        lease.digest = digest;
        lease.length = length;
        let asked = if planted!("lease-counts-from-the-grant") { turn.now } else { lease.asked.0 };
        let wanted = self.requests.get(id).map_or(0, |request| request.tokens);
        if tokens != wanted {
            let text = format!("{tokens} tokens granted, {wanted} wanted");
            return self.fail(id, Failure::mismatch(text), turn);
        }
        // The lease counts from when it was asked for; the prompt may have been queued since.
        if turn.now + usable.scale(1, 3) >= asked + usable {
            return self.renew(id, turn);
        }
        let thirds = if planted!("renewal-when-the-lease-ends") { 3 } else { 1 };
        self.timers
            .arm(DecodeTimer::Renew(id.clone()), turn.now.max(asked + length.scale(thirds, 3)));
        self.extend(id, asked + usable, turn);
    }

    /// Makes the lease last until `expiry`, and reads if it did not last before.
    fn extend(&mut self, id: &RequestId, expiry: Nanos, turn: &mut DecodeTurn<'_>) {
        let Some(lease) = self.lease_mut(id) else { return };
        let first = lease.expiry.replace(expiry).is_none();
        self.timers.arm(DecodeTimer::Expiry(id.clone()), expiry);
        if first {
            self.due(id, turn);
            self.start_reading(id, turn);
        }
    }

    /// Reads as soon as there are blocks on both sides.
    pub(super) fn start_reading(&mut self, id: &RequestId, turn: &mut DecodeTurn<'_>) {
        let flow = FlowId(self.fresh());
        let ranks = RankSet::first(self.config.geometry.tp);
        let Some(request) = self.requests.get(id) else { return };
        let info = self.peer_manager.info(request.connection);
        let from = info.map_or(request.computed, |info| self.moved_from(request, &info.geometry));
        let Some(request) = self.requests.get_mut(id) else { return };
        let (DecodePhase::Reading(read), Some(Lease { expiry: Some(_), remote: Some(remote), .. })) =
            (&mut request.phase, &request.lease)
        else {
            return;
        };
        read.flow = Some((flow, ranks));
        turn.push(TransferJob::Read {
            flow,
            request: id.clone(),
            peer: request.connection,
            from,
            tokens: request.tokens,
            remote: remote.clone(),
            local: request.blocks.clone(),
        });
        self.flows.insert(flow, id.clone());
    }

    pub(super) fn renew(&mut self, id: &RequestId, turn: &mut DecodeTurn<'_>) {
        // Whatever was granted: not before an answer may have come.
        let (pause, _) = self.config.channel.waits();
        let Some(lease) = self.lease_mut(id) else { return };
        lease.asked = (turn.now, lease.asked.1 + 1);
        let count = lease.asked.1;
        let again = turn.now + lease.length.scale(1, 3).max(pause);
        let Some(request) = self.requests.get(id) else { return };
        let message = Message::Renew { tag: request.tag.clone(), count };
        let connection = request.connection;
        self.timers.arm(DecodeTimer::Renew(id.clone()), again);
        // A renewal that cannot be sent leaves the lease as it is.
        let _ = self.peer_manager.send(connection, message, turn);
    }

    pub(super) fn renewed(
        &mut self,
        id: &RequestId,
        count: u32,
        length: Nanos,
        turn: &mut DecodeTurn<'_>,
    ) {
        let usable = self.usable(length);
        let Some(lease) = self.lease_mut(id) else { return };
        let (asked, newest) = lease.asked;
        if (count == newest || planted!("old-renewal-extends")) && lease.remote.is_some() {
            lease.length = length;
            self.extend(id, asked + usable, turn);
        }
    }

    /// Ends a read without success: at once if it has not started, else when its flow is quiet.
    pub(super) fn stop_reading(
        &mut self,
        id: &RequestId,
        failure: Failure,
        turn: &mut DecodeTurn<'_>,
    ) {
        let Some(request) = self.requests.get_mut(id) else { return };
        let DecodePhase::Reading(read) = &mut request.phase else { return };
        if read.failure.is_some() {
            return;
        }
        let Some((flow, _)) = read.flow else {
            self.release_source(id, turn);
            return self.answer(id, Err(failure), turn);
        };
        let at_once = planted!("read-stops-without-quiet").then(|| failure.clone());
        read.failure = Some(failure);
        self.ledger.quarantine(request.owner);
        self.cancel_timers(id);
        turn.push(TransferJob::Stop { flow });
        if let Some(failure) = at_once {
            self.answer(id, Err(failure), turn);
        }
    }

    pub(super) fn cancel_timers(&mut self, id: &RequestId) {
        self.timers.cancel(&DecodeTimer::Renew(id.clone()));
        self.timers.cancel(&DecodeTimer::Expiry(id.clone()));
    }

    pub(super) fn flow_news(
        &mut self,
        rank: u16,
        flow: FlowId,
        state: FlowState,
        turn: &mut DecodeTurn<'_>,
    ) {
        let Some(id) = self.flows.get(&flow).cloned() else { return };
        if self.check_news((rank, flow), &id, &state, turn) {
            return;
        }
        let (ended, failure) = match state {
            FlowState::Moving | FlowState::Digested(_) => return,
            FlowState::Failing(failure) => (false, Some(failure)),
            FlowState::Done { .. } => (true, None),
            FlowState::Failed(failure) => (true, Some(failure)),
        };
        if let Some(failure) = failure {
            self.stop_reading(&id, failure, turn);
        }
        let Some(read) = self.read_mut(&id) else { return };
        let Some((_, left)) = &mut read.flow else { return };
        if ended {
            left.remove(rank);
        }
        if left.is_empty() {
            self.flows.remove(&flow);
            self.read_ended(&id, turn);
        }
    }

    /// Every rank has ended the read. What came after the end of the lease is not used, because
    /// the source may have been somebody else's by then.
    fn read_ended(&mut self, id: &RequestId, turn: &mut DecodeTurn<'_>) {
        let Some(read) = self.read_mut(id) else { return };
        let failure = read.failure.take();
        let expiry = self.requests.get(id).and_then(|request| request.lease.as_ref()?.expiry);
        let late = expiry.is_none_or(|expiry| turn.now >= expiry)
            && !planted!("lease-not-checked-at-the-end");
        let failure = failure.or_else(|| late.then_some(Failure::LeaseExpired));
        let lease = self.requests.get_mut(id).and_then(|request| request.lease.as_mut());
        let digest = lease.and_then(|lease| lease.digest.take());
        self.release_source(id, turn);
        self.cancel_timers(id);
        match failure {
            Some(failure) => self.answer(id, Err(failure), turn),
            None => self.arrived_whole(id, digest, turn),
        }
    }
}
