//! The C++ program, which is compiled into the stand-in.

use crate::{BenchRanges, Poster, RANGES};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char, c_void};

type DirectNewFn = unsafe extern "C" fn(*mut u8, *mut u8, usize) -> *mut c_void;
type DirectFreeFn = unsafe extern "C" fn(*mut c_void);
type DirectBatchFn = unsafe extern "C" fn(*mut c_void, usize, *const u64, *const u64, *const u64);
type DirectPostFn = unsafe extern "C" fn(*mut c_void);
type DirectFaultsFn = unsafe extern "C" fn(*const c_char) -> i32;
type DirectWaitFn = unsafe extern "C" fn(*mut c_void) -> i32;

pub(crate) struct DirectPoster {
    raw: *mut c_void,
    post: DirectPostFn,
    wait: DirectWaitFn,
    free: DirectFreeFn,
    faults: DirectFaultsFn,
    /// Stays until the engines are gone.
    _memory: [Vec<u8>; 2],
}

impl DirectPoster {
    pub(crate) fn new(ranges: &BenchRanges) -> DirectPoster {
        let path = format!("{}/libmori_io.so", mori_double::INSTALLS[1].lib);
        // SAFETY: Code of this project, with these types; it is never unloaded.
        unsafe {
            let library = Library::open(Some(path), RTLD_NOW | RTLD_LOCAL).expect("it loads");
            let symbol =
                |name: &[u8]| library.get::<*mut c_void>(name).expect("it is there").into_raw();
            let new: DirectNewFn = std::mem::transmute(symbol(b"mori_double_direct_new\0"));
            let batch: DirectBatchFn = std::mem::transmute(symbol(b"mori_double_direct_batch\0"));
            let post: DirectPostFn = std::mem::transmute(symbol(b"mori_double_direct_post\0"));
            let wait: DirectWaitFn = std::mem::transmute(symbol(b"mori_double_direct_wait\0"));
            let free: DirectFreeFn = std::mem::transmute(symbol(b"mori_double_direct_free\0"));
            let faults: DirectFaultsFn = std::mem::transmute(symbol(b"mori_double_faults\0"));
            std::mem::forget(library);
            let bytes = ranges.len.iter().sum::<u64>() as usize;
            let mut memory = [vec![1; bytes], vec![0; bytes]];
            let [from, to] = &mut memory;
            let raw = new(from.as_mut_ptr(), to.as_mut_ptr(), bytes);
            let (local, remote) = (ranges.local.as_ptr(), ranges.remote.as_ptr());
            batch(raw, RANGES, local, remote, ranges.len.as_ptr());
            DirectPoster { raw, post, wait, free, faults, _memory: memory }
        }
    }

    /// Has the stand-in's posts of this process end as told from here on.
    pub(crate) fn faults(&self, text: &CStr) {
        // SAFETY: A text that ends with a zero.
        assert_eq!(unsafe { (self.faults)(text.as_ptr()) }, 0, "{text:?} is known");
    }
}

impl Poster for DirectPoster {
    fn post(&mut self) {
        // SAFETY: The engines live.
        unsafe { (self.post)(self.raw) }
    }

    fn wait(&mut self) {
        // SAFETY: The engines live.
        assert_eq!(unsafe { (self.wait)(self.raw) }, 1, "a transfer failed");
    }
}

impl Drop for DirectPoster {
    fn drop(&mut self) {
        // SAFETY: Made by its counterpart, and not used after this.
        unsafe { (self.free)(self.raw) }
    }
}
