//! The thread that looks at the statuses of what is in flight: MoRI tells nobody of a completion.

use crate::event_queue::{MoriBatchOutcome, MoriEventQueue, MoriWorkerEvent};
use crate::job::MoriBatch;
use crate::mori::{MoriStatusCode, MoriTransferStatus};
use kvferry_engine::fabric::{FabricError, SessionId};
use kvferry_fabric_common::lock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Pauses between two looks, once nothing has ended for a while.
const PAUSES: [Duration; 2] = [Duration::from_micros(10), Duration::from_micros(200)];

/// A batch that MoRI has.
#[derive(Debug)]
pub(crate) struct InFlightBatch {
    pub(crate) job: MoriBatch,
    pub(crate) status: MoriTransferStatus,
}

/// What is in flight, and the jobs that are not.
#[derive(Debug, Default)]
pub(crate) struct MoriCompletionPoller {
    flights: Mutex<Vec<InFlightBatch>>,
    more: Condvar,
    idle: Mutex<Vec<MoriBatch>>,
    stopping: AtomicBool,
}

/// How a status ended; none while it has not.
pub(crate) fn end_of(status: &MoriTransferStatus) -> Option<MoriBatchOutcome> {
    match status.poll() {
        MoriStatusCode::Success => Some(MoriBatchOutcome::Done),
        MoriStatusCode::InProgress => None,
        code => Some(MoriBatchOutcome::Failed(cause_of(code, &status.text()))),
    }
}

/// MoRI has few codes; what happened is in its words.
fn cause_of(code: MoriStatusCode, text: &str) -> FabricError {
    let has = |part: &str| text.to_ascii_lowercase().contains(part);
    match code {
        MoriStatusCode::Rdma if text.starts_with("SQ full") => FabricError::QueueFull,
        MoriStatusCode::Rdma if has("retry") => FabricError::AckTimeout,
        MoriStatusCode::Rdma if has("remote access") => FabricError::RemoteAccess,
        MoriStatusCode::Rdma if has("local") && has("protection") => FabricError::LocalAccess,
        MoriStatusCode::Rdma if has("flush") => FabricError::QueuePair,
        _ => FabricError::Backend(format!("MoRI: {text} ({code:?})").into()),
    }
}

impl MoriCompletionPoller {
    fn lock(&self) -> MutexGuard<'_, Vec<InFlightBatch>> {
        lock(&self.flights)
    }

    pub(crate) fn add(&self, flight: InFlightBatch) {
        let mut flights = self.lock();
        flights.push(flight);
        if flights.len() == 1 {
            self.more.notify_one();
        }
    }

    /// True if a session has a batch in flight.
    pub(crate) fn has(&self, whose: &impl Fn(SessionId) -> bool) -> bool {
        self.lock().iter().any(|flight| whose(flight.job.session))
    }

    /// All flights, which are no longer looked at from here on.
    pub(crate) fn drain(&self) -> Vec<InFlightBatch> {
        std::mem::take(&mut *self.lock())
    }

    pub(crate) fn job(&self) -> MoriBatch {
        lock(&self.idle).pop().unwrap_or_default()
    }

    /// Takes a job that is over.
    pub(crate) fn recycle(&self, job: MoriBatch) {
        lock(&self.idle).push(job);
    }

    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        let _seen = self.lock();
        self.more.notify_one();
    }

    /// Ends with [`MoriCompletionPoller::stop`].
    pub(crate) fn run(&self, board: &Arc<MoriEventQueue>, spin: Duration) {
        let mut last = Instant::now();
        let mut pause = PAUSES[0];
        let mut ended = Vec::new();
        loop {
            let mut flights = self.lock();
            while flights.is_empty() && !self.stopping.load(Ordering::SeqCst) {
                flights = self.more.wait(flights).unwrap_or_else(PoisonError::into_inner);
                (last, pause) = (Instant::now(), PAUSES[0]);
            }
            if self.stopping.load(Ordering::SeqCst) {
                return;
            }
            let mut at = 0;
            while let Some(flight) = flights.get(at) {
                match end_of(&flight.status) {
                    Some(end) => ended.push((flights.swap_remove(at), end)),
                    None => at += 1,
                }
            }
            drop(flights);
            if !ended.is_empty() {
                (last, pause) = (Instant::now(), PAUSES[0]);
                for (InFlightBatch { job, .. }, end) in ended.drain(..) {
                    board.tell(MoriWorkerEvent::Ended { op: job.op, end });
                    self.recycle(job);
                }
            } else if last.elapsed() < spin {
                std::thread::yield_now();
            } else {
                std::thread::sleep(pause);
                pause = (2 * pause).min(PAUSES[1]);
            }
        }
    }
}
