//! What MoRI needs of a machine, looked at before MoRI is called: where something is missing it may
//! end the process, or never come back.

use crate::{MoriBackend, MoriConfig};
use rustix::process::{Resource, getrlimit};
use std::fs;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Name of the check.
    pub check: &'static str,
    /// What was seen, with the path or variable.
    pub found: String,
    /// What to do about it; none if MoRI can do with it.
    pub remedy: Option<&'static str>,
    /// No plane is made; otherwise it depends on the size of the KV.
    pub fatal: bool,
}

/// Where the kernel says what there is; tests have others.
#[derive(Clone, Debug)]
pub struct PreflightRoots {
    /// In place of `/sys`.
    pub sys: PathBuf,
    /// In place of `/dev`.
    pub dev: PathBuf,
}

impl Default for PreflightRoots {
    fn default() -> Self {
        PreflightRoots { sys: "/sys".into(), dev: "/dev".into() }
    }
}

fn fine(check: &'static str, found: String) -> Finding {
    Finding { check, found, remedy: None, fatal: false }
}

fn lacking(check: &'static str, found: String, remedy: &'static str) -> Finding {
    Finding { check, found, remedy: Some(remedy), fatal: true }
}

/// Looks at everything that a plane with these settings needs, in the order in which MoRI would.
pub fn look(config: &MoriConfig, roots: &PreflightRoots) -> Vec<Finding> {
    let mut findings = vec![gpu(&roots.dev)];
    if config.backend == MoriBackend::Rdma {
        findings.push(ports(&roots.sys, &std::env::var(DEVICES).unwrap_or_default()));
        findings.extend(messages(config, &roots.sys));
        findings.push(memlock(memlock_limit()));
    }
    findings.push(address(&config.host));
    findings.extend(control_port_of(config));
    findings
}

fn control_port_of(config: &MoriConfig) -> Option<Finding> {
    config.host.parse().ok().map(|host| control_port(host, config.port))
}

/// Whether MoRI can be called, which ends the process over some of what it may lack.
///
/// # Errors
/// What is missing and what to do.
pub(crate) fn check(config: &MoriConfig) -> Result<(), String> {
    let findings = match config.devices {
        true => look(config, &PreflightRoots::default()),
        false => control_port_of(config).into_iter().collect(),
    };
    let fatal = findings.into_iter().filter(|finding| finding.fatal);
    let texts: Vec<String> = fatal
        .map(|Finding { check, found, remedy, .. }| {
            format!("{check}: {found}; to do: {}", remedy.unwrap_or_default())
        })
        .collect();
    if texts.is_empty() { Ok(()) } else { Err(texts.join("\n")) }
}

/// Bytes that this process may lock; none if there is no limit.
pub(crate) fn memlock_limit() -> Option<u64> {
    getrlimit(Resource::Memlock).current
}

/// Without a GPU that rocm_smi sees MoRI calls `exit(-1)`, even for host memory.
fn gpu(dev: &Path) -> Finding {
    let path = dev.join("kfd");
    match fs::OpenOptions::new().read(true).write(true).open(&path) {
        Ok(_) => fine("mori-gpu", format!("{} can be opened", path.display())),
        Err(why) => lacking(
            "mori-gpu",
            format!("{}: {why}; MoRI ends the process where it finds no AMD GPU", path.display()),
            match why.kind() {
                ErrorKind::NotFound => {
                    "load the driver of the GPU (modprobe amdgpu; docker: --device=/dev/kfd \
                     --device=/dev/dri); without an AMD GPU take another backend"
                }
                _ => {
                    "usermod -aG render,video USER, and log in again (docker: --group-add=render \
                     --group-add=video)"
                }
            },
        ),
    }
}

/// Names of what is in a folder, sorted; none if it cannot be read.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A PCI address such as `0000:c1:00.0` somewhere in a path.
fn has_pci_address(path: &Path) -> bool {
    path.components().any(|part| {
        let part = part.as_os_str().to_string_lossy();
        let fields: Vec<&str> = part.split([':', '.']).collect();
        let hex = |field: &&str| field.chars().all(|c| c.is_ascii_hexdigit());
        matches!(fields[..], [domain, bus, device, function]
            if domain.len() >= 4 && bus.len() == 2 && device.len() == 2 && function.len() == 1)
            && fields.iter().all(hex)
    })
}

/// Which devices MoRI takes: names with commas between them, or after `^` those that it leaves out.
const DEVICES: &str = "MORI_RDMA_DEVICES";

/// Whether MoRI takes a device, by what [`DEVICES`] says.
fn is_taken(device: &str, devices: &str) -> bool {
    let (leaves_out, names) = match devices.strip_prefix('^') {
        Some(names) => (true, names),
        None => (false, devices),
    };
    let mut names = names.split(',').map(|name| name.trim_matches([' ', '\t']));
    let is_named = names.clone().any(|name| name == device);
    let names_none = names.all(str::is_empty);
    names_none || is_named != leaves_out
}

