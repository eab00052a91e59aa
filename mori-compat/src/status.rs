//! The status of one transfer.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// MoRI's status codes, as far as they occur here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum CompatStatusCode {
    /// All bytes are in place.
    Success = 0,
    /// Nothing was posted on it.
    Init = 1,
    InProgress = 2,
    /// The call was wrong; nothing was posted.
    InvalidArgs = 11,
    /// The transfer failed, or the queue was full.
    RdmaOp = 13,
    /// The session, its peer or the engine is gone.
    BadState = 14,
}

/// Shared between who posted a transfer and who settles it; settled once, never changed after.
#[derive(Debug)]
pub struct CompatTransferStatus {
    code: AtomicU32,
    message: OnceLock<String>,
    /// Held while the code changes, so that nobody begins to wait for what has happened.
    changing: Mutex<()>,
    changed: Condvar,
}

impl Default for CompatTransferStatus {
    /// Of no transfer yet.
    fn default() -> Self {
        CompatTransferStatus::with(CompatStatusCode::Init)
    }
}

impl CompatTransferStatus {
    fn with(code: CompatStatusCode) -> CompatTransferStatus {
        CompatTransferStatus {
            code: AtomicU32::new(code as u32),
            message: OnceLock::new(),
            changing: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn under_way() -> CompatTransferStatus {
        CompatTransferStatus::with(CompatStatusCode::InProgress)
    }

    pub(crate) fn settle(&self, verdict: Result<(), CompatFailure>) {
        let code = match verdict {
            Ok(()) => CompatStatusCode::Success,
            Err(CompatFailure { code, message }) => {
                // Whoever sees the code sees the message.
                if self.message.set(message).is_err() {
                    return;
                }
                code
            }
        };
        let under_way = CompatStatusCode::InProgress as u32;
        let release = Ordering::Release;
        let changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let _once = self.code.compare_exchange(under_way, code as u32, release, Ordering::Relaxed);
        drop(changing);
        self.changed.notify_all();
    }

    /// Waits for the end of a transfer that is under way, not longer than until a time, and tells
    /// how it stands then.
    pub fn wait_until(&self, until: Instant) -> CompatStatusCode {
        let mut changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if self.code() != CompatStatusCode::InProgress || left == Duration::ZERO {
                return self.code();
            }
            let woken = self.changed.wait_timeout(changing, left);
            changing = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub fn code(&self) -> CompatStatusCode {
        match self.code.load(Ordering::Acquire) {
            0 => CompatStatusCode::Success,
            1 => CompatStatusCode::Init,
            2 => CompatStatusCode::InProgress,
            11 => CompatStatusCode::InvalidArgs,
            13 => CompatStatusCode::RdmaOp,
            _ => CompatStatusCode::BadState,
        }
    }

    /// Why it failed; empty unless it did.
    pub fn message(&self) -> &str {
        match self.failed() {
            true => self.message.get().map_or("", String::as_str),
            false => "",
        }
    }

    /// True once all bytes are in place.
    pub fn succeeded(&self) -> bool {
        self.code() == CompatStatusCode::Success
    }

    /// True once it has failed; nothing of it lands any more.
    pub fn failed(&self) -> bool {
        self.code() > CompatStatusCode::InProgress
    }
}

/// How a transfer failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CompatFailure {
    pub(crate) code: CompatStatusCode,
    pub(crate) message: String,
}

impl CompatFailure {
    pub(crate) fn new(code: CompatStatusCode, message: impl Into<String>) -> CompatFailure {
        CompatFailure { code, message: message.into() }
    }
}
