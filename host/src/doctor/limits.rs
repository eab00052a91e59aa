//! Limits of processes, and pages.

use super::{Check, SystemRoots, line};
use kvferry_fabric_host::HostConfig;
use kvferry_fabric_mori::preflight::MEMLOCK as LOCK_MORE;
use rustix::process::{Resource, Rlimit, getrlimit};

const MEMLOCK: &str = "memlock";
const OPEN_FILES: &str = "open-files";

/// The limit of locked memory.
pub(super) fn of_memlock() -> Rlimit {
    getrlimit(Resource::Memlock)
}

/// The limit of open files.
pub(super) fn of_files() -> Rlimit {
    getrlimit(Resource::Nofile)
}

fn amount(limit: Option<u64>, unit: &str) -> String {
    limit.map_or("unlimited".into(), |limit| format!("{limit}{unit}"))
}

/// Memory that may be locked: a NIC pins what it reads and writes.
pub(super) fn memlock(limit: Rlimit, has_rdma: bool) -> Check {
    let (soft, hard) = (amount(limit.current, " bytes"), amount(limit.maximum, " bytes"));
    match (limit.current, has_rdma) {
        (None, _) => Check::ok(MEMLOCK, soft),
        (Some(_), false) => {
            let found =
                format!("{soft}; host memory and TCP lock none, and there is no RDMA device");
            Check::ok(MEMLOCK, found)
        }
        (Some(_), true) => Check::warn(
            MEMLOCK,
            format!("{soft}, at most {hard}; RDMA registers the whole KV cache"),
            LOCK_MORE,
        ),
    }
}

/// Descriptors: each connection of a peer has some. Our processes raise their limit to the hard one.
pub(super) fn open_files(limit: Rlimit) -> Check {
    let links = HostConfig::default().links_max;
    let wanted = u64::from(links) * 5;
    let (soft, hard) = (amount(limit.current, ""), amount(limit.maximum, ""));
    let found = format!(
        "{soft}, raised to {hard} by router, host and serve; up to {links} peers connect to each rank"
    );
    match limit.maximum {
        Some(most) if most < wanted => Check::warn(
            OPEN_FILES,
            found,
            format!(
                "for many peers ulimit -n {wanted} before the servers start (docker: --ulimit \
                 nofile={wanted}, systemd: LimitNOFILE={wanted})"
            ),
        ),
        _ => Check::ok(OPEN_FILES, found),
    }
}

/// Huge pages, reserved or made by the kernel; nothing needs them.
pub(super) fn huge_pages(roots: &SystemRoots) -> Check {
    let memory = line(&roots.proc.join("meminfo")).unwrap_or_default();
    let field = |name: &str| {
        let mut lines = memory.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| *key == name).map_or("?", |(_, value)| value.trim())
    };
    let (free, total) = (field("HugePages_Free"), field("HugePages_Total"));
    let chosen = |name: &str| {
        let text = line(&roots.sys.join("kernel/mm/transparent_hugepage").join(name));
        let text = text.as_deref().unwrap_or_default();
        let word = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
        word.map_or("?", |(word, _)| word).to_owned()
    };
    let (anonymous, shared) = (chosen("enabled"), chosen("shmem_enabled"));
    let size = field("Hugepagesize");
    let found = format!(
        "{free} of {total} reserved pages of {size} are free; transparent ones: {anonymous}, in \
         memory files: {shared}; none is needed"
    );
    Check::ok("huge-pages", found)
}

#[cfg(test)]
mod tests {
    use super::super::CheckStatus;
    use super::super::tests::TempTree;
    use super::*;

    fn limit(current: Option<u64>, maximum: Option<u64>) -> Rlimit {
        Rlimit { current, maximum }
    }

    #[test]
    fn locked_memory_matters_to_rdma() {
        assert_eq!(memlock(limit(None, None), true).status, CheckStatus::Ok);
        assert_eq!(memlock(limit(Some(65_536), None), false).status, CheckStatus::Ok);
        let check = memlock(limit(Some(65_536), Some(131_072)), true);
        assert_eq!(check.status, CheckStatus::Warn);
        assert!(check.found.starts_with("65536 bytes, at most 131072 bytes"), "{check:?}");
        assert!(check.remedy.is_some_and(|text| text.contains("--ulimit memlock=-1")));
    }

    #[test]
    fn few_open_files_are_a_warning() {
        let check = open_files(limit(Some(1_024), Some(2_048)));
        assert_eq!(check.status, CheckStatus::Warn);
        assert!(check.remedy.is_some_and(|text| text.contains("ulimit -n 5120")));
        assert_eq!(open_files(limit(Some(1_024), Some(524_288))).status, CheckStatus::Ok);
        assert_eq!(open_files(limit(None, None)).status, CheckStatus::Ok);
    }

    #[test]
    fn pages_are_told() {
        let meminfo =
            "HugePages_Total:      16\nHugePages_Free:       12\nHugepagesize:       2048 kB";
        let tree = TempTree::new(
            "pages",
            &[
                ("proc/meminfo", meminfo),
                ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
                ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [advise] never\n"),
            ],
        );
        let check = huge_pages(&tree.roots());
        assert!(
            check.found.starts_with(
                "12 of 16 reserved pages of 2048 kB are free; transparent ones: madvise, in memory \
                 files: advise"
            ),
            "{check:?}"
        );
    }
}