/// Network cards with an active port. MoRI never comes back from one without a PCI address, as
/// software RDMA has none.
fn ports(sys: &Path, devices: &str) -> Finding {
    const NAME: &str = "mori-rdma-ports";
    let folder = sys.join("class/infiniband");
    let (mut active, mut seen) = (Vec::new(), Vec::new());
    for device in names(&folder).into_iter().filter(|device| is_taken(device, devices)) {
        let at = folder.join(&device);
        let real = fs::canonicalize(&at).unwrap_or_else(|_| at.clone());
        if !has_pci_address(&real) {
            return lacking(
                NAME,
                format!("{device} has no PCI address; MoRI loops for ever over such a device"),
                "leave it out by MORI_RDMA_DEVICES=^NAME, or end what has it open (each plane over MoRI \
                 has) and then rdma link delete NAME, which waits for that",
            );
        }
        for port in names(&at.join("ports")) {
            let state = at.join("ports").join(&port).join("state");
            let state = fs::read_to_string(state).unwrap_or_default();
            let text = format!("{device} port {port} {}", state.trim());
            if state.contains("ACTIVE") { active.push(text) } else { seen.push(text) }
        }
    }
    if !active.is_empty() {
        return fine(NAME, active.join(", "));
    }
    let seen = if seen.is_empty() { "no device".into() } else { seen.join(", ") };
    lacking(
        NAME,
        format!("{}: {seen}", folder.display()),
        "bring a port up (`rdma link` shows the state; docker: --device=/dev/infiniband), or take \
         the backend mori-xgmi inside one host",
    )
}

/// Bytes that one operation has at most, unless `operations.operation_bytes_max` is set.
const OPERATION: u32 = 16 << 20;

/// The longest message of the cards' ports, below which MoRI refuses what it has merged of an
/// operation unless it splits it. None if libibverbs does not tell.
fn messages(config: &MoriConfig, sys: &Path) -> Option<Finding> {
    let devices = std::env::var(DEVICES).unwrap_or_default();
    shortest(config.chunking, sys, &devices, mori_sys::message_max)
}

/// Warns, where the settings call for it, of what [`look`] finds and no plane is refused for.
pub(crate) fn warn(config: &MoriConfig) {
    if !config.devices || config.backend != MoriBackend::Rdma {
        return;
    }
    let found = messages(config, &PreflightRoots::default().sys);
    if let Some(Finding { check, found, remedy: Some(remedy), .. }) = found {
        tracing::warn!(check, "{found}; to do: {remedy}");
    }
}

fn shortest(
    chunking: bool,
    sys: &Path,
    devices: &str,
    message_max: impl Fn(&str, u8) -> Option<u32>,
) -> Option<Finding> {
    let folder = sys.join("class/infiniband");
    let taken = names(&folder).into_iter().filter(|device| is_taken(device, devices));
    let ports = taken.flat_map(|device| {
        let ports = names(&folder.join(&device).join("ports"));
        ports.into_iter().filter_map(move |port| Some((device.clone(), port.parse().ok()?)))
    });
    let lengths = ports.filter_map(|(device, port)| Some((message_max(&device, port)?, device)));
    let (bytes, device) = lengths.min()?;
    let found = format!("{device} sends messages of at most {bytes} bytes");
    if bytes >= OPERATION || chunking {
        return Some(fine(MESSAGES, found));
    }
    let found = format!("{found}; MoRI refuses longer ranges, and merges those of an operation");
    let remedy = "set chunking to true in mori, or operations.operation_bytes_max to no more, in \
                  kv_connector_extra_config";
    Some(Finding { fatal: false, ..lacking(MESSAGES, found, remedy) })
}

const MESSAGES: &str = "mori-message-max";

/// What to do about a limit of locked memory.
pub const MEMLOCK: &str = "ulimit -l unlimited before the servers start (docker: --ulimit \
    memlock=-1, systemd: LimitMEMLOCK=infinity)";

/// MoRI aborts at the first transfer if memory cannot be pinned, also that of a peer.
fn memlock(limit: Option<u64>) -> Finding {
    match limit {
        None => fine("mori-memlock", "unlimited".into()),
        Some(bytes) => {
            let found =
                format!("{bytes} bytes; MoRI ends the process that cannot pin its KV cache");
            Finding { fatal: false, ..lacking("mori-memlock", found, MEMLOCK) }
        }
    }
}

/// MoRI takes no names.
fn address(host: &str) -> Finding {
    const NAME: &str = "mori-address";
    const REMEDY: &str = "give an IPv4 address of this host (`ip -4 address`)";
    match host.parse::<Ipv4Addr>() {
        Err(_) => lacking(NAME, format!("{host}: no IPv4 address"), REMEDY),
        Ok(ip) if ip.is_unspecified() => lacking(NAME, format!("{host}: any address"), REMEDY),
        Ok(ip) => match TcpListener::bind((ip, 0)) {
            Ok(_) => fine(NAME, format!("{host} is this machine's")),
            Err(why) => lacking(NAME, format!("{host}: {why}"), REMEDY),
        },
    }
}

