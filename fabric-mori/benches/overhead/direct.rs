//! The C++ program, which is compiled into the stand-in.

use crate::{Poster, RANGES, Ranges};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char, c_void};

type New = unsafe extern "C" fn(*mut u8, *mut u8, usize) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut c_void);
type Batch = unsafe extern "C" fn(*mut c_void, usize, *const u64, *const u64, *const u64);
type Post = unsafe extern "C" fn(*mut c_void);
type Faults = unsafe extern "C" fn(*const c_char) -> i32;
type Wait = unsafe extern "C" fn(*mut c_void) -> i32;

pub(crate) struct Direct {
    raw: *mut c_void,
    post: Post,
    wait: Wait,
    free: Free,
    faults: Faults,
    /// Stays until the engines are gone.
    _memory: [Vec<u8>; 2],
}

impl Direct {
    pub(crate) fn new(ranges: &Ranges) -> Direct {
        let path = format!("{}/libmori_io.so", mori_double::INSTALLS[1].lib);
        // SAFETY: Code of this project, with these types; it is never unloaded.
        unsafe {
            let library = Library::open(Some(path), RTLD_NOW | RTLD_LOCAL).expect("it loads");
            let symbol =
                |name: &[u8]| library.get::<*mut c_void>(name).expect("it is there").into_raw();
            let new: New = std::mem::transmute(symbol(b"mori_double_direct_new\0"));
            let batch: Batch = std::mem::transmute(symbol(b"mori_double_direct_batch\0"));
            let post: Post = std::mem::transmute(symbol(b"mori_double_direct_post\0"));
            let wait: Wait = std::mem::transmute(symbol(b"mori_double_direct_wait\0"));
            let free: Free = std::mem::transmute(symbol(b"mori_double_direct_free\0"));
            let faults: Faults = std::mem::transmute(symbol(b"mori_double_faults\0"));
            std::mem::forget(library);
            let bytes = ranges.len.iter().sum::<u64>() as usize;
            let mut memory = [vec![1; bytes], vec![0; bytes]];
            let [from, to] = &mut memory;
            let raw = new(from.as_mut_ptr(), to.as_mut_ptr(), bytes);
            let (local, remote) = (ranges.local.as_ptr(), ranges.remote.as_ptr());
            batch(raw, RANGES, local, remote, ranges.len.as_ptr());
            Direct { raw, post, wait, free, faults, _memory: memory }
        }
    }

    /// Has the stand-in's posts of this process end as told from here on.
    pub(crate) fn faults(&self, text: &CStr) {
        // SAFETY: A text that ends with a zero.
        assert_eq!(unsafe { (self.faults)(text.as_ptr()) }, 0, "{text:?} is known");
    }
}

impl Poster for Direct {
    fn post(&mut self) {
        // SAFETY: The engines live.
        unsafe { (self.post)(self.raw) }
    }

    fn wait(&mut self) {
        // SAFETY: The engines live.
        assert_eq!(unsafe { (self.wait)(self.raw) }, 1, "a transfer failed");
    }
}

impl Drop for Direct {
    fn drop(&mut self) {
        // SAFETY: Made by its counterpart, and not used after this.
        unsafe { (self.free)(self.raw) }
    }
}
