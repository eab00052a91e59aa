//! Loading the shim.

use crate::abi::{Functions, Info, Kind, MORI_ABI, Text};
use crate::search_path::{ShimLoadFailure, ShimOrigin, ShimSearchPath, ShimUnavailable};
use crate::shim_cache::{self, CompiledShim};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Layouts of descriptors that there are rules for.
const LAYOUTS: [u32; 2] = [9, 15];

/// A loaded shim, and with it MoRI and HIP. Neither is unloaded again: MoRI leaves threads behind.
#[derive(Debug)]
pub struct Shim {
    pub functions: Functions,
    /// What it was compiled for.
    pub info: ShimInfo,
    pub path: PathBuf,
    /// What led to it.
    pub origin: ShimOrigin,
}

/// What a shim was compiled for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShimInfo {
    /// Fields of a packed `MemoryDesc`: 9 or 15.
    pub layout: u32,
    /// Sizes of `EngineDesc`, `MemoryDesc`, `TransferStatus`, `RdmaBackendConfig` and `IOEngine`.
    pub sizes: [u32; 5],
    /// Identity of `libmori_io.so`: `build-id:` or `sha256:` and hexadecimal digits.
    pub compiled_for: String,
    /// Its path at compile time.
    pub compiled_at: String,
}

impl Shim {
    /// Loads the first shim that is usable. If there is none, the one for the MoRI that is installed
    /// is taken from the user's cache, or compiled into it.
    pub fn load(places: &ShimSearchPath) -> Result<Arc<Shim>, ShimUnavailable> {
        let mut tried = Vec::new();
        for (origin, path) in places.files() {
            match open(&path, origin) {
                Ok(shim) => return Ok(Arc::new(shim)),
                Err(why) => tried.push(ShimLoadFailure { path, why }),
            }
        }
        let mut not_compiled = None;
        if places.falls_through() {
            match shim_cache::of_process(false) {
                Ok(found) => {
                    let origin = found.took.map_or(ShimOrigin::Kept, ShimOrigin::Compiled);
                    match open(&found.path, origin) {
                        Ok(shim) => return Ok(Arc::new(shim)),
                        Err(why) => tried.push(ShimLoadFailure { path: found.path, why }),
                    }
                }
                Err(why) => not_compiled = Some(why),
            }
        }
        Err(ShimUnavailable { tried, not_compiled })
    }

    /// Compiles the shim for the MoRI that is installed into the user's cache, whether or not there
    /// is one, and does not load it.
    ///
    /// # Errors
    /// There is no MoRI, what the compiler said, or a folder that cannot be written to.
    pub fn compile() -> Result<CompiledShim, String> {
        shim_cache::of_process(true)
    }
}

fn open(path: &Path, origin: ShimOrigin) -> Result<Shim, String> {
    // What dlopen says of a missing file names neither it nor what it is for.
    if !path.is_file() {
        return Err("not there".into());
    }
    // A path without a slash would be looked for in the system's folders.
    let path = path.canonicalize().map_err(|why| why.to_string())?;
    // SAFETY: The constructors that run are those of MoRI and HIP, which the operator asked for.
    let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) };
    let library = ManuallyDrop::new(libloading::Library::from(library.map_err(said)?));
    let info = info(&library)?;
    // SAFETY: The library is never unloaded, and it has said that this is its interface.
    let functions = unsafe { Functions::of(&library) }.map_err(said)?;
    check(&functions)?;
    Ok(Shim { functions, info, path, origin })
}

/// What the loader said, which the error itself does not tell.
fn said(error: libloading::Error) -> String {
    std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// With room for what a later interface may say.
#[repr(C)]
struct PaddedInfo {
    info: Info,
    room: [u64; 64],
}

fn info(library: &libloading::Library) -> Result<ShimInfo, String> {
    type InfoFn = unsafe extern "C" fn(*mut PaddedInfo) -> i32;
    // SAFETY: All versions have this function, whose answer starts with the version.
    let ask = unsafe { library.get::<InfoFn>(b"kf_mori_info\0") }.map_err(said)?;
    // SAFETY: Integers and pointers may be zero.
    let mut answer: PaddedInfo = unsafe { std::mem::zeroed() };
    // SAFETY: The pointer is valid for the call, and has room.
    let kind = unsafe { ask(&raw mut answer) };
    let info = answer.info;
    if kind != Kind::OK || info.abi != MORI_ABI {
        return Err(format!("it has interface {} and not {MORI_ABI}", info.abi));
    }
    if !LAYOUTS.contains(&info.layout) {
        return Err(format!("its MoRI packs {} fields, and not {LAYOUTS:?}", info.layout));
    }
    let sizes =
        [info.engine_desc, info.memory_desc, info.transfer_status, info.rdma_config, info.engine];
    let (compiled_for, compiled_at) = (text(info.compiled_for), text(info.compiled_at));
    Ok(ShimInfo { layout: info.layout, sizes, compiled_for, compiled_at })
}

fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: The shim's strings end with NUL and live as long as it.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned()
}

fn check(functions: &Functions) -> Result<(), String> {
    let mut bytes = [0u8; 4096];
    let mut error = Text { data: bytes.as_mut_ptr().cast(), room: bytes.len() };
    // SAFETY: Both are valid for the call.
    let kind = unsafe { (functions.kf_mori_check)(&raw mut error) };
    if kind == Kind::OK {
        return Ok(());
    }
    let said = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    Err(said.to_string_lossy().into_owned())
}
