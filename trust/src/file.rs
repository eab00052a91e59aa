//! The file of a secret: who may read it, and that a changed one counts from the next proof on.

use crate::proof::FleetSecret;
use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, open, stat};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The variable of the environment that names the file.
pub const VARIABLE: &str = "KVFERRY_SECRET_FILE";

/// Longest file that is read, in bytes.
const FILE_MAX: u64 = 64 << 10;

/// Tells one content of the file from the next: it was replaced, written or touched.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileStamp {
    device: u64,
    inode: u64,
    changed: (i64, u64),
    len: i64,
}

impl FileStamp {
    fn of_path(path: &Path) -> Option<FileStamp> {
        let stat = stat(path).ok()?;
        Some(FileStamp {
            device: stat.st_dev,
            inode: stat.st_ino,
            changed: (stat.st_ctime, stat.st_ctime_nsec),
            len: stat.st_size,
        })
    }
}

struct SecretInUse {
    /// What of the file was looked at last, whether it was good or not; none if it was absent.
    seen: Option<FileStamp>,
    secret: Arc<FleetSecret>,
}

/// A secret that is read anew when its file is changed, so that it is rotated without a restart: the
/// new secret is added to the file of every process as the second line, then made the first, then
/// the old one is taken out.
pub struct SecretFile {
    path: PathBuf,
    in_use: Mutex<SecretInUse>,
}

impl std::fmt::Debug for SecretFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SecretFile").field("path", &self.path).finish_non_exhaustive()
    }
}

impl SecretFile {
    /// Reads a secret.
    ///
    /// # Errors
    /// A file that cannot be read, that others can read or change, or that has no secret in it;
    /// with its path and the remedy.
    pub fn open(path: &Path) -> Result<SecretFile, String> {
        // What changes from here on is read again.
        let seen = FileStamp::of_path(path);
        let in_use = SecretInUse { seen, secret: Arc::new(read(path)?) };
        Ok(SecretFile { path: path.into(), in_use: Mutex::new(in_use) })
    }

    /// The secret as the file has it now. One that cannot be used does not count: what it had before
    /// stays in use, and `warn` is told why, once for each content.
    pub fn secret(&self, warn: impl FnOnce(&str)) -> Arc<FleetSecret> {
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        let now = FileStamp::of_path(&self.path);
        if std::mem::replace(&mut in_use.seen, now) != now {
            match read(&self.path) {
                Ok(secret) => in_use.secret = Arc::new(secret),
                Err(why) => warn(&why),
            }
        }
        in_use.secret.clone()
    }

    /// The file that the environment names, if any.
    pub fn of_environment() -> Option<PathBuf> {
        std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from)
    }
}

fn read(path: &Path) -> Result<FleetSecret, String> {
    let wrong = |why: String| format!("secret file {}: {why}", path.display());
    // What is checked is what is read, whatever the path names by then. A FIFO is not waited for.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = open(path, flags, Mode::empty()).map_err(|why| {
        wrong(format!("it cannot be read: {why}; give the path of a file that this user can read"))
    })?;
    let stat = fstat(&file).map_err(|why| wrong(why.to_string()))?;
    check_access(&stat).map_err(wrong)?;
    let mut text = String::new();
    File::from(file)
        .take(FILE_MAX)
        .read_to_string(&mut text)
        .map_err(|why| wrong(format!("it cannot be read as text: {why}")))?;
    FleetSecret::parse(&text).map_err(wrong)
}

/// Whether nobody else knows or sets what is in a file. Its group may read it: so a pod gets what
/// Kubernetes mounts for a user that is not root.
fn check_access(stat: &Stat) -> Result<(), String> {
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err("it is no regular file; give the path of one".into());
    }
    let own = rustix::process::geteuid().as_raw();
    if stat.st_uid != own && stat.st_uid != 0 {
        return Err(format!(
            "it belongs to user {}, who could change it; give one of user {own} or of root",
            stat.st_uid
        ));
    }
    if stat.st_mode & 0o027 != 0 {
        return Err(format!(
            "others may read or change it (mode {:03o}); chmod 400 it, or 440 for its group",
            stat.st_mode & 0o777
        ));
    }
    Ok(())
}
