//! The last words of a process that MoRI ended.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

/// Longest that is passed on, in bytes.
const MAX: u64 = 4 << 10;

/// The pipe for them. What is in it stays when the process has ended.
#[derive(Debug)]
pub(super) struct Words(File);

impl Words {
    /// The pipe that a process has as `fd`; none if it cannot be opened.
    pub(super) fn of(pid: u32, fd: i32) -> Option<Words> {
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let path = format!("/proc/{pid}/fd/{fd}");
        match OpenOptions::new().read(true).custom_flags(nonblocking).open(&path) {
            Ok(pipe) => Some(Words(pipe)),
            Err(why) => {
                tracing::warn!(path, %why, "no last words of a worker would be heard");
                None
            }
        }
    }

    /// What was said, if anything.
    pub(super) fn read(self) -> Option<String> {
        let mut said = Vec::new();
        // It ends with an error if the process is still there.
        let _ended = self.0.take(MAX).read_to_end(&mut said);
        let said = String::from_utf8_lossy(&said).trim().to_string();
        (!said.is_empty()).then_some(said)
    }
}
