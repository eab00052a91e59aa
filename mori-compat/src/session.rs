//! A session: posts batches.

use crate::audit::AuditRecord;
use crate::poll_thread::CompatEngineShared;
use crate::state::{
    CompatBatch, CompatState, CompatTransfer, FinishedTransfer, TimedAction, injected,
};
use crate::status::{CompatFailure, CompatStatusCode, CompatTransferStatus};
use kvferry_engine::fabric::{Direction, OpId, Refused, SessionId};
use kvferry_fabric_host::SessionPaths;
use kvferry_faults::InjectedEffect;
use std::fmt;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

/// Transfers between one local and one remote region.
pub struct CompatSession {
    shared: Arc<CompatEngineShared>,
    id: SessionId,
    base: u64,
    peer: Arc<str>,
}

impl fmt::Debug for CompatSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompatSession").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Drop for CompatSession {
    /// What is under way goes on.
    fn drop(&mut self) {
        self.shared.lock().abandon(self.id);
    }
}

impl CompatSession {
    pub(crate) fn new(
        shared: Arc<CompatEngineShared>,
        id: SessionId,
        base: u64,
        peer: Arc<str>,
    ) -> CompatSession {
        CompatSession { shared, id, base, peer }
    }

    /// The engine at the other end.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Whether a new session with the same two regions may do what this one cannot any more.
    pub(crate) fn is_stale(&self) -> bool {
        let state = self.shared.lock();
        state.sessions.get(&self.id).is_none_or(|line| line.is_stale || line.dead.is_some())
    }

    /// How its bytes go; none if it is dead or there is only one way.
    pub fn paths(&self) -> Option<SessionPaths> {
        self.shared.lock().plane.as_ref()?.paths(self.id)
    }

    /// Posts the copy of some byte ranges; offsets are relative to the two regions. While the queue
    /// is full it waits, for as long as [`Settings::backoff`](crate::CompatSettings) says; what
    /// cannot be posted is in the status, as with MoRI.
    pub fn post(
        &self,
        direction: Direction,
        local: Vec<u64>,
        remote: Vec<u64>,
        len: Vec<u64>,
        uid: u64,
    ) -> Arc<CompatTransferStatus> {
        let status = Arc::new(CompatTransferStatus::under_way());
        if local.len() != len.len() || remote.len() != len.len() {
            let (local, remote, len) = (local.len(), remote.len(), len.len());
            let text = format!("{local} local and {remote} remote offsets for {len} sizes");
            status.settle(Err(CompatFailure::new(CompatStatusCode::InvalidArgs, text)));
            return status;
        }
        let batch = CompatBatch { session: self.id, direction, local, remote, len };
        let mut done = Vec::new();
        if let Err(failure) = self.take(batch, uid, &status, &mut done) {
            status.settle(Err(failure));
        }
        self.shared.settle(done);
        status
    }

    /// Posts a batch, or does with it what a fault says.
    fn take(
        &self,
        batch: CompatBatch,
        uid: u64,
        status: &Arc<CompatTransferStatus>,
        done: &mut Vec<FinishedTransfer>,
    ) -> Result<(), CompatFailure> {
        let mut state = self.shared.lock();
        self.usable(&state)?;
        let now = self.shared.now();
        if state.faults.queue_full(now) {
            return Err(injected("SQ full"));
        }
        let record = self.shared.audit.as_ref().map(|_| self.record(&batch, uid));
        let mut end = |verdict, record| {
            done.push(FinishedTransfer { status: status.clone(), verdict, record });
            Ok(())
        };
        let tell = match state.faults.posted(now) {
            None => None,
            Some(InjectedEffect::Reported(fault)) => Some(fault),
            Some(InjectedEffect::NoCopy) => return end(Ok(()), record),
            Some(InjectedEffect::Fails) => return end(Err(injected("transfer failed")), record),
            Some(InjectedEffect::KillsPeer) => {
                let peer = state.sessions.get(&self.id).map(|line| line.peer);
                state.kill(|one| Some(one.peer) == peer, &injected("queue pair error").message);
                self.shared.ring();
                return end(Err(injected("queue pair error")), record);
            }
            Some(InjectedEffect::MovedLate(by)) => {
                state.at(now + by, TimedAction::Move(batch));
                self.shared.ring();
                return end(Ok(()), record);
            }
            Some(InjectedEffect::FailsAndMoves(by)) => {
                state.at(now + by, TimedAction::Move(batch));
                self.shared.ring();
                return end(Err(injected("acknowledgement lost")), record);
            }
        };
        let key = state.ids.next();
        let session = self.id;
        if let Some(line) = state.sessions.get_mut(&session) {
            line.busy += 1;
        }
        let (status, failure) = (status.clone(), None);
        let transfer = CompatTransfer {
            status,
            session,
            outstanding: 1,
            failure,
            needs_quiesce: false,
            tell,
            record,
        };
        state.transfers.insert(key, transfer);
        self.submit(state, key, &batch, done);
        self.shared.ring();
        Ok(())
    }

    fn usable(&self, state: &CompatState) -> Result<(), CompatFailure> {
        let why = match state.sessions.get(&self.id) {
            Some(line) if state.plane.is_some() => line.dead.as_deref(),
            _ => Some("the engine is closed"),
        };
        why.map_or(Ok(()), |why| {
            Err(CompatFailure::new(
                CompatStatusCode::BadState,
                format!("session with {}: {why}", self.peer),
            ))
        })
    }

    /// Posts a batch as operations of a size that the plane takes, waiting for room.
    fn submit<'a>(
        &'a self,
        mut state: MutexGuard<'a, CompatState>,
        key: u64,
        batch: &CompatBatch,
        done: &mut Vec<FinishedTransfer>,
    ) {
        let until = Instant::now() + self.shared.backoff;
        let slices = batch.len.len();
        let mut from = 0;
        while from < slices {
            let op = OpId(state.ids.next());
            let Some(plane) = &mut state.plane else { break };
            let to = slices.min(from + plane.caps().slices_max as usize);
            let failure = match plane.submit(batch.part(op, from..to)) {
                Ok(()) => {
                    state.ops.insert(op, key);
                    if let Some(transfer) = state.transfers.get_mut(&key) {
                        transfer.outstanding += 1;
                    }
                    from = to;
                    continue;
                }
                Err(Refused::Busy) => {
                    let (next, in_time) = self.shared.wait(state, until);
                    state = next;
                    if in_time {
                        continue;
                    }
                    let waited = self.shared.backoff.as_millis();
                    CompatFailure::new(
                        CompatStatusCode::RdmaOp,
                        format!("SQ full: no room in {waited} ms"),
                    )
                }
                Err(why @ Refused::Invalid(_)) => {
                    CompatFailure::new(CompatStatusCode::InvalidArgs, why.to_string())
                }
                Err(why) => {
                    if let Some(line) = state.sessions.get_mut(&self.id) {
                        line.is_stale = true;
                    }
                    CompatFailure::new(CompatStatusCode::BadState, why.to_string())
                }
            };
            if let Some(transfer) = state.transfers.get_mut(&key) {
                transfer.failure.get_or_insert(failure);
            }
            break;
        }
        state.release(self.shared.now(), key, 1, done);
    }

    fn record(&self, batch: &CompatBatch, uid: u64) -> AuditRecord {
        AuditRecord {
            uid,
            direction: batch.direction,
            peer: self.peer.clone(),
            base: self.base,
            local: batch.local.clone(),
            remote: batch.remote.clone(),
            len: batch.len.clone(),
        }
    }
}
