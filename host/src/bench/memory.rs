//! The memory of a side, and bytes in it that can be told from others.

use super::args::BenchPlan;
use crate::instance::PlaneConfig;
use kvferry_engine::fabric::{Memory, OwnMemory};
use kvferry_fabric_host::{HugePages, MemfdPool};
use kvferry_fabric_mori::{DeviceMemory, Shim, ShimSearchPath};
use kvferry_faults::decide::mix;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes that are looked at together.
const PIECE: u64 = 1 << 20;

/// What a side registers.
#[derive(Debug)]
pub(super) enum BenchMemory {
    Host {
        pool: MemfdPool,
        /// The same as a file, by which bytes are read while others write them.
        file: File,
        /// The memory of this process, by which bytes are written: the file takes none once a plane
        /// has it.
        writer: File,
        /// The plane takes it as memory of this process.
        is_own: bool,
        len: u64,
    },
    /// Of a GPU, which nobody looks at.
    Device(DeviceMemory),
}

impl BenchMemory {
    /// # Errors
    /// The memory cannot be had, and why.
    pub(super) fn new(plan: &BenchPlan) -> Result<BenchMemory, String> {
        let len = plan.memory;
        if let Some(device) = plan.device {
            let shim = Shim::load(&ShimSearchPath::of_process()).map_err(|why| why.to_string())?;
            let memory = DeviceMemory::new(&shim, device, len);
            let named = |why| format!("--device {device}, --memory {len}: {why}");
            return memory.map(BenchMemory::Device).map_err(named);
        }
        let pool =
            MemfdPool::new(len, HugePages::No).map_err(|why| format!("--memory {len}: {why}"))?;
        let Memory::MemFd { fd, .. } = pool.memory() else { return Err("no memory file".into()) };
        let path = format!("/proc/self/fd/{fd}");
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.map_err(|why| format!("{path}, a memory file: {why}"))?;
        let path = "/proc/self/mem";
        let writer = OpenOptions::new().write(true).open(path);
        let writer = writer.map_err(|why| format!("{path}: {why}"))?;
        // MoRI takes memory of its own process only.
        let is_own = !matches!(plan.plane, PlaneConfig::Host(_));
        Ok(BenchMemory::Host { pool, file, writer, is_own, len })
    }

    /// # Safety
    /// This lives until the plane is dropped that it is registered with.
    pub(super) unsafe fn memory(&self) -> Memory {
        match self {
            BenchMemory::Host { pool, is_own: true, len, .. } => {
                // SAFETY: The pool is mapped as long as this lives, which the caller promises, and
                // its bytes are looked at by its file alone.
                Memory::Own(unsafe { OwnMemory::new(pool.start() as u64, *len) })
            }
            BenchMemory::Host { pool, .. } => pool.memory(),
            // SAFETY: The same promise is what it asks for.
            BenchMemory::Device(memory) => unsafe { memory.memory() },
        }
    }

    /// True if its bytes can be filled and compared.
    pub(super) fn is_of_host(&self) -> bool {
        matches!(self, BenchMemory::Host { .. })
    }

    fn file(&self) -> io::Result<&File> {
        match self {
            BenchMemory::Host { file, .. } => Ok(file),
            BenchMemory::Device(_) => Err(io::Error::other("memory of a GPU is not looked at")),
        }
    }

    /// Fills ranges of `len` bytes, each with the pattern of the place beside it.
    pub(super) fn fill(
        &self,
        ranges: impl Iterator<Item = (u64, u64)>,
        len: u64,
        seed: u64,
    ) -> io::Result<()> {
        let (writer, base) = match self {
            BenchMemory::Host { writer, pool, .. } => (writer, pool.start() as u64),
            BenchMemory::Device(_) => return self.file().map(|_| ()),
        };
        let mut bytes = vec![0; PIECE.min(len) as usize];
        for (at, place) in ranges {
            for done in (0..len).step_by(PIECE as usize) {
                let piece = &mut bytes[..PIECE.min(len - done) as usize];
                pattern(seed, place + done, piece);
                writer.write_all_at(piece, base + at + done)?;
            }
        }
        Ok(())
    }

    /// The first byte of the ranges that is not as [`fill`](Self::fill) would have it.
    pub(super) fn first_mismatch(
        &self,
        ranges: impl Iterator<Item = (u64, u64)>,
        len: u64,
        seed: u64,
    ) -> io::Result<Option<u64>> {
        let file = self.file()?;
        let mut expected = vec![0; PIECE.min(len) as usize];
        let mut found = expected.clone();
        for (at, place) in ranges {
            for done in (0..len).step_by(PIECE as usize) {
                let size = PIECE.min(len - done) as usize;
                let (expected, found) = (&mut expected[..size], &mut found[..size]);
                pattern(seed, place + done, expected);
                file.read_exact_at(found, at + done)?;
                let differs = expected.iter().zip(found.iter()).position(|(a, b)| a != b);
                if let Some(first) = differs {
                    return Ok(Some(at + done + first as u64));
                }
            }
        }
        Ok(None)
    }
}

/// The bytes that belong to a place onwards: each eight of them are a number of their own.
fn pattern(seed: u64, mut place: u64, out: &mut [u8]) {
    let mut rest = out;
    while !rest.is_empty() {
        let word = mix(seed, place / 8).to_le_bytes();
        let part = &word[(place % 8) as usize..];
        let count = part.len().min(rest.len());
        let (now, later) = rest.split_at_mut(count);
        now.copy_from_slice(&part[..count]);
        place += count as u64;
        rest = later;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_fabric_host::HostConfig;
    use std::time::Duration;

    #[test]
    fn any_byte_that_differs_is_found() {
        let plane = PlaneConfig::Host(HostConfig::default());
        let plan = BenchPlan { plane, device: None, memory: 3 << 20, patience: Duration::ZERO };
        let bytes = BenchMemory::new(&plan).expect("memory");
        let len = PIECE + 13;
        let ranges = [(3, 77), (3 + len, 5)];
        bytes.fill(ranges.into_iter(), len, 9).expect("it is written");
        let wrong = |seed| bytes.first_mismatch(ranges.into_iter(), len, seed).expect("it is read");
        assert_eq!((wrong(9), wrong(10)), (None, Some(3)));
        let BenchMemory::Host { pool, file, .. } = &bytes else { panic!("memory of the host") };
        for at in [3, 3 + PIECE, 2 + len, 3 + len, 2 + 2 * len] {
            // SAFETY: Inside the pool, and nobody else looks.
            let byte = unsafe { pool.start().add(at as usize).read() };
            file.write_all_at(&[!byte], at).expect("it is written");
            assert_eq!(wrong(9), Some(at));
            file.write_all_at(&[byte], at).expect("it is written");
        }
        assert_eq!(wrong(9), None);
    }
}
