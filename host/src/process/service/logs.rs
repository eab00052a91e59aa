//! Structured logs on stderr.

use crate::process::LINES_MAX;
use clap::{Args, ValueEnum};
use kvferry_engine::text::printable_lines;
use std::borrow::Cow;
use std::io::{self, Write};
use tracing::level_filters::LevelFilter;

/// What is logged, and how.
#[derive(Clone, Debug, Args)]
pub(crate) struct LogArgs {
    /// Form of the log, which goes to stderr
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub(crate) log_format: LogFormat,
    /// Least severity that is logged: off, error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub(crate) log_level: LevelFilter,
}

/// How lines of the log look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

impl Default for LogArgs {
    fn default() -> LogArgs {
        LogArgs { log_format: LogFormat::Text, log_level: LevelFilter::INFO }
    }
}

/// Standard error with the unprintable characters of log lines replaced, because lines quote what
/// peers send.
struct PrintableStderr;

/// The printable form of a line, of bounded length.
fn shown(line: &[u8]) -> Cow<'_, [u8]> {
    let is_plain = |byte: &u8| matches!(byte, b' '..=b'~' | b'\n' | b'\t');
    if line.len() <= LINES_MAX && line.iter().all(is_plain) {
        return Cow::Borrowed(line);
    }
    let mut text = printable_lines(&String::from_utf8_lossy(line), LINES_MAX);
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Cow::Owned(text.into_bytes())
}

impl Write for PrintableStderr {
    /// Writes a whole line.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        io::stderr().write_all(&shown(line))?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Logs from now on.
pub(crate) fn start(args: &LogArgs) {
    let builder = tracing_subscriber::fmt()
        .with_max_level(args.log_level)
        .with_target(false)
        .with_writer(|| PrintableStderr);
    // Fails only if there is a subscriber already, as in tests within one process.
    let _ = match args.log_format {
        LogFormat::Text => builder.with_ansi(false).try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_log_are_printable() {
        let plain = b"INFO served peer=\"p0\"\n";
        assert!(matches!(shown(plain), Cow::Borrowed(line) if line == plain));
        let odd = "WARN refused name=\u{1b}[2J\u{202e}d0\u{9b}31m caf\u{e9}\r\n";
        let seen = "WARN refused name=\u{fffd}[2J\u{fffd}d0\u{fffd}31m caf\u{e9}\u{fffd}\n";
        assert_eq!(shown(odd.as_bytes()), seen.as_bytes());
        let long = shown(&[b'x'; 3 * LINES_MAX]).into_owned();
        assert!(long.len() == LINES_MAX + 1 && long.ends_with(b"\n"), "{}", long.len());
    }
}
