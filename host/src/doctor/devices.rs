//! NICs with RDMA, MoRI and GPUs, which only the backends of MoRI use.

use super::peer::in_one_line;
use super::{Check, SystemRoots, line};
use kvferry_fabric_mori::preflight::{self, names};
use kvferry_fabric_mori::{MoriConfig, MoriInstallation, MoriSearchError};
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

const RDMA: &str = "rdma";
const MORI: &str = "mori";
const AMD_GPU: &str = "amd-gpu";

fn devices(sys: &Path) -> PathBuf {
    sys.join("class/infiniband")
}

/// True if there is a device, whatever its ports do.
pub(super) fn has_rdma(sys: &Path) -> bool {
    !names(&devices(sys)).is_empty()
}

/// A port of a device: whether it is active, and what the kernel says of it.
fn port(folder: &Path, name: &str) -> (bool, String) {
    let text = |name: &str| line(&folder.join(name)).unwrap_or_else(|| "?".into());
    let (state, rate, layer) = (text("state"), text("rate"), text("link_layer"));
    // "4: ACTIVE"
    let state = state.rsplit_once(": ").map_or(&*state, |(_, word)| word);
    (state == "ACTIVE", format!("{name} {state}, {rate}, {layer}"))
}

/// RDMA devices and their ports.
pub(super) fn rdma(roots: &SystemRoots) -> Check {
    let folder = devices(&roots.sys);
    let mut ports = Vec::new();
    for device in names(&folder) {
        let at = folder.join(&device).join("ports");
        let numbers = names(&at);
        ports.extend(numbers.iter().map(|n| port(&at.join(n), &format!("{device} port {n}"))));
        if numbers.is_empty() {
            ports.push((false, format!("{device} without ports")));
        }
    }
    if ports.is_empty() {
        let found = "no device in /sys/class/infiniband: RDMA backends cannot be used here; host \
            memory and TCP can";
        return Check::ok(RDMA, found);
    }
    let texts: Vec<&str> = ports.iter().map(|(_, text)| &**text).collect();
    let found = texts.join("; ");
    if !ports.iter().any(|(is_active, _)| *is_active) {
        let remedy = "bring a port up: see its cable and switch, `ip link set DEV up` for Ethernet, a \
            subnet manager for InfiniBand (`rdma link` shows the state)";
        return Check::warn(RDMA, found, remedy);
    }
    let verbs = names(&roots.dev.join("infiniband"));
    if !verbs.iter().any(|name| name.starts_with("uverbs")) {
        let found = format!("{found}; there is no /dev/infiniband/uverbs*");
        let remedy = "modprobe ib_uverbs; in a container docker --device=/dev/infiniband";
        return Check::warn(RDMA, found, remedy);
    }
    Check::ok(RDMA, found)
}

/// The MoRI that a plane would load, which is found by variables or as a Python package.
pub(super) fn mori(installed: Result<MoriInstallation, MoriSearchError>) -> Check {
    match installed {
        Ok(found) => Check::ok(MORI, format!("{found}; --fabric mori tries it")),
        Err(why) if why.is_nowhere() => {
            let found = "no MoRI by MORI_INCLUDE_DIR and MORI_LIB_DIR, by MORI_HOME, or as a package of \
                MORI_PYTHON or python3; only MoRI's backends need one";
            Check::ok(MORI, found)
        }
        Err(why) => Check::warn(MORI, in_one_line(&why.to_string()), "correct what it says"),
    }
}

/// What MoRI is seen to lack, in the order in which a plane over it would miss it. Whether it
/// starts is only known when it was tried.
pub(super) fn mori_fabric(config: &MoriConfig) -> Vec<Check> {
    let findings = preflight::look(config, &preflight::PreflightRoots::default()).into_iter();
    let check = |finding: preflight::Finding| match finding.remedy {
        None => Check::ok(finding.check, finding.found),
        Some(to_do) => Check::warn(finding.check, finding.found, to_do),
    };
    findings.map(check).collect()
}

