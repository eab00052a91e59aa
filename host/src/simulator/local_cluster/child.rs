//! The processes of a run.

use super::ClusterFiles;
use super::client::ClusterClient;
use crate::process::{CommandError, name, this_program};
use crate::simulator::outcome::RunOutcome;
use kvferry_scenarios::Run;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

/// One process; killed when it is dropped.
pub(super) struct ClusterProcess {
    /// Name of the instance, or `router`.
    pub(super) name: String,
    args: Vec<OsString>,
    child: Child,
    ready: Value,
    pub(super) paused: bool,
    /// By which the stand-in for MoRI is told that its port is down.
    port: Option<PathBuf>,
    /// Lost its state by a fault, so that what it held is not asked for.
    pub(super) alive: bool,
}

impl ClusterProcess {
    fn start(name: &str, args: Vec<OsString>) -> Result<ClusterProcess, CommandError> {
        let failed = |why: String| CommandError::Input(format!("cannot start {name}: {why}"));
        let mut program = this_program().map_err(|why| failed(why.to_string()))?;
        let mut child = program
            .args(&args)
            .args(["--log-level", "error"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(|why| failed(why.to_string()))?;
        let mut line = String::new();
        let out = child.stdout.take().expect("it was piped");
        // A process that cannot start says so on stderr and ends, which ends its output.
        BufReader::new(out).read_line(&mut line)?;
        let ready = serde_json::from_str(&line);
        let ready = ready.map_err(|_| failed("it ended at once; it said why above".into()));
        let (name, paused, port, alive) = (name.to_string(), false, None, true);
        Ok(ClusterProcess { name, args, child, ready: ready?, paused, port, alive })
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

    /// Takes the port of all its ranks down, for the stand-in for MoRI that looks into this folder.
    pub(super) fn port_down(&mut self, folder: &Path) -> io::Result<()> {
        let file = folder.join(self.child.id().to_string());
        std::fs::write(&file, "")?;
        self.port = Some(file);
        Ok(())
    }

    pub(super) fn port_up(&mut self) {
        if let Some(file) = self.port.take() {
            // Where the folder is gone the port is up.
            let _ = std::fs::remove_file(file);
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
        let mut fresh = ClusterProcess::start(&self.name, args)?;
        fresh.args = std::mem::take(&mut self.args);
        *self = fresh;
        Ok(())
    }
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
    ) -> Result<LocalCluster, CommandError> {
        let text = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        let expiry = format!("{}", run.router.config.expiry.0 as f64 / 1e9);
        let any = "127.0.0.1:0";
        let mut router = text(&["router", "--json", "--listen", any, "--discovery", any]);
        router.extend(text(&["--admin-addr", any, "--expiry", &expiry]));
        let router = ClusterProcess::start("router", router)?;
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
            instances.push(ClusterProcess::start(&instance.name, args)?);
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
            let computed = metrics.sum("kvferry_kv_recomputed_total");
            outcome.recomputed += computed;
        }
    }
}
