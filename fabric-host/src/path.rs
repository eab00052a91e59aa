//! Which path a direction of a session takes.

use crate::config::DataPath;
use crate::link::LocalPeer;
use crate::memory::{HostMemoryAccess, MemfdMapping, PidfdProcess};
use crate::proto::{HostRegionInfo, PathPolicy, SessionDenial};
use crate::sys;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Paths to try, best first: those that both sides allow and that are not faster than the one that
/// memory and hosts call for. A slower one than that needs `slower`, unless nothing as fast is
/// configured.
///
/// # Errors
/// No path is left; says which setting would allow one.
pub(crate) fn candidates(
    natural: DataPath,
    rules: [&PathPolicy; 2],
) -> Result<Vec<DataPath>, String> {
    let both = |path: &DataPath| rules.iter().all(|rules| rules.paths.contains(path));
    let allowed: Vec<DataPath> = DataPath::ALL.into_iter().filter(both).collect();
    let slower = rules.iter().all(|rules| rules.slower);
    let mut left: Vec<DataPath> = allowed.iter().copied().filter(|path| *path >= natural).collect();
    let list = |paths: &[DataPath]| paths.iter().map(|p| p.name()).collect::<Vec<_>>().join(", ");
    if left.is_empty() {
        return Err(format!(
            "memory and hosts call for {natural}, both sides allow only [{}]: add it to `paths`",
            list(&allowed)
        ));
    }
    if !slower {
        if left[0] > natural && allowed.iter().any(|path| *path < natural) {
            return Err(format!(
                "memory and hosts call for {natural}, configured are [{}]: {} is slower than the \
                 best of them, allow it by `slower = true`",
                list(&allowed),
                left[0]
            ));
        }
        left.truncate(1);
    }
    Ok(left)
}

/// A source on this host, for who owns the destination, with the descriptor that came along;
/// `peer` is who offers it.
///
/// # Errors
/// Why none of the paths can be had, and whether TCP is left.
pub(crate) fn reach(
    side: &HostRegionInfo,
    file: Option<OwnedFd>,
    peer: &LocalPeer,
    rules: [&PathPolicy; 2],
) -> Result<(DataPath, HostMemoryAccess), SessionDenial> {
    let natural = if side.file { DataPath::SharedMemory } else { DataPath::CrossMemory };
    let deny = |why, tcp| SessionDenial { why, tcp };
    let paths = candidates(natural, rules).map_err(|why| deny(why, false))?;
    let mut failed = Vec::new();
    for path in paths {
        let tried = match path {
            DataPath::SharedMemory => map(side, file.as_ref()),
            DataPath::CrossMemory => attach(side, file.as_ref(), peer),
            DataPath::Tcp => return Err(deny(failed.join("; "), true)),
        };
        match tried {
            Ok(reach) => return Ok((path, reach)),
            Err(why) => failed.push(format!("{path}: {why}")),
        }
    }
    let mut why = failed.join("; ");
    if !rules.iter().all(|rules| rules.slower) {
        why.push_str("; a slower path is not taken without `slower = true` on both sides");
    }
    Err(deny(why, false))
}

fn map(side: &HostRegionInfo, file: Option<&OwnedFd>) -> Result<HostMemoryAccess, String> {
    let file = file.ok_or("no descriptor came along")?;
    let map = MemfdMapping::new(file, side.len, false)?;
    if !map.is_whole() {
        let len = side.len;
        return Err(format!("memory file of {len} bytes with holes: allocate all of them"));
    }
    Ok(HostMemoryAccess::Here { base: map.start() as u64, map: Some(Arc::new(map)) })
}

/// A peer offers its own memory, or that of a process that it shows to have access to.
fn attach(
    side: &HostRegionInfo,
    proof: Option<&OwnedFd>,
    peer: &LocalPeer,
) -> Result<HostMemoryAccess, String> {
    let own = rustix::process::geteuid().as_raw();
    if peer.uid != own {
        let uid = peer.uid;
        return Err(format!("the peer is of user {uid}, this plane of {own}: run both as one"));
    }
    let process = match side.process {
        None => peer.process.clone(),
        Some((pid, started)) => Arc::new(proven(pid, started, proof)?),
    };
    if side.len == 0 || side.base.checked_add(side.len).is_none() {
        return Err("a region that wraps".into());
    }
    sys::probe_process(process.pid, side.base, side.len).map_err(|why| {
        format!(
            "process {}: {why}; it needs the same user and ptrace access (CAP_SYS_PTRACE, \
             /proc/sys/kernel/yama/ptrace_scope)",
            process.pid
        )
    })?;
    Ok(HostMemoryAccess::There { process, base: side.base })
}

/// A process that is not the peer's own, but whose memory the peer may read: whoever opens that has
/// the kernel ask whether it may.
fn proven(pid: u32, started: u64, proof: Option<&OwnedFd>) -> Result<PidfdProcess, String> {
    let process = PidfdProcess::open(pid).map_err(|why| format!("process {pid}: {why}"))?;
    let proof = proof.ok_or_else(|| {
        format!(
            "process {pid} is not the peer's own, and no open /proc/{pid}/mem came along, which \
             shows that it may read it: install a version of kvferry there that sends one"
        )
    })?;
    let shown = sys::is_memory_of(proof.as_fd(), pid)
        .map_err(|why| format!("the proof for process {pid}: {why}"))?;
    if !shown {
        return Err(format!(
            "process {pid} is not the peer's own, and what came along is not its open \
             /proc/{pid}/mem of the same /proc as here"
        ));
    }
    if process.started != started || !process.is_alive() {
        return Err(format!("process {pid} is not the one that was registered"));
    }
    Ok(process)
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    fn rules(paths: &[DataPath], slower: bool) -> PathPolicy {
        PathPolicy { paths: paths.into(), slower }
    }

    #[test]
    fn a_slower_path_than_configured_is_taken_only_if_allowed() {
        use DataPath::{CrossMemory as Cma, SharedMemory as Shm, Tcp};
        let all = rules(&DataPath::ALL, false);
        assert_eq!(candidates(Shm, [&all, &all]), Ok(vec![Shm]));
        assert_eq!(candidates(Cma, [&all, &all]), Ok(vec![Cma]));
        let slower = rules(&DataPath::ALL, true);
        assert_eq!(candidates(Shm, [&slower, &slower]), Ok(vec![Shm, Cma, Tcp]));
        assert_eq!(candidates(Shm, [&slower, &all]), Ok(vec![Shm]));
        let only = rules(&[Cma], false);
        assert_eq!(candidates(Shm, [&only, &all]), Ok(vec![Cma]));
        assert!(candidates(Tcp, [&only, &all]).is_err());
        let gap = rules(&[Shm, Tcp], false);
        let error = candidates(Cma, [&gap, &all]).unwrap_err();
        assert!(error.contains("slower = true"), "{error}");
        assert_eq!(candidates(Tcp, [&gap, &all]), Ok(vec![Tcp]));
    }
}
