//! Sockets and locks of hosts that were killed, in the folder of this user's sockets.

use super::ownership;
use super::socket::hold;
use rustix::process::geteuid;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Names that are looked at. The next host looks at others.
const NAMES_MAX: usize = 4_096;

/// End of the name of a lock that lies beside a socket.
const LOCK: &str = ".sock.lock";

/// Removes what hosts left behind in the folder of `socket` if the connector made that folder: it
/// names a socket by its engine, so that nobody else comes to remove it. A lock that a process
/// holds stays, with its socket.
pub(super) fn remove(socket: &Path) {
    let Some(folder) = socket.parent() else { return };
    let own = ownership::folder_name(geteuid().as_raw());
    if folder.file_name().is_none_or(|name| *name != *own) {
        return;
    }
    let Ok(found) = fs::read_dir(folder) else { return };
    for entry in found.take(NAMES_MAX).flatten() {
        let name = entry.file_name();
        let Some(left) = name.to_str().and_then(|name| name.strip_suffix(".lock")) else {
            continue;
        };
        let at = folder.join(left);
        if at == socket || !name.as_encoded_bytes().ends_with(LOCK.as_bytes()) {
            continue;
        }
        // What cannot be locked is in use, or is not ours.
        let Ok(Some(_held)) = hold(&entry.path(), 1) else { continue };
        if fs::symlink_metadata(&at).is_ok_and(|found| found.file_type().is_socket()) {
            let _ = fs::remove_file(&at);
        }
        // The lock goes last: who waits for it finds that it is another one.
        let removed = fs::remove_file(entry.path());
        tracing::debug!(socket = %at.display(), ?removed, "removed what a host left behind");
    }
}

#[cfg(test)]
mod tests {
    use super::super::socket::listen;
    use super::*;
    use std::collections::BTreeSet;
    use std::os::unix::net::UnixListener;

    fn names(folder: &Path) -> BTreeSet<String> {
        let entries = fs::read_dir(folder).expect("a folder").flatten();
        entries.map(|entry| entry.file_name().into_string().expect("UTF-8")).collect()
    }

    /// As a host leaves it that is killed.
    fn leave(folder: &Path, name: &str) {
        drop(UnixListener::bind(folder.join(name)).expect("it is bound"));
        fs::write(folder.join(format!("{name}.lock")), "").expect("it is made");
    }

    #[tokio::test]
    async fn host_removes_what_killed_hosts_left_and_nothing_else() {
        let base = std::env::temp_dir().join(format!("left-{}", std::process::id()));
        let folder = base.join(ownership::folder_name(geteuid().as_raw()));
        fs::create_dir_all(&base).expect("it is made");
        super::super::prepare_socket_folder(&folder).expect("it is made");
        let lives = listen(&folder.join("lives.sock")).expect("it listens");
        leave(&folder, "dead.sock");
        fs::write(folder.join("lock-alone.sock.lock"), "").expect("it is made");
        leave(&folder, "of-others");
        let next = listen(&folder.join("next.sock")).expect("it listens");
        let with_lock = |name: &str| [name.to_owned(), format!("{name}.lock")];
        let kept = ["lives.sock", "next.sock", "of-others"].map(with_lock);
        assert_eq!(names(&folder), kept.into_iter().flatten().collect());
        drop((lives, next));
        assert_eq!(names(&folder), with_lock("of-others").into());
        // A folder of the operator has whatever it has.
        leave(&base, "dead.sock");
        drop(listen(&base.join("given.sock")).expect("it listens"));
        assert!(names(&base).contains("dead.sock.lock"));
        fs::remove_dir_all(&base).expect("it is there");
    }
}
