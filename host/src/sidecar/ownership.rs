//! Whose the folder and the socket between connector and host are. Who has them commands the
//! workers, so either side looks before it says anything.

use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Rights of the group and of others.
const OTHERS: u32 = 0o077;

/// Rights of the group and of others to put something in.
const OTHERS_WRITE: u32 = 0o022;

/// Others may put something in, and not take away what is not theirs.
const STICKY: u32 = 0o1000;

fn refuse(what: String) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, what)
}

fn is_mine(found: &Metadata) -> bool {
    found.uid() == geteuid().as_raw()
}

/// Makes the folder for the sockets of this user, `kvferry-UID`, unless it is there.
///
/// # Errors
/// It cannot be made, or what is there is not a folder of this user alone: its path, owner and
/// mode, and what to do.
pub fn prepare_socket_folder(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(why) if why.kind() != ErrorKind::AlreadyExists => {
            return Err(io::Error::new(why.kind(), format!("{}: {why}", folder.display())));
        }
        Ok(()) | Err(_) => {}
    }
    check_own_folder(folder)
}

/// # Errors
/// As [`prepare_socket_folder`], which makes the folder.
pub(crate) fn check_own_folder(folder: &Path) -> io::Result<()> {
    let shown = folder.display();
    let remedy = "remove it, or set XDG_RUNTIME_DIR to a folder that only this user can write, or \
        give \"socket\" in kv_connector_extra_config";
    let found = fs::symlink_metadata(folder)?;
    let (kind, own) = (found.file_type(), geteuid().as_raw());
    if !kind.is_dir() {
        let what = if kind.is_symlink() { "a link" } else { "no folder" };
        return Err(refuse(format!("{shown} is {what} of user {}: {remedy}", found.uid())));
    }
    if !is_mine(&found) || found.mode() & OTHERS > 0 {
        let (owner, mode) = (found.uid(), found.mode() & 0o7777);
        return Err(refuse(format!(
            "{shown} belongs to user {owner} with mode {mode:04o}, and has to belong to {own} with \
             0700: who can write there takes the place of the host; {remedy}"
        )));
    }
    Ok(())
}

/// Name of the folder for the sockets of a user.
pub(crate) fn folder_name(user: u32) -> String {
    format!("kvferry-{user}")
}

/// Longest path of a Unix socket in bytes: 108 with the zero at its end.
pub(crate) const PATH_MAX: usize = 107;

/// Tries whether a host of this user could listen at a path, and leaves nothing behind.
///
/// # Errors
/// The path, why not, and what to do.
pub fn try_socket(socket: &Path) -> Result<(), String> {
    let (shown, bytes) = (socket.display(), socket.as_os_str().len());
    if bytes > PATH_MAX {
        return Err(format!(
            "socket {shown}: its path has {bytes} bytes, and that of a socket can have {PATH_MAX}: give a \
             shorter one"
        ));
    }
    check_folder_of(socket).map_err(|why| format!("socket {shown}: {why}"))?;
    let tried = socket.with_file_name(format!(".kvferry-try-{}", std::process::id()));
    let made = File::options().write(true).create_new(true).open(&tried);
    made.and_then(|_| fs::remove_file(&tried)).map_err(|why| {
        format!(
            "socket {shown}: nothing can be made in its folder by user {}: {why}; give that user the \
             right to write there, or \"socket\" in kv_connector_extra_config, or set XDG_RUNTIME_DIR",
            geteuid().as_raw()
        )
    })
}

/// Checks the folder of a socket that a host is to listen at: only this user, or root, may take
/// away what is in it.
///
/// # Errors
/// Its path, owner and mode, and what to do.
pub(crate) fn check_folder_of(socket: &Path) -> io::Result<()> {
    let folder = match socket.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let found = fs::metadata(folder).map_err(|why| {
        let what = format!("its folder {}: {why}; make it, or give another path", folder.display());
        io::Error::new(why.kind(), what)
    })?;
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    let is_open = mode & OTHERS_WRITE > 0 && mode & STICKY == 0;
    if is_open || !is_mine(&found) && owner != 0 {
        let shown = folder.display();
        return Err(refuse(format!(
            "its folder {shown} belongs to user {owner} with mode {mode:04o}, so others can put a \
             socket of theirs in its place; chmod go-w {shown}, or give another path"
        )));
    }
    Ok(())
}

/// Checks a file of a host that may have been there before it.
///
/// # Errors
/// Its path and owner, and what to do.
pub(crate) fn check_owner(path: &Path, found: &Metadata) -> io::Result<()> {
    if is_mine(found) {
        return Ok(());
    }
    let (owner, own) = (found.uid(), geteuid().as_raw());
    Err(refuse(format!("{} belongs to user {owner} and not to {own}; remove it", path.display())))
}

/// Connects to the socket of a host of this user.
///
/// # Errors
/// Nobody listens there; or the socket, or who listens, is another user's (`PermissionDenied`).
pub(super) fn connect(path: &Path) -> io::Result<UnixStream> {
    let found = fs::symlink_metadata(path)?;
    if !found.file_type().is_socket() {
        return Err(refuse(format!("{} is there and is no socket; remove it", path.display())));
    }
    check_owner(path, &found)?;
    let stream = UnixStream::connect(path)?;
    check_peer(&stream).map_err(|why| refuse(format!("{}: {why}", path.display())))?;
    Ok(stream)
}

/// Who runs this process is spoken with, and nobody else.
///
/// # Errors
/// Who is on the other side.
pub(super) fn check_peer(stream: impl AsFd) -> io::Result<()> {
    let (peer, own) = (socket_peercred(stream)?.uid.as_raw(), geteuid().as_raw());
    if peer == own {
        return Ok(());
    }
    Err(refuse(format!("the other side is a process of user {peer} and not of {own}")))
}
