//! Taking batches.

use super::recovery::MoriRecovery;
use super::{MoriOperation, MoriPlane};
use crate::engine_thread::MoriEngineCommand;
use kvferry_engine::fabric::{Completion, DataEvent, Refused, Submit};
use std::time::{Duration, Instant};

impl MoriPlane {
    pub(super) fn post(&mut self, batch: &Submit<'_>) -> Result<(), Refused> {
        let config = &self.common.config;
        let (session, ()) = self.ledger.check_submit(batch, config.slices_max)?;
        let (peer, lens) = (session.peer, session.lens);
        let mut job = self.common.watch.job();
        let bytes = match job.fill(batch, lens) {
            Ok(bytes) => bytes,
            Err(refused) => {
                self.common.watch.recycle(job);
                return Err(refused);
            }
        };
        let ranges = job.len.len() as u64;
        if ranges == 0 {
            self.common.watch.recycle(job);
            let (op, outcome) = (batch.op, Completion::Done);
            self.ledger.events.push_back(DataEvent::Completed { op, outcome });
            return Ok(());
        }
        let Some(peer) = self.ledger.peers.get_mut(&peer) else {
            return Err(Refused::Gone);
        };
        let full = self.ledger.operations.len() >= config.operations_max as usize
            || (peer.ranges > 0 && peer.ranges + ranges > config.ranges_max());
        if full || self.recovery != MoriRecovery::Idle {
            self.common.watch.recycle(job);
            return Err(Refused::Busy);
        }
        peer.ranges += ranges;
        let deadline = Instant::now() + Duration::from_millis(config.operation_ms.into());
        self.ledger.submitted(batch, MoriOperation { ranges, bytes, deadline });
        self.check_by(deadline);
        self.tell(MoriEngineCommand::Post(job));
        Ok(())
    }
}
