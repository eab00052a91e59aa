//! Shims that this machine's own compiler has made, one for each MoRI, kept for the next process.

use kvferry_mori_build::{
    MoriInstallation, MoriSearchError, SHIM_FILE, compile, search, sources_digest,
};
use rustix::fs::{FlockOperation, flock};
use rustix::io::retry_on_intr;
use rustix::process::geteuid;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The variable that names the folder.
const VARIABLE: &str = "KVFERRY_CACHE";

/// Of a folder: whoever runs kvferry may use what is in it, and only its owner changes it.
const MODE: u32 = 0o755;

/// Rights of the group and of others to change something.
const OTHERS_WRITE: u32 = 0o022;

/// The same of others alone.
const STRANGERS_WRITE: u32 = 0o002;

/// Others may put something in, and not take away what is not theirs.
const STICKY: u32 = 0o1000;

/// What is said of a folder that will not do.
const ELSEWHERE: &str = "name another folder by KVFERRY_CACHE, or a shim by KVFERRY_MORI_SHIM";

/// A shim for the MoRI that is installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompiledShim {
    pub path: PathBuf,
    /// What it is for, and by which rule that was found.
    pub mori: MoriInstallation,
    /// How long the compiler took, unless it was there.
    pub took: Option<Duration>,
}

/// The folder of these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShimCache {
    folder: PathBuf,
}

impl ShimCache {
    /// `shim` in the folder that `KVFERRY_CACHE` names, else in `kvferry` of `XDG_CACHE_HOME` or of
    /// `.cache` of `HOME`. `env` is asked for variables; empty ones count as unset.
    ///
    /// # Errors
    /// None of them is set, or not to an absolute path.
    pub fn of(env: &dyn Fn(&str) -> Option<OsString>) -> Result<ShimCache, String> {
        let set = |name: &str| env(name).filter(|value| !value.is_empty());
        let places = [(VARIABLE, ""), ("XDG_CACHE_HOME", "kvferry"), ("HOME", ".cache/kvferry")];
        let mut places = places.iter().filter_map(|(name, below)| Some((name, set(name)?, below)));
        let Some((name, value, below)) = places.next() else {
            return Err(format!(
                "there is no folder to compile a shim into, as HOME is not set; {ELSEWHERE}"
            ));
        };
        let at = Path::new(&value);
        if !at.is_absolute() {
            return Err(format!("{name} = {}: it has to be an absolute path", at.display()));
        }
        Ok(ShimCache { folder: at.join(below).join("shim") })
    }

    /// The shim for this MoRI, which is compiled unless it is there.
    ///
    /// # Errors
    /// What the compiler said, a folder that cannot be written to, or one that others can.
    pub fn shim(&self, mori: &MoriInstallation) -> Result<CompiledShim, String> {
        self.get(mori, false)
    }

    /// The same, compiled anew.
    ///
    /// # Errors
    /// As [`ShimCache::shim`].
    pub fn compile(&self, mori: &MoriInstallation) -> Result<CompiledShim, String> {
        self.get(mori, true)
    }

    fn get(&self, mori: &MoriInstallation, anew: bool) -> Result<CompiledShim, String> {
        let found = |path, took| CompiledShim { path, mori: mori.clone(), took };
        let key = format!("{}-{}", mori.identity.replace(':', "-"), sources_digest(mori));
        let folder = self.folder.join(&key);
        if !anew && let Some(path) = kept(&folder)? {
            return Ok(found(path, None));
        }
        make(&folder)?;
        check_folders(&folder)?;
        // Ranks start at once; those that wait here take what the first one has compiled.
        let _lock = lock(&folder.join("lock"))?;
        if !anew && let Some(path) = kept(&folder)? {
            return Ok(found(path, None));
        }
        tracing::info!(folder = %folder.display(), "compiling the shim for {mori}");
        let begun = Instant::now();
        let path = compile_into(&folder, mori)?;
        let took = begun.elapsed();
        tracing::info!(shim = %path.display(), ?took, "compiled the shim for MoRI");
        Ok(found(path, Some(took)))
    }
}

/// The MoRI that the process finds by its variables and its Python; it is not loaded.
///
/// # Errors
/// Where it was looked for, or why the one that was found will not do.
pub fn installed() -> Result<MoriInstallation, MoriSearchError> {
    search(&|name| std::env::var_os(name))
}

/// The shim of the process, for the MoRI that it finds; `anew` whether or not there is one.
pub(crate) fn of_process(anew: bool) -> Result<CompiledShim, String> {
    let mori = installed().map_err(|why| why.to_string())?;
    let cache = ShimCache::of(&|name| std::env::var_os(name))?;
    if anew { cache.compile(&mori) } else { cache.shim(&mori) }
}

fn cannot(what: &str, path: &Path, why: &io::Error) -> String {
    format!("{}: cannot {what}: {why}; {ELSEWHERE}", path.display())
}

