//! Standard output, for what was asked for and nothing else: libraries have their own lines to say,
//! MoRI its errors, and whoever reads ours takes them for ready lines or for JSON.

use rustix::io::fcntl_dupfd_cloexec;
use rustix::stdio::{dup2_stdout, stderr, stdout};
use std::fs::File;
use std::io::{self, Write};

/// Where results go. Until it is dropped whatever else is written to standard output goes to
/// standard error.
#[derive(Debug)]
pub(crate) enum StdoutGuard {
    Own(File),
    /// The system has no descriptor to give, or one of the two streams is closed.
    Shared,
}

impl StdoutGuard {
    pub(crate) fn take() -> StdoutGuard {
        let own = fcntl_dupfd_cloexec(stdout(), 3);
        match own.and_then(|own| dup2_stdout(stderr()).map(|()| own)) {
            Ok(own) => StdoutGuard::Own(own.into()),
            Err(_) => StdoutGuard::Shared,
        }
    }
}

impl Write for StdoutGuard {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            StdoutGuard::Own(file) => file.write(bytes),
            StdoutGuard::Shared => io::stdout().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            StdoutGuard::Own(file) => file.flush(),
            StdoutGuard::Shared => io::stdout().flush(),
        }
    }
}

impl Drop for StdoutGuard {
    fn drop(&mut self) {
        if let StdoutGuard::Own(file) = self {
            // It was there before.
            let _back = dup2_stdout(file);
        }
    }
}
