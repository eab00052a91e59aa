//! Whether one process can get at the memory of another.

use super::peer::{AccessError, AccessTrial, LEN};
use super::{Check, line};
use crate::sidecar::settings::KvMemory;
use rustix::io::Errno;
use std::path::Path;

const CROSS_MEMORY: &str = "cross-memory";
const MEMORY_FILE: &str = "memory-file";

/// Bit of the capability CAP_SYS_PTRACE.
const SYS_PTRACE: u64 = 1 << 19;

/// What the kernel says of the rights of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PtraceRights {
    /// `kernel.yama.ptrace_scope`; none where there is no Yama.
    scope: Option<u8>,
    /// A seccomp filter is on.
    is_filtered: bool,
    /// It has CAP_SYS_PTRACE.
    may_trace: bool,
}

impl PtraceRights {
    pub(super) fn read(proc: &Path) -> PtraceRights {
        let status = line(&proc.join("self/status")).unwrap_or_default();
        let field = |name: &str| {
            let mut lines = status.lines().filter_map(|line| line.split_once(':'));
            lines.find(|(key, _)| *key == name).map(|(_, value)| value.trim())
        };
        let caps = field("CapEff").and_then(|text| u64::from_str_radix(text, 16).ok());
        PtraceRights {
            scope: line(&proc.join("sys/kernel/yama/ptrace_scope"))
                .and_then(|text| text.parse().ok()),
            is_filtered: field("Seccomp") == Some("2"),
            may_trace: caps.is_some_and(|caps| caps & SYS_PTRACE != 0),
        }
    }

    fn scope(&self) -> String {
        match self.scope {
            Some(scope) => format!("kernel.yama.ptrace_scope is {scope}"),
            None => "there is no Yama".into(),
        }
    }

    /// What to do where access is denied.
    fn remedy(&self) -> &'static str {
        match self {
            PtraceRights { scope: Some(3..), .. } => {
                "kernel.yama.ptrace_scope 3 stays until the next boot: set kernel.yama.ptrace_scope=0 \
                 in a file of /etc/sysctl.d on the machine and boot it"
            }
            PtraceRights { scope: Some(1 | 2), may_trace: false, .. } => {
                "sysctl -w kernel.yama.ptrace_scope=0 on the machine (to keep it, in a file of \
                 /etc/sysctl.d), or give CAP_SYS_PTRACE to hosts and servers (docker: \
                 --cap-add=SYS_PTRACE)"
            }
            PtraceRights { is_filtered: true, .. } => {
                "allow process_vm_readv and process_vm_writev in the seccomp profile (docker: \
                 --cap-add=SYS_PTRACE, or --security-opt seccomp=PROFILE)"
            }
            _ => {
                "run hosts and servers as one user, in one user and PID namespace, from files that \
                 this user may read; see whether a security module (SELinux, AppArmor) denies \
                 ptrace; or give them CAP_SYS_PTRACE"
            }
        }
    }
}

/// Cross-memory attach between siblings: without the memory file, and for MoRIIOConnector.
pub(super) fn cross_memory(
    trial: &Result<AccessTrial, String>,
    rights: &PtraceRights,
    kv_memory: KvMemory,
) -> Check {
    let failed = |found: String, remedy: &str| match kv_memory {
        KvMemory::Private => Check::fail(CROSS_MEMORY, found, remedy),
        KvMemory::File => {
            let found =
                format!("{found}; only \"kv_memory\": \"private\" and MoRIIOConnector need it");
            Check::warn(CROSS_MEMORY, found, remedy)
        }
    };
    let scope = rights.scope();
    let AccessError { errno, why } = match trial {
        Ok(AccessTrial { memory: Err(failure), .. }) => failure,
        Ok(_) => {
            let by = match rights {
                PtraceRights { scope: Some(1..), may_trace: true, .. } => {
                    " by CAP_SYS_PTRACE, which the servers need, too"
                }
                _ => "",
            };
            let found = format!("process_vm_readv of {LEN} bytes of a sibling process works{by}");
            return Check::ok(CROSS_MEMORY, format!("{found}; {scope}"));
        }
        Err(why) => return failed(why.clone(), "let kvferry start processes of itself"),
    };
    let found = format!("process_vm_readv of a sibling process: {why}; {scope}");
    match Errno::from_raw_os_error(*errno) {
        Errno::NOSYS => failed(
            found,
            "take a kernel with CONFIG_CROSS_MEMORY_ATTACH, and a sandbox or seccomp profile that \
             does not hide process_vm_readv",
        ),
        Errno::PERM | Errno::ACCESS => failed(found, rights.remedy()),
        _ => failed(found, "see whether a sandbox (gVisor) or security module stands between"),
    }
}

