//! The processes of a run.

use super::ClusterFiles;
use super::client::ClusterClient;
use crate::process::{CommandError, name, this_program};
use crate::simulator::outcome::RunOutcome;
use kvferry_fabric_mori::PortCommand;
use kvferry_scenarios::Run;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

/// Lines of a log that the error of a process which does not start has.
const LOG_LINES: usize = 10;

/// One process; killed when it is dropped.
pub(super) struct ClusterProcess {
    /// Name of the instance, or `router`.
    pub(super) name: String,
    args: Vec<OsString>,
    /// What it writes to stderr, over all its lives.
    log: PathBuf,
    child: Child,
    ready: Value,
    pub(super) paused: bool,
    /// Takes its port up again, which is down.
    port: Option<PortCommand>,
    /// Lost its state by a fault, so that what it held is not asked for.
    pub(super) alive: bool,
}

impl ClusterProcess {
    fn start(name: &str, args: Vec<OsString>, logs: &Path) -> Result<ClusterProcess, CommandError> {
        let failed = |why: String| CommandError::Input(format!("cannot start {name}: {why}"));
        let log = logs.join(format!("{name}.log"));
        let file = OpenOptions::new().append(true).create(true).open(&log);
        let file = file.map_err(|why| failed(format!("{}: {why}", log.display())))?;
        let mut program = this_program().map_err(|why| failed(why.to_string()))?;
        let mut child = program
            .args(&args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(file)
            .spawn()
            .map_err(|why| failed(why.to_string()))?;
        let mut line = String::new();
        let out = child.stdout.take().expect("it was piped");
        // A process that cannot start logs why and ends, which ends its output.
        BufReader::new(out).read_line(&mut line)?;
        let ready = serde_json::from_str(&line);
        let ready = ready.map_err(|_| {
            // Nothing is added to the log behind the end.
            let _ = child.wait();
            failed(format!("it ended at once; the end of its log:\n{}\n", last_lines(&log)))
        });
        let (name, paused, port, alive) = (name.to_string(), false, None, true);
        Ok(ClusterProcess { name, args, log, child, ready: ready?, paused, port, alive })
    }

    /// What it said of itself when it was ready.
    ///
    /// # Errors
    /// It said no such thing.
    pub(super) fn ready(&self, key: &str) -> Result<&str, CommandError> {
        let text = self.ready[key].as_str();
        text.ok_or_else(|| CommandError::Input(format!("{} does not say its {key}", self.name)))
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id() as i32).expect("a child has a pid");
        // It can only be gone already.
        let _ = kill_process(pid, signal);
    }

    pub(super) fn pause(&mut self) {
        self.paused = true;
        self.signal(Signal::STOP);
    }

    pub(super) fn resume(&mut self) {
        self.paused = false;
        self.signal(Signal::CONT);
    }

    /// Takes the port of all its ranks down; it stays up where the command fails.
    pub(super) fn port_down(&mut self, command: PortCommand) {
        match command.set(self.child.id(), false) {
            Ok(()) => self.port = Some(command),
            Err(why) => tracing::error!(target = self.name, %why, "the port stays up"),
        }
    }

    pub(super) fn port_up(&mut self) {
        let Some(command) = self.port.take() else { return };
        if let Err(why) = command.set(self.child.id(), true) {
            tracing::error!(target = self.name, %why, "the port stays down");
        }
    }

    pub(super) fn crash(&mut self) {
        self.port_up();
        self.alive = false;
        self.signal(Signal::KILL);
        // The child is there until it was waited for.
        let _ = self.child.wait();
    }

    /// Starts it again at the same address.
    pub(super) fn restart(&mut self) -> Result<(), CommandError> {
        let mut args = self.args.clone();
        for (flag, key) in [
            ("--http-port", "http"),
            ("--handshake-port", "handshake"),
            ("--notify-port", "notify"),
        ] {
            let address = self.ready(key)?;
            let port = address.rsplit_once(':').map_or(address, |(_, port)| port);
            args.extend([flag.into(), port.into()]);
        }
        // Not among the notes of what the user deploys.
        let state = std::env::temp_dir().join("kvferry-fleet");
        args.extend(["--state".into(), state.into_os_string()]);
        let logs = self.log.parent().unwrap_or(Path::new(""));
        let mut fresh = ClusterProcess::start(&self.name, args, logs)?;
        fresh.args = std::mem::take(&mut self.args);
        *self = fresh;
        Ok(())
    }
}

/// The last lines of a log.
fn last_lines(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
}

impl Drop for ClusterProcess {
    fn drop(&mut self) {
        if self.alive {
            self.crash();
        }
    }
}

/// The router and the instances.
pub(super) struct LocalCluster {
    pub(super) router: ClusterProcess,
    pub(super) instances: Vec<ClusterProcess>,
}

impl LocalCluster {
    pub(super) fn start(
        run: &Run,
        files: &ClusterFiles,
        seed: u64,
        logs: &Path,
    ) -> Result<LocalCluster, CommandError> {
        let text = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        let expiry = format!("{}", run.router.config.expiry.0 as f64 / 1e9);
        let any = "127.0.0.1:0";
        let mut router = text(&["router", "--json", "--listen", any, "--discovery", any]);
        router.extend(text(&["--admin-addr", any, "--expiry", &expiry]));
        let router = ClusterProcess::start("router", router, logs)?;
        let proxy = router.ready("discovery")?.trim_start_matches("tcp://").to_string();
        let seed = seed.to_string();
        let mut instances = Vec::with_capacity(run.instances.len());
        for instance in &run.instances {
            let mut args = text(&["serve", "--proxy", &proxy, "--seed", &seed]);
            args.extend(text(&["--fabric", &name(&files.fabric)]));
            args.extend(text(&["--instance", &instance.name, "--scenario"]));
            args.push(files.scenario.clone().into());
            if let Some(trace) = &files.trace {
                args.extend(["--workload-trace".into(), trace.clone().into()]);
            }
            instances.push(ClusterProcess::start(&instance.name, args, logs)?);
        }
        Ok(LocalCluster { router, instances })
    }

    /// Lets paused processes go on, and takes ports up.
    pub(super) fn resume_all(&mut self) {
        for process in &mut self.instances {
            process.port_up();
            if process.paused {
                process.resume();
            }
        }
    }

    /// Takes what living instances counted into the outcome.
    pub(super) async fn gather(&self, client: &ClusterClient, outcome: &mut RunOutcome) {
        for process in self.instances.iter().filter(|process| process.alive) {
            let Ok(http) = process.ready("http") else { continue };
            let Some(metrics) = client.metrics(http).await else { continue };
            outcome.bytes_moved += metrics.sum("kvferry_host_bytes_total{side=\"initiated\"");
            for (cause, count) in metrics.by_cause("kvferry_kv_recomputed_total") {
                outcome.recomputed += count;
                *outcome.recomputed_causes.entry(cause.into()).or_default() += count;
            }
        }
    }
}
