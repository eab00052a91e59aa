//! Memory files: what a peer can do with those that it is given, and by those that it gives.

use crate::common::patient;
use crate::forged::{
    AttackedPlane, ForgedMessage, ForgedRegion, all_paths, memory_file, own_memory,
};
use kvferry_engine::fabric::Memory;
use kvferry_fabric_host::{HugePages, MemfdPool};
use rustix::fs::{FallocateFlags, fallocate, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

const LEN: u64 = 64 << 10;

/// The file of the plane's region, as a peer gets it.
fn received(victim: &AttackedPlane) -> OwnedFd {
    let (socket, _segment) = victim.enter();
    let (answer, file) = victim.open(&socket, own_memory(&[1; 8]), None);
    let ForgedMessage::Opened { result: Ok((_, region, _)), .. } = answer else {
        panic!("{answer:?}")
    };
    assert!(region.file && all_paths().slower);
    file.expect("a descriptor")
}

/// Tries to change the bytes of a file by a descriptor.
fn assert_readable_only(file: &OwnedFd) {
    let map = |access| {
        // SAFETY: A new mapping, which is never used.
        unsafe { mmap(std::ptr::null_mut(), 4_096, access, MapFlags::SHARED, file, 0) }
    };
    assert!(map(ProtFlags::READ).is_ok());
    assert!(map(ProtFlags::READ | ProtFlags::WRITE).is_err(), "it can be mapped for writing");
    assert!(rustix::io::pwrite(file, &[0; 8], 0).is_err(), "it can be written");
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert!(fallocate(file, hole, 0, 4_096).is_err(), "a hole can be punched into it");
}

#[test]
fn the_file_of_a_region_goes_out_for_reading_only() {
    let pool = MemfdPool::new(LEN, HugePages::No).expect("a pool");
    let victim = AttackedPlane::new(patient(), pool.memory());
    let file = received(&victim);
    assert_readable_only(&file);
    // Nobody of another user can open it again for more.
    assert_eq!(fstat(&file).expect("a file").st_mode & 0o077, 0);
}

/// Whoever may open it again, as every process of this user may.
#[test]
fn the_file_of_a_pool_cannot_be_written_however_it_is_opened() {
    let pool = MemfdPool::new(LEN, HugePages::No).expect("a pool");
    let victim = AttackedPlane::new(patient(), pool.memory());
    let file = received(&victim);
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let opened = std::fs::OpenOptions::new().read(true).write(true).open(path).expect("opened");
    assert_readable_only(&opened.into());
    // The plane and its owner write to it.
    // SAFETY: Inside the pool.
    unsafe { pool.start().write_volatile(9) };
    let mut byte = [0];
    rustix::io::pread(&file, &mut byte, 0).expect("a byte");
    assert_eq!(byte, [9]);
}

#[test]
fn pools_and_registered_files_have_all_their_bytes() {
    let there = |file: &dyn AsFd| 512 * fstat(file).expect("a file").st_blocks as u64;
    let pool = MemfdPool::new(LEN, HugePages::No).expect("a pool");
    let victim = AttackedPlane::new(patient(), pool.memory());
    assert!(there(&received(&victim)) >= LEN);
    // Of the owner itself, who left that to us.
    let holes = memory_file(LEN);
    let victim = AttackedPlane::new(patient(), Memory::MemFd { fd: holes.as_raw_fd(), len: LEN });
    assert!(there(&holes) >= LEN);
    drop(victim);
}

#[test]
fn a_source_of_holes_is_refused() {
    let victim = AttackedPlane::of_own_memory();
    let (socket, _segment) = victim.enter();
    // Much more than there is memory.
    let len = 1 << 44;
    let holes = memory_file(len);
    let local = ForgedRegion { base: 0, len, process: None, file: true };
    let (answer, _) = victim.open(&socket, local, Some(holes.as_fd()));
    let why = answer.why();
    assert!(why.contains("holes"), "{why}");
}