/// Whether GPUs of AMD can be opened.
pub(super) fn amd_gpu(dev: &Path) -> Check {
    const NONE: &str = "only MoRI's backends need one";
    let path = dev.join("kfd");
    if !path.exists() {
        return Check::ok(AMD_GPU, format!("no {}, so no AMD GPU; {NONE}", path.display()));
    }
    match OpenOptions::new().read(true).write(true).open(&path) {
        Ok(_) => Check::ok(AMD_GPU, format!("{} can be opened; {NONE}", path.display())),
        Err(why) => Check::warn(
            AMD_GPU,
            format!("{}: cannot be opened: {why}; {NONE}", path.display()),
            "usermod -aG render,video USER, and log in again (docker: --device=/dev/kfd \
             --device=/dev/dri --group-add=render)",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::CheckStatus;
    use super::super::tests::TempTree;
    use super::*;

    const STATE: &str = "sys/class/infiniband/mlx5_0/ports/1/state";
    const RATE: &str = "sys/class/infiniband/mlx5_0/ports/1/rate";
    const LAYER: &str = "sys/class/infiniband/mlx5_0/ports/1/link_layer";

    #[test]
    fn ports_of_devices_are_told() {
        let none = TempTree::new("no-nic", &[]).roots();
        assert!(!has_rdma(&none.sys));
        assert!(rdma(&none).found.contains("host memory and TCP can"));
        let rest = [(RATE, "200 Gb/sec (4X HDR)\n"), (LAYER, "InfiniBand\n")];
        let up = TempTree::new(
            "nic",
            &[(STATE, "4: ACTIVE\n"), rest[0], rest[1], ("dev/infiniband/uverbs0", "")],
        );
        let check = rdma(&up.roots());
        assert!(has_rdma(&up.roots().sys));
        assert_eq!(check.status, CheckStatus::Ok);
        let said = "mlx5_0 port 1 ACTIVE, 200 Gb/sec (4X HDR), InfiniBand";
        assert!(check.found.starts_with(said), "{check:?}");
        let closed = TempTree::new("nic-closed", &[(STATE, "4: ACTIVE\n"), rest[0], rest[1]]);
        let check = rdma(&closed.roots());
        assert!(check.remedy.is_some_and(|text| text.contains("--device=/dev/infiniband")));
        let down = TempTree::new("nic-down", &[(STATE, "1: DOWN\n"), rest[0], rest[1]]);
        let check = rdma(&down.roots());
        assert_eq!(check.status, CheckStatus::Warn);
        assert!(check.found.starts_with("mlx5_0 port 1 DOWN"), "{check:?}");
        let bare = TempTree::new("nic-bare", &[("sys/class/infiniband/rxe0/node_type", "")]);
        assert!(rdma(&bare.roots()).found.starts_with("rxe0 without ports"));
    }

    #[test]
    fn the_mori_that_is_told_of_is_the_one_that_would_be_loaded() {
        let [_, newest] = mori_double::INSTALLS;
        let found = mori(MoriInstallation::explicit(newest.include, newest.lib));
        assert!(found.found.contains("libmori_io.so, found given, build-id:"), "{found:?}");
        let none = mori(Err(MoriSearchError::Nowhere { tried: Vec::new() }));
        assert_eq!(none.status, CheckStatus::Ok);
        assert!(none.found.starts_with("no MoRI by MORI_INCLUDE_DIR"), "{none:?}");
        let half = MoriSearchError::Unpaired { set: "MORI_LIB_DIR", unset: "MORI_INCLUDE_DIR" };
        assert_eq!(mori(Err(half)).status, CheckStatus::Warn);
    }

    #[test]
    fn gpus_are_there_or_not() {
        let tree =
            TempTree::new("gpu", &[("dev/kfd", ""), ("none/file", ""), ("shut/kfd/file", "")]);
        assert!(amd_gpu(&tree.roots().dev).found.contains("can be opened"));
        assert!(amd_gpu(&tree.0.join("none")).found.contains("no AMD GPU"));
        // A folder cannot be opened for writing, whoever tries.
        let shut = amd_gpu(&tree.0.join("shut"));
        assert!(shut.remedy.is_some_and(|text| text.contains("render,video")));
    }
}
