//! Whether addresses that are said to be a GPU's are host memory.

use crate::error::CompatError;
use std::fmt;
use std::ops::Range;

/// Mappings of the process.
const MAPS: &str = "/proc/self/maps";

/// What has a path below /dev and is host memory all the same.
const HOST_DEVICES: [&str; 3] = ["/dev/shm/", "/dev/zero", "/dev/hugepages"];

/// Refuses addresses of which not every byte is host memory that this process may read and write:
/// drivers map the memory of a GPU from their devices, or only reserve its addresses.
///
/// # Errors
/// `Argument` with what is there in place of host memory, and what to do.
pub fn check_host_memory(base: u64, len: u64) -> Result<(), CompatError> {
    let about = |why: &dyn fmt::Display| {
        CompatError::Argument(format!(
            "{len} B at {base:#x} of a GPU: {why}; kvferry's mori moves host memory only: run the \
             server on the CPU, or take its folder off PYTHONPATH and install MoRI"
        ))
    };
    let end = base.checked_add(len).ok_or_else(|| about(&"no range of addresses"))?;
    let maps = std::fs::read_to_string(MAPS).map_err(|why| about(&format!("{MAPS}: {why}")))?;
    covered(&maps, base..end).map_err(|why| about(&why))
}

/// Whether mappings, in the form of the file, have all of a range as host memory.
fn covered(maps: &str, range: Range<u64>) -> Result<(), String> {
    let mut at = range.start;
    for line in maps.lines() {
        let mut fields = line.splitn(6, ' ');
        let Some((start, end)) = fields.next().and_then(|ends| ends.split_once('-')) else {
            continue;
        };
        let hex = |text| u64::from_str_radix(text, 16).unwrap_or(0);
        if at >= range.end || !(hex(start)..hex(end)).contains(&at) {
            continue;
        }
        let access = fields.next().unwrap_or("");
        let path = fields.nth(3).unwrap_or("").trim_start();
        if !access.starts_with("rw") {
            return Err(format!("{at:#x} is mapped {access}"));
        }
        let of_device = path.starts_with("/dev/")
            && !HOST_DEVICES.iter().any(|device| path.starts_with(device));
        if of_device || path.starts_with("/dmabuf:") || path.starts_with("anon_inode:") {
            return Err(format!("{at:#x} is mapped from {path}"));
        }
        at = hex(end);
    }
    match at < range.end {
        true => Err(format!("{at:#x} is not mapped")),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPPED: &str = "\
1000-3000 rw-p 00000000 00:00 0 \n\
3000-4000 rw-s 00000000 00:01 7                          /dev/zero (deleted)\n\
4000-5000 rw-s 00000000 00:05 9                          /dev/dri/renderD128\n\
6000-7000 ---p 00000000 00:00 0 \n\
7000-8000 rw-s 00000000 00:01 8                          /dmabuf:\n\
9000-a000 rw-s 00000000 00:01 8                          /memfd:kv (deleted)\n";

    #[test]
    fn what_a_driver_maps_is_no_host_memory() {
        let why = |range| covered(MAPPED, range).err().unwrap_or_default();
        assert_eq!(why(0x1010..0x4000), "");
        assert_eq!(why(0x9000..0xa000), "");
        assert_eq!(why(0x3000..0x4001), "0x4000 is mapped from /dev/dri/renderD128");
        assert_eq!(why(0x6800..0x6900), "0x6800 is mapped ---p");
        assert_eq!(why(0x7000..0x7001), "0x7000 is mapped from /dmabuf:");
        assert_eq!(why(0x9000..0xb000), "0xa000 is not mapped");
        assert_eq!(why(0x5000..0x5001), "0x5000 is not mapped");
    }

    #[test]
    fn an_array_here_is_host_memory() {
        let array = vec![0_u8; 1 << 20];
        let at = array.as_ptr() as u64;
        assert_eq!(check_host_memory(at, array.len() as u64), Ok(()));
        let why = check_host_memory(u64::MAX, 2).expect_err("no range").to_string();
        assert!(why.contains("install MoRI"), "{why}");
    }
}
