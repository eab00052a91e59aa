//! `kvferry doctor`: whether this machine has what a deployment needs, and what to do if not.

mod attach;
mod child;
mod devices;
mod exit_diagnosis;
mod limits;
mod local_socket;
mod mori_checks;
mod pair;
mod peer;
mod ports;
mod side;
mod trust;

pub(crate) use peer::{DoctorPeerArgs, command as peer_command};

use crate::instance::{BackendArg, FabricArg, mori_settings};
use crate::process::{CommandError, Exit, address, seconds};
use crate::sidecar::config::{ConfigLayer, HostArgs, Paths, SidecarConfig};
use crate::sidecar::settings::KvMemory;
use clap::{Args, ValueEnum};
use kvferry_engine::text::printable;
use kvferry_fabric_mori::MoriConfig;
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Most characters of a text that may come from another machine.
const SHOWN: usize = 4_096;

/// The address of a server that only this machine reaches.
const LOOPBACK: &str = "127.0.0.1";

/// Arguments of `doctor`.
#[derive(Clone, Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Address that the server is to listen at and to tell others
    #[arg(long, value_name = "HOST", default_value = LOOPBACK)]
    pub(crate) host_ip: String,
    /// Check that peers' handshakes can be listened for at this port
    #[arg(long, value_name = "PORT")]
    pub(crate) handshake_port: Option<u16>,
    /// Check that notices of MoRIIO peers can be listened for at this port
    #[arg(long, value_name = "PORT")]
    pub(crate) notify_port: Option<u16>,
    /// Check that a router can listen for registrations here
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) discovery: Option<String>,
    /// Check that the router's discovery socket can be reached here
    #[arg(long, value_name = "HOST:PORT", value_parser = address::dialled)]
    pub(crate) proxy: Option<String>,
    /// Path of the host's socket; by default the folder that the connector takes is checked
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Where the KV cache is to lie: `private`, as MoRIIOConnector has it, needs cross-memory
    /// attach
    #[arg(long, value_name = "WHERE", default_value = "file")]
    pub(crate) kv_memory: KvMemory,
    /// Also try this fabric: mori, for the backends mori-rdma and mori-xgmi, between two processes
    /// that move bytes by it
    #[arg(long, value_name = "FABRIC", default_value = "host")]
    pub(crate) fabric: FabricArg,
    /// The backend that has to work with --fabric mori; the other one is tried, too
    #[arg(long, value_name = "BACKEND", default_value = "rdma")]
    pub(crate) backend: BackendArg,
    /// Put something right first, and check nothing else unless --fabric mori is given: mori compiles
    /// the shim for the MoRI that is installed
    #[arg(long, value_name = "WHAT")]
    pub(crate) fix: Option<FixArg>,
    /// Settings of MoRI, an object with the keys of `mori` in kv_connector_extra_config, e.g.
    /// {"port": 7100}
    #[arg(long, value_name = "JSON")]
    pub(crate) mori: Option<String>,
    /// Also try what is between this machine and the one whose `doctor --serve` waits there:
    /// versions, secret, clocks, ports, interfaces and what they carry in a second
    #[arg(long, value_name = "HOST:PORT", value_parser = address::dialled, conflicts_with = "serve")]
    pub(crate) peer: Option<String>,
    /// After all else, wait here for the doctor of another machine that is given this address with
    /// --peer, and has the same --fabric and --backend
    #[arg(long, value_name = "ADDR:PORT", value_parser = address::listened)]
    pub(crate) serve: Option<String>,
    /// Longest wait for a process that tries something; it is killed then
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub(crate) timeout: Duration,
    /// Check this configuration file of `kvferry host`, too
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// File of the fleet's secret that the server is to have; otherwise as `kvferry host` would take it
    /// from its file and the environment
    #[arg(long, value_name = "FILE")]
    pub(crate) secret_file: Option<PathBuf>,
    /// The server is to listen where others reach it though there is no secret
    #[arg(long)]
    pub(crate) insecure_network: bool,
    /// Print one JSON object per check and line
    #[arg(long)]
    pub(crate) json: bool,
}

/// What can be put right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FixArg {
    Mori,
}