fn make(folder: &Path) -> Result<(), String> {
    let made = DirBuilder::new().recursive(true).mode(MODE).create(folder);
    made.map_err(|why| cannot("make the folder for a compiled shim", folder, &why))
}

/// The shim in a folder, if both can be trusted.
fn kept(folder: &Path) -> Result<Option<PathBuf>, String> {
    let path = folder.join(SHIM_FILE);
    match fs::symlink_metadata(&path) {
        Ok(found) => {
            check_folders(folder)?;
            check(&path, &found, found.mode() & OTHERS_WRITE > 0)?;
            Ok(Some(path))
        }
        Err(why) if why.kind() == ErrorKind::NotFound => Ok(None),
        Err(why) => Err(cannot("look at it", &path, &why)),
    }
}

/// Checks who can change what is loaded: only this user and root, and the groups of the folders above
/// the two that are kvferry's, whoever opened these to them.
fn check_folders(folder: &Path) -> Result<(), String> {
    let real = folder.canonicalize().map_err(|why| cannot("look at it", folder, &why))?;
    for (depth, part) in real.ancestors().enumerate() {
        let found = fs::metadata(part).map_err(|why| cannot("look at it", part, &why))?;
        let is_above = depth > 1;
        let is_open = match found.mode() & (STICKY | STRANGERS_WRITE) {
            _ if !is_above => found.mode() & OTHERS_WRITE > 0,
            rights => rights == STRANGERS_WRITE,
        };
        check(part, &found, is_open)?;
    }
    Ok(())
}

fn check(path: &Path, found: &Metadata, is_open: bool) -> Result<(), String> {
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    let own = geteuid().as_raw();
    if found.file_type().is_symlink() || is_open || owner != own && owner != 0 {
        return Err(format!(
            "{} belongs to user {owner} with mode {mode:04o}, so others than user {own} and root can \
             have another shim loaded; chmod go-w it, or {ELSEWHERE}",
            path.display()
        ));
    }
    Ok(())
}

/// Until it is dropped nobody else has it.
fn lock(path: &Path) -> Result<File, String> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o644).open(path);
    let locked = file.and_then(|file| {
        retry_on_intr(|| flock(&file, FlockOperation::LockExclusive))?;
        Ok(file)
    });
    locked.map_err(|why| cannot("lock it to compile a shim", path, &why))
}

/// Compiles beside the place of the shim, which is there as a whole or not at all.
fn compile_into(folder: &Path, mori: &MoriInstallation) -> Result<PathBuf, String> {
    let (work, path) = (folder.join("work"), folder.join(SHIM_FILE));
    // Of a process that was ended while it compiled.
    match fs::remove_dir_all(&work) {
        Err(why) if why.kind() != ErrorKind::NotFound => {
            return Err(cannot("remove it", &work, &why));
        }
        _ => make(&work)?,
    }
    let compiled = compile(mori, &work, &[]).map_err(|why| why.to_string()).and_then(|library| {
        let whole = fs::set_permissions(&library, Permissions::from_mode(MODE))
            .and_then(|()| File::open(&library)?.sync_all())
            .and_then(|()| fs::rename(&library, &path));
        whole.map_err(|why| cannot("put a compiled shim there", &path, &why))
    });
    let _left = fs::remove_dir_all(&work);
    compiled.map(|()| path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_named_by_the_first_variable() {
        let all = [(VARIABLE, "/c"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
        let of = |set: &[(&str, &str)]| {
            ShimCache::of(&|name| {
                set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into())
            })
        };
        for (first, folder) in
            [(0, "/c/shim"), (1, "/x/kvferry/shim"), (2, "/h/.cache/kvferry/shim")]
        {
            assert_eq!(of(&all[first..]).expect("it is set").folder, Path::new(folder));
        }
        for (set, says) in
            [(&[][..], "HOME is not set"), (&[("HOME", "h")], "HOME = h: it has to be")]
        {
            let why = of(set).expect_err("no folder");
            assert!(why.contains(says), "{why}");
        }
        assert_eq!(of(&[(VARIABLE, ""), ("HOME", "/h")]), of(&all[2..]));
    }

    #[test]
    fn folder_that_others_can_change_holds_no_shim() {
        let folder = std::env::temp_dir().join(format!("kvferry-shims-{}", std::process::id()));
        fs::create_dir_all(folder.join("shim")).expect("a folder");
        for (mode, is_open) in [(0o700, false), (0o755, false), (0o770, true), (0o777, true)] {
            fs::set_permissions(&folder, Permissions::from_mode(mode)).expect("its mode");
            let checked = check_folders(&folder.join("shim"));
            assert_eq!(checked.is_err(), is_open, "{mode:o}: {checked:?}");
        }
        fs::remove_dir_all(&folder).expect("it is this user's");
    }
}
