//! Values that are read from files, and read anew when a file was changed.

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, open, stat};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Longest file that is read, in bytes.
const FILE_MAX: u64 = 64 << 10;

/// Tells one content of a file from the next: it was replaced, written or touched.
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

struct LoadedFiles<T, const N: usize> {
    /// What of each file was looked at last, whether it was good or not; none if it was absent.
    seen: [Option<FileStamp>; N],
    value: Arc<T>,
}

/// A value that is read from `N` files, and read anew when one of them is changed, so that what they
/// have is replaced without a restart.
///
/// ```
/// use kvferry_trust::ReloadedFiles;
///
/// let path = std::env::temp_dir().join(format!("kvferry-reload-{}", std::process::id()));
/// std::fs::write(&path, "1").unwrap();
/// let read = |[path]: &[std::path::PathBuf; 1]| {
///     let text = std::fs::read_to_string(path).map_err(|why| why.to_string())?;
///     text.parse::<u32>().map_err(|why| why.to_string())
/// };
/// let number = ReloadedFiles::open([path.clone()], read).unwrap();
/// assert_eq!(*number.value(|why| panic!("{why}")), 1);
/// std::fs::write(&path, "bad").unwrap();
/// assert_eq!(*number.value(|_| {}), 1);
/// # std::fs::remove_file(&path).unwrap();
/// ```
pub struct ReloadedFiles<T, const N: usize> {
    paths: [PathBuf; N],
    read: fn(&[PathBuf; N]) -> Result<T, String>,
    in_use: Mutex<LoadedFiles<T, N>>,
}

impl<T, const N: usize> std::fmt::Debug for ReloadedFiles<T, N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReloadedFiles").field("paths", &self.paths).finish_non_exhaustive()
    }
}

impl<T, const N: usize> ReloadedFiles<T, N> {
    /// Reads the value.
    ///
    /// # Errors
    /// What `read` says.
    pub fn open(
        paths: [PathBuf; N],
        read: fn(&[PathBuf; N]) -> Result<T, String>,
    ) -> Result<ReloadedFiles<T, N>, String> {
        // What changes from here on is read again.
        let seen = std::array::from_fn(|at| FileStamp::of_path(&paths[at]));
        let in_use = Mutex::new(LoadedFiles { seen, value: Arc::new(read(&paths)?) });
        Ok(ReloadedFiles { paths, read, in_use })
    }

    /// The value as the files have it now. One that cannot be used does not count: the one before
    /// stays in use, and `warn` is told why, once for each content.
    pub fn value(&self, warn: impl FnOnce(&str)) -> Arc<T> {
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        let mut is_changed = false;
        for (path, seen) in self.paths.iter().zip(&mut in_use.seen) {
            let now = FileStamp::of_path(path);
            is_changed |= std::mem::replace(seen, now) != now;
        }
        if is_changed {
            match (self.read)(&self.paths) {
                Ok(value) => in_use.value = Arc::new(value),
                Err(why) => warn(&why),
            }
        }
        in_use.value.clone()
    }
}

/// The text of a file that nobody reads or changes but its owner, root, and, for reading, its group.
///
/// # Errors
/// A file that cannot be read, or that others can; with the remedy, and without the path.
pub fn read_private(path: &Path) -> Result<String, String> {
    // What is checked is what is read, whatever the path names by then. A FIFO is not waited for.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = open(path, flags, Mode::empty()).map_err(|why| {
        format!("it cannot be read: {why}; give the path of a file that this user can read")
    })?;
    let stat = fstat(&file).map_err(|why| why.to_string())?;
    check_access(&stat)?;
    let mut text = String::new();
    File::from(file)
        .take(FILE_MAX)
        .read_to_string(&mut text)
        .map_err(|why| format!("it cannot be read as text: {why}"))?;
    Ok(text)
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
