//! A side of the smallest `bench`, as a process that what it tries may end.

use super::child::{ChildExit, ChildProcess};
use super::{DoctorArgs, LOOPBACK};
use serde_json::Value;
use std::time::Duration;

/// What each of two processes has registered: more than the usual limits of locked memory.
const MEMORY: &str = "64M";

/// One row of `bench`.
pub(super) const ONE: &[&str] =
    &["--sizes", "1M", "--batches", "1", "--seconds", "0.001", "--json"];

/// What a side does.
#[derive(Clone, Copy, Debug)]
pub(super) enum BenchRole<'a> {
    /// Waits here for one other.
    Serve(&'a str),
    /// Measures these rows with the one that waits there.
    To(&'a str, &'static [&'static str]),
}

/// One side, whose plane is that of `fabric`, arguments of `bench`.
///
/// # Errors
/// It cannot be started.
pub(super) fn side(
    args: &DoctorArgs,
    fabric: &[String],
    role: BenchRole<'_>,
) -> Result<ChildProcess, String> {
    // So that it says itself what did not come, before it is killed.
    let patience = (args.timeout / 4).max(Duration::from_millis(1)).as_secs_f64().to_string();
    let mut all = vec!["bench", "--child", "--memory", MEMORY, "--timeout", &patience];
    if args.host_ip != LOOPBACK {
        // Otherwise its end of the connection, which another machine reaches.
        all.extend(["--host-ip", &args.host_ip]);
    }
    all.extend(fabric.iter().map(String::as_str));
    match role {
        BenchRole::Serve(at) => all.extend(["--serve", at, "--once"]),
        BenchRole::To(to, rows) => {
            all.extend(["--to", to]);
            all.extend(rows);
        }
    }
    ChildProcess::start(all)
}

/// The rows that it measured.
pub(super) fn rows(end: &ChildExit) -> impl Iterator<Item = Value> {
    end.out.iter().filter_map(|line| serde_json::from_str(line).ok())
}

/// What is said of the bytes that were moved.
pub(super) fn compared(end: &ChildExit) -> &'static str {
    match end.err.contains("bytes were not compared") {
        true => "memory of GPUs is not compared",
        false => "every byte compared",
    }
}
