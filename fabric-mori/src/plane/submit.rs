//! Taking batches.

use super::recovery::MoriRecovery;
use super::{MoriOperation, MoriPlane, MoriSessionPhase};
use crate::engine_thread::MoriEngineCommand;
use kvferry_engine::fabric::{Completion, DataEvent, Refused, Submit};
use std::time::{Duration, Instant};

impl MoriPlane {
    pub(super) fn post(&mut self, batch: &Submit<'_>) -> Result<(), Refused> {
        let invalid = |why: String| Err(Refused::Invalid(why.into()));
        let Some(session) = self.sessions.get_mut(&batch.session) else {
            return Err(Refused::Gone);
        };
        if session.phase != MoriSessionPhase::Open {
            return Err(Refused::Gone);
        }
        let config = &self.common.config;
        let count = batch.len.len();
        if batch.local.len() != count || batch.remote.len() != count {
            let (local, remote) = (batch.local.len(), batch.remote.len());
            return invalid(format!(
                "lists of different length: {local} local, {remote} remote, {count} lengths"
            ));
        }
        if count > config.slices_max as usize {
            return invalid(format!("{count} slices, {} is the most", config.slices_max));
        }
        if self.operations.contains_key(&batch.op) {
            return invalid(format!("operation {} is in flight", batch.op));
        }
        let mut job = self.common.watch.job();
        let bytes = match job.fill(batch, session.lens) {
            Ok(bytes) => bytes,
            Err(refused) => {
                self.common.watch.recycle(job);
                return Err(refused);
            }
        };
        let ranges = job.len.len() as u64;
        if ranges == 0 {
            self.common.watch.recycle(job);
            self.events.push_back(DataEvent::Completed { op: batch.op, outcome: Completion::Done });
            return Ok(());
        }
        let Some(peer) = self.peers.get_mut(&session.peer) else { return Err(Refused::Gone) };
        let full = self.operations.len() >= config.operations_max as usize
            || (peer.ranges > 0 && peer.ranges + ranges > config.ranges_max());
        if full || self.recovery != MoriRecovery::Idle {
            self.common.watch.recycle(job);
            return Err(Refused::Busy);
        }
        peer.ranges += ranges;
        let order = self.order;
        self.order += 1;
        session.wire.insert(order, batch.op);
        let (session, region) = (batch.session, session.local);
        let patience = Duration::from_millis(config.operation_ms.into());
        let deadline = Instant::now() + patience;
        let operation =
            MoriOperation { session, order, region, ranges, bytes, deadline, told: false };
        self.operations.insert(batch.op, operation);
        self.check_by(deadline);
        if let Some(held) = self.regions.get_mut(&region) {
            held.operations += 1;
        }
        self.tell(MoriEngineCommand::Post(job));
        Ok(())
    }
}
