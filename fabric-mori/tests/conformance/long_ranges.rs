//! A range longer than a work request may be, which is 4 GiB less one byte, in regions of a few MiB
//! that are mapped again and again.

use crate::PORT;
use crate::common::world::MoriTestWorld;
use crate::common::{config, is_newest_stand_in};
use kvferry_engine::fabric::{Completion, Direction, Memory, OpId, OwnMemory, SessionId, Submit};
use kvferry_fabric_mori::{MoriBackend, MoriConfig};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::PoisonError;

/// Longest range of a work request, in bytes.
const RANGE_MAX: u64 = u32::MAX as u64;

/// Bytes of each of the two files that a region is made of.
const FILE: u64 = 2 << 20;

/// Offset of the second file in its region: 4 GiB.
const TAIL: u64 = RANGE_MAX + 1;

/// Bytes of a region.
const REGION_LEN: u64 = TAIL + FILE;

/// Offset of the source in its region.
const FROM: u64 = 3;

/// Offset of the destination in its region.
const TO: u64 = 4_101;

/// A region of 4 GiB and one file: the first file over and over, and at its end the second one.
struct RepeatedMemory {
    start: *mut c_void,
}

impl RepeatedMemory {
    fn new(byte: impl Fn(u64) -> u8) -> RepeatedMemory {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let all = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: New addresses.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), REGION_LEN as usize, access, all) };
        let memory = RepeatedMemory { start: start.expect("addresses of 4 GiB") };
        let [head, tail] = ["head", "tail"].map(file);
        for at in (0..=TAIL).step_by(FILE as usize) {
            let file = if at == TAIL { &tail } else { &head };
            let fixed = MapFlags::SHARED | MapFlags::FIXED;
            // SAFETY: In place of a part of the mapping above.
            unsafe {
                let part = memory.start.byte_add(at as usize);
                mmap(part, FILE as usize, access, fixed, file, 0).expect("a file is mapped");
            }
        }
        for at in (0..FILE).chain(TAIL..REGION_LEN) {
            // SAFETY: Inside the mapping, and not registered yet.
            unsafe { memory.start.byte_add(at as usize).cast::<u8>().write(byte(at)) };
        }
        memory
    }

    fn memory(&self) -> Memory {
        // SAFETY: Mapped until the planes are dropped, and looked at when nothing lands.
        Memory::Own(unsafe { OwnMemory::new(self.start as u64, REGION_LEN) })
    }

    fn byte(&self, at: u64) -> u8 {
        // SAFETY: Inside the mapping.
        unsafe { self.start.byte_add(at as usize).cast::<u8>().read_volatile() }
    }
}

impl Drop for RepeatedMemory {
    fn drop(&mut self) {
        // SAFETY: The mapping of `new`, which nothing refers to any more.
        unsafe { munmap(self.start, REGION_LEN as usize) }.expect("it was mapped");
    }
}

fn file(name: &str) -> OwnedFd {
    let file = memfd_create(name, MemfdFlags::CLOEXEC).expect("a memory file");
    ftruncate(&file, FILE).expect("a memory file of 2 MiB");
    file
}

/// Byte of the source at an offset.
fn sent(at: u64) -> u8 {
    (at % FILE).wrapping_mul(0x9e37_79b9).to_be_bytes()[4]
}

/// Byte of the destination before anything lands.
const UNTOUCHED: u8 = 0xa5;

#[test]
fn range_above_the_longest_of_a_work_request_is_cut() {
    if !is_newest_stand_in() {
        // It takes seconds, and the limit is the same.
        return;
    }
    let _alone = PORT.lock().unwrap_or_else(PoisonError::into_inner);
    let [source, destination] = [RepeatedMemory::new(sent), RepeatedMemory::new(|_| UNTOUCHED)];
    // A card's longest message is shorter: MoRI splits what it posts.
    let mut world = MoriTestWorld::new(2, |_| MoriConfig {
        chunking: true,
        chunk_bytes: 1 << 30,
        ..config(MoriBackend::Rdma)
    });
    world.register_memory(0, destination.memory());
    let desc = world.register_memory(1, source.memory());
    world.connect(0, 1);
    world.open(1, 0, 1, &desc).expect("the session opens");

    let (op, session, len) = (OpId(1), SessionId(1), RANGE_MAX + 1);
    let (direction, local, remote) = (Direction::Read, &[TO][..], &[FROM][..]);
    let batch = Submit { op, session, direction, local, remote, len: &[len] };
    world.data(0).submit(batch).expect("it is taken");
    assert_eq!(world.finish(op), Completion::Done);
    for at in (0..FILE).chain(TAIL..REGION_LEN) {
        let expected = if at < TO + len { sent(at + FILE - (TO - FROM)) } else { UNTOUCHED };
        assert_eq!(destination.byte(at), expected, "byte {at}");
    }
}