/// MoRI calls `exit(-1)` if it cannot listen.
pub(crate) fn control_port(host: Ipv4Addr, port: u16) -> Finding {
    const NAME: &str = "mori-port";
    if port == 0 {
        return fine(NAME, "a free one is taken".into());
    }
    match TcpListener::bind((host, port)) {
        Ok(_) => fine(NAME, format!("{host}:{port} is free")),
        Err(why) => lacking(NAME, format!("{host}:{port}: {why}"), "name another port, or 0"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A made-up tree of files, which is removed with it.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Tree {
            let folder = format!("kvferry-preflight-{}-{name}", std::process::id());
            let folder = std::env::temp_dir().join(folder);
            fs::create_dir_all(&folder).expect("a folder");
            for (path, text) in files {
                let path = folder.join(path);
                fs::create_dir_all(path.parent().expect("below it")).expect("a folder");
                fs::write(path, text).expect("a file");
            }
            Tree(folder)
        }

        /// Devices are links to where they hang, as in the kernel's tree.
        fn device(&self, name: &str, at: &str) {
            let class = self.0.join("class/infiniband");
            fs::create_dir_all(&class).expect("a folder");
            std::os::unix::fs::symlink(self.0.join(at), class.join(name)).expect("a link");
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _gone = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn an_active_port_of_a_card_will_do() {
        const AT: &str = "devices/pci0000:c0/0000:c1:00.0/infiniband/mlx5_0";
        let state = format!("{AT}/ports/1/state");
        for (text, will_do) in [("4: ACTIVE\n", true), ("1: DOWN\n", false)] {
            let tree = Tree::new("card", &[(&state, text)]);
            tree.device("mlx5_0", AT);
            let finding = ports(&tree.0, "");
            assert_eq!(finding.remedy.is_none(), will_do, "{finding:?}");
            assert!(finding.found.contains("mlx5_0 port 1"), "{finding:?}");
        }
        let none = Tree::new("none", &[]);
        assert!(ports(&none.0, "").found.ends_with("no device"));
    }

    #[test]
    fn software_rdma_is_refused() {
        const AT: &str = "devices/virtual/infiniband/rxe0";
        let tree = Tree::new("soft", &[(&format!("{AT}/ports/1/state"), "4: ACTIVE\n")]);
        tree.device("rxe0", AT);
        for taken in ["", "rxe0", " mlx5_0, rxe0", "^mlx5_0", "^"] {
            let finding = ports(&tree.0, taken);
            assert!(finding.found.contains("loops for ever"), "{taken}");
            // Deleting the device hangs while a process has it open.
            let remedy = finding.remedy.expect("it is refused");
            assert!(remedy.starts_with("leave it out") && remedy.contains("waits"), "{remedy}");
        }
        for left_out in ["^rxe0", "^mlx5_0,rxe0", "mlx5_0"] {
            assert!(ports(&tree.0, left_out).found.ends_with("no device"), "{left_out}");
        }
    }

    #[test]
    fn a_card_of_short_messages_needs_chunking() {
        const PORT: &str = "devices/pci0000:c0/0000:c1:00.0/infiniband/rxe0/ports/1/state";
        let tree = Tree::new("short", &[(PORT, "4: ACTIVE\n")]);
        tree.device("rxe0", "devices/pci0000:c0/0000:c1:00.0/infiniband/rxe0");
        let look = |bytes, chunking| {
            shortest(chunking, &tree.0, "", |device, port| {
                assert_eq!((device, port), ("rxe0", 1));
                bytes
            })
        };
        let short = look(Some(8 << 20), false).expect("it is told");
        assert!(
            short.found.starts_with("rxe0 sends messages of at most 8388608 bytes"),
            "{short:?}"
        );
        assert!(short.remedy.is_some_and(|text| text.contains("chunking")) && !short.fatal);
        for fine in [look(Some(8 << 20), true), look(Some(1 << 30), false)] {
            assert_eq!(fine.expect("it is told").remedy, None);
        }
        assert_eq!(look(None, false), None);
    }

    #[test]
    fn limits_addresses_and_ports_are_looked_at() {
        assert!(memlock(None).remedy.is_none());
        assert!(memlock(Some(65_536)).found.starts_with("65536 bytes"));
        assert!(address("127.0.0.1").remedy.is_none());
        for bad in ["localhost", "0.0.0.0", "192.0.2.1"] {
            assert!(address(bad).remedy.is_some(), "{bad}");
        }
        let taken = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let port = taken.local_addr().expect("bound").port();
        assert!(control_port(Ipv4Addr::LOCALHOST, port).remedy.is_some());
        drop(taken);
        assert!(control_port(Ipv4Addr::LOCALHOST, 0).remedy.is_none());
    }

    #[test]
    fn a_gpu_is_there_or_not() {
        let tree = Tree::new("gpu", &[("kfd", "")]);
        assert!(gpu(&tree.0).remedy.is_none());
        let remedy = gpu(Path::new("/nonexistent")).remedy.expect("there is none");
        assert!(remedy.contains("amdgpu"), "{remedy}");
    }
}
