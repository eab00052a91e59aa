//! The status of one transfer.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// MoRI's status codes, as far as they occur here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum CompatStatusCode {
    /// All bytes are in place.
    Success = 0,
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
}

impl CompatTransferStatus {
    pub(crate) fn under_way() -> CompatTransferStatus {
        CompatTransferStatus {
            code: AtomicU32::new(CompatStatusCode::InProgress as u32),
            message: OnceLock::new(),
        }
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
        let _once = self.code.compare_exchange(under_way, code as u32, release, Ordering::Relaxed);
    }

    pub fn code(&self) -> CompatStatusCode {
        match self.code.load(Ordering::Acquire) {
            0 => CompatStatusCode::Success,
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
