//! Test programs: how they are built, and how one is run within limits.

use crate::check::{ROUNDS_MAX, RefusedSites, refused};
use crate::tree::MutantTree;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Packages whose test programs are run.
const PACKAGES: [&str; 6] = [
    "kvferry-engine",
    "kvferry-wire",
    "kvferry-fabric-common",
    "kvferry-fabric-host",
    "kvferry-sim",
    "kvferry",
];

/// Test programs beside those of the libraries, but those that read sources.
const TARGETS: [&str; 33] = [
    // Of the engine.
    "actors",
    "block_ledger",
    "layout",
    "machine",
    "moriio",
    "moriio_peers",
    "native_dialect",
    "native_golden",
    "omni_mori",
    "pair",
    "payload",
    "payload_hosts",
    "payload_pool",
    "peers",
    "peers_hello",
    "router",
    // Of the control plane and the host plane.
    "behaviour",
    "conformance",
    "cores",
    "edges",
    "hostile",
    "libzmq",
    "news",
    "peers",
    "proven",
    "recorded",
    "secret",
    "signed",
    "stopped",
    // Of the simulator.
    "plays",
    // Of the actor host.
    "embed",
    "payloads",
    "serve",
];

/// Memory that a test program may use, in bytes. Tests map more than any machine has, so the address
/// space is not bounded.
const MEMORY_MAX: u64 = 6 << 30;

/// Runs of test programs so far, which name their folders for temporary files.
static RUNS: AtomicU32 = AtomicU32::new(0);

/// Pause between two looks at a test program.
const POLL: Duration = Duration::from_millis(10);

/// A test program.
#[derive(Clone, Debug)]
pub(crate) struct TestProgram {
    /// Package and target.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// Folder of the package.
    folder: PathBuf,
}

/// How a run of a test program ended.
#[derive(Clone, Debug)]
pub(crate) enum ProgramEnd {
    Passed,
    /// Names of the tests that failed; none if the program died before it had one.
    Failed(Vec<String>),
    /// It did not end in time.
    Hung,
    /// It took more memory than it may.
    Large,
}

fn cargo(tree: &Path, build: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["test", "--no-run", "--quiet", "--offline", "--message-format=json"]);
    command.args(["--features", "kvferry-engine/conformance,kvferry/full", "--lib"]);
    command.args(PACKAGES.iter().flat_map(|package| ["-p", package]));
    command.args(TARGETS.iter().flat_map(|target| ["--test", target]));
    command.env("CARGO_TARGET_DIR", build).current_dir(tree);
    command.env("CARGO_INCREMENTAL", "0").env("CARGO_PROFILE_DEV_DEBUG", "0");
    // Of a Cargo that runs this program.
    command.env_remove("CARGO_MANIFEST_DIR").stderr(Stdio::inherit());
    command
}

/// Builds the test programs of the tree, without the sites that do not compile.
///
/// # Errors
/// The tree has an error at no site, or Cargo fails.
pub(crate) fn build(
    tree: &mut MutantTree,
    build: &Path,
    known: &RefusedSites,
) -> Result<Vec<TestProgram>, String> {
    for round in 1..=ROUNDS_MAX {
        tree.write_sources()?;
        let output = cargo(&tree.folder, build).output().map_err(|why| format!("cargo: {why}"))?;
        let messages = String::from_utf8_lossy(&output.stdout);
        if output.status.success() {
            let messages = messages.lines().filter_map(|line| serde_json::from_str(line).ok());
            return Ok(messages.filter_map(|message| test_program(&message)).collect());
        }
        let gone = refused(tree, &messages)?;
        if gone.is_empty() {
            return Err("the build failed without an error in a source".into());
        }
        println!("build {round}: {} changes do not compile", gone.len());
        known.add(tree, &gone)?;
    }
    Err(format!("the tree does not compile after {ROUNDS_MAX} rounds"))
}

/// The test program of a message, if it is about one.
fn test_program(message: &Value) -> Option<TestProgram> {
    let is_test = message["profile"]["test"] == true;
    let path: PathBuf = message["executable"].as_str().filter(|_| is_test)?.into();
    let folder: PathBuf = Path::new(message["manifest_path"].as_str()?).parent()?.into();
    let package = folder.file_name()?.to_string_lossy().into_owned();
    let target = message["target"]["name"].as_str()?;
    let is_library = message["target"]["kind"][0] != "test";
    let target = if is_library { "lib" } else { target };
    Some(TestProgram { name: format!("{package} {target}"), path, folder })
}

