//! The script that sets up a host without a card: on this kernel, and with a kernel module and a
//! tool that are played, but mounts that are real.

// Says what it passes over.
#![allow(clippy::print_stdout)]

use kvferry_fabric_mori::preflight::{self, Finding, PreflightRoots};
use kvferry_fabric_mori::{MoriBackend, MoriConfig};
use libloading::{Library, Symbol};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const SETUP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/softrdma/setup");
const STATE: &str = "run/kvferry-softrdma";

const MODPROBE: &str = r#"
case "$*" in
"rdma_rxe") mkdir -p "$KVFERRY_SOFTRDMA_ROOT/sys/module/rdma_rxe" ;;
"-r rdma_rxe") rmdir "$KVFERRY_SOFTRDMA_ROOT/sys/module/rdma_rxe" ;;
esac
"#;

const RDMA: &str = r#"
at=$KVFERRY_SOFTRDMA_ROOT/sys/devices/virtual/infiniband/$3
link=$KVFERRY_SOFTRDMA_ROOT/sys/class/infiniband/$3
case $2 in
add) mkdir -p "$at/ports/1"; echo '4: ACTIVE' >"$at/ports/1/state"; ln -s "$at" "$link" ;;
delete) rm -r "$at" "$link" ;;
esac
"#;

/// The inner test of a mount namespace of its own finds the folder there.
const INSIDE: &str = "KVFERRY_TEST_SOFTRDMA";

/// A machine's folders and tools.
struct PlayedHost(PathBuf);

impl PlayedHost {
    fn new(name: &str, tools: &[(&str, &str)]) -> PlayedHost {
        let folder = format!("kvferry-softrdma-{}-{name}", std::process::id());
        let host = PlayedHost(std::env::temp_dir().join(folder));
        let folders = [
            "bin",
            "root/dev",
            "root/run",
            "root/sys/bus/pci",
            "root/sys/class/infiniband",
            "root/sys/devices/virtual/infiniband",
            "root/sys/module",
        ];
        for folder in folders {
            fs::create_dir_all(host.0.join(folder)).expect("a folder");
        }
        for (tool, text) in [("modprobe", MODPROBE), ("rdma", RDMA)].iter().chain(tools) {
            let path = host.0.join("bin").join(tool);
            fs::write(&path, format!("#!/bin/sh{text}")).expect("a script");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its mode");
        }
        host
    }

    fn root(&self) -> PathBuf {
        self.0.join("root")
    }

    /// A command of this machine.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("{}:{path}", self.0.join("bin").display());
        command.env("PATH", path).env("KVFERRY_SOFTRDMA_ROOT", self.root());
        command
    }

    /// All paths below its root.
    fn paths(&self) -> BTreeSet<PathBuf> {
        let output = Command::new("find").arg(self.root()).output().expect("find");
        String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect()
    }
}

impl Drop for PlayedHost {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0);
    }
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text)).concat()
}

/// Mounts in a namespace of its own need root.
fn may_mount() -> bool {
    let allowed = Command::new("unshare").args(["-m", "true"]).output();
    allowed.is_ok_and(|output| output.status.success())
}

#[test]
fn a_kernel_without_software_rdma_is_one_line_and_nothing_stays() {
    let known = Command::new("modprobe").args(["-n", "-q", "rdma_rxe"]).status();
    if known.is_ok_and(|status| status.success()) || Path::new("/sys/module/rdma_rxe").exists() {
        println!("passed over: this kernel has software RDMA");
        return;
    }
    let output = Command::new(SETUP).arg("lo").output().expect("it runs");
    let said = text(&output);
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    let why = ["has no software RDMA", "run it as root"];
    assert!(why.iter().any(|why| said.contains(why)), "{said}");
    assert!(!Path::new("/").join(STATE).exists() && output.stdout.is_empty(), "{said}");
}

