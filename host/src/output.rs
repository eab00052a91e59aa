//! Standard output, for what was asked for and nothing else: libraries have their own lines to say,
//! MoRI its errors, and whoever reads ours takes them for ready lines or for JSON.

use rustix::io::fcntl_dupfd_cloexec;
use rustix::stdio::{dup2_stdout, stderr, stdout};
use std::fs::File;
use std::io::{self, Write};

/// Where results go. Until it is dropped whatever else is written to standard output goes to
/// standard error.
#[derive(Debug)]
pub(crate) enum Output {
    Own(File),
    /// The system has no descriptor to give, or one of the two streams is closed.
    Shared,
}

impl Output {
    pub(crate) fn take() -> Output {
        let own = fcntl_dupfd_cloexec(stdout(), 3);
        match own.and_then(|own| dup2_stdout(stderr()).map(|()| own)) {
            Ok(own) => Output::Own(own.into()),
            Err(_) => Output::Shared,
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Output::Own(file) => file.write(bytes),
            Output::Shared => io::stdout().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Output::Own(file) => file.flush(),
            Output::Shared => io::stdout().flush(),
        }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Output::Own(file) = self {
            // It was there before.
            let _back = dup2_stdout(file);
        }
    }
}