/// What came of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum CheckStatus {
    Ok,
    Warn,
    Fail,
    /// It cannot be tried here, and need not be.
    Skip,
}

impl CheckStatus {
    fn name(self) -> &'static str {
        match self {
            CheckStatus::Ok => "ok",
            CheckStatus::Warn => "warn",
            CheckStatus::Fail => "fail",
            CheckStatus::Skip => "skip",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Check {
    check: &'static str,
    status: CheckStatus,
    found: String,
    /// What to do about it; none if nothing has to be done.
    remedy: Option<String>,
}

impl Check {
    fn ok(check: &'static str, found: impl Into<String>) -> Check {
        Check { check, status: CheckStatus::Ok, found: found.into(), remedy: None }
    }

    fn warn(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
        let remedy = Some(remedy.into());
        Check { check, status: CheckStatus::Warn, found: found.into(), remedy }
    }

    fn fail(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
        Check { status: CheckStatus::Fail, ..Check::warn(check, found, remedy) }
    }

    fn skip(check: &'static str, found: impl Into<String>) -> Check {
        Check { status: CheckStatus::Skip, ..Check::ok(check, found) }
    }
}

/// Where the kernel says what there is; tests have others.
#[derive(Clone, Debug)]
struct SystemRoots {
    proc: PathBuf,
    sys: PathBuf,
    dev: PathBuf,
}

impl SystemRoots {
    fn of_machine() -> SystemRoots {
        SystemRoots { proc: "/proc".into(), sys: "/sys".into(), dev: "/dev".into() }
    }
}

/// The text of a small file of the kernel's, without the line's end; none if it is not there.
fn line(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

impl DoctorArgs {
    /// The backend that has to work, with its settings.
    ///
    /// # Errors
    /// Arguments that do not go together, settings that there are not.
    fn plan(&self) -> Result<MoriConfig, CommandError> {
        let between = [("--peer", &self.peer), ("--serve", &self.serve)];
        let is_mori = self.fabric == FabricArg::Mori;
        if let Some((name, _)) = between.iter().find(|(_, given)| given.is_some())
            && is_mori
            && self.backend != BackendArg::Rdma
        {
            return Err(CommandError::Input(format!(
                "{name} is not for --backend xgmi, which moves bytes within a machine"
            )));
        }
        let config = match &self.mori {
            Some(_) if !is_mori => Err("--mori is for --fabric mori".to_owned()),
            Some(text) => mori_settings(text).map_err(|why| format!("--mori {text}: {why}")),
            None => Ok(MoriConfig::default()),
        };
        let host = self.host_ip.clone();
        Ok(MoriConfig {
            backend: self.backend.into(),
            host,
            ..config.map_err(CommandError::Input)?
        })
    }
}

/// Checks the machine.
///
/// # Errors
/// Arguments that do not go together, output that cannot be written.
pub(crate) fn command(args: &DoctorArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let plan = args.plan()?;
    let mut is_fit = true;
    let mut found = match args.fix {
        Some(FixArg::Mori) => mori_checks::fix(args.timeout),
        None => Vec::new(),
    };
    if args.fix.is_none() || args.fabric == FabricArg::Mori {
        found.extend(checks(args, &plan, &SystemRoots::of_machine()));
    }
    for check in found {
        is_fit &= check.status != CheckStatus::Fail;
        tell(args, &check, out)?;
    }
    if let Some(at) = &args.serve {
        // It may wait for long.
        out.flush()?;
        let check = pair::serve(args, at, trust::secret_file(args, resolved(args).as_ref().ok()));
        is_fit &= check.status != CheckStatus::Fail;
        tell(args, &check, out)?;
    }
    Ok(if is_fit { Exit::HELD } else { Exit::UNFIT })
}

/// Prints the result of a check, whose text may come from another machine.
fn tell(args: &DoctorArgs, check: &Check, out: &mut dyn Write) -> Result<(), CommandError> {
    let found = printable(&check.found, SHOWN);
    let remedy = check.remedy.as_deref().map(|remedy| printable(remedy, SHOWN));
    let check = &Check { found, remedy, ..*check };
    if args.json {
        let object = serde_json::to_string(check).map_err(std::io::Error::other)?;
        return Ok(writeln!(out, "{object}")?);
    }
    let Check { check, status, found, remedy } = check;
    write!(out, "{:<4}  {check:<15}  {found}", status.name())?;
    match remedy {
        Some(remedy) => writeln!(out, "; to do: {remedy}")?,
        None => writeln!(out)?,
    }
    Ok(())
}

fn checks(args: &DoctorArgs, plan: &MoriConfig, roots: &SystemRoots) -> Vec<Check> {
    let trial = peer::trial(args.timeout);
    let config = resolved(args);
    let secret = trust::secret_file(args, config.as_ref().ok());
    let mut checks = vec![
        attach::cross_memory(&trial, &attach::PtraceRights::read(&roots.proc), args.kv_memory),
        attach::memory_file(&trial),
        limits::memlock(limits::of_memlock(), devices::has_rdma(&roots.sys)),
        limits::open_files(limits::of_files()),
        limits::huge_pages(roots),
        ports::host_ip(&args.host_ip),
        trust::trust(args, &config),
        trust::encryption(args, &config),
    ];
    checks.extend(ports::listeners(args));
    checks.extend(args.proxy.as_deref().map(ports::proxy));
    checks.push(local_socket::socket(&local_socket::SocketLocation::new(args.socket.as_deref())));
    checks.push(configuration(config));
    checks.push(devices::rdma(roots));
    checks.push(devices::mori(kvferry_fabric_mori::installed()));
    checks.push(devices::amd_gpu(&roots.dev));
    if args.fabric == FabricArg::Mori {
        checks.extend(devices::mori_fabric(plan));
        checks.extend(mori_checks::mori(args));
    }
    if let Some(to) = &args.peer {
        checks.extend(pair::with_peer(args, to, secret));
    }
    checks
}

/// What a host would have of its file and the environment.
fn resolved(args: &DoctorArgs) -> Result<SidecarConfig, String> {
    let host = HostArgs { config: args.config.clone(), given: ConfigLayer::default() };
    host.resolve(std::env::vars_os())
}

/// What `kvferry host` would take from file and environment.
fn configuration(config: Result<SidecarConfig, String>) -> Check {
    const NAME: &str = "configuration";
    let config = match config {
        Ok(config) => config,
        Err(why) => return Check::fail(NAME, why, "correct it where it says"),
    };
    let file = match &config.file {
        Some(path) => format!("{} and the environment", path.display()),
        None => "no file, the environment".into(),
    };
    let fabric = &config.operator.fabric;
    let paths = Paths(fabric.paths.clone()).names();
    let (copiers, streams, spin_us) = (fabric.copiers, fabric.streams, fabric.spin_us);
    let slower = fabric.slower;
    let found = format!(
        "{file}: copiers {copiers}, streams {streams}, spin_us {spin_us}, slower {slower}, paths {paths}"
    );
    let (strangers, ignored) = (&config.strangers, &config.ignored);
    if !strangers.is_empty() {
        let names = strangers.join(", ");
        let remedy = "correct the name, or leave it if it is another program's";
        return Check::warn(NAME, format!("{found}; {names}: there is no such key"), remedy);
    }
    match ignored.is_empty() {
        true => Check::ok(NAME, found),
        false => {
            let keys = ignored.join(", ");
            let found = format!("{found}; {keys}: ignored, as there is no payload_pool");
            Check::warn(NAME, found, "give payload_pool, or leave them away")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A made-up tree of files, which is removed with it.
    pub(super) struct TempTree(pub(super) PathBuf);

    impl TempTree {
        pub(super) fn new(name: &str, files: &[(&str, &str)]) -> TempTree {
            let folder = format!("kvferry-doctor-{}-{name}", std::process::id());
            let folder = std::env::temp_dir().join(folder);
            std::fs::create_dir_all(&folder).expect("a folder");
            for (path, text) in files {
                let path = folder.join(path);
                std::fs::create_dir_all(path.parent().expect("below it")).expect("a folder");
                std::fs::write(path, text).expect("a file");
            }
            TempTree(folder)
        }

        pub(super) fn roots(&self) -> SystemRoots {
            let at = |name| self.0.join(name);
            SystemRoots { proc: at("proc"), sys: at("sys"), dev: at("dev") }
        }
    }

    impl Drop for TempTree {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}
