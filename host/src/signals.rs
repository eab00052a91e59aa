//! The signals that end a server.

use std::io;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM and SIGINT, heard from now on.
#[derive(Debug)]
pub(crate) struct Ends(Signal, Signal);

impl Ends {
    /// # Errors
    /// They cannot be heard.
    pub(crate) fn new() -> io::Result<Ends> {
        Ok(Ends(signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?))
    }

    /// Waits for either.
    pub(crate) async fn heard(&mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}
