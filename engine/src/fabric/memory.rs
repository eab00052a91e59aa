//! Memory that a plane is given.

use serde::{Deserialize, Serialize};

/// Addresses of this process, of its host memory or of a GPU's.
///
/// Any number can be said to be an address, and comes as one in a message. Planes that follow
/// addresses take those alone that somebody has vouched for, by an `unsafe` function, and refuse
/// the others. What is read from bytes is not vouched for, whoever wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OwnMemory {
    base: u64,
    len: u64,
    #[serde(skip)]
    is_proven: bool,
}

impl OwnMemory {
    /// `len` bytes from the address `base` on, for planes.
    ///
    /// # Safety
    /// Of host memory, until every plane that it was registered with has deregistered it or is
    /// dropped:
    ///
    /// - it is mapped, for reading and writing. It need not be there: a plane finds that out, and
    ///   fails to register it;
    /// - planes and peers read and write it at any time. Nobody holds a reference to its bytes
    ///   while they can.
    ///
    /// Of a GPU's, it is allocated as long, by the runtime that the plane uses.
    pub const unsafe fn new(base: u64, len: u64) -> OwnMemory {
        OwnMemory { base, len, is_proven: true }
    }

    /// The same as a mere pair of numbers, for planes that follow no address, such as simulated
    /// ones, and for those of another process.
    pub const fn unproven(base: u64, len: u64) -> OwnMemory {
        OwnMemory { base, len, is_proven: false }
    }

    /// Address of the first byte.
    pub const fn base(&self) -> u64 {
        self.base
    }

    /// Length in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// True if there is no byte.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Memory that holds KV; sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Memory {
    /// Memory of this process.
    Own(OwnMemory),
    /// A sealed memory file that both sides can map.
    MemFd {
        /// File descriptor in this process.
        fd: i32,
        /// Length in bytes.
        len: u64,
    },
    /// Memory of another process on this host (cross-memory attach).
    OtherProcess {
        /// Its owner, as this process sees its number.
        pid: u32,
        /// First byte in the owner's address space.
        base: u64,
        /// Length in bytes.
        len: u64,
    },
    /// GPU memory.
    Device {
        /// Device pointers of HIP.
        #[serde(flatten)]
        range: OwnMemory,
        /// Ordinal of the device in HIP.
        device: u32,
    },
}

impl Memory {
    /// Length in bytes.
    pub const fn len(&self) -> u64 {
        match *self {
            Memory::Own(range) | Memory::Device { range, .. } => range.len,
            Memory::MemFd { len, .. } | Memory::OtherProcess { len, .. } => len,
        }
    }

    /// True if there is no byte.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Vouches for the addresses, if it is memory of this process.
    ///
    /// # Safety
    /// As for [`OwnMemory::new`].
    pub unsafe fn vouch(mut self) -> Memory {
        if let Memory::Own(range) | Memory::Device { range, .. } = &mut self {
            range.is_proven = true;
        }
        self
    }

    /// Why a plane that follows addresses cannot take it, if nobody has vouched for it.
    pub fn unproven(&self) -> Option<String> {
        match self {
            Memory::Own(range) | Memory::Device { range, .. } if !range.is_proven => Some(format!(
                "{} bytes at {:#x} for which nobody has vouched: make them by OwnMemory::new",
                range.len, range.base
            )),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_from_bytes_are_vouched_for_by_nobody() {
        // SAFETY: No plane gets it.
        let proven = unsafe { OwnMemory::new(4_096, 8) };
        for memory in [Memory::Own(proven), Memory::Device { range: proven, device: 1 }] {
            assert_eq!(memory.unproven(), None);
            let text = serde_json::to_string(&memory).expect("plain data");
            let read: Memory = serde_json::from_str(&text).expect("as it was written");
            let why = read.unproven().expect("nobody has vouched for it");
            assert!(why.contains("0x1000") && why.contains("8 bytes"), "{why}");
            // SAFETY: No plane gets it.
            assert_eq!(unsafe { read.vouch() }, memory);
        }
        assert!(Memory::Own(OwnMemory::unproven(4_096, 8)).unproven().is_some());
        for elsewhere in
            [Memory::MemFd { fd: 3, len: 8 }, Memory::OtherProcess { pid: 1, base: 4_096, len: 8 }]
        {
            assert_eq!((elsewhere.unproven(), elsewhere.len()), (None, 8));
        }
    }
}
