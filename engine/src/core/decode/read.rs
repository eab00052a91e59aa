//! Pull: the lease on the source, and the flow that reads it.

use super::request::Phase;
use super::{Decode, Out, Timer};
use crate::core::error::Failure;
use crate::core::ids::{FlowId, RankSet, RequestId};
use crate::core::layout::{BlockList, Mismatch};
use crate::core::message::{FlowState, Job, Message};
use crate::core::time::Nanos;
use std::sync::Arc;

/// One read of a prompt's KV.
#[derive(Debug)]
pub(super) struct Read {
    /// When the newest question about the lease was sent, and its number.
    asked: (Nanos, u32),
    /// Until when what was read may be used; none before the grant.
    expiry: Option<Nanos>,
    /// The flow and the ranks that have not ended it.
    flow: Option<(FlowId, RankSet)>,
    /// Why it stops.
    failure: Option<Failure>,
}

impl Read {
    pub(super) fn asked(now: Nanos) -> Read {
        Read { asked: (now, 0), expiry: None, flow: None, failure: None }
    }
}

impl Decode {
    fn read_mut(&mut self, id: &RequestId) -> Option<&mut Read> {
        match &mut self.requests.get_mut(id)?.phase {
            Phase::Reading(read) => Some(read),
            _ => None,
        }
    }

    /// A lease less the margin for clocks that differ.
    fn usable(&self, lease: Nanos) -> Nanos {
        let percent = 100 - self.config.settings.drift_percent.min(100);
        lease.scale(u64::from(percent), 100)
    }

    pub(super) fn granted(
        &mut self,
        now: Nanos,
        id: &RequestId,
        tokens: u32,
        remote: Vec<BlockList>,
        lease: Nanos,
        out: &mut Out,
    ) {
        let flow = FlowId(self.fresh());
        let usable = self.usable(lease);
        let ranks = RankSet::first(self.config.geometry.tp);
        let Some(request) = self.requests.get_mut(id) else { return };
        let Phase::Reading(read) = &mut request.phase else { return };
        if read.expiry.is_some() || read.failure.is_some() {
            return;
        }
        let expiry = read.asked.0 + usable;
        read.expiry = Some(expiry);
        if tokens != request.tokens || now >= expiry {
            let failure = if now >= expiry {
                Failure::LeaseExpired
            } else {
                let text = format!("{tokens} tokens granted, {} wanted", request.tokens);
                Failure::Mismatch(Mismatch(text.into()))
            };
            return self.stop_reading(now, id, failure, out);
        }
        read.flow = Some((flow, ranks));
        out.push(Job::Read {
            flow,
            peer: request.slot,
            from: request.computed,
            tokens,
            remote: Arc::new(remote),
            local: request.blocks.clone(),
        });
        self.flows.insert(flow, id.clone());
        self.timers.arm(Timer::Expiry(id.clone()), expiry);
        self.timers.arm(Timer::Renew(id.clone()), now + lease.scale(1, 3));
    }

    pub(super) fn renew(&mut self, now: Nanos, id: &RequestId, out: &mut Out) {
        let again = now + self.config.settings.lease.scale(1, 3);
        let Some(request) = self.requests.get_mut(id) else { return };
        let Phase::Reading(read) = &mut request.phase else { return };
        if read.failure.is_some() {
            return;
        }
        read.asked = (now, read.asked.1 + 1);
        let message = Message::Renew { tag: request.tag.clone(), count: read.asked.1 };
        let slot = request.slot;
        self.timers.arm(Timer::Renew(id.clone()), again);
        // A renewal that cannot be sent leaves the lease as it is.
        let _ = self.station.send(now, slot, message, out);
    }

    pub(super) fn renewed(&mut self, id: &RequestId, count: u32, lease: Nanos) {
        let usable = self.usable(lease);
        let Some(read) = self.read_mut(id) else { return };
        if read.asked.1 != count || read.failure.is_some() {
            return;
        }
        let expiry = read.asked.0 + usable;
        read.expiry = Some(expiry);
        self.timers.arm(Timer::Expiry(id.clone()), expiry);
    }

    pub(super) fn lease_ended(&mut self, now: Nanos, id: &RequestId, out: &mut Out) {
        self.stop_reading(now, id, Failure::LeaseExpired, out);
    }

    /// Ends a read without success: at once if it has not started, else when its flow is quiet.
    pub(super) fn stop_reading(
        &mut self,
        now: Nanos,
        id: &RequestId,
        failure: Failure,
        out: &mut Out,
    ) {
        let Some(read) = self.read_mut(id) else { return };
        if read.failure.is_some() {
            return;
        }
        match read.flow {
            None => {
                self.release_source(now, id, out);
                self.answer(now, id, Err(failure), out);
            }
            Some((flow, _)) => {
                read.failure = Some(failure);
                self.quarantine(id);
                self.cancel_timers(id);
                out.push(Job::Stop { flow });
            }
        }
    }

    pub(super) fn cancel_timers(&mut self, id: &RequestId) {
        self.timers.cancel(&Timer::Renew(id.clone()));
        self.timers.cancel(&Timer::Expiry(id.clone()));
    }

    pub(super) fn flow_news(
        &mut self,
        now: Nanos,
        rank: u16,
        flow: FlowId,
        state: FlowState,
        out: &mut Out,
    ) {
        let Some(id) = self.flows.get(&flow).cloned() else { return };
        let (ended, failure) = match state {
            FlowState::Moving => return,
            FlowState::Failing(failure) => (false, Some(failure)),
            FlowState::Done { .. } => (true, None),
            FlowState::Failed(failure) => (true, Some(failure)),
        };
        if let Some(failure) = failure {
            self.stop_reading(now, &id, failure, out);
        }
        let Some(read) = self.read_mut(&id) else { return };
        let Some((_, left)) = &mut read.flow else { return };
        if ended {
            left.remove(rank);
        }
        if left.is_empty() {
            self.flows.remove(&flow);
            self.read_ended(now, &id, out);
        }
    }

    /// Every rank has ended the read. What came after the end of the lease is not used, because
    /// the source may have been somebody else's by then.
    fn read_ended(&mut self, now: Nanos, id: &RequestId, out: &mut Out) {
        let Some(read) = self.read_mut(id) else { return };
        let late = read.expiry.is_none_or(|expiry| now >= expiry);
        let result = match read.failure.take() {
            Some(failure) => Err(failure),
            None if late => Err(Failure::LeaseExpired),
            None => Ok(()),
        };
        self.release_source(now, id, out);
        self.answer(now, id, result, out);
    }
}
