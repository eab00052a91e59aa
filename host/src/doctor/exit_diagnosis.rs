//! What the end of a process in MoRI means, and what to do about it.

use super::child::{ChildExit, ExitCause};
use kvferry_fabric_mori::preflight::MEMLOCK as LOCK_MORE;
use rustix::process::Signal;

/// Begins the shim's line about a process that MoRI ends, and the call in it.
const SHIM: &str = "kvferry: ";
const LAST_CALL: &str = "last call into MoRI: ";

/// Begins what a command says of itself: why it failed, and what else there is to say.
const ERROR: &str = "error: ";
const NOTE: &str = "note: ";

/// Between what is wrong and what to do, where the plane says both.
const TO_DO: &str = "; to do: ";

const OPEN_GPU: &str = "see what `rocm-smi` says: MoRI needs an AMD GPU that this user may open \
    (usermod -aG render,video USER; docker: --device=/dev/kfd --device=/dev/dri --group-add=render)";

const INSTALL: &str = "install the library that it names, or put its folder in LD_LIBRARY_PATH";

/// What to do where one of these texts was said; the first that fits counts.
const KNOWN: [(&[&str], &str); 14] = [
    // First, since a compiler may say anything.
    (
        &["the shim for MoRI does not compile"],
        "correct what it says, or name another compiler by CXX, and try `kvferry doctor --fix mori`",
    ),
    (
        &["librocm_smi64"],
        "install rocm-smi-lib of MoRI's ROCm, or name its librocm_smi64.so by MORI_ROCM_SMI_PATH",
    ),
    (&["rocm smi failed", "rocm_smi", "reported 0 GPUs"], OPEN_GPU),
    (
        &["dlopen libibverbs", "libibverbs.so"],
        "install libibverbs (libibverbs1, rdma-core), or put its folder in LD_LIBRARY_PATH",
    ),
    (
        &[
            "couldn't load driver",
            "no userspace device-specific driver",
            "not available at runtime",
        ],
        "install the card's user-space library (ibverbs-providers, rdma-core, or the maker's own) \
         until `ibv_devices` lists the card",
    ),
    (
        &["no active RDMA device"],
        "bring a port up (`rdma link` shows the state, `ibv_devinfo` what libibverbs sees; docker: \
         --device=/dev/infiniband)",
    ),
    (&["RegisterRdmaMemoryRegion"], LOCK_MORE),
    (
        &[
            "cannot listen",
            "bind(",
            "Address already in use",
            "Cannot assign requested address",
            "needs an IPv4",
        ],
        "give an IPv4 address of this machine (`ip -4 address`), and end what has its port (`ss -ltnp`)",
    ),
    (
        &["cannot connect: "],
        "start `kvferry doctor --fabric mori --serve ADDR:PORT` there, and open its ports in \
         firewalls between",
    ),
    (
        &["operation_ms = ", "open_ms = ", "nothing came within", "(Rdma)"],
        "see that the card answers at all (`rping`, `ib_write_bw`; another MORI_IB_GID_INDEX, the \
         switch); where it is only slow, raise operation_ms and open_ms of \"mori\"",
    ),
    (
        &["connect("],
        "let the two connect to each other at --host-ip, to any port (firewalls between)",
    ),
    (
        &["wrong bytes arrived"],
        "do not use this backend here; leave MORI_IB_ENABLE_RELAXED_ORDERING off, and report it if \
         it was",
    ),
    (&["cannot open shared object file", "undefined symbol"], INSTALL),
    (
        &["no usable shim for MoRI"],
        "correct what it says, and try `kvferry doctor --fix mori`; or name a shim by KVFERRY_MORI_SHIM",
    ),
];

impl ChildExit {
    /// What was wrong, as it said itself, or how it ended.
    pub(super) fn describe(&self) -> String {
        let error = self.error().filter(|_| matches!(self.how, ExitCause::Exit(1..=6)));
        if let Some(error) = error {
            let wrong: Vec<&str> = error.lines().map(|line| cut(line).0).collect();
            return format!("said: {}", wrong.join("; "));
        }
        let call = self.err.lines().find_map(|line| line.split_once(LAST_CALL));
        let call = call.map(|(_, call)| format!("; {LAST_CALL}{call}")).unwrap_or_default();
        let ours = |line: &&str| [SHIM, NOTE].iter().any(|start| line.starts_with(start));
        let lines = self.err.lines().map(str::trim).filter(|line| !line.is_empty() && !ours(line));
        let last: Vec<&str> = lines.rev().take(2).collect();
        let said = match last[..] {
            [] => String::new(),
            _ => format!("; it said: {}", last.into_iter().rev().collect::<Vec<_>>().join("; ")),
        };
        format!("{}{call}{said}", self.how)
    }

