//! The thread that polls an engine's plane and settles its statuses.

use crate::audit::AuditLog;
use crate::state::{CompatState, FinishedTransfer};
use kvferry_engine::core::Nanos;
use kvferry_engine::fabric::NextPoll;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Wake as TaskWake, Waker};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// An engine, shared between its callers and its thread.
pub(crate) struct CompatEngineShared {
    state: Mutex<CompatState>,
    changed: Condvar,
    pub(crate) audit: Option<AuditLog>,
    /// How long a post waits for room.
    pub(crate) backoff: Duration,
    start: Instant,
    thread: OnceLock<Thread>,
}

impl CompatEngineShared {
    pub(crate) fn new(
        state: CompatState,
        audit: Option<AuditLog>,
        backoff: Duration,
    ) -> CompatEngineShared {
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let (start, thread) = (Instant::now(), OnceLock::new());
        CompatEngineShared { state, changed, audit, backoff, start, thread }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, CompatState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Since the engine started.
    pub(crate) fn now(&self) -> Nanos {
        Nanos(self.start.elapsed().as_nanos() as u64)
    }

    /// Gives the lock away until something changed or the time has come; false if it has.
    pub(crate) fn wait<'a>(
        &self,
        state: MutexGuard<'a, CompatState>,
        until: Instant,
    ) -> (MutexGuard<'a, CompatState>, bool) {
        let left = until.saturating_duration_since(Instant::now());
        let (state, timeout) =
            self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        (state, !timeout.timed_out())
    }

    /// Makes the thread look again.
    pub(crate) fn ring(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    pub(crate) fn settle(&self, finished: Vec<FinishedTransfer>) {
        for one in finished {
            one.settle(self.audit.as_ref());
        }
    }
}

/// Wakes the thread for the plane.
struct PollThreadWaker(Thread);

impl TaskWake for PollThreadWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Starts the thread; it ends when the plane is taken away.
///
/// # Errors
/// The system gives no thread.
pub(crate) fn start(shared: &Arc<CompatEngineShared>) -> std::io::Result<JoinHandle<()>> {
    let mine = shared.clone();
    let handle = thread::Builder::new().name("kvferry-mori".into()).spawn(move || run(&mine))?;
    let thread = handle.thread().clone();
    if let Some(plane) = &mut shared.lock().plane {
        plane.set_waker(Waker::from(Arc::new(PollThreadWaker(thread.clone()))));
    }
    let _first = shared.thread.set(thread);
    shared.ring();
    Ok(handle)
}

fn run(shared: &CompatEngineShared) {
    let mut done = Vec::new();
    loop {
        let mut state = shared.lock();
        if state.plane.is_none() {
            return;
        }
        let (wake, changed) = state.step(shared.now(), &mut done);
        drop(state);
        if changed {
            shared.changed.notify_all();
        }
        shared.settle(std::mem::take(&mut done));
        match wake {
            // A plane that spins may wait for a thread, or a process, that waits for this core.
            NextPoll::Ready => std::thread::yield_now(),
            NextPoll::External => thread::park(),
            NextPoll::At(at) => {
                let now = shared.now();
                if at > now {
                    thread::park_timeout(Duration::from_nanos(at.0 - now.0));
                }
            }
        }
    }
}
