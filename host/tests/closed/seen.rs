//! What processes say of the inputs that their machines have had.

use crate::fleet::{PATIENCE, TestCluster};
use crate::process::ServeProcess;
use std::collections::BTreeSet;
use std::thread;
use std::time::Instant;

/// Machines and kinds of their inputs.
pub(crate) type SeenInputs = BTreeSet<(String, String)>;

pub(crate) fn read(seen: &mut SeenInputs, process: &ServeProcess) {
    for line in process.get("/metrics").lines() {
        let Some((_, labels)) = line.split_once("_inputs_total{machine=\"") else { continue };
        let mut parts = labels.split('"');
        let (machine, kind) = (parts.next(), parts.nth(1));
        let known = machine.zip(kind).unwrap_or_else(|| panic!("no kind in {line}"));
        seen.insert((known.0.into(), known.1.into()));
    }
}

/// Reads a process until its machine had these inputs.
pub(crate) fn until(seen: &mut SeenInputs, process: &ServeProcess, machine: &str, kinds: &[&str]) {
    let start = Instant::now();
    loop {
        let mut now = SeenInputs::new();
        read(&mut now, process);
        let missing = |kind: &&&str| !now.contains(&(machine.to_owned(), (**kind).to_owned()));
        let missing: Vec<_> = kinds.iter().filter(missing).collect();
        let is_done = missing.is_empty();
        assert!(is_done || start.elapsed() < PATIENCE, "the {machine} had no {missing:?}: {now:?}");
        seen.extend(now);
        if is_done {
            return;
        }
        thread::yield_now();
    }
}

/// Reads a process until its machine had one of these inputs, the first of which it had.
pub(crate) fn until_any<'a>(
    seen: &mut SeenInputs,
    process: &ServeProcess,
    machine: &str,
    kinds: &[&'a str],
) -> &'a str {
    let start = Instant::now();
    loop {
        let mut now = SeenInputs::new();
        read(&mut now, process);
        let had = |kind: &&&str| now.contains(&(machine.to_owned(), (**kind).to_owned()));
        let found = kinds.iter().find(had).copied();
        assert!(start.elapsed() < PATIENCE, "the {machine} had none of {kinds:?}: {now:?}");
        seen.extend(now);
        if let Some(found) = found {
            return found;
        }
        thread::yield_now();
    }
}

/// Waits until the machine of a process had so many inputs of a kind.
pub(crate) fn until_count(process: &ServeProcess, machine: &str, kind: &str, count: u64) {
    let start = Instant::now();
    let name = format!("_inputs_total{{machine=\"{machine}\",kind=\"{kind}\"}} ");
    loop {
        let page = process.get("/metrics");
        let had = page.lines().find_map(|line| line.split_once(&*name)?.1.parse::<u64>().ok());
        if had >= Some(count) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "the {machine} had {had:?} {kind}, not {count}");
        thread::yield_now();
    }
}

/// True if the router has had such an input.
pub(crate) fn seen_now(fleet: &TestCluster, kind: &str) -> bool {
    let mut seen = SeenInputs::new();
    read(&mut seen, &fleet.router);
    seen.contains(&("router".into(), kind.into()))
}
