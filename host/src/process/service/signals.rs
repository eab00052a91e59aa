//! The signals that end a process.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{self, set_parent_process_death_signal};
use rustix::stdio::stdin;
use rustix::time::Timespec;
use std::io;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM and SIGINT, heard from now on.
#[derive(Debug)]
pub(crate) struct ShutdownSignals(Signal, Signal);

impl ShutdownSignals {
    /// # Errors
    /// They cannot be heard.
    pub(crate) fn new() -> io::Result<ShutdownSignals> {
        Ok(ShutdownSignals(signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?))
    }

    pub(crate) async fn recv(&mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}

/// Ends this process with its parent, who holds the other end of its standard input: one that hangs
/// in a library does not even look whether that has ended.
///
/// # Errors
/// The parent has ended already.
pub(crate) fn follow_parent() -> io::Result<()> {
    set_parent_process_death_signal(Some(process::Signal::KILL))?;
    let input = stdin();
    let mut ends = [PollFd::new(&input, PollFlags::IN)];
    poll(&mut ends, Some(&Timespec::default()))?;
    match ends[0].revents().contains(PollFlags::HUP) {
        true => Err(io::Error::other("the process that started this one has ended")),
        false => Ok(()),
    }
}