    /// What to do about that.
    pub(super) fn remedy(&self) -> String {
        let lines = self.error().into_iter().flat_map(str::lines).map(cut);
        let all: Vec<&str> = lines.filter_map(|(_, to_do)| to_do).collect();
        if !all.is_empty() {
            return all.join("; ");
        }
        if let Some(remedy) = remedy(&self.err) {
            return remedy.into();
        }
        match self.how {
            ExitCause::Signal(number) if number == Signal::ABORT.as_raw() => {
                format!("{LOCK_MORE}: MoRI aborts where memory cannot be pinned, here or by its peer")
            }
            ExitCause::Signal(_) => "see that ROCm's libraries are of the version that MoRI was built with \
                (`ldd libmori_io.so`), and report the backtrace (`coredumpctl gdb`)"
                .into(),
            ExitCause::Killed(_) => "leave out devices without a PCI address (software RDMA) by \
                MORI_RDMA_DEVICES=^NAME; where it says no more with MORI_GLOBAL_LOG_LEVEL=debug, see \
                where it hangs (`gdb -p`); --timeout N waits longer"
                .into(),
            ExitCause::Exit(_) => "correct what it says; MORI_GLOBAL_LOG_LEVEL=debug has it say more".into(),
        }
    }

    /// Why it says that it failed.
    fn error(&self) -> Option<&str> {
        // Libraries have the word within their lines.
        let at = self.err.match_indices(ERROR).map(|(at, _)| at);
        let mut starts = at.filter(|at| *at == 0 || self.err.as_bytes()[at - 1] == b'\n');
        starts.next().map(|at| self.err[at + ERROR.len()..].trim_end())
    }
}

/// What to do about what was said, if that is known.
pub(super) fn remedy(said: &str) -> Option<&'static str> {
    let is_said = |texts: &[&str]| texts.iter().any(|text| said.contains(text));
    KNOWN.iter().find(|(texts, _)| is_said(texts)).map(|(_, remedy)| *remedy)
}

/// What is wrong and what to do.
fn cut(line: &str) -> (&str, Option<&str>) {
    let line = line.strip_prefix(ERROR).unwrap_or(line).trim();
    line.split_once(TO_DO).map_or((line, None), |(wrong, to_do)| (wrong, Some(to_do)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn end(how: ExitCause, err: &str) -> ChildExit {
        ChildExit { how, out: Vec::new(), err: err.into() }
    }

    #[test]
    fn an_error_is_what_was_wrong_and_what_to_do() {
        let said = "note: x\nerror: mori-rdma at a: mori-gpu: /dev/kfd: denied; to do: ask\n\
                    mori-port: taken; to do: move\n";
        let refused = end(ExitCause::Exit(2), said);
        assert_eq!(
            refused.describe(),
            "said: mori-rdma at a: mori-gpu: /dev/kfd: denied; mori-port: taken"
        );
        assert_eq!(refused.remedy(), "ask; move");
    }

    #[test]
    fn an_end_is_told_with_the_last_call_and_the_last_words() {
        let said = "one\ntwo\n[ROCm-SMI] dlopen(librocm_smi64) failed: no file\nkvferry: the process \
                    exits with status 255 with 1 MoRI engine(s) up; last call into MoRI: F, under way\n";
        let exited = end(ExitCause::Exit(255), said);
        assert_eq!(
            exited.describe(),
            "ended with exit status 255; last call into MoRI: F, under way; it said: two; [ROCm-SMI] \
             dlopen(librocm_smi64) failed: no file"
        );
        assert!(exited.remedy().contains("MORI_ROCM_SMI_PATH"));
    }

    #[test]
    fn each_way_to_end_has_its_remedy() {
        let limit = Duration::from_secs(3);
        for (how, said, told, remedy) in [
            (ExitCause::Signal(6), "", "signal 6 (SIGABRT", "ulimit -l unlimited"),
            (ExitCause::Signal(11), "", "signal 11 (SIGSEGV", "coredumpctl"),
            (ExitCause::Killed(limit), "", "after 3 s, and was killed", "MORI_RDMA_DEVICES=^NAME"),
            (ExitCause::Exit(255), "rocm smi failed with X", "rocm smi failed", "rocm-smi"),
            (
                ExitCause::Exit(2),
                "error: s: libmlx5.so: cannot open shared object file",
                "s: ",
                INSTALL,
            ),
            (ExitCause::Exit(2), "error: no active RDMA device", "no active", "`rdma link`"),
            (
                ExitCause::Exit(2),
                "W failed to dlopen libibverbs\nerror: no active RDMA device",
                "no active",
                "libibverbs1",
            ),
            (
                ExitCause::Exit(2),
                "libibverbs: Warning: couldn't load driver 'libmlx5-rdmav34.so'\nerror: no active RDMA device",
                "no active",
                "ibverbs-providers",
            ),
            (
                ExitCause::Exit(255),
                "syscall failed with Address already in use",
                "255",
                "`ss -ltnp`",
            ),
            (
                ExitCause::Exit(2),
                "error: not there within operation_ms = 2",
                "said: not",
                "MORI_IB_GID_INDEX",
            ),
            (
                ExitCause::Exit(2),
                "error: connect(a:1): refused",
                "said: connect(",
                "firewalls between",
            ),
            (
                ExitCause::Exit(2),
                "error: one\nerror: two",
                "said: one; two",
                "correct what it says",
            ),
            (ExitCause::Exit(101), "panicked", "101; it said: panicked", "correct what it says"),
        ] {
            let end = end(how, said);
            assert!(end.describe().contains(told), "{}", end.describe());
            assert!(end.remedy().contains(remedy), "{said}: {}", end.remedy());
        }
    }
}
