//! The local socket between the connector and its host.

use super::Check;
use crate::sidecar::ownership::{
    PATH_MAX, check_folder_of, check_own_folder, check_owner, folder_name,
};
use std::env;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

const SOCKET: &str = "socket";

/// Bytes of `/UUID_dpNNN.sock`, which the connector puts into its folder.
const NAME_MAX: usize = 48;

/// Where a socket is to be.
#[derive(Clone, Debug)]
pub(super) enum SocketLocation {
    Given(PathBuf),
    /// The folder in which the connector makes one for each user.
    Shared {
        folder: PathBuf,
        user: u32,
    },
}

impl SocketLocation {
    /// As the connector chooses it.
    pub(super) fn new(given: Option<&Path>) -> SocketLocation {
        if let Some(path) = given {
            return SocketLocation::Given(path.into());
        }
        let named = env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
        let folder = named.map_or_else(env::temp_dir, PathBuf::from);
        SocketLocation::Shared { folder, user: rustix::process::getuid().as_raw() }
    }
}

/// Whether a host can listen there.
pub(super) fn socket(place: &SocketLocation) -> Check {
    match place {
        SocketLocation::Given(path) => given(path),
        SocketLocation::Shared { folder, user } => shared(folder, *user),
    }
}

fn is_short(path: &Path, more: usize) -> bool {
    path.as_os_str().len() + more <= PATH_MAX
}

fn too_long(path: &Path, bytes: usize, remedy: &str) -> Check {
    let path = path.display();
    let found =
        format!("{path}: a socket there has a path of {bytes} bytes, and {PATH_MAX} can be");
    Check::fail(SOCKET, found, remedy)
}

/// Listens once, and leaves nothing behind.
fn bound(path: &Path) -> std::io::Result<()> {
    UnixListener::bind(path)?;
    fs::remove_file(path)
}

fn given(path: &Path) -> Check {
    let (shown, len) = (path.display(), path.as_os_str().len());
    if !is_short(path, 0) {
        return too_long(path, len, "give a shorter path");
    }
    let folder = check_folder_of(path);
    if let Err(why) = folder
        && why.kind() == ErrorKind::PermissionDenied
    {
        return Check::fail(SOCKET, format!("{shown}: {why}"), "as it says");
    }
    if let Ok(found) = fs::symlink_metadata(path) {
        if let Err(why) = check_owner(path, &found) {
            return Check::fail(SOCKET, why.to_string(), "as it says");
        }
        if !found.file_type().is_socket() {
            let found = format!("{shown} is there and is no socket");
            return Check::fail(SOCKET, found, "remove it, or give another path");
        }
        return Check::ok(
            SOCKET,
            match UnixStream::connect(path) {
                Ok(_) => format!("{shown}: somebody listens there already"),
                Err(_) => {
                    format!("{shown} is left from a host that has ended; the next one takes it")
                }
            },
        );
    }
    match bound(path) {
        Ok(()) => Check::ok(SOCKET, format!("{shown} can be listened at")),
        Err(why) => {
            let found = format!("{shown}: cannot listen there: {why}");
            Check::fail(SOCKET, found, "give a path in a folder that the servers' user can write")
        }
    }
}

fn shared(folder: &Path, user: u32) -> Check {
    const OTHER: &str = "set XDG_RUNTIME_DIR to a folder that the servers' user can write, or give \
        \"socket\" in kv_connector_extra_config";
    let own = folder.join(folder_name(user));
    if !is_short(&own, NAME_MAX) {
        return too_long(&own, own.as_os_str().len() + NAME_MAX, OTHER);
    }
    let inside = match check_own_folder(&own) {
        Ok(()) => &*own,
        Err(why) if why.kind() == ErrorKind::NotFound => folder,
        Err(why) => return Check::fail(SOCKET, why.to_string(), OTHER),
    };
    match bound(&inside.join(format!("doctor-{}.sock", std::process::id()))) {
        Ok(()) => Check::ok(SOCKET, format!("sockets can be made in {}", inside.display())),
        Err(why) => Check::fail(
            SOCKET,
            format!("{}: no socket can be made: {why}", inside.display()),
            OTHER,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::CheckStatus;
    use super::super::tests::TempTree;
    use super::*;
    use crate::sidecar::prepare_socket_folder;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_path_is_free_taken_left_or_unusable() {
        let tree = TempTree::new("given", &[("file", "")]);
        let status = |path: &Path| given(path).status;
        let path = tree.0.join("host.sock");
        assert!(given(&path).found.contains("can be listened at"));
        let listener = UnixListener::bind(&path).expect("it is free again");
        assert!(given(&path).found.contains("somebody listens"));
        drop(listener);
        assert!(given(&path).found.contains("left from a host"));
        assert_eq!(status(&tree.0.join("file")), CheckStatus::Fail);
        assert_eq!(status(&tree.0.join("none/host.sock")), CheckStatus::Fail);
        let long = given(&tree.0.join("x".repeat(PATH_MAX)));
        assert!(long.found.contains("107 can be") && long.remedy.is_some(), "{long:?}");
    }

    #[test]
    fn the_folder_has_to_be_writable_short_and_of_this_user() {
        let tree = TempTree::new("shared", &[("file", "")]);
        let user = rustix::process::getuid().as_raw();
        assert_eq!(shared(&tree.0, user).status, CheckStatus::Ok);
        let own = tree.0.join(format!("kvferry-{user}"));
        prepare_socket_folder(&own).expect("a folder");
        let inside = shared(&tree.0, user);
        assert!(inside.found.ends_with(&format!("kvferry-{user}")), "{inside:?}");
        fs::set_permissions(&own, Permissions::from_mode(0o777)).expect("it is ours");
        assert!(shared(&tree.0, user).found.contains("with mode 0777"));
        assert_eq!(shared(&tree.0.join("none"), user).status, CheckStatus::Fail);
        let long = shared(&tree.0.join("x".repeat(60)), user);
        assert!(long.remedy.is_some_and(|text| text.contains("XDG_RUNTIME_DIR")));
        assert!(long.found.contains("107 can be"), "{}", long.found);
    }
}
