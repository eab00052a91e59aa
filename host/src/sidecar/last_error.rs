//! The last words of a process that MoRI ended.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

/// Longest that is passed on, in bytes.
const MAX: usize = 4 << 10;

/// The pipe for them. What is in it stays when the process has ended.
#[derive(Debug)]
pub(super) struct LastErrorPipe(File);

impl LastErrorPipe {
    /// The pipe that a process has as `fd`; none if it cannot be opened.
    pub(super) fn of(pid: u32, fd: i32) -> Option<LastErrorPipe> {
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let path = format!("/proc/{pid}/fd/{fd}");
        match OpenOptions::new().read(true).custom_flags(nonblocking).open(&path) {
            Ok(pipe) => Some(LastErrorPipe(pipe)),
            Err(why) => {
                tracing::warn!(path, %why, "no last words of a worker would be heard");
                None
            }
        }
    }

    /// What was said, if anything. It is written and read in one piece.
    pub(super) fn read(mut self) -> Option<String> {
        let mut said = [0; MAX];
        // An error if nothing was said and the process is still there.
        let len = self.0.read(&mut said).unwrap_or(0);
        let said = String::from_utf8_lossy(&said[..len]).trim().to_string();
        (!said.is_empty()).then_some(said)
    }
}
