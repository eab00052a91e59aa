//! What a process that MoRI ends says to who survives it.

use crate::mori::Shim;
use rustix::pipe::{PipeFlags, pipe_with};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

/// Both ends, open until the process ends: for reading and for writing.
static PIPE: OnceLock<(OwnedFd, OwnedFd)> = OnceLock::new();

/// A pipe that gets one line when the process ends while MoRI is up: how it ends, and the last call
/// into MoRI. Who opens it by `/proc/PID/fd/N` can read it after the end.
///
/// # Errors
/// The system has no pipe to give.
pub fn last_error_pipe() -> io::Result<BorrowedFd<'static>> {
    if PIPE.get().is_none() {
        // Another thread may be first.
        let _taken = PIPE.set(pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?);
    }
    Ok(PIPE.get().expect("it was made").0.as_fd())
}

/// Has MoRI's end told there, if somebody asked for it.
pub(crate) fn install(shim: &Shim) {
    if let Some((_, end)) = PIPE.get() {
        // SAFETY: The descriptor is open until the process ends.
        unsafe { (shim.functions.kf_last_words)(end.as_raw_fd()) };
    }
}
