//! Which path a direction of a session takes.

use crate::config::Path;
use crate::memory::{Map, Process, Reach};
use crate::proto::{Denial, Rules, Side};
use crate::sys;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Paths to try, best first: those that both sides allow and that are not faster than the one that
/// memory and hosts call for. A slower one than that needs `slower`, unless nothing as fast is
/// configured.
///
/// # Errors
/// No path is left; says which setting would allow one.
pub(crate) fn candidates(natural: Path, rules: [&Rules; 2]) -> Result<Vec<Path>, String> {
    let both = |path: &Path| rules.iter().all(|rules| rules.paths.contains(path));
    let allowed: Vec<Path> = Path::ALL.into_iter().filter(both).collect();
    let slower = rules.iter().all(|rules| rules.slower);
    let mut left: Vec<Path> = allowed.iter().copied().filter(|path| *path >= natural).collect();
    let list = |paths: &[Path]| paths.iter().map(|p| p.name()).collect::<Vec<_>>().join(", ");
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

/// A source on this host, for who owns the destination; `peer` is the process of its plane.
///
/// # Errors
/// Why none of the paths can be had, and whether TCP is left.
pub(crate) fn reach(
    side: &Side,
    file: Option<OwnedFd>,
    peer: Option<&Arc<Process>>,
    rules: [&Rules; 2],
) -> Result<(Path, Reach), Denial> {
    let natural = if side.file { Path::SharedMemory } else { Path::CrossMemory };
    let deny = |why, tcp| Denial { why, tcp };
    let paths = candidates(natural, rules).map_err(|why| deny(why, false))?;
    let mut failed = Vec::new();
    for path in paths {
        let tried = match path {
            Path::SharedMemory => map(side, file.as_ref()),
            Path::CrossMemory => attach(side, peer),
            Path::Tcp => return Err(deny(failed.join("; "), true)),
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

fn map(side: &Side, file: Option<&OwnedFd>) -> Result<Reach, String> {
    let file = file.ok_or("no descriptor came along")?;
    let map = Map::new(file, side.len, false)?;
    Ok(Reach::Here { base: map.start() as u64, map: Some(Arc::new(map)) })
}

fn attach(side: &Side, peer: Option<&Arc<Process>>) -> Result<Reach, String> {
    let process = match side.process {
        None => peer.ok_or("the peer is in another pid namespace")?.clone(),
        Some((pid, started)) => {
            let process = Process::open(pid).map_err(|why| format!("process {pid}: {why}"))?;
            if process.started != started {
                return Err(format!("process {pid} is not the one that was registered"));
            }
            Arc::new(process)
        }
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
    Ok(Reach::There { process, base: side.base })
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    fn rules(paths: &[Path], slower: bool) -> Rules {
        Rules { paths: paths.into(), slower }
    }

    #[test]
    fn a_slower_path_than_configured_is_taken_only_if_allowed() {
        use Path::{CrossMemory as Cma, SharedMemory as Shm, Tcp};
        let all = rules(&Path::ALL, false);
        assert_eq!(candidates(Shm, [&all, &all]), Ok(vec![Shm]));
        assert_eq!(candidates(Cma, [&all, &all]), Ok(vec![Cma]));
        let slower = rules(&Path::ALL, true);
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