/// What a test program is run with.
#[derive(Debug)]
pub(crate) struct RunLimits<'a> {
    /// Folder for its output.
    pub(crate) scratch: &'a Path,
    pub(crate) time: Duration,
}

impl TestProgram {
    /// Runs the program, or only these of its tests.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn run(
        &self,
        tests: &[String],
        environment: &[(&str, String)],
        limits: &RunLimits<'_>,
    ) -> Result<ProgramEnd, String> {
        let told = |why: std::io::Error| format!("{}: {why}", self.name);
        // Of a socket the whole path has 107 bytes at most.
        let nth = RUNS.fetch_add(1, Ordering::Relaxed);
        let temporary = std::env::temp_dir().join(format!("kvf{}.{nth}", std::process::id()));
        fs::create_dir_all(&temporary).map_err(told)?;
        fs::create_dir_all(limits.scratch).map_err(told)?;
        let log = limits.scratch.join("log");
        let output = File::create(&log).map_err(told)?;
        let errors = output.try_clone().map_err(told)?;
        let mut command = Command::new(&self.path);
        if !tests.is_empty() {
            command.arg("--exact").args(tests);
        }
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command.env("TMPDIR", &temporary).env("RUST_BACKTRACE", "0");
        // The same cases each time; a case that fails is not made small, nor kept.
        command.env("PROPTEST_RNG_SEED", "1").env("PROPTEST_MAX_SHRINK_ITERS", "0");
        command.env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "true");
        command.envs(environment.iter().map(|(key, value)| (key, value)));
        command.stdin(Stdio::null()).stdout(output).stderr(errors).process_group(0);
        let mut child = command.spawn().map_err(told)?;
        let started = Instant::now();
        let end = loop {
            if let Some(status) = child.try_wait().map_err(told)? {
                break Ok(status);
            }
            if started.elapsed() > limits.time {
                break Err(ProgramEnd::Hung);
            }
            if memory(child.id()) > MEMORY_MAX {
                break Err(ProgramEnd::Large);
            }
            sleep(POLL);
        };
        let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        // What it started is of the same group, and may be left.
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = child.wait();
        let _ = fs::remove_dir_all(&temporary);
        let text = fs::read(&log).map_err(told)?;
        Ok(match end {
            Err(end) => end,
            Ok(status) if status.success() => ProgramEnd::Passed,
            Ok(_) => ProgramEnd::Failed(failed(&String::from_utf8_lossy(&text))),
        })
    }
}

/// Memory that a process has in use, in bytes.
fn memory(process: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{process}/statm")).unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}

/// Names of the tests that failed, as the test harness lists them.
fn failed(output: &str) -> Vec<String> {
    let names = output.lines().filter_map(|line| {
        let name = line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?;
        Some(name.split(" - should panic").next().unwrap_or(name).to_owned())
    });
    names.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(script: &str) -> (TestProgram, PathBuf) {
        use std::os::unix::fs::PermissionsExt;
        let folder = std::env::temp_dir().join(format!("kvferry-runs-{}", std::process::id()));
        let folder = folder.join(format!("{:?}", std::thread::current().id()));
        fs::create_dir_all(&folder).expect("it can be created");
        let path = folder.join("program");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("it can be written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it can be set");
        (TestProgram { name: "a b".into(), path, folder: folder.clone() }, folder)
    }

    fn end(script: &str, time: Duration) -> ProgramEnd {
        let (program, folder) = program(script);
        let limits = RunLimits { scratch: &folder, time };
        let end = program.run(&[], &[("KVFERRY_MUTANT", "3".into())], &limits);
        fs::remove_dir_all(&folder).expect("it can be removed");
        end.expect("it starts")
    }

    #[test]
    fn tests_that_fail_are_named() {
        let script = "test $KVFERRY_MUTANT = 3 && echo 'test a::b ... FAILED'; exit 101";
        let ended = end(script, Duration::MAX);
        assert!(matches!(&ended, ProgramEnd::Failed(names) if *names == ["a::b"]), "{ended:?}");
        assert!(matches!(end("exit 0", Duration::MAX), ProgramEnd::Passed));
    }

    #[test]
    fn program_that_does_not_end_is_killed_with_what_it_started() {
        assert!(matches!(end("sleep 1000 & wait", Duration::ZERO), ProgramEnd::Hung));
    }

    #[test]
    fn memory_of_a_process_is_what_it_uses() {
        let before = memory(std::process::id());
        let taken = std::hint::black_box(vec![1_u8; 32 << 20]);
        let after = memory(std::process::id());
        assert!(after >= before + (24 << 20), "{before} and {after} with {} bytes", taken.len());
    }
}
