//! What libibverbs tells of a port and the kernel's files do not.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW, Symbol};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;

/// The library that MoRI loads as well.
const LIBRARY: &str = "libibverbs.so.1";

/// `struct ibv_port_attr` as far as it is read, which is the same in all versions, and room for the
/// rest.
#[repr(C)]
struct PortAttributes {
    state: c_int,
    max_mtu: c_int,
    active_mtu: c_int,
    gid_table_len: c_int,
    capabilities: u32,
    max_msg_sz: u32,
    rest: [u64; 32],
}

type Device = *mut c_void;
type GetDevices = unsafe extern "C" fn(*mut c_int) -> *mut Device;
type FreeDevices = unsafe extern "C" fn(*mut Device);
type DeviceName = unsafe extern "C" fn(Device) -> *const c_char;
type Open = unsafe extern "C" fn(Device) -> *mut c_void;
type Close = unsafe extern "C" fn(*mut c_void) -> c_int;
type QueryPort = unsafe extern "C" fn(*mut c_void, u8, *mut PortAttributes) -> c_int;

struct Verbs {
    devices: Symbol<GetDevices>,
    free: Symbol<FreeDevices>,
    name: Symbol<DeviceName>,
    open: Symbol<Open>,
    close: Symbol<Close>,
    query: Symbol<QueryPort>,
}

impl Verbs {
    /// The functions of a library, which stays loaded: providers of cards leave threads behind.
    fn load(path: &str) -> Option<Verbs> {
        // SAFETY: The constructors that run are those of libibverbs, which MoRI would run.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = ManuallyDrop::new(library.ok()?);
        // SAFETY: As infiniband/verbs.h declares them.
        unsafe {
            Some(Verbs {
                devices: library.get(b"ibv_get_device_list\0").ok()?,
                free: library.get(b"ibv_free_device_list\0").ok()?,
                name: library.get(b"ibv_get_device_name\0").ok()?,
                open: library.get(b"ibv_open_device\0").ok()?,
                close: library.get(b"ibv_close_device\0").ok()?,
                query: library.get(b"ibv_query_port\0").ok()?,
            })
        }
    }

    fn message_max(&self, device: &str, port: u8) -> Option<u32> {
        let mut count = 0;
        // SAFETY: A place for the count; null, or as many devices, which live until they are freed.
        let list = unsafe { (self.devices)(&raw mut count) };
        if list.is_null() {
            return None;
        }
        // SAFETY: The library has put so many devices there.
        let devices =
            unsafe { std::slice::from_raw_parts(list, usize::try_from(count).unwrap_or(0)) };
        let is_it = |it: &&Device| {
            // SAFETY: The name of a device is a text that ends with NUL.
            let name = unsafe { CStr::from_ptr((self.name)(**it)) };
            name.to_bytes() == device.as_bytes()
        };
        // SAFETY: The device is one of the list.
        let context =
            devices.iter().find(is_it).map_or(ptr::null_mut(), |it| unsafe { (self.open)(*it) });
        let mut found = None;
        if !context.is_null() {
            // SAFETY: Numbers, for which all bits are values.
            let mut attributes: PortAttributes = unsafe { std::mem::zeroed() };
            // SAFETY: The context is open, and there is more room than any version writes.
            let failed = unsafe { (self.query)(context, port, &raw mut attributes) };
            found = (failed == 0).then_some(attributes.max_msg_sz);
            // SAFETY: It is open, and not used any more.
            unsafe { (self.close)(context) };
        }
        // SAFETY: The list, once.
        unsafe { (self.free)(list) };
        found
    }
}

/// Bytes of the longest message that a port of a device sends (`max_msg_sz`); none if libibverbs
/// does not tell.
#[must_use]
pub fn message_max(device: &str, port: u8) -> Option<u32> {
    Verbs::load(LIBRARY)?.message_max(device, port)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// One device of one port, as software RDMA has it.
    const STUB: &str = "
#include <stdlib.h>
#include <string.h>
static void *list[2] = {\"rxe0\", 0};
void **ibv_get_device_list(int *count) { *count = 1; return list; }
void ibv_free_device_list(void **devices) { if (devices != list) abort(); }
const char *ibv_get_device_name(void *device) { return device; }
static int open;
void *ibv_open_device(void *device) { open++; return device == list[0] ? &open : 0; }
int ibv_close_device(void *context) { return context == &open && --open == 0 ? 0 : (abort(), 1); }
int ibv_query_port(void *context, unsigned char port, unsigned *attributes) {
  if (context != &open || port != 1) return 22;
  memset(attributes, 0, 52);
  attributes[5] = 8u << 20;
  return 0;
}
";

    #[test]
    fn the_longest_message_is_that_of_the_port() {
        let folder = std::env::temp_dir().join(format!("kvferry-verbs-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let (source, library) = (folder.join("stub.c"), folder.join("libibverbs.so.1"));
        std::fs::write(&source, STUB).expect("a source");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
        assert!(compiler.status().expect("a compiler").success());
        let verbs = Verbs::load(library.to_str().expect("UTF-8")).expect("it loads");
        assert_eq!(verbs.message_max("rxe0", 1), Some(8 << 20));
        assert_eq!(verbs.message_max("rxe0", 2), None);
        assert_eq!(verbs.message_max("mlx5_0", 1), None);
        let _gone = std::fs::remove_dir_all(&folder);
        assert!(Verbs::load("/nonexistent/libibverbs.so.1").is_none());
    }
}