/// Memory files, in which KV caches and rings lie.
pub(super) fn memory_file(trial: &Result<AccessTrial, String>) -> Check {
    let fail = |found: &str, remedy| Check::fail(MEMORY_FILE, found, remedy);
    match trial {
        Err(why) => fail(why, "let kvferry start processes of itself"),
        Ok(AccessTrial { created: Err(why), .. }) => fail(
            why,
            "allow memfd_create and sealing (Linux 3.17 or later; the seccomp profile), and see \
             that the memory limit of the container has room",
        ),
        Ok(AccessTrial { opened: Err(AccessError { why, .. }), .. }) => fail(
            &format!("opening the memory file of a sibling process by /proc/PID/fd: {why}"),
            "run hosts and servers as one user, in one PID namespace, from files that this user may \
             read, with /proc mounted without hidepid",
        ),
        Ok(_) => Check::ok(
            MEMORY_FILE,
            "memfd_create and sealing work, and a sibling process opens the file by /proc/PID/fd",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::CheckStatus;
    use super::super::tests::TempTree;
    use super::*;

    fn denied(errno: Errno) -> Result<AccessTrial, String> {
        let failure = AccessError { errno: errno.raw_os_error(), why: errno.to_string() };
        Ok(AccessTrial { memory: Err(failure.clone()), created: Ok(()), opened: Err(failure) })
    }

    fn allowed() -> Result<AccessTrial, String> {
        Ok(AccessTrial { memory: Ok(()), created: Ok(()), opened: Ok(()) })
    }

    fn rights(name: &str, scope: Option<&str>, caps: &str, seccomp: &str) -> PtraceRights {
        let status = format!("Name:\tkvferry\nCapEff:\t{caps}\nSeccomp:\t{seccomp}\n");
        let mut files = vec![("proc/self/status", &*status)];
        files.extend(scope.map(|scope| ("proc/sys/kernel/yama/ptrace_scope", scope)));
        PtraceRights::read(&TempTree::new(name, &files).roots().proc)
    }

    const NONE: &str = "0000000000000000";
    const TRACE: &str = "0000000000080000";

    #[test]
    fn rights_are_read() {
        let read = rights("rights", Some("1\n"), TRACE, "2");
        assert_eq!(read, PtraceRights { scope: Some(1), is_filtered: true, may_trace: true });
        let read = rights("no-rights", None, "00000000a80425fb", "0");
        assert_eq!(read, PtraceRights { scope: None, is_filtered: false, may_trace: false });
    }

    #[test]
    fn each_scope_has_its_remedy() {
        for (scope, seccomp, said) in [
            (Some("0"), "0", "run hosts and servers as one user"),
            (Some("0"), "2", "allow process_vm_readv and process_vm_writev in the seccomp profile"),
            (Some("1"), "2", "sysctl -w kernel.yama.ptrace_scope=0"),
            (Some("2"), "0", "sysctl -w kernel.yama.ptrace_scope=0"),
            (Some("3"), "0", "boot"),
            (None, "0", "run hosts and servers as one user"),
        ] {
            let name = format!("scope-{scope:?}-{seccomp}");
            let rights = rights(&name, scope, NONE, seccomp);
            let check = cross_memory(&denied(Errno::PERM), &rights, KvMemory::Private);
            assert_eq!(check.status, CheckStatus::Fail, "{check:?}");
            assert!(check.remedy.as_deref().is_some_and(|text| text.contains(said)), "{check:?}");
            let scope = scope.map_or("no Yama".into(), |scope| format!("ptrace_scope is {scope}"));
            assert!(check.found.contains(&scope), "{check:?}");
        }
    }

    #[test]
    fn what_a_deployment_does_not_need_is_a_warning() {
        let rights = rights("warning", Some("1"), NONE, "0");
        let check = cross_memory(&denied(Errno::PERM), &rights, KvMemory::File);
        assert_eq!(check.status, CheckStatus::Warn);
        assert!(check.found.contains("only \"kv_memory\": \"private\""), "{check:?}");
        let check = cross_memory(&denied(Errno::NOSYS), &rights, KvMemory::Private);
        assert!(check.remedy.is_some_and(|text| text.contains("CONFIG_CROSS_MEMORY_ATTACH")));
    }

    #[test]
    fn a_capability_that_opens_the_way_is_named() {
        let rights = rights("capability", Some("1"), TRACE, "0");
        let check = cross_memory(&allowed(), &rights, KvMemory::Private);
        assert_eq!((check.status, check.remedy.is_none()), (CheckStatus::Ok, true));
        assert!(check.found.contains("CAP_SYS_PTRACE"), "{check:?}");
    }

    #[test]
    fn memory_files_that_cannot_be_had_or_opened_are_failures() {
        let opened = memory_file(&denied(Errno::ACCESS));
        assert_eq!(opened.status, CheckStatus::Fail);
        assert!(opened.found.contains("/proc/PID/fd"), "{opened:?}");
        let created = Ok(AccessTrial { memory: Ok(()), created: Err("no".into()), opened: Ok(()) });
        let created = memory_file(&created);
        assert!(created.remedy.is_some_and(|text| text.contains("memfd_create")));
        assert_eq!(memory_file(&allowed()).status, CheckStatus::Ok);
        assert_eq!(memory_file(&Err("no process".into())).status, CheckStatus::Fail);
    }
}
