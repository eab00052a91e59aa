//! `kvferry doctor`: whether this machine has what a deployment needs, and what to do if not.

mod attach;
mod devices;
mod limits;
mod local;
mod peer;
mod ports;

pub(crate) use peer::{PeerArgs, command as peer_command};
pub(crate) use ports::remedy;

use crate::embed::config::{Given, HostArgs};
use crate::exit::{Exit, Stop, UNFIT};
use crate::serve::FabricArg;
use clap::{Args, ValueEnum};
use fabric_mori::{Backend, MoriConfig};
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Where the KV cache of a server lies, as in `kv_connector_extra_config`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvMemoryArg {
    File,
    Private,
}

/// A backend of MoRI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendArg {
    Rdma,
    Xgmi,
}

/// Arguments of `doctor`.
#[derive(Clone, Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Address that the server is to listen at and to tell others
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
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
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) proxy: Option<String>,
    /// Path of the host's socket; by default the folder that the connector takes is checked
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Where the KV cache is to lie: `private`, as MoRIIOConnector has it, needs cross-memory attach
    #[arg(long, value_name = "WHERE", default_value = "file")]
    pub(crate) kv_memory: KvMemoryArg,
    /// Also check what this fabric needs: mori, for the backends mori-rdma and mori-xgmi
    #[arg(long, value_name = "FABRIC", default_value = "host")]
    pub(crate) fabric: FabricArg,
    /// The backend to be checked for with --fabric mori
    #[arg(long, value_name = "BACKEND", default_value = "rdma")]
    pub(crate) backend: BackendArg,
    /// Check this configuration file of `kvferry host`, too
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Print one JSON object per check and line
    #[arg(long)]
    pub(crate) json: bool,
}

/// What came of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Status {
    Ok,
    Warn,
    Fail,
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Status::Ok => "ok",
            Status::Warn => "warn",
            Status::Fail => "fail",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Check {
    check: &'static str,
    status: Status,
    /// What is there.
    found: String,
    /// What to do about it; none if it is as it should be.
    remedy: Option<String>,
}

impl Check {
    fn ok(check: &'static str, found: impl Into<String>) -> Check {
        Check { check, status: Status::Ok, found: found.into(), remedy: None }
    }

    fn warn(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
        let remedy = Some(remedy.into());
        Check { check, status: Status::Warn, found: found.into(), remedy }
    }

    fn fail(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
        Check { status: Status::Fail, ..Check::warn(check, found, remedy) }
    }
}

/// Where the kernel says what there is; tests have others.
#[derive(Clone, Debug)]
struct Roots {
    proc: PathBuf,
    sys: PathBuf,
    dev: PathBuf,
}

impl Roots {
    fn of_machine() -> Roots {
        Roots { proc: "/proc".into(), sys: "/sys".into(), dev: "/dev".into() }
    }
}

/// The text of a small file of the kernel's, without the line's end; none if it is not there.
fn line(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Checks the machine; the exit code.
///
/// # Errors
/// Output that cannot be written.
pub(crate) fn command(args: &DoctorArgs, out: &mut dyn Write) -> Result<u8, Stop> {
    let checks = checks(args, &Roots::of_machine());
    for check in &checks {
        if args.json {
            let object = serde_json::to_string(check).map_err(std::io::Error::other)?;
            writeln!(out, "{object}")?;
            continue;
        }
        let Check { check, status, found, remedy } = check;
        write!(out, "{:<4}  {check:<14}  {found}", status.name())?;
        match remedy {
            Some(remedy) => writeln!(out, "; to do: {remedy}")?,
            None => writeln!(out)?,
        }
    }
    match checks.iter().any(|check| check.status == Status::Fail) {
        true => Ok(UNFIT),
        false => Ok(Exit::Held.code()),
    }
}

fn checks(args: &DoctorArgs, roots: &Roots) -> Vec<Check> {
    let trial = peer::trial();
    let mut checks = vec![
        attach::cross_memory(&trial, &attach::Rights::read(&roots.proc), args.kv_memory),
        attach::memory_file(&trial),
        limits::memlock(limits::of_memlock(), devices::has_rdma(&roots.sys)),
        limits::open_files(limits::of_files()),
        limits::huge_pages(roots),
        ports::host_ip(&args.host_ip),
    ];
    checks.extend(ports::listeners(args));
    checks.extend(args.proxy.as_deref().map(ports::proxy));
    checks.push(local::socket(&local::Place::new(args.socket.as_deref())));
    checks.push(configuration(args));
    checks.push(devices::rdma(roots));
    checks.push(devices::mori(&devices::library_folders()));
    checks.push(devices::amd_gpu(&roots.dev));
    if args.fabric == FabricArg::Mori {
        let backend = match args.backend {
            BackendArg::Rdma => Backend::Rdma,
            BackendArg::Xgmi => Backend::Xgmi,
        };
        let host = args.host_ip.clone();
        checks.extend(devices::mori_fabric(&MoriConfig { backend, host, ..MoriConfig::default() }));
    }
    checks
}

/// What `kvferry host` would take from file and environment.
fn configuration(args: &DoctorArgs) -> Check {
    const NAME: &str = "configuration";
    let host = HostArgs { config: args.config.clone(), given: Given::default() };
    let config = match host.resolve(std::env::vars_os()) {
        Ok(config) => config,
        Err(why) => return Check::fail(NAME, why, "correct it where it says"),
    };
    let file = match &config.file {
        Some(path) => format!("{} and the environment", path.display()),
        None => "no file, the environment".into(),
    };
    let fabric = &config.operator.fabric;
    let paths: Vec<_> = fabric.paths.iter().map(|path| path.name()).collect();
    let paths = paths.join(", ");
    let (copiers, spin_us, slower) = (fabric.copiers, fabric.spin_us, fabric.slower);
    let found =
        format!("{file}: copiers {copiers}, spin_us {spin_us}, slower {slower}, paths {paths}");
    match config.strangers.is_empty() {
        true => Check::ok(NAME, found),
        false => {
            let names = config.strangers.join(", ");
            let remedy = "correct the name, or leave it if it is another program's";
            Check::warn(NAME, format!("{found}; {names}: there is no such key"), remedy)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A made-up tree of files, which is removed with it.
    pub(super) struct Tree(pub(super) PathBuf);

    impl Tree {
        pub(super) fn new(name: &str, files: &[(&str, &str)]) -> Tree {
            let folder = format!("kvferry-doctor-{}-{name}", std::process::id());
            let folder = std::env::temp_dir().join(folder);
            std::fs::create_dir_all(&folder).expect("a folder");
            for (path, text) in files {
                let path = folder.join(path);
                std::fs::create_dir_all(path.parent().expect("below it")).expect("a folder");
                std::fs::write(path, text).expect("a file");
            }
            Tree(folder)
        }

        pub(super) fn roots(&self) -> Roots {
            let at = |name| self.0.join(name);
            Roots { proc: at("proc"), sys: at("sys"), dev: at("dev") }
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}
