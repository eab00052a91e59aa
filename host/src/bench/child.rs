//! The other side as a process that this one starts.

use super::args::BenchArgs;
use crate::process::{CommandError, this_program};
use rustix::process::Signal;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;

/// It ends when this is dropped, or when this process ends: its standard input does then.
#[derive(Debug)]
pub(super) struct BenchChild {
    child: Child,
    /// Where it waits for this side.
    pub(super) address: String,
}

impl BenchChild {
    /// # Errors
    /// It does not start, or says nothing in time.
    pub(super) fn start(args: &BenchArgs) -> Result<BenchChild, CommandError> {
        let failed = |why: String| {
            CommandError::Input(format!("the other side, a process of its own: {why}"))
        };
        let mut program = this_program().map_err(|why| failed(why.to_string()))?;
        let child = program
            .args(args.of_child())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|why| {
                failed(format!("cannot start {}: {why}", program.get_program().display()))
            })?;
        let mut other = BenchChild { child, address: String::new() };
        let out = other.child.stdout.take().expect("it was piped");
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            let mut line = String::new();
            let read = BufReader::new(out).read_line(&mut line);
            // Nobody may wait any more.
            let _ = tell.send(read.map(|_| line));
        });
        let line = match told.recv_timeout(args.timeout) {
            Ok(line) => line.map_err(|why| failed(why.to_string()))?,
            Err(_) => {
                let patience = args.timeout.as_secs_f64();
                return Err(failed(format!("not ready within {patience} s (--timeout)")));
            }
        };
        let ready: Value = serde_json::from_str(&line).unwrap_or_default();
        let Some(address) = ready["address"].as_str() else {
            let how = other.end().map(|status| format!(" ({status})")).unwrap_or_default();
            return Err(failed(format!("it ended{how} before it was ready; why is above")));
        };
        other.address = address.into();
        Ok(other)
    }

    /// Ends it. How it ended, if it did so by itself.
    pub(super) fn end(&mut self) -> Option<ExitStatus> {
        // If it is about to end, it is too late for the signal.
        let _ = self.child.kill();
        let status = self.child.wait().ok()?;
        (status.signal() != Some(Signal::KILL.as_raw())).then_some(status)
    }
}

impl Drop for BenchChild {
    fn drop(&mut self) {
        self.end();
    }
}
