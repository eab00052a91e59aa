//! The status of one transfer.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// MoRI's status codes, as far as they occur here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Code {
    /// All bytes are in place.
    Success = 0,
    /// Under way.
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
pub struct Status {
    code: AtomicU32,
    message: OnceLock<String>,
}

impl Status {
    pub(crate) fn under_way() -> Status {
        Status { code: AtomicU32::new(Code::InProgress as u32), message: OnceLock::new() }
    }

    pub(crate) fn settle(&self, verdict: Result<(), Failure>) {
        let code = match verdict {
            Ok(()) => Code::Success,
            Err(Failure { code, message }) => {
                // Whoever sees the code sees the message.
                if self.message.set(message).is_err() {
                    return;
                }
                code
            }
        };
        let under_way = Code::InProgress as u32;
        let release = Ordering::Release;
        let _once = self.code.compare_exchange(under_way, code as u32, release, Ordering::Relaxed);
    }

    /// How it stands.
    pub fn code(&self) -> Code {
        match self.code.load(Ordering::Acquire) {
            0 => Code::Success,
            2 => Code::InProgress,
            11 => Code::InvalidArgs,
            13 => Code::RdmaOp,
            _ => Code::BadState,
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
        self.code() == Code::Success
    }

    /// True once it has failed; nothing of it lands any more.
    pub fn failed(&self) -> bool {
        self.code() > Code::InProgress
    }
}

/// How a transfer failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) code: Code,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Failure {
        Failure { code, message: message.into() }
    }
}