#[test]
fn a_step_that_fails_takes_back_those_before_it() {
    if !may_mount() {
        println!("passed over: no mount namespace of its own");
        return;
    }
    let broken = |tool, text| PlayedHost::new(tool, &[(tool, text)]);
    for (host, why) in [
        (broken("modprobe", "\ntest \"$1\" = -n"), "modprobe rdma_rxe failed"),
        (broken("rdma", "\nexit 1"), "type rxe netdev lo failed"),
        (broken("mount", "\nexit 32"), "a bind mount of "),
        (broken("cc", "\nexit 1"), "does not compile"),
    ] {
        let before = host.paths();
        let line = format!("'{SETUP}' lo");
        let output = host.command("unshare").args(["-m", "bash", "-c", &line]).output();
        let output = output.expect("it runs");
        assert_eq!(output.status.code(), Some(1), "{}", text(&output));
        assert!(text(&output).contains(why), "{}", text(&output));
        assert_eq!(host.paths(), before, "{}", text(&output));
    }
}

#[test]
fn what_is_set_up_is_what_the_plane_looks_for_until_it_is_undone() {
    if !may_mount() {
        println!("passed over: no mount namespace of its own");
        return;
    }
    let host = PlayedHost::new("whole", &[]);
    // By which processes have the device open.
    for (folder, file, text) in [
        ("root/sys/class/infiniband_verbs/uverbs0", "ibdev", "rxe0\n"),
        ("root/dev/infiniband", "uverbs0", ""),
    ] {
        fs::create_dir_all(host.0.join(folder)).expect("a folder");
        fs::write(host.0.join(folder).join(file), text).expect("a file");
    }
    let before = host.paths();
    let inner = std::env::current_exe().expect("this program");
    let line = format!(
        "set -e; eval \"$('{SETUP}' lo)\"; '{}' --ignored --exact inside --nocapture; \
         exec 9<\"$KVFERRY_SOFTRDMA_ROOT/dev/infiniband/uverbs0\"; ! '{SETUP}' --undo; exec 9<&-; \
         '{SETUP}' --undo",
        inner.display()
    );
    let mut command = host.command("unshare");
    command.args(["-m", "bash", "-c", &line]).env(INSIDE, host.root());
    let output = command.output().expect("it runs");
    assert!(output.status.success(), "{}", text(&output));
    let said = text(&output);
    assert!(said.contains("1 passed") && said.contains(" has rxe0 open; end it first"), "{said}");
    assert_eq!(host.paths(), before, "{}", text(&output));
}

/// The part of the test above that is in the namespace.
#[test]
#[ignore = "what_is_set_up_is_what_the_plane_looks_for_until_it_is_undone runs it"]
fn inside() {
    let root = PathBuf::from(std::env::var_os(INSIDE).expect("the other test runs it"));
    let config = MoriConfig { backend: MoriBackend::Rdma, ..MoriConfig::default() };
    let roots = PreflightRoots { sys: root.join("sys"), dev: root.join("dev") };
    let findings = preflight::look(&config, &roots);
    let lacks = |finding: &&Finding| finding.fatal && finding.remedy.is_some();
    let lacking: Vec<_> = findings
        .iter()
        .filter(lacks)
        .filter(|finding| ["mori-gpu", "mori-rdma-ports"].contains(&finding.check))
        .collect();
    assert!(lacking.is_empty(), "{lacking:?}");
    let named = std::env::var_os("MORI_ROCM_SMI_PATH").expect("it is exported");
    // SAFETY: The library has no constructors, and its functions are those of rocm_smi.
    unsafe {
        let library = Library::new(&named).expect("it loads");
        let start: Symbol<'_, unsafe extern "C" fn(u64) -> i32> =
            library.get(b"rsmi_init").expect("there");
        let count: Symbol<'_, unsafe extern "C" fn(*mut u32) -> i32> =
            library.get(b"rsmi_num_monitor_devices").expect("there");
        let mut gpus = 0;
        assert_eq!((start(0), count(&raw mut gpus), gpus), (0, 0, 1));
        for name in [
            "rsmi_dev_pci_id_get",
            "rsmi_is_P2P_accessible",
            "rsmi_topo_get_link_type",
            "rsmi_topo_get_link_weight",
            "rsmi_shut_down",
            "rsmi_status_string",
        ] {
            library.get::<unsafe extern "C" fn()>(name.as_bytes()).expect("MoRI looks it up");
        }
    }
}
