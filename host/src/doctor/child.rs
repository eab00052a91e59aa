//! A process of this program that may end in any way, or not at all: what it said, and how it
//! ended.

use crate::process::this_program;
use rustix::process::Signal;
use serde::de::DeserializeOwned;
use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fmt::Display;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

/// Last lines that are kept of what it says on stderr: libraries may say a lot.
const LINES: usize = 100;

/// How long one that was killed may take to end.
const LAST: Duration = Duration::from_secs(2);

enum ChildOutput {
    /// A line of its output.
    Line(String),
    /// The end of both its streams, and so its own; what it said on stderr.
    Over(String),
}

/// Killed when it is dropped.
pub(super) struct ChildProcess {
    child: Child,
    input: Option<ChildStdin>,
    heard: Receiver<ChildOutput>,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExitCause {
    Exit(i32),
    Signal(i32),
    /// It went on for so long, and was killed.
    Killed(Duration),
}

/// The end of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ChildExit {
    pub(super) how: ExitCause,
    /// Lines of its output that nobody has taken yet.
    pub(super) out: Vec<String>,
    /// The last of what it said on stderr.
    pub(super) err: String,
}

impl ChildProcess {
    /// # Errors
    /// It cannot be started.
    pub(super) fn start<S: AsRef<OsStr>>(
        args: impl IntoIterator<Item = S>,
    ) -> Result<ChildProcess, String> {
        let mut program = this_program().map_err(|why| format!("the path of kvferry: {why}"))?;
        let mut child = program
            .args(args)
            .envs(loud())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|why| format!("starting {}: {why}", program.get_program().display()))?;
        let input = child.stdin.take();
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let (tell, heard) = mpsc::channel();
        let tell_lines = tell.clone();
        let lines = thread::spawn(move || {
            let lines = out.into_iter().flat_map(|out| BufReader::new(out).lines());
            // Nobody may listen any more.
            lines
                .map_while(Result::ok)
                .for_each(|line| drop(tell_lines.send(ChildOutput::Line(line))));
        });
        thread::spawn(move || {
            let said = err.map(last_lines).unwrap_or_default();
            let _held = lines.join();
            let _ = tell.send(ChildOutput::Over(said));
        });
        Ok(ChildProcess { child, input, heard })
    }

    /// The first line of its output.
    ///
    /// # Errors
    /// It ended before that, or was killed when the time was up.
    pub(super) fn ready<T: DeserializeOwned>(
        mut self,
        limit: Duration,
    ) -> Result<(ChildProcess, T), ChildExit> {
        match self.heard.recv_timeout(limit) {
            Ok(ChildOutput::Line(line)) => match serde_json::from_str(&line) {
                Ok(ready) => Ok((self, ready)),
                Err(_) => Err(self.kill(limit, vec![line])),
            },
            Ok(ChildOutput::Over(err)) => Err(self.over(Vec::new(), err)),
            Err(_) => Err(self.kill(limit, Vec::new())),
        }
    }

    /// Ends its input, and waits for so long at most until it ends.
    pub(super) fn end(mut self, limit: Duration) -> ChildExit {
        drop(self.input.take());
        self.wait(Some(limit))
    }

    /// Waits until it ends; for so long at most, if there is a limit.
    pub(super) fn wait(mut self, limit: Option<Duration>) -> ChildExit {
        let until = limit.map(|limit| Instant::now() + limit);
        let mut out = Vec::new();
        loop {
            let heard = match until {
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    self.heard.recv_timeout(left).ok()
                }
                None => self.heard.recv().ok(),
            };
            match heard {
                Some(ChildOutput::Line(line)) => out.push(line),
                Some(ChildOutput::Over(err)) => return self.over(out, err),
                None => return self.kill(limit.unwrap_or_default(), out),
            }
        }
    }

    fn over(&mut self, out: Vec<String>, err: String) -> ChildExit {
        let how = self.child.wait().map_or(ExitCause::Exit(-1), ExitCause::from);
        ChildExit { how, out, err }
    }

    fn kill(&mut self, limit: Duration, mut out: Vec<String>) -> ChildExit {
        // It may end at this moment.
        let _ = self.child.kill();
        let mut said = String::new();
        // One that hangs in a driver does not even end by that.
        while let Ok(heard) = self.heard.recv_timeout(LAST) {
            match heard {
                ChildOutput::Line(line) => out.push(line),
                ChildOutput::Over(err) => said = err,
            }
        }
        ChildExit { how: ExitCause::Killed(limit), out, err: said }
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // Nobody waits for one that hangs in a driver.
        let _ = self.child.kill();
        let _ = self.child.try_wait();
    }
}

impl From<ExitStatus> for ExitCause {
    fn from(status: ExitStatus) -> ExitCause {
        match status.signal() {
            Some(signal) => ExitCause::Signal(signal),
            None => ExitCause::Exit(status.code().unwrap_or(-1)),
        }
    }
}

impl Display for ExitCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ExitCause::Exit(code) => write!(f, "ended with exit status {code}"),
            ExitCause::Signal(number) => {
                let names = [
                    (Signal::ABORT, "SIGABRT: it aborted"),
                    (Signal::SEGV, "SIGSEGV: it crashed"),
                    (Signal::BUS, "SIGBUS: it crashed"),
                    (
                        Signal::KILL,
                        "SIGKILL: somebody, or the kernel for want of memory, killed it",
                    ),
                ];
                let known = names.iter().find(|(signal, _)| signal.as_raw() == *number);
                let name = known.map(|(_, name)| format!(" ({name})")).unwrap_or_default();
                write!(f, "was ended by signal {number}{name}")
            }
            ExitCause::Killed(limit) => {
                write!(f, "had not come to an end after {} s, and was killed", limit.as_secs_f64())
            }
        }
    }
}

/// MoRI tells only as a warning that it finds no libibverbs.
fn loud() -> Option<(&'static str, &'static str)> {
    const LEVELS: [&str; 2] = ["MORI_APP_LOG_LEVEL", "MORI_GLOBAL_LOG_LEVEL"];
    let is_given = LEVELS.iter().any(|name| std::env::var_os(name).is_some());
    (!is_given).then_some((LEVELS[0], "warn"))
}

/// Reads to the end; whatever else is written there is kept flowing.
fn last_lines(from: impl Read) -> String {
    let mut reader = BufReader::new(from);
    let mut lines = VecDeque::new();
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
        if lines.len() == LINES {
            lines.pop_front();
        }
        lines.push_back(String::from_utf8_lossy(&line).into_owned());
        line.clear();
    }
    String::from_iter(lines)
}
